"""Which points are kept: every set of the wanted size is equally likely, cells do not know of each other.

Cells of one size are replicates of one experiment. The same tests are given two wrong samplers: the first k points of
each cell, which is what the source project's vectorized code keeps, and one permutation for all cells of a size.
"""

import math

import numpy as np
import pytest
from scipy.stats import chi2, kstest

from memkit.points import passes
from memkit.points.bits import WordBlocks, draw_key, redraw_bits
from memkit.points.grid import GridIndex
from memkit.points.layout import MOST
from memkit.points.sampler import GridAwareSampler

LEAST_P = 1e-5
CASES = [
    (2, 1),
    (3, 1),
    (4, 2),
    (5, 2),
    (6, 3),
    (7, 3),
    (13, 6),
    (20, 9),
    (33, 16),
    (100, 45),
    (127, 60),
    (128, 60),
    (300, 130),
]


def with_memkit(num_cells, size, num_kept, seed):
    """(cells, size) bool: which points of each cell are kept. Cells are interleaved, so that rows are not cells."""
    index = GridIndex.from_cells(np.tile(np.arange(num_cells), size))
    sample = GridAwareSampler(num_kept / size, seed=seed).sample_half_density(index)
    kept = np.zeros(num_cells * size, bool)
    kept[sample.indices.numpy()] = True
    return kept.reshape(size, num_cells).T


def first_k(num_cells, size, num_kept, seed):
    return np.tile(np.arange(size) < num_kept, (num_cells, 1))


def shared_permutation(num_cells, size, num_kept, seed):
    return np.tile(np.random.default_rng(seed).permutation(size) < num_kept, (num_cells, 1))


def chi_square_p(observed, expected):
    """Pearson's test; outcomes that are rarer than 5 are put together."""
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    return chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1)


def pattern_p(kept, num_kept, columns=6):
    """All patterns of the first points of a cell (of all points, in small cells) have their probability."""
    num_cells, size = kept.shape
    width = min(columns, size)
    codes = kept[:, :width] @ (1 << np.arange(width))
    ones = np.array([code.bit_count() for code in range(1 << width)])
    ways = [
        math.comb(size - width, num_kept - num) if num <= num_kept and num_kept - num <= size - width else 0
        for num in ones.tolist()
    ]
    probability = np.array([way / math.comb(size, num_kept) for way in ways])
    observed = np.bincount(codes, minlength=1 << width)
    if observed[probability == 0].any():
        return 0.0
    return chi_square_p(observed[probability > 0], num_cells * probability[probability > 0])


def inclusion_z(kept, num_kept):
    """The largest deviation of a point's, and of a pair's, number of inclusions, in standard deviations."""
    num_cells, size = kept.shape
    together = kept.T.astype(np.float64) @ kept
    p = num_kept / size
    single = np.abs(np.diag(together) - num_cells * p).max() / np.sqrt(num_cells * p * (1 - p))
    p = num_kept * (num_kept - 1) / (size * (size - 1))
    if not 0 < p < 1:
        return single, 0.0
    pairs = together[np.triu_indices(size, 1)]
    return single, np.abs(pairs - num_cells * p).max() / np.sqrt(num_cells * p * (1 - p))


def neighbors_p(kept):
    """The points kept in one cell are independent of those kept in the next: patterns of three points each."""
    width = min(3, kept.shape[1])
    codes = kept[:, :width] @ (1 << np.arange(width))
    table = np.bincount((codes[0::2] << width) + codes[1::2], minlength=4**width).reshape(2**width, 2**width)
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    if table.size == 1:
        return 0.0  # all cells alike
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    degrees = (table.shape[0] - 1) * (table.shape[1] - 1)
    return chi2.sf(((table - expected) ** 2 / expected).sum(), degrees)


def failures(sampler, num_cells, seed=0):
    """The tests that a sampler fails, over all sizes of cells."""
    failed = set()
    for size, num_kept in CASES:
        cells = max(2000, min(num_cells, 20 * num_cells // size)) // 2 * 2
        kept = sampler(cells, size, num_kept, seed)
        assert (kept.sum(axis=1) == num_kept).all()
        single, pair = inclusion_z(kept, num_kept)
        failed |= {"patterns"} if pattern_p(kept, num_kept) < LEAST_P else set()
        failed |= {"inclusion"} if single > 5.5 else set()
        failed |= {"pairs"} if pair > 6 else set()  # up to 44,850 pairs in a cell
        failed |= {"neighbors"} if neighbors_p(kept) < LEAST_P else set()
    return failed


@pytest.mark.parametrize("num_cells", [10_000, pytest.param(300_000, marks=pytest.mark.slow)], ids=["default", "slow"])
def test_every_set_is_equally_likely(num_cells):
    assert failures(with_memkit, num_cells) == set()


@pytest.mark.parametrize("wrong", [first_k, shared_permutation])
def test_the_samplers_of_the_source_fail_all_of_these(wrong):
    assert failures(wrong, 10_000) == {"patterns", "inclusion", "pairs", "neighbors"}


@pytest.mark.parametrize("num_runs", [60, pytest.param(1000, marks=pytest.mark.slow)], ids=["default", "slow"])
def test_p_values_are_uniform(num_runs):
    """Over many seeds; a p-value that is always near 1 is as suspicious as one near 0."""
    patterns, neighbors, biased = [], [], []
    for seed in range(num_runs):
        for size, num_kept in ((4, 2), (6, 3), (260, 120)):
            kept = with_memkit(2000, size, num_kept, seed)
            patterns.append(pattern_p(kept, num_kept, columns=4))
            neighbors.append(neighbors_p(kept))
        likelier = np.random.default_rng(seed).random((2000, 4)) - [0.02, 0, 0, 0]  # the first point, by a little
        biased.append(pattern_p(likelier.argsort(1).argsort(1) < 2, 2))
    assert kstest(patterns, "uniform").pvalue > 1e-4
    assert kstest(neighbors, "uniform").pvalue > 1e-4
    if num_runs > 100:
        assert kstest(biased, "uniform").pvalue < 1e-4


def test_one_point_of_a_cell_is_any_of_its_points():
    sizes = np.tile([1, 2, 3, 7, 200, 305], 5000)
    index = GridIndex.from_cells(np.repeat(np.arange(len(sizes)), sizes))
    starts = index.counts.cumsum() - index.counts
    rows = GridAwareSampler().sample_single_per_grid(index).indices.numpy()
    biased = starts + np.random.default_rng(0).integers(0, 305, len(sizes)) % sizes  # as Pointcept's GridSample does

    def least_p(rows):
        places = {size: (rows - starts)[sizes == size] for size in (2, 3, 7, 200)}
        observed = {size: np.bincount(each, minlength=size) for size, each in places.items()}
        return min(chi_square_p(each, np.full(size, each.sum() / size)) for size, each in observed.items())

    assert least_p(rows) > LEAST_P
    assert least_p(biased) < LEAST_P


class EveryWord:
    """WordBlocks that give each 16-bit number once."""

    SIZE = 2**14

    def start(self, num, seed):
        pass

    def next(self, num):
        return np.random.default_rng(0).permutation(2**16).astype(np.uint16).view(np.uint64)


def test_numbers_below_left_are_equally_likely(monkeypatch):
    """Each is made of equally many of the 2^16 numbers. The others are drawn again: here they become ``left - 1``."""
    monkeypatch.setattr(passes, "redraw_bits", lambda slots, _: np.full(len(slots), 2**55 - 1))
    below, unequal = np.empty(2**16, np.uint8), 0
    for left in range(2, MOST + 1):
        bounds = np.array([0, *[2**16] * left])  # all points have `left` points left
        passes.draw_below(bounds, draw_key((0,)), below, EveryWord())
        observed = np.bincount(below, minlength=left)
        assert len(observed) == left
        assert (observed[:-1] == 65535 // left).all()
        assert observed[-1] == 65535 // left + 65535 % left + 1
        unequal += len(set(np.bincount((np.arange(2**16) * left) >> 16).tolist())) > 1  # without drawing again
    assert unequal == MOST - 1 - 6  # all that are no power of 2


def test_the_last_point_of_a_cell_needs_no_bits():
    below = np.full(7, 9, np.uint8)
    passes.draw_below(np.array([0, 7]), draw_key((0,)), below, EveryWord())
    assert not below.any()


@pytest.mark.parametrize("drawn", [0, 1, 2**31 - 1, 2**32 - 1])
def test_the_place_in_a_cell_is_equally_likely(drawn):
    """32 bits times the count: the numbers whose low half would favor some places are drawn again."""
    words, counts, key = WordBlocks(), np.array([1, 2, 3]), draw_key((0,))
    words.numbers = lambda num, _: np.full(num, drawn, np.uint32)
    places = passes.choose_places(counts, key, words)
    favored = (drawn * counts) % 2**32 < 2**32 % counts
    expected = np.where(favored, redraw_bits(np.arange(3), key) * counts.astype(object) >> 55, drawn * counts >> 32)
    assert places.tolist() == expected.tolist()
    assert favored.tolist() == [False, False, drawn == 0]


def test_the_last_piece_of_a_cut_cell_is_drawn_like_the_first():
    """A cell of 70,000 points has 275 pieces. The share of each is hypergeometric."""
    index = GridIndex.from_cells(np.zeros(70_000, np.int64))
    sampler = GridAwareSampler(0.4)
    samples = [sampler.sample_half_density(index) for _ in range(200)]
    parts = np.stack([np.bincount(sample.indices.numpy() // 7000, minlength=10) for sample in samples])
    assert (parts.sum(axis=1) == 28_000).all()
    scaled = ((parts - 2800) ** 2).sum(axis=1) / (70_000 * 0.24 * 7000 / 69_999)  # tends to chi-square with 9 degrees
    assert kstest(scaled, chi2(9).cdf).pvalue > LEAST_P
    fixed = np.full((200, 10), 2800)  # a fixed share for each piece: no spread at all
    assert kstest(((fixed - 2800) ** 2).sum(axis=1).astype(float), chi2(9).cdf).pvalue < LEAST_P
