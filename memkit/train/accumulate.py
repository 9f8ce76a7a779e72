"""Gradient accumulation that matches the full batch, for any split, any remainder and any weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._core.errors import InputTypeError, StateError
from memkit._core.protocols import Closing, Composed, GradScaler, SavedTogether, Uncopied
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit.train.checks import ACCUMULATOR, check_loss, check_reduction, read_count, warn_of_own_backward
from memkit.train.divisors import WeightCheck
from memkit.train.gradient_sum import GradientSum
from memkit.train.owners import numbered, refuse_trainer
from memkit.train.words import ACCUMULATOR_ABSENT, ACCUMULATOR_REWRITE, ACCUMULATOR_WORDS


@guided(
    words=ACCUMULATOR_WORDS,
    absent=ACCUMULATOR_ABSENT,
    methods=("backward", "step", "flush"),
    rewrite=ACCUMULATOR_REWRITE,
)
class GradientAccumulator(Uncopied, Closing, Composed):
    """Accumulates micro-batches into one optimizer step with the full batch's gradient.

    The usual ``(loss / steps).backward()`` is right only when all micro-batches weigh the same. Here each micro-batch
    comes with its weight, the weighted sum accumulates, and one scaling at the step divides by the total weight
    (deferred normalization). So ragged tails, padding, class weights and short last groups are exact, and nothing has
    to be known in advance.

    Memory cost: none beyond the plain loop's gradients; between ranks, one bucket of 25 MiB. Time cost: one in-place
    multiplication of the gradients per optimizer step, none where the factor is one.

    Args:
        optimizer: One optimizer, or several that step together (sharing ``scaler``, clipped jointly).
        accumulation_steps: Micro-batches per optimizer step.
        max_grad_norm: Clip the gradient's total norm to this, after normalization and unscaling.
        scaler: A `torch.amp.GradScaler`. Order per step: unscale, clip, step each optimizer, update once. Give each
            accumulator its own scaler.
        model: The model as wrapped by DistributedDataParallel (or several). Then no rank communicates in forward or
            backward, and `step` performs one explicit all-reduce; ranks may have different numbers of batches.
            Parameters sharded by ``fully_shard`` are detected automatically.
        objective: ``"mean"``: the gradient of the weighted mean over the whole group. ``"sum"``: of the sum.
        accumulate_dtype: ``torch.float32`` sums gradients of half-precision parameters in float32, at 2 extra bytes
            per element from a group's second micro-batch on (with DistributedDataParallel or a scaler, in each step).
        guard_steps: If ``optimizer.step()`` runs out of memory, keep each parameter consistent with its state, and
            continue the step (``docs/out-of-memory.md``).
        check_weights: Warn once if the micro-batches' losses were visibly divided by something other than their counts
            (a short last micro-batch, padding), if they are sums that came with a count as means, or if a batch
            normalization sees each micro-batch by itself. With ``objective="sum"`` only means with a count are checked.

    Raises:
        ConfigError: A setting is invalid: ``accumulation_steps`` below 1, an optimizer that needs a closure, a scaler
            over float16 parameters, a half-precision ``accumulate_dtype``.
        InputTypeError: ``optimizer`` is not a torch optimizer, or the call has arguments that do not exist.

    Source: the deferred normalization of torchtune's recipes, extended to any weight.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> acc = mk.GradientAccumulator(optimizer, accumulation_steps=2)
        >>> for rows in (5, 3, 1):                      # the last group is short: flush() weighs it exactly
        ...     loss = model(torch.ones(rows, 3)).pow(2).mean()
        ...     acc.backward(loss, count=rows)
        ...     print(acc.step())
        False
        True
        False
        >>> acc.flush()
        True
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        accumulation_steps: int = 1,
        *,
        max_grad_norm: float | None = None,
        scaler: GradScaler | None = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
        objective: Literal["mean", "sum"] = "mean",
        accumulate_dtype: torch.dtype | None = None,
        guard_steps: bool = False,
        check_weights: bool = True,
    ) -> None:
        self._accumulation_steps = _check_steps(accumulation_steps, optimizer)
        _check_model(model)
        self._objective = objective
        self._weights = WeightCheck(self._accumulation_steps, objective) if check_weights else None
        self._sum = GradientSum(
            optimizer,
            max_grad_norm=max_grad_norm,
            scaler=scaler,
            model=model,
            objective=objective,
            sum_dtype=accumulate_dtype,
            guard_steps=guard_steps,
            watches_steps=True,
            on_step=None if self._weights is None else self._weights.end_group,
            caller=ACCUMULATOR,
        )

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; may be changed between groups."""
        return self._accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, accumulation_steps: int) -> None:
        num_steps = _check_steps(accumulation_steps)
        if self.num_microbatches:
            raise StateError(
                f"accumulator.accumulation_steps = {num_steps}",
                got=f"a group with {self.num_microbatches} of {self._accumulation_steps} micro-batches under way",
                expected="a change between two groups",
                fix="change it right after step() returned True, or call flush() first.",
            )
        self._accumulation_steps = num_steps
        if self._weights is not None:
            self._weights.accumulation_steps = num_steps

    @property
    def num_microbatches(self) -> int:
        """Micro-batches in the current group."""
        return self._sum.num_microbatches

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps actually taken."""
        return self._sum.num_steps

    @property
    def is_torn(self) -> bool:
        """Whether an error interrupted a backward; the group can then only be discarded."""
        return self._sum.is_torn

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Total gradient norm before clipping at the last step, a 0-dim tensor; None without clipping."""
        return self._sum.grad_norm

    def backward(
        self,
        loss: torch.Tensor,
        count: float | torch.Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        retain_graph: bool = False,
        all_or_nothing: bool = False,
    ) -> None:
        """Add one micro-batch's gradient to the group; each call is a micro-batch, so add up its losses first.

        Only this accumulator's parameters get it, so a GAN's two accumulators never mix.

        Args:
            loss: 0-dim loss of the micro-batch, with its graph.
            count: The divisor of the mean: rows, valid tokens, or a sum of class weights. Defaults to 1: all
                micro-batches weigh the same. With 0 the micro-batch contributes exactly nothing, even if its mean is
                NaN. Reading a tensor on an accelerator synchronizes; with ``reduction="sum"`` only at the step.
            reduction: ``"mean"``: ``loss`` is the mean over ``count``. ``"sum"``: ``loss`` is the sum over ``count``.
            retain_graph: As in `torch.Tensor.backward`.
            all_or_nothing: Compute the whole gradient before adding any of it (one more set of gradients): an error
                in the middle then leaves the group unchanged, and not `is_torn`. Ignored where it is not possible:
                sharded parameters, reentrant checkpoints, post-accumulate-grad hooks.

        Raises:
            InputError: The loss is not a scalar with a graph, or ``count`` is negative, not finite or missing.
            StateError: The group's gradients are gone (``optimizer.zero_grad()`` was called) or torn.
        """
        check_loss(loss, call="accumulator.backward(loss)", count=None if self._sum.shards else count)
        check_reduction(
            reduction,
            has_count=count is not None,
            needs_count=self._objective == "mean",
            call="accumulator.backward",
            or_else=", or build the accumulator with objective='sum'",
        )
        on_device = reduction == "sum" and self._sum.predivisor is not None
        weight = read_count(
            1.0 if count is None else count, stay_on_device=on_device, call="accumulator.backward(loss, count=...)"
        )
        if not self.num_microbatches and self._weights is not None:
            self._weights.discard()
        note = None if self._weights is None else self._weights.read(loss, weight, is_sum=reduction == "sum")
        self._sum.add(
            loss,
            weight,
            reduction=reduction,
            expected=self._expected(weight),
            retain_graph=retain_graph,
            all_or_nothing=all_or_nothing,
            is_whole=self._accumulation_steps == 1,
            is_exact=True,
        )
        if note is not None and self._weights is not None:
            self._weights.add(note, has_count=count is not None)
        if self.num_microbatches == self._accumulation_steps and not self._sum.is_announced:
            self._sum.settle()

    def _expected(self, weight: float | torch.Tensor) -> float:
        """Return the group's weight if all of its micro-batches are like its first; 0 to keep the last group's.

        Nothing waits for a device to know it, and ranks need not agree once more.
        """
        is_first = self._sum.predivisor is None or not (self.num_microbatches or self._sum.shards)
        is_known = self._sum.predivisor is None or not isinstance(weight, torch.Tensor)
        return float(weight) * self._accumulation_steps if is_first and is_known else 0.0

    def expect(self, count: float) -> None:
        """Announce the next group's total weight, between two groups.

        Its step then need not normalize, and hooks in the graph see each gradient as the whole batch's backward does.
        """
        self._sum.expect(float(read_count(count, stay_on_device=False, call="accumulator.expect(count)")))

    def step(self) -> bool:
        """Step the optimizers if the group is complete; call it after every `backward`.

        Returns:
            True if an optimizer actually stepped; False inside a group, and when the scaler found an infinity or the
            group's weight is zero. After a complete group the gradients are gone either way.
        """
        if self.num_microbatches >= self._accumulation_steps:
            return self._sum.end()[0]
        if self._sum.has_foreign_gradients:
            warn_of_own_backward(ACCUMULATOR)
        return False

    def discard(self) -> None:
        """Drop the current group and its gradients."""
        self._sum.discard()

    def flush(self) -> bool:
        """Step with the incomplete last group, exactly weighted; does nothing if there is none.

        Under DDP every rank must call it at the end of its data. A rank that runs out of data first waits here and
        joins the other ranks' steps with weight zero.

        Returns:
            True if an optimizer actually stepped.
        """
        return self._sum.end_all()

    def __saved_together__(self) -> SavedTogether:
        scaler = self._sum.scaler
        objects = numbered("optimizer", self._sum.optimizers) | ({} if scaler is None else {"scaler": scaler})
        names = ", ".join(f"{name}={name}" for name in (*objects, "accumulator"))
        return SavedTogether(objects, f"state.save(step, model=model, {names})")

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain types, plus the gradients of an unfinished group: save it before the next step."""
        return self._sum.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next `backward` continues the same group, bit for bit.

        Raises:
            FileFormatError: The state has another version, or gradients of another set of parameters.
        """
        self._sum.load_state_dict(state)

    def close(self) -> None:
        """Restore model and parameters: DDP synchronizes in backward again, gradients get their own dtype back."""
        self._sum.close()


def _check_model(model: object) -> None:
    for each in model if isinstance(model, list | tuple) else [model]:
        if each is None or isinstance(each, nn.Module):
            continue
        call, expected = "GradientAccumulator(optimizer, model=...)", "an nn.Module, a list of them, or None"
        refuse_trainer(each, call=call, expected=expected)
        raise InputTypeError(
            call,
            got=f"a {type(each).__name__}",
            expected=expected,
            fix="write GradientAccumulator(optimizer, model=model).",
        )


def _check_steps(accumulation_steps: object, optimizer: object = None) -> int:
    if isinstance(accumulation_steps, Optimizer):
        number = optimizer if type(optimizer) is int else 1
        raise InputTypeError(
            ACCUMULATOR.kind,
            got=f"{type(optimizer).__name__} first and the optimizer second",
            expected="the optimizer first, then the number of micro-batches",
            fix=f"write GradientAccumulator(optimizer, accumulation_steps={number}"
            f"{', model=model' if isinstance(optimizer, nn.Module) else ''}).",
        )
    return Checker(ACCUMULATOR.kind).whole("accumulation_steps", accumulation_steps, 1)
