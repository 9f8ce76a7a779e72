"""A batch's loss whose backward already ran in micro-batches, for trainers that own the step themselves."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from memkit._core.errors import (
    ConfigError,
    InputError,
    InputTypeError,
    MemkitOutOfMemoryError,
    StateError,
    warn_user,
)
from memkit._core.protocols import Uncopied
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit._gradients.captured import named_tensors
from memkit._gradients.loss import Loss, LossFn, check_loss_fn, detached, read_loss, run_loss_fn
from memkit._gradients.streamed import accumulator_dtype, catch_gradients, with_gradients, without_hooks
from memkit._recovery.attempt import Failure, insist
from memkit._recovery.batch import Attempt
from memkit._torch.graph import inputs_of
from memkit._torch.modules import COMPILED, is_compiled_wrapper
from memkit._torch.ranks import after_forward, before_forward
from memkit.train.bystanders import Bystanders
from memkit.train.check_attempt import CheckAttempt
from memkit.train.checks import check_loss, check_spent_graph, read_count, warn_of_no_rows
from memkit.train.divisors import divisors
from memkit.train.drive import BatchDriver
from memkit.train.gradients import (
    HeldGradients,
    gradients_set_aside,
    graph_nodes,
    has_reentrant_checkpoint,
    have_gradients,
)
from memkit.train.models import device_of, may_recover_alone
from memkit.train.owners import refuse_trainer
from memkit.train.remedies import Remedies, RemedyName
from memkit.train.split import SplitFn, list_tensors
from memkit.train.split_check import Computation
from memkit.train.split_watch import Probe, SplitWatch

_CALL = "SplitLoss"
_EXPECTED = "a torch.nn.Module, or a list of at least one"
_CODE: dict[RemedyName, str] = {
    "recompute": "memkit.Checkpointing(model)",
    "offload": "memkit.train.offload_activations(...) around the call",
}
_LAYERS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "ScaledDot", "Linear", "Embedding")
_CALL_LOSS = "SplitLoss(model)(batch, loss_fn)"
_MAKE_A_PARAMETER = "make what it steps an nn.Parameter of a module that you pass: SplitLoss([model, module])."
_INNER_BACKWARD = (
    "add the inner loss to the one that loss_fn returns, `return loss + auxiliary`; for the gradient of an input write "
    "torch.autograd.grad(loss, inputs) in place of loss.backward()."
)


@guided(
    words={
        "it is the batch's rows divided by num_microbatches": "micro_batch_size",
        "the trainer that calls loss.backward() has the optimizer": "optimizer",
        "the trainer's own autocast applies, around the call": "precision",
        "clip in the trainer, after loss.backward()": "max_grad_norm",
        "pass scale=scaler.get_scale() with each batch": "scaler",
        "pass it with each batch: split(batch, loss_fn)": "loss_fn",
        "pass it with each batch: split(batch, lambda model, micro: criterion(model(micro[0]), micro[1]))": "criterion",
    },
    absent={
        "loss = split(batch, loss_fn), then loss.backward()": "backward",
        "optimizer.step() after loss.backward(); MemoryEfficientTrainingWrapper has a step of its own": "step",
        "loss = split(batch, loss_fn), then loss.backward() and optimizer.step()": "train_step",
        "split(batch, loss_fn); MemoryEfficientTrainingWrapper has microbatches()": "microbatches",
        "model.parameters()": "parameters",
        "optimizer.zero_grad()": "zero_grad",
    },
    methods=("__call__",),
)
class SplitLoss(Uncopied):
    """The loss of a whole batch for a trainer that owns the step, using the memory of one micro-batch.

    Forward and backward of the batch run inside the call, in micro-batches; it returns the batch's loss with its
    gradient already computed. ``loss.backward()`` only hands the gradient over, through the parameters' own graph
    nodes: accumulation, loss scaling, hooks and DistributedDataParallel see one ordinary backward. A micro-batch that
    runs out of memory is rolled back (gradients, buffers, attributes, random state) and run again, with more blocks
    recomputed in backward, or split where that keeps the gradient.

    If you own the step, use `MemoryEfficientTrainingWrapper`; this class is for trainers that own it.

    Memory cost: one set of gradients between the call and the end of backward, on top of what ``.grad`` already holds
    (for half-precision parameters, in float32 if there are several micro-batches); and a copy of the model's buffers.
    Time cost: a copy and a multiplication of each gradient, and an addition for each additional micro-batch.

    Args:
        model: The module, or several, whose parameters get the gradient; also in DistributedDataParallel, or compiled.
        num_microbatches: Minimum number of micro-batches per batch.
        reduction: ``"mean"``: the loss function returns the mean over the micro-batch's rows, or a `Loss`.
            ``"sum"``: the losses of the parts add up to the batch's, for example because the function divides by a
            number of items passed to it.
        on_oom: Same as for `MemoryEfficientTrainingWrapper`. Memory-saving changes to the model's blocks stay on.
        split_fn: ``split_fn(batch, n)`` returns a list of about n parts, for packed batches.
        probe: Check on a few rows whether splitting a batch keeps its gradient; see
            `MemoryEfficientTrainingWrapper`.

    Attributes:
        sizes: Sizes of the last batch's micro-batches: rows, or elements with a ``split_fn``.
        outputs: The ``outputs`` of each micro-batch's `Loss`, detached, in order; held until the next batch.
        num_ooms: Out-of-memory errors survived so far.
        is_checking: Whether the loss function is running for the check, which drops its results.

    Raises:
        ConfigError: The parameters are sharded over ranks, DistributedDataParallel wraps only a part of a model, or a
            setting is invalid.
        InputTypeError: The model is not a module.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Linear(3, 1)
        >>> split = mk.SplitLoss(model, num_microbatches=2)
        >>> x, y = torch.ones(5, 3), torch.zeros(5, 1)
        >>> loss = split((x, y), lambda model, micro: (model(micro[0]) - micro[1]).pow(2).mean())
        >>> loss.backward()  # or accelerator.backward(loss), fabric.backward(loss), a scaler's ...
        >>> split.sizes, model.weight.grad.shape
        ((3, 2), torch.Size([1, 3]))
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        num_microbatches: int = 1,
        reduction: Literal["mean", "sum"] = "mean",
        on_oom: Literal["exact", "inexact", "raise"] = "exact",
        split_fn: SplitFn | None = None,
        probe: Probe = True,
    ) -> None:
        check = Checker(_CALL)
        check.whole("num_microbatches", num_microbatches, 1)
        check.choice("reduction", reduction, ("mean", "sum"))
        check.choice("on_oom", on_oom, ("exact", "inexact", "raise"))
        if split_fn is not None:
            check.function("split_fn", split_fn)
        unwrapped = [_unwrap_replica(each) for each in _list_modules(model)]
        self._replicas = [replica for _, replica in unwrapped if replica is not None]
        self._own = unwrapped[0][0] if isinstance(model, nn.Module) else nn.ModuleList([own for own, _ in unwrapped])
        _check_ranks(self._own)
        num_ranks = torch.distributed.get_world_size(self._replicas[0].process_group) if self._replicas else 1
        recovers = on_oom != "raise" and may_recover_alone(self._own, num_ranks, is_sharded=False, call=_CALL)
        self._remedies = Remedies(self._own, call=_CALL, may_check=probe is not False, code=_CODE) if recovers else None
        self._num_microbatches, self._reduction = num_microbatches, reduction
        self._split_fn = split_fn
        self._split_watch = SplitWatch(
            self._own, probe, call=_CALL, may_change=on_oom == "inexact", adds_up=reduction == "sum"
        )
        self._scaling = _Scaling()
        own, scaling = self._own, self._scaling
        computation = Computation(
            parameters=functools.partial(_list_trained, own),  # with self, it would be a reference cycle
            is_mixed=lambda: torch.is_autocast_enabled(device_of(own).type),
            scale=lambda: scaling.factor,
            adds_up=reduction == "sum",
            with_hooks=False,  # they run once, on the batch's gradient
        )
        self._driver = BatchDriver(
            self._own,
            computation,
            split_watch=self._split_watch,
            remedies=self._remedies,
            split_fn=split_fn,
            call=_CALL,
        )
        self.sizes: tuple[int, ...] = ()
        self.outputs: tuple[Any, ...] = ()
        self.num_ooms = 0
        self.is_checking = False
        self._has_warned_of_no_rows = False
        self._checked_precisions = set[tuple[torch.dtype, bool]]()
        self._bystanders: Bystanders | None = None

    def __call__(self, batch: Any, loss_fn: LossFn, *, scale: float | torch.Tensor | None = None) -> torch.Tensor:
        """Run forward and backward of a batch; return its loss.

        Args:
            batch: A pytree of tensors with the rows in dimension 0, on the model's device; or what ``split_fn`` takes.
            loss_fn: ``loss_fn(model, micro_batch)`` returns the micro-batch's loss, see ``reduction``. A mean with
                count 0 contributes exactly nothing; if all counts are 0, loss and gradient are 0. It is called
                with the module inside DistributedDataParallel; the DDP wrapper must not run.
            scale: The factor a loss scaler will multiply the loss by (``scaler.get_scale()``), so that gradients in
                float16 do not underflow; the returned loss is not scaled. None is 1, with a warning if the loss is
                computed in float16.

        Returns:
            0-dim loss of the batch; for one without rows what ``loss_fn`` returns for it, as the NaN of a mean, with a
            gradient of 0; without gradients (``torch.no_grad()``) the plain loss of the batch, not split.

        Raises:
            MemkitOutOfMemoryError: Even the smallest micro-batch does not fit, or smaller ones would change the result.
            ConfigError: The scale is invalid; or, from the probe: the loss compares rows with each other, so that
                parts would train something else.
            InputError: The loss is not a scalar with a graph; or trains a parameter outside the model, a tensor of the
                batch or one that ``loss_fn`` names; or holds a reentrant checkpoint; or only some parts have a count.
            InputTypeError: ``loss_fn`` is not callable, or does not return a tensor.
            StateError: A part of the batch changes ``.grad``: ``loss_fn`` calls ``backward()`` or ``zero_grad()``
                itself. Or, in backward, ``create_graph=True``: the graphs of the parts are gone.

        Warns:
            MemkitWarning: The batch has no rows; told once, and not in DistributedDataParallel.
        """
        check_loss_fn(loss_fn, batch, call=f"{_CALL}(model)")
        scaling = self._scaling
        scaling.is_given, scaling.factor = scale is not None, 1.0 if scale is None else scale
        if not isinstance(scaling.factor, torch.Tensor) and not scaling.factor > 0:
            raise Checker(f"{_CALL}(model)").refusal(
                "scale", scale, "the loss scaler's factor, above 0", fix="pass scale=scaler.get_scale()."
            )
        if not torch.is_grad_enabled():
            whole, count = self._evaluate(batch, loss_fn)
            self.outputs = (detached(whole.outputs),)
            return torch.zeros_like(whole.value) if count == 0 else whole.average()
        # Run what DistributedDataParallel does before and after its module's forward once around all parts: it
        # prepares the gradient all-reduce there. There is no public API; it wants an argument to move to its device.
        for replica in self._replicas:
            before_forward(replica)
        total = self._run(batch, loss_fn)
        loss = insist(functools.partial(total.as_loss, scaling.factor), "handing a loss over")
        for replica in self._replicas:
            loss = after_forward(replica, loss)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the remembered micro-batch sizes that fit."""
        return self._driver.sizes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._driver.sizes.load_state_dict(state)

    def _run(self, batch: Any, loss_fn: LossFn) -> _Total:
        total = _Total(_list_trained(self._own))
        self.outputs = ()  # before this batch's peak
        # Leaves whose gradient would be lost; collected before a loss function can create leaves of its own.
        leaves = {id(each): f"`{name}` in loss_fn" for name, each in named_tensors(loss_fn) if each.requires_grad}
        leaves |= {id(each): "a tensor of the batch" for each in list_tensors(batch) if each.requires_grad}
        is_checked = False  # once per batch: the loss function, or its parameters, may have changed
        watch = self._driver.state_watch
        watch.loss_fn = loss_fn
        try:
            run = self._driver.open(batch, self._num_microbatches, total)
            if not run.size and not self._replicas and not self._has_warned_of_no_rows:
                self._has_warned_of_no_rows = True
                warn_of_no_rows(_CALL_LOSS, "its gradient is 0")
            for attempt in self._driver.attempts(run, loss_fn):
                if isinstance(attempt, CheckAttempt):
                    self._run_check(attempt, loss_fn)
                    continue
                held = HeldGradients(total.parameters)
                with attempt as micro:
                    try:
                        has_graph = self._add(
                            total, attempt, micro, loss_fn, held, leaves=None if is_checked else leaves
                        )
                    except RuntimeError as error:
                        check_spent_graph(error, call=_CALL_LOSS)
                        raise
                    is_checked = is_checked or has_graph
                if attempt.failure is not None:
                    _put_back(held, attempt.failure)
        finally:
            self.is_checking, self._driver.current, watch.loss_fn = False, None, None
        self.sizes, self.outputs = run.sizes, tuple(loss.outputs for loss in run.losses())
        self.num_ooms += run.num_ooms
        return total

    def _run_check(self, attempt: CheckAttempt, loss_fn: LossFn) -> None:
        is_off = torch.autocast(device_of(self._own).type, enabled=False)
        self.is_checking = True
        with attempt as micro, is_off if attempt.in_full_precision else contextlib.nullcontext():
            attempt.backward(self._evaluate(micro, loss_fn)[0])
        self.is_checking = False

    def _add(
        self,
        total: _Total,
        attempt: Attempt,
        micro: Any,
        loss_fn: LossFn,
        held: HeldGradients,
        *,
        leaves: dict[int, str] | None,
    ) -> bool:
        """Add a part; return whether its loss has a graph. A constant that counts nothing has none."""
        # A separate function: when it fails, its frame releases every tensor.
        loss, count = self._evaluate(micro, loss_fn)
        # If the batch is whole, a backward() inside loss_fn leaves the gradients of a plain loop in .grad.
        if attempt.size != attempt.batch_size and not held.are_same():
            held.restore()
            _refuse_inner_backward()
        check_loss(loss.value, call=_CALL_LOSS, count=count)
        if leaves is not None and loss.value.requires_grad:
            _check_graph(loss.value, total.parameters, leaves)
            if self._bystanders is None:
                self._bystanders = Bystanders(loss.value, total.parameters, _CALL, _MAKE_A_PARAMETER)
            precision = loss.value.dtype, torch.is_autocast_enabled(loss.value.device.type)
            if not self._scaling.is_given and precision not in self._checked_precisions:  # once: it walks the graph
                self._checked_precisions.add(precision)
                _warn_of_float16(loss.value)
        if count is None and self._reduction == "mean" and self._split_fn is not None:
            raise InputError(
                f"{_CALL}(split_fn=...)",
                got="a loss without a count, for a part made by split_fn",
                expected="the weight of the part, which its rows do not determine",
                fix="return mk.Loss(mean=loss, count=n) from loss_fn.",
            )
        share = attempt.size / max(1, attempt.batch_size)
        if self._split_watch.is_on:
            attempt.terms = divisors(loss.value)
        total.add(loss, share if self._reduction == "mean" else 1.0, count, self._scaling.factor)
        attempt.is_added = True  # before anything else that may fail, which would add it once more
        attempt.loss = loss.detached(share if count is None else count)
        return loss.value.requires_grad

    def _evaluate(self, micro: Any, loss_fn: LossFn) -> tuple[Loss, float | None]:
        result = run_loss_fn(loss_fn, self._own, micro, call=_CALL_LOSS)
        loss = read_loss(result, call=_CALL_LOSS)
        if self._reduction == "sum" and isinstance(result, Loss) and loss.count is None:
            raise InputError(
                f"{_CALL}(reduction='sum')",
                got="mk.Loss(mean=...) without its count, to be added up",
                expected="a sum over rows, or a loss with its count",
                fix="return mk.Loss(mean=loss, count=n) or mk.Loss(sum=loss, count=n), or the sum itself as a tensor.",
            )
        if loss.count is None:
            return loss, None
        return loss, float(read_count(loss.count, stay_on_device=False, call=f"count of {_CALL}"))


@dataclass
class _Scaling:
    """The current batch's loss scale, shared with the split check."""

    factor: float | torch.Tensor = 1.0
    is_given: bool = False


class _Total:
    """Loss and gradient of the parts so far.

    Args:
        parameters: Parameters to differentiate with respect to.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.discard()

    def discard(self) -> None:
        """Start over."""
        self.is_torn = False
        self._gradients: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._value: torch.Tensor | None = None
        self._of_no_rows: torch.Tensor | None = None  # the loss of a batch without rows, which has no gradient
        self._count: float | None = None
        self._unit = 1.0  # counted losses are summed in units of the first part's count: large sums overflow float16

    def give_up(self, *, is_out: bool) -> None:
        """Do nothing: no other process waits."""

    def add(self, loss: Loss, weight: float, count: float | None, scale: float | torch.Tensor) -> None:
        """Add a part's loss and gradient, times its weight or the weight given by its count."""
        is_first = self._count is None and self._value is None
        if not is_first and (count is None) != (self._count is None):
            raise InputError(
                _CALL_LOSS,
                got="a count for some parts of a batch but not for others",
                expected="the same form for every part",
                fix="always return mk.Loss(..., count=n), with count=0 where there is nothing to count.",
            )
        if count is not None:
            if self._count is None:
                self._count, self._unit = 0.0, count or 1.0
            weight = (count if loss.reduction == "mean" else 1.0) / self._unit
        if weight and loss.value.requires_grad:
            root = loss.value.reshape(())
            slope = torch.full_like(root, weight) * scale
            # The hooks run once, on the batch's gradient.
            with without_hooks(self.parameters), gradients_set_aside(self.parameters):
                catch_gradients(root, slope, self.parameters, self._catch)
                if have_gradients(self.parameters):  # the backward of a reversible block adds its own to .grad
                    self._catch_accumulated()
            value = root.detach().to(accumulator_dtype(root.dtype)) * weight
            self._value = value if self._value is None else self._value + value
            self.is_torn = False
        elif count is None:
            self._of_no_rows = loss.value.detach().reshape(())
        if count is not None:
            self._count = (self._count or 0.0) + count

    def _catch(self, i: int, gradient: torch.Tensor) -> None:
        """Add a parameter's gradient."""
        self.is_torn = True
        before = self._gradients[i]
        if before is None:
            self._gradients[i] = gradient.clone()  # autograd may give one tensor to two parameters
        elif gradient.is_sparse:
            self._gradients[i] = before + gradient
        else:
            self._gradients[i] = before.to(accumulator_dtype(before.dtype)).add_(gradient)

    def _catch_accumulated(self) -> None:
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self._catch(i, parameter.grad)

    def as_loss(self, scale: float | torch.Tensor) -> torch.Tensor:
        """Return a loss whose backward hands the gradient over."""
        if self._value is None or self._count == 0:  # the total weight is zero; other ranks still wait for a gradient
            self._gradients = [torch.zeros_like(each) for each in self.parameters]
            nothing = torch.zeros((), device=self.parameters[0].device)
            self._value = nothing if self._of_no_rows is None else self._of_no_rows
        # Only parameters that the loss reaches: the others should have no gradient, not zeros.
        reached = [i for i, gradient in enumerate(self._gradients) if gradient is not None]
        value, gradients = self._value * scale, [self._gradients[i] for i in reached]
        loss = with_gradients(lambda _: (value, gradients), [self.parameters[i] for i in reached], call=_CALL)
        return loss * ((self._unit / (self._count or 1.0) if self._count is not None else 1.0) / scale)


def _put_back(held: HeldGradients, failure: Failure) -> None:
    """Undo what a backward() inside a failed attempt's loss_fn has left in the gradients."""
    if held.are_same() or held.restore():
        return
    raise MemkitOutOfMemoryError(
        _CALL_LOSS,
        got="out of memory after a backward() inside loss_fn had added to gradients that were there before: "
        f"{failure.description}",
        expected="gradients that an attempt leaves as they were, so that the batch can run again",
        fix=_INNER_BACKWARD,
    ) from failure.error


def _refuse_inner_backward() -> NoReturn:
    raise StateError(
        _CALL_LOSS,
        got="a loss_fn that changes the parameters' .grad itself, by an inner backward() or zero_grad(): each "
        "micro-batch would do so with the weight of the whole batch",
        expected="gradients that only SplitLoss adds up",
        fix=_INNER_BACKWARD,
    )


def _list_modules(model: object) -> list[nn.Module]:
    """Return the passed module or modules as a list."""
    modules = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Sequence) else []
    if modules and all(isinstance(each, nn.Module) for each in modules):
        return modules
    refuse_trainer(model, call=f"{_CALL}(model)", expected=_EXPECTED)
    raise InputTypeError(
        f"{_CALL}(model)",
        got=f"a {type(model).__name__}" + (f" of {[type(each).__name__ for each in modules]}" if modules else ""),
        expected=_EXPECTED,
        fix="pass the module whose parameters are trained, not its parameters or a function.",
    )


def _list_trained(model: nn.Module) -> list[nn.Parameter]:
    """List the currently trainable parameters; they may be frozen between two batches."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trained:
        return trained
    raise InputError(
        _CALL_LOSS,
        got="a model without any parameter that requires a gradient",
        expected="at least one parameter to train",
        fix="unfreeze the parameters to train, or pass the module that holds them; for inference call it under "
        "torch.no_grad().",
    )


def _unwrap_replica(model: nn.Module) -> tuple[nn.Module, nn.parallel.DistributedDataParallel | None]:
    """Return the module that a DDP replica wraps (possibly compiled before wrapping), and the replica."""
    is_compiled = is_compiled_wrapper(model)
    replica = model.get_submodule(COMPILED) if is_compiled else model
    if not isinstance(replica, nn.parallel.DistributedDataParallel):
        return model, None
    if is_compiled:
        warn_user(
            f"{_CALL}: torch.compile around DistributedDataParallel has no effect here, because the parts run the "
            "inner module. Compile the module first, then wrap it."
        )
    return replica.module, replica


def _check_ranks(model: nn.Module) -> None:
    """Refuse models that communicate between ranks inside a forward: ranks may split their batches differently."""
    kinds = {type(module).__name__ for module in model.modules()}
    is_sharded = "FullyShardedDataParallel" in kinds or any(hasattr(each, "to_local") for each in model.parameters())
    if not is_sharded and "DistributedDataParallel" not in kinds:
        return
    raise ConfigError(
        f"{_CALL}(model)",
        got="parameters that are sharded over ranks"
        if is_sharded
        else "DistributedDataParallel around only a part of the model",
        expected="a whole model, or one in DistributedDataParallel",
        fix="use MemoryEfficientTrainingWrapper, whose ranks split fully_shard models in step."
        if is_sharded
        else "wrap the whole model, or pass several wrapped ones: SplitLoss([encoder, head]).",
    )


def _warn_of_float16(loss: torch.Tensor) -> None:
    """Warn if a loss whose backward runs here goes through float16 without a scale.

    A scaler comes too late: it multiplies the returned loss, whose gradient is already computed by then.
    """
    # Layers in float16, as autocast runs them; an explicit cast meets no scaler in the plain loop either.
    given = ((node.name().startswith(_LAYERS), inputs_of(node)) for node in graph_nodes(loss))
    if any(
        each.dtype == torch.float16 and (is_layer or math.prod(each.shape) == 1)
        for is_layer, metadata in given
        for each in metadata
    ):
        warn_user(
            f"{_CALL_LOSS}: the loss is computed in float16, and no scale is given: small gradients become zero in "
            "backward, however the loss is scaled afterwards. Pass scale=scaler.get_scale(), or compute in "
            "bfloat16; scale=1.0 turns this warning off."
        )


def _check_graph(loss: torch.Tensor, parameters: list[nn.Parameter], leaves: dict[int, str]) -> None:
    """Refuse a graph that would lose a gradient: of a leaf outside the model, or through a reentrant checkpoint."""
    if has_reentrant_checkpoint(loss):
        raise InputError(
            _CALL_LOSS,
            got="a loss through checkpoint(use_reentrant=True), which only backward() can differentiate",
            expected="a graph that torch.autograd.grad can differentiate",
            fix="pass use_reentrant=False to the checkpoint; a trainer has a setting for it, such as "
            "gradient_checkpointing_kwargs={'use_reentrant': False}.",
        )
    known = set(map(id, parameters))
    for node in graph_nodes(loss):
        leaf = getattr(node, "variable", None)
        if leaf is None or id(leaf) in known:
            continue
        if isinstance(leaf, nn.Parameter):
            raise InputError(
                _CALL_LOSS,
                got=f"a loss that trains a parameter of shape {tuple(leaf.shape)} which does not belong to the model",
                expected="a loss over the parameters of the model",
                fix="pass all modules that are trained: SplitLoss([model, criterion]). A trainer's adapter has one "
                "model: make the criterion a part of it before, model.criterion = criterion.",
            )
        if id(leaf) in leaves:
            raise InputError(
                _CALL_LOSS,
                got=f"{leaves[id(leaf)]}, of shape {tuple(leaf.shape)}, that requires a gradient",
                expected="only the model's parameters to require gradients: this tensor would silently get no gradient",
                fix="if it is trained, make it an nn.Parameter of a module that you pass; if not, detach() it; if "
                "loss_fn itself computes its gradient, write x = x.detach().requires_grad_() inside loss_fn.",
            )
