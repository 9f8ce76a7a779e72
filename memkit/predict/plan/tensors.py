"""Which saved tensors to keep, to recompute and to offload for a memory budget, from notes on a simulated step.

An operator that runs again in backward takes its time once and makes its results, whoever needs them; so the time of a
choice is the sum over the operators that it runs again. Tensors are chosen in the order of bytes saved per second. What
runs again needs tensors that stay, or others that run again: such a chain is made at once, and its saved results stay
until backward has used them. Longer chains keep less in between, and more at that moment; so the order is gone through
several times, with chains of at most so many bytes; and once with an eye on the peak: only what lowers it goes, and may
bring back what went before. The memory of a choice is added up from the notes, moment by moment and with scratch memory
inside kernels; what is not there at the peak, or still fits, is kept again. Whether a plan fits is then found by a dry
run of it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from memkit._recorder.recording import IntArray
from memkit._tape.notes import OperatorNote, SaveNote, ValueNote
from memkit._tape.plan import SavedTensorPlan
from memkit.predict.plan.cuts import Recomputations

_CHAINS = (1, 2, 4, 8, 16, 32, 64, 128)  # all saved bytes over those of the longest chain
_NUM_POINTS = 48  # of each order, for which memory is added up
_SMALL = 4_000  # a tensor of less than this part of the saved bytes stays
_MOST_REFINEMENTS = 200
_MOST_PARTS = 8  # of the saved bytes: only what is saved first is treated, so that the forward is followed no further
_MOST_OPERATORS = 4_000  # of all parts together: each takes time in proportion to their number squared
_UNKNOWN = -float("inf")  # instead of a rate with its sign changed, which orders a queue
_LAST = 1e-6  # of a rate: after all others
# Without a dispatch mode torch runs other operators instead, which save other tensors: lengths as lists.
_ONLY_FOLLOWED = frozenset({"aten._ctc_loss.Tensor"})
_NONE: frozenset[int] = frozenset()
Order: TypeAlias = Literal["by rate", "moves last", "moves alone", "at the peak"]


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """A treatment of the saved tensors, with its time and memory.

    Attributes:
        recomputed: Numbers of the operators that run again.
        offloaded: Numbers of the values that wait elsewhere.
        peak_bytes: Peak bytes of the step, added up.
        seconds: Time that it adds to a micro-batch.
    """

    recomputed: frozenset[int]
    offloaded: frozenset[int]
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class TensorChoices:
    """The choices for one micro-batch.

    Attributes:
        operators: The operators of its forward.
        values: What they made.
        saves: What autograd saves of that, and else, in order.
        base: int64, shape ``(num_moments,)``: bytes that the step takes if nothing that is saved were kept, with
            scratch memory inside kernels.
        random_state_bytes: Bytes of a generator's state.
        may_offload: Whether tensors may wait elsewhere.
        moving_seconds: Time to move a tensor of so many bytes elsewhere and back.
        operator_seconds: Python's time for an operator that runs again.
        saving_seconds: Python's time to treat a saved tensor, also one that is kept.
        tape_seconds: Python's time to write down an operator of the forward, which nothing can run again without.
    """

    operators: Sequence[OperatorNote]
    values: Sequence[ValueNote]
    saves: Sequence[SaveNote]
    base: IntArray
    random_state_bytes: int
    may_offload: bool
    moving_seconds: Callable[[int], float]
    operator_seconds: float
    saving_seconds: float
    tape_seconds: float

    @cached_property
    def saved_bytes(self) -> int:
        """All bytes of the operators' results that autograd saves."""
        return self.shape_only_bytes + sum(each.nbytes for each in self.values if each.is_saved)

    @cached_property
    def shape_only_bytes(self) -> int:
        """Those of which backward reads the shape alone; no choice keeps them."""
        return sum(each.nbytes for each in self.values if each.is_saved_for_shape and not each.is_saved)

    @cached_property
    def choices(self) -> list[TensorChoice]:
        """Choices that are worth a trial, fastest first: each needs less memory than all before."""
        found = [self._choice(frozenset(), frozenset()), *itertools.chain.from_iterable(self.descents)]
        front: list[TensorChoice] = []
        for each in sorted(found, key=lambda each: (each.seconds, each.peak_bytes)):
            if not front or each.peak_bytes < front[-1].peak_bytes:
                front.append(each)
        return front

    def within(self, peak_bytes: int) -> TensorChoice | None:
        """Return the fastest choice with such a peak; None if there is none."""
        fitting = [
            self._refined(choice, peak_bytes)
            for descent in self.descents
            if (choice := next((each for each in descent if each.peak_bytes <= peak_bytes), None))
        ]
        return min(fitting, key=lambda each: each.seconds, default=None)

    @cached_property
    def descents(self) -> list[list[TensorChoice]]:
        """Choices from nearly everything kept to as little as possible, in each way of `_Descent`."""
        orders: tuple[Order, ...] = ("by rate", "moves last") if self.may_offload else ("by rate",)
        ways = list(itertools.product(orders, _CHAINS))
        if self.may_offload:
            ways.append(("moves alone", 1))
        found = [list(self._descent(order, self.saved_bytes // chains)) for order, chains in ways]
        saved = np.cumsum([each.nbytes * each.is_saved for each in self.values])
        parts = min(_MOST_PARTS, max(1, _MOST_OPERATORS // max(1, len(self.operators))))
        ends = {int(np.searchsorted(saved, self.saved_bytes * part // parts)) for part in range(1, parts + 1)}
        return found + [list(self._descent("at the peak", self.saved_bytes, end)) for end in sorted(ends)]

    @cached_property
    def least(self) -> TensorChoice:
        """The choice that needs the least memory, whatever the times: all that is saved waits elsewhere, if it may."""
        if not self.may_offload:
            alike = replace(
                self, operators=[replace(each, seconds=0.0) for each in self.operators], operator_seconds=1.0
            )
            found = itertools.chain.from_iterable(alike.descents)
            least = min(found, key=lambda each: each.peak_bytes, default=self.choices[0])
            return self._choice(least.recomputed, least.offloaded)
        return self._choice(frozenset(), frozenset(each.number for each in self.values if each.is_saved))

    @cached_property
    def by_flops(self) -> Recomputations:
        """Recomputations by the bytes that wait for backward: the fewest FLOPs, then the fewest bytes touched."""
        touched = [
            1 + sum({each.number: each.nbytes for each in (*operator.sources, *operator.makes)}.values())
            for operator in self.operators
        ]
        bound = 1 + sum(touched)
        costs = [bound * each.flops + more for each, more in zip(self.operators, touched, strict=True)]
        return Recomputations(self.operators, self.values, self.random_state_bytes, costs)

    def fewest_flops(self, waiting_bytes: int) -> TensorChoice | None:
        """Return the choice that runs the fewest FLOPs again of those that leave at most so many bytes for backward."""
        recomputed = self.by_flops.within(waiting_bytes)
        return None if recomputed is None else self._choice(recomputed, frozenset())

    def plan(self, choice: TensorChoice) -> SavedTensorPlan:
        """Return a choice as the plan for a forward."""
        dropped = [each for each in self.values if each.is_saved and choice.recomputed.issuperset(each.makers)]
        dropped_bytes = sum(each.nbytes for each in dropped)
        moved = [self.values[number] for number in choice.offloaded]
        waiting_bytes = self.by_flops.waiting_bytes(choice.recomputed)
        last_save, last_operator = self._last(choice.recomputed, choice.offloaded)
        return SavedTensorPlan(
            operators=tuple(each.name for each in self.operators),
            recomputed=choice.recomputed,
            offloaded=frozenset(maker for each in moved for maker in each.makers),
            shape_only=frozenset(number for number, each in enumerate(self.operators) if each.is_shape_only),
            saves=tuple(each.kind for each in self._forward_saves) if self._may_go_by_saves else (),
            moved=frozenset(
                number
                for number, each in enumerate(self._forward_saves)
                if each.value is not None and each.value.number in choice.offloaded
            ),
            last_save=last_save,
            last_operator=last_operator,
            recomputed_bytes=dropped_bytes,
            shape_only_bytes=self.shape_only_bytes,
            offloaded_bytes=sum(each.nbytes for each in moved),
            held_bytes=waiting_bytes - self.saved_bytes + self.shape_only_bytes + dropped_bytes,
            recomputed_flops=sum(self.operators[number].flops for number in choice.recomputed),
            num_random=sum(self.operators[number].is_random for number in choice.recomputed),
            saved_bytes=self.saved_bytes,
        )

    @cached_property
    def _may_go_by_saves(self) -> bool:
        """Whether a forward that nobody follows saves the same tensors, and each has content by then, and is new."""
        is_same = _ONLY_FOLLOWED.isdisjoint(each.name for each in self.operators)
        return is_same and all(each.is_filled and not (each.is_in_backward and each.value) for each in self.saves)

    @cached_property
    def _forward_saves(self) -> list[SaveNote]:
        return [each for each in self.saves if not each.is_in_backward]

    @cached_property
    def _last_saves(self) -> dict[int, int]:
        """For each value, the number of saved tensors up to the last time that it is saved."""
        return {each.value.number: number for number, each in enumerate(self._forward_saves, 1) if each.value}

    def _last(self, recomputed: frozenset[int], offloaded: frozenset[int]) -> tuple[int, int]:
        """Return how many saved tensors and operators have to be followed; zeros for all of them."""
        may_end = self._may_go_by_saves and not any(each.is_shape_only for each in self.operators)
        numbers = [
            last
            for number, last in self._last_saves.items()
            if number in offloaded or recomputed.issuperset(self.values[number].makers)
        ]
        if not may_end or not numbers:
            return 0, 0
        return max(numbers), self._forward_saves[max(numbers) - 1].num_operators

    def _descent(self, order: Order, chain_bytes: int, last_value: int | None = None) -> Iterator[TensorChoice]:
        """Yield choices from nearly everything kept to as little as possible, as `_Descent` finds them."""
        moves = list(_Descent(self, chain_bytes, order, last_value).moves())
        places = {round(each) for each in np.linspace(1, len(moves), _NUM_POINTS)} if moves else set()
        recomputed, offloaded = _NONE, _NONE
        for place, move in enumerate(moves, 1):
            recomputed, offloaded = move.after(recomputed, offloaded)
            if place in places:
                yield self._choice(recomputed, offloaded)

    def _refined(self, choice: TensorChoice, peak_bytes: int) -> TensorChoice:
        """Keep again what the memory allows, the most seconds per byte first."""
        recomputed, offloaded = choice.recomputed, choice.offloaded

        def rate(value: ValueNote) -> float:
            is_moved = value.number in offloaded
            seconds = self.moving_seconds(value.nbytes) if is_moved else self._seconds_of(value.makers)
            return seconds / max(1, value.nbytes)

        levels, num_tried = self.levels(recomputed, offloaded), 0
        for value in sorted((each for each in self.values if each.is_saved), key=rate, reverse=True):
            if value.number in offloaded:
                while_kept = levels[self._death(value) : self._first_use(value)]
                if while_kept.max(initial=0) + value.nbytes <= peak_bytes:
                    while_kept += value.nbytes
                    offloaded -= {value.number}
            elif recomputed.issuperset(value.makers) and num_tried < _MOST_REFINEMENTS:
                num_tried += 1
                fewer = self.needed(recomputed.difference(value.makers))
                tried = self.levels(fewer, offloaded)
                if tried.max(initial=0) <= peak_bytes:
                    recomputed, levels = fewer, tried
        return self._choice(recomputed, offloaded)

    def needed(self, recomputed: frozenset[int]) -> frozenset[int]:
        """Return the operators among these that have to run for what is saved and not kept."""
        needed: set[int] = set()
        waiting = [each for each in self.values if each.is_saved and recomputed.issuperset(each.makers)]
        while waiting:
            for maker in waiting.pop().makers:
                if maker not in needed:
                    needed.add(maker)
                    waiting += [each for each in self.operators[maker].sources if recomputed.issuperset(each.makers)]
        return frozenset(needed)

    def _seconds_of(self, operators: Iterable[int]) -> float:
        return sum(self.operators[number].seconds + self.operator_seconds for number in operators)

    # --------------------------------------------------------------------------------------------------- memory

    def _choice(self, recomputed: frozenset[int], offloaded: frozenset[int]) -> TensorChoice:
        """Add up memory and time; what runs again does not have to be moved."""
        offloaded = frozenset(each for each in offloaded if not recomputed.issuperset(self.values[each].makers))
        moving_seconds = sum(self.moving_seconds(self.values[number].nbytes) for number in offloaded)
        last_save, last_operator = self._last(recomputed, offloaded)
        python_seconds = self.saving_seconds * (last_save or len(self.saves)) if recomputed or offloaded else 0.0
        python_seconds += self.tape_seconds * (last_operator or len(self.operators)) if recomputed else 0.0
        return TensorChoice(
            recomputed,
            offloaded,
            int(self.levels(recomputed, offloaded).max(initial=0)),
            self._seconds_of(recomputed) + moving_seconds + python_seconds,
        )

    def levels(self, recomputed: frozenset[int], offloaded: frozenset[int]) -> IntArray:
        """Return the bytes at each moment."""
        made_at = self._moments(recomputed)
        spans: list[tuple[int, int, int]] = []  # first event, last event, bytes
        chains: dict[int, list[tuple[int, bool, int]]] = {}  # moment: operator that runs again, whether after it, bytes
        runs: dict[int, set[int]] = {}  # moment: operators that run again
        for value in self.values:
            moments = [made_at[each] for each in self.made_from(value, recomputed) if each in made_at]
            if value.number in made_at and recomputed.issuperset(value.makers):
                moment = made_at[value.number]
                last = self._first_use(value) if value.is_saved else max(moments, default=0)
                spans.append((moment, last, value.nbytes))
                chain = chains.setdefault(moment, [])
                chain.append((value.makers[0], False, value.nbytes))
                runs.setdefault(moment, set()).update(value.makers)
                if last > moment:  # it is in the span
                    chain.append((len(self.operators), True, -value.nbytes))
                elif not value.is_saved:
                    chain.append((max(recomputed.intersection(self.users[value.number])), True, -value.nbytes))
            elif value.is_saved and value.number not in offloaded:
                spans.append((self._death(value), self._first_use(value), value.nbytes))
            elif not value.is_saved and moments:
                spans.append((self._death(value), max(moments), value.nbytes))
        for moment, chain in chains.items():
            for number in runs[moment]:
                scratch_bytes = self.operators[number].scratch_bytes
                chain.extend([(number, False, scratch_bytes), (number, True, -scratch_bytes)])
            at_most = max(itertools.accumulate(nbytes for *_, nbytes in sorted(chain)))
            in_spans = -sum(nbytes for number, _, nbytes in chain if number == len(self.operators))
            spans.append((moment, moment + 1, at_most - in_spans))
        changes = np.zeros(len(self.base) + 1, dtype=np.int64)
        if spans:
            table = np.asarray([each for each in spans if each[0] < each[1]], dtype=np.int64).reshape(-1, 3)
            np.add.at(changes, np.minimum(table[:, 0], len(self.base)), table[:, 2])
            np.subtract.at(changes, np.minimum(table[:, 1], len(self.base)), table[:, 2])
        num_random = sum(self.operators[number].is_random for number in recomputed)
        levels: IntArray = self.base + np.cumsum(changes)[:-1] + num_random * self.random_state_bytes
        return levels

    def _moments(self, recomputed: frozenset[int]) -> dict[int, int]:
        """Return the moment at which each value that is not kept is made again, by its number."""
        moments: dict[int, int] = {}
        for value in sorted(self.values, key=lambda each: -each.makers[-1]):
            if not recomputed.issuperset(value.makers):
                continue
            if value.is_saved and value.first_use is not None:
                moments[value.number] = min(value.first_use, moments.get(value.number, value.first_use))
            if value.number in moments:
                for maker in value.makers:
                    for source in self.operators[maker].sources:
                        moment = moments[value.number]
                        moments[source.number] = min(moment, moments.get(source.number, moment))
        return moments

    def made_from(self, value: ValueNote, recomputed: frozenset[int]) -> Iterator[int]:
        """Yield the numbers of the values that are made again from this one."""
        for number in self.users[value.number]:
            if number in recomputed:
                yield from (each.number for each in (*self.operators[number].makes, *self.operators[number].changes))

    def saved_from(self, value: ValueNote, recomputed: frozenset[int]) -> list[ValueNote]:
        """Return the saved values that are made again from this one, by way of others that are not saved."""
        found, waiting = [], [value]
        while waiting:
            made = [self.values[number] for number in self.made_from(waiting.pop(), recomputed)]
            found += [each for each in made if each.is_saved]
            waiting += [each for each in made if not each.is_saved]
        return found

    def is_there(self, value: ValueNote, moment: int) -> bool:
        """Return whether a saved value is there at a moment only because it is kept."""
        return self._death(value) <= moment < self._first_use(value)

    @cached_property
    def users(self) -> list[list[int]]:
        """For each value, the operators that use it and do not only change it."""
        users: list[list[int]] = [[] for _ in self.values]
        for number, operator in enumerate(self.operators):
            for source in {each.number: each for each in operator.sources}.values():
                if source not in operator.changes:
                    users[source.number].append(number)
        return users

    def _death(self, value: ValueNote) -> int:
        return len(self.base) if value.death is None else value.death

    def _first_use(self, value: ValueNote) -> int:
        return len(self.base) if value.first_use is None else value.first_use


class _Move(NamedTuple):
    """A value that is no longer kept: the operators that run again for it, if it is not offloaded.

    Attributes:
        value: Its number.
        operators: Operators that do not run again so far.
        held: Numbers of unsaved values that have to stay for them.
        rate: Bytes saved per second.
        kept: Operators that no longer run again.
    """

    value: int
    operators: frozenset[int]
    held: frozenset[int]
    rate: float
    kept: frozenset[int] = _NONE

    def after(self, recomputed: Set[int], offloaded: Set[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Return the operators that run again, and the values that are offloaded, after this move."""
        moved: Set[int] = _NONE if self.operators else {self.value}
        return frozenset(recomputed - self.kept | self.operators), frozenset(offloaded | moved)


@dataclass
class _Descent:
    """One way from everything kept to as little as possible: the best bytes per second first.

    Attributes:
        choices: What to choose from.
        chain_bytes: The most saved bytes that are made at once.
        order: ``"by rate"``, ``"moves last"`` if a value is offloaded only where it cannot run again, or only in too
            long a chain, ``"moves alone"`` if nothing runs again, or ``"at the peak"`` if each move has to lower the
            peak, where it is by then. Bytes per second are a rule of thumb: what is taken in one order may be faster,
            or need less, in another.
        last_value: Number of the last value that is given up; None for no such limit.
    """

    choices: TensorChoices
    chain_bytes: int
    order: Order
    last_value: int | None
    _again: set[int] = field(default_factory=set)
    _held: set[int] = field(default_factory=set)
    _moved: set[int] = field(default_factory=set)
    _parents: dict[int, int] = field(default_factory=dict)  # of the operators in one chain
    _chain: dict[int, int] = field(default_factory=dict)  # bytes of a chain, by its root

    def moves(self) -> Iterator[_Move]:
        """Yield the moves in order."""
        numbers = self._worth_it(each for each in self.choices.values if each.is_saved)
        if self.order == "at the peak":
            yield from self._moves_at_peak(dict.fromkeys(numbers, _UNKNOWN))
            return
        queue = [(_UNKNOWN, number) for number in numbers]
        for move in self._best_of(queue):
            self._take(move)
            yield move
            for number in self._worth_it(self._touched(move)):
                heapq.heappush(queue, (_UNKNOWN, number))

    def _moves_at_peak(self, ranks: dict[int, float]) -> Iterator[_Move]:
        choices, exchanged = self.choices, set[int]()
        levels = choices.levels(_NONE, _NONE)
        while True:
            peak = int(levels.argmax())
            queue = [(rank, number) for number, rank in ranks.items() if choices.is_there(choices.values[number], peak)]
            heapq.heapify(queue)
            useless: list[_Move] = []
            for move in itertools.chain(self._best_of(queue), self._exchanges(useless)):
                tried = choices.levels(*move.after(self._again, self._moved))
                if tried[peak] < levels[peak] and tried.max() <= levels.max():
                    break
                ranks[move.value] = -move.rate
                if not move.kept and move.value not in exchanged:
                    useless.append(move)
            else:
                return
            if move.kept:
                exchanged.add(move.value)
            levels = tried
            self._take(move)
            yield move
            ranks |= dict.fromkeys(self._worth_it(self._touched(move)), _UNKNOWN)

    def _best_of(self, queue: list[tuple[float, int]]) -> Iterator[_Move]:
        """Take the moves out of a queue, the best first."""
        while queue:
            _, number = heapq.heappop(queue)
            move = self._best(self.choices.values[number])
            if move is None or move.rate <= 0:
                continue
            if queue and move.rate < -queue[0][0]:  # others come first
                heapq.heappush(queue, (-move.rate, number))
                continue
            yield move

    def _exchanges(self, useless: Sequence[_Move]) -> Iterator[_Move]:
        """Yield moves that give up a value and keep what would be made from it, which needs it earlier."""
        again = self._again
        for value in (self.choices.values[each.value] for each in useless):
            made = self.choices.saved_from(value, frozenset(again))
            if not made:
                continue
            self._again = set(self.choices.needed(frozenset(again).difference(*(each.makers for each in made))))
            move, kept = self._recomputing(value, holds=True), frozenset(again - self._again)
            self._again = again
            if move is not None:
                yield move._replace(kept=kept)

    def _worth_it(self, values: Iterable[ValueNote]) -> Iterator[int]:
        least_bytes = 1 if self.order == "moves alone" else max(1, self.choices.saved_bytes // _SMALL)
        last = len(self.choices.values) if self.last_value is None else self.last_value
        return (each.number for each in values if each.nbytes >= least_bytes and each.number <= last)

    def _best(self, value: ValueNote) -> _Move | None:
        if self._is_gone(value):
            return None
        found = [] if self.order == "moves alone" else [self._recomputing(value, holds=each) for each in (True, False)]
        moves = [each for each in found if each is not None and each.rate > 0]
        is_movable = value.is_saved and self.choices.may_offload
        if is_movable and not (moves and self.order == "moves last"):
            rate = value.nbytes / self.choices.moving_seconds(value.nbytes)
            if self.order == "moves last":
                rate *= _LAST
            moves.append(_Move(value.number, frozenset(), frozenset(), rate))
        return max(moves, key=lambda each: each.rate, default=None)

    def _is_gone(self, value: ValueNote) -> bool:
        is_kept = (value.is_saved and value.number not in self._moved) or value.number in self._held
        return not is_kept or self._again.issuperset(value.makers)

    def _recomputing(self, value: ValueNote, *, holds: bool) -> _Move | None:
        """Return the move that runs a value's operators again; what they need and is not saved is held, or runs too."""
        values, operators = self.choices.values, self.choices.operators
        new: set[int] = set()
        held: set[int] = set()
        waiting = [value]
        while waiting:
            for maker in waiting.pop().makers:
                if maker in new or maker in self._again:
                    continue
                if not operators[maker].repeats:
                    return None
                new.add(maker)
                for source in operators[maker].sources:
                    if source.is_saved or source.number in self._held or self._again.issuperset(source.makers):
                        continue
                    if holds or not self._repeats(source):
                        held.add(source.number)
                    else:
                        waiting.append(source)
        held -= {number for number in held if new.issuperset(values[number].makers)}
        dropped = self._dropped(new)
        if self.chain_bytes < self._joined_bytes(new, dropped):
            return None
        gain = sum(each.nbytes for each in dropped) - sum(values[number].nbytes for number in held)
        gain += sum(values[number].nbytes for number in self._held if new.issuperset(values[number].makers))
        gain -= sum(operators[number].is_random for number in new) * self.choices.random_state_bytes
        seconds = sum(operators[number].seconds + self.choices.operator_seconds for number in new)
        return _Move(value.number, frozenset(new), frozenset(held), gain / max(seconds, 1e-12))

    def _repeats(self, value: ValueNote) -> bool:
        return all(self.choices.operators[number].repeats for number in value.makers)

    def _dropped(self, new: set[int]) -> list[ValueNote]:
        """Saved values that are no longer kept if these operators run again, too."""
        made = {each.number: each for number in new for each in self.choices.operators[number].makes}
        again = self._again | new if len(new) < len(self._again) else new | self._again
        return [
            each
            for each in made.values()
            if each.is_saved and each.number not in self._moved and again.issuperset(each.makers)
        ]

    def _take(self, move: _Move) -> None:
        if not move.operators:
            self._moved.add(move.value)
            return
        self._again -= move.kept
        dropped = self._dropped(set(move.operators))
        total = self._joined_bytes(set(move.operators), dropped)
        roots = self._roots(move.operators)
        self._again |= move.operators
        root = min(move.operators)
        for each in (*roots, *move.operators):
            self._parents[each] = root
        self._parents[root] = root
        self._chain[root] = total
        values = self.choices.values
        self._held = {each for each in self._held | move.held if not self._again.issuperset(values[each].makers)}

    def _joined_bytes(self, new: set[int], dropped: Sequence[ValueNote]) -> int:
        return sum(each.nbytes for each in dropped) + sum(self._chain[root] for root in self._roots(new))

    def _roots(self, new: Iterable[int]) -> set[int]:
        """Chains that these operators would join: those that they use, and those that use them."""
        operators, users = self.choices.operators, self.choices.users
        linked = {maker for number in new for source in operators[number].sources for maker in source.makers}
        linked |= {user for number in new for each in operators[number].makes for user in users[each.number]}
        return {self._root(number) for number in linked & self._again}

    def _root(self, number: int) -> int:
        while self._parents[number] != number:
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number

    def _touched(self, move: _Move) -> Iterator[ValueNote]:
        """Values whose rate may have changed for the better."""
        operators, values, users = self.choices.operators, self.choices.values, self.choices.users
        for number in move.operators:
            yield from operators[number].sources
            for made in operators[number].makes:
                for user in users[made.number]:
                    yield from operators[user].makes
        yield from (values[number] for number in move.held)
