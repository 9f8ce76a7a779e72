"""The result of every memory prediction: the bytes of one warm training step, broken down by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

from memkit._charts.overview import Overview, Overviewed
from memkit._core.errors import FileFormatError, warn_user
from memkit._core.foreign import AS_DICT, PEAK, SUMMARY
from memkit._core.printable import percent, printable
from memkit._core.units import format_bytes
from memkit._core.words import guided
from memkit.predict.gpus import CapacityLike, capacity_bytes

if TYPE_CHECKING:  # a config's estimate needs no torch
    from memkit._simulation.simulation import Record

_NUM_HOLDERS = 8
SPREAD = 0.02
"""How far a GPU's peak and least may lie from the estimate's where convolutions run, as a share of them."""


class Margin(NamedTuple):
    """How far a GPU's reserve may lie from the estimate, on one side.

    The elastic part of a reserve, beyond what the allocator needs, depends on where each block lies: a block of scratch
    memory inside a kernel, a few MiB of a library or another order of two threads moves all later ones. So the same
    share of a reserve is nearly certain in one step and a matter of luck in the next. The other source is memory that
    the rules of kernels leave out, a share of everything. The two are independent: their squares add up.

    Attributes:
        share: Of the estimate.
        elastic: Of the elastic part.
    """

    share: float
    elastic: float

    def bytes_of(self, num_bytes: int, elastic_bytes: int) -> int:
        """Return the margin of a figure of ``num_bytes``."""
        return int(math.hypot(self.share * num_bytes, self.elastic * elastic_bytes))


# The narrowest that hold 95% of the recorded runs, in round numbers. `benchmarks/results/recorded_intervals.json` has
# the margins that other families of models would choose, and those needed when runs swap their elastic parts.
LESS, MORE = Margin(share=0.01, elastic=0.25), Margin(share=0.01, elastic=0.8)
MORE_AT_LEAST = 0.4
"""The share of the elastic part that a step may need after all, because blocks in use lie between those to be freed.

With it, fewer than half as many recorded runs that ran out are said to fit, and 8% of all are too close to say.
"""
Word: TypeAlias = Literal["fits", "does not fit", "too close", "not known"]
_SENTENCES = {
    "fits": "fits {}",
    "does not fit": "does not fit {}",
    "too close": "too close to say whether it fits {}",
    "not known": "not known whether it fits {}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A block of memory that is live at the peak. Empty strings mean "unknown", as for blocks made before the step.

    Attributes:
        nbytes: Its size.
        category: Its purpose: parameter, buffer, gradient, optimizer, input, activation or temporary.
        module: Dotted name of the module whose forward or backward allocated it.
        operator: The operator that allocated it.
        source: The line of your code that allocated it, as ``"file:line in function"``.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> estimate = mk.estimate_memory_usage(
        ...     torch.nn.Linear(100, 100), torch.ones(10, 100), loss_fn=lambda model, x: model(x).sum()
        ... )
        >>> print(estimate.holders[0].category, estimate.holders[0].nbytes)
        parameter 40000
    """

    nbytes: int
    category: str
    module: str
    operator: str
    source: str

    def __str__(self) -> str:
        parts = (self.category, self.module, self.operator, self.source and f"at {self.source}")
        return ", ".join(part for part in parts if part)


class Verdict(str):
    """Whether a step fits: ``"fits"``, ``"does not fit"``, ``"too close"`` or ``"not known"``, with the reason.

    Attributes:
        reason: Why, in one sentence.

    Example:
        >>> from memkit import estimate_memory_usage
        >>> from memkit.predict import TrainingConfig
        >>> verdict = estimate_memory_usage(TrainingConfig()).verdict("1MiB")
        >>> print(verdict)
        does not fit
        >>> verdict.reason.startswith("it needs")
        True
    """

    __slots__ = ("reason",)
    reason: str

    def __new__(cls, word: Word, reason: str) -> Self:
        """Create a verdict from its word and the reason for it."""
        verdict = super().__new__(cls, word)
        verdict.reason = reason
        return verdict

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.reason)


# Other programs' names of the figures, and GB where bytes are meant.
_ABSENT = {
    "estimate.peak_bytes": f"{PEAK} peak_gb peak_mb",
    "estimate.total_bytes": "total total_gb total_mb memory total_memory size",
    "estimate.reserved_bytes": "reserved reserved_gb",
    "estimate.parameters_bytes": "params parameters params_bytes",
    "estimate.gradients_bytes": "grads gradients",
    "estimate.activations_bytes": "activations activation_bytes",
    "estimate.optimizer_bytes": "optimizer optimizer_states optimizer_states_bytes",
    "print(estimate), or estimate.explain() for every part": SUMMARY,
    "estimate.as_dict()": f"{AS_DICT} breakdown []",
    "estimate.peak_bytes, or estimate.peak_bytes / 2**30 in GiB": "peak_gib float()",
    "estimate.headroom_bytes('RTX 4090')": "headroom",
}


@guided(words={"capacity": "gpu target device card"}, absent=_ABSENT, methods=("fits", "verdict", "headroom_bytes"))
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate(Overviewed):
    """Estimated memory of the second (warm) optimizer step of a training run.

    The parts are the bytes live at the moment of the peak; `peak_bytes` is their sum. None means "unknown". It prints
    as its verdict for the target, and the parts; a notebook shows the same as a table.

    Attributes:
        parameters_bytes: Model parameters.
        gradients_bytes: Parameter gradients that are live at the peak.
        optimizer_bytes: Optimizer state.
        activations_bytes: Tensors that autograd saves for the backward pass.
        temporaries_bytes: Everything short-lived: outputs and gradients in flight, casts of weights.
        other_bytes: The batch and the model's buffers; on a GPU also `library_bytes`.
        library_bytes: The part of `other_bytes` that is in no tensor: library workspaces and the allocator's rounding.
        unsharded_bytes: Parameters gathered from other ranks that are live at the peak; None if nothing is sharded.
        workspace_bytes: How far the peak may rise above `peak_bytes` through scratch memory that kernels allocate and
            free internally; None where `reserved_bytes` includes it.
        reserved_bytes: The most that the caching allocator will hold: the peak, fragmentation, library workspaces.
            None on a CPU, whose allocator keeps no such count.
        context_bytes: Driver context and loaded libraries, which no allocator statistic shows: the most that was
            observed on this kind of GPU. None on a CPU.
        least_context_bytes: The least that was seen; None if it is the same as the most.
        peak_where: The place of the peak: for a dry run the module, operator, pass and line of your code; for the
            formula the layer and pass.
        confidence: ``"exact"``: the step's memory, up to less than 64 bytes of Python numbers in tensors.
            ``"workspace"``: exact except for memory inside kernels, see `peak_interval`. ``"guessed"``: some value was
            answered without data (`guesses` says which, `doubts` whether it matters), compiled code ran as it is
            written, or a formula's constants are guesses.
        guesses: The values answered without data, as ``"2 x operator at line"``.
        doubts: Why the estimate may not hold, each with its line: a guess became a size, a branch depended on it, or it
            went where it could not be followed; no gradient was seen; compiled code ran as it is written. If there are
            any, `fits` is False.
        assumptions: Conditions assumed to hold, each with its line: checks that raise an error unless they pass.
        holders: The largest blocks at the peak, largest first.
        spread: Share by which a GPU's peak, and the least that it needs, may differ from these in both directions:
            `SPREAD` where convolutions or recurrent layers run whose scratch memory is not fully known; otherwise 0.
        target: Name of the GPU that the step was run on; ``"cpu"``; or, for a preset, the size on the box.
        target_bytes: Memory of that GPU; None for the CPU, and for a preset without a size.
        reads_values: Whether the step reads values of its batch, such as lengths: batches of equal shapes may then
            differ.
        selected_fraction: The share that masks were assumed to select; None if no size depends on such a share. The
            bytes are then an upper bound, as long as masks select no more.

    Example:
        >>> from memkit import estimate_memory_usage
        >>> from memkit.predict import TrainingConfig
        >>> estimate = estimate_memory_usage(TrainingConfig(gpu_memory_gb=24))
        >>> print(estimate)  # doctest: +ELLIPSIS
        fits a GPU of 24 GB: it needs at most ...
        >>> estimate.total_bytes == estimate.reserved_bytes + estimate.context_bytes
        True
        >>> estimate.headroom_bytes("8GiB") == 8 * 2**30 - estimate.total_bytes
        True
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    temporaries_bytes: int
    other_bytes: int
    library_bytes: int = 0
    unsharded_bytes: int | None = None
    workspace_bytes: int | None = None
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    least_context_bytes: int | None = None
    peak_where: str
    confidence: Literal["exact", "workspace", "guessed"]
    guesses: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    holders: tuple[Holder, ...] = ()
    spread: float = 0.0
    target: str = "cpu"
    target_bytes: int | None = None
    reads_values: bool = False
    selected_fraction: float | None = None
    _find_least: Callable[[], int] | None = field(default=None, repr=False, compare=False)
    _find_range: Callable[[], tuple[int, int]] | None = field(default=None, repr=False, compare=False)

    @property
    def least_reserved_bytes(self) -> int | None:
        """The least that the caching allocator must be able to hold for the step to run, to within 0.4%.

        If the GPU has no more, the allocator frees its cache and tries again, which takes time. None where unknown. It
        is computed at the first access, in about a tenth of the time that the estimate took.
        """
        return None if self._find_least is None else self._find_least()

    @property
    def reserved_range(self) -> tuple[int, int] | None:
        """Least and most bytes reserved if libraries hold up to 8 MiB more than is known; None on a CPU.

        If they are far apart, a few bytes decide: a small block takes the only gap that a large one fits into. They are
        computed at the first access, in a small part of the time that the estimate took.
        """
        if self.reserved_bytes is None:
            return None
        return (self.reserved_bytes, self.reserved_bytes) if self._find_range is None else self._find_range()

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in live tensors, which an allocator reports as its maximum allocated."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.temporaries_bytes
            + self.other_bytes
            + (self.unsharded_bytes or 0)
        )

    @property
    def peak_interval(self) -> tuple[int, int]:
        """Lowest and highest peak: `peak_bytes` without and with `workspace_bytes`, and no less than `spread` apart."""
        highest = max(self.peak_bytes + (self.workspace_bytes or 0), int(self.peak_bytes * (1 + self.spread)))
        return int(self.peak_bytes * (1 - self.spread)), highest

    @property
    def total_bytes(self) -> int | None:
        """Bytes the GPU must have free: ``reserved_bytes + context_bytes``; None if these are unknown."""
        if self.reserved_bytes is None or self.context_bytes is None:
            return None
        return self.reserved_bytes + self.context_bytes

    @property
    def reserved_interval(self) -> tuple[int, int] | None:
        """Lowest and highest bytes that the allocator may hold if memory is plentiful; None on a CPU.

        The ends of `reserved_range`, moved apart by the margins `LESS` and `MORE`: 1% of them, and 25% and 80% of what
        the allocator reserves beyond `least_reserved_bytes`. 95% of recorded runs lie between them. If the least is
        unknown, as with a formula's estimate, there are no margins.
        """
        if self.reserved_range is None or self._elastic_bytes is None:
            return self.reserved_range
        lowest, highest = self.reserved_range
        less, more = LESS.bytes_of(lowest, self._elastic_bytes), MORE.bytes_of(highest, self._elastic_bytes)
        return lowest - less, highest + more

    @property
    def _elastic_bytes(self) -> int | None:
        """Bytes that the allocator reserves beyond its least; None if the least is unknown."""
        reserved, least = self.reserved_bytes, self.least_reserved_bytes
        return None if reserved is None or least is None else max(0, reserved - least)

    @property
    def least_required_interval(self) -> tuple[int, int]:
        """Bytes without which the step cannot run, and bytes with which it runs, at times more slowly.

        The allocator can give up its cache beyond `least_reserved_bytes`, known to within `spread`; up to
        `MORE_AT_LEAST` of it cannot be freed if blocks in use lie between. A step also runs in the lower end of
        `reserved_range`. Convolutions have slower kernels without `workspace_bytes`. The context is that of the driver
        that takes the least, and of the one that takes the most.
        """
        least = self.least_reserved_bytes
        if least is None:
            return self.required_bytes - (self.workspace_bytes or 0), self.required_bytes
        most_context = self.context_bytes or 0
        least_context = most_context if self.least_context_bytes is None else self.least_context_bytes
        lowest = min((least, *(self.reserved_range or ())))
        enough = least + Margin(self.spread, MORE_AT_LEAST).bytes_of(least, self._elastic_bytes or 0) + most_context
        return int(lowest * (1 - self.spread)) + least_context, min(enough, self.required_bytes)

    @property
    def required_bytes(self) -> int:
        """The most bytes that the step takes if memory is plentiful, so that it never waits for the allocator.

        `context_bytes` and the higher end of `reserved_interval`, or of `reserved_range` with all of `workspace_bytes`;
        on a CPU the higher end of `peak_interval`.
        """
        interval, within = self.reserved_interval, self.reserved_range
        if interval is None or within is None or self.context_bytes is None:
            return self.peak_interval[1]
        return max(interval[1], within[1] + (self.workspace_bytes or 0)) + self.context_bytes

    def verdict(self, capacity: CapacityLike) -> Verdict:
        """Say whether the step fits into ``capacity``, or why that is unknown.

        Args:
            capacity: Bytes as an int, text such as ``"24GiB"`` (the number on a GPU's box counts GiB), the name of a
                GPU such as ``"RTX 4090"``, or a `GPU`. A GPU counts with the smallest total that torch has been seen to
                report; if this estimate has no `context_bytes`, the driver's share is subtracted.

        Returns:
            One of the four words, with its `reason`. ``"fits"``: the step runs; with less than
            `required_bytes` the allocator has to free its cache, which takes time, and the reason says so. ``"too
            close"``: the capacity is between the two ends of `least_required_interval`. With a `selected_fraction` the
            bytes are an upper bound: ``"fits"`` holds as long as masks select no more, which the reason says; what is
            too large or too close is ``"not known"``, because the step may fit if masks select less.

        Raises:
            InputError: ``capacity`` is negative, or text that is neither a size nor the name of one GPU.
            InputTypeError: ``capacity`` has another type.
        """
        headroom_bytes = self.headroom_bytes(capacity)
        most = format_bytes(self.required_bytes)
        if self.doubts:
            return Verdict("not known", "; ".join(self.doubts))
        if headroom_bytes >= 0:
            free = format_bytes(headroom_bytes)
            return Verdict("fits", f"it needs at most {most} and leaves {free} free{self.condition}")
        low, high = self.least_required_interval
        there_bytes = self.required_bytes + headroom_bytes
        if high <= there_bytes:
            needed = f"it needs {format_bytes(high)}{self.condition}"
            return Verdict("fits", f"{needed}; below {most} the allocator has to free its cache, which takes time")
        if self.selected_fraction is not None:
            needed = f"it needs up to {format_bytes(high)}, {format_bytes(high - there_bytes)} more than there is"
            share = f"if masks select {percent(self.selected_fraction)}"
            return Verdict("not known", f"{needed}, {share}; if they select less, it may fit")
        if low <= there_bytes:
            return Verdict("too close", f"it needs at least {format_bytes(low)}, or up to {format_bytes(high)}")
        missing = format_bytes(low - there_bytes)
        return Verdict("does not fit", f"it needs at least {format_bytes(low)}, {missing} more than there is")

    def fits(self, capacity: CapacityLike) -> bool:
        """Say whether `verdict` is ``"fits"``: the step runs in ``capacity``, and there are no `doubts`.

        With a `selected_fraction`, True holds as long as masks select no more than that.

        Args:
            capacity: As for `verdict`.

        Raises:
            InputError: As for `verdict`.
            InputTypeError: As for `verdict`.
        """
        return self.verdict(capacity) == "fits"

    def headroom_bytes(self, capacity: CapacityLike) -> int:
        """Return the bytes of ``capacity`` beyond `required_bytes`.

        If they are negative, the allocator has to free its cache, or the step does not run.

        Args:
            capacity: As for `verdict`.
        """
        return capacity_bytes(capacity, context_counted=self.total_bytes is not None) - self.required_bytes

    def _overview(self) -> Overview:
        """The verdict for the target, and all parts that are not zero."""
        # The least that the allocator needs takes long to find.
        rows = [(name, format_bytes(size)) for name, size in self._parts(least_bytes=None).items() if size]
        rows += [("peak in", self.peak_where)] * bool(self.peak_where)
        return Overview(self.headline, [*rows, ("confidence", self.confidence)])

    @property
    def headline(self) -> str:
        """The main result in one sentence: the verdict for the target, or the bytes that the step needs."""
        if self.target_bytes is not None:
            verdict = self.verdict(self.target_bytes)
            return f"{_SENTENCES[verdict].format(self.target)}: {verdict.reason}"
        if self.doubts:
            return f"not known: {'; '.join(self.doubts)}"
        where = " of live tensors on the CPU" if self.total_bytes is None else ""
        return f"needs at most {format_bytes(self.required_bytes)}{where}{self.condition}"

    @property
    def condition(self) -> str:
        """The condition under which the bytes are an upper bound, to follow them in a sentence.

        It is ``", if masks select at most 20%"`` where `selected_fraction` is 0.2, and "" without a fraction or where
        it is 1.0: masks cannot select more.
        """
        if self.selected_fraction is None or self.selected_fraction == 1:
            return ""
        return f", if masks select at most {percent(self.selected_fraction)}"

    def parts(self) -> dict[str, int | None]:
        """Return the figures by their display names, the parts of the peak first; None where unknown."""
        return self._parts(least_bytes=self.least_reserved_bytes)

    def _parts(self, least_bytes: int | None) -> dict[str, int | None]:
        return {
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "optimizer state": self.optimizer_bytes,
            "activations": self.activations_bytes,
            "temporaries": self.temporaries_bytes,
            "batch and buffers": self.other_bytes - self.library_bytes,
            "libraries, rounding": self.library_bytes,
            "gathered parameters": self.unsharded_bytes,
            "peak of live tensors": self.peak_bytes,
            "inside kernels, at most": self.workspace_bytes,
            "reserved by the allocator": self.reserved_bytes,
            "of which it needs": least_bytes,
            "driver and libraries": self.context_bytes,
            "total": self.total_bytes,
        }

    def explain(self) -> str:
        """Return a readable table: the parts, the place of the peak, its largest holders, and the guesses."""
        known = {name: num_bytes for name, num_bytes in self.parts().items() if num_bytes is not None}
        lines = [f"{name:<28} {format_bytes(num_bytes):>12}" for name, num_bytes in known.items()]
        where = (
            [f"peak in {printable(self.peak_where)}"] if self.peak_where else []
        )  # a script may end before it creates any tensor
        lines += ["", *where, f"confidence: {self.confidence}"]
        if self.holders:
            lines += [
                "",
                "largest at the peak",
                *(f"{format_bytes(h.nbytes):>14}  {printable(str(h))}" for h in self.holders),
            ]
        for title, rows in (
            ("not known, because", self.doubts),
            ("assumed", self.assumptions),
            ("answered without data", self.guesses),
        ):
            lines += ["", title, *(f"  {printable(row)}" for row in rows)] if rows else []
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, with `peak_bytes` and `total_bytes`, ready for JSON."""
        lists = {name: list(getattr(self, name)) for name in ("guesses", "doubts", "assumptions")}
        figures = asdict(self) | lists | {"holders": [asdict(holder) for holder in self.holders]}
        del figures["_find_least"], figures["_find_range"]
        names = ("peak_bytes", "total_bytes", "least_reserved_bytes")
        figures |= {name: getattr(self, name) for name in names}
        return figures | {"reserved_range": self.reserved_range and list(self.reserved_range)}

    @classmethod
    def of(cls, record: Record) -> MemoryEstimate:
        """Break down the peak of a simulated step."""
        recording, figures = record.recording, record.figures
        parts, peak = recording.peak_by("category"), recording.peak_storage()
        where = (peak.module, peak.operator, peak.phase, peak.source.replace(record.caller, "")) if peak else ()
        # On a GPU the allocator counts more than the recording: rounding, and memory held by libraries.
        unseen_bytes = 0 if figures is None else figures.allocated_bytes - recording.peak_bytes()
        return cls(
            parameters_bytes=parts.get("parameter", 0) - (record.unsharded_bytes or 0),
            gradients_bytes=parts.get("gradient", 0),
            optimizer_bytes=parts.get("optimizer", 0),
            activations_bytes=parts.get("activation", 0),
            temporaries_bytes=parts.get("temporary", 0),
            other_bytes=parts.get("input", 0) + parts.get("buffer", 0) + unseen_bytes,
            library_bytes=unseen_bytes,
            unsharded_bytes=record.unsharded_bytes,
            workspace_bytes=record.workspace_bytes,
            reserved_bytes=None if figures is None else figures.reserved_bytes,
            context_bytes=None if figures is None else figures.context_interval[1],
            least_context_bytes=None if figures is None else figures.context_interval[0],
            target="cpu" if figures is None else figures.gpu,
            target_bytes=None if figures is None else figures.total_bytes,
            peak_where=", ".join(part for part in where if part),
            confidence=record.confidence,
            guesses=record.guesses,
            doubts=record.doubts,
            assumptions=record.assumptions,
            spread=SPREAD if figures is not None and figures.convolves else 0.0,
            holders=tuple(
                Holder(
                    nbytes=storage.nbytes,
                    category=storage.category,
                    module=storage.module,
                    operator=storage.operator,
                    source=storage.source.replace(record.caller, ""),
                )
                for storage in recording.top(_NUM_HOLDERS)
            ),
            reads_values=record.reads_values,
            selected_fraction=record.selected_fraction,
            _find_least=None if figures is None else figures.find_least,
            _find_range=None if figures is None else figures.find_range,
        )

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> MemoryEstimate:
        """Return the estimate that `as_dict` described, also after a round trip through JSON.

        Raises:
            FileFormatError: `as_dict` did not return these figures.
        """
        try:
            given = {each.name: figures[each.name] for each in fields(cls) if not each.name.startswith("_")}
            least, reserved_range = figures["least_reserved_bytes"], figures["reserved_range"]
            given["_find_least"] = None if least is None else partial(int, least)
            given["_find_range"] = None if reserved_range is None else partial(tuple, reserved_range)
            lists = {name: tuple(figures[name]) for name in ("guesses", "doubts", "assumptions")}
            return cls(**given | lists | {"holders": tuple(Holder(**each) for each in figures["holders"])})
        except (TypeError, KeyError) as error:
            raise FileFormatError(
                "MemoryEstimate.from_dict(figures)",
                got=f"a {type(figures).__name__} ({type(error).__name__}: {error})",
                expected="the mapping that as_dict() returned",
                fix="write MemoryEstimate.from_dict(estimate.as_dict())",
            ) from error


def warn_of_doubts(call: str, estimate: MemoryEstimate) -> None:
    """Warn if an estimate that is being used has doubts."""
    if estimate.doubts:
        warn_user(
            f"{call}(...) may be wrong: {'; '.join(estimate.doubts)}. Way out, if none is named: write the step so "
            "that no size and no branch depends on the values of its tensors, and compile the model afterwards."
        )
