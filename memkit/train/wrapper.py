"""One training step that fits: precision, checkpointing, accumulation, recovery from out-of-memory."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._charts.overview import Overview, Overviewed
from memkit._core.errors import (
    ConfigError,
    InputError,
    MemkitError,
    MemkitOutOfMemoryError,
    StateError,
    warn_user,
)
from memkit._core.printable import counted
from memkit._core.protocols import Average, Closing, Composed, MemoryWatch, SavedTogether, Scheduler, Uncopied
from memkit._core.words import guided, taking_settings_of
from memkit._gradients.loss import Loss, LossFn, call_loss_fn, check_loss_fn
from memkit._machine import devices
from memkit._recovery.attempt import Done, attempt as try_once
from memkit._recovery.batch import Attempt, BatchRun
from memkit._recovery.sizes import SizeMemory
from memkit._recovery.snapshot import Rollback
from memkit._tape.plan import SavedTensorPlan
from memkit._torch.compiler import count_graphs
from memkit._torch.modules import all_parameters
from memkit._torch.optimizers import step_hooks_of
from memkit.train.blocks import Choice
from memkit.train.check_attempt import CheckAttempt
from memkit.train.checkpointing import Checkpointing
from memkit.train.checks import (
    WRAPPER,
    check_loss,
    check_own_state,
    check_reduction,
    check_spent_graph,
    read_count,
    refuse_closed,
    warn_of_no_rows,
)
from memkit.train.divisors import divisors
from memkit.train.drive import BatchDriver
from memkit.train.evaluation import Evaluation, EvaluationBlock
from memkit.train.forecast import PartPlanner
from memkit.train.gradient_sum import GradientSum
from memkit.train.gradients import gradients_set_aside, list_parameters
from memkit.train.inner_steps import refuse_inner_steps
from memkit.train.models import device_of, evaluating, exchanges_statistics
from memkit.train.offload import make_offload, read_offload
from memkit.train.owners import check_owner, list_optimizers, numbered, read_model, warn_of_unused_step
from memkit.train.precision import Precision, PrecisionName
from memkit.train.remedies import Remedies, ways_to_less
from memkit.train.saved_tensors import treat_saved_tensors
from memkit.train.settings import check_config, check_on_gradients, check_settings, list_schedules
from memkit.train.sharded import choose_peers
from memkit.train.split import SplitFn
from memkit.train.split_check import Computation
from memkit.train.split_watch import Probe, SplitWatch
from memkit.train.words import RESULT_ABSENT, WRAPPER_ABSENT, WRAPPER_REWRITE, WRAPPER_WORDS

_VERSION = 1
_NEEDS_GRAPH = "create_graph"  # in the errors of AdaHessian and others of its kind
_CALL = WRAPPER.kind
_STATE = ("accumulator", "scaler", "sizes")
_STEP = "trainer.train_step(batch, loss_fn)"
Reduction = Literal["mean", "sum"]
OnOom = Literal["exact", "inexact", "raise"]


@guided(absent=RESULT_ABSENT)
@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step.

    Attributes:
        losses: Loss and weight of each micro-batch, detached.
        grad_norm: Total gradient norm before clipping, a 0-dim tensor; None without clipping.
        stepped: Whether the optimizer actually stepped.
        num_microbatches: Micro-batches that the step took.
        num_ooms: Out-of-memory errors survived during the step, including those inside ``optimizer.step()``.
        peak_bytes: The device's peak allocated bytes so far; None if the device has no counter.
        sizes: Size of each micro-batch, in rows (in elements with ``split_fn``).
        num_compilations: Graphs that torch.compile made during the step, for any model. More than zero after the first
            steps means that shapes change, also through new micro-batch sizes.
    """

    losses: tuple[Loss, ...]
    grad_norm: torch.Tensor | None
    stepped: bool
    num_microbatches: int
    num_ooms: int
    peak_bytes: int | None
    sizes: tuple[int, ...]
    num_compilations: int

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The ``outputs`` of each micro-batch's `Loss`, detached, in order; None for a micro-batch without."""
        return tuple(loss.outputs for loss in self.losses)

    @property
    def loss(self) -> torch.Tensor:
        """The batch's mean loss, a 0-dim detached tensor; only reading its value synchronizes with the device."""
        if len(self.losses) == 1 and self.losses[0].reduction == "mean":
            return self.losses[0].value
        total = torch.stack([loss.total() for loss in self.losses]).sum()
        mean: torch.Tensor = total / sum(loss.weight for loss in self.losses)
        return mean


@guided(
    words=WRAPPER_WORDS,
    absent=WRAPPER_ABSENT,
    methods=("from_config", "train_step", "microbatches", "backward", "step", "evaluation", "trust_split"),
    rewrite=WRAPPER_REWRITE,
)
class MemoryEfficientTrainingWrapper(Uncopied, Closing, Composed, Overviewed):
    """Makes the training step of your own loop fit in memory, with the gradient of the whole batch.

    A batch is split into micro-batches whose gradients add up exactly. A micro-batch that runs out of memory is rolled
    back (gradients, buffers, attributes, random state) and run again inside the same step, with more blocks recomputed
    in backward, or split where that keeps the gradient (see ``on_oom``). The effective batch, its weighting and the
    number of steps do not change. The size that fits is remembered per input shape, and grows back after clean steps.

    Memory cost: a copy of the model's buffers (except large ones that do not change); while a micro-batch size is
    unproven, one more set of gradients, and copies of small frozen parameters and of small tensors in attributes.
    Time cost: see ``docs/wrapper.md``.

    Args:
        model: Any module, also compiled, wrapped by DistributedDataParallel, or sharded by ``fully_shard``.
        optimizer: Its optimizer.
        precision: None keeps the model's own precision. ``"bf16-mixed"`` and ``"fp16-mixed"`` (with loss scaling), or
            ``"bf16"`` and ``"fp16"`` for short, use autocast; ``"bf16-true"`` converts the whole model; ``"fp32"`` or
            ``"32-true"`` changes nothing and requires float32 parameters; ``"auto"`` is bf16-mixed where the device
            handles it well.
        accumulation_steps: Minimum number of micro-batches per batch; each `train_step` call is one optimizer step.
        checkpoint: Blocks to recompute in backward: ``"auto"``, `fnmatch` patterns over ``named_modules()``, a callable
            ``(name, module) -> bool``, or a mapping of patterns to ``"full"``, ``"selective"`` or ``"offload"``.
            True is ``"auto"``, False is None.
        saved_tensors: What to do with each tensor that autograd saves: ``saved_tensors`` of `memkit.plan_training`.
        offload: ``"activations"`` (those saved for backward), ``"optimizer"`` (its state), or both; they move from an
            accelerator to host memory, and from the CPU to disk. None offloads neither.
        max_grad_norm: Clip the total gradient norm.
        scaler: A `torch.amp.GradScaler` of your own, one for each wrapper. By default ``"fp16-mixed"`` makes one. With
            another precision the loss is scaled too, for a loop or a ``loss_fn`` with its own autocast. The wrapper
            unscales, steps and updates; `state_dict` contains the scaler's state.
        on_gradients: ``on_gradients(model)`` is called once per step, right before the optimizer: ``parameter.grad`` is
            then the gradient of that step (the batch's mean, unscaled, summed over ranks, clipped), for histograms or
            clipping of your own. Afterwards the gradients are gone. With a loss scaler they may be infinite, before a
            step that is skipped.
        scheduler: A schedule, or a list of schedules, as of several optimizers: stepped in order after each real
            optimizer step.
        average: A running average of the weights, updated after each real optimizer step.
        memory: A `MemoryManager`, or a budget: bytes, text such as ``"22GiB"``, or a fraction of the device. With it,
            `train_step` predicts from two small runs how large a micro-batch may be, and refuses a batch that does not
            fit as a whole if splitting it changes its gradient (``on_oom="inexact"`` splits it). A manager also records
            the phases (and in `MemoryEfficientTrainLoop` the steps); it is available as the attribute ``memory``.
        on_oom: ``"exact"`` first tries what cannot change the result (recomputing blocks in backward, offloading
            activations), then splits the batch if the check shows that this keeps its gradient; otherwise the error
            is raised. ``"inexact"`` also allows a split that changes the gradient, with a warning. ``"raise"`` always
            raises the error. Each remedy is reported once, as a warning.
        split_fn: ``split_fn(batch, n)`` returns a list of about n parts, for packed batches. Each micro-batch must
            then come with its weight.
        probe: Check on a few rows whether splitting a batch keeps its gradient (``docs/gradient-accumulation.md``): on
            the first split batch, whenever something is new, and from time to time. Warns about BatchNorm and about
            anything that could not be checked; refuses a loss that compares rows. ``"require"`` also refuses what
            could not be checked.

    Raises:
        ConfigError: A setting is invalid; the message names it and says what would work.
        InputTypeError: ``model`` is not a module, ``optimizer`` not a torch optimizer, or an argument does not exist.
        StateError: The model has parameters on the meta device.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2)
        >>> x, y = torch.ones(5, 3), torch.zeros(5, 1)
        >>> result = trainer.train_step((x, y), lambda model, micro: (model(micro[0]) - micro[1]).pow(2).mean())
        >>> result.stepped, result.num_microbatches, result.sizes
        (True, 2, (3, 2))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        precision: PrecisionName | None = None,
        accumulation_steps: int = 1,
        checkpoint: Choice | None = None,
        saved_tensors: SavedTensorPlan | None = None,
        offload: Collection[str] | None = (),
        max_grad_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_gradients: Callable[[Any], object] | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        average: Average | None = None,
        memory: MemoryWatch | int | str | float | None = None,
        on_oom: OnOom = "exact",
        split_fn: SplitFn | None = None,
        probe: Probe = True,
    ) -> None:
        read_model(model, optimizer)
        self._optimizers = list_optimizers(optimizer, WRAPPER)
        check_settings(accumulation_steps, on_oom, memory, average, split_fn, max_grad_norm)
        check_on_gradients(on_gradients)
        offload = read_offload(offload)
        checkpoint = None if checkpoint is False else checkpoint
        self.model, self.memory, self._device = model, memory, device_of(model)
        check_owner(model, self._optimizers)
        self._accumulation_steps = operator.index(accumulation_steps)  # it may be a tensor or a number of NumPy
        self._on_gradients = on_gradients
        self._split_fn, self._schedules, self._average = split_fn, list_schedules(scheduler), average
        self._evaluation_sizes = SizeMemory()
        self._wrong_rows: tuple[int, int] | None = None  # of a batch that was cut already, and of a whole one
        self._has_warned_of_no_rows = False
        self._batch_run: BatchRun | None = None
        self._num_steps_before = 0  # before that batch
        self._has_run = False  # whether a first train_step has got through its micro-batches
        self._was_left = False  # whether the loop over the last batch was left before its end
        self._is_closed = False
        with contextlib.ExitStack() as cleanup:  # a failing constructor restores the model
            self._precision = Precision(model, precision, self._device, scaler)
            cleanup.callback(self._precision.close)
            # Block names are those of the user's own model.
            self._checkpointing = Checkpointing.of_setting(model, checkpoint) if checkpoint is not None else None
            if self._checkpointing:
                cleanup.callback(self._checkpointing.close)
            sum_dtype = torch.float32 if self._precision.name == "bf16-true" else None
            self._sum = GradientSum(
                optimizer,
                max_grad_norm=max_grad_norm,
                scaler=self._precision.scaler,
                model=model,
                sum_dtype=sum_dtype,
                guard_steps=on_oom != "raise" or "optimizer" in offload,
                on_gradients=_looking(on_gradients, model, recovers=on_oom != "raise"),
                caller=WRAPPER,
            )
            cleanup.callback(self._sum.close)
            recovers, peers = choose_peers(model, self._sum, split_fn, cleanup, recovers=on_oom != "raise")
            self._remedies: Remedies | None = None
            is_sharded = self._sum.shards is not None
            if recovers:
                self._remedies = Remedies(
                    model,
                    call=_CALL,
                    may_check=probe is not False,
                    is_sharded=is_sharded,
                    checkpoint=checkpoint,
                    offload=offload,
                    has_plan=saved_tensors is not None,
                )
                cleanup.callback(self._remedies.close)
            ways = functools.partial(
                ways_to_less,
                model,
                checkpoint=checkpoint,
                offload=offload,
                has_plan=saved_tensors is not None,
                may_lower=self._precision.name is None,
            )
            self._split_watch = SplitWatch(model, probe, call=_CALL, may_change=on_oom == "inexact", ways_to_less=ways)
            is_alone = self._sum.ranks is None or not exchanges_statistics(model)
            self._part_planner = PartPlanner(
                memory,
                model,
                self._optimizers,
                self._device,
                sum_dtype=sum_dtype,
                ways_to_less=ways,
                is_predictable=split_fn is None and not is_sharded and is_alone,
            )
            own_precision, own_scaler = self._precision, self._precision.scaler
            computation = Computation(
                parameters=functools.partial(list_parameters, self._optimizers),
                is_mixed=lambda: own_precision.is_mixed,  # with self, it would be a reference cycle
                scale=(lambda: 1.0) if own_scaler is None else own_scaler.get_scale,
                with_sum_hooks=self._sum.ranks is None,
                is_tight=self._part_planner.is_on,
                unchecked="the parameters are sharded over ranks" if is_sharded else "",
            )
            self._driver = BatchDriver(
                model,
                computation,
                split_watch=self._split_watch,
                remedies=self._remedies,
                split_fn=split_fn,
                peers=peers,
            )
            self._after_step: list[Callable[[], object]] = [each.step for each in self._schedules]
            self._after_step += [] if average is None else [functools.partial(average.update_parameters, model)]
            self._offload = make_offload(offload, model, self._optimizers, cleanup)
            self._treated = None if saved_tensors is None else treat_saved_tensors(saved_tensors)
            self._has_context = (
                self._precision.name is not None or self._offload is not None or self._treated is not None
            )
            if saved_tensors is not None and "activations" in offload:
                raise ConfigError(
                    f"{_CALL}(..., saved_tensors=..., offload={sorted(offload)})",
                    got="two ways to save activations: only one of them would have an effect",
                    expected="a plan for saved tensors, which offloads by itself, or offload={'activations'}",
                    fix="leave 'activations' out of offload.",
                )
            if is_sharded and saved_tensors is not None:
                raise ConfigError(
                    f"{_CALL}(..., saved_tensors=...)",
                    got="a model with sharded parameters: they are not gathered when operators run again in backward",
                    expected="a whole model, also in DistributedDataParallel",
                    fix="plan with treat='blocks', and pass checkpoint=plan.checkpoint.",
                )
            self._cleanup = cleanup.pop_all()

    @classmethod
    @taking_settings_of(__init__)
    def from_config(
        cls, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], config: Any, **settings: Any
    ) -> Self:
        """Build a wrapper from a preset's config.

        The config gives ``accumulation_steps`` (its ``gradient_accumulation_steps``), ``precision`` and ``checkpoint``
        (its ``checkpointing``). Model and optimizer are yours, and so is the loader: a batch of `train_step` has
        ``config.effective_batch_size`` samples, of which each micro-batch gets ``config.batch_size``.

        Args:
            model: Same as for the constructor.
            optimizer: Same as for the constructor.
            config: A config from `memkit.get_preset_config`, or another `memkit.predict.TrainingConfig`.
            **settings: Other settings of the constructor; they take precedence over the config.

        Raises:
            InputTypeError: ``config`` is not a config, or a setting does not exist.
            ConfigError: A setting is invalid.

        Warns:
            MemkitWarning: From `train_step`: the first batch has ``config.batch_size`` samples, too few.

        Example:
            >>> import torch
            >>> import memkit as mk
            >>> config = mk.get_preset_config("medium", 24)
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = torch.optim.AdamW(model.parameters())
            >>> trainer = mk.MemoryEfficientTrainingWrapper.from_config(model, optimizer, config, max_grad_norm=1.0)
            >>> batch = torch.ones(config.effective_batch_size, 3)
            >>> trainer.train_step(batch, lambda model, x: model(x).square().mean()).sizes
            (2, 2, 2, 2)
        """
        check_config(config, cls.__init__)
        from_it = {
            "accumulation_steps": config.gradient_accumulation_steps,
            "precision": config.precision,
            "checkpoint": config.checkpointing,
        }
        trainer = cls(model, optimizer, **{**from_it, **settings})
        if config.gradient_accumulation_steps > 1 and settings.keys().isdisjoint({"accumulation_steps", "split_fn"}):
            trainer._wrong_rows = config.batch_size, config.effective_batch_size
        return trainer

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps actually taken."""
        return self._sum.num_steps

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the gradient."""
        return 1 if self._sum.ranks is None else self._sum.ranks.num_ranks

    def trust_split(self, batch: Any, loss_fn: LossFn) -> None:
        """Do not check splits of such batches: they were checked before, by `check_split` or by `prepare`.

        A check runs some rows whole, in addition to the parts, so it may take more memory than the step itself. Batches
        of another structure, another loss function, and layers in other modes are still checked, and so are losses that
        turn out to be divided by something other than rows. A function that starts to compare rows later, because of a
        counter or a flag of its own, is not detected. In a loop over `microbatches`, whose loss is not known
        beforehand, each split is checked.

        Args:
            batch: A batch as `train_step` takes it; only its structure and dtypes count.
            loss_fn: The loss function that was checked.

        Example:
            >>> import torch
            >>> import memkit as mk
            >>> model, batch = torch.nn.Linear(4, 1), torch.ones(8, 4)
            >>> loss_fn = lambda model, x: model(x).square().mean()
            >>> assert mk.train.check_split(model, batch, loss_fn).exact
            >>> optimizer = torch.optim.SGD(model.parameters())
            >>> trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=4)
            >>> trainer.trust_split(batch, loss_fn)
            >>> trainer.train_step(batch, loss_fn).num_microbatches
            4
        """
        check_loss_fn(loss_fn, batch, call="trainer.trust_split")
        self._split_watch.trust(batch, loss_fn)

    def parts(self) -> dict[str, Any]:
        """Return every object with its own state, by name: ``state.save(step, **trainer.parts())`` saves them all.

        The first optimizer is ``"optimizer"``, the next ``"optimizer2"``; then the schedules, named ``"scheduler"`` and
        on in the same way, and the average, if any.
        """
        parts = {"model": self.model, "trainer": self}
        parts |= numbered("optimizer", self._optimizers) | numbered("scheduler", self._schedules)
        return parts if self._average is None else parts | {"average": self._average}

    def __saved_together__(self) -> SavedTogether:
        return SavedTogether(self.parts(), "state.save(step, **trainer.parts()), and state.restore(**trainer.parts())")

    def step_functions(self) -> list[Callable[..., Any]]:
        """Return the functions that run within a step: ``on_gradients``, and the step hooks of the optimizers."""
        hooks = [hook for each in self._optimizers for hook in step_hooks_of(each)]
        return hooks if self._on_gradients is None else [self._on_gradients, *hooks]

    def _overview(self) -> Overview:
        optimizers = " and ".join(type(each).__name__ for each in self._optimizers)
        steps = counted(self.num_steps, "step")
        blocks = self.checkpointed_blocks
        rows = [
            ("precision", self._precision.name or "as the model is"),
            ("micro-batches", f"{self._accumulation_steps} or more for each batch"),
            (
                "recomputed blocks",
                f"{len(blocks)}: {', '.join(blocks[:3])}{', ...' * (len(blocks) > 3)}" if blocks else "none",
            ),
        ]
        rows += [("ranks", str(self.num_ranks))] * (self.num_ranks > 1)
        steps += ", closed" * self._is_closed
        return Overview(f"trains {type(self.model).__name__} with {optimizers} on {self._device}: {steps}", rows)

    @property
    def checkpointed_blocks(self) -> tuple[str, ...]:
        """Names of the blocks that are recomputed in backward, in whole or in part."""
        chosen = self._checkpointing.recomputed if self._checkpointing else ()
        return chosen + (self._remedies.recomputed if self._remedies else ())

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Total gradient norm before clipping at the last step, a 0-dim tensor; None without ``max_grad_norm``."""
        return self._sum.grad_norm

    def train_step(self, batch: Any, loss_fn: LossFn) -> StepResult:
        """Run one optimizer step on a batch.

        Args:
            batch: A pytree of tensors with the rows in dimension 0, on the model's device.
            loss_fn: ``loss_fn(model, micro_batch)`` returns the mean loss over the micro-batch's rows, or a `Loss`, for
                a mean over something else (valid tokens, a sum of class weights) or for additional outputs. It does
                not call backward.

        Returns:
            The result of the step. Collecting it does not synchronize with the device.

        Raises:
            MemkitOutOfMemoryError: Even the smallest micro-batch does not fit, or smaller ones would change the result.
            InputTypeError: ``loss_fn`` is not callable.
            StateError: `close` was called, or ``loss_fn`` called backward itself; or, in the first step, it stepped an
                optimizer, a schedule or the average of this trainer.
        """
        if self._is_closed:
            refuse_closed("trainer.train_step")
        check_loss_fn(loss_fn, batch, call="trainer.train_step")
        num_graphs = count_graphs()
        is_grad_enabled, watch = torch.is_grad_enabled(), self._driver.state_watch
        try:
            watch.loss_fn = loss_fn
            if self._sum.ranks is not None:
                self._sum.ranks.before_forwards()
            num_parts = self._plan_parts(batch, loss_fn) if self._part_planner.is_on else self._accumulation_steps
            run = self._open(batch, num_parts, is_predicted=num_parts > self._accumulation_steps)
            run_all = self._run_all if self._has_run else self._run_first
            if self._part_planner.has_manager:
                self._part_planner.in_phase("microbatches", run_all, run, loss_fn)
            else:
                run_all(run, loss_fn)
            if self._part_planner.is_on:
                self._part_planner.look_back()
            watch.loss_fn = None
            stepped = self._step()
        except BaseException as error:
            torch.set_grad_enabled(is_grad_enabled)  # Ctrl-C can arrive while a context is being entered
            watch.loss_fn = None
            self._abandon(error)
            raise
        return StepResult(
            losses=run.losses(),
            grad_norm=self._sum.grad_norm,
            stepped=stepped,
            num_microbatches=len(run.done),
            num_ooms=run.num_ooms,
            peak_bytes=devices.peak_bytes(self._device),
            sizes=run.sizes,
            num_compilations=count_graphs() - num_graphs,
        )

    def microbatches(self, batch: Any) -> Iterator[Attempt | CheckAttempt]:
        """Yield attempts at the micro-batches of a batch, for use in your own loop.

        ``for attempt in trainer.microbatches(batch): with attempt as micro: ...``. After an out-of-memory the block
        runs again (see ``on_oom``). Local variables of your loop stay alive in the meantime; keep big ones inside
        functions. Call `step` after the loop. When the split is checked (see ``probe``), the block also runs on a few
        rows whose results are dropped; ``attempt.is_check`` is then True.

        Args:
            batch: Same as for `train_step`.

        Raises:
            MemkitOutOfMemoryError: Even the smallest micro-batch does not fit.
            StateError: `step` was not called after the previous batch, or `close` was called.
        """
        if self._is_closed:
            refuse_closed("trainer.microbatches")
        if self._sum.ranks is not None:
            self._sum.ranks.before_forwards()
        run = self._open(batch, self._accumulation_steps)
        if self._remedies is not None:
            self._remedies.note_loop()
        try:
            self._batch_run, self._num_steps_before = run, self._sum.num_steps
            yield from self._driver.attempts(run)
            self._sum.settle()
        except BaseException as error:  # a final out-of-memory, an interrupt, or the caller left the loop
            self._was_left = True
            self._abandon(error)
            raise

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for forward and loss that applies ``precision`` and ``offload``."""
        is_off = isinstance(self._driver.current, CheckAttempt) and self._driver.current.in_full_precision
        autocast = contextlib.nullcontext() if is_off else self._precision.autocast()
        if self._offload is None and self._treated is None:
            return autocast
        return self._around_forward(autocast)

    @contextlib.contextmanager
    def _around_forward(self, autocast: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        # A check of few rows, whose statistics are not updated, is not the planned forward.
        is_planned = not isinstance(self._driver.current, CheckAttempt)
        is_planned = is_planned and not (self._remedies is not None and self._remedies.offloads)
        treated = self._treated if is_planned else None
        with autocast, self._offload or contextlib.nullcontext(), treated or contextlib.nullcontext():
            yield

    def backward(
        self,
        loss: torch.Tensor,
        count: float | torch.Tensor | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> None:
        """Add the micro-batch's gradient to the step; call it once inside ``with attempt as micro:``.

        Args:
            loss: 0-dim loss of the micro-batch.
            count: Its weight; None uses the number of rows.
            reduction: Whether ``loss`` is the mean or the sum over ``count``.
        """
        if torch.is_grad_enabled() or not isinstance(self._driver.current, CheckAttempt):  # a check may look at losses
            check_loss(loss, call="trainer.backward(loss)", count=None if self._sum.shards else count)
        check_reduction(reduction, has_count=count is not None, needs_count=True, call="trainer.backward")
        loss_with_count = Loss(mean=loss, count=count) if reduction == "mean" else Loss(sum=loss, count=count)
        try:
            self._backward(loss_with_count, "trainer.backward(loss)")
        except RuntimeError as error:
            check_spent_graph(error, call="trainer.backward(loss)", is_in_loop=True)
            raise

    def _backward(self, loss: Loss, call: str) -> None:
        attempt = self._driver.current
        if isinstance(attempt, CheckAttempt):
            if loss.count is None and self._split_fn is not None:
                _refuse_unweighted(call)
            attempt.backward(loss)
            return
        if attempt is None or attempt.is_added:
            raise StateError(
                "trainer.backward(loss)",
                got="a call outside of an attempt" if attempt is None else "a second call for one micro-batch",
                expected="one call inside `with attempt as micro:` of trainer.microbatches(batch)",
                fix="loop over trainer.microbatches(batch), or use trainer.train_step; add up the losses before "
                "backward.",
            )
        if attempt.size != attempt.batch_size and self._split_watch.is_on:
            attempt.terms = divisors(loss.value)
        self._add(loss, attempt, call)

    def step(self) -> bool:
        """Step the optimizer with the batch's gradient, then the scheduler and the average.

        Returns:
            True if the optimizer actually stepped.

        Raises:
            StateError: There is no batch to step with, or a part of it is missing, or `close` was called.
        """
        if self._is_closed:
            refuse_closed("trainer.step")
        if self._batch_run is None and self._sum.ranks is None:  # a rank without data may join the others' step
            if self._was_left:
                raise StateError(
                    "trainer.step()",
                    got="a loop over trainer.microbatches(batch) that was left early, by break, return or an error, "
                    "which drops its batch",
                    expected="a loop that runs to its end: only then is the batch's gradient complete",
                    fix="step only where the loop was not left, for attempt in trainer.microbatches(batch): ... else: "
                    "trainer.step(), and go on with the next batch; or, to step with some of the micro-batches, call "
                    "trainer.backward(loss, count=0) for each of the others.",
                )
            raise StateError(
                "trainer.step()",
                got="no micro-batch since the last step",
                expected="one step() after the loop over trainer.microbatches(batch)",
                fix=f"write {_STEP}, which steps itself, or loop over trainer.microbatches(batch) first.",
            )
        is_grad_enabled = torch.is_grad_enabled()
        try:
            return self._step()
        except BaseException as error:
            torch.set_grad_enabled(is_grad_enabled)
            self._abandon(error)
            raise

    def discard(self) -> None:
        """Drop a batch that was not stepped yet, after Ctrl-C between its loop and `step`, and undo its effects."""
        self._abandon(KeyboardInterrupt())

    def flush(self, on_joined: Callable[[], None] = lambda: None) -> bool:
        """Under DDP, join the steps of ranks that have more batches; call it on all ranks at the end of their data.

        Args:
            on_joined: Called after each step of another rank that this one has joined: for what all ranks do together
                after a step, such as saving a state.

        Returns:
            True if an optimizer actually stepped. Does nothing on sharded ranks or in a single process.
        """
        return self._sum.end_all(self._after_step, on_joined)

    @property
    def first_step_bytes(self) -> int:
        """Bytes that the first step took for copies of buffers and frozen weights, and that later steps do without.

        These are copies for the recovery, kept until a forward is seen to leave their originals unchanged.
        """
        of_blocks = self._checkpointing.first_step_bytes if self._checkpointing else 0
        return self._driver.state_watch.dropped_bytes + of_blocks

    def evaluation(self) -> EvaluationBlock:
        """Evaluate inside the block, in eval mode without gradients; restores all modes. Yields an `Evaluation`."""
        return EvaluationBlock(self._evaluating())

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[Evaluation]:
        can_split = self._remedies is not None and self._split_fn is None and self._sum.shards is None
        with evaluating(self.model), self.autocast():
            yield Evaluation(self.model, self._evaluation_sizes, can_split=can_split)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapper's own state; model, optimizer and scheduler are saved by their own ``state_dict``."""
        if isinstance(self._driver.current, CheckAttempt):
            raise StateError(
                "trainer.state_dict()",
                got="a call during the split check, whose runs leave no trace",
                expected="a call outside of the check",
                fix="skip the call if attempt.is_check is True.",
            )
        scaler = self._precision.scaler
        return {
            "version": _VERSION,
            "accumulator": self._sum.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
            "sizes": self._driver.sizes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`.

        Raises:
            FileFormatError: The state has another version, or belongs to another set of parameters.
        """
        check_own_state(state, WRAPPER, version=_VERSION, keys=_STATE)
        self._sum.load_state_dict(state["accumulator"])
        self._driver.sizes.load_state_dict(state["sizes"])
        if self._precision.scaler and state["scaler"]:
            self._precision.scaler.load_state_dict(state["scaler"])
        elif self._precision.scaler or state["scaler"]:
            has = "no loss scale, which starts afresh" if self._precision.scaler else "a loss scale, which is not used"
            warn_user(f"{_CALL}.load_state_dict(state): the state was saved with another precision: it has {has}.")

    def close(self) -> None:
        """Restore the model: its own forwards and dtypes, no hooks, DDP synchronizing in backward."""
        self._is_closed = True
        self._cleanup.close()

    def _open(self, batch: Any, num_parts: int, *, is_predicted: bool = False) -> BatchRun:
        if self._batch_run is not None:
            raise StateError(
                "trainer.microbatches(batch)",
                got="a new batch before step() for the previous one",
                expected="one step() after the micro-batches of each batch",
                fix="call trainer.step() after the loop over micro-batches, or trainer.discard() to drop that batch.",
            )
        self._was_left = False
        run = self._driver.open(batch, num_parts, self._sum, is_predicted=is_predicted)
        if self._wrong_rows is not None or not run.size:
            self._check_rows(run.size)
        return run

    def _check_rows(self, num_rows: int) -> None:
        """Warn once of a batch without rows, and of the first one if it is a config's micro-batch."""
        if self._wrong_rows is not None:
            (cut, whole), self._wrong_rows = self._wrong_rows, None
            if num_rows == cut:
                warn_user(
                    f"{_STEP}: the batch has {cut} samples, the config's batch_size; a step takes a whole batch of "
                    f"{whole}, its effective_batch_size, and cuts it. Way out: DataLoader(dataset, "
                    "batch_size=config.effective_batch_size)."
                )
        if not num_rows and not self._has_warned_of_no_rows and self._sum.ranks is None:
            self._has_warned_of_no_rows = True
            warn_of_no_rows(_STEP, "nothing is trained")

    def _step(self) -> bool:
        run = self._batch_run
        if run is not None and not run.is_complete:
            run.refuse_incomplete()
        try:
            if self._part_planner.has_manager:
                stepped, _ = self._part_planner.in_phase("optimizer", self._sum.end, self._after_step)
            else:
                stepped, _ = self._sum.end(self._after_step)
        except RuntimeError as error:
            if _NEEDS_GRAPH not in str(error):
                raise
            _refuse_second_order(self._optimizers, error)
        if stepped and run is not None:
            run.num_ooms += self._sum.num_step_ooms
        if run is not None and run.num_ooms:
            self._part_planner.mark_ooms(run.num_ooms, run.sizes)
        self._batch_run = None
        return stepped

    def _abandon(self, error: BaseException) -> None:
        """Drop the current batch: its step is lost, and the next one starts clean."""
        run, self._batch_run, self._driver.current = self._batch_run, None, None
        self._sum.discard()
        is_users = isinstance(error, Exception) and not isinstance(error, MemkitError)
        # After the user's own error keep all state for inspection; a batch that was already stepped is done.
        if run is not None and not is_users and self.num_steps == self._num_steps_before:
            run.undo()

    def _plan_parts(self, batch: Any, loss_fn: LossFn) -> int:
        return self._part_planner.num_parts(
            batch, loss_fn, self._accumulation_steps, lambda micro: self._rehearse(micro, loss_fn)
        )

    def _rehearse(self, micro: Any, loss_fn: LossFn) -> None:
        """Run forward and backward, then undo all side effects."""
        rollback, trained = Rollback(self._driver.state_watch, is_trial=True), list_parameters(self._optimizers)
        # A reversible block's backward leaves gradients of its own.
        aside = gradients_set_aside([*all_parameters(self.model), *trained])
        of_any_size = contextlib.nullcontext() if self._offload is None else self._offload.of_any_size()
        with rollback.undone(), aside, of_any_size:
            loss = self._evaluate(micro, loss_fn).value
            torch.autograd.grad(loss, trained, allow_unused=True)

    def _run_first(self, run: BatchRun, loss_fn: LossFn) -> None:
        with refuse_inner_steps(self._optimizers, self._schedules, self._average):
            self._run_all(run, loss_fn)
        self._has_run = True
        warn_of_unused_step(self.model, loss_fn)

    def _run_all(self, run: BatchRun, loss_fn: LossFn) -> None:
        self._batch_run, self._num_steps_before = run, self._sum.num_steps
        for attempt in self._driver.attempts(run, loss_fn):
            with attempt as micro:
                self._run(micro, loss_fn)

    def _run(self, micro: Any, loss_fn: LossFn) -> None:
        # A separate function: when it fails, its frame releases every tensor.
        try:
            self._backward(self._evaluate(micro, loss_fn), _STEP)
        except RuntimeError as error:
            check_spent_graph(error, call=_STEP)
            raise

    def _evaluate(self, micro: Any, loss_fn: LossFn) -> Loss:
        if not self._has_context:
            return call_loss_fn(loss_fn, self.model, micro, call="loss_fn of trainer.train_step")
        with self.autocast():
            return call_loss_fn(loss_fn, self.model, micro, call="loss_fn of trainer.train_step")

    def _add(self, loss: Loss, attempt: Attempt, call: str) -> None:
        """Add the gradient of a micro-batch, weighted by its rows or its count."""
        value, count, gradients = loss.mean, loss.count, self._sum
        reduction: Reduction = "mean"
        if value is None:
            value, reduction = loss.value, "sum"
        if count is None and self._split_fn is not None:
            _refuse_unweighted(call)
        check_loss(value, call=call, count=None if gradients.shards else count)
        weight: float | torch.Tensor = float(attempt.size)
        if count is None:
            count = attempt.size
            gradients.expect(attempt.batch_size)  # the total weight is the batch's rows
        elif attempt.size == attempt.batch_size and (reduction == "mean" or not _is_on_accelerator(count)):
            # The batch is whole: hooks in its graph see the same gradient as without memkit. No count is read here
            # that would not be read anyway.
            count = weight = read_count(count, stay_on_device=False, call=call)
            gradients.expect(float(weight))
        else:
            stays = reduction == "sum" and gradients.predivisor is not None
            weight = read_count(count, stay_on_device=stays, call=call)
        expected = float(weight) if gradients.predivisor is None else 0.0
        gradients.add(
            value,
            weight,
            reduction=reduction,
            expected=expected,
            all_or_nothing=attempt.is_trial,
            is_whole=attempt.size == attempt.batch_size,
            is_exact=attempt.size == attempt.batch_size,
        )
        attempt.is_added = True  # before anything else that may fail, which would add it once more
        attempt.loss = loss.detached(count)


def _looking(
    on_gradients: Callable[[Any], object] | None, model: nn.Module, *, recovers: bool
) -> Callable[[], None] | None:
    """Return the user's look at the gradients, after whose out-of-memory the step is undone: it cannot be repeated."""
    if on_gradients is None or not recovers:
        return None if on_gradients is None else functools.partial(on_gradients, model)  # type: ignore[return-value]

    def look() -> None:
        outcome = try_once(on_gradients, model)
        if not isinstance(outcome, Done):
            raise MemkitOutOfMemoryError(
                f"{_CALL}(on_gradients=...)",
                got=f"a function that runs out of memory: {outcome.description}",
                expected="memory for its temporary tensors, while all gradients are there",
                fix="look at one parameter at a time in it, or use smaller batches. The step was not done: parameters, "
                "buffers and random state are as before it.",
            ) from outcome.error

    return look


def _refuse_second_order(optimizers: Sequence[torch.optim.Optimizer], error: RuntimeError) -> NoReturn:
    raise ConfigError(
        _STEP,
        got=f"{', '.join(type(each).__name__ for each in optimizers)}, whose step() differentiates the gradients",
        expected="an optimizer that steps with gradients without a graph, which are all that parts of a batch can add "
        "up to",
        fix="in a loop of your own write loss.backward(create_graph=True) and optimizer.step(), where "
        "mk.Checkpointing works as well. With this trainer use another optimizer.",
    ) from error


def _refuse_unweighted(call: str) -> NoReturn:
    raise InputError(
        call,
        got="no count for a part made by split_fn",
        expected="the weight of the part, which its rows do not determine",
        fix="end loss_fn with `return mk.Loss(mean=loss, count=n)`."
        if call == _STEP
        else "write trainer.backward(loss, count=n).",
    )


def _is_on_accelerator(count: float | torch.Tensor) -> bool:
    return isinstance(count, torch.Tensor) and count.device.type != "cpu"
