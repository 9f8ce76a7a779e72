"""The verdict on each step of a case: equal, told, refused, silent, or a false alarm."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import memkit as mk
from tests.search.batches import CONTAINERS, Fields, make_fields
from tests.search.doing import Done, Runner, even_sizes, seeded
from tests.search.losses import LOSSES
from tests.search.models import Net, transfer
from tests.search.oracle import EXACT_FLOOR, FLOORS, GRAY, Gradients, Twin, errors, is_finite, worst
from tests.search.specs import Spec, Step
from tests.train.faults import FailingOperator

UNCHECKED = re.compile(r"could not|cannot be checked|not checked|unchecked")
# Verdicts. A step is unequal where memkit's gradient, or that of the parts in float64, is not the whole batch's.
EQUAL, TOLD, REFUSED, SILENT = "equal", "unequal, told", "unequal, refused", "SILENT"
SILENT_AGAIN = "SILENT, after it was refused before"  # somebody runs the cell of a notebook once more
ALARM, UNCHECKED_ALARM, REFUSAL = "FALSE ALARM", "FALSE ALARM, could not be checked", "FALSE ALARM, refused"
EARLY = "equal by accident, told"  # the same step with other data is not equal
UNCUT = "not cut, refused"  # a batch that need not be cut
# Each planted fault teaches that less fits, down to one row; and what a forward has changed in place is gone.
NO_MEMORY = "out of memory for good"
OTHER_DRAWS = "other draws than a plain loop over the same parts"
GRAY_ZONE, CRASH, EXCLUDED = "within rounding", "CRASH", "excluded"
BAD = {SILENT, SILENT_AGAIN, ALARM, UNCHECKED_ALARM, REFUSAL, CRASH}


@dataclass
class Verdict:
    """What became of a step.

    Attributes:
        kind: One of the verdicts above.
        is_unequal: Whether the step over parts trains something else than the whole batch; None: nobody knows.
        error: The largest error in tolerances, and the parameter.
        notes: Warnings, errors, and what else is to be said.
        buffers: Buffers that end elsewhere than after the whole batch.
    """

    spec: Spec
    number: int
    kind: str
    is_unequal: bool | None
    error: float = 0.0
    parameter: str = ""
    notes: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()

    @property
    def step(self) -> Step:
        return self.spec.steps[self.number]


def judge(spec: Spec) -> list[Verdict]:
    """Run a case with memkit and without, and judge each step."""
    return list(_Case(spec).verdicts())


class _Case:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.exact, self.plain = Twin(spec, exact=True), Twin(spec, exact=False)
        self.start: Net = Twin(spec, exact=False).model  # where memkit's model stood before the step
        self.said: set[str] = set()  # the verdicts so far
        self.was_warned = False  # of an earlier step, which was equal only by accident, or refused after the warning

    def verdicts(self) -> Iterator[Verdict]:
        runner = Runner(self.spec)
        try:
            for number, step in enumerate(self.spec.steps):
                yield self._step(runner, number, step)
        finally:
            runner.close()

    def fields(self, step: Step, number: int, *, again: int = 0) -> Fields:
        seed = (self.spec.seed * 1_000_003 + self.spec.index * 101 + number) * 7 + again
        return make_fields(step.data, self.spec.needs, self.spec.dtype, seed)

    def _step(self, runner: Runner, number: int, step: Step) -> Verdict:
        fields = self.fields(step, number)
        transfer(runner.model, self.start)
        self.start.train(step.training)
        verdict = Verdict(self.spec, number, EXCLUDED, None)
        try:
            whole = self._whole(step, fields)
            buffers = {name: each.clone() for name, each in self.exact.model.named_buffers()}
            plain = errors(self.plain.whole(self.start, step, fields), whole)
        except Exception as error:  # noqa: BLE001 - the plain loop cannot do it either
            verdict.notes = (f"plain: {error!r:.200}",)
            return verdict
        done = runner.step(step, fields, place=self._place(step, fields))
        verdict.notes = tuple(done.messages) + ((f"{type(done.error).__name__}: {done.error}",) if done.error else ())
        if not is_finite(whole):
            verdict.kind = EXCLUDED
            verdict.notes += ("plain: not finite",)
            return verdict
        self._judge(verdict, done, fields, whole, plain)
        verdict.buffers = tuple(_elsewhere(dict(runner.model.named_buffers()), buffers))
        self.said.add(verdict.kind)
        self.was_warned = self.was_warned or (bool(done.messages) and verdict.kind in (EARLY, REFUSED))
        return verdict

    def _whole(self, step: Step, fields: Fields) -> Gradients:
        """What is promised: the whole batch's gradient; of an accumulator that of the losses that it is given."""
        if not self.spec.mode.startswith("accumulator"):
            return self.exact.whole(self.start, step, fields)
        return self.exact.parts(self.start, step, fields, even_sizes(len(fields["x"]), self.spec.parts))

    def _place(self, step: Step, fields: Fields) -> int:
        if not step.fault:
            return 0
        with FailingOperator() as counter:
            self.plain.whole(self.start, step, fields)
        return 1 + int(step.fault * counter.num_operators)

    def _judge(self, verdict: Verdict, done: Done, fields: Fields, whole: Gradients, plain: dict[str, float]) -> None:
        by_split = self._by_split(verdict.step, done, fields, whole)
        verdict.error, verdict.parameter = worst(done.gradients, whole, plain, FLOORS[self._working_dtype])
        if self.spec.is_noisy or done.error is not None:  # its own draws; the parts in float64 have the whole's
            verdict.error = by_split * EXACT_FLOOR / FLOORS[self._working_dtype]
        if self._is_refused_by_nature(verdict.step):
            verdict.error = by_split = float("inf")
        surely, perhaps = verdict.error > GRAY, verdict.error > 1 or by_split > 1
        verdict.is_unequal = True if surely or (by_split > GRAY) else None if perhaps else False
        if self._drew_otherwise(verdict.step, done, fields, plain):
            verdict.kind = OTHER_DRAWS
        elif done.error is not None:
            verdict.kind = self._of_error(verdict, done.error)
        elif done.messages:
            verdict.kind = self._of_messages(verdict, done.messages)
        else:
            verdict.kind = self._of_silence(verdict, surely=surely, perhaps=perhaps)

    def _drew_otherwise(self, step: Step, done: Done, fields: Fields, plain: dict[str, float]) -> bool:
        """Whether noise was drawn in another way than by a plain loop over the same parts, from the same seed."""
        modes = {"wrapper", "wrapper, on_oom=raise", "microbatches", "SplitLoss"}
        if not self.spec.is_noisy or not done.stepped or self.spec.mode not in modes:
            return False
        if sum(done.sizes) != len(fields["x"]):
            return False
        twin = Twin(self.spec, exact=False, fed=False)
        with seeded(self.spec.index):
            drawn = twin.parts(self.start, step, fields, done.sizes)
        return worst(done.gradients, drawn, plain, FLOORS[self._working_dtype])[0] > GRAY

    def _of_silence(self, verdict: Verdict, *, surely: bool, perhaps: bool) -> str:
        if not perhaps:
            return EQUAL
        if TOLD in self.said or self.was_warned:
            return TOLD  # once for a cause
        if not surely:
            return GRAY_ZONE
        return SILENT_AGAIN if REFUSED in self.said else SILENT

    def _of_error(self, verdict: Verdict, error: BaseException) -> str:
        may_refuse = CONTAINERS[verdict.step.container].may_refuse or verdict.step.data.extra
        # An error of the user's own code in a part of the batch carries a note on what memkit did, and the way out.
        is_explained = any(each.startswith("memkit: ") for each in getattr(error, "__notes__", ()))
        if not isinstance(error, mk.MemkitError) and not is_explained:
            return CRASH
        in_place = any(each.startswith("InPlace") for each in self.spec.traits)
        if isinstance(error, mk.MemkitOutOfMemoryError) and ("of 1 rows" in str(error) or in_place):
            return NO_MEMORY
        if may_refuse and (not verdict.is_unequal or "splitting a batch" in str(error) or is_explained):
            return UNCUT
        if verdict.is_unequal:
            return REFUSED
        return EARLY if verdict.is_unequal is None or self._is_unequal_with_other_data(verdict) else REFUSAL

    def _of_messages(self, verdict: Verdict, messages: list[str]) -> str:
        if verdict.is_unequal:
            return TOLD
        if all("the batch cannot be cut" in each for each in messages):
            return UNCUT  # it says that the batch is trained whole, as it is
        if self.spec.mode.startswith("accumulator") and self._is_unlike_whole(verdict):
            return EARLY  # as it was told; and still what was asked for
        if verdict.is_unequal is None or self._is_unequal_with_other_data(verdict):
            return EARLY
        return UNCHECKED_ALARM if any(map(UNCHECKED.search, messages)) else ALARM

    def _is_unlike_whole(self, verdict: Verdict) -> bool:
        """Whether an accumulator's group, which is what it promises to be, is not the whole batch's gradient."""
        fields = self.fields(verdict.step, verdict.number)
        whole = self.exact.whole(self.start, verdict.step, fields)
        return self._by_split(verdict.step, Done(), fields, whole) > 1

    @property
    def _working_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.spec.precision else self.spec.dtype

    def _is_refused_by_nature(self, step: Step) -> bool:
        return LOSSES[self.spec.loss_of(step)].refused

    def _by_split(self, step: Step, done: Done, fields: Fields, whole: Gradients) -> float:
        """How far parts are from the whole, both in float64, in tolerances."""
        rows = len(fields["x"])
        sizes = done.sizes if sum(done.sizes) == rows else self._nominal(step, rows, done)
        weigh = {"SplitLoss, sum": "sum", "accumulator, no count": "one"}.get(self.spec.mode, "rows")
        try:
            parts = self.exact.parts(self.start, step, fields, self._kept(sizes), weigh=weigh)
        except Exception:  # noqa: BLE001 - the parts cannot do what the whole can
            return float("inf")
        return worst(parts, whole, {}, EXACT_FLOOR)[0]

    def _kept(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes[:-1] if self.spec.mode == "split_fn, drops" and len(sizes) > 1 else sizes

    def _nominal(self, step: Step, rows: int, done: Done) -> tuple[int, ...]:
        if "out of memory" in self.spec.mode:
            return even_sizes(rows, 2 if done.error is not None or done.num_ooms else 1)
        return even_sizes(rows, self.spec.parts)

    def _is_unequal_with_other_data(self, verdict: Verdict) -> bool:
        """Whether the same step is unequal with other data: then the warning came early, and rightly."""
        step = verdict.step
        data = dataclasses.replace(step.data, classes="any", rare="", padded="mask" in self.spec.needs)
        self.start.train()
        even = 4 * self.spec.parts
        for again, rows in enumerate((max(step.data.rows, even // 2), even // 2 + 1, even), 1):
            other = dataclasses.replace(step, data=dataclasses.replace(data, rows=rows), training=True)
            fields = self.fields(other, verdict.number, again=again)
            try:
                whole = self.exact.whole(self.start, other, fields)
            except Exception:  # noqa: BLE001 - nothing to compare with
                continue
            if is_finite(whole) and self._by_split(other, Done(error=RuntimeError()), fields, whole) > 1:
                return True
        return False


def _elsewhere(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> Iterator[str]:
    for name, true in truth.items():
        got = found[name].to(true.dtype)
        if not torch.allclose(got.double(), true.double(), rtol=2e-2, atol=1e-3):
            yield name


def describe(verdict: Verdict) -> str:
    """A verdict in a line, with what reproduces it."""
    spec, step = verdict.spec, verdict.step
    what = ", ".join(dict.fromkeys(spec.productions(step)))
    return f"{verdict.kind}: python -m tests.search {spec.seed} {spec.index}, step {verdict.number}: {what}; {step}"


def is_bad(verdict: Verdict) -> bool:
    return verdict.kind in BAD
