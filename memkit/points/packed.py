"""Split packed batches between scenes: points of several scenes in one array, with the end of each scene."""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError, MemkitError
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit.points.cells import host_array

Ends = dict[str, list[int]]  # for each offset, the end of each scene's rows
Starts = frozenset[str]  # the offsets that begin with 0, like PyG's ptr

_POINTS, _SCENES, _ALL = "points", "scenes", "all"
_NO_EDGES = "no edges: a part numbers its points from 0 again, and the numbers in other entries stay as they are"
_RENUMBER = (
    "make a batch of PyTorch Geometric, batch = Batch.from_data_list(graphs), and pass "
    "split_fn=memkit.integrations.torch_geometric.split_graphs; or write a split_fn that renumbers them"
)
_PLAIN = (Tensor, np.ndarray, np.generic, str, bytes, int, float, complex, type(None))  # without rows, for every part


@guided(words={"n": "num_parts num_splits chunks"})
def split_packed(batch: Any, n: int, *, belongs_to: Mapping[str, str] | None = None) -> list[Any]:
    """Split a packed batch into up to n parts between scenes: a ``split_fn`` for Pointcept-style batches.

    The batch is a mapping. ``offset`` gives the end of each scene's points, and so does ``ptr``, which begins with 0 as
    in PyG; without either, ``batch`` gives the scene of each point. An ``offset`` that begins with 0 is read as a
    ``ptr`` too, unless another entry has as many rows: then the first scene is empty. Entries are assigned by their
    number of rows: an entry with a row per point is cut with the points, one with a row per scene with the scenes, and
    a plain value goes to every part. Further offsets are recognized by name: entries ``origin_*`` are cut by
    ``origin_offset`` if they have its number of rows. (In a batch with ``batch``, an entry with such a name is an
    offset only if it has an integer per scene, rising to another entry's number of rows.)

    Scenes stay whole and in order. The split minimizes the points of the largest part among all splits into n parts; if
    one scene outweighs the others, there are fewer parts.

    Args:
        batch: A mapping with ``offset``, (B,) integers, cumulative, ``ptr``, (B + 1,), or ``batch``, (N,) integers,
            ascending from 0; tensors and arrays with N or B rows, lists of N or B items, plain values.
        n: Maximum number of parts.
        belongs_to: Assignment of entries that the number of rows does not determine: ``"points"``, ``"scenes"``,
            ``"all"`` (the whole entry goes to every part), or the name of an offset, such as
            ``{"inverse": "origin_offset"}``. Pass it with
            ``functools.partial(mk.points.split_packed, belongs_to=...)``.

    Returns:
        Parts of the batch's own type, in order, with offsets and scene numbers starting at zero again, in their
        original form. A single part is the batch itself.

    Raises:
        InputError: There are no offsets, they do not match, or an entry could belong to both points and scenes, or to
            neither, or is an ``edge_index``, whose numbers of points would have to change.
        InputTypeError: The batch is not a mapping.

    Memory cost: tensors are views; only offsets and scene numbers are new. On an accelerator the offsets are read once.

    Source: the batches of Pointcept's ``collate_fn`` (pointcept/datasets/utils.py).

    Example:
        >>> import torch, memkit as mk
        >>> batch = {"coord": torch.rand(9, 3), "offset": torch.tensor([2, 3, 9]), "name": ["hall", "desk", "room"]}
        >>> for part in mk.points.split_packed(batch, 2):
        ...     print(tuple(part["coord"].shape), part["offset"].tolist(), part["name"])
        (3, 3) [2, 3] ['hall', 'desk']
        (6, 3) [6] ['room']
    """
    call = f"split_packed(batch, {n})"
    belongs_to = belongs_to or {}
    Checker("split_packed(batch, n)", InputError).whole("n", n, 1)
    ends, starts = _read_ends(batch, belongs_to, call)
    homes = {key: _find_home(key, value, ends, belongs_to, call) for key, value in batch.items()}
    main = next(iter(ends.values()))
    borders = cut_evenly([stop - start for start, stop in pairwise([0, *main])], n)
    if len(borders) <= 2:
        return [batch]
    return [_take_scenes(batch, homes, ends, starts, first, last) for first, last in pairwise(borders)]


def cut_evenly(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Cut a sequence of sizes into at most ``num_parts`` runs, minimizing the largest run.

    Returns:
        The start of each run, and the end of the last one.
    """
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    limits = range(max(sizes, default=0), total + 1)
    smallest = bisect_left(limits, -max(1, num_parts), key=lambda limit: 1 - len(_fill(ends, limit)))
    return _fill(ends, limits[smallest])


def _fill(ends: Sequence[int], limit: int) -> list[int]:
    """Fill runs one after the other up to a limit, which no single size exceeds."""
    borders, done = [0], 0
    while borders[-1] < len(ends):
        borders.append(bisect_right(ends, done + limit))
        done = ends[borders[-1] - 1]
    return borders


def _read_ends(batch: Any, belongs_to: Mapping[str, str], call: str) -> tuple[Ends, Starts]:
    """Read the offsets of a batch, all with the same number of scenes; the first is that of its points."""
    if not isinstance(batch, Mapping):
        is_graph = any(each.__module__.startswith("torch_geometric.") for each in type(batch).__mro__)
        raise InputTypeError(
            call,
            got=f"a {type(batch).__name__}",
            expected='a mapping with "offset" or "batch" besides the points',
            fix="write memkit.integrations.torch_geometric.split_graphs(batch, n)"
            if is_graph
            else "collate into a dict, or write your own split_fn.",
        )
    given = {name: _read_rising(batch[name], call, name) for name in ("offset", "ptr") if name in batch}
    if given:
        starts = frozenset(
            name for name, values in given.items() if _begins_with_start(name, values, batch, belongs_to)
        )
        ends = {name: values[1:] if name in starts else values for name, values in given.items()}
    elif "batch" in batch:
        starts = frozenset()
        scenes = _read_rising(batch["batch"], call, "batch")
        ends = {"batch": np.searchsorted(scenes, np.arange(1, scenes.max(initial=-1) + 2))}
    else:
        raise InputError(
            call,
            got=f"entries {list(batch)}",
            expected='"offset", the end of the points of each scene, "ptr", or "batch", the scene of each point',
            fix='add batch["offset"] = torch.tensor([len(scene) for scene in scenes]).cumsum(0).',
        )
    more = [key for key in batch if isinstance(key, str) and key.endswith("_offset") and key not in belongs_to]
    if "batch" in ends:  # then the name alone is ambiguous: it may be a per-point shift, or an angle
        more = [key for key in more if key in belongs_to.values() or _is_offset(key, batch, len(ends["batch"]))]
    ends |= {name: _read_rising(batch[name], call, name) for name in more}
    lengths = {name: len(values) for name, values in ends.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(
            call,
            got=f"offsets of different lengths: {lengths}",
            expected="one end per scene in every offset",
            fix="use one common end for several views of a scene, or write your own split_fn.",
        )
    return {name: values.tolist() for name, values in ends.items()}, starts


def _begins_with_start(
    name: str, values: NDArray[np.int64], batch: Mapping[Any, Any], belongs_to: Mapping[str, str]
) -> bool:
    """Return whether offsets begin with the start of the first scene, not with the end of an empty one."""
    if len(values) < 2 or values[0]:
        return False
    num_points = values[-1]
    of_scenes = {
        _count_rows(value)
        for key, value in batch.items()
        if key not in {"offset", "ptr"} and (belongs_to.get(key) == _SCENES or _count_rows(value) != num_points)
    }
    return name == "ptr" or len(values) not in of_scenes


def _is_offset(name: str, batch: Mapping[Any, Any], num_scenes: int) -> bool:
    """Return whether an entry gives the end of each scene's rows in another entry."""
    if _count_rows(batch[name]) != num_scenes:
        return False
    try:
        last = _read_rising(batch[name], "", name).max(initial=0)
    except MemkitError:
        return False
    ending = [str(key) for key, value in batch.items() if key != name and _count_rows(value) == last]
    # Numbers up to the number of scenes may be per-scene values, such as positions in a sequence.
    return any(last != num_scenes or key.startswith(name.removesuffix("offset")) for key in ending)


def _read_rising(values: Any, call: str, name: str) -> NDArray[np.int64]:
    array = host_array(values, call, name)
    if array.ndim == 1 and array.dtype.kind in "iu" and isinstance(values, (Tensor, np.ndarray)):
        whole = array.astype(np.int64)
        if (np.diff(whole, prepend=0) >= 0).all():
            return whole
    raise InputError(
        call,
        got=f"{name}, a {type(values).__name__} of {array.dtype} and shape {array.shape}: {array.ravel()[:5].tolist()}",
        expected="a 1-dimensional tensor or array of whole numbers from 0 that never decrease",
        fix="collate one scene after another, and pass offsets as cumulative ends; if this entry is not an offset, "
        "name it in belongs_to.",
    )


def _find_home(key: Any, value: Any, ends: Ends, belongs_to: Mapping[Any, str], call: str) -> str:
    """Return the owner of an entry's rows: the name of an offset, `_SCENES` or `_ALL`."""
    if key in ends:
        return _SCENES if key != "batch" else key
    if str(key).endswith("edge_index") and _may_be_edges(value):  # which may have as many rows as there are scenes
        raise InputError(call, got=_described(key, value), expected=_NO_EDGES, fix=f"{_RENUMBER}.")
    points, main = next(iter(ends.items()))
    rows = {name: its[-1] if its else 0 for name, its in ends.items()} | {_SCENES: len(main)}
    num_rows = _count_rows(value)
    if key in belongs_to:
        homes = [points if belongs_to[key] == _POINTS else belongs_to[key]]
    elif num_rows is None and isinstance(value, _PLAIN):
        homes = [_ALL]
    else:
        prefixed = [name for name in ends if name != points and str(key).startswith(name.removesuffix("offset"))]
        homes = [*sorted(prefixed, key=len, reverse=True), points, _SCENES]
    fits = [home for home in homes if home == _ALL or (num_rows is not None and rows.get(home) == num_rows)]
    is_unclear = fits == [points, _SCENES] and main != list(range(1, len(main) + 1))  # unless each scene is one point
    if fits and not is_unclear:
        return fits[0]
    fix = f"pass belongs_to={{{key!r}: ...}}, where ... is 'points', 'scenes', 'all' or the name of another offset."
    if _may_be_edges(value):
        fix = f"if it holds numbers of points, which are not renumbered, {_RENUMBER}; if not, {fix}"
    raise InputError(
        call,
        got=_described(key, value) + (f" for {belongs_to[key]!r}" if key in belongs_to else ""),
        expected="as many rows as one of: " + ", ".join(f"{count} of {name!r}" for name, count in rows.items()),
        fix=fix,
    )


def _described(key: Any, value: Any) -> str:
    num_rows = _count_rows(value)
    return f"{key!r}: " + (f"a {type(value).__name__}" if num_rows is None else f"{num_rows} rows")


def _may_be_edges(value: Any) -> bool:
    """Return whether an entry may hold pairs of numbers of points, in its columns or rows."""
    if not isinstance(value, (Tensor, np.ndarray)) or value.ndim != 2 or 2 not in value.shape:
        return False
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iu"
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _count_rows(value: Any) -> int | None:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.shape[0] if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _take_scenes(batch: Any, homes: Mapping[Any, str], ends: Ends, starts: Starts, first: int, last: int) -> Any:
    """Return the scenes from ``first`` up to, but not including, ``last``."""
    part = copy.copy(batch)
    for key, home in homes.items():
        if home == _ALL:
            continue
        start, stop = (first, last) if home == _SCENES else ([0, *ends[home]][first], ends[home][last - 1])
        part[key] = batch[key][start : stop + (key in starts)]
        if key == "batch" and home != _SCENES:
            part[key] = part[key] - first
        elif key in ends:
            part[key] = part[key] - [0, *ends[key]][first]
    return part
