"""Gradient accumulation that equals the full batch, for any split, any remainder and any weights."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._errors import StateError
from memkit._protocols import Closing, GradScaler, Uncopied
from memkit._recovery.attempt import insist
from memkit._recovery.signals import deferred_signals
from memkit.train.checks import (
    check_choice,
    check_group,
    check_loss,
    check_norm,
    check_open,
    check_reduction,
    check_state,
    check_steps,
    check_total,
    check_weightless,
    list_optimizers,
    read_count,
    refuse,
    refuse_lost_gradients,
    refuse_missing_gradients,
    warn_of_foreign_gradients,
    warn_of_idle_step,
)
from memkit.train.divisors import WeightCheck
from memkit.train.gradients import (
    add_gradients,
    clear_gradients,
    forget_unscaling,
    has_accumulate_hooks,
    has_gradient,
    has_reentrant_checkpoint,
    list_parameters,
    multiply_gradients,
    narrow_gradients,
    run_backward,
    set_gradient,
    step_optimizers,
    widen_gradients,
)
from memkit.train.guard import StepGuard
from memkit.train.ranks import Ranks, Replicas, Shards, clip_gradients, find_ranks, widen_for_step

_VERSION = 1


def _do_all(actions: deque[Callable[[], object]]) -> None:
    """Call them in order; each is taken out before, so that none is called twice."""
    while actions:
        actions.popleft()()


class GradientAccumulator(Uncopied, Closing):
    """Accumulates micro-batches into one optimiser step with the full batch's gradient.

    The usual ``(loss / steps).backward()`` is right only when all micro-batches weigh the same. Here each micro-batch
    says what it weighs, the weighted sum accumulates, and one scale at the step divides by the weight that really came
    (deferred normalisation). So ragged tails, padding, class weights and short last groups are exact, and nothing has
    to be known in advance.

    Memory cost: none beyond the plain loop's gradients; between ranks, one bucket of 25 MiB. Time cost: one in-place
    multiplication of the gradients per optimiser step, none where the factor is one.

    Args:
        optimizer: One optimiser, or several that step together (sharing ``scaler``, clipped jointly).
        steps: Micro-batches per optimiser step.
        max_grad_norm: Clip the gradient's total norm to this, after normalisation and unscaling.
        scaler: A `torch.amp.GradScaler`. Order per step: unscale, clip, step each optimiser, update once. Give each
            accumulator a scaler of its own.
        model: The model as wrapped by DistributedDataParallel (or several). Then no rank communicates in forward or
            backward, and `step` exchanges one explicit sum; ranks may have different numbers of batches. Parameters
            sharded by ``fully_shard`` are recognised by themselves.
        objective: ``"mean"``: the gradient of the weighted mean over the whole group. ``"sum"``: of the sum.
        gradients_of: ``"optimizer"``: `backward` adds to the gradients of this accumulator's parameters only, so a
            GAN's two accumulators never mix. ``"all"``: to every leaf of the graph. The step is not for leaves that
            are not its own: they keep the group's sum, divided by a power of two (`expect` makes it the mean).
        accumulate_dtype: ``torch.float32`` sums gradients of half-precision parameters in float32, for 2 bytes more
            from a group's second micro-batch on (with DistributedDataParallel or a scaler, in each step).
        guard_steps: Let an out-of-memory inside ``optimizer.step()`` leave each parameter and its state whole, and
            go on (``docs/optimizer-step.md``).

        check_weights: Warn once where the micro-batches' losses were visibly divided by something that their counts do
            not follow (a short last micro-batch, padding), and where a batch normalization sees each by itself.

    Attributes:
        num_microbatches: Micro-batches in the group that is under way.
        num_steps: Optimiser steps that really happened.
        is_torn: An error stopped a backward in the middle; the group can only be discarded.
        grad_norm: Total gradient norm before clipping at the last step, a 0-dim tensor; None without clipping.

    Raises:
        ConfigError: A setting is wrong: ``steps`` below 1, an optimiser that needs a closure, a scaler over float16
            parameters, a half-precision ``accumulate_dtype``.

    Source: the deferred normalisation of torchtune's recipes, extended to any weight.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> acc = mk.GradientAccumulator(optimizer, steps=2)
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
        steps: int = 1,
        *,
        max_grad_norm: float | None = None,
        scaler: GradScaler | None = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
        objective: Literal["mean", "sum"] = "mean",
        gradients_of: Literal["optimizer", "all"] = "optimizer",
        accumulate_dtype: torch.dtype | None = None,
        guard_steps: bool = False,
        check_weights: bool = True,
    ) -> None:
        self._optimizers = list_optimizers(optimizer)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._parameters = list_parameters(self._optimizers)
        check_steps(steps)
        check_choice("objective", objective, ("mean", "sum"))
        check_choice("gradients_of", gradients_of, ("optimizer", "all"))
        check_choice("accumulate_dtype", accumulate_dtype, (None, torch.float32))
        check_norm(max_grad_norm)
        if self._scaler and accumulate_dtype is None and any(p.dtype == torch.float16 for p in self._parameters):
            refuse("scaler", "a scaler over float16 parameters", "float32 parameters or accumulate_dtype=torch.float32")
        self._steps, self._max_grad_norm, self._objective = steps, max_grad_norm, objective
        self._accumulate_dtype = accumulate_dtype
        self._guard = StepGuard(self._optimizers) if guard_steps else None
        self._ranks: Ranks | None = find_ranks(model, self._parameters)
        # None: the first graph will tell. A sharded parameter is not the tensor in the graph; nothing can stop at it.
        may_stop = gradients_of == "optimizer" and self.shards is None
        self._only_own: bool | None = None if may_stop else False
        # The sum is kept divided by this, so that it is about as large as the mean: half precision would overflow. A
        # power of two, which rounds nothing, from the first weight that comes; or what `expect` was told.
        self._predivisor: float | None = None
        self._count: float | torch.Tensor = 0.0
        self._weights = WeightCheck() if check_weights and objective == "mean" else None
        self._has_gradients = False
        self.is_torn = self._is_closed = self._has_leftovers = False
        self.num_microbatches = 0
        self.num_steps = 0
        self.grad_norm: torch.Tensor | None = None

    @property
    def steps(self) -> int:
        """Micro-batches per optimiser step; may be changed between groups."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        check_steps(steps)
        if self.num_microbatches:
            raise StateError(
                f"accumulator.steps = {steps}",
                got=f"a group with {self.num_microbatches} of {self._steps} micro-batches under way",
                expected="a change between two groups",
                fix="change it right after step() returned True, or call flush() first.",
            )
        self._steps = steps

    @property
    def num_ranks(self) -> int:
        """Processes that share the gradient."""
        return 1 if self._ranks is None else self._ranks.num_ranks

    @property
    def shards(self) -> Shards | None:
        """The ranks where the parameters are sharded over them."""
        return self._ranks if isinstance(self._ranks, Shards) else None

    def backward(
        self,
        loss: torch.Tensor,
        count: float | torch.Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        retain_graph: bool = False,
        all_or_nothing: bool = False,
    ) -> None:
        """Add one micro-batch's gradient to the group.

        Args:
            loss: 0-dim loss of the micro-batch, with its graph.
            count: What the mean was divided by: rows, valid tokens, or a sum of class weights. Defaults to 1: all
                weigh the same. With 0 the micro-batch contributes exactly nothing, even where its mean is NaN. A
                tensor on an accelerator is read, which waits for it; with ``reduction="sum"`` only at the step.
            reduction: ``"mean"``: ``loss`` is the mean over ``count``. ``"sum"``: ``loss`` is the sum over ``count``.
            retain_graph: As in `torch.Tensor.backward`.
            all_or_nothing: Compute the whole gradient before any of it is added (one more set of gradients): an error
                in the middle then leaves the group as it was, and not `is_torn`. Ignored where it is not possible:
                sharded parameters, ``gradients_of="all"``, reentrant checkpoints, post-accumulate-grad hooks.

        Raises:
            InputError: The loss is not a scalar with a graph, or ``count`` is negative, not finite or missing.
            StateError: The group's gradients are gone (somebody called ``optimizer.zero_grad()``) or torn.
        """
        check_loss(loss)
        check_reduction(reduction, has_count=count is not None, needs_count=self._objective == "mean")
        on_device = reduction == "sum" and self._predivisor is not None
        weight_sum = read_count(1.0 if count is None else count, stay_on_device=on_device)
        self._open_group()
        if self._predivisor is None:
            self._predivisor = self._choose_predivisor(weight_sum)
        weight = 0.0 if isinstance(weight_sum, float) and weight_sum == 0 else 1.0
        if reduction == "mean":
            weight = float(weight_sum)
        note = None if self._weights is None else self._weights.read(loss, weight_sum)
        if (weight and self._parameters) or self.shards:  # the other shards wait for this rank's backward
            weight /= self._predivisor or 1.0
            self._backward(loss, weight, retain_graph=retain_graph, all_or_nothing=all_or_nothing)
        self._count = self._count + weight_sum
        self.num_microbatches += 1
        self.is_torn = False  # only now: between the gradient and its weight an interrupt would mix
        if note is not None and self._weights is not None:
            self._weights.add(note)

    def expect(self, count: float) -> None:
        """Say, between two groups, what the next one will weigh if that is known: its step need not normalise then."""
        if self.num_microbatches == 0 and count > 0 and self.shards is None:
            self._predivisor = float(count)

    def agree_on_weight(self, count: float) -> None:
        """Say, between two groups, what a micro-batch weighs; all shards must call it, with any finite weights."""
        self._predivisor = self._choose_predivisor(count) or 1.0

    def step(self) -> bool:
        """Step the optimisers if the group is complete; call it after every `backward`.

        Returns:
            True when an optimiser really stepped: not inside a group, not when the scaler found an infinity or the
            group weighed nothing. After a complete group the gradients are gone either way.
        """
        return self.finish() if self.num_microbatches >= self._steps else False

    def finish(self, then: Iterable[Callable[[], object]] = ()) -> bool:
        """Step with the group as it is, complete or not; under DDP all ranks must call it together.

        Args:
            then: What belongs to the step (a schedule, a running average), called in order where an optimizer really
                stepped. Ctrl-C waits for its end.

        Returns:
            True when an optimiser really stepped.
        """
        return self._finish(last=False, then=then)[0]

    def discard(self) -> None:
        """Drop the group that is under way, with its gradients."""
        self._count, self.num_microbatches, self._has_gradients, self.is_torn = 0.0, 0, False, False
        clear_gradients(self._parameters, self._accumulate_dtype)
        self._has_leftovers = False
        if self._weights is not None:
            self._weights.discard()

    def flush(self) -> bool:
        """Step with the incomplete last group, exactly weighted; does nothing where none is under way.

        Under DDP every rank must call it at the end of its data. A rank that ran out of data first waits here and takes
        part, with weight zero, in the steps of the others.

        Returns:
            True when an optimiser really stepped.
        """
        return any(list(self.last_steps()))

    def last_steps(self, then: Iterable[Callable[[], object]] = ()) -> Iterator[bool]:
        """Do what `flush` does step by step; yield for each whether an optimizer really stepped, with `then` done."""
        goes_on = isinstance(self._ranks, Replicas) or self.num_microbatches > 0
        while goes_on:
            stepped, everybody_is_here = self._finish(last=True, then=then)
            goes_on = not everybody_is_here and isinstance(self._ranks, Replicas)
            yield stepped

    def give_up(self) -> None:
        """Tell the other replicas, who wait at their step, that this rank has run out of memory for good."""
        if isinstance(self._ranks, Replicas):
            self._ranks.give_up(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return plain types and, in the middle of a group, its gradients so far: save them before the next step."""
        return {
            "version": _VERSION,
            "predivisor": self._predivisor,
            "count": float(self._count),
            "num_microbatches": self.num_microbatches,
            "num_steps": self.num_steps,
            "gradients": [p.grad for p in self._parameters] if self._has_gradients else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next `backward` goes on in the same group, bit for bit.

        Raises:
            FileFormatError: Another version, or gradients of another set of parameters.
        """
        check_state(state, version=_VERSION, num_parameters=len(self._parameters))
        self.discard()
        self._predivisor = state["predivisor"]
        self._count = state["count"]
        self.num_microbatches = state["num_microbatches"]
        self.num_steps = state["num_steps"]
        self._has_gradients = state["gradients"] is not None
        for parameter, gradient in zip(self._parameters, state["gradients"] or (), strict=self._has_gradients):
            dtype = None if self._accumulate_dtype else parameter.grad_dtype  # None keeps the state's
            moved = None if gradient is None else gradient.to(parameter.device, dtype, copy=True)
            set_gradient(parameter, moved)

    def close(self) -> None:
        """Leave model and parameters as they were found: DDP synchronises in backward, gradients have their dtype."""
        if isinstance(self._ranks, Replicas):
            self._ranks.close()
        narrow_gradients(self._parameters, self._accumulate_dtype)
        self._is_closed = True

    def _backward(self, loss: torch.Tensor, weight: float, *, retain_graph: bool, all_or_nothing: bool) -> None:
        if not weight:
            check_weightless(loss)
        if self._only_own is None:
            self._only_own = not has_reentrant_checkpoint(loss)
        scaled = self._scaler.scale(loss) if self._scaler else loss
        root = torch.full_like(scaled, weight)
        if all_or_nothing and self._only_own and not has_accumulate_hooks(self._parameters):
            gradients = torch.autograd.grad(
                scaled, self._parameters, root, retain_graph=retain_graph, allow_unused=True
            )
            self.is_torn = True
            add_gradients(self._parameters, gradients)
        else:
            self.is_torn = True
            run_backward(scaled, root, self._parameters if self._only_own else (), retain_graph=retain_graph)
        self._has_gradients = any(parameter.grad is not None for parameter in self._parameters)  # else not its loss

    def _open_group(self) -> None:
        """Before a group's first backward see that no foreign gradient is there; before a later one, that ours are."""
        self._check_group()
        if self.num_microbatches == 0:
            self._parameters = list_parameters(self._optimizers)  # a parameter group may have been added
            if any(parameter.grad is not None for parameter in self._parameters):
                if not self._has_leftovers:
                    warn_of_foreign_gradients()
                clear_gradients(self._parameters, self._accumulate_dtype)
            self._has_leftovers = True  # until they are cleared: an interrupt may come before
        else:  # a parameter's first gradient has its own dtype: no sum yet, and fully_shard gives it in no other
            widen_gradients(self._parameters, self._accumulate_dtype)

    def _check_group(self) -> None:
        check_open(self._is_closed, call="GradientAccumulator")
        check_group(self._optimizers, is_torn=self.is_torn)
        if self._has_gradients and all(parameter.grad is None for parameter in self._parameters):
            refuse_lost_gradients(self.num_microbatches)

    def _finish(self, *, last: bool, then: Iterable[Callable[[], object]]) -> tuple[bool, bool]:
        """End the group on all ranks: (an optimizer really stepped, all ranks are in `flush`).

        Args:
            last: This rank is in `flush`.
            then: What belongs to a step, called in order where an optimizer really stepped. Ctrl-C waits for its end.
        """
        self._check_group()
        total, present, everybody_is_here, num_steps = float(self._count), list[bool](), last, self.num_steps
        try:
            if self.num_microbatches > 1 or self._scaler or isinstance(self._ranks, Replicas):
                widen_for_step(self._parameters, self._accumulate_dtype, self._ranks)
            if self._ranks is not None:
                total, present, everybody_is_here = self._ranks.agree(self._parameters, total, is_last=last)
            check_total(total)
            if total > 0:
                if self._weights is not None:
                    self._weights.end_group()
                if self.shards and not any(present):
                    refuse_missing_gradients()
                self._normalize(total)
                if isinstance(self._ranks, Replicas):
                    self._ranks.sum_gradients(self._parameters, present)
                    self._ranks.broadcast_buffers()
                self._step_optimizers(then)
        finally:
            self.discard()
            if self._scaler:
                forget_unscaling(self._scaler, self._optimizers)
        return self.num_steps > num_steps, everybody_is_here

    def _normalize(self, total: float) -> None:
        """Turn the accumulated sum into the group's mean (or sum)."""
        factor = (self._predivisor or 1.0) / (total if self._objective == "mean" else 1.0)
        if isinstance(self._ranks, Shards):
            factor *= self._ranks.num_ranks  # each backward has averaged over the ranks
        insist(lambda: multiply_gradients(self._parameters, factor), "normalising the gradients")

    def _step_optimizers(self, then: Iterable[Callable[[], object]]) -> None:
        active = [each for each in self._optimizers if has_gradient(each)]
        step = functools.partial(step_optimizers, active, self._scaler)
        if not active:
            warn_of_idle_step()
        if self._scaler:
            for optimizer in active:
                insist(functools.partial(self._scaler.unscale_, optimizer), "unscaling the gradients")
        if self._max_grad_norm is not None:
            self.grad_norm = clip_gradients(self._parameters, self._max_grad_norm, self.shards)
        narrow_gradients(self._parameters, self._accumulate_dtype)
        count_step = functools.partial(setattr, self, "num_steps", self.num_steps + 1)  # no line in it to interrupt
        todo: deque[Callable[[], object]] = deque((count_step, *then))
        if self._guard:
            self._guard.forget()
        with deferred_signals():
            stepped = False
            try:
                try:
                    stepped = self._guard.run(step) if self._guard else step()
                finally:
                    if stepped or (self._guard is not None and self._guard.has_stepped):
                        _do_all(todo)
            finally:  # again, where an interrupt came on the way: what is done is not done again
                if stepped or (self._guard is not None and self._guard.has_stepped):
                    _do_all(todo)

    def _choose_predivisor(self, count: float | torch.Tensor) -> float | None:
        expected = float(count) * self._steps
        if isinstance(self._ranks, Shards):  # the ranks' sums are mixed in each backward, so they must agree
            expected = self._ranks.max([expected])[0]
        return 2.0 ** math.ceil(math.log2(expected)) if expected > 0 else None
