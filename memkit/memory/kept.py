"""Search for tensors that a tracked block keeps making and never frees, and for the variables that hold them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

from memkit._recorder.recording import Recording, lifetimes
from memkit.memory.graphs import graph_of
from memkit.memory.holders import References, Referrer, instances_of
from memkit.memory.sources import find_growth

KeptGroups = dict[str, tuple[list[int], int]]
"""For each line of code that made storages: their numbers, and their bytes in total."""
_PARTS = 3  # of a block: a line that makes lasting tensors in each part keeps making them, unlike a state or a cache
_MOST_GROUPS = 4  # whose holders are searched
_ELEMENT = re.compile(r"(\[[^`]*\])+(?=`)")  # the container matters, not which of its elements was looked up
_LASTING = ("parameter", "buffer", "gradient", "optimizer")


@dataclass(frozen=True, slots=True)
class Kept:
    """Tensors that one line of code made throughout a block, and that are still there at its end.

    Attributes:
        made_at: The line, as ``"file:line in function"``.
        num_tensors: Number of them.
        nbytes: Their bytes; for tensors with a graph, including those saved for its backward.
        is_graph: Whether they keep the graphs that made them.
        holder: The variable that keeps them, by its name in your code; None if not found.
        grows_at: ``"file:line"`` of the statement that adds to it; None if unknown.
        is_preloaded: Whether they existed before the block, such as batches in a list: a tracker counts each tensor
            from its first use.
    """

    made_at: str
    num_tensors: int
    nbytes: int
    is_graph: bool
    holder: str | None
    grows_at: str | None
    is_preloaded: bool = False


def find_kept(groups: KeptGroups, number_of: Callable[[Tensor], int | None], objects: list[object]) -> list[Kept]:
    """Find the holders of tensors that a block keeps making and never frees, most bytes first.

    Args:
        groups: From `groups_by_line`.
        number_of: Returns the number of a tensor's storage in the recording; None if it is not there.
        objects: All objects that the garbage collector tracks.
    """
    tensors: dict[int, Tensor] = {}
    for tensor in instances_of(Tensor, objects):
        number = number_of(tensor)
        if number is not None:
            tensors.setdefault(number, tensor)
    references: References | None = None
    found, nameless = [], 0
    for line, (numbers, nbytes) in groups.items():
        there = [tensors[number] for number in numbers if number in tensors]
        if not there:  # only C++ code refers to them: a graph saved them for its backward
            nameless += nbytes
            continue
        references = references or References(objects, instances_of(nn.Module, objects))
        held, holder = _representative(there, references)
        growth = None if holder.place is None else find_growth(holder.place, references.files)
        found.append(
            Kept(
                made_at=line,
                num_tensors=len(numbers),
                nbytes=nbytes,
                is_graph=graph_of(held) is not None,
                holder=None if holder.place is None else _ELEMENT.sub("", holder.text),
                grows_at=growth.line if growth is not None and growth.is_certain else None,
                is_preloaded=not line and _has_unseen(held, references, number_of),
            )
        )
    return _with_saved(found, nameless, groups)


def _representative(tensors: list[Tensor], references: References) -> tuple[Tensor, Referrer]:
    """Return one of the tensors that a line made, with a graph if some have one, and its holder.

    It is taken from the middle: a name may still refer to the last one, and the first may be something else.
    """
    roots = [tensor for tensor in tensors if graph_of(tensor) is not None]
    if 4 * len(roots) <= len(tensors):  # these belong to the last step, and are freed with it
        roots = []
    found = [(each, references.holder_of(each)) for each in (part[len(part) // 2] for part in (roots, tensors) if part)]
    return next((each for each in found if each[1].place is not None), found[0])


def groups_by_line(recording: Recording, device: str | None) -> KeptGroups:
    """Return numbers and bytes of the storages live at the end, by line, for lines that made some in every part.

    Args:
        recording: The block, before its tracker ends.
        device: One device's storages; None for all.
    """
    births, deaths = lifetimes(recording.event_storage, recording.event_bytes, recording.num_storages)
    end = len(recording.event_bytes)
    lasting = [code for code, name in enumerate(recording.names["category"]) if name in _LASTING]
    stays = (deaths == end) & ~np.isin(recording.codes["category"], lasting)
    if device is not None:
        stays &= recording.codes["device"] == recording.devices.index(device)
    by_line: dict[int, list[int]] = {}
    for number in np.flatnonzero(stays).tolist():
        by_line.setdefault(int(recording.codes["source"][number]), []).append(number)
    sizes = np.zeros(recording.num_storages, dtype=np.int64)
    np.add.at(sizes, recording.event_storage, recording.event_bytes)
    found = {
        recording.names["source"][code]: (numbers, int(sizes[numbers].sum()))
        for code, numbers in by_line.items()
        if len({min(_PARTS - 1, int(births[number]) * _PARTS // end) for number in numbers}) == _PARTS
    }
    return dict(sorted(found.items(), key=lambda each: -each[1][1])[:_MOST_GROUPS])


def _has_unseen(tensor: Tensor, references: References, number_of: Callable[[Tensor], int | None]) -> bool:
    """Whether a tensor's container also holds tensors that no operator has used yet: the block did not fill it then."""
    parents = [parent for parent, _ in references.referrers([tensor]) if isinstance(parent, (list, tuple, dict))]
    for parent in parents:
        values = parent.values() if isinstance(parent, dict) else parent
        if any(isinstance(each, Tensor) and number_of(each) is None for each in values):
            return True
    return False


def _with_saved(found: list[Kept], nbytes: int, groups: KeptGroups) -> list[Kept]:
    """Add the bytes that only graphs hold to the first kept tensor with a graph; without one they get their own row."""
    root = next((each for each in found if each.is_graph), None)
    if not nbytes:
        return found
    if root is None:
        line, (numbers, _) = next(iter(groups.items()))
        return [Kept(line, len(numbers), nbytes, is_graph=True, holder=None, grows_at=None), *found]
    whole = replace(root, nbytes=root.nbytes + nbytes)
    return [whole, *(each for each in found if each is not root)]
