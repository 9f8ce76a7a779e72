"""Checks of the arguments of accumulator, wrapper and SplitLoss; each error message suggests a fix."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch

from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError, StateError, warn_user
from memkit._core.printable import short
from memkit._core.settings import Checker, check_version
from memkit._gradients.loss import Loss, refuse_complex
from memkit._recovery.attempt import Done, unless_failed


@dataclass(frozen=True, slots=True)
class Caller:
    """The object that accumulates gradients, as messages name it.

    Attributes:
        kind: Its class, which is also its constructor.
        name: What its users call it.
        others: Its further required arguments, as they follow the optimizer in a call.
    """

    kind: str
    name: str
    others: str = ""


# In torch's messages:
_SPENT = "backward through the graph a second time"
_NO_HOOKS = "don't yet support saved tensor hooks"
ACCUMULATOR = Caller("GradientAccumulator", "accumulator")
WRAPPER = Caller("MemoryEfficientTrainingWrapper", "trainer")


def warn_of_no_rows(call: str, effect: str) -> None:
    """Warn of a batch without rows, and say what comes of it."""
    warn_user(
        f"{call}: the batch has no rows: {effect}, and the mean over its rows is NaN. Way out: write "
        "`if len(x):` before the step, or find out why the loader makes empty batches."
    )


def check_loss(loss: object, *, call: str, count: object = None) -> None:
    """Check that a loss is a single number with its graph; with count 0 it may be a constant, which is skipped.

    Raises:
        InputTypeError: It is not a tensor.
        InputError: It has more than one element, is complex, or has no graph.
    """
    if not isinstance(loss, torch.Tensor):
        raise InputTypeError(
            call,
            got=f"a {type(loss).__name__}",
            expected="the loss as a 0-dim tensor with its graph",
            fix="call backward(loss, count=n) instead of passing mk.Loss(...); n is the divisor of the mean."
            if isinstance(loss, (Loss, tuple))
            else "add up the losses first: loss = sum(losses.values())."
            if isinstance(loss, Mapping)
            else "pass the loss itself, not loss.item().",
        )
    if loss.is_complex():
        refuse_complex(loss, call=call)
    is_number = isinstance(count, int | float) or (isinstance(count, torch.Tensor) and count.numel() == 1)
    is_nothing = not loss.requires_grad and is_number and bool(count == 0)
    if loss.numel() != 1 or not (loss.requires_grad or is_nothing):
        raise InputError(
            call,
            got=f"a tensor of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}",
            expected="a single number with its graph",
            fix="reduce the loss to its mean or sum, and compute it with gradients enabled and not detached; a "
            "constant, for a part in which nothing counts, goes with count=0.",
        )


def check_spent_graph(error: RuntimeError, *, call: str, is_in_loop: bool = False) -> None:
    """Explain an error of a graph that an earlier backward freed, such as one that the micro-batches share.

    Args:
        error: What the loss or its backward raised; any other error is left to the caller.
        call: The user's call, for the message.
        is_in_loop: Whether the user's own loop computes the loss.

    Raises:
        StateError: It is such an error.
    """
    if _SPENT not in str(error):
        return
    what = (
        "a loss whose graph another backward() has used already: that of an earlier micro-batch, if the model carries "
        "tensors from call to call, or an inner one"
    )
    carried = (
        "reset what the model carries, such as the membranes of a spiking network, before its first call for each "
        "micro-batch"
    )
    if is_in_loop:
        raise StateError(
            call,
            got=what,
            expected="a loss computed inside `with attempt as micro:` from the model and the micro-batch",
            fix=f"{carried}; compute there everything that has gradients: "
            "`trainer.backward(criterion(model(micro[0]), micro[1]))`.",
        ) from error
    raise StateError(
        call,
        got=what,
        expected="a loss that loss_fn computes from the model and its micro-batch, and returns",
        fix=f"{carried}, in loss_fn; remove loss.backward() from loss_fn, and compute inside loss_fn everything that "
        "has gradients: `return criterion(model(batch[0]), batch[1])`.",
    ) from error


def is_refused_transform(error: BaseException | None) -> bool:
    """Return whether an error is that of `torch.func.grad`, or of another transform, within saved tensor hooks."""
    return isinstance(error, Exception) and (_NO_HOOKS in str(error) or is_refused_transform(error.__cause__))


def check_transforms(error: RuntimeError, *, call: str) -> None:
    """Explain an error of torch, which runs no transform that takes gradients within saved tensor hooks.

    Args:
        error: What was raised within the hooks; any other error is left to the caller.
        call: The user's call that sets the hooks, for the message.

    Raises:
        ConfigError: It is such an error.
    """
    if not is_refused_transform(error):
        return
    raise ConfigError(
        call,
        got="a loss or a block that calls torch.func.grad, or another transform of functions: torch does not run these "
        "within its saved tensor hooks, by which tensors are recomputed or offloaded",
        expected="gradients by torch.autograd inside, or no such hooks around",
        fix="leave out `with offload_activations(...)`, or write MemoryEfficientTrainingWrapper(model, optimizer) "
        "without checkpoint=, saved_tensors= and offload=; or compute the inner gradients with "
        "torch.autograd.grad(loss, parameters, create_graph=True).",
    ) from error


def read_count(count: float | torch.Tensor, *, stay_on_device: bool, call: str) -> float | torch.Tensor:
    """Check a micro-batch's weight, and convert it to a float unless it may stay on its device until the step.

    Raises:
        InputError: The weight is not a single finite number of zero or more.
    """
    if type(count) in {int, float} and 0 <= count <= sys.float_info.max:  # fast path: called for each micro-batch
        return float(count)
    if isinstance(count, torch.Tensor) and count.numel() == 1 and stay_on_device:
        # Metal has no float64; float32 counts exactly up to 16 million.
        weight = count.detach().to(torch.float32 if count.device.type == "mps" else torch.float64).reshape(())
        return torch.where(weight >= 0, weight, math.nan)  # for `refuse_total`
    number = math.nan
    if not isinstance(count, bool | str):
        outcome = unless_failed((TypeError, ValueError, RuntimeError, OverflowError), float, count)
        number = outcome.result if isinstance(outcome, Done) else math.nan
    if isinstance(count, torch.Tensor) and count.numel() != 1:
        raise InputError(
            call,
            got=f"a tensor of shape {tuple(count.shape)} as the count",
            expected="the divisor of the mean, a single number",
            fix="add up the entries: count=mask.sum().",
        )
    if not 0 <= number < math.inf:
        _refuse_weight(call, short(count))
    return number


def refuse_total(caller: Caller) -> NoReturn:
    """Refuse a group's total weight that is not finite, when `read_count` could not read each weight.

    Raises:
        InputError: Always: one of them was negative or not finite.
    """
    _refuse_weight(f"a step of {caller.kind}", "a count on a device that is not a valid weight")


def _refuse_weight(call: str, got: str) -> NoReturn:
    raise InputError(
        call,
        got=got,
        expected="a finite weight of zero or more: rows, valid tokens, or a sum of class weights",
        fix="pass the divisor of the mean loss, for example count=len(batch).",
    )


def check_weightless(loss: torch.Tensor, caller: Caller) -> None:
    """Check the loss of a micro-batch with weight zero whose backward must still run."""
    if not bool(torch.isfinite(loss)):
        raise InputError(
            f"{caller.name}.backward(loss, count=0)",
            got="a loss that is not finite, on sharded parameters: zero times its gradient is NaN",
            expected="a finite loss, as every rank must take part in the backward",
            fix=f"write {caller.name}.backward(loss_sum, count=0, reduction='sum'), or return "
            "mk.Loss(sum=loss_sum, count=0) from loss_fn.",
        )


def check_reduction(reduction: object, *, has_count: bool, needs_count: bool, call: str, or_else: str = "") -> None:
    """Check the loss reduction; a sum cannot become a mean without a count.

    Args:
        reduction: The reduction.
        has_count: Whether a count came with it.
        needs_count: Whether a mean is wanted.
        call: The user's call.
        or_else: Another fix for a sum without a count.

    Raises:
        InputError: The reduction is unknown, or a sum comes without the count that the objective needs.
    """
    if reduction not in ("mean", "sum"):
        got = repr(reduction)
        fix = f"reduce the loss first: {call}(loss.mean(), count=len(x))."
    elif reduction == "sum" and needs_count and not has_count:
        got, fix = "a sum without its count", f"write {call}(loss, count=n, reduction='sum'){or_else}."
    else:
        return
    raise InputError(
        f"{call}(loss, reduction={reduction!r})",
        got=got,
        expected="reduction='mean', or reduction='sum' with the number of summed items as count",
        fix=fix,
    )


def check_norm(max_grad_norm: object, *, call: str) -> None:
    """Check the gradient-clipping norm; an infinite one only measures."""
    if max_grad_norm is not None and max_grad_norm != math.inf:
        Checker(call).number(
            "max_grad_norm", max_grad_norm, above=0, fix="pass max_grad_norm=1.0, or None for no clipping."
        )


def refuse_closed(call: str) -> NoReturn:
    """Refuse a call after `close`: precision, hooks and communication between ranks are gone by then."""
    raise StateError(
        call,
        got="a call after close()",
        expected="steps before close()",
        fix="call close() after the last step, or build a new one to continue training.",
    )


def check_own_state(state: object, caller: Caller, *, version: int, keys: tuple[str, ...]) -> None:
    """Check that a state has the version and the entries of a wrapper's or an accumulator's own.

    Raises:
        FileFormatError: The version is another one, or an entry is missing.
    """
    call = f"{caller.kind}.load_state_dict(state)"
    if isinstance(state, Mapping) and "version" not in state:
        shown = ", ".join(map(repr, list(state)[:3])) or "no keys"
        raise FileFormatError(
            call,
            got=f"a state with {shown}{' ...' if len(state) > 3 else ''}",
            expected=f"what {caller.name}.state_dict() returned",
            fix=f"write model.load_state_dict(...) for a model's state, and {caller.name}.load_state_dict(...) for the "
            f"result of {caller.name}.state_dict().",
        )
    check_version(call, state, version)
    absent = [key for key in keys if key not in state]  # type: ignore[operator]  # `check_version` refuses anything but a mapping
    if absent:
        raise FileFormatError(
            call,
            got=f"a state without {', '.join(absent)}",
            expected=f"what {caller.name}.state_dict() returned",
            fix=f"save it whole: torch.save({caller.name}.state_dict(), path).",
        )


def check_gradients(gradients: object, caller: Caller, *, num_parameters: int) -> None:
    """Check that a state's gradients belong to this many parameters.

    Raises:
        FileFormatError: The number of gradients differs.
    """
    if gradients is not None and not (isinstance(gradients, list) and len(gradients) == num_parameters):
        got = f"{len(gradients)} gradients" if isinstance(gradients, list) else f"a {type(gradients).__name__}"
        raise FileFormatError(
            f"{caller.kind}.load_state_dict(state)",
            got=got,
            expected=f"the gradients of {num_parameters} parameters",
            fix=f"load the state into a {caller.kind} over the same optimizers and parameters.",
        )


def refuse_torn(caller: Caller) -> NoReturn:
    """Refuse to continue after half a backward."""
    raise StateError(
        caller.kind,
        got="a group with an incomplete backward: an error interrupted it",
        expected="complete gradients",
        fix=f"call {caller.name}.discard() and run the group's micro-batches again.",
    )


def refuse_lost_gradients(num_microbatches: int, caller: Caller) -> NoReturn:
    """Refuse to continue a group whose gradients were zeroed."""
    raise StateError(
        caller.kind,
        got=f"no gradient left of the {num_microbatches} micro-batches of this group",
        expected=f"gradients that stay until the {caller.name} has stepped",
        fix=f"remove optimizer.zero_grad() from the loop and from the loss: the {caller.name} zeroes the gradients "
        "itself.",
    )


def refuse_changed_gradients(caller: Caller) -> NoReturn:
    """Refuse to continue a group whose gradients something else has changed between two micro-batches."""
    raise StateError(
        caller.kind,
        got="gradients that something else has changed since the last micro-batch of this group: zero_grad(), an "
        "inner backward(), or an operator in place",
        expected=f"gradients to which only the {caller.name} adds until it has stepped",
        fix=f"remove zero_grad() from the loop and from loss_fn: the {caller.name} zeroes the gradients itself; for a "
        "gradient inside loss_fn, write torch.autograd.grad(loss, inputs) in place of loss.backward().",
    )


def refuse_own_step(caller: Caller) -> NoReturn:
    """Refuse a step that the user's own code takes with the gradients of a group, which will step with them too."""
    raise StateError(
        "optimizer.step()",
        got=f"a call inside a group of the {caller.kind}, which steps with the same gradients once more",
        expected=f"steps that only the {caller.name} takes, until its group has ended",
        fix=f"remove optimizer.step() from the loop: {caller.name}.step() calls it; to give the group up, call "
        f"{caller.name}.discard() first.",
    )


def refuse_missing_gradients(caller: Caller) -> NoReturn:
    """Refuse a step of shards that got no gradient from backward: nothing would be trained."""
    raise StateError(
        f"{caller.kind}, a step of sharded parameters",
        got="no gradient on any rank, from micro-batches whose weight is above zero",
        expected="gradients that fully_shard hands over in each backward",
        fix="restart from the last checkpoint if an earlier backward raised an error, from which fully_shard does "
        "not recover. Otherwise compute the loss from these parameters.",
    )


def warn_of_idle_step(caller: Caller) -> None:
    """Warn that a step had no gradients though its group has nonzero weight."""
    warn_user(
        f"{caller.kind}: nothing was trained, as no parameter of the optimizer got a gradient from this "
        "group's losses. Compute the loss from these parameters; check whether they are all frozen "
        "(requires_grad=False), or whether the optimizer was built before the model's parameters were replaced."
    )


def warn_of_lost_sums(caller: Caller) -> None:
    """Warn that a group's sums have a gradient, but that nothing was counted."""
    warn_user(
        f"{caller.kind}: nothing was trained, as the counts of this group's losses add up to 0. Its losses are sums "
        "with a gradient, whose mean would be a division by zero. Way out, if such batches are to train: divide by a "
        "number that is never 0, such as the whole batch's max(1, n), passed along in the batch: return "
        "mk.Loss(sum=num_rows * total / max(1, n), count=len(rows)), where num_rows and n are the whole batch's."
    )


def warn_of_accumulate_hooks(caller: Caller) -> None:
    """Warn of hooks that see each micro-batch's sum so far."""
    warn_user(
        f"{caller.kind}: hooks that parameters have from register_post_accumulate_grad_hook run after every "
        "micro-batch, on the sum so far: what they change is not what they would change in the gradient of the whole "
        "batch. Way out, unless they only look: change gradients right before the step, by "
        "optimizer.register_step_pre_hook(...)."
    )


def warn_of_foreign_gradients(caller: Caller) -> None:
    """Warn that gradients from another backward were present when a group began."""
    warn_user(
        f"{caller.kind}: gradients that another backward() left on this optimizer's parameters were "
        "dropped at the start of the group. If they belong to the step, "
        + (
            "send their loss through accumulator.backward() too."
            if caller is ACCUMULATOR
            else "add their loss to the one that loss_fn returns, or that trainer.backward() gets."
        )
    )


def warn_of_own_backward(caller: Caller) -> None:
    """Warn that the gradients of a step come from another backward, so that it trains nothing."""
    warn_user(
        f"{caller.name}.step(): nothing is trained, as {caller.name}.backward() was not called since the last step; "
        "the gradients on the parameters come from another backward(). "
        f"Way out: write {caller.name}.backward(loss, count=len(x)) in place of loss.backward()."
    )
