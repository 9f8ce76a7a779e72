"""`find_worst_batch`: the batch of a loader whose step takes the most memory, found before the first step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import neg
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from memkit._charts.overview import Overview, Overviewed
from memkit._core.errors import InputError, InputTypeError, warn_user
from memkit._core.foreign import LOADER
from memkit._core.settings import Checker
from memkit._core.units import format_bytes
from memkit._core.words import guided
from memkit._machine import random_state
from memkit._simulation.simulation import check_model, check_not_simulated
from memkit._simulation.tensors import check_selected_fraction
from memkit.predict.batch_kinds import batch_kind, values_of, without_data
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.gpus import GPU, CapacityLike
from memkit.predict.size_law import search_highest
from memkit.predict.usage import estimate_memory_usage
from memkit.predict.words import ESTIMATE_WORDS

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from memkit._gradients.loss import LossFn
    from memkit._simulation.simulation import MakeOptimizer

_CALL = "find_worst_batch(...)"
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstBatch(Overviewed):
    """The batch whose step takes the most memory. It prints as its verdict, its place, and the parts of its memory.

    `memkit.plan_training` and `memkit.prepare` take it in place of a batch: the plan then holds for each kind of batch.

    Attributes:
        number: The number of the batch in the loader, from 0.
        batch: The batch. With ``num_estimates`` it is without data.
        indices: The sampler's indices for it; None without ``make_batch``.
        estimate: The memory of its step.
        num_batches: Number of batches that the loader gave.
        num_kinds: Number of kinds among them. Batches of equal structure, shapes and dtypes are of one kind; if a step
            reads values from its batch (lengths, whether there is padding), these are equal too.
        estimates: The memory of each kind that was estimated, by the number of its first batch, the largest first.
        numbers: The numbers of all batches of each of these kinds, by the same key.
        batches: The first batch of each of these kinds, without data.
        notes: The kinds that were not estimated, and why they should be smaller.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Linear(64, 64)
        >>> loader = [torch.ones(rows, 64) for rows in (8, 100, 8, 31)]
        >>> worst = mk.predict.find_worst_batch(loader, model, lambda model, x: model(x).square().mean())
        >>> worst.number, len(worst.batch), list(worst.estimates), worst.too_large("128KiB")
        (1, 100, [1, 3, 0], [1])
    """

    number: int
    batch: Any
    indices: Any = None
    estimate: MemoryEstimate
    num_batches: int
    num_kinds: int
    estimates: dict[int, MemoryEstimate]
    numbers: dict[int, list[int]]
    batches: dict[int, Any] = field(repr=False)
    notes: tuple[str, ...] = ()

    def too_large(self, capacity: CapacityLike) -> list[int]:
        """Return the numbers of the batches that are not known to fit, ascending.

        Args:
            capacity: As for `MemoryEstimate.verdict`.

        Raises:
            InputError: As for `MemoryEstimate.verdict`.
            InputTypeError: As for `MemoryEstimate.verdict`.
        """
        return sorted(
            number
            for first, each in self.estimates.items()
            if not each.fits(capacity)
            for number in self.numbers[first]
        )

    def _overview(self) -> Overview:
        inside = self.estimate._overview()  # noqa: SLF001 - of the same package
        place = f"batch {self.number} of {self.num_batches}"
        others = [
            (f"batch {number}", format_bytes(each.required_bytes))
            for number, each in list(self.estimates.items())[:_SHOWN]
        ]
        notes = [*inside.notes, *self.notes]
        too_large = [] if self.estimate.target_bytes is None else self.too_large(self.estimate.target_bytes)
        if too_large:
            count = f"{len(too_large)} of {self.num_batches} batches do not fit, or that is not known"
            notes += [f"{count}. mk.prepare(model, optimizer, worst, loss_fn, budget=...) finds parts that do."]
        return Overview(f"{place} is the largest; {inside.headline}", [*inside.rows, *others[1:]], notes)


@guided(
    words=ESTIMATE_WORDS
    | {
        "loader": f"{LOADER} batches sampler batch_sampler",
        "num_batches": "limit max_steps",
        "make_batch": "collate collate_fn",
        "num_estimates": "max_estimates",
    }
)
def find_worst_batch(
    loader: Iterable[Any],
    model: nn.Module,
    loss_fn: LossFn,
    *,
    make_batch: Callable[[Any], Any] | None = None,
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer] = "adamw",
    precision: Literal["bf16-mixed", "fp16-mixed"] | None = None,
    target: str | GPU = "cpu",
    accumulation_steps: int = 1,
    selected_fraction: float | None = None,
    num_batches: int | None = None,
    num_estimates: int | None = None,
) -> WorstBatch:
    """Find the batch whose training step has the largest predicted peak, before the first step.

    A run over data of varying sizes ends when its largest batch comes, hours later. Here a step of each kind of batch
    is run on tensors without data. Batches are of one kind if structure, shapes and dtypes are equal, so a loader of
    equal batches costs one estimate. The result holds for the given batches, in any order; which samples share a
    batch is up to the sampler.

    Args:
        loader: The batches; one pass is made over them. With ``make_batch``, its inputs: a batch sampler, or lists of
            indices. Afterwards a shuffling loader or sampler draws as it would have without this call, and a resumed
            one continues from its position: random states, its own generators and its position are restored.
        model: As for `memkit.estimate_memory_usage`.
        loss_fn: As for `memkit.estimate_memory_usage`.
        make_batch: ``make_batch(indices)`` returns a batch of the sizes that the loader would have, so that nothing is
            loaded. Its tensors need no data: ``torch.empty(..., device="meta")``. If the step reads integers from its
            batch, give these their values. None: the loader gives the batches.
        optimizer: As for `memkit.estimate_memory_usage`.
        precision: As for `memkit.estimate_memory_usage`.
        target: As for `memkit.estimate_memory_usage`.
        accumulation_steps: As for `memkit.estimate_memory_usage`.
        selected_fraction: As for `memkit.estimate_memory_usage`.
        num_batches: How many batches to read; None for all.
        num_estimates: How many kinds to estimate, if there are too many; None for all. The kinds with the highest
            peak predicted by a law through the known peaks are estimated; `WorstBatch.notes` say how the others are
            ruled out.

    Returns:
        The batch, its number, and its estimate. Of equal peaks the first counts.

    Raises:
        InputTypeError: ``loader`` cannot be iterated, or ``model`` is not a module; a sampler without ``make_batch``.
        InputError: The loader has no batches; a size depends on data.
        ConfigError: As for `memkit.estimate_memory_usage`.

    Warns:
        MemkitWarning: With ``num_estimates``: a kind that was not estimated may be larger.

    Memory cost:
        Two batches on the host, a copy of each kind's integer tensors, and about 1 kB for each operator of a step.

    Source:
        ``docs/worst-batch.md``; checked against real epochs in ``benchmarks/cases/worst_batch.py``.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Linear(64, 64)
        >>> loader = [torch.ones(rows, 64) for rows in (8, 100_000, 31)]
        >>> worst = mk.predict.find_worst_batch(
        ...     loader, model, lambda model, x: model(x).square().mean(), target="RTX 4090"
        ... )
        >>> worst.number, worst.estimate.fits("RTX 4090")
        (1, True)
    """
    _check_loader(loader, model, is_made=make_batch is not None)
    check = Checker(_CALL)
    if make_batch is not None:
        check.function("make_batch", make_batch)
    for name, limit in (("num_batches", num_batches), ("num_estimates", num_estimates)):
        if limit is not None:
            check.whole(name, limit, 1)
    check_selected_fraction(_CALL, selected_fraction)
    check_not_simulated("find_worst_batch")
    estimate = partial(
        estimate_memory_usage,
        model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        precision=precision,
        target=target,
        accumulation_steps=accumulation_steps,
        selected_fraction=selected_fraction,
    )
    kinds = _Kinds(estimate, is_limited=num_estimates is not None)
    with random_state.preserved(), _restored(loader), _noting_one_batch(loader):
        for given in islice(loader, num_batches):
            kinds.add(given if make_batch is None else make_batch(given), given)
    if not kinds.numbers:
        raise InputError(
            _CALL,
            got="a loader without batches",
            expected="at least one batch",
            fix="pass a DataLoader or a list; an iterator is exhausted after one pass.",
        )
    notes = () if num_estimates is None else kinds.estimate_highest(num_estimates)
    return kinds.worst(notes, is_made=make_batch is not None)


class _Kinds:
    """The kinds of batch in a loader, each identified by the number of its first batch.

    Args:
        estimate: Estimates a batch.
        is_limited: Whether kinds wait to be chosen; otherwise each is estimated at once.

    Attributes:
        numbers: The numbers of the batches of each kind.
    """

    def __init__(self, estimate: Callable[[Any], MemoryEstimate], *, is_limited: bool) -> None:
        self._estimate, self._is_limited = estimate, is_limited
        self._firsts: dict[Hashable, int] = {}
        self.numbers: dict[int, list[int]] = {}
        self._estimates: dict[int, MemoryEstimate] = {}
        self._batches: dict[int, Any] = {}
        self._given: dict[int, Any] = {}
        self._num_batches = 0
        self._largest: tuple[int, Any] | None = None  # number and batch

    def add(self, batch: Any, given: Any) -> None:
        """Count a batch; if it is the first of its kind, estimate it or let it wait."""
        number = self._num_batches
        self._num_batches += 1
        kind = batch_kind(batch)
        first = self._firsts.setdefault(kind, number)
        if first != number and first in self._estimates and self._estimates[first].reads_values:
            first = self._firsts.setdefault((kind, values_of(batch)), number)
        if first != number:
            self.numbers[first].append(number)
            return
        self.numbers[number] = [number]
        self._given[number] = given
        self._batches[number] = without_data(batch)
        if not self._is_limited:
            estimate = self._estimates[number] = self._estimate(batch)
            if estimate.reads_values:
                self._firsts[kind, values_of(batch)] = number
            if self._largest is None or _size(estimate) > _size(self._estimates[self._largest[0]]):
                self._largest = number, batch

    def estimate_highest(self, limit: int) -> tuple[str, ...]:
        """Estimate the kinds that may be the largest; return notes on the others."""
        firsts = list(self._batches)

        def measure(place: int) -> int:
            number = firsts[place]
            self._estimates[number] = self._estimate(self._batches[number])
            return self._estimates[number].required_bytes

        found = search_highest(list(self._batches.values()), measure, limit)
        notes = []
        if len(found.places) < len(firsts):
            highest = max(each.required_bytes for each in self._estimates.values())
            others = f"{len(firsts) - len(found.places)} of {len(firsts)} kinds of batch were not estimated"
            law = (
                f"a law through the other {len(found.places)} puts them at {found.highest / highest:.1%} of the largest"
            )
            notes = [f"{others}: {law} or less; the kinds that it chose were at most {found.miss:.1%} above it"]
            if found.highest * (1 + found.miss) >= highest:
                notes += ["a kind that was not estimated may be larger"]
        if any(estimate.reads_values and len(self.numbers[number]) > 1 for number, estimate in self._estimates.items()):
            notes += ["the step reads values from its batch, so batches of equal shapes may differ"]
        if len(notes) > 1 or (notes and len(found.places) == len(firsts)):
            warn_user(f"{_CALL}: {'; '.join(notes)}. Way out: num_estimates=None estimates all kinds.")
        return tuple(notes)

    def worst(self, notes: tuple[str, ...], *, is_made: bool) -> WorstBatch:
        """Return the batch with the largest estimate."""
        firsts = sorted(self._estimates, key=lambda each: (*map(neg, _size(self._estimates[each])), each))
        number, batch = self._largest or (firsts[0], self._batches[firsts[0]])
        return WorstBatch(
            number=number,
            batch=batch,
            indices=self._given[number] if is_made else None,
            estimate=self._estimates[number],
            num_batches=self._num_batches,
            num_kinds=len(self.numbers),
            estimates={each: self._estimates[each] for each in firsts},
            numbers={each: self.numbers[each] for each in firsts},
            notes=notes,
            batches={each: self._batches[each] for each in firsts},
        )


@contextmanager
def _restored(loader: Any) -> Iterator[None]:
    """Put a loader and its samplers back to where they were: their own random generators, and resumable positions."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    parts = list({id(each): each for each in (loader, batch_sampler, *samplers) if each is not None}.values())
    generators = [each for each in (getattr(part, "generator", None) for part in parts) if each is not None]
    states = [(each, each.get_state()) for each in generators if isinstance(each, torch.Generator)]
    positions = [(each, each.state_dict()) for each in parts if hasattr(each, "load_state_dict")]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        for part, position in positions:
            part.load_state_dict(position)


def _size(estimate: MemoryEstimate) -> tuple[int, int]:
    """Return the bytes reserved, which decide what fits, in steps of 2 MiB; among equals, the bytes in tensors."""
    return estimate.required_bytes, estimate.peak_bytes


@contextmanager
def _noting_one_batch(loader: Any) -> Iterator[None]:
    """Add a note to an error of the user's code if the loader looks like one batch."""
    try:
        yield
    except Exception as error:
        if isinstance(loader, (tuple, list)) and all(isinstance(each, Tensor) for each in loader):
            error.add_note(
                f"memkit: find_worst_batch read {len(loader)} batches, each a tensor, from its first argument. For one "
                "batch, pass [batch]."
            )
        raise


def _check_loader(loader: Any, model: object, *, is_made: bool) -> None:
    """Refuse anything but a loader, and a model in its place."""
    fix = "write find_worst_batch(loader, model, loss_fn), with loader = [batch] for one batch."
    if isinstance(loader, nn.Module) and not isinstance(model, nn.Module):
        got = "the model first and the batches second"
    elif not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        got = f"a {type(loader).__name__} as loader"
    elif isinstance(loader, Tensor):
        got = "one tensor as loader"
    elif isinstance(loader, Sampler) and not is_made:
        got = f"a {type(loader).__name__}, whose batches are lists of indices"
        fix = (
            "write find_worst_batch(sampler, model, loss_fn, make_batch=...), where make_batch takes a list of indices."
        )
    else:
        check_model("find_worst_batch", model)
        return
    raise InputTypeError(
        _CALL,
        got=got,
        expected="batches to iterate over, such as a DataLoader, then the model",
        fix=fix,
    )
