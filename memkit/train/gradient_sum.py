"""The weighted sum of micro-batches' gradients, and the optimizer step that ends it."""

from __future__ import annotations

import functools
import math
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._core.errors import ConfigError, InputTypeError, MemkitOutOfMemoryError
from memkit._core.printable import described
from memkit._core.protocols import GradScaler
from memkit._core.settings import Checker
from memkit._recovery.attempt import Caught, insist
from memkit._recovery.signals import are_plain, deferred_signals
from memkit._torch.graph import accumulate_gradients
from memkit._torch.optimizers import before_step
from memkit._torch.tensors import accumulate_hooks, gradient_dtype, gradient_marks, require_gradient_dtypes
from memkit.train.bystanders import Bystanders
from memkit.train.checks import (
    Caller,
    check_gradients,
    check_norm,
    check_own_state,
    check_weightless,
    refuse_changed_gradients,
    refuse_closed,
    refuse_lost_gradients,
    refuse_missing_gradients,
    refuse_own_step,
    refuse_torn,
    refuse_total,
    warn_of_accumulate_hooks,
    warn_of_foreign_gradients,
    warn_of_idle_step,
    warn_of_lost_sums,
)
from memkit.train.gradients import (
    add_gradients,
    clear_gradients,
    forget_unscaling,
    has_accumulate_hooks,
    has_gradient,
    has_reentrant_checkpoint,
    have_gradients,
    have_hooks_together,
    have_nonzero_gradients,
    list_parameters,
    multiply_gradients,
    narrow_gradients,
    set_gradient,
    step_optimizers,
    widen_gradients,
)
from memkit.train.guard import StepGuard
from memkit.train.owners import check_steps_later, constructor_call, list_optimizers
from memkit.train.ranks import Ranks, Replicas, Shards, clip_gradients, find_ranks, widen_for_step

_VERSION = 2
_HALF = (torch.float16, torch.bfloat16)
_MOST = 2.0**1023  # the largest power of two; if the weights' sum is more, `end` refuses it
_STATE = ("predivisor", "count", "num_microbatches", "num_steps", "factor", "gradients")
Weight = float | torch.Tensor
Actions = Sequence[Callable[[], object]]


class GradientSum:
    """Adds up weighted gradients in ``.grad``, and steps with their mean; the basis of accumulator and wrapper.

    Args:
        optimizer: One optimizer, or several that step together.
        max_grad_norm: Clip the gradient's total norm to this.
        scaler: A loss scaler.
        model: The model as wrapped for several ranks.
        objective: Whether to step with the weighted mean or with the sum.
        sum_dtype: ``torch.float32`` sums gradients of half-precision parameters in float32.
        guard_steps: Keep each parameter consistent with its state if ``optimizer.step()`` runs out of memory.
        watches_steps: Refuse a step of the user's own between two micro-batches.
        on_step: Called before a step whose gradients have nonzero weight.
        on_gradients: Called right before the optimizers step, when the gradients are final.
        caller: The object that the user works with, for messages.

    Attributes:
        optimizers: The optimizers, as a list.
        ranks: Ranks that share the gradient; None for a single process.
        shards: These if the parameters are sharded over them, else None.
        predivisor: The sum is kept divided by this, so that it is about as large as the mean and does not overflow in
            half precision. Derived from the first weight: the likely total, or a power of two near it, which adds no
            rounding; or set by `expect`.
        scaler: The loss scaler; None if there is none that is on.
        num_microbatches: Micro-batches in the sum.
        is_announced: Whether the sum's total weight was announced.
        num_steps: Number of optimizer steps actually taken.
        is_torn: Whether an error interrupted a backward; the sum can then only be discarded.
        grad_norm: Total gradient norm before clipping at the last step; None without clipping.
        num_step_ooms: Out-of-memory errors that the last step of the optimizers survived.

    Raises:
        ConfigError: A setting is invalid.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        max_grad_norm: float | None = None,
        scaler: GradScaler | None = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
        objective: Literal["mean", "sum"] = "mean",
        sum_dtype: torch.dtype | None = None,
        guard_steps: bool = False,
        watches_steps: bool = False,
        on_step: Callable[[], object] | None = None,
        on_gradients: Callable[[], object] | None = None,
        caller: Caller,
    ) -> None:
        self._caller = caller
        self.optimizers = list_optimizers(optimizer, caller)
        if scaler is not None and (isinstance(scaler, type) or not callable(getattr(scaler, "is_enabled", None))):
            raise InputTypeError(
                f"{caller.kind}(optimizer, scaler=...)",
                got=described(scaler),
                expected="a loss scaler, or None",
                fix=f"write {caller.kind}(optimizer, scaler=torch.amp.GradScaler()).",
            )
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._parameters = self._trainable = list_parameters(self.optimizers)
        check = Checker(caller.kind)
        check.choice("objective", objective, ("mean", "sum"), fix="pass objective='mean'.")
        check.choice("accumulate_dtype", sum_dtype, (None, torch.float32), fix="pass accumulate_dtype=torch.float32.")
        check_norm(max_grad_norm, call=caller.kind)
        if sum_dtype is not None and any(p.dtype in {torch.bfloat16, torch.float16} for p in self._parameters):
            require_gradient_dtypes("accumulate_dtype=torch.float32, or precision='bf16-true', which uses it")
        if self.scaler and sum_dtype is None and any(p.dtype == torch.float16 for p in self._parameters):
            raise ConfigError(
                f"{caller.kind}(optimizer, scaler=...)",
                got="a loss scaler over float16 parameters",
                expected="float32 parameters, in which scaled gradients do not overflow",
                fix="call model.float() first and compute in torch.autocast, or pass accumulate_dtype=torch.float32.",
            )
        if self.scaler:
            _refuse_complex(self._parameters, caller)
        self._max_grad_norm, self._objective, self._sum_dtype = max_grad_norm, objective, sum_dtype
        self._guard = StepGuard(self.optimizers) if guard_steps else None
        self.ranks: Ranks | None = find_ranks(model, self._parameters, caller)
        self.shards: Shards | None = self.ranks if isinstance(self.ranks, Shards) else None
        # None: decided by the first graph. A graph does not hold sharded parameters: a backward cannot stop at them.
        self._only_own: bool | None = None if self.shards is None else False
        self._bystanders: Bystanders | None = None
        self._models = [model] if isinstance(model, nn.Module) else list(model or ())  # for names
        self.predivisor: float | None = None
        self._count: Weight = 0.0
        self._has_gradients = self._has_seen_hooks = False
        self.is_torn = self._is_closed = self._has_leftovers = False
        self.num_microbatches = 0
        self.num_steps = 0
        self.grad_norm: torch.Tensor | None = None
        self.num_step_ooms = 0
        self._marks: list[tuple[int, int]] | None = None  # of the gradients, after the last micro-batch
        self._watches_steps = watches_steps
        self._first: Callable[[], torch.Tensor | None] = _no_gradient  # of the gradients, if steps are watched
        self._watches: list[Any] = []  # handles of the hooks that notice a step which is not this object's
        self.is_announced = False
        self._factor: float | None = None  # by which the gradients were normalized
        self._on_step, self._on_gradients = on_step, on_gradients

    @property
    def has_foreign_gradients(self) -> bool:
        """Whether the parameters have gradients although no micro-batch was added."""
        return self.num_microbatches == 0 and have_gradients(self._parameters)

    def add(
        self,
        loss: torch.Tensor,
        weight: Weight,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        expected: float = 0.0,
        retain_graph: bool = False,
        all_or_nothing: bool = False,
        is_whole: bool = False,
        is_exact: bool = False,
    ) -> None:
        """Add one micro-batch's gradient.

        Args:
            loss: 0-dim, with its graph; or a constant of weight zero, but on sharded parameters.
            weight: The micro-batch's weight.
            reduction: Whether ``loss`` is the mean or the sum over its weight.
            expected: The sum's weight that this micro-batch suggests; 0 keeps what an earlier one did.
            retain_graph: As in `torch.Tensor.backward`.
            all_or_nothing: Compute the whole gradient before adding any of it, where that is possible.
            is_whole: Whether it is a group by itself.
            is_exact: Whether ``expected`` may well be the sum's weight: it is then taken as it is.
        """
        self._open()
        # A constant adds nothing. A mean of nothing may be NaN; a sum may hold more than what is counted, such as that
        # of all anchors of images without objects.
        factor = float(weight) if reduction == "mean" else float(loss.requires_grad)
        if self.predivisor is None or (expected > 0 and not self.is_announced):
            # In half precision a third would be rounded to three digits; a power of two is not.
            is_exact = is_exact and self.shards is None and expected > 0 and loss.dtype not in _HALF
            predivisor = self._divisor(expected) if is_exact else self._power_of_two(expected)
            self.predivisor = predivisor or (1.0 if factor else None)
        if (factor and self._trainable) or self.shards:  # the other shards wait for this rank's backward
            factor /= self.predivisor or 1.0
            self._backward(loss, factor, retain_graph=retain_graph, all_or_nothing=all_or_nothing)
        self._count = self._count + weight
        self.num_microbatches += 1
        self._marks = None if is_whole else gradient_marks(self._parameters)
        if self._watches:
            self._note_first()
        self.is_torn = False  # only now: an interrupt before its weight is counted leaves the sum torn

    def expect(self, count: float) -> None:
        """Announce the next sum's total weight, between two sums; its step then need not normalize."""
        if self.num_microbatches == 0 and count > 0 and self.shards is None:
            self.predivisor, self.is_announced = float(count), True

    def agree_on_weight(self, count: float) -> None:
        """Announce the next sum's weight between two sums; all shards must call it, with any finite weights."""
        self.predivisor = self._power_of_two(count) or 1.0

    def settle(self) -> None:
        """Normalize the gradients after a group's last micro-batch: code before the step sees those of the batch.

        Over ranks they are only known in the step.
        """
        if self.ranks is not None or self.shards is not None or not self.num_microbatches or self.is_torn:
            return
        total = self._count = float(self._count)
        factor = (self.predivisor or 1.0) / (total if self._objective == "mean" else 1.0) if total > 0 else 1.0
        if math.isfinite(total) and factor != 1.0:
            if self.num_microbatches > 1 or self.scaler:
                widen_for_step(self._parameters, self._sum_dtype, self.ranks)
            self._multiply(factor)
            self._factor, self._marks = factor, gradient_marks(self._parameters)
            if self._watches:
                self._note_first()

    def _unsettle(self, factor: float) -> None:
        """Turn normalized gradients back into the sum, for another micro-batch."""
        self._multiply(1 / factor)
        self._factor, self._marks = None, gradient_marks(self._parameters)

    def end(self, then: Actions = (), *, is_last: bool = False) -> tuple[bool, bool]:
        """Step with the mean, and start a new sum; all ranks must call it together.

        Args:
            then: Actions that belong to the step (a scheduler, a running average), called in order if an optimizer
                actually stepped. Ctrl-C waits for their end.
            is_last: This rank has no more data.

        Returns:
            Whether an optimizer actually stepped, and whether no rank has more data.
        """
        self._check()
        self._check_lost()
        num_steps = self.num_steps
        try:
            all_are_done = self._end(then, is_last=is_last)
        finally:
            self.discard()
            if self.scaler:
                forget_unscaling(self.scaler, self.optimizers)
        return self.num_steps > num_steps, all_are_done

    def end_all(self, then: Actions = (), on_joined: Callable[[], None] = lambda: None) -> bool:
        """End the current sum, if any; then join the steps of replicas that have more data.

        Args:
            then: As for `end`.
            on_joined: Called after each step of another replica, also one that the scaler skipped.

        Returns:
            Whether an optimizer actually stepped.
        """
        has_stepped, goes_on = False, isinstance(self.ranks, Replicas) or self.num_microbatches > 0
        if self.ranks is not None:
            self.ranks.before_forwards()
        while goes_on:
            stepped, all_are_done = self.end(then, is_last=True)
            has_stepped = has_stepped or stepped
            goes_on = not all_are_done and isinstance(self.ranks, Replicas)
            if goes_on:
                on_joined()
        return has_stepped

    def discard(self) -> None:
        """Drop the sum."""
        self._count, self.num_microbatches, self._has_gradients, self.is_torn = 0.0, 0, False, False
        self._marks = self._factor = None
        self.is_announced = False
        if self._watches:
            self._unwatch()
        clear_gradients(self._parameters, self._sum_dtype)
        self._has_leftovers = False

    def give_up(self, *, is_out: bool) -> None:
        """Tell the other replicas, which wait at their step, that this rank will not reach it."""
        if isinstance(self.ranks, Replicas):
            self.ranks.give_up(self._parameters, is_out=is_out)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain types plus the gradients so far, as they are: save it before the next step."""
        return {
            "version": _VERSION,
            "predivisor": self.predivisor,
            "count": float(self._count),
            "num_microbatches": self.num_microbatches,
            "num_steps": self.num_steps,
            "factor": self._factor,
            "gradients": [p.grad for p in self._parameters] if self._has_gradients else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next `add` continues the same sum, bit for bit.

        Raises:
            FileFormatError: The state has another version, or gradients of another set of parameters.
        """
        check_own_state(state, self._caller, version=_VERSION, keys=_STATE)
        check_gradients(state["gradients"], self._caller, num_parameters=len(self._parameters))
        self.discard()
        self.predivisor = state["predivisor"]
        self._count = state["count"]
        self.num_microbatches = state["num_microbatches"]
        self.num_steps = state["num_steps"]
        self._factor = state["factor"]
        self._has_gradients = state["gradients"] is not None
        for parameter, gradient in zip(self._parameters, state["gradients"] or (), strict=self._has_gradients):
            dtype = None if self._sum_dtype else gradient_dtype(parameter)  # None keeps the state's
            moved = None if gradient is None else gradient.to(parameter.device, dtype, copy=True)
            set_gradient(parameter, moved)
        if self.num_microbatches and self._watches_steps:
            self._watch()
            self._note_first()

    def close(self) -> None:
        """Restore model and parameters: DDP synchronizes in backward again, gradients get their own dtype back."""
        if isinstance(self.ranks, Replicas):
            self.ranks.close()
        narrow_gradients(self._parameters, self._sum_dtype)
        self._unwatch()
        if self._bystanders is not None:
            self._bystanders.close()
        self._is_closed = True

    def _watch(self) -> None:
        """Refuse a step of the optimizers that the user's own code takes before the group's."""
        self._unwatch()
        hook = functools.partial(_before_step, weakref.ref(self))
        self._watches = [before_step(each, hook) for each in self.optimizers]

    def _unwatch(self) -> None:
        for each in filter(None, self._watches):
            each.remove()
        self._watches, self._first = [], _no_gradient

    def _note_first(self) -> None:
        """Remember the sum's first gradient by reference: once it is gone, another one may get its `id`."""
        first = self._first_gradient()
        self._first = _no_gradient if first is None else weakref.ref(first)

    def _first_gradient(self) -> torch.Tensor | None:
        return next((each.grad for each in self._parameters if each.grad is not None), None)

    def check_own_step(self) -> None:
        """Refuse a step with an unfinished sum; not one with other gradients, after the group was given up."""
        first = None if self.is_torn else self._first()
        is_same = first is not None and first is self._first_gradient()
        if is_same and (self._marks is None or gradient_marks(self._parameters) == self._marks):
            refuse_own_step(self._caller)

    def _backward(self, loss: torch.Tensor, weight: float, *, retain_graph: bool, all_or_nothing: bool) -> None:
        if not weight:
            check_weightless(loss, self._caller)
        if self._only_own is None:
            self._only_own = not has_reentrant_checkpoint(loss)
            if self._only_own:
                right = constructor_call(self._caller, "[optimizer, other]")
                way_out = f"write {right}, and leave out other.step()."
                self._bystanders = Bystanders(loss, self._parameters, self._caller.kind, way_out, self._models)
        scaled = self.scaler.scale(loss) if self.scaler else loss
        root = None if weight == 1.0 else torch.full_like(scaled, weight)
        if all_or_nothing and self._only_own and not self._has_hooks_for_backward():
            gradients = torch.autograd.grad(scaled, self._trainable, root, retain_graph=retain_graph, allow_unused=True)
            self.is_torn = True
            add_gradients(self._trainable, gradients)
        else:
            self.is_torn = True
            if self._only_own:
                accumulate_gradients(scaled, root, self._trainable, retain_graph=retain_graph)
            else:
                torch.autograd.backward(scaled, root, retain_graph=retain_graph)
        self._has_gradients = have_gradients(self._parameters)  # the loss may not depend on them

    def _look_for_hooks(self) -> None:
        """Warn, before the first sum of two, of hooks that see it; those of ranks belong to their library."""
        self._has_seen_hooks = True
        if self.ranks is None and has_accumulate_hooks(self._parameters):
            warn_of_accumulate_hooks(self._caller)

    def _take_in(self, trainable: list[nn.Parameter]) -> None:
        """Take in parameters unfrozen or added since the last micro-batch; those frozen since step with what they have.

        Args:
            trainable: All that now get gradients.
        """
        known = set(map(id, self._parameters))
        joined = [each for each in trainable if id(each) not in known]
        if self._only_own and have_gradients(joined):  # else an earlier backward of the group has reached them
            self._drop(joined, is_foreign=True)
        self._parameters, self._trainable = [*self._parameters, *joined], trainable

    def _drop(self, parameters: Sequence[nn.Parameter], *, is_foreign: bool) -> None:
        if is_foreign:
            warn_of_foreign_gradients(self._caller)
        clear_gradients(parameters, self._sum_dtype)

    def _has_hooks_for_backward(self) -> bool:
        return has_accumulate_hooks(self._parameters) or have_hooks_together(self._parameters)

    def _open(self) -> None:
        """Check for foreign gradients before the first backward, and for our own before a later one."""
        self._check()
        if self.num_microbatches == 0:
            parameters = self._parameters = self._trainable = list_parameters(self.optimizers)  # they may have changed
            if parameters and accumulate_hooks(parameters[0]):
                check_steps_later(self.optimizers, self._caller)
            if have_gradients(parameters):
                self._drop(parameters, is_foreign=not self._has_leftovers)
            self._has_leftovers = True  # until the step clears them: an interrupt may come first
            if self._watches_steps:
                self._watch()
            return
        if self._marks is None or gradient_marks(self._parameters) != self._marks:
            self._refuse_changes()
        if not self._has_seen_hooks:
            self._look_for_hooks()
        if self._factor is not None:
            self._unsettle(self._factor)
        trainable = list_parameters(self.optimizers)
        if len(trainable) != len(self._trainable) or not all(map(operator.is_, trainable, self._trainable)):
            self._take_in(trainable)
        if self._sum_dtype is not None:
            # The first gradient keeps its parameter's dtype: there is no sum yet, and fully_shard supports no other.
            widen_gradients(self._parameters, self._sum_dtype)

    def _check(self) -> None:
        """Refuse to continue after `close`, or after half a backward."""
        if self._is_closed:
            refuse_closed(self._caller.kind)
        if self.is_torn:
            refuse_torn(self._caller)

    def _check_lost(self) -> None:
        """Refuse to continue with gradients that were zeroed."""
        if self._has_gradients and not have_gradients(self._parameters):
            refuse_lost_gradients(self.num_microbatches, self._caller)

    def _refuse_changes(self) -> None:
        self._check_lost()
        if self._marks is not None:
            refuse_changed_gradients(self._caller)

    def _end(self, then: Actions, *, is_last: bool) -> bool:
        total = float(self._count)
        present: list[bool] = []
        if self.num_microbatches > 1 or self.scaler or isinstance(self.ranks, Replicas):
            widen_for_step(self._parameters, self._sum_dtype, self.ranks)
        if self.ranks is not None:
            total, present, is_last = self.ranks.agree(self._parameters, total, is_last=is_last)
        if not 0 < total < math.inf:
            self._leave_out(total)
            return is_last
        if self._on_step is not None:
            self._on_step()
        if self.shards and not any(present):
            refuse_missing_gradients(self._caller)
        # Turn the sum into the mean, or into the sum of the micro-batches' losses, unless `settle` has done so. Only
        # the factor of a loaded state may be another one: of a single process, or of the other objective.
        factor = (self.predivisor or 1.0) / (total if self._objective == "mean" else 1.0)
        if self.shards is not None:
            factor *= self.shards.num_ranks  # each backward averages over the ranks
        if factor != (normalized := self._factor or 1.0):
            self._multiply(factor / normalized)
        if isinstance(self.ranks, Replicas):
            self.ranks.sum_gradients(self._parameters, present)
            self.ranks.broadcast_buffers()
        self._step_optimizers(then)
        return is_last

    def _leave_out(self, total: float) -> None:
        """Refuse a step whose total weight is not finite, and warn of one without weight, unless it has no gradient."""
        if not math.isfinite(total):
            refuse_total(self._caller)
        if have_nonzero_gradients(self._parameters):
            warn_of_lost_sums(self._caller)

    def _multiply(self, factor: float) -> None:
        insist(lambda: multiply_gradients(self._parameters, factor), "normalizing the gradients")

    def _step_optimizers(self, then: Actions) -> None:
        active = list(filter(has_gradient, self.optimizers))
        if not active:
            warn_of_idle_step(self._caller)
        if self.scaler:
            for optimizer in active:
                insist(functools.partial(self.scaler.unscale_, optimizer), "unscaling the gradients")
        if self._max_grad_norm is not None:
            self.grad_norm = clip_gradients(self._parameters, self._max_grad_norm, self.shards)
        if self._sum_dtype is not None:
            narrow_gradients(self._parameters, self._sum_dtype)
        if self._on_gradients is not None and active:
            self._on_gradients()
        if self._watches:
            self._unwatch()
        count_step = functools.partial(setattr, self, "num_steps", self.num_steps + 1)  # in C: nothing can interrupt it
        todo: deque[Callable[[], object]] = deque((count_step, *then))
        # On KeyboardInterrupt a step can be resumed and completed; a scheduler or an average cannot.
        step = functools.partial(step_optimizers, active, self.scaler)
        if are_plain() and not then and (self._guard is None or self._guard.goes_on):
            self._step_and(todo, step)
        else:
            with deferred_signals():
                self._step_and(todo, step)

    def _step_and(self, todo: deque[Callable[[], object]], step: Callable[[], bool]) -> None:
        """Step, then run the actions that belong to it."""
        stepped, guard = False, self._guard
        if guard is not None:
            guard.forget()
        try:
            try:
                stepped = step() if guard is None else guard.run(step)
                self.num_step_ooms = 0 if guard is None else guard.ooms.num
            finally:
                if stepped or (guard is not None and guard.has_stepped):
                    _do_all(todo)
        finally:  # again after an interrupt; finished actions are not repeated
            if todo and (stepped or (guard is not None and guard.has_stepped)):
                _do_all(todo)

    def _divisor(self, expected: float) -> float | None:
        """Return the divisor with which a backward starts at the whole's scale: hooks see gradients as they are."""
        if self._objective == "mean":
            return float(expected)
        return self._power_of_two(expected) if self.scaler else 1.0  # a scaled sum may overflow in float16

    def _power_of_two(self, count: Weight) -> float | None:
        expected = min(float(count), _MOST)
        if self.shards is not None:  # the ranks' sums are mixed in each backward, so they must agree
            expected = self.shards.max([expected])[0]
        return 2.0 ** math.ceil(math.log2(expected)) if expected > 0 else None


def _no_gradient() -> None:
    """Return None, as a weak reference to what is gone."""


def _before_step(of: weakref.ref[GradientSum], *_: object) -> None:
    """Hook of an optimizer; it does not keep the sum alive."""
    gradient_sum = of()
    if gradient_sum is not None:
        gradient_sum.check_own_step()


def _refuse_complex(parameters: Sequence[nn.Parameter], caller: Caller) -> None:
    for each in parameters:
        if each.is_complex() and each.requires_grad:
            raise ConfigError(
                f"{caller.kind}(optimizer, scaler=...)",
                got=f"a loss scaler over a {str(each.dtype).removeprefix('torch.')} parameter of shape "
                f"{tuple(each.shape)}",
                expected="real parameters: torch cannot unscale complex gradients",
                fix="pass precision='bf16-mixed' to the wrapper, which needs no loss scaler; in a loop of your own, "
                "compute in "
                f"torch.autocast({each.device.type!r}, torch.bfloat16) and leave the scaler out.",
            )


def _do_all(actions: deque[Callable[[], object]]) -> None:
    """Call the actions in order; each is removed first, so that none is called twice.

    Raises:
        MemkitOutOfMemoryError: An action ran out of memory. It may be half done, so it is not called again.
    """
    handled = sys.exception()
    while actions:
        action = actions[0]
        try:
            actions.popleft()()  # in one line: an interrupt between two would lose it
        except Exception as error:
            name = getattr(getattr(action, "func", action), "__qualname__", "an action after the step")
            caught = Caught(handled=handled)
            if not caught.__exit__(type(error), error, error.__traceback__) or caught.failure is None:
                error.add_note(f"memkit: the optimizers had stepped before {name}: do not train the batch again.")
                raise
            raise MemkitOutOfMemoryError(
                name,
                got=f"out of memory ({caught.failure.description}) after the optimizers had stepped: {name} may be "
                "half done, the step is done",
                expected="memory for what follows a step",
                fix="free memory, and do not train the batch again; go on from the last save, or restore what "
                f"{name} changes.",
            ) from error
