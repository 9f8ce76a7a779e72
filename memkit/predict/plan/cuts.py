"""Which operators to run again so that at most so many bytes wait for backward, at the least cost: by minimum cuts.

Each operator runs again or not, each value waits or is made again. If a byte that waits has a price, the cheapest
choice is a minimum cut: a saved value waits unless all of its makers run again; a value that is not saved waits if an
operator that runs again needs it, unless it is made again too. Prices from nothing up lead to the choices on the lower
convex hull of cost over bytes; between them the search branches on single operators, and stops at bounds that the cuts
give.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memkit._tape.notes import OperatorNote, ValueNote

_MOST_WORK = 10_000  # operators over all branches, after which the best choice so far is taken
_NONE: frozenset[int] = frozenset()


class _Between(NamedTuple):
    """Two choices with a budget between them.

    Attributes:
        bound: No choice within the budget costs less.
        more: Operators of the choice that leaves more bytes than the budget, or the one that is wanted.
        within: Operators of the choice within the budget.
    """

    bound: int
    more: frozenset[int]
    within: frozenset[int]


@dataclass(frozen=True)
class Recomputations:
    """The bytes that the operators of a forward leave for its backward, and the cost of running them again.

    Attributes:
        operators: The operators of the forward.
        values: The values that they made.
        random_state_bytes: Bytes that wait for an operator which draws random numbers and runs again.
        costs: Cost of running each operator again.
    """

    operators: Sequence[OperatorNote]
    values: Sequence[ValueNote]
    random_state_bytes: int
    costs: Sequence[int]

    def waiting_bytes(self, recomputed: frozenset[int]) -> int:
        """Return the bytes that wait for backward if these operators run again."""
        needed = {each.number for number in recomputed for each in self.operators[number].sources}
        waiting = sum(
            each.nbytes
            for each in self.values
            if (each.is_saved or each.number in needed) and not recomputed.issuperset(each.makers)
        )
        return waiting + self.random_state_bytes * sum(self.operators[number].is_random for number in recomputed)

    def cost(self, recomputed: frozenset[int]) -> int:
        """Return the cost of running these operators again."""
        return sum(self.costs[number] for number in recomputed)

    def within(self, num_bytes: int) -> frozenset[int] | None:
        """Return the operators to run again so that at most so many bytes wait; None if more have to wait.

        It is the cheapest choice, or, if the search takes long, the best that was found.
        """
        first = self._between(num_bytes, _NONE, _NONE)
        if first is None:
            return None
        best, left = first.within, _MOST_WORK // max(1, len(self.operators))
        order = itertools.count()
        queue = [(first, next(order), _NONE, _NONE)]
        while queue and left > 0:
            (bound, more, within), _, again, never = heapq.heappop(queue)
            if bound >= self.cost(best):
                break
            number = max(within - more, key=lambda each: (self.costs[each], each))
            for branch in ((again, never | {number}), (again | {number}, never)):
                left -= 1
                found = self._between(num_bytes, *branch)
                if found is None:
                    continue
                if self.cost(found.within) < self.cost(best):
                    best = found.within
                if found.bound < self.cost(best) and found.within != found.more:
                    heapq.heappush(queue, (found, -next(order), *branch))
        return best

    @cached_property
    def least_bytes(self) -> int:
        """The fewest bytes that can wait for backward."""
        least = self._cheapest(self._dear, 1, _NONE, _NONE)
        return self.waiting_bytes(least or _NONE)

    def hull(self) -> list[frozenset[int]]:
        """Return the choices on the lower convex hull, from the one that leaves most bytes."""
        found = [self._cheapest(0, 1, _NONE, _NONE), self._cheapest(self._dear, 1, _NONE, _NONE)]
        hull, unseen = {each for each in found if each is not None}, [tuple(found)]
        while unseen:
            more, less = unseen.pop()
            if more is None or less is None or self.waiting_bytes(more) <= self.waiting_bytes(less):
                continue
            between = self._touching(more, less, _NONE, _NONE)
            if between is not None:
                hull.add(between)
                unseen += [(more, between), (between, less)]
        return sorted(hull, key=self.waiting_bytes, reverse=True)

    @cached_property
    def _dear(self) -> int:
        """A price of a byte at which every byte counts more than all costs."""
        return 1 + sum(self.costs)

    def _between(self, num_bytes: int, again: frozenset[int], never: frozenset[int]) -> _Between | None:
        """Close in on a budget from both sides, with operators that have to run again and others that must not."""
        more = self._cheapest(0, 1, again, never)
        if more is None:
            return None
        if self.waiting_bytes(more) <= num_bytes:
            return _Between(self.cost(more), more, more)
        within = self._cheapest(self._dear, 1, again, never)
        if within is None or self.waiting_bytes(within) > num_bytes:
            return None
        while (between := self._touching(more, within, again, never)) is not None:
            if self.waiting_bytes(between) <= num_bytes:
                within = between
            else:
                more = between
        slope = self.cost(within) - self.cost(more), self.waiting_bytes(more) - self.waiting_bytes(within)
        left_bytes = num_bytes - self.waiting_bytes(within)
        return _Between(self.cost(within) - left_bytes * slope[0] // slope[1], more, within)

    def _touching(
        self, more: frozenset[int], less: frozenset[int], again: frozenset[int], never: frozenset[int]
    ) -> frozenset[int] | None:
        """Return a choice below the line through two others; None if there is none."""
        per_byte = self.cost(less) - self.cost(more)
        per_cost = self.waiting_bytes(more) - self.waiting_bytes(less)
        if per_byte <= 0:
            return None

        def price(recomputed: frozenset[int]) -> int:
            return per_byte * self.waiting_bytes(recomputed) + per_cost * self.cost(recomputed)

        found = self._cheapest(per_byte, per_cost, again, never)
        return found if found is not None and price(found) < price(less) else None

    def _cheapest(
        self, per_byte: int, per_cost: int, again: frozenset[int], never: frozenset[int]
    ) -> frozenset[int] | None:
        """Return the choice with the least sum of prices; None if an operator would have to run that must not."""
        # A node for each operator comes first: on the side of the start if it runs again.
        network = _Network(len(self.operators) + 2)
        start, end = len(self.operators), len(self.operators) + 1
        prices = [
            per_cost * cost + per_byte * self.random_state_bytes * each.is_random
            for cost, each in zip(self.costs, self.operators, strict=True)
        ]
        forever = 1 + sum(prices) + per_byte * sum(each.nbytes for each in self.values)
        is_made: list[int] = []  # a node for each value
        is_wanted: list[int] = []
        for value in self.values:
            only_maker = value.makers[0] if len(value.makers) == 1 else None
            is_made.append(network.node() if only_maker is None else only_maker)
            is_wanted.append(start if value.is_saved else network.node())
            network.connect(is_wanted[-1], is_made[-1], per_byte * value.nbytes)
            for maker in value.makers if only_maker is None else ():
                network.connect(is_made[-1], maker, forever)
        for number, operator in enumerate(self.operators):
            may_run = operator.repeats and number not in never
            network.connect(number, end, prices[number] if may_run else forever)
            if number in again:
                network.connect(start, number, forever)
            for source in {each.number: each for each in operator.sources}.values():
                changes = source in operator.changes  # it cannot run again on a value that waits
                network.connect(number, (is_made if changes else is_wanted)[source.number], forever)
        reached = network.cut(start, end, forever)
        return None if reached is None else frozenset(number for number in range(start) if reached[number])


class _Network:
    """A network whose minimum cut is found by Dinic's algorithm.

    Args:
        num_nodes: Number of nodes to begin with.
    """

    def __init__(self, num_nodes: int) -> None:
        self._arcs_of: list[list[int]] = [[] for _ in range(num_nodes)]
        self._ends: list[int] = []
        self._left: list[int] = []  # what each arc can still take; the arc beside it (number ^ 1) leads back

    def node(self) -> int:
        """Add a node and return its number."""
        self._arcs_of.append([])
        return len(self._arcs_of) - 1

    def connect(self, start: int, end: int, capacity: int) -> None:
        """Add an arc."""
        if capacity and start != end:
            self._arcs_of[start].append(len(self._ends))
            self._arcs_of[end].append(len(self._ends) + 1)
            self._ends += end, start
            self._left += capacity, 0

    def cut(self, start: int, end: int, most: int) -> list[bool] | None:
        """Return for each node if it is on the start's side of the minimum cut; None if that is ``most`` or more."""
        flow = 0
        while True:
            levels = self._levels(start)
            if levels[end] < 0:
                return [each >= 0 for each in levels]
            flow += self._fill(start, end, levels)
            if flow >= most:
                return None

    def _levels(self, start: int) -> list[int]:
        """Return for each node the number of arcs from the start; -1 if no way leads there."""
        levels = [-1] * len(self._arcs_of)
        levels[start] = 0
        waiting = deque([start])
        while waiting:
            node = waiting.popleft()
            for arc in self._arcs_of[node]:
                if self._left[arc] and levels[self._ends[arc]] < 0:
                    levels[self._ends[arc]] = levels[node] + 1
                    waiting.append(self._ends[arc])
        return levels

    def _fill(self, start: int, end: int, levels: list[int]) -> int:
        """Fill all shortest ways, and return the flow."""
        flow, node = 0, start
        path: list[int] = []
        tried = [0] * len(self._arcs_of)  # arcs of each node that lead nowhere
        while True:
            if node == end:
                amount = min(self._left[arc] for arc in path)
                flow += amount
                for arc in path:
                    self._left[arc] -= amount
                    self._left[arc ^ 1] += amount
                full = next(place for place, arc in enumerate(path) if not self._left[arc])
                node = self._ends[path[full] ^ 1]
                del path[full:]
            arcs = self._arcs_of[node]
            while tried[node] < len(arcs) and not self._leads_on(arcs[tried[node]], node, levels):
                tried[node] += 1
            if tried[node] < len(arcs):
                path.append(arcs[tried[node]])
                node = self._ends[path[-1]]
            elif node == start:
                return flow
            else:
                levels[node] = -1
                node = self._ends[path.pop() ^ 1]

    def _leads_on(self, arc: int, node: int, levels: list[int]) -> bool:
        return self._left[arc] > 0 and levels[self._ends[arc]] == levels[node] + 1
