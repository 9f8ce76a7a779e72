"""Leak watch: finds objects that keep growing from step to step, and what holds them."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memkit._core.units import KIB, format_bytes
from memkit._torch.graph import next_sequence_number
from memkit._torch.modules import HOOKS
from memkit.memory.graphs import grad_of, spanning
from memkit.memory.holders import References, Referrer, attributes, instances_of
from memkit.memory.sources import Growth, find_call, find_growth
from memkit.memory.suspects import CONTAINERS, GrowthKind, Suspect, growing_containers, growing_graph, hook_dicts

_PATIENCE = 2  # consecutive intervals in which a holder must grow
_PATIENCE_IF_EMPTIED = 30  # the same for a holder that its source empties now and then
_SMALLEST_GROWTH_BYTES = KIB  # per interval, without a graph: logged scalars stay below it
_MOST_TARGETS, _MOST_GRAPHS = 32, 8  # bounds of the search
_FIXES: dict[GrowthKind, str] = {
    "tensors": "empty it when its values are used, keep less (`.item()`, `.cpu()`), or bound it"
    " (`collections.deque(maxlen=...)`).",
    "graph": "detach the value that is carried from step to step: `x.detach()` or `x.item()`; `running += loss` keeps"
    " each step's graph.",
    "tensors and graph": "keep `x.detach()` or `x.item()`; keeping a tensor keeps the graph that made it.",
    "hooks": "register it once, outside the loop, or call `.remove()` on the handle that register returns.",
}


@dataclass(frozen=True, slots=True)
class Leak:
    """A holder that grows from check to check. ``str()`` gives a human-readable description.

    Attributes:
        kind: Kind of objects kept alive: ``"tensors"``, ``"graph"`` (one tensor whose autograd graph gets longer),
            ``"tensors and graph"`` or ``"hooks"`` (of a layer).
        holder: The variable that keeps them alive, by its name in your code: ``global `losses` in train.py``.
        line: ``"file:line"`` of the statement that makes it grow; if that is not found, of the function or class
            that holds it; None if neither is known.
        num_tensors: Number of tensors in it now.
        nbytes: Bytes that it keeps alive now, each storage counted once: its tensors and those saved in their graphs.
        growth_bytes: The part of ``nbytes`` added since the last check.
        num_graph_nodes: Number of autograd nodes that it keeps alive now.
        growth_graph_nodes: The part of ``num_graph_nodes`` added since the last check.
        num_hooks: Number of hooks in it now, for kind ``"hooks"``.
        referrers: The chain of references from the growing object up to the variable.
        fix: Suggested fix.
    """

    kind: GrowthKind
    holder: str
    line: str | None
    num_tensors: int
    nbytes: int
    growth_bytes: int
    num_graph_nodes: int
    growth_graph_nodes: int
    num_hooks: int
    referrers: tuple[str, ...]
    fix: str

    def __str__(self) -> str:
        if self.kind == "hooks":
            what = f"{self.num_hooks} hooks"
        else:
            nodes = f", {self.growth_graph_nodes} of {self.num_graph_nodes} graph nodes" if self.num_graph_nodes else ""
            what = (
                f"{self.num_tensors} tensors, {format_bytes(self.nbytes)}; since the last check"
                f" {format_bytes(self.growth_bytes)}{nodes}"
            )
        rows = {
            "grows at": self.line or "unknown",
            "chain": " <- ".join(self.referrers),
            "fix": self.fix,
        }
        return "\n".join([f"{self.holder} keeps {what}", *(f"  {key}: {value}" for key, value in rows.items())])


class Leaks(list[Leak]):
    """Leaks found by a check, most bytes first. Printing it also says how conclusive the check is.

    Args:
        leaks: The leaks found.
        num_checks: Number of checks so far, including this one.

    Attributes:
        num_checks: Number of checks so far, including this one.

    Example:
        >>> import memkit as mk
        >>> memory = mk.MemoryManager("cpu")
        >>> print(memory.leaks())
        no answer yet: this call took the baseline and compared nothing. Call leaks() after each of the next steps.
    """

    def __init__(self, leaks: Iterable[Leak], num_checks: int) -> None:
        super().__init__(leaks)
        self.num_checks = num_checks

    @property
    def is_baseline(self) -> bool:
        """Whether this was the first check, which compares nothing."""
        return self.num_checks == 1

    @property
    def is_certain(self) -> bool:
        """Whether an empty list means that nothing grew in both of the last two intervals; this takes three checks."""
        return self.num_checks > _PATIENCE

    def __str__(self) -> str:
        if self:
            return "\n".join(map(str, self))
        if self.is_baseline:
            return (
                "no answer yet: this call took the baseline and compared nothing. "
                "Call leaks() after each of the next steps."
            )
        if not self.is_certain:
            return "no leak in one interval, which shows only the most obvious ones. Call leaks() after another step."
        return f"no leak found in {self.num_checks} checks."

    def __repr__(self) -> str:
        return f"<Leaks: {self}>"


@dataclass(slots=True)
class _Record:
    """State of a holder from earlier checks."""

    growth: Growth
    peak: int = 0
    streak: int = 0
    check: int = -1


class LeakWatch:
    """Report after each step what keeps growing, and what holds it.

    A holder is reported when it gained tensors, or its graph gained nodes, in each of the last two intervals between
    checks and is larger than ever before. A holder that its source empties now and then must grow 30 times in a row.
    After only two checks, only a container that existed at the first one and gained at least two elements is reported.
    Holders that are bounded (`deque(maxlen=...)`, `lru_cache(maxsize=...)`), replaced or created once are not reported.

    Nothing is installed and nothing runs between two checks. The watch keeps only weak references.

    Memory:
        About 200 bytes for each live tensor; between the first two checks about 100 for each list, dict and set.

    Example:
        >>> import torch
        >>> watch = LeakWatch()
        >>> outputs = []
        >>> for step in range(4):
        ...     outputs.append(torch.ones(1000))
        ...     leaks = watch.check()
        >>> [(leak.num_tensors, leak.growth_bytes) for leak in leaks]
        [(4, 4000)]
    """

    def __init__(self) -> None:
        self._num_checks = 0
        self._births: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._marks: deque[int] = deque(maxlen=2)  # sequence numbers of graph nodes at the last checks
        self._lengths: dict[int, int] = {}
        self._num_hooks: dict[int, int] = {}
        self._hooked: set[int] = set()
        self._records: dict[str, _Record] = {}

    def check(self) -> Leaks:
        """Compare with earlier checks. The first call takes the baseline, and its result says so.

        Collects reference cycles first, so that only objects that are really held count.

        Returns:
            The leaks, most bytes first.
        """
        gc.collect()
        objects = gc.get_objects()
        tensors = instances_of(Tensor, objects)
        self._stamp(tensors)
        layers = instances_of(nn.Module, objects)
        suspects = [*self._grown_hooks(layers), *self._grown_graphs(tensors)]
        targets = self._targets(tensors, instances_of(torch.optim.Optimizer, objects))
        leaks: list[Leak] = []
        if targets or suspects:
            references = References(objects, layers)
            suspects = [*growing_containers(targets, references, self._age, self._grew), *suspects]
            leaks = self._judge(suspects, references, tensors)
        first = self._num_checks == 0
        self._lengths = {id(each): len(each) for each in objects if type(each) in CONTAINERS} if first else {}
        self._marks.append(next_sequence_number())
        self._num_checks += 1
        return Leaks(leaks, self._num_checks)

    def _stamp(self, tensors: list[Tensor]) -> None:
        """Record the check at which each live tensor was first seen."""
        births = {}
        for tensor in tensors:
            known = self._births.get(id(tensor))
            if known is None or known[0]() is not tensor:
                known = weakref.ref(tensor), self._num_checks
            births[id(tensor)] = known
        self._births = births

    def _age(self, tensor: Tensor) -> int | None:
        """Return the number of checks since a tensor was first seen."""
        known = self._births.get(id(tensor))
        return None if known is None else self._num_checks - known[1]

    def _targets(self, tensors: list[Tensor], optimizers: list[Any]) -> list[Tensor]:
        """Return live tensors from the interval before the last; at the second check, from the only interval.

        Gradients and optimizer state are left out: each has exactly one place.
        """
        if self._num_checks == 0:
            return []
        age = 1 if self._num_checks > 1 else 0
        targets = [tensor for tensor in tensors if self._age(tensor) == age]
        if targets:
            states = [state for each in optimizers for state in dict.values(attributes(each).get("state", {}))]
            owned = {id(value) for state in states if type(state) is dict for value in state.values()}
            owned |= {id(grad_of(tensor)) for tensor in tensors}
            targets = [tensor for tensor in targets if id(tensor) not in owned]
        return targets[:: 1 + len(targets) // _MOST_TARGETS]

    def _grew(self, container: Any, ages: list[tuple[int, int]]) -> bool:
        """Whether a container gained elements with tensors in each of the last two intervals."""
        new = {number for number, age in ages if age == 0}
        if self._num_checks == 1:
            # Only containers that existed at the first check and have grown: not those that each step rebuilds.
            before = self._lengths.get(id(container))
            return len(new) > 1 and before is not None and len(container) >= before + 2
        old = {number for number, age in ages if age == 1}
        return bool(old and new) and len(old | new) > 1

    def _grown_graphs(self, tensors: list[Tensor]) -> list[Suspect]:
        if self._num_checks < 2:
            return []
        start, middle = self._marks
        roots = spanning(tensors, start, middle)
        # A gradient has its own graph after backward(create_graph=True); all such graphs count as one leak.
        roots = roots or spanning([g for each in tensors if (g := grad_of(each)) is not None], start, middle)[:1]
        return [growing_graph(root, middle) for root in roots[:_MOST_GRAPHS]]

    def _grown_hooks(self, modules: list[Any]) -> list[Suspect]:
        """Return the hook dictionaries of layers that grew in each of the last two intervals."""
        before, self._num_hooks = self._num_hooks, {}
        grown_before, self._hooked = self._hooked, set()
        suspects = []
        for hooks in hook_dicts(modules):
            self._num_hooks[id(hooks)] = len(hooks)
            if self._num_checks and len(hooks) > before.get(id(hooks), 0):
                self._hooked.add(id(hooks))
                if id(hooks) in grown_before:
                    suspects.append(Suspect(hooks, "hooks", size=len(hooks)))
        return suspects

    # ---- finding the holder and deciding whether it is a leak

    def _judge(self, suspects: Iterable[Suspect], references: References, tensors: list[Tensor]) -> list[Leak]:
        leaks: dict[str, Leak] = {}
        for suspect in suspects:
            small = suspect.growth_bytes < _SMALLEST_GROWTH_BYTES and not suspect.growth_graph_nodes
            if small and suspect.kind != "hooks":
                continue
            holder = _holder_of(suspect, references, tensors)
            if holder.text in leaks:
                continue
            if holder.text not in self._records:
                self._records[holder.text] = _Record(_growth_of(holder, references.files))
            record = self._records[holder.text]
            if self._is_leak(record, suspect):
                leaks[holder.text] = _leak(suspect, holder, record.growth.line)
        return sorted(leaks.values(), key=lambda leak: leak.nbytes, reverse=True)

    def _is_leak(self, record: _Record, suspect: Suspect) -> bool:
        """Count the consecutive intervals in which a holder set a new maximum size."""
        growth = record.growth
        if self._num_checks == 1 and growth.is_restarted:
            return False  # a step may have rebuilt it at the address of the old one
        if suspect.size > record.peak:
            so_far = record.streak if record.check == self._num_checks - 1 else 0
            # It gained tensors in two intervals; unless the source shows that it also lost none, the next check must
            # confirm that.
            certain = growth.is_certain or suspect.kind == "hooks"
            record.streak = max(so_far, 1 if certain else 0) + 1
            record.peak = suspect.size
        else:
            record.streak = 0
        record.check = self._num_checks
        return record.streak >= (_PATIENCE_IF_EMPTIED if growth.is_emptied else _PATIENCE)


def _holder_of(suspect: Suspect, references: References, tensors: list[Tensor]) -> Referrer:
    holder = references.holder_of(suspect.value)
    if holder.place is None:
        for tensor in tensors:
            if grad_of(tensor) is suspect.value:
                owner = references.holder_of(tensor)
                return Referrer(f"gradient of {owner.text}", ("gradient", *owner.referrers), None)
    return holder


def _growth_of(holder: Referrer, files: list[str]) -> Growth:
    if holder.place is None:
        return Growth()
    if holder.place.name in HOOKS:
        line = find_call(HOOKS[holder.place.name], files)
        return Growth(line, is_certain=line is not None)
    return find_growth(holder.place, files)


def _leak(suspect: Suspect, holder: Referrer, line: str | None) -> Leak:
    return Leak(
        kind=suspect.kind,
        holder=holder.text,
        line=line,
        num_tensors=suspect.num_tensors,
        nbytes=suspect.nbytes,
        growth_bytes=suspect.growth_bytes,
        num_graph_nodes=suspect.num_graph_nodes,
        growth_graph_nodes=suspect.growth_graph_nodes,
        num_hooks=suspect.size if suspect.kind == "hooks" else 0,
        referrers=holder.referrers,
        fix=_FIXES[suspect.kind],
    )
