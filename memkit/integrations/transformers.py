"""Hugging Face Trainer: training steps that run in parts and survive out-of-memory errors; memory in its log."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from memkit._core.errors import ConfigError, InputError
from memkit._gradients.loss import Loss
from memkit._recovery.snapshot import Rollback, StateWatch
from memkit._torch.autocast import without_gradients
from memkit._torch.graph import saved
from memkit.memory.manager import MemoryManager
from memkit.recipes.order import tell_epoch
from memkit.train.divisors import divisors
from memkit.train.gradients import graph_nodes
from memkit.train.split import SplitFn, count_rows
from memkit.train.split_loss import SplitLoss

_CALL = "MemoryEfficientTrainer"
_SHARDED = {DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA}
_CLOSE = 1e-5  # relative; two forwards of the same rows differ by less


class MemoryCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # not there for every type check
    """Adds memory figures to the trainer's log, and the sizes that fit to its checkpoints.

    Each logged ``loss`` comes with ``memkit/allocated_bytes`` and ``memkit/peak_bytes`` of the device (left out if it
    has no counters, as on the CPU), ``memkit/host_bytes`` of this process, and with a `MemoryEfficientTrainer`
    ``memkit/num_ooms`` survived so far and ``memkit/num_microbatches`` of the last batch. Every optimizer step is a
    phase ``"step"`` of the memory manager, with a mark ``"oom"`` if it survived an out-of-memory error. Datasets and
    samplers with a ``set_epoch`` are told the epoch.

    A `MemoryEfficientTrainer` adds one by itself. Pass your own for a log file:
    ``callbacks=[MemoryCallback(mk.MemoryManager(log="memory_events.jsonl"))]``; it works with any `Trainer`. With other
    trainers, reporting callbacks such as TensorBoard's run first, so the figures are only in
    ``trainer.state.log_history``; a `MemoryEfficientTrainer` puts it before them.

    Args:
        memory: The manager; None creates one for the trainer's device.

    Attributes:
        memory: The manager; None before training if none was given.
        split: The `SplitLoss` of the training; None if there is none.
        sizes: Its state, as loaded from a checkpoint.

    Example:
        >>> import memkit as mk
        >>> from memkit.integrations.transformers import MemoryCallback
        >>> callback = MemoryCallback(mk.MemoryManager("cpu"))  # Trainer(..., callbacks=[callback])
        >>> callback.memory.num_steps
        0
    """

    def __init__(self, memory: MemoryManager | None = None) -> None:
        self.memory = memory
        self.split: SplitLoss | None = None
        self.sizes: dict[str, Any] = {}
        self._num_ooms = 0
        self._step = contextlib.ExitStack()

    def watch(self, split: SplitLoss) -> None:
        """Report on this `SplitLoss` from now on."""
        self.split, self._num_ooms = split, split.num_ooms

    def state(self) -> dict[str, Any]:
        """Return the part that a trainer checkpoint keeps."""
        return {"args": {}, "attributes": {"sizes": self.split.state_dict() if self.split else self.sizes}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Create the manager; take the sizes from the checkpoint that training resumes from."""
        self.memory = self.memory or MemoryManager(args.device)
        saved = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(saved, Mapping) and saved["attributes"]["sizes"]:
            self.sizes = saved["attributes"]["sizes"]

    def on_epoch_begin(
        self, _args: TrainingArguments, state: TrainerState, *_: Any, train_dataloader: Any = None, **__: Any
    ) -> None:
        """Tell the epoch to samplers and datasets that draw by it; accelerate tells most, but not all."""
        if train_dataloader is not None:
            tell_epoch(train_dataloader, int(state.epoch or 0))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin a step's phase."""
        self._step.close()  # in case an error interrupted the previous step
        if self.memory is not None:
            self._step.enter_context(self.memory.phase("step"))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End the step's phase, and mark the out-of-memory errors that it survived."""
        self._step.close()
        if self.memory is None:
            return
        if self.split is not None and self.split.num_ooms > self._num_ooms:
            note = {"num_ooms": self.split.num_ooms - self._num_ooms, "sizes": list(self.split.sizes)}
            self.memory.mark("oom", note=note)
            self._num_ooms = self.split.num_ooms
        self.memory.step()

    def on_log(self, _args: TrainingArguments, state: TrainerState, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """Add memory figures to the training log."""
        if self.memory is None or "loss" not in logs:
            return
        snapshot = self.memory.snapshot()
        figures = {
            "memkit/allocated_bytes": snapshot.allocated_bytes,
            "memkit/peak_bytes": snapshot.peak_bytes,
            "memkit/host_bytes": snapshot.host_rss_bytes,
        }
        if self.split is not None:
            figures |= {"memkit/num_ooms": self.split.num_ooms, "memkit/num_microbatches": len(self.split.sizes)}
        known = {name: value for name, value in figures.items() if value is not None}
        logs.update(known)
        state.log_history[-1].update(known)  # the trainer has already put a copy of the logs there


class MemoryEfficientTrainer(Trainer):  # type: ignore[misc]  # not there for every type check
    """A `Trainer` that splits batches when memory requires it, with the gradient of the whole batch.

    Everything else is the `Trainer`'s: its loop, accumulation, mixed precision, clipping, logs and checkpoints see one
    forward and one backward per batch. Batch size, number of steps and schedule do not change. Put it before another
    trainer to get the same there: ``class MyTrainer(MemoryEfficientTrainer, SFTTrainer): ...``. Your own
    ``compute_loss`` or ``compute_loss_func`` is called once per part. Evaluation is unchanged.

    How parts are weighted: if the loss is a sum divided by ``num_items_in_batch``, parts add up. Whether it is one is
    measured on the first part, since many models accept the number and ignore it. Otherwise the loss is a mean,
    weighted by the count read from the graph (that of its cross-entropy), or by the rows if no label is ignored and a
    cross-entropy with ``reduction="none"``, if there is one, is seen to end in a mean. Any other loss is refused.

    Memory and time cost: those of `SplitLoss`, plus two forwards of the first part, once.

    Args:
        *args: For `Trainer`.
        num_microbatches: Minimum number of parts of each batch (``per_device_train_batch_size``).
        on_oom: As for `MemoryEfficientTrainingWrapper`.
        split_fn: ``split_fn(inputs, n)`` returns a list of about n parts, for inputs whose rows are not samples.
        **kwargs: For `Trainer`.

    Raises:
        ConfigError: In the first step: the model is spread over devices (DeepSpeed, FSDP, DataParallel, ...).
        InputError: In the first step: inputs without common rows, and no ``split_fn``. In a step that is split: a loss
            that cannot be weighted.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from transformers import TrainingArguments
        >>> from memkit.integrations.transformers import MemoryEfficientTrainer
        >>> class Net(torch.nn.Linear):
        ...     def forward(self, x, labels):
        ...         return {"loss": (super().forward(x).squeeze(-1) - labels).pow(2).mean()}
        >>> rows = [{"x": torch.ones(3) * i, "labels": float(i)} for i in range(8)]
        >>> args = TrainingArguments(
        ...     tempfile.mkdtemp(), max_steps=2, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True
        ... )
        >>> trainer = MemoryEfficientTrainer(Net(3, 1), args, train_dataset=rows, num_microbatches=4)
        >>> output = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        >>> trainer.split_loss.sizes
        (2, 2, 2, 2)
    """

    def __init__(
        self,
        *args: Any,
        num_microbatches: int = 1,
        on_oom: Literal["exact", "inexact", "raise"] = "exact",
        split_fn: SplitFn | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._split_options: dict[str, Any] = {
            "num_microbatches": num_microbatches,
            "on_oom": on_oom,
            "split_fn": split_fn,
        }
        self._split_model: nn.Module | None = None
        self._is_divided: bool | None = None  # by num_items_in_batch; None: not measured yet
        self.split_loss: SplitLoss | None = None
        callbacks = self.callback_handler.callbacks
        own = [each for each in callbacks if isinstance(each, MemoryCallback)] or [MemoryCallback()]
        # Before the callbacks that report logs.
        callbacks[:] = own + [each for each in callbacks if not isinstance(each, MemoryCallback)]

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a `Trainer`'s step with a loss that is computed in parts."""
        # Within this step compute_loss is called once per part, whether a subclass, a base class or the user (on the
        # trainer itself) defines it.
        attributes = self.__dict__
        own = attributes.get("compute_loss")
        attributes["compute_loss"] = functools.partial(self._compute_in_parts, self.compute_loss)
        try:
            loss: torch.Tensor = super().training_step(model, *args, **kwargs)
        finally:
            attributes["compute_loss"] = own
            if own is None:
                del attributes["compute_loss"]
        return loss

    def _compute_in_parts(
        self,
        compute_loss: Callable[..., torch.Tensor],
        model: nn.Module,
        inputs: Mapping[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        def loss_of(model: nn.Module, part: Mapping[str, Any]) -> Any:
            # A copy for each attempt, since compute_loss may pop the labels.
            ask = functools.partial(compute_loss, model, num_items_in_batch=num_items_in_batch)
            if part is inputs:
                return ask(copy.copy(part))
            adds_up = num_items_in_batch is not None and self._adds_up(compute_loss, model, part, num_items_in_batch)
            loss = ask(copy.copy(part))
            if adds_up:
                return loss
            return Loss(mean=loss, count=_count_items(loss, part))

        scaler = self.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        return self._split_of(model)(inputs, loss_of, scale=scale)

    def _adds_up(
        self,
        compute_loss: Callable[..., torch.Tensor],
        model: nn.Module,
        part: Mapping[str, Any],
        num_items: torch.Tensor | int,
    ) -> bool:
        """Whether the loss is a sum divided by the number of items: measures whether doubling that number halves it."""
        if self._is_divided is None:
            losses = []
            for number in (num_items, 2 * num_items):
                with without_gradients(), Rollback(StateWatch(model)).undone():
                    losses.append(float(compute_loss(model, copy.copy(part), num_items_in_batch=number)))
            once, twice = losses
            if once == 0 or not math.isfinite(once):  # inconclusive: this part adds nothing, or has a count of 0
                return once == 0
            if not any(math.isclose(once, each, rel_tol=_CLOSE) for each in (twice, 2 * twice)):
                raise InputError(
                    f"{_CALL}: splitting a batch",
                    got=f"a loss of {once:.6g} that becomes {twice:.6g} with twice the num_items_in_batch",
                    expected="a sum divided by num_items_in_batch, or a mean independent of it",
                    fix="remove terms that are not divided (for a router's auxiliary loss: "
                    "output_router_logits=False), or keep batches whole with num_microbatches=1, on_oom='raise'.",
                )
            self._is_divided = not math.isclose(once, twice, rel_tol=_CLOSE)
        return self._is_divided

    def _split_of(self, model: nn.Module) -> SplitLoss:
        if self.split_loss is None or model is not self._split_model:
            _check_spread(self)
            split = SplitLoss(model, reduction="sum", **self._split_options)
            for each in self.callback_handler.callbacks:
                if isinstance(each, MemoryCallback):
                    split.load_state_dict(each.sizes)
                    each.watch(split)
            self.split_loss, self._split_model = split, model
        return self.split_loss


def _count_items(loss: torch.Tensor, part: Mapping[str, Any]) -> float:
    """Return the count behind a part's mean loss: the one saved by its cross-entropy, or the rows."""
    nodes = [node for node in graph_nodes(loss) if node.name().startswith("NllLoss")]
    counts = {float(saved(node, "total_weight")) if saved(node, "reduction") == 1 else -1.0 for node in nodes}
    if len(counts) == 1 and min(counts) >= 0:
        return counts.pop()
    labels = part.get("labels")
    has_ignored = isinstance(labels, torch.Tensor) and not labels.is_floating_point() and bool(labels.eq(-100).any())
    if not has_ignored and all(saved(node, "reduction") == 0 for node in nodes):
        num_rows = count_rows(part)
        if _is_mean_over_rows(loss, {saved(node, "target").numel() for node in nodes}, num_rows):
            return num_rows
    raise _uncounted(counts, has_ignored=has_ignored, has_labels=labels is not None)


def _is_mean_over_rows(loss: torch.Tensor, sizes: set[int], num_rows: int) -> bool:
    """Return whether a loss is a mean over the rows, or over all elements of its unreduced cross-entropies.

    Args:
        loss: The loss.
        sizes: Numbers of elements of its cross-entropies with ``reduction="none"``. Without any, nothing can be read
            from the graph, and it counts as one.
        num_rows: Number of rows.
    """
    if not sizes:
        return True
    numbers = {num_rows, *sizes} if all(size % num_rows == 0 for size in sizes) else set()
    terms = divisors(loss)
    return bool(terms) and all(
        each.operators[-1].startswith("Mean") and each.factors[-1:] and each.factors[-1] in numbers for each in terms
    )


def _uncounted(counts: set[float], *, has_ignored: bool, has_labels: bool) -> InputError:
    """Return the error for a mean whose number of items is not known.

    Args:
        counts: Those that cross-entropies have saved; -1 for one that is not a mean by itself.
        has_ignored: Whether labels are ignored.
        has_labels: Whether the batch has ``labels``: without them, a `Trainer` counts no items.
    """
    got = "a mean loss over an unknown number of items"
    if -1.0 in counts:
        got = "a cross-entropy with reduction='none' or 'sum' whose graph does not show a mean over all rows"
    elif counts:
        shown = " and ".join(f"{each:g}" for each in sorted(counts))
        got = f"a loss of several cross-entropies, which are means over different numbers of items ({shown})"
    divide = "pass compute_loss_func=..., which divides a sum by num_items_in_batch"
    if not has_labels:
        divide = (
            "ignore the same rows in all targets of the batch (both start and end of an answer outside of the window), "
            "so that their counts agree; or let data_collator=... put all targets into batch['labels'], -100 where "
            f"ignored, without which a Trainer counts no items, and {divide}"
        )
    return InputError(
        f"{_CALL}: splitting a batch",
        got=got + (", and labels that are ignored (-100)" if has_ignored else ""),
        expected="one cross-entropy; or labels without ignored ones, and a mean over the rows, such as focal.mean() of "
        "a cross-entropy with reduction='none'",
        fix=f"{divide}; or keep batches whole with num_microbatches=1, on_oom='raise'.",
    )


def _check_spread(trainer: Trainer) -> None:
    """Refuse a model that is spread over devices: one process cannot rerun a part of its batch alone."""
    kind = trainer.accelerator.distributed_type
    # Attributes and methods that transformers 4 does not have; its tensor parallelism marks the model.
    is_sharded = kind in _SHARDED or getattr(trainer, "is_distributed_loading_by_transformers", False)
    sizes = (getattr(trainer, name, lambda: 1)() for name in ("get_cp_size", "get_sp_size", "get_tp_size"))
    is_spread = is_sharded or any(size > 1 for size in sizes) or (getattr(trainer.model, "tp_size", None) or 1) > 1
    if trainer.args.n_gpu > 1:
        got, fix = f"DataParallel over {trainer.args.n_gpu} GPUs", "start one process for each: torchrun, accelerate."
    elif is_spread:
        got = f"a model or a sequence that is spread over ranks ({kind.value})"
        fix = "use Trainer with a smaller per_device_train_batch_size and gradient_accumulation_steps; or, with "
        fix += "fully_shard in a loop of your own, MemoryEfficientTrainingWrapper, whose ranks split in step."
    else:
        return
    raise ConfigError(_CALL, got=got, expected="one process, or DistributedDataParallel", fix=fix)
