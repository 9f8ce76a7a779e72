"""The loss of a batch whose backward is already done in parts, for a step that somebody else owns."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from memkit._errors import ConfigError, InputError, InputTypeError, MemkitWarning
from memkit._oom import retry_once
from memkit._streamed import accumulator_dtype, with_gradients, without_hooks
from memkit.train.checks import check_choice, check_loss, check_steps, read_count
from memkit.train.gradients import graph_nodes, has_reentrant_checkpoint
from memkit.train.models import may_recover_alone, unwrap_model
from memkit.train.probe import probe_split, warn_or_refuse
from memkit.train.replay import BufferWatch
from memkit.train.sizes import SizeMemory
from memkit.train.split import SplitFn, count_rows, list_tensors
from memkit.train.window import Window

_CALL = "SplitLoss"
_CALL_LOSS = "SplitLoss(model)(batch, loss_fn)"
LossFn = Callable[[nn.Module, Any], Any]


class SplitLoss:
    """The loss of a whole batch, to be backpropagated by whoever owns the step, in memory for a part of it.

    Forward and backward of the batch run here, in micro-batches; what is returned is the batch's loss with its gradient
    ready. ``loss.backward()`` only hands the gradient over, through the parameters' own graph nodes: accumulation, loss
    scaling, hooks and DistributedDataParallel see one usual backward. When a micro-batch runs out of memory it is
    rolled back (gradients, buffers, random state), cut, and run again.

    Where you own the step, use `MemoryEfficientTrainingWrapper`; this is for trainers that own it.

    Memory cost: one set of gradients between the call and the end of backward, beside what ``.grad`` holds already
    (of half-precision parameters, in float32 where there are several micro-batches); and a copy of the model's buffers.
    Time cost: a copy and a multiplication of each gradient, and an addition for each further micro-batch.

    Args:
        model: The module, or several, whose parameters get the gradient; also in DistributedDataParallel, or compiled.
        num_microbatches: Micro-batches for each batch, at least.
        reduction: ``"mean"``: the loss function gives the mean over the micro-batch's rows, or ``(loss_sum, count)``.
            ``"sum"``: the losses of the parts add up to the batch's, as where the function divides by a number of items
            that it was told.
        on_oom: ``"split"`` recovers; ``"raise"`` lets the error through.
        split_fn: ``split_fn(batch, n)`` returns a list of about n parts, for packed batches.
        probe: Check on the first batch that is split, once, whether its parts add up to the whole.

    Attributes:
        sizes: Sizes of the last batch's micro-batches: rows, or elements where there is a ``split_fn``.
        num_ooms: Out-of-memory errors survived so far.

    Raises:
        ConfigError: The parameters are sharded over ranks, DistributedDataParallel wraps only a part of a model, or a
            setting is wrong.
        InputTypeError: The model is no module.

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
        on_oom: Literal["split", "raise"] = "split",
        split_fn: SplitFn | None = None,
        probe: bool = True,
    ) -> None:
        check_steps(num_microbatches, "num_microbatches", call=_CALL)
        check_choice("reduction", reduction, ("mean", "sum"), call=_CALL)
        check_choice("on_oom", on_oom, ("split", "raise"), call=_CALL)
        unwrapped = [_unwrap_replica(each) for each in _list_modules(model)]
        self._replicas = [replica for _, replica in unwrapped if replica is not None]
        self._own = unwrapped[0][0] if isinstance(model, nn.Module) else nn.ModuleList([own for own, _ in unwrapped])
        _check_ranks(self._own)
        num_ranks = torch.distributed.get_world_size(self._replicas[0].process_group) if self._replicas else 1
        if on_oom == "split" and not may_recover_alone(self._own, num_ranks, is_sharded=False, call=_CALL):
            on_oom = "raise"
        self._num_microbatches, self._reduction, self._on_oom = num_microbatches, reduction, on_oom
        self._split_fn = split_fn
        self._wants_probe = probe and split_fn is None
        self._watch, self._memory = BufferWatch(self._own), SizeMemory()
        self.sizes: tuple[int, ...] = ()
        self.num_ooms = 0

    def __call__(self, batch: Any, loss_fn: LossFn, *, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Run forward and backward of a batch; return its loss.

        Args:
            batch: A pytree of tensors with the rows in dimension 0, on the model's device; or what ``split_fn`` takes.
            loss_fn: ``loss_fn(model, micro_batch)`` returns the micro-batch's loss, see ``reduction``. A micro-batch
                with count 0 contributes exactly nothing; a batch of nothing else has loss and gradient 0. The model is
                the one within DistributedDataParallel; the wrapped one must not run.
            scale: What a loss scaler will multiply the loss with (``scaler.get_scale()``), so that gradients in float16
                do not vanish on the way; the result is not scaled.

        Returns:
            0-dim loss of the batch; without gradients (``torch.no_grad()``) the plain loss of the whole batch, in one.

        Raises:
            MemkitOutOfMemoryError: Even the smallest micro-batch does not fit.
            ConfigError: From the probe: the loss compares rows with each other, parts would train something else.
            InputError: The loss is not a scalar with a graph, trains a parameter that is not the model's or a tensor of
                the batch, or holds a reentrant checkpoint; or counts come with some parts only.
            InputTypeError: The loss is not a tensor.
            StateError: In backward, with ``create_graph=True``: the graphs of the parts are gone.
        """
        if not torch.is_grad_enabled():
            loss, count = self._evaluate(batch, loss_fn)
            return loss if count is None else loss / count if count else torch.zeros_like(loss)
        # What DistributedDataParallel does before and after its module's forward, once around all parts: there it
        # prepares the exchange of gradients. There is no public form; it wants an argument to move to its device.
        for replica in self._replicas:
            replica._pre_forward(None)  # type: ignore[no-untyped-call]  # noqa: SLF001
        total = self._run(batch, loss_fn, scale)
        if self._wants_probe and len(self.sizes) > 1:
            self._wants_probe = False
            self._probe(batch, loss_fn)
        loss = retry_once(functools.partial(total.as_loss, scale), "handing a loss over")
        for replica in self._replicas:
            loss = replica._post_forward(loss)  # type: ignore[no-untyped-call]  # noqa: SLF001
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of sizes that fit."""
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._memory.load_state_dict(state)

    def _run(self, batch: Any, loss_fn: LossFn, scale: float | torch.Tensor) -> _Total:
        total = _Total(_list_trained(self._own))
        # Whose gradient would be lost; asked before a loss function can make inputs of its own.
        inputs = [each for each in list_tensors(batch) if each.is_leaf and each.requires_grad]
        is_checked = False  # once for each batch: the loss function may be another than before, or what it trains
        window = Window(
            batch,
            self._num_microbatches,
            accumulator=total,
            watch=self._watch,
            sizes=self._memory,
            on_oom=self._on_oom,
            split_fn=self._split_fn,
            call=_CALL,
        )
        while (attempt := window.next_attempt()) is not None:
            with attempt as micro:
                share = attempt.size / max(1, attempt.batch_size)
                self._add(total, micro, loss_fn, scale, share=share, inputs=None if is_checked else inputs)
                attempt.is_added = is_checked = True
            window.settle(attempt)
        self.sizes = window.sizes
        self.num_ooms += window.num_ooms
        return total

    def _add(
        self,
        total: _Total,
        micro: Any,
        loss_fn: LossFn,
        scale: float | torch.Tensor,
        *,
        share: float,
        inputs: list[torch.Tensor] | None,
    ) -> None:
        # A function of its own: when it fails, its frame takes every tensor with it.
        loss, count = self._evaluate(micro, loss_fn)
        check_loss(loss, call=_CALL_LOSS)
        if inputs is not None:
            _check_graph(loss, total.parameters, inputs)
        if count is None and self._reduction == "mean" and self._split_fn is not None:
            raise InputError(
                f"{_CALL}(split_fn=...)",
                got="a loss without a count, for a part made by split_fn",
                expected="the weight of the part, which its rows do not tell",
                fix="return (loss_sum, count) from loss_fn.",
            )
        total.add(loss.reshape(()), share if self._reduction == "mean" else 1.0, count, scale)

    def _evaluate(self, micro: Any, loss_fn: LossFn) -> tuple[torch.Tensor, float | None]:
        loss = loss_fn(self._own, micro)
        if not isinstance(loss, tuple):
            return loss, None
        if len(loss) != 2:
            raise InputError(
                _CALL_LOSS,
                got=f"a tuple of {len(loss)}",
                expected="the loss, or (loss_sum, count)",
                fix="return nothing else beside them; what else is wanted goes into a list of your own.",
            )
        return loss[0], float(read_count(loss[1], stay_on_device=False, call=f"count of {_CALL}"))

    def _probe(self, batch: Any, loss_fn: LossFn) -> None:
        adds_up = False

        def weighed(model: nn.Module, micro: Any) -> Any:
            nonlocal adds_up
            loss = loss_fn(model, micro)
            adds_up = self._reduction == "sum" and not isinstance(loss, tuple)
            return (loss, count_rows(micro)) if adds_up else loss  # any count will do that adds up

        verdict = probe_split(unwrap_model(self._own), batch, weighed)
        if adds_up and verdict.loss is not None:
            raise ConfigError(
                f"{_CALL}(reduction='sum')",
                got=f"losses of parts that do not add up to the batch's (the gradient is off by {verdict.error:.2g})",
                expected="a sum over rows, divided by what does not depend on the part",
                fix="return (loss_sum, count) where it is a mean; where it compares rows with each other, keep batches "
                "whole with num_microbatches=1, on_oom='raise'.",
            )
        warn_or_refuse(verdict, call=_CALL)


class _Total:
    """Loss and gradient of the parts so far; a window's accumulator.

    Args:
        parameters: What the gradient is with respect to.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.discard()

    def discard(self) -> None:
        """Start anew."""
        self.is_torn = False
        self._gradients: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._value: torch.Tensor | None = None
        self._count: float | None = None
        self._unit = 1.0  # counted losses are summed in units of the first part's count: float16 holds no large sums

    def add(self, loss: torch.Tensor, weight: float, count: float | None, scale: float | torch.Tensor) -> None:
        """Add a part's loss and gradient, times its weight; with a count, they are sums over it."""
        is_first = self._count is None and self._value is None
        if not is_first and (count is None) != (self._count is None):
            raise InputError(
                _CALL_LOSS,
                got="a count with some parts of a batch, and none with others",
                expected="the same form for every part",
                fix="return (loss_sum, count) always, count=0 where there is nothing to count.",
            )
        if count is not None:
            if self._count is None:
                self._count, self._unit = 0.0, count or 1.0
            weight = 1.0 / self._unit if count else 0.0
        if weight:
            with torch.autocast(loss.device.type, enabled=False), self._catching():  # each node has its forward's dtype
                root = torch.full_like(loss, weight) * scale
                torch.autograd.grad(loss, self.parameters, root, allow_unused=True)
            value = loss.detach().to(accumulator_dtype(loss.dtype)) * weight
            self._value = value if self._value is None else self._value + value
            self.is_torn = False
        if count is not None:
            self._count = (self._count or 0.0) + count

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        """Take each gradient as soon as backward has it, past the parameter's own hooks: they see the batch's, once."""
        with without_hooks(self.parameters):
            handles = [
                each.register_hook(functools.partial(self._catch, i))  # type: ignore[no-untyped-call]
                for i, each in enumerate(self.parameters)
            ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _catch(self, i: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add a parameter's gradient; what autograd goes on with, and holds until its end, takes no memory."""
        self.is_torn = True
        before = self._gradients[i]
        if before is None:
            self._gradients[i] = gradient.clone()  # autograd may give one tensor to two parameters
        elif gradient.is_sparse:
            self._gradients[i] = before + gradient
        else:
            self._gradients[i] = before.to(accumulator_dtype(before.dtype)).add_(gradient)
        return None if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

    def as_loss(self, scale: float | torch.Tensor) -> torch.Tensor:
        """Return the loss, whose backward hands the gradient over."""
        if self._value is None:  # nothing weighed anything; other ranks wait for a gradient all the same
            self._gradients = [torch.zeros_like(each) for each in self.parameters]
            self._value = torch.zeros((), device=self.parameters[0].device)
        # Only parameters that the loss reaches: the others are to have no gradient, not zeros.
        reached = [i for i, gradient in enumerate(self._gradients) if gradient is not None]
        value, gradients = self._value * scale, [self._gradients[i] for i in reached]
        loss = with_gradients(lambda _: (value, gradients), [self.parameters[i] for i in reached], call=_CALL)
        return loss * ((self._unit / (self._count or 1.0) if self._count is not None else 1.0) / scale)


def _list_modules(model: object) -> list[nn.Module]:
    modules = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Sequence) else []
    if modules and all(isinstance(each, nn.Module) for each in modules):
        return modules
    raise InputTypeError(
        f"{_CALL}(model)",
        got=f"a {type(model).__name__}" + (f" of {[type(each).__name__ for each in modules]}" if modules else ""),
        expected="a torch.nn.Module, or a list of one or more",
        fix="pass the module whose parameters train, not its parameters or a function.",
    )


def _list_trained(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that train now: they may be frozen between two batches."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trained:
        return trained
    raise InputError(
        _CALL_LOSS,
        got="a model of which no parameter requires a gradient",
        expected="a parameter to train",
        fix="unfreeze what trains, or pass the module that holds it; run without training under torch.no_grad().",
    )


def _unwrap_replica(model: nn.Module) -> tuple[nn.Module, nn.parallel.DistributedDataParallel | None]:
    """Return the module that a replica wraps, and the replica; compiled or not, if it was compiled before wrapping."""
    is_compiled = "_orig_mod" in model._modules  # noqa: SLF001 - torch.compile's wrapper, whose class is slow to import
    replica = model.get_submodule("_orig_mod") if is_compiled else model
    if not isinstance(replica, nn.parallel.DistributedDataParallel):
        return model, None
    if is_compiled:
        warnings.warn(
            f"{_CALL}: torch.compile around DistributedDataParallel has no effect here: the parts run the module "
            "within. Compile first, then wrap.",
            MemkitWarning,
            stacklevel=4,
        )
    return replica.module, replica


def _check_ranks(model: nn.Module) -> None:
    """Refuse what exchanges something between ranks inside a forward: the parts of one rank are not another's."""
    kinds = {type(module).__name__ for module in model.modules()}
    is_sharded = "FullyShardedDataParallel" in kinds or any(hasattr(each, "to_local") for each in model.parameters())
    if not is_sharded and "DistributedDataParallel" not in kinds:
        return
    raise ConfigError(
        f"{_CALL}(model)",
        got="parameters that are sharded over ranks" if is_sharded else "DistributedDataParallel around a part of it",
        expected="a whole model, or one in DistributedDataParallel",
        fix="use MemoryEfficientTrainingWrapper, whose ranks split fully_shard models in step."
        if is_sharded
        else "wrap the whole model, or pass several wrapped ones: SplitLoss([encoder, head]).",
    )


def _check_graph(loss: torch.Tensor, parameters: list[nn.Parameter], inputs: list[torch.Tensor]) -> None:
    """Refuse what would lose a gradient: of what is not the model's, or by a checkpoint that must not be stopped."""
    if has_reentrant_checkpoint(loss):
        raise InputError(
            _CALL_LOSS,
            got="a loss through checkpoint(use_reentrant=True), which only backward() can go through",
            expected="a graph that torch.autograd.grad can go through",
            fix="pass use_reentrant=False to the checkpoint; a trainer has a setting for it, such as "
            "gradient_checkpointing_kwargs={'use_reentrant': False}.",
        )
    known, lost = set(map(id, parameters)), set(map(id, inputs))
    for node in graph_nodes(loss):
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in lost:
            raise InputError(
                _CALL_LOSS,
                got=f"a tensor of shape {tuple(leaf.shape)} in the batch that requires a gradient",
                expected="gradients of the model's parameters only: this one would silently get none",
                fix="detach() it; where the loss function itself asks for its gradient, let it call requires_grad_().",
            )
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            raise InputError(
                _CALL_LOSS,
                got=f"a loss that trains a parameter of shape {tuple(leaf.shape)} which is not the model's",
                expected="a loss over the parameters of the model",
                fix="pass all modules that are trained: SplitLoss([model, criterion]).",
            )
