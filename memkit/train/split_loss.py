"""The loss of a batch whose backward is already done in parts, for a step that somebody else owns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from memkit._errors import ConfigError, InputError, StateError
from memkit.train.checks import check_choice, check_loss, check_steps, read_count
from memkit.train.gradients import graph_nodes, has_reentrant_checkpoint
from memkit.train.models import may_recover_alone, unwrap_model
from memkit.train.probe import SplitVerdict, probe_split, scan_modules, warn_or_refuse
from memkit.train.ranks import Shards, find_ranks
from memkit.train.replay import BufferWatch
from memkit.train.sizes import SizeMemory
from memkit.train.split import SplitFn
from memkit.train.window import Window

_HALF = {torch.bfloat16, torch.float16}
LossFn = Callable[[nn.Module, Any], Any]


class SplitLoss:
    """The loss of a whole batch, to be backpropagated by whoever owns the step, in memory for a part of it.

    Forward and backward of the batch run here, in micro-batches; what is returned is the batch's loss with its gradient
    ready. ``loss.backward()`` only hands the gradient over, through the parameters' own graph nodes: accumulation, loss
    scaling, hooks and DistributedDataParallel see one usual backward. When a micro-batch runs out of memory it is
    rolled back (gradients, buffers, random state), cut, and run again.

    Where you own the step, use `MemoryEfficientTrainingWrapper`; this is for trainers that own it.

    Memory cost: one set of gradients between the call and the end of backward, beside what ``.grad`` holds already; and
    a copy of the model's buffers. Time cost: one multiplication for each gradient.

    Args:
        model: The module, or several, whose parameters get the gradient; also wrapped in DistributedDataParallel or
            compiled.
        num_microbatches: Micro-batches for each batch, at least.
        reduction: ``"mean"``: the loss function gives the mean over the micro-batch's rows, or ``(loss_sum, count)``.
            ``"sum"``: the losses of the parts add up to the batch's, as where the function divides by a number of items
            that it was told.
        on_oom: ``"split"`` recovers; ``"raise"`` lets the error through.
        split_fn: ``split_fn(batch, n)`` returns a list of about n parts, for packed batches.
        probe: Check on the first batch that is split, once, whether its parts add up to the whole.

    Raises:
        ConfigError: The parameters are sharded (FSDP), or a setting is wrong.

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
        check_steps(num_microbatches)
        check_choice("reduction", reduction, ("mean", "sum"))
        check_choice("on_oom", on_oom, ("split", "raise"))
        self._model = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        self._own = unwrap_model(self._model)
        ranks = find_ranks(self._model, list(self._model.parameters()))
        if isinstance(ranks, Shards):
            raise ConfigError(
                "SplitLoss(model)",
                got="a model whose parameters are sharded over ranks",
                expected="a whole model, or one in DistributedDataParallel",
                fix="use MemoryEfficientTrainingWrapper, whose ranks split in step.",
            )
        num_ranks = 1 if ranks is None else ranks.num_ranks
        if on_oom == "split" and not may_recover_alone(self._model, num_ranks, is_sharded=False, call="SplitLoss"):
            on_oom = "raise"
        self._num_microbatches, self._reduction, self._on_oom = num_microbatches, reduction, on_oom
        self._split_fn = split_fn
        self._wants_probe, self._wants_graph_check = probe and split_fn is None, True
        self._watch, self._memory = BufferWatch(self._own), SizeMemory()
        self.sizes: tuple[int, ...] = ()
        """Sizes of the last batch's micro-batches: rows, or elements where there is a ``split_fn``."""
        self.num_ooms = 0
        """Out-of-memory errors survived so far."""

    def __call__(self, batch: Any, loss_fn: LossFn, *, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Run forward and backward of a batch; return its loss.

        Args:
            batch: A pytree of tensors with the rows in dimension 0, on the model's device; or what ``split_fn`` takes.
            loss_fn: ``loss_fn(model, micro_batch)`` returns the micro-batch's loss, see ``reduction``.
            scale: What a loss scaler will multiply the loss with (``scaler.get_scale()``), so that gradients in float16
                do not vanish on the way; the result is not scaled.

        Returns:
            0-dim loss of the batch; without gradients (``torch.no_grad()``) the plain loss of the whole batch, in one.

        Raises:
            MemkitOutOfMemoryError: Even the smallest micro-batch does not fit.
            InputError: The loss is not a scalar with a graph, trains a parameter that is not the model's, or holds a
                reentrant checkpoint.
        """
        if not torch.is_grad_enabled():
            value, count, _ = self._evaluate(batch, loss_fn)
            return value if count is None else value / count
        with self._synchronised() as hand_over:
            total = self._run(batch, loss_fn, scale)
            if self._wants_probe and len(self.sizes) > 1:
                self._wants_probe = False
                warn_or_refuse(self._judge(batch, loss_fn), call="SplitLoss")
            return hand_over(total.as_loss(scale))

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of sizes that fit."""
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._memory.load_state_dict(state)

    def _run(self, batch: Any, loss_fn: LossFn, scale: float | torch.Tensor) -> _Total:
        total = _Total([parameter for parameter in self._own.parameters() if parameter.requires_grad])
        window = Window(
            batch,
            self._num_microbatches,
            accumulator=total,
            watch=self._watch,
            sizes=self._memory,
            on_oom=self._on_oom,
            split_fn=self._split_fn,
            call="SplitLoss",
        )
        while (attempt := window.next_attempt()) is not None:
            with attempt as micro:
                self._add(total, micro, loss_fn, scale, share=attempt.size / attempt.batch_size)
                attempt.is_added = True
            window.settle(attempt)
        self.sizes = window.sizes
        self.num_ooms += window.num_ooms
        return total

    def _add(self, total: _Total, micro: Any, loss_fn: LossFn, scale: float | torch.Tensor, *, share: float) -> None:
        # A function of its own: when it fails, its frame takes every tensor with it.
        loss, count, weight = self._evaluate(micro, loss_fn)
        if count is None and self._reduction == "mean":
            if self._split_fn is not None:
                raise InputError(
                    "SplitLoss(split_fn=...)",
                    got="a loss without a count, for a part made by split_fn",
                    expected="the weight of the part, which its rows do not tell",
                    fix="return (loss_sum, count) from loss_fn.",
                )
            weight = share
        if self._wants_graph_check:
            self._wants_graph_check = False
            _check_graph(loss, total.parameters)
        total.add(loss, weight, count, scale)

    def _evaluate(self, micro: Any, loss_fn: LossFn) -> tuple[torch.Tensor, float | None, float]:
        loss = loss_fn(self._own, micro)
        count = None
        if isinstance(loss, tuple):
            loss, count = loss[0], float(read_count(loss[1], stay_on_device=False))
        if torch.is_grad_enabled():
            check_loss(loss)
        return loss.reshape(()), count, 1.0

    def _judge(self, batch: Any, loss_fn: LossFn) -> SplitVerdict:
        if self._reduction == "mean":
            return probe_split(self._own, batch, loss_fn)
        return SplitVerdict(None, modules=scan_modules(self._own))

    @contextlib.contextmanager
    def _synchronised(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Let DistributedDataParallel see one forward around all parts: it prepares the exchange of gradients there."""
        if not isinstance(self._model, nn.parallel.DistributedDataParallel):
            yield lambda loss: loss
            return
        # What its forward does before and after the module's own; there is no public form.
        self._model._pre_forward()  # type: ignore[no-untyped-call]  # noqa: SLF001
        yield self._model._post_forward  # noqa: SLF001


class _Total:
    """Loss and gradient of the parts so far; a window's accumulator."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.discard()

    def discard(self) -> None:
        """Start anew."""
        self.is_torn = False
        self._gradients: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._value: torch.Tensor | None = None
        self._count: float | None = None
        self._unit = 1.0  # counted losses are summed in units of the first part's weight: float16 holds no large sums

    def add(self, loss: torch.Tensor, weight: float, count: float | None, scale: float | torch.Tensor) -> None:
        """Add a part's loss and gradient, times its weight; with a count, they are sums over it."""
        if count is not None:
            if self._count is None:
                self._count, self._unit = 0.0, count or 1.0
            weight = 1.0 / self._unit if count else 0.0
        if weight:
            device_type = loss.device.type
            with torch.autocast(device_type, enabled=False):  # a backward runs in the dtypes of its forward
                root = torch.full_like(loss, weight) * scale
                gradients: list[torch.Tensor | None] = list(
                    torch.autograd.grad(loss, self.parameters, root, allow_unused=True)
                )
            self.is_torn = True
            for i in range(len(gradients)):
                # Not in place: autograd may return one tensor for two parameters.
                before, gradient, gradients[i] = self._gradients[i], gradients[i], None
                if before is not None and gradient is not None:
                    gradient = before.float() + gradient if before.dtype in _HALF else before + gradient
                self._gradients[i] = before if gradient is None else gradient
            value = loss.detach()
            value = (value.float() if value.dtype in _HALF else value) * weight
            self._value = value if self._value is None else self._value + value
            self.is_torn = False
        if count is not None:
            self._count = (self._count or 0.0) + count

    def as_loss(self, scale: float | torch.Tensor) -> torch.Tensor:
        """Return the loss, whose backward hands the gradient over; this object is empty then."""
        factor = 1.0 if self._count is None else self._unit / self._count if self._count else 0.0
        # Only parameters that the loss reaches: the others are to have no gradient, not zeros. One must be there.
        reached = [i for i, gradient in enumerate(self._gradients) if gradient is not None] or [0]
        parameters = [self.parameters[i] for i in reached]
        gradients = [self._gradients[i] for i in reached]
        value = torch.zeros((), device=parameters[0].device) if self._value is None else self._value
        if factor != 1.0:
            value = value * factor
        self.discard()
        loss: torch.Tensor = _HandOver.apply(value, gradients, factor, scale, *parameters)  # type: ignore[no-untyped-call]
        return loss


class _HandOver(torch.autograd.Function):
    """A loss whose backward hands over gradients that are there already."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        gradients: list[torch.Tensor | None],
        factor: float,
        scale: float | torch.Tensor,
        *parameters: nn.Parameter,
    ) -> torch.Tensor:
        ctx.gradients, ctx.factor, ctx.dtypes = gradients, factor / scale, [each.dtype for each in parameters]
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise StateError(
                "loss.backward() of a SplitLoss",
                got="a second backward",
                expected="one backward for each loss, which hands its gradient over",
                fix="call the SplitLoss again, or add losses up before one backward.",
            )
        factor = gradient * ctx.factor
        for i, dtype in enumerate(ctx.dtypes):  # each is let go as soon as its product is there
            if gradients[i] is not None:
                gradients[i] = (gradients[i] * factor.to(gradients[i].device)).to(dtype)
        return None, None, None, None, *gradients


def _check_graph(loss: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Refuse what would lose a gradient: a parameter of another module, or a checkpoint that must not be stopped."""
    if has_reentrant_checkpoint(loss):
        raise InputError(
            "SplitLoss(model)(batch, loss_fn)",
            got="a loss through checkpoint(use_reentrant=True), which only backward() can go through",
            expected="a graph that torch.autograd.grad can go through",
            fix="pass use_reentrant=False to the checkpoint; a trainer has a setting for it, such as "
            "gradient_checkpointing_kwargs={'use_reentrant': False}.",
        )
    known = set(map(id, parameters))
    for node in graph_nodes(loss):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            raise InputError(
                "SplitLoss(model)(batch, loss_fn)",
                got=f"a loss that trains a parameter of shape {tuple(leaf.shape)} which is not the model's",
                expected="a loss over the parameters of the model",
                fix="pass all modules that are trained: SplitLoss([model, criterion]).",
            )
