"""Checks of the arguments of accumulator, wrapper and SplitLoss; each error message suggests a fix."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError, StateError, warn_user
from memkit._core.settings import Checker
from memkit._gradients.loss import Loss
from memkit.train.backward_steps import steps_in_backward
from memkit.train.gradients import as_list


def check_loss(loss: object, *, call: str = "GradientAccumulator.backward(loss)") -> None:
    """Check that a loss is a single number with its graph.

    Raises:
        InputTypeError: It is not a tensor.
        InputError: It has more than one element, or no graph.
    """
    if not isinstance(loss, torch.Tensor):
        raise InputTypeError(
            call,
            got=f"a {type(loss).__name__}",
            expected="the loss as a 0-dim tensor with its graph",
            fix="call backward(loss, count=n) instead of passing mk.Loss(...); n is the divisor of the mean."
            if isinstance(loss, (Loss, tuple))
            else "pass the loss itself, not loss.item().",
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise InputError(
            call,
            got=f"a tensor of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}",
            expected="a single number with its graph",
            fix="reduce the loss to its mean or sum, and compute it with gradients enabled and not detached.",
        )


def read_count(
    count: float | torch.Tensor, *, stay_on_device: bool, call: str = "GradientAccumulator.backward(loss, count=...)"
) -> float | torch.Tensor:
    """Check a micro-batch's weight, and convert it to a float unless it may stay on its device until the step.

    Raises:
        InputError: The weight is not a single finite number of zero or more.
    """
    if type(count) in {int, float} and 0 <= count < math.inf:  # fast path: called for each micro-batch
        return float(count)
    if isinstance(count, torch.Tensor) and count.numel() == 1 and stay_on_device:
        # Metal has no float64; float32 counts exactly up to 16 million.
        weight = count.detach().to(torch.float32 if count.device.type == "mps" else torch.float64).reshape(())
        return torch.where(weight >= 0, weight, math.nan)  # for `check_total`
    try:
        number = math.nan if isinstance(count, bool | str) else float(count)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        _refuse_weight(call, repr(count))
    return number


def check_total(total: float) -> None:
    """Check a group's total weight, when `read_count` could not read each weight.

    Raises:
        InputError: One of them was negative or not finite.
    """
    if not math.isfinite(total):
        _refuse_weight(
            "GradientAccumulator.backward(loss, count=...)", "a count on a device that is not a valid weight"
        )


def _refuse_weight(call: str, got: str) -> NoReturn:
    raise InputError(
        call,
        got=got,
        expected="a finite weight of zero or more: rows, valid tokens, or a sum of class weights",
        fix="pass the divisor of the mean loss, for example count=len(batch).",
    )


def check_weightless(loss: torch.Tensor) -> None:
    """Check the loss of a micro-batch with weight zero whose backward must still run."""
    if not bool(torch.isfinite(loss)):
        raise InputError(
            "GradientAccumulator.backward(loss, count=0)",
            got="a loss that is not finite, on sharded parameters: zero times its gradient is NaN",
            expected="a finite loss, as every rank must take part in the backward",
            fix="pass the sum instead of the mean: backward(loss_sum, count=0, reduction='sum').",
        )


def check_reduction(reduction: str, *, has_count: bool, needs_count: bool) -> None:
    """Check the loss reduction; a sum cannot become a mean without a count.

    Raises:
        InputError: The reduction is unknown, or a sum comes without the count that the objective needs.
    """
    if reduction not in {"mean", "sum"}:
        got, fix = repr(reduction), "say how the loss was reduced."
    elif reduction == "sum" and needs_count and not has_count:
        got, fix = "a sum without its count", "pass count=..., or build the accumulator with objective='sum'."
    else:
        return
    raise InputError(
        f"GradientAccumulator.backward(loss, reduction={reduction!r})",
        got=got,
        expected="reduction='mean', or reduction='sum' with the number of summed items as count",
        fix=fix,
    )


ACCUMULATOR = "GradientAccumulator"


def check_norm(max_grad_norm: object, *, call: str = ACCUMULATOR) -> None:
    """Check the gradient-clipping norm; an infinite one only measures."""
    if max_grad_norm is not None and max_grad_norm != math.inf:
        Checker(call).number("max_grad_norm", max_grad_norm, above=0, fix="pass None for no clipping.")


def list_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers as a list; each must be a torch optimizer that needs no closure."""
    check, optimizers = Checker(ACCUMULATOR), as_list(optimizer)
    if not optimizers:
        raise check.refuse("optimizer", optimizers, "at least one optimizer")
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise check.refuse("optimizer", each, "a torch optimizer or a list of them")
        closure = inspect.signature(each.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            name = type(each).__name__
            raise check.refuse(
                "optimizer", name, "an optimizer whose step() does not evaluate the loss again through a closure"
            )
        _check_prepared(each)
    check_steps_later(optimizers)
    return optimizers


def _check_prepared(optimizer: Optimizer) -> None:
    """Refuse an optimizer prepared by accelerate to unscale or skip steps: losses are scaled here."""
    if getattr(optimizer, "scaler", None) is not None:
        got, fix = "a loss scaler of its own", "Accelerator(mixed_precision='no') and precision='fp16-mixed' here"
    elif getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1) > 1:
        got, fix = (
            "steps that accelerate skips in order to accumulate gradients",
            "Accelerator(gradient_accumulation_steps=1)",
        )
    else:
        return
    raise ConfigError(
        f"{type(optimizer).__name__} of accelerate",
        got=got,
        expected="either accelerate or memkit to scale and accumulate, not both",
        fix=f"use {fix}; or keep accelerate's step, with SplitLoss and accelerator.backward(loss).",
    )


def check_steps_later(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that step in backward: their gradients cannot accumulate, and steps cannot be undone."""
    for each in optimizers:
        if steps_in_backward(each):
            rule = "an optimizer outside of step_in_backward, because gradients must accumulate"
            raise Checker(ACCUMULATOR).refuse("optimizer", type(each).__name__, rule)


def check_owner(model: nn.Module, optimizers: Sequence[Optimizer], *, call: str) -> None:
    """Refuse optimizers that hold no parameter of a model with trainable ones: no step would train it.

    One optimizer of several may belong to another module, such as a criterion with its own parameters.
    """
    held = {id(parameter) for each in optimizers for group in each.param_groups for parameter in group["params"]}
    if any(parameter.requires_grad for parameter in model.parameters()) and held.isdisjoint(
        map(id, model.parameters())
    ):
        name = type(optimizers[0]).__name__
        raise ConfigError(
            f"{call}(model, optimizer)",
            got=f"{name} over {len(held)} tensors, none of which is a parameter of the model",
            expected="an optimizer over parameters of this same model",
            fix="build it from the model as it is now, after wrapping or sharding: "
            f"{name}(model.parameters(), ...). To train only something else through this model, call "
            "model.requires_grad_(False) first.",
        )


def check_open(is_closed: bool, *, call: str) -> None:  # noqa: FBT001 - what is checked
    """Refuse a call after `close`: precision, hooks and communication between ranks are gone by then."""
    if is_closed:
        raise StateError(
            call,
            got="a call after close()",
            expected="steps before close()",
            fix="call close() after the last step, or build a new one to continue training.",
        )


def check_state(state: Mapping[str, Any], *, version: int, num_parameters: int) -> None:
    """Check that a state dict is an accumulator's over this many parameters."""
    gradients = state["gradients"] if state.get("version") == version else []
    if gradients is not None and len(gradients) != num_parameters:
        raise FileFormatError(
            "GradientAccumulator.load_state_dict(state)",
            got=f"version {state.get('version')!r} with {len(gradients)} gradients",
            expected=f"version {version} with the gradients of {num_parameters} parameters",
            fix="load the state into an accumulator over the same optimizers and parameters.",
        )


def refuse_lost_gradients(num_microbatches: int) -> NoReturn:
    """Refuse to continue a group whose gradients were zeroed."""
    raise StateError(
        "GradientAccumulator",
        got=f"no gradient left of the {num_microbatches} micro-batches of this group",
        expected="gradients that stay until step() returns True",
        fix="remove optimizer.zero_grad() from the loop: the accumulator zeroes the gradients itself.",
    )


def refuse_missing_gradients() -> NoReturn:
    """Refuse a step of shards that got no gradient from backward: nothing would be trained."""
    raise StateError(
        "GradientAccumulator, a step of sharded parameters",
        got="no gradient on any rank, from micro-batches whose weight is above zero",
        expected="gradients that fully_shard hands over in each backward",
        fix="restart from the last checkpoint if an earlier backward raised an error, from which fully_shard does "
        "not recover. Otherwise compute the loss from these parameters.",
    )


def warn_of_idle_step() -> None:
    """Warn that a step had no gradients though its group has nonzero weight."""
    warn_user(
        "GradientAccumulator.step: nothing was trained, as no parameter of the optimizer got a gradient from this "
        "group's losses. Compute the loss from these parameters; check whether they are all frozen "
        "(requires_grad=False), or whether the optimizer was built before the model's parameters were replaced."
    )


def warn_of_foreign_gradients() -> None:
    """Warn that gradients from another backward were present when a group began."""
    warn_user(
        "GradientAccumulator.backward: gradients that another backward() left on this optimizer's parameters were "
        "dropped at the start of the group. If they belong to the step, send their loss through "
        "accumulator.backward() too."
    )
