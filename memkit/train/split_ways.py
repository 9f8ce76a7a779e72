"""Choose the rows for the split check, likely to reveal a changed gradient, and how to split them."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memkit.train.split import SplitFn, count_elements, count_rows, cut_batch, join_rows, list_tensors, take_rows

_NUM_ROWS, _MOST_ROWS = 8, 32  # of a check, and of the first one of its kind
_NUMS_LOOKED_AT = (4, 3)  # rows whose losses are compared, where only two fit with their gradients
_LARGEST_UNIT = 4  # rows kept together if all parts are multiples of it: pairs, groups of augmentations
_MOST_SORTED = 1024  # rows that are sorted to find similar ones
_MOST_DESCRIBED = 2**14  # rows in a table
_BYTES_AT_ONCE = 2**20  # of rows that are described at once
_MAX_LEAF_NUMEL = 10_000_000  # of a tensor whose rows are compared to choose dissimilar ones

SketchTable = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A batch to check, and its split.

    Attributes:
        whole: The batch.
        size: Its rows, or elements.
        parts: Its parts in order, with their sizes.
        has_rows: Whether the sizes are rows, so that a part's random draws can be found in the whole's.
        num_left_out: Rows of the real batch that are not in it, if it has rows.
    """

    whole: Any
    size: int
    parts: tuple[tuple[Any, int], ...]
    has_rows: bool
    num_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Way:
    """A way to split a batch for the check.

    Attributes:
        make: Splits the batch; returns None if it cannot be split this way.
        is_smaller: Whether it is meant for after memory has run out.
        is_real: Whether the parts are those of the step.
        is_sorted: Whether the rows are in a different order than in the batch.
        is_further: Whether it is run if the previous ways were found equal, in case that was by accident.
        after_errors: Whether it is run only if the previous ways raised: its rows keep the batch's order, which a model
            may need (sequences sorted by length).
        only_losses: Whether it is for more rows than a backward has room for: losses alone are compared. If the parts
            are not those of the step, only where gradients of hardly any rows were.
    """

    make: Callable[[], CutBatch | None]
    is_smaller: bool = False
    is_real: bool = False
    is_sorted: bool = False
    is_further: bool = False
    after_errors: bool = False
    only_losses: bool = False


def ways_to_cut(
    batch: Any,
    *,
    num_parts: int = 2,
    sizes: Sequence[int] = (),
    split_fn: SplitFn | None = None,
    is_first: bool = False,
    is_tight: bool = False,
    has_branches: bool = False,
    is_widened: bool = False,
    may_run_out: bool = True,
    adds_parts: bool = False,
) -> list[Way]:
    """List the ways to compare: real parts if they are small, else a few rows; two real parts; less if memory is short.

    Args:
        batch: The batch.
        num_parts: Number of parts it is split into.
        sizes: The rows of each part, if known.
        split_fn: Splits a packed batch.
        is_first: Whether to check more rows, or all of a small batch: without gradients yet, this takes less memory
            than a whole step.
        is_tight: Whether memory is known to be short: no more rows at once than the largest part has.
        has_branches: Whether Python is known to branch on values, which depend on the parts' own rows.
        may_run_out: Whether a check may try more rows than are known to fit; not in the user's own loop, which would
            see the error.
        is_widened: Whether the check is in full precision and the step is not, so half the rows take as much memory.
        adds_parts: Whether to look, besides, at as many real parts as are within the rows of a first check. A loss that
            takes the smaller of two means may be the same for other rows, and for other parts of them.

    Raises:
        InputError: The batch has no common rows, and there is no ``split_fn``.
    """
    if split_fn is not None:
        real = Way(functools.partial(_all_parts, batch, num_parts, split_fn), is_real=True)
        cuts = [Way(functools.partial(_packed, batch, number, split_fn)) for number in (num_parts, num_parts // 2, 1)]
        if is_first and not is_tight:
            return [real, *cuts, replace(cuts[0], is_smaller=True)]
        samples = functools.partial(_some_samples, batch, num_parts, split_fn)
        return [cuts[0], Way(samples, is_sorted=True, is_further=True), *cuts[1:]]
    num_rows = count_rows(batch)
    if not sizes:
        num_parts = max(1, min(num_parts, num_rows))
        size, larger = divmod(num_rows, num_parts)
        sizes = [size + 1] * larger + [size] * (num_parts - larger)
    # If there are gradients already, fewer rows keep it below a whole step.
    at_most = _MOST_ROWS if is_first else _NUM_ROWS
    if is_widened or not is_first:
        at_most = min(at_most, max(2, num_rows // 2))

    def way(cut: Callable[..., CutBatch | None], *settings: Any, **kind: bool) -> Way:
        return Way(functools.partial(cut, batch, num_rows, *settings), **kind)

    few = way(_few_rows, sizes, at_most)
    in_another_order = way(functools.partial(_few_rows, keeps_groups=False), sizes, at_most, is_sorted=True)
    few_in_order = way(functools.partial(_few_rows, in_order=True), sizes, at_most, after_errors=True)
    two = way(_some_parts, sizes, 2, is_real=True)
    two_rows = way(functools.partial(_few_rows, in_order=True), [1], 2, is_smaller=True)
    losses = [way(_rows_of_losses, sizes, n, is_smaller=not is_tight, only_losses=True) for n in _NUMS_LOOKED_AT]
    # Without a graph two parts take about as much as a step of one.
    has_room = (is_first or adds_parts) and (may_run_out or not is_tight)
    losses = [way(_some_parts, sizes, 2, is_real=True, only_losses=True)] * has_room + losses
    # After an out-of-memory try fewer rows, then the same again once the cache is released.
    if is_tight:
        alike = way(_alike_rows, sizes, at_most, is_sorted=True, is_further=True)
        # A check runs without optimizer state: two parts may fit together, even all of them, or run out again.
        parts = [replace(two, is_further=True)] if may_run_out else []
        if may_run_out and len(sizes) > 2 and num_rows <= _MOST_ROWS:
            parts += [way(_some_parts, sizes, len(sizes), is_real=True, is_further=True)]
        return [in_another_order, alike, *parts, few, few_in_order, two_rows, two_rows, *losses]
    in_order, num_looked_at = few, min(at_most, max(sizes))
    number = min(len(sizes), at_most // max(sizes))
    if number > 1:
        in_order, num_looked_at = way(_some_parts, sizes, number, is_real=True), number * max(sizes)
        in_another_order = way(_sorted_parts, sizes, number, is_sorted=True)
    if has_branches or 2 * num_looked_at <= num_rows:  # both take less time than two steps
        ways = [in_order, replace(in_another_order, is_further=True)]
    else:
        ways = [replace(in_another_order, make=functools.partial(_if_alike, in_another_order, batch, sizes)), in_order]
    fewer = way(_few_rows, sizes, _NUM_ROWS, is_smaller=True)
    number = min(len(sizes), _MOST_ROWS // max(1, *sizes)) if adds_parts else 0
    some_parts = [way(_some_parts, sizes, number, is_real=True, is_further=True)] * (number > 1)
    return [*ways, *some_parts, few, two, fewer, two_rows, two_rows, *losses]


def once(way: Way) -> Way:
    """Return a way with the same rows in one piece."""

    def make() -> CutBatch | None:
        parts = way.make()
        return parts and replace(parts, parts=((parts.whole, parts.size),))

    return replace(way, make=make, is_real=False, is_sorted=False, is_further=False)


def interleaved(parts: CutBatch) -> CutBatch:
    """Return the same rows, every second one in another part: masked ones at one end are then in both."""
    rows = [(row, row + 1) for row in range(parts.size)]
    return _cut(parts.whole, parts.size, [*rows[::2], *rows[1::2]], [len(rows[::2]), len(rows[1::2])])


def reordered(parts: CutBatch, order: Sequence[int]) -> CutBatch:
    """Return the same rows in another order, in two parts."""
    half = (parts.size + 1) // 2
    return _cut(parts.whole, parts.size, [(row, row + 1) for row in order], [half, parts.size - half])


def _all_parts(batch: Any, num_parts: int, split_fn: SplitFn) -> CutBatch | None:
    size = count_elements(batch)
    parts = cut_batch(batch, num_parts, size=size, split_fn=split_fn)
    return CutBatch(batch, size, tuple(parts), has_rows=False) if len(parts) > 1 or parts[0][1] != size else None


def _packed(batch: Any, num_parts: int, split_fn: SplitFn) -> CutBatch | None:
    """Return the first part of a packed batch that can be split again."""
    whole = count_elements(batch)
    for part, size in cut_batch(batch, num_parts, size=whole, split_fn=split_fn)[:3]:
        parts = cut_batch(part, 2, size=size, split_fn=split_fn)
        if len(parts) > 1 or parts[0][1] != size:  # a single part smaller than the whole has lost something
            return CutBatch(part, size, tuple(parts), has_rows=False)
    return None


def _some_samples(batch: Any, num_parts: int, split_fn: SplitFn) -> CutBatch | None:
    """Choose dissimilar samples of a list, as many as a part has; None if the parts are not lists of samples."""
    parts = cut_batch(batch, num_parts, size=count_elements(batch), split_fn=split_fn)
    is_list = isinstance(batch, list) and all(isinstance(part, list) for part, _ in parts)
    if not is_list or [id(each) for part, _ in parts for each in part] != [id(each) for each in batch]:
        return None
    most = min(len(batch), _MOST_ROWS)
    facts = [_facts_of_rows([leaf[None] for leaf in list_tensors(each)], 1)[0] for each in batch[:most]]
    number = min(most, max(len(part) for part, _ in parts))
    if number < 2 or len({each.shape for each in facts}) != 1:
        return None
    samples = [batch[index] for index in _most_unlike(np.concatenate(facts), number)]
    size = count_elements(samples)
    cut = cut_batch(samples, 2, size=size, split_fn=split_fn)
    return CutBatch(samples, size, tuple(cut), has_rows=False) if len(cut) > 1 else None


def _some_parts(batch: Any, num_rows: int, sizes: Sequence[int], number: int) -> CutBatch | None:
    """Choose the most dissimilar parts, unchanged and in their order."""
    if len(sizes) < 2:
        return None
    blocks = sorted(_unlike(batch, num_rows, [0, *np.cumsum(sizes).tolist()], number))
    return _cut(batch, num_rows, blocks, [stop - start for start, stop in blocks])


def _sorted_parts(batch: Any, num_rows: int, sizes: Sequence[int], number: int) -> CutBatch | None:
    """Build parts of the same sizes, except one, with the rows reordered so that the parts are dissimilar."""
    *lengths, last = sorted(sizes, reverse=True)[-number:]
    unit = math.gcd(_LARGEST_UNIT, *lengths, last)  # keep the length of possible groups of rows
    while unit > 1 and unit == last:
        unit //= 2
    lengths += [last - unit] if last > unit else []  # sorted rows are a copy: take fewer, so memory stays the same
    if len(lengths) < 2:
        return None
    return _cut(batch, num_rows, _unlike(batch, num_rows, range(num_rows + 1), sum(lengths)), lengths)


def _if_alike(way: Way, batch: Any, sizes: Sequence[int]) -> CutBatch | None:
    return way.make() if _have_the_same_labels(batch, sum(sizes), sizes) else None


def _have_the_same_labels(batch: Any, num_rows: int, sizes: Sequence[int]) -> bool:
    """Return whether all parts have equal padding and labels, though the rows do not."""
    facts, num_discrete = _facts_of_rows(list_tensors(batch), num_rows)
    discrete = facts[:, :num_discrete]
    means = (np.add.reduceat(discrete, np.cumsum([0, *sizes[:-1]]), axis=0).T / np.array(sizes)).T
    return bool(np.ptp(discrete, axis=0).any() and not np.ptp(means, axis=0).any())


def _few_rows(
    batch: Any,
    num_rows: int,
    sizes: Sequence[int],
    at_most: int,
    *,
    keeps_groups: bool = True,
    in_order: bool = False,
) -> CutBatch | None:
    """Choose a few dissimilar rows, in two parts; no more than one real part has, which is known to fit.

    If groups of rows may belong together, the split is between them. Whole groups are chosen, or, unless
    ``keeps_groups``, rows one by one. They are sorted so that the parts are dissimilar too, unless ``in_order``.
    """
    if num_rows < 2:
        return None
    wanted = min(num_rows, max(2, min(at_most, max(sizes))))
    unit = math.gcd(_LARGEST_UNIT, *sizes)
    while 2 * unit > wanted:
        unit //= 2
    num_groups = wanted // unit
    cut, size = (num_groups * 5 + 4) // 8 * unit, unit * num_groups
    step = unit if keeps_groups else 1
    blocks = _unlike(batch, num_rows, range(0, num_rows + 1, step), size // step)
    blocks = sorted(blocks) if in_order else blocks
    return _cut(batch, num_rows, blocks, [cut, size - cut])


def _rows_of_losses(batch: Any, num_rows: int, sizes: Sequence[int], at_most: int) -> CutBatch | None:
    """Choose a few rows, in real parts if these are so small."""
    number = min(len(sizes), at_most // max(1, *sizes))
    if number > 1:
        return _some_parts(batch, num_rows, sizes, number)
    return _few_rows(batch, num_rows, [at_most], at_most)


def _alike_rows(batch: Any, num_rows: int, sizes: Sequence[int], at_most: int) -> CutBatch | None:
    """Choose a few similar rows (same class, same length), alternating between the two parts."""
    unit = 2 * math.gcd(_LARGEST_UNIT, *sizes)
    size = min(num_rows, at_most, max(sizes)) // unit * unit
    if not size or size == num_rows or num_rows > _MOST_SORTED:
        return None
    rows = _unlike(batch, num_rows, range(num_rows + 1), num_rows)[:size]
    return _cut(batch, num_rows, [*rows[::2], *rows[1::2]], [size // 2, size // 2])


def _cut(batch: Any, num_rows: int, blocks: Sequence[tuple[int, int]], lengths: Sequence[int]) -> CutBatch:
    """Take blocks of rows, and cut them into parts of these lengths; neighbors need no copy."""
    merged: list[tuple[int, int]] = []
    for start, stop in blocks:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    rows, size = join_rows([take_rows(batch, *block, num_rows=num_rows) for block in merged]), sum(lengths)
    stops = itertools.accumulate(lengths)
    parts = [(take_rows(rows, stop - n, stop, num_rows=size), n) for stop, n in zip(stops, lengths, strict=True)]
    return CutBatch(rows, size, tuple(parts), has_rows=True, num_left_out=num_rows - size)


def _unlike(batch: Any, num_rows: int, edges: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Choose blocks of rows that are dissimilar, those with most padding and labels first.

    Equal rows would hide that a mean is over something other than rows: so rows with little and with much padding,
    with rare and with frequent classes, are checked together and then split.

    Args:
        batch: The batch.
        num_rows: Its rows.
        edges: Block boundaries.
        number: Number of blocks.
    """
    leaves = [each for each in list_tensors(batch) if _has_facts(each, num_rows)]
    found, tables, first = list[int](), list[SketchTable](), 0
    # Some blocks at a time, then the best of each: a table of all rows could take more than the step has left.
    while first < len(edges) - 1:
        after = max(first + 1, bisect.bisect_right(edges, edges[first] + _MOST_DESCRIBED) - 1)
        start, stop = edges[first], edges[after]
        facts, _ = _facts_of_rows([each[start:stop] for each in leaves], stop - start)
        starts = np.asarray(edges[first : after + 1]) - start
        means = (np.add.reduceat(facts, starts[:-1], axis=0).T / np.maximum(np.diff(starts), 1)).T
        best = _most_unlike(means, number)
        found += [first + each for each in best]
        tables.append(means[best])
        first = after
    return [(edges[found[each]], edges[found[each] + 1]) for each in _most_unlike(np.concatenate(tables), number)]


def _most_unlike(facts: SketchTable, number: int) -> list[int]:
    """Choose dissimilar rows of a table, and return them in the order of its columns."""
    number = min(number, len(facts))
    order = np.lexsort((np.arange(len(facts)), *(-facts.T[::-1])))
    spread = np.ptp(facts, axis=0)
    facts = (facts - facts.min(0)) / np.where(spread > 0, spread, 1.0)
    chosen = [int(np.linalg.norm(facts - facts.mean(0), axis=1).argmax())]
    distance = np.full(len(facts), np.inf)
    while len(chosen) < number < len(facts):
        distance = np.minimum(distance, np.linalg.norm(facts - facts[chosen[-1]], axis=1))
        distance[chosen] = -1.0
        chosen.append(int(distance.argmax()))  # the first one of ties
    kept = set(range(len(facts)) if number == len(facts) else chosen)
    return [line for line in order.tolist() if line in kept]


def _has_facts(leaf: Tensor, num_rows: int) -> bool:
    is_cut = leaf.dim() > 0 and len(leaf) == num_rows
    return is_cut and 0 < leaf.numel() <= _MAX_LEAF_NUMEL and not leaf.is_complex()


def _facts_of_floats(rows: Tensor) -> tuple[Tensor, ...]:
    return (~rows.isfinite()).sum(1), (rows == 0).sum(1), rows.nan_to_num(0, 0, 0).sum(1)


def _facts_of_integers(rows: Tensor) -> tuple[Tensor, ...]:
    return (rows < 0).sum(1), (rows == 0).sum(1), rows.sum(1)


def _facts_of_rows(leaves: Sequence[Tensor], num_rows: int) -> tuple[SketchTable, int]:
    """Compute a few numbers per row: counts of padding and missing values, then sums of labels, then of features.

    Returns:
        A table with one line per row, and the number of its columns that are counts and sums of labels.
    """
    counts: list[Tensor] = []
    sums: list[Tensor] = []
    others: list[Tensor] = []
    with torch.no_grad():
        for leaf in leaves:
            if not _has_facts(leaf, num_rows):
                continue
            facts_of, columns_of = (_facts_of_floats, (counts, others, others))
            if not leaf.is_floating_point():
                facts_of, columns_of = _facts_of_integers, (counts, counts, sums)
            # A few rows at a time: temporaries as large as the batch could take more than the step has left.
            runs = torch.split(leaf.detach(), max(1, _BYTES_AT_ONCE * num_rows // leaf.nbytes))
            found = [facts_of(run.reshape(len(run), -1)) for run in runs]
            for column, numbers in zip(columns_of, zip(*found, strict=True), strict=True):
                column.append(torch.cat(numbers))
        columns = [*counts, *sums, *others]
        if not columns:
            return np.zeros((num_rows, 1)), 0
        facts: SketchTable = (
            torch.stack([each.to(columns[0].device, torch.float64) for each in columns], 1).cpu().numpy()
        )
    return facts, len(counts) + len(sums)
