"""Draws from one scene: how many points each cell keeps, and which.

Which points is Algorithm S (Knuth, TAOCP 2, 3.4.2), for all cells at once: a point is kept with probability
``needed / left``, where ``left`` counts the points of its cell from it on, and ``needed`` how many of them are still to
be kept. Every set of the wanted size is equally likely, and the size is always met. The decision is an integer one: a
whole number below ``left``, drawn without bias (Lemire, 2019), is compared with ``needed``.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any, Literal

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from memkit.points.cells import Groups, sort_order
from memkit.points.layout import BigCells, Layout

Rounding = Literal["nearest", "floor"]

_NO_WEIGHT = 1e4  # above every key of a point with a weight: they lie between -747 and 749


class Workspace(threading.local):
    """Memory that draws use again, for each thread its own: 2 bytes for each point of the largest scene so far."""

    def __init__(self) -> None:
        self._bytes = np.empty((2, 0), np.uint8)
        self.block = Block()

    def rows(self, num_points: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Two rows of bytes, not initialised."""
        if self._bytes.shape[1] < num_points:
            self._bytes = np.empty((2, num_points), np.uint8)
        first, second = self._bytes[:, :num_points]
        return first, second

    def __reduce__(self) -> tuple[Any, ...]:
        return Workspace, ()  # nothing of it travels to another process


class Block:
    """What is computed on the way for some slots at a time, so few that it stays in the processor's cache."""

    SIZE = 1 << 15

    def __init__(self) -> None:
        self.product, self.factor = np.empty((2, self.SIZE), np.int32)
        self.left = np.empty(self.SIZE, np.uint16)
        self.suspect = np.empty(self.SIZE, np.bool_)


class _Key(ISeedSequence):
    """Seeds a bit generator from a key of numbers in [0, 2^64), in a fraction of the time of NumPy's own."""

    def __init__(self, key: tuple[int, ...]) -> None:
        self._bytes = b"".join(number.to_bytes(8, "little") for number in key)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        num_bytes = n_words * np.dtype(dtype).itemsize
        return np.frombuffer(hashlib.blake2b(self._bytes, digest_size=num_bytes).digest(), dtype)


def random_bits(key: tuple[int, ...]) -> np.random.SFC64:
    """Random bits for a key of numbers in [0, 2^64). NumPy keeps them the same from version to version."""
    return np.random.SFC64(_Key(key))  # type: ignore[arg-type] # NumPy's stub forgets its own protocol


def kept_counts(
    counts: NDArray[np.int64], ratio: tuple[float, float], rounding: Rounding, bits: np.random.SFC64
) -> NDArray[np.int64]:
    """How many points each cell keeps: its own ratio of them, at least one."""
    low, high = ratio
    kept = bits.random_raw(-(-len(counts) // 2)).view(np.uint32)[: len(counts)].astype(np.float64)
    kept *= (high - low) / 2**32
    kept += low
    kept *= counts
    (np.rint if rounding == "nearest" else np.floor)(kept, out=kept)
    return np.maximum(kept, 1, out=kept).astype(np.int64)


def choose(layout: Layout, kept: NDArray[np.int64], bits: np.random.SFC64, workspace: Workspace) -> NDArray[np.int64]:
    """Choose points uniformly without replacement; their rows, ascending."""
    needed = _pieces_kept(layout, kept, bits)
    below, chosen = workspace.rows(len(layout.slots))
    _draw_below(layout.left, bits, below, workspace.block)
    chosen_flags = chosen.view(np.bool_)
    for start, stop, num in layout.steps:
        still = needed[:num]
        np.less(below[start:stop], still, out=chosen_flags[start:stop])
        np.subtract(still, chosen[start:stop], out=still)
    by_point = torch.from_numpy(below)  # what was drawn is used up: its memory takes the result
    torch.index_select(torch.from_numpy(chosen), 0, layout.slots, out=by_point)
    return np.flatnonzero(below.view(np.bool_))


def choose_one(groups: Groups, bits: np.random.SFC64) -> NDArray[np.int64]:
    """Choose one point of each cell; their rows, ascending."""
    places = _uniform(bits, len(groups.counts))
    places *= groups.counts
    rows = groups.order.take(places.astype(np.int64) + groups.starts)
    rows.sort()
    return rows.astype(np.int64)


def choose_weighted(
    groups: Groups, kept: NDArray[np.int64], weights: NDArray[np.float64], bits: np.random.SFC64
) -> NDArray[np.int64]:
    """Choose points one after another, each time in proportion to the weights that are left; their rows, ascending.

    Points without a weight come last, in random order. The rule is that of Efraimidis and Spirakis (2006): the least
    of ``exponential / weight`` are kept, here as logarithms.
    """
    drawn = 1 - _uniform(bits, len(groups.order))  # in (0, 1]
    ordered = weights[groups.order]
    with np.errstate(divide="ignore"):  # log(0): the least key there is
        keys = np.where(ordered > 0, np.log(-np.log(drawn)) - np.log(ordered), _NO_WEIGHT + drawn)
    by_key = keys.argsort()
    cell = np.repeat(np.arange(len(kept), dtype=np.uint32), groups.counts)
    by_cell = by_key.take(sort_order(cell.take(by_key)))
    place = np.arange(len(by_cell)) - np.repeat(groups.starts, groups.counts)
    rows = groups.order.take(by_cell[place < np.repeat(kept, groups.counts)])
    rows.sort()
    return rows.astype(np.int64)


def _draw_below(left: NDArray[np.uint8], bits: np.random.SFC64, below: NDArray[np.uint8], block: Block) -> None:
    """For each slot a whole number in [0, left): the high half of ``left`` times 16 random bits.

    With 2^16 divided among `left` numbers some would be more likely than others; where the low half of the product is
    below ``2^16 % left`` the bits are drawn again, and what remains is the same for all.
    """
    suspects, low_halves = [np.zeros(0, np.int64)], [np.zeros(0, np.uint16)]
    for start in range(0, len(left), block.SIZE):
        here = left[start : start + block.SIZE]
        num = len(here)
        product, factor, wide = block.product[:num], block.factor[:num], block.left[:num]
        drawn = _sixteen_bits(bits, num)
        np.copyto(wide, here)
        np.copyto(factor, wide)
        np.copyto(product, drawn)
        np.multiply(product, factor, out=product)
        np.right_shift(product, 16, out=product)
        np.copyto(below[start : start + num], product, casting="unsafe")
        np.multiply(drawn, wide, out=drawn)  # modulo 2^16: the low half
        suspect = np.flatnonzero(np.less(drawn, wide, out=block.suspect[:num]))  # 2^16 % left is below left
        suspects.append(suspect + start)
        low_halves.append(drawn[suspect])
    again, low_half = np.concatenate(suspects), np.concatenate(low_halves)
    while (again := again[low_half < 2**16 % left[again].astype(np.uint32)]).size:
        products = _sixteen_bits(bits, again.size) * left[again].astype(np.uint32)
        below[again], low_half = products >> 16, products.astype(np.uint16)


def _uniform(bits: np.random.SFC64, num: int) -> NDArray[np.float64]:
    """Numbers in [0, 1), multiples of 2^-53."""
    drawn = bits.random_raw(num)
    drawn >>= 11
    scaled = drawn.astype(np.float64)
    scaled *= 2.0**-53
    return scaled


def _sixteen_bits(bits: np.random.SFC64, num: int) -> NDArray[np.uint16]:
    return bits.random_raw(-(-num // 4)).view(np.uint16)[:num]


def _pieces_kept(layout: Layout, kept: NDArray[np.int64], bits: np.random.SFC64) -> NDArray[np.uint8]:
    """How many points each piece keeps: all that its cell keeps, or a random share where the cell was cut."""
    pieces = kept.astype(np.uint8).take(layout.piece_cell)
    if len(layout.big.cells):
        _share_out(layout.big, kept[layout.big.cells], pieces, bits)
    return pieces


def _share_out(big: BigCells, kept: NDArray[np.int64], pieces: NDArray[np.uint8], bits: np.random.SFC64) -> None:
    """Halve the pieces of all cut cells again and again; the left half's share of a sample is hypergeometric."""
    rng = np.random.Generator(bits)
    first, stop = big.first, big.stop
    while len(first):
        whole = stop - first == 1
        pieces[big.rank[first[whole]]] = kept[whole]
        first, stop, kept = first[~whole], stop[~whole], kept[~whole]
        middle = (first + stop) // 2
        left, right = big.before[middle] - big.before[first], big.before[stop] - big.before[middle]
        share = rng.hypergeometric(left, right, kept)
        first, stop = np.concatenate([first, middle]), np.concatenate([middle, stop])
        kept = np.concatenate([share, kept - share])
