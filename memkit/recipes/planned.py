"""`plan_training` and `prepare`: run the search of `memkit.predict` on steps of the `memkit.train` wrapper."""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from memkit._core.attributes import attributes_of
from memkit._core.errors import ConfigError, InputError, InputTypeError, warn_user
from memkit._core.printable import counted, list_some, percent
from memkit._core.protocols import Scheduler
from memkit._core.settings import Checker, nearest_word
from memkit._core.units import format_bytes, parse_budget, parse_bytes
from memkit._core.words import guided
from memkit._gradients.loss import LossFn
from memkit._machine import random_state
from memkit._machine.devices import (
    allocator_counters,
    allocator_limit_bytes,
    allocator_settings,
    device_memory,
    host_memory,
    resolve_device,
)
from memkit._recorder.attributes import Attributes
from memkit._recorder.recorder import Recorder
from memkit._recorder.workspace import WorkspaceMarks
from memkit._recovery.batch import Attempt
from memkit._recovery.errors import describe_error
from memkit._recovery.signals import deferred_signals
from memkit._recovery.snapshot import Rollback, StateWatch, cloned
from memkit._simulation.simulation import Gpu, Host, MakeOptimizer, check_model, is_own, optimizer_maker
from memkit._simulation.tensors import check_selected_fraction
from memkit._tape.kept import KEPT_OPERATORS
from memkit._torch.modules import all_parameters
from memkit._torch.pytree import children_of, tree_leaves
from memkit._torch.tensors import put_back
from memkit.predict.batch_kinds import with_data
from memkit.predict.estimate import warn_of_doubts
from memkit.predict.gpus import GPU, CapacityLike, capacity_bytes, look_up
from memkit.predict.plan.host import HostTimes
from memkit.predict.plan.plan import TrainingPlan
from memkit.predict.plan.search import fastest, micro_batch_counts, search, search_activations
from memkit.predict.plan.speeds import OperatorTimes, card_speeds
from memkit.predict.plan.trial import Arrange, Arrangement, StepBytes, StepTrials, TrainStep, Trial
from memkit.predict.words import PLAN_WORDS
from memkit.predict.worst_batch import WorstBatch, find_worst_batch
from memkit.recipes.order import ResumableLoader
from memkit.recipes.planned_kinds import RehearsedBatches, RehearsedStep, suit_all
from memkit.train.check_attempt import CheckAttempt
from memkit.train.checkpointing import auto_blocks
from memkit.train.checks import Caller
from memkit.train.gradients import gradients_set_aside
from memkit.train.models import device_of, unwrap_model
from memkit.train.owners import check_owner, list_optimizers
from memkit.train.row_mixers import scan_modules
from memkit.train.samples import mark_samples, unmark_samples
from memkit.train.split import check_batch, copied, count_rows, has_unlike_rows, take_rows
from memkit.train.split_check import check_split
from memkit.train.split_watch import Probe
from memkit.train.wrapper import MemoryEfficientTrainingWrapper, StepResult

_NUM_FINALISTS = 5
_OF_A_PART = (
    "The allocator must stay within this part of the card by itself. With a limit on it less is needed: call "
    "torch.cuda.set_per_process_memory_fraction(...) first, and leave budget out."
)
_NUM_TIMED = 5
_LITTLE_ROOM = 1.1  # times longer a step may take whose allocator frees its cache: on an H200, 1.1 to 1.25
_SLACK = 1.5  # predicted times may be off by this factor when candidates are timed

PlannedPrecision = Literal["bf16-mixed", "fp16-mixed"]
Treat = Literal["tensors", "blocks"]
MakeTrials: TypeAlias = Callable[[Any], StepTrials]
RunForReal = Callable[[Any, Arrangement], AbstractContextManager[Callable[[], StepBytes]]]


@guided(words=PLAN_WORDS)
def plan_training(
    model: nn.Module,
    sample_batch: Any,
    loss_fn: LossFn,
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer] = "adamw",
    *,
    budget: CapacityLike | None = None,
    target: str | GPU | None = None,
    precisions: Sequence[PlannedPrecision | None] = (None,),
    micro_batch_size: int | None = None,
    treat: Treat | None = None,
    may_offload: bool = True,
    activation_budget: int | str | float | None = None,
    curve: bool = False,
    measure: bool = False,
    selected_fraction: float | None = None,
) -> TrainingPlan:
    """Find the fastest training step that fits a memory budget, with the gradient of the whole batch.

    The batch is split into micro-batches, and blocks of the model are recomputed in backward (all operators, or only
    the cheap ones) or offloaded; options that save the most bytes per second are tried first. Each candidate is a dry
    run, on tensors without data, of exactly the step that `MemoryEfficientTrainingWrapper` would take: every plan
    returned was run this way and found to fit. Its time is the sum over the operators of that run.

    Args:
        model: The model, with data, or on the meta device (no memory needed).
        sample_batch: All rows of one optimizer step: tensors with the rows in dimension 0, in any nesting. Or a
            DataLoader, or the result of `memkit.predict.find_worst_batch`: the plan is for the largest batch, and is
            rehearsed with each kind of batch; if another kind needs more treatment, the plan is extended. Or ``()``,
            if ``loss_fn`` holds the data itself, as the one graph of a data set.
        loss_fn: ``loss_fn(model, micro_batch)`` returns the mean loss over rows, or a `Loss`.
        optimizer: As for `estimate_memory_usage`.
        budget: A GPU, by its name or as a `GPU`; or a size, as bytes or text such as ``"24GiB"``. None: all memory of
            the GPU that is the ``target``, or that the model is on, within the limit that this process has there, and
            less what other programs, and other tensors of this process, hold on it now; on the CPU, with
            ``activation_budget``, all of the machine's memory. In all of a GPU a plan may leave the
            allocator no more than it needs, in a part of it, given as a size, all that it would like to hold.
        target: Device for a budget in bytes: a GPU, or ``"cpu"``, where live bytes are counted. None: the model's
            device.
        precisions: The precisions to choose from. None is the model's own; bf16 changes the numbers, so it is used only
            if listed.
        micro_batch_size: Rows of a micro-batch, to fix it yourself; ``notes`` say if splitting changes the gradient.
            ``micro_batch_size=len(batch)`` plans only the blocks. None: the plan chooses.
        treat: ``"tensors"`` decides for each tensor that autograd saves whether it is kept, recomputed or offloaded,
            ``"blocks"`` for whole blocks of the model. None tries both.
        may_offload: Whether saved tensors may wait on disk, or from a card in host memory. If not, they are recomputed
            or kept: for a disk that is slow, or shared with others.
        activation_budget: The most that a forward may leave for its backward, apart from parameters and batch: a size,
            or a share of what it leaves without a plan, such as 0.5. The plan is then not the fastest step within
            ``budget``, which may be left out, but the one that runs the fewest FLOPs again, with nothing offloaded;
            it does not depend on measured times. The batch is taken whole, unless ``micro_batch_size`` is given.
        curve: Whether ``plan.pareto`` shows time against memory for smaller budgets too, down to the least: eight more
            dry runs of the largest micro-batches. Not with ``treat="blocks"``.
        measure: Whether to run real steps, all undone afterwards, of up to five candidates that are expected to be the
            fastest, and choose the one with the least processor time; also one step of each candidate whose fit depends
            on the kernels' workspace, to measure that workspace. Of a loader's kinds of batch only the largest has its
            own data there; the others have the shapes and small integers, and random numbers. CPU only.
        selected_fraction: As for `estimate_memory_usage`.

    Returns:
        The plan, with all candidates.

    Raises:
        ConfigError: No candidate fits; the message names the closest one and its largest holders of memory. Or an
            argument is invalid.
        InputError: The batch has no rows, the GPU is unknown, or a size depends on data.
        InputTypeError: ``model`` is not a module, ``sample_batch`` no batch, or ``budget`` or ``target`` neither a size
            nor a GPU.

    Warns:
        MemkitWarning: The memory of the planned step may depend on guessed values.

    Memory cost:
        No tensor of the model or of the step. On the CPU the operands of one operator at a time, inside the budget, and
        32 MiB; with ``measure`` a copy of the model and of its optimizer, and a step inside the budget. A small model
        with data is also copied to check that its batch may be split (`docs/gradient-accumulation.md`).

    Source:
        ``docs/plan.md``; checked against exhaustive searches in ``benchmarks/cases/planner.py``.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> with torch.device("meta"):
        ...     layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
        ...     model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> batch = torch.empty(64, 1024, 1024, device="meta")
        >>> plan = mk.plan_training(model, batch, lambda m, x: m(x).square().mean(), budget="RTX 3060 12GB")
        >>> plan.estimate.fits("RTX 3060 12GB"), plan.accumulation_steps > 1
        (True, True)
    """
    plan, _, _ = _plan(
        "plan_training",
        model,
        sample_batch,
        loss_fn,
        optimizer,
        budget=budget,
        target=target,
        precisions=precisions,
        micro_batch_size=micro_batch_size,
        treat=treat,
        may_offload=may_offload,
        activation_budget=activation_budget,
        curve=curve,
        measure=measure,
        selected_fraction=selected_fraction,
    )
    return plan


@torch.inference_mode(mode=False)  # the caller's would leave the probed and planned steps without a graph
def _plan(
    call: str,
    model: nn.Module,
    sample_batch: Any,
    loss_fn: LossFn,
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer],
    *,
    budget: CapacityLike | None,
    target: str | GPU | None,
    precisions: Sequence[PlannedPrecision | None],
    micro_batch_size: int | None,
    treat: Treat | None,
    may_offload: bool,
    activation_budget: int | str | float | None,
    curve: bool,
    measure: bool,
    selected_fraction: float | None,
) -> tuple[TrainingPlan, Any, RehearsedBatches]:
    """Plan for `plan_training` or `prepare`, whose name is ``call``; return the batch too, which may be a loader's."""
    is_loader = _is_loader(sample_batch)
    check_model(call, model, None if is_loader else sample_batch, optimizer)
    precisions = _check_precisions(call, precisions)
    check_selected_fraction(f"{call}(...)", selected_fraction)
    if activation_budget is not None:
        is_for_one = not is_loader and not isinstance(sample_batch, WorstBatch)
        _check_tensors_alone(call, treat=treat, curve=curve, is_for_one=is_for_one)
        parse_budget(activation_budget, 2**60, name="activation_budget")  # now, as planning takes seconds
        budget = _all_memory(model, target) if budget is None else budget
    if treat is not None:
        Checker(f"{call}(...)").choice("treat", treat, get_args(Treat), fix="write treat='tensors'.")
    gpu, budget, budget_bytes, fills_card, own = _find_place(call, model, budget, target)
    if measure:
        _check_measurable(call, model, gpu)
    if is_loader:
        sample_batch = find_worst_batch(
            sample_batch,
            model,
            loss_fn,
            optimizer=optimizer,
            precision=precisions[0],
            target=gpu or "cpu",
            selected_fraction=selected_fraction,
        )
    worst = sample_batch if isinstance(sample_batch, WorstBatch) else None
    sample_batch = sample_batch if worst is None else worst.batch
    num_rows, whole = _rows_to_plan(call, sample_batch, micro_batch_size)
    rows = num_rows if micro_batch_size is None and activation_budget is not None else micro_batch_size
    counts, notes, is_exact = _allowed_counts(call, model, sample_batch, loss_fn, num_rows, rows)
    notes += [] if worst is None else _about(worst, gpu, budget_bytes)
    notes += [f"The batch is kept whole, because it cannot be cut: {whole}."] if whole else []
    arrange = partial(_wrapped, is_packed=bool(whole))
    speeds: OperatorTimes = HostTimes(budget_bytes) if gpu is None else card_speeds(gpu)

    def make_trials(batch: Any, *, frees_cache: bool = False) -> StepTrials:
        return StepTrials(
            model=model,
            batch=batch,
            loss_fn=loss_fn,
            optimizer=optimizer,
            selected_fraction=selected_fraction,
            make_place=Host if gpu is None else partial(Gpu, gpu),
            arrange=arrange,
            speeds=speeds,
            blocks=auto_blocks(model),
            kept_operators=KEPT_OPERATORS,
            may_offload=may_offload,
            num_rows=_rows_to_plan(call, batch)[0],
            frees_cache=frees_cache,
            has_unlike_rows=has_unlike_rows(batch),
            held=None if own is None else (own, allocator_counters(own).allocated_bytes or 0),
            call=call,
        )

    failures: dict[str, dict[int, None]] = {}  # error -> rows of the micro-batches that it occurs with

    def refused(num_rows: int, error: Exception) -> None:
        failures.setdefault(describe_error(error), {})[num_rows] = None

    tried = partial(
        _tried,
        refused=refused,
        counts=counts,
        precisions=precisions,
        budget_bytes=budget_bytes,
        treat=treat,
        activation_budget=activation_budget,
        curve=curve,
        slack=_SLACK if measure else 1.0,
    )
    allow = _that_treat if activation_budget is not None else list[Trial]
    trials, trials_for = _with_room_or_little(
        make_trials,
        partial(make_trials, frees_cache=True) if fills_card else None,
        lambda make: tried(make(sample_batch)),
        lambda found: fastest(allow(found), budget_bytes),
    )
    notes += starmap(_about_failure, failures.items())
    run_for_real = partial(_in_place, model, loss_fn, optimizer, arrange)
    settled = partial(_settled, budget_bytes=budget_bytes, run_for_real=run_for_real if measure else None)
    trials = [settled(each, sample_batch) for each in trials]
    allowed = allow(trials)
    finalists = fastest(allowed, budget_bytes)[:_NUM_FINALISTS]
    if not finalists:
        notes += [] if gpu or measure else _about_workspace(allowed, budget_bytes)
        notes += _ways_to_less(may_offload=may_offload, is_part=gpu is not None and not fills_card)
        nearest = _nearest(allowed, sample_batch, run_for_real if measure else None)
        notes += [*_about_masks(nearest), *_about_first_step(nearest)]
        notes += _about_the_rest(nearest, gpu, budget_bytes) if gpu and own else []
        _refuse(call, budget, budget_bytes, nearest, notes, is_measured=measure)
    timed = finalists if measure else ()
    measured = {each.arrangement: _time_step(run_for_real, sample_batch, each.arrangement) for each in timed}
    best = min(finalists, key=lambda each: measured.get(each.arrangement, each.seconds))
    if worst is not None:
        best, hardest = suit_all(
            worst, best, trials_for, counts, budget_bytes, treats_blocks=treat != "tensors", settled=settled
        )
        if best.required_bytes > budget_bytes:
            notes += [f"No plan suits all batches: with this one, batch {hardest} does not fit."]
            notes += [] if gpu or measure else _about_workspace([best], budget_bytes)
            _refuse(call, budget, budget_bytes, best, notes, is_measured=measure)
        trials += [] if best.arrangement in {each.arrangement for each in trials} else [best]
    warn_of_doubts(call, best.estimate)
    notes += [*_about_values(best, worst), *_about_first_step(best)]
    notes += _about_cache(best, budget_bytes) if gpu else []
    notes += _about_the_rest(best, gpu, budget_bytes) if gpu and own else []
    plan = TrainingPlan.of(
        best,
        trials,
        budget_bytes=budget_bytes,
        measured=measured,
        speeds=speeds.about,
        notes=notes,
        is_split_exact=is_exact,
    )
    batches = [sample_batch] if worst is None else worst.batches.values()
    return plan, sample_batch, RehearsedBatches(batches, is_loader=worst is not None)


def _is_loader(given: Any) -> bool:
    """Whether this is a loader: iterable, neither a container nor an object that holds tensors or moves to a device."""
    if isinstance(given, (DataLoader, ResumableLoader)):
        return True
    if isinstance(given, (Tensor, str)) or children_of(given) is not None or not hasattr(given, "__iter__"):
        return False
    has_tensors = any(isinstance(each, Tensor) for each in attributes_of(given).values())
    return not (has_tensors or hasattr(given, "to") or hasattr(given, "__array__"))


def _that_treat(trials: Iterable[Trial]) -> list[Trial]:
    return [each for each in trials if each.arrangement.tensors]


def _with_room_or_little(
    with_room: MakeTrials,
    with_little: MakeTrials | None,
    tried: Callable[[MakeTrials], list[Trial]],
    fitting: Callable[[Sequence[Trial]], list[Trial]],
) -> tuple[list[Trial], MakeTrials]:
    """Try arrangements that leave a card's allocator all that it would like, and others if these promise to be faster.

    Args:
        with_room: Prepares trials in which all that the allocator would like to hold must fit.
        with_little: Prepares those in which only what it needs must; None for a part of a card, and for the CPU.
        tried: Tries arrangements.
        fitting: Returns the trials that fit, the fastest first.

    Returns:
        The trials of one kind, and what prepares more of it.
    """
    trials = tried(with_room)
    best = next((each.seconds for each in fitting(trials)), float("inf"))
    if with_little is None or best <= _LITTLE_ROOM * trials[0].seconds:
        return trials, with_room
    others = tried(with_little)
    other = next((each.seconds for each in fitting(others)), float("inf"))
    is_better = _LITTLE_ROOM * other < best or best == float("inf")
    return (others, with_little) if is_better else (trials, with_room)


def _tried(
    rehearsal: StepTrials,
    *,
    counts: Sequence[int],
    precisions: Sequence[PlannedPrecision | None],
    budget_bytes: int,
    treat: Treat | None,
    activation_budget: int | str | float | None,
    curve: bool,
    slack: float,
    refused: Callable[[int, Exception], None],
) -> list[Trial]:
    """Try arrangements as `search` does, or as `search_activations` does where there is a budget for them."""
    if activation_budget is not None:
        return search_activations(
            rehearsal.run, rehearsal.tensor_choices, rehearsal.num_rows, counts[0], precisions, activation_budget
        )
    return search(
        rehearsal.run,
        rehearsal.num_rows,
        counts,
        precisions,
        budget_bytes,
        slack=slack,
        choices_of=None if treat == "blocks" else rehearsal.tensor_choices,
        treats_blocks=treat != "tensors",
        has_curve=curve,
        refused=refused,
    )


class PreparedTrainer(MemoryEfficientTrainingWrapper):
    """The wrapper that `prepare` returns. It warns once of a batch, or a step, that the plan was not rehearsed with.

    Attributes:
        plan: The plan that it follows.
        rehearsed: The batches that the plan was rehearsed with.
        rehearsed_step: The loss function and the parameters that it was rehearsed with.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = mk.prepare(model, optimizer, torch.ones(8, 64), lambda m, x: m(x).sum(), budget="1GiB")
        >>> trainer.plan.accumulation_steps, trainer.plan.checkpoint
        (1, None)
    """

    plan: TrainingPlan
    rehearsed: RehearsedBatches
    rehearsed_step: RehearsedStep

    def train_step(self, batch: Any, loss_fn: LossFn) -> StepResult:
        """Run one optimizer step on a batch, as `MemoryEfficientTrainingWrapper.train_step` does."""
        self.rehearsed.look_at(batch)
        self.rehearsed_step.look_at(loss_fn)
        return super().train_step(batch, loss_fn)

    def microbatches(self, batch: Any) -> Iterator[Attempt | CheckAttempt]:
        """Yield attempts at the micro-batches of a batch, as `MemoryEfficientTrainingWrapper.microbatches` does."""
        self.rehearsed.look_at(batch)
        self.rehearsed_step.look_at()
        yield from super().microbatches(batch)


# The options of plan_training are repeated in full so that help() and completion show them here too.
@guided(words=PLAN_WORDS)
def prepare(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    sample_batch: Any,
    loss_fn: LossFn,
    *,
    budget: CapacityLike | None = None,
    target: str | GPU | None = None,
    precisions: Sequence[PlannedPrecision | None] = (None,),
    micro_batch_size: int | None = None,
    treat: Treat | None = None,
    may_offload: bool = True,
    activation_budget: int | str | float | None = None,
    curve: bool = False,
    measure: bool = False,
    selected_fraction: float | None = None,
    max_grad_norm: float | None = None,
    scheduler: Scheduler | Sequence[Scheduler] | None = None,
    probe: Probe = True,
) -> PreparedTrainer:
    """Plan a training step, and return a wrapper that runs it.

    Args:
        model: As for `plan_training`, with data.
        optimizer: Its optimizer, or several.
        sample_batch: As for `plan_training`; not kept.
        loss_fn: As for `plan_training`.
        budget: As for `plan_training`.
        target: As for `plan_training`.
        precisions: As for `plan_training`.
        micro_batch_size: As for `plan_training`.
        treat: As for `plan_training`.
        may_offload: As for `plan_training`.
        activation_budget: As for `plan_training`.
        curve: As for `plan_training`.
        measure: As for `plan_training`.
        selected_fraction: As for `plan_training`.
        max_grad_norm: As for `MemoryEfficientTrainingWrapper`.
        scheduler: As for `MemoryEfficientTrainingWrapper`.
        probe: As for `MemoryEfficientTrainingWrapper`. Splits that planning found exact are not checked again.

    Returns:
        A `MemoryEfficientTrainingWrapper` with the plan as `plan`. Batches of other sizes are split into the same
        number of micro-batches.

    Warns:
        MemkitWarning: As for `plan_training`. From the steps, once each, if their memory is not known: a batch is
            larger than ``sample_batch``, or has shapes that no batch of the loader had; the loss function is another,
            or parameters have other sizes or dtypes or are trained that were not.

    Raises:
        ConfigError: As for `plan_training`.
        InputError: As for `plan_training`.
        InputTypeError: As for `plan_training`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "123"))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> batch, loss_fn = torch.ones(512, 64), lambda model, x: model(x).square().mean()
        >>> trainer = mk.prepare(model, optimizer, batch, loss_fn, budget="1MiB")
        >>> trainer.train_step(batch, loss_fn).num_microbatches == trainer.plan.accumulation_steps
        True
    """
    if isinstance(model, nn.Module):  # otherwise swapped arguments are explained better below
        optimizers = list_optimizers(optimizer, Caller("prepare", "trainer", ", sample_batch, loss_fn"))
        check_owner(model, optimizers)  # now: planning takes seconds
    plan, batch, rehearsed = _plan(
        "prepare",
        model,
        sample_batch,
        loss_fn,
        optimizer,
        budget=budget,
        target=target,
        precisions=precisions,
        micro_batch_size=micro_batch_size,
        treat=treat,
        may_offload=may_offload,
        activation_budget=activation_budget,
        curve=curve,
        measure=measure,
        selected_fraction=selected_fraction,
    )
    _, whole = _rows_to_plan("prepare", batch)
    if whole and tree_leaves(batch):  # () says itself that nothing is to be cut
        warn_user(
            f"prepare(...): the batch cannot be cut: {whole}. A step that runs out of memory raises an error. Way out: "
            "MemoryEfficientTrainingWrapper(model, optimizer, split_fn=..., **trainer.plan.wrapper_settings())."
        )
    trainer = PreparedTrainer(
        model,
        optimizer,
        max_grad_norm=max_grad_norm,
        scheduler=scheduler,
        probe=probe,
        on_oom=_on_oom(is_packed=bool(whole)),
        **plan.wrapper_settings(),
    )
    trainer.plan, trainer.rehearsed = plan, rehearsed
    trainer.rehearsed_step = RehearsedStep(loss_fn, model, optimizers)
    if plan.is_split_exact:
        trainer.trust_split(batch, loss_fn)  # a check would need more memory than the plan's budget
    return trainer


def _check_precisions(call: str, precisions: Any) -> Sequence[PlannedPrecision | None]:
    """Return a list of precisions; refuse anything else."""
    known = (None, *get_args(PlannedPrecision))
    is_list = isinstance(precisions, (list, tuple)) and len(precisions) > 0
    if not is_list or any(each not in known for each in precisions):
        given = precisions if is_list else [precisions]
        meant = tuple(_precision_meant(each) for each in given)
        raise Checker(f"{call}(...)").refusal(
            "precisions",
            precisions,
            f"a list of at least one of {known}",
            fix=f"write precisions={meant if any(meant) else (None, 'bf16-mixed')}.",
        )
    chosen: Sequence[PlannedPrecision | None] = precisions
    return chosen


def _precision_meant(value: object) -> str | None:
    known = get_args(PlannedPrecision)
    begun = [each for each in known if str(value) and each.startswith(str(value).lower())]
    return begun[0] if begun else nearest_word(str(value), known)


def _find_place(
    call: str, model: nn.Module, budget: CapacityLike | None, target: str | GPU | None
) -> tuple[GPU | None, CapacityLike, int, bool, torch.device | None]:
    """Find where the step is planned to run.

    Returns:
        The GPU, None for the CPU; the budget; it in bytes; whether a card's allocator can have no more; and the device,
        if it is a card of this machine whose other tensors stay within the budget too.
    """
    device = device_of(model)
    where = target if target is not None else str(device) if device.type == "cuda" else device.type
    if budget is None:
        if where in ("cpu", "meta"):
            raise ConfigError(
                f"{call}(...)",
                got="no budget",
                expected="a budget: the memory that a step may take",
                fix=f"write {call}(..., budget='24GiB'), or budget='RTX 4090' for all memory of a GPU.",
            )
        card = look_up(where, f"{call}(..., target={_shown(where)})")
        if not (isinstance(where, str) and where.startswith("cuda")):
            return card, card, card.total_bytes, True, None
        own = resolve_device(where)
        limit_bytes, memory = allocator_limit_bytes(where), device_memory(own)
        # Free memory and the allocator's cache; a context that exists already is no longer free.
        allowed_bytes = (memory.free_bytes or 0) + (memory.reserved_bytes or 0)
        allowed_bytes = allowed_bytes if limit_bytes is None else min(allowed_bytes, limit_bytes)
        return card, card, min(card.total_bytes, allowed_bytes + card.context_bytes), True, own
    try:
        num_bytes = parse_bytes(budget, name="budget", is_large=True)  # type: ignore[arg-type]  # a GPU is not a size
    except (InputError, InputTypeError):
        if not isinstance(budget, (str, GPU)):
            raise
        capacity_bytes(budget, name="budget")  # the error for a budget that is neither a size nor a GPU names both
        gpu = look_up(budget, f"{call}(..., budget={_shown(budget)})")
        if target is not None:
            raise ConfigError(
                f"{call}(..., budget={_shown(budget)}, target={_shown(target)})",
                got="a budget and a target that each name a device",
                expected="a budget in bytes when target is given",
                fix=f"write budget={_shown(budget)} without target, or a size such as budget='20GiB'.",
            ) from None
        return gpu, budget, gpu.total_bytes, True, None
    card_or_none = None if where in ("cpu", "meta") else look_up(where, f"{call}(..., target={_shown(where)})")
    return card_or_none, budget, num_bytes, False, None


def _ways_to_less(*, may_offload: bool, is_part: bool) -> list[str]:
    """Say what would need less memory, if nothing fits."""
    ways = [] if may_offload else ["Offloaded tensors may take less: leave may_offload=False out."]
    return [*ways, _OF_A_PART] if is_part else ways


def _about_failure(error: str, sizes: Iterable[int]) -> str:
    """Say which sizes of micro-batches were left out, and why."""
    shown, more = [*map(str, sizes)][:3], len([*sizes]) - 3
    others = f" and {counted(more, 'other size')}" if more > 0 else ""
    return f"Micro-batches of {', '.join(shown)} rows{others} are left out: the step fails on them ({error})."


def _about_values(trial: Trial, worst: WorstBatch | None) -> list[str]:
    """Say of a plan for one batch, of which values were read, that it is for these."""
    if worst is not None or not trial.estimate.reads_values:
        return []
    return ["The forward reads values of the batch, such as lengths: another batch of equal shapes may take more."]


def _about_masks(trial: Trial) -> list[str]:
    """Say of a step that does not fit which share of elements masks were assumed to select."""
    share = trial.estimate.selected_fraction
    if share is None:
        return []
    masks = f"masks that select {percent(share)}: if yours never select as much, a smaller selected_fraction="
    return [f"The bytes are for {masks} may let a plan fit."]


def _about_first_step(trial: Trial) -> list[str]:
    if not trial.first_step_bytes:
        return []
    more = format_bytes(trial.first_step_bytes)
    about = "copies of buffers and frozen weights, until the forward is seen to leave them unchanged"
    still = "A forward that writes to them through .data is not seen here to do so: then all steps need it."
    return [f"The first step needs {more} that later ones do not: {about}. {still}"]


def _about_cache(trial: Trial, budget_bytes: int) -> list[str]:
    """Say that a card's allocator would like to hold more than the budget."""
    most_bytes = trial.estimate.required_bytes + trial.beside_bytes
    if most_bytes <= budget_bytes:
        return []
    note = f"Below {format_bytes(most_bytes)} the allocator has to free its cache, in the first steps or in each."
    if any("expandable_segments:true" in text.lower() for text in allocator_settings().values()):
        return [note]
    return [
        f"{note} PYTORCH_ALLOC_CONF=expandable_segments:True, set before Python starts, may need less: plan with it."
    ]


def _check_tensors_alone(call: str, *, treat: Treat | None, curve: bool, is_for_one: bool) -> None:
    """Refuse what has no meaning with a budget for activations."""
    others = {
        "treat='blocks'": treat == "blocks",
        "curve=True": curve,
        "a loader": not is_for_one,
    }
    other = next((each for each, is_given in others.items() if is_given), None)
    if other is not None:
        raise ConfigError(
            f"{call}(..., activation_budget=...)",
            got=f"a budget for what waits for backward, with {other}",
            expected="one batch and one plan, for each saved tensor",
            fix="pass memkit.predict.find_worst_batch(loader, model, loss_fn).batch."
            if other == "a loader"
            else f"leave {other} out, or write budget= in place of activation_budget=.",
        )


def _all_memory(model: nn.Module, target: str | GPU | None) -> CapacityLike | None:
    """Return the memory of this machine for a plan on the CPU; None for a card."""
    place = device_of(model).type if target is None else target
    return f"{host_memory().total_bytes}B" if place in ("cpu", "meta") else None


def _about_the_rest(trial: Trial, gpu: GPU, budget_bytes: int) -> list[str]:
    """Say what is on a card of this machine beside the step."""
    notes = []
    if trial.beside_bytes:
        notes.append(
            f"{format_bytes(trial.beside_bytes)} of what it needs are tensors of this process that the step does not "
            "use, and workspaces of libraries."
        )
    if budget_bytes < gpu.total_bytes:
        notes.append(
            f"Of the {gpu.name}'s {format_bytes(gpu.total_bytes)} this process can have {format_bytes(budget_bytes)} "
            "now, the driver's context included: the rest is taken by other programs, or above the process's limit."
        )
    return notes


def _check_measurable(call: str, model: nn.Module, gpu: GPU | None) -> None:
    """Refuse to measure steps that cannot run here."""
    if gpu is not None or device_of(model).type != "cpu":
        raise ConfigError(
            f"{call}(..., measure=True)",
            got=f"a model on {device_of(model)}" + (f" and a budget on {gpu.name}" if gpu else ""),
            expected="a model with data on the CPU and a budget for the CPU, because steps are run",
            fix="write measure=False: the plan then uses the known speeds of the device.",
        )


def _rows_to_plan(call: str, batch: Any, micro_batch_size: int | None = None) -> tuple[int, str]:
    """Return the rows of a batch, at least one; and for one that cannot be cut, such as a graph, the reason."""
    try:
        num_rows = count_rows(batch)
    except InputError as error:
        check_batch(batch, call=f"{call}(..., sample_batch, ...)", written=f"{call}(..., sample_batch={{}}, ...)")
        if micro_batch_size is None:
            return 1, error.got
        raise InputError(
            f"{call}(..., sample_batch, micro_batch_size={micro_batch_size!r}, ...)",
            got=error.got,
            expected="tensors that all have the rows of one optimizer step in dimension 0",
            fix="leave micro_batch_size out: the batch is then planned as a whole; or cut a packed batch yourself with "
            "MemoryEfficientTrainingWrapper(..., split_fn=...).",
        ) from None
    if not num_rows:
        raise InputError(
            f"{call}(..., sample_batch, ...)",
            got="a batch without rows",
            expected="all rows of one optimizer step",
            fix=f"pass a batch with as many rows as in training: {call}(..., sample_batch=next(iter(loader)), ...).",
        )
    return num_rows, ""


def _allowed_counts(
    call: str, model: nn.Module, batch: Any, loss_fn: LossFn, num_rows: int, micro_batch_size: int | None
) -> tuple[list[int], list[str], bool | None]:
    """Numbers of micro-batches to try, notes on them, and whether they have the gradient of the whole batch."""
    if micro_batch_size is None:
        counts = micro_batch_counts(num_rows)
    else:
        check = Checker(f"{call}(...) of a batch of {num_rows} rows")
        counts = [-(-num_rows // check.whole("micro_batch_size", micro_batch_size, 1, num_rows))]
    if counts == [1]:
        return counts, [], None
    is_exact, reason = _judge_split(model, batch, loss_fn)
    if is_exact is None:
        return counts, [f"Whether the batch may be split was not checked: {reason}."], None
    if is_exact:
        return counts, [], True
    if micro_batch_size is None:
        return [1], [f"The batch is kept whole: {reason}"], False
    return counts, [f"Split into micro-batches of {micro_batch_size} rows as requested, although {reason}"], False


def _about(worst: WorstBatch, gpu: GPU | None, budget_bytes: int) -> list[str]:
    """Say for which batches a plan is, and how many of them need it."""
    kinds = f"Rehearsed with {len(worst.batches)} of {worst.num_kinds} kinds of batch"
    most = f"batch {worst.number} of {worst.num_batches} is the largest"
    if worst.estimate.target == ("cpu" if gpu is None else gpu.name):  # otherwise it estimated for another device
        most += f", and {len(worst.too_large(f'{budget_bytes}B'))} would not fit as they are"
    return [f"{kinds}: {most}.", *(f"{note[0].upper()}{note[1:]}." for note in worst.notes)]


def _judge_split(model: nn.Module, batch: Any, loss_fn: LossFn) -> tuple[bool | None, str]:
    """Whether parts have the gradient of the whole (None if unknown), and the reason."""
    if device_of(model).type == "meta":
        norms = scan_modules(model)
        if norms:
            return False, f"{', '.join(norms)} normalize over the rows."
        return None, "the model has no data"
    if any(each.device.type == "meta" for each in tree_leaves(batch) if isinstance(each, Tensor)):
        return None, "the batch has no data"
    verdict = check_split(unwrap_model(model), batch, loss_fn)
    if verdict.exact is False or verdict.modules:
        return False, f"the parts have a different gradient. {verdict.advice}"
    if verdict.is_permuted:
        return False, f"{verdict.reason}."
    if verdict.buffers:
        return False, f"the parts leave other values in {list_some(verdict.buffers, 3)} than the whole batch."
    return verdict.exact, verdict.reason


def _shown(place: object) -> str:
    """Show a budget or a target the way the user may have written it."""
    return place.name if isinstance(place, GPU) else repr(place)


@contextlib.contextmanager
def _wrapped(
    model: nn.Module, optimizers: Sequence[Optimizer], arrangement: Arrangement, *, most_steps: int, is_packed: bool
) -> Iterator[TrainStep]:
    """The wrapper's own step, with at most ``most_steps`` micro-batches; one for a packed batch."""
    num_steps = min(most_steps, arrangement.accumulation_steps)
    with MemoryEfficientTrainingWrapper(
        model,
        optimizers,
        precision=arrangement.precision,  # type: ignore[arg-type]  # checked by the wrapper
        accumulation_steps=num_steps,
        checkpoint=dict(arrangement.treatments) or None,
        saved_tensors=arrangement.tensors,
        on_oom=_on_oom(is_packed=is_packed),
        probe=False,
    ) as trainer:

        def train_step(batch: Any, loss_fn: LossFn) -> StepBytes:
            if not is_packed:
                rows = min(count_rows(batch), num_steps * arrangement.micro_batch_size)
                batch = unmark_samples(take_rows(mark_samples(batch), 0, rows))
            result = trainer.train_step(batch, loss_fn)
            left_bytes = result.losses[-1].value.untyped_storage().nbytes()  # a mean may share storage with its terms
            return StepBytes(int(left_bytes), trainer.first_step_bytes)

        yield train_step


def _on_oom(*, is_packed: bool) -> Literal["exact", "raise"]:
    """The wrapper recovers by smaller parts, which a packed batch has not."""
    return "raise" if is_packed else "exact"


@contextlib.contextmanager
def _in_place(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer],
    arrange: Arrange,
    batch: Any,
    arrangement: Arrangement,
) -> Iterator[Callable[[], StepBytes]]:
    """The real step on the whole batch, of a model that has already taken one; afterwards nothing of it is left.

    The model is the user's own: a loss function may reach it by itself, as a trainer's method does, and would leave a
    copy without gradients. Only the optimizers are copies, which train the same parameters.
    """
    optimizers = optimizer_maker(optimizer)(model.parameters())
    stepped = [each for one in optimizers for group in one.param_groups for each in group["params"]]
    if is_own(optimizer):
        shared = (*model.modules(), *model.buffers(), *all_parameters(model), *stepped)
        optimizers = copy.deepcopy(optimizers, {id(each): each for each in shared})
    arranged = arrange(model, optimizers, arrangement, most_steps=sys.maxsize)
    with random_state.preserved(), _undone(model, loss_fn, stepped), arranged as train_step:
        batch = copied(with_data(batch))
        train_step(batch, loss_fn)
        yield lambda: train_step(batch, loss_fn)


@contextlib.contextmanager
def _undone(model: nn.Module, loss_fn: LossFn, stepped: Sequence[Tensor]) -> Iterator[None]:
    """Undo what the block's steps change: the parameters, the model, and what a loss function holds."""
    networks = (each for each in Attributes([loss_fn]).holders() if isinstance(each, nn.Module))
    parameters = [*stepped, *model.parameters(), *nn.ModuleList(networks).parameters()]
    values = [(each, each.detach(), cloned(each)) for each in stepped]
    watch = StateWatch(model)
    watch.loss_fn = loss_fn
    before = Rollback(watch, is_trial=True)
    try:
        with gradients_set_aside(parameters):
            yield
    finally:
        with deferred_signals():  # Ctrl-C in the middle would leave a model that is half trained
            for each, place, value in values:  # before the others, which would tell of parameters that have moved
                put_back(each, place)
                place.data.copy_(value)
            before.restore()


def _time_step(run_for_real: RunForReal, batch: Any, arrangement: Arrangement) -> float:
    """Processor time of a real step, the shortest of five runs."""
    seconds = []
    with run_for_real(batch, arrangement) as step:
        for _ in range(_NUM_TIMED):
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
    return min(seconds)


def _about_workspace(trials: Sequence[Trial], budget_bytes: int) -> list[str]:
    """Say how to find the workspace of kernels, if only its bound does not fit."""
    fits = any(_fits_without_workspace(each, budget_bytes) for each in trials)
    return ["Part of it is a bound for the kernels' workspace: measure=True finds what they take."] if fits else []


def _fits_without_workspace(trial: Trial, budget_bytes: int) -> bool:
    return trial.required_bytes - (trial.estimate.workspace_bytes or 0) <= budget_bytes


def _settled(trial: Trial, batch: Any, *, budget_bytes: int, run_for_real: RunForReal | None) -> Trial:
    """Replace the workspace bound by the measured workspace, if whether the trial fits depends on it."""
    does_not_matter = trial.required_bytes <= budget_bytes or not _fits_without_workspace(trial, budget_bytes)
    if run_for_real is None or does_not_matter:
        return trial
    return _with_measured_workspace(trial, batch, run_for_real)


def _nearest(trials: Sequence[Trial], batch: Any, run_for_real: RunForReal | None) -> Trial:
    """Return the trial that requires least; if steps may run, workspaces are measured of the few that promise that."""
    if run_for_real is not None:
        least = sorted(trials, key=lambda each: each.estimate.peak_interval[0])[:_NUM_FINALISTS]
        trials = [*trials, *(_with_measured_workspace(each, batch, run_for_real) for each in least)]
    return min(trials, key=lambda each: each.required_bytes)


def _with_measured_workspace(trial: Trial, batch: Any, run_for_real: RunForReal) -> Trial:
    recorder = Recorder(marks=WorkspaceMarks())
    with run_for_real(batch, trial.arrangement) as step, recorder:
        step()
    unseen_bytes = max(0, trial.required_bytes - trial.estimate.required_bytes)
    return replace(trial, required_bytes=recorder.recording().peak_bytes() + unseen_bytes)


def _refuse(
    call: str, budget: CapacityLike, budget_bytes: int, nearest: Trial, notes: Sequence[str], *, is_measured: bool
) -> NoReturn:
    holders = "; ".join(f"{format_bytes(each.nbytes)} {each}" for each in nearest.estimate.holders[:3])
    arrangement = nearest.arrangement
    treated = f", {len(arrangement.treatments)} blocks treated" if arrangement.treatments else ""
    workspace_bytes = 0 if is_measured else nearest.estimate.workspace_bytes or 0
    needs = f"at least {format_bytes(nearest.required_bytes)}"
    if workspace_bytes:  # a bound
        needs = " to ".join(format_bytes(nearest.required_bytes - each) for each in (workspace_bytes, 0))
    size, count = arrangement.micro_batch_size, arrangement.accumulation_steps
    cut = f"with micro-batches of {size} rows" if size > 1 or count > 1 else "with the batch as a whole"
    raise ConfigError(
        f"{call}(..., budget={_shown(budget)})",
        got=f"a step that needs {needs}, {cut}{treated}; its largest holders are {holders}",
        expected=f"a plan that needs at most {format_bytes(budget_bytes)}",
        fix=" ".join([f"pass budget='{nearest.required_bytes}B' or more, or a smaller model.", *notes]),
    )
