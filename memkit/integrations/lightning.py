"""Lightning: training steps that run in parts and survive out-of-memory errors, under Trainer and Fabric.

For the package ``lightning`` (``import lightning as L``); the older ``pytorch_lightning`` has its own classes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import lightning.fabric.strategies as fabric_strategies
import lightning.pytorch.strategies as trainer_strategies
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from memkit._core.errors import ConfigError, warn_user
from memkit._core.settings import Checker, check_version
from memkit._gradients.loss import Loss
from memkit.integrations.lightning_parts import BatchPart, BatchParts, detached_part, rows_of, with_places
from memkit.memory.manager import MemoryManager
from memkit.recipes.order import tell_epoch
from memkit.train.gradients import list_parameters, multiply_gradients
from memkit.train.models import may_recover_alone
from memkit.train.split import count_rows
from memkit.train.split_loss import SplitLoss

_VERSION = 1
_WHOLE_MODELS = (
    trainer_strategies.SingleDeviceStrategy,
    trainer_strategies.DDPStrategy,
    fabric_strategies.SingleDeviceStrategy,
    fabric_strategies.DDPStrategy,
)


class MemoryEfficientModule(LightningModule):  # type: ignore[misc]  # not installed for every type check
    """A LightningModule whose ``training_step`` runs on parts of the batch, with the gradient of the whole batch.

    The trainer sees one step: one loss, one backward, each value logged once. A part that runs out of memory is rolled
    back (gradients, buffers, random state, torchmetrics, logged values), split, and run again within the same step; the
    size that fits is remembered.

    ``training_step`` returns what Lightning allows: the mean loss over its rows, a dict with that loss under
    ``"loss"``, or None, which skips the whole batch. The loss may also be a `Loss`, if its mean is not over rows. It
    gets some rows of the batch at a time, so it must derive all sizes from them. Attributes that it changes, and
    ``self.logger``, are touched once per part.

    Attributes:
        split_options: Keyword arguments for `SplitLoss`, such as ``num_microbatches``, ``on_oom`` and ``split_fn``.
        split_loss: The `SplitLoss` that runs the steps; see its ``sizes`` and ``num_ooms`` for what happened.

    Raises:
        ConfigError: Manual optimization, ``dataloader_iter``, or a strategy that shards the model (FSDP, DeepSpeed).

    Example:
        >>> import torch
        >>> from memkit.integrations.lightning import MemoryEfficientModule
        >>> class Net(MemoryEfficientModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.split_options = {"num_microbatches": 4}
        ...         self.layer = torch.nn.Linear(3, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         return torch.nn.functional.mse_loss(self.layer(x), y)
    """

    split_options: Mapping[str, Any] = MappingProxyType({})
    _split_loss: SplitLoss | None = None
    _part: BatchPart | None = None  # the part that is running

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        step = cls.training_step
        if step is not LightningModule.training_step and not getattr(step, "runs_in_parts", False):
            cls.training_step = _in_parts(step)

    @property
    def split_loss(self) -> SplitLoss:
        """The `SplitLoss` that runs the steps; created on first access."""
        if self._split_loss is None:
            options = dict(self.split_options)
            if options.get("split_fn") is not None:
                options["split_fn"] = with_places(options["split_fn"])
            num_ranks = self.fabric.world_size if self._fabric else self._trainer.world_size if self._trainer else 1
            if not may_recover_alone(self, num_ranks, is_sharded=False, call="MemoryEfficientModule"):
                options["on_oom"] = "raise"
            self._split_loss = SplitLoss(self, **options)
        return self._split_loss

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value; within ``training_step`` once per batch: means are weighted by the parts' rows or counts."""
        if self._part is None:
            super().log(name, value, *args, **kwargs)
        else:
            self._part.log(name, value, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the objects of this run, as LightningModule does with its trainer."""
        return {**super().__getstate__(), "_split_loss": None, "_part": None}

    def _run_in_parts(self, step: Callable[..., Any], batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plugins = _check_owner(self, step)
        parts = BatchParts(self)
        is_packed = self.split_options.get("split_fn") is not None
        if self._compiler_ctx is not None:  # Lightning compiled around the parts, where compilation is off
            step = self._compiler_ctx["dynamo_ctx"](step)

        def loss_of_part(model: Any, item: Any) -> Any:
            micro, place = item
            key, num_rows = (place, None) if isinstance(place, tuple) else ((int(place[0]),), len(place))
            # During a check of the split, values logged by the step are discarded.
            part = (BatchParts(nn.Module()) if self.split_loss.is_checking else parts).begin(key, num_rows)
            return model._run_part(part, step, micro, *args, **kwargs)  # noqa: SLF001

        scaler = getattr(plugins, "scaler", None)
        try:
            loss = self.split_loss(
                (batch, () if is_packed else rows_of(batch)),
                loss_of_part,
                scale=1.0 if scaler is None else scaler.get_scale(),
            )
        except _SkippedError:
            loss = None
        parts.flush(super().log)
        if loss is None:
            return None
        outputs = parts.outputs()
        return {"loss": loss, **outputs} if outputs else loss

    def _run_part(self, part: BatchPart, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the step on a part; return the loss, and store the rest of its output in the part."""
        self._part = part
        try:
            output = step(self, *args, **kwargs)
        finally:
            self._part = None
        loss = output
        if isinstance(output, Mapping) and "loss" in output:
            loss = output["loss"]
            part.outputs = detached_part({name: value for name, value in output.items() if name != "loss"})
        if loss is None:
            raise _SkippedError
        if isinstance(loss, Loss) and loss.count is not None:
            part.weight = float(loss.count)
        return loss


class _SkippedError(Exception):
    """Raised when a part of the batch asks to skip the batch."""


def _in_parts(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    @torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
    def training_step(self: MemoryEfficientModule, batch: Any, *args: Any, **kwargs: Any) -> Any:
        is_owned = self._trainer is not None or self._fabric is not None
        if self._part is not None or not is_owned or not torch.is_grad_enabled():
            return step(self, batch, *args, **kwargs)  # called by another step, by hand, or in an evaluation
        return self._run_in_parts(step, batch, args, kwargs)

    training_step.runs_in_parts = True  # type: ignore[attr-defined]
    return training_step


def _check_owner(module: MemoryEfficientModule, step: Callable[..., Any]) -> Any:
    """Refuse anything that cannot run in parts; return the precision plugin of the trainer or Fabric."""
    if module._fabric is not None:  # noqa: SLF001 - the public property raises without one
        strategy = module.fabric.strategy
        plugins = strategy.precision
    else:
        strategy = module.trainer.strategy
        plugins = strategy.precision_plugin
    got = expected = fix = ""
    if not module.automatic_optimization and module._fabric is None:  # noqa: SLF001
        got, expected = "automatic_optimization=False", "a step that the trainer owns"
        fix = (
            "derive from LightningModule, build a memkit.SplitLoss for each network, and call "
            "self.manual_backward(split(batch, loss_fn))."
        )
    elif "dataloader_iter" in inspect.signature(step).parameters:
        got, expected = "training_step(self, dataloader_iter)", "training_step(self, batch, ...)"
        fix = "take the batch as the argument."
    elif not isinstance(strategy, _WHOLE_MODELS):
        got, expected = f"the strategy {type(strategy).__name__}", "one device, or DistributedDataParallel"
        fix = "for FSDP2 use memkit.MemoryEfficientTrainingWrapper in a loop of your own, whose ranks split in step."
    if got:
        raise ConfigError("MemoryEfficientModule.training_step(...)", got=got, expected=expected, fix=fix)
    return plugins


def _over_ranks(trainer: Trainer, number: int, operation: str) -> int:
    """Return the maximum or the sum of a number over the ranks; all of them must call it."""
    if trainer.world_size == 1:
        return number  # not through the device, which would force a synchronization
    return int(trainer.strategy.reduce(torch.tensor(number, device=trainer.strategy.root_device), reduce_op=operation))


class MemoryCallback(Callback):  # type: ignore[misc]  # as above
    """Logs memory figures, keeps the sizes that fit in checkpoints, and writes a file on a final out-of-memory error.

    Each batch logs ``memkit/allocated_bytes`` and ``memkit/peak_bytes`` if the device counts them, and for a
    `MemoryEfficientModule` ``memkit/num_microbatches`` and ``memkit/num_ooms``, the errors survived so far. Datasets
    and batch samplers with a ``set_epoch`` are told the epoch.

    Args:
        memory: Gets a phase ``"step"`` for each batch, an event for each optimizer step, and a mark ``"oom"`` for each
            batch that survived an out-of-memory error; None creates one for the trainer's device, without a file.
        post_mortem: The directory for ``out-of-memory.json`` if an out-of-memory error ends the run; None: no file.
        exact_accumulation: With ``accumulate_grad_batches=N``, make each group's gradient the mean over its rows.
            Lightning divides every batch by N: a last group of k batches counts k/N, and a short last batch as much as
            a full one. Without this option Lightning's weights are kept, and there is a warning. On several ranks the
            rows of all ranks count, which takes the exchange of one number per step.

    Raises:
        FileFormatError: A checkpoint holds a state of another version.

    Example:
        >>> import lightning as L
        >>> from memkit.integrations.lightning import MemoryCallback
        >>> trainer = L.Trainer(
        ...     accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        ...     enable_model_summary=False, callbacks=[MemoryCallback()],
        ... )
    """

    def __init__(
        self,
        memory: MemoryManager | None = None,
        *,
        post_mortem: str | os.PathLike[str] | None = None,
        exact_accumulation: bool = False,
    ) -> None:
        Checker("MemoryCallback(...)").flag("exact_accumulation", exact_accumulation)
        self.memory = memory
        self._post_mortem, self._is_exact = post_mortem, exact_accumulation
        self._module: MemoryEfficientModule | None = None
        self._sizes: Mapping[str, Any] = {}
        self._num_steps = self._num_ooms = 0
        self._batch: Any = None
        self._step = contextlib.ExitStack()
        self._rows: list[int] = []  # of the batches in this group
        self._unit = 0  # rows with a weight of one; 0: not known yet
        self._has_warned = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching; restore the sizes that fit."""
        if self.memory is None:
            self.memory = MemoryManager(trainer.strategy.root_device)
        self._num_steps, self._unit = trainer.global_step, 0
        if isinstance(pl_module, MemoryEfficientModule):
            self._module, self._num_ooms = pl_module, pl_module.split_loss.num_ooms
            if self._sizes:
                pl_module.split_loss.load_state_dict(self._sizes)
                self._sizes = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the data the epoch in which the run starts or resumes."""
        tell_epoch(trainer.train_dataloader, trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the epoch to datasets and batch samplers that draw by it: Lightning tells only samplers."""
        tell_epoch(trainer.train_dataloader, trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a phase; note the start of a group of accumulated batches."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._rows = []
        self._batch = batch
        self._step.close()  # in case an error interrupted the previous batch
        assert self.memory is not None  # noqa: S101 - created in on_fit_start
        self._step.enter_context(self.memory.phase("step"))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Weight the batch by its share of its group's rows."""
        if trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization:
            self._rows.append(count_rows(self._batch) if self._is_exact else 1)
            if self._is_exact:
                # Over all ranks, whose gradients are averaged: each row must have the same weight on every rank.
                self._unit = self._unit or _over_ranks(trainer, self._rows[-1], "max")
                weight = self._rows[-1] / self._unit
                loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Divide a group's gradient by its total weight, or warn that it is not weighted."""
        num_batches = trainer.accumulate_grad_batches
        if self._is_exact and self._rows:
            num_rows = _over_ranks(trainer, sum(self._rows), "sum") / trainer.world_size
            multiply_gradients(list_parameters([optimizer]), num_batches * self._unit / num_rows)
        elif 0 < len(self._rows) < num_batches and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"Lightning divides the gradient of the epoch's last {len(self._rows)} batches by "
                f"accumulate_grad_batches={num_batches}: this step has {len(self._rows)}/{num_batches} of the weight "
                "of the others. Way out: MemoryCallback(exact_accumulation=True), with which every step uses the "
                "mean over its rows."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the memory figures of the batch."""
        self._batch = None
        self._step.close()
        assert self.memory is not None  # noqa: S101 - created in on_fit_start
        values: dict[str, int | None] = {}
        if self.memory.device.type != "cpu":  # the CPU has no counters
            now = self.memory.snapshot()
            values = {"allocated_bytes": now.allocated_bytes, "peak_bytes": now.peak_bytes}
        if self._module is not None:
            split = self._module.split_loss
            values |= {"num_microbatches": len(split.sizes), "num_ooms": split.num_ooms}
            if split.num_ooms != self._num_ooms:
                self.memory.mark("oom", note={"num_ooms": split.num_ooms - self._num_ooms, "sizes": list(split.sizes)})
                self._num_ooms = split.num_ooms
        if trainer.global_step != self._num_steps:
            self._num_steps = trainer.global_step
            self.memory.step()
        if not trainer.barebones:
            known = {f"memkit/{name}": float(value) for name, value in values.items() if value is not None}
            pl_module.log_dict(known, on_step=True, on_epoch=False, batch_size=1)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the post-mortem while the error's frames are still alive; end the batch's phase."""
        if self._post_mortem is not None and self.memory is not None:
            with contextlib.suppress(type(exception)), self.memory.post_mortem(self._post_mortem):
                raise exception
        self._step.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that fit."""
        sizes = self._sizes if self._module is None else self._module.split_loss.state_dict()
        return {"version": _VERSION, "sizes": sizes}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore `state_dict`; `on_fit_start` passes it on."""
        check_version("MemoryCallback.load_state_dict(state)", state_dict, _VERSION)
        self._sizes = state_dict["sizes"]
