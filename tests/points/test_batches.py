"""Batches within a budget: every sample once, on every rank equally many, the same again after a stop, and full."""

import ast
import functools
import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from memkit.errors import ConfigError, FileFormatError, InputError, InputTypeError
from memkit.points.batches import BudgetBatchSampler
from tests.helpers import assert_refused

MODULES = ("argparse", "ast", "dataclasses", "datetime", "enum", "inspect", "ipaddress", "statistics", "turtle")


@functools.cache
def syntax_trees():
    """Sizes of real graphs: nodes and edges of the syntax tree, and bytes of the text, of functions of Python's own."""
    sizes = {"points": [], "edges": [], "bytes": []}
    for module in MODULES:
        lines = (Path(ast.__file__).parent / f"{module}.py").read_bytes().splitlines(keepends=True)
        for function in ast.walk(ast.parse(b"".join(lines))):
            if isinstance(function, ast.FunctionDef):
                nodes = list(ast.walk(function))
                sizes["points"].append(len(nodes))
                # Two ways along the tree, and one to the next use of the same name.
                names = [node.id for node in nodes if isinstance(node, ast.Name)]
                sizes["edges"].append(2 * (len(nodes) - 1) + len(names) - len(set(names)))
                sizes["bytes"].append(sum(map(len, lines[function.lineno - 1 : function.end_lineno])))
    return sizes


def next_fit(columns, budgets, order):
    """The naive way: samples in shuffled order, a new batch whenever the next one does not fit."""
    batches, used = [[]], np.zeros(len(budgets))
    for sample in order:
        used = used + columns[:, sample]
        if (used > budgets).any():
            batches.append([])
            used = columns[:, sample]
        batches[-1].append(sample)
    return batches


@given(
    sizes=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 50)), max_size=60),
    max_points=st.integers(30, 200),
    max_edges=st.integers(50, 200),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 2**20),
)
def test_every_sample_once_and_no_budget_exceeded(sizes, max_points, max_edges, seed, epoch):
    points, edges = [a for a, _ in sizes], [b for _, b in sizes]
    batches = BudgetBatchSampler(
        {"edges": edges, "points": points}, max_points=max_points, max_edges=max_edges, seed=seed
    )
    batches.set_epoch(epoch)
    found = list(batches)
    assert len(found) == len(batches)
    assert sorted(itertools.chain(*found)) == list(range(len(sizes)))
    for batch in found:
        assert batch
        assert sum(points[each] for each in batch) <= max_points
        assert sum(edges[each] for each in batch) <= max_edges
    batches.set_epoch(epoch)
    assert found == list(batches)
    if found:
        fill = {"points": sum(points) / max_points / len(found), "edges": sum(edges) / max_edges / len(found)}
        assert batches.fill == pytest.approx(fill)


@given(
    sizes=st.lists(st.integers(0, 100), min_size=30, max_size=80),
    budget=st.integers(200, 500),
    num_replicas=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_ranks_share_an_epoch(sizes, budget, num_replicas, epoch):
    ranks = [BudgetBatchSampler(sizes, budget, num_replicas=num_replicas, rank=rank) for rank in range(num_replicas)]
    for each in ranks:
        each.set_epoch(epoch)
    found = [list(each) for each in ranks]
    assert {len(each) for each in found} == {len(ranks[0])}
    batches = list(itertools.chain(*itertools.chain(*found)))
    assert sorted(batches) == list(range(len(sizes)))
    assert all(sum(sizes[each] for each in batch) <= budget for batch in itertools.chain(*found))


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=60), stop=st.integers(0, 60), epoch=st.integers(0, 3))
def test_resumes_in_the_middle(sizes, stop, epoch):
    batches = BudgetBatchSampler(sizes, 100, seed=3)
    batches.set_epoch(epoch)
    whole = list(batches)
    batches.set_epoch(epoch)
    stop = min(stop, len(whole))
    head = list(itertools.islice(batches, stop))
    state = batches.state_dict()
    assert state == batches.state_dict(num_done=stop)

    other = BudgetBatchSampler(sizes, 100, seed=0)
    other.load_state_dict(state)
    assert other.state_dict() == state  # saved again before anything came
    other.set_epoch(epoch)  # as a loop over epochs does
    assert head + list(other) == whole
    other.set_epoch(epoch)
    assert list(other) == whole  # the epoch after that starts at its beginning
    other.set_epoch(epoch + 1)
    batches.set_epoch(epoch + 1)
    assert list(other) == list(batches)


def test_epochs_and_seeds_differ_and_repeat():
    sizes = syntax_trees()["points"]
    batches = BudgetBatchSampler(sizes, 5000, seed=1)
    first = list(batches)
    batches.set_epoch(1)
    second = list(batches)
    pairs = [
        {frozenset(pair) for batch in each for pair in itertools.combinations(batch, 2)} for each in (first, second)
    ]
    expected = len(pairs[0]) * len(pairs[1]) / (len(sizes) * (len(sizes) - 1) / 2)
    assert len(pairs[0] & pairs[1]) < 1.5 * expected  # who shares a batch in both epochs: as many as by chance
    batches.set_epoch(0)
    assert list(batches) == first
    assert list(BudgetBatchSampler(sizes, 5000, seed=2)) != first


def test_large_and_small_samples_mix():
    """A batch's samples are as large as any: packing by descending size, the usual way to fill, would fail here."""
    points = np.array(syntax_trees()["points"])
    usual = points[points <= np.quantile(points, 0.9)]
    batches = BudgetBatchSampler(usual, 2000)
    spread = np.mean([np.std(np.log(usual[batch])) for batch in batches]) / np.std(np.log(usual))
    by_size = [list(each) for each in np.array_split(np.argsort(-usual), len(batches))]
    assert np.mean([np.std(np.log(usual[batch])) for batch in by_size]) / np.std(np.log(usual)) < 0.2
    assert spread > 0.9


@pytest.mark.parametrize(
    ("budgets", "least"),
    [
        ({"max_points": 3000}, 0.98),
        ({"max_points": 1500, "max_edges": 3000, "max_bytes": "10kB"}, 0.9),
    ],
)
def test_fuller_than_the_naive_way(budgets, least):
    names = [name.removeprefix("max_") for name in budgets]
    columns = np.array([syntax_trees()[name] for name in names])
    limits = np.array([10_000 if value == "10kB" else value for value in budgets.values()])
    keep = (columns <= limits[:, None]).all(axis=0)
    columns = columns[:, keep]
    fills, naive = [], []
    batches = BudgetBatchSampler(dict(zip(names, columns, strict=True)), **budgets)
    for epoch in range(3):
        batches.set_epoch(epoch)
        fills.append(max(batches.fill.values()))
        order = np.random.default_rng(epoch).permutation(columns.shape[1])
        naive.append((columns.sum(axis=1) / limits).max() / len(next_fit(columns, limits, order)))
    assert min(fills) > least
    assert min(fills) > max(naive) + 0.02


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_a_loader(num_workers):
    sizes = torch.tensor(syntax_trees()["points"])
    batches = BudgetBatchSampler(sizes, 5000)
    loader = DataLoader(sizes, batch_sampler=batches, num_workers=num_workers)
    totals = [int(batch.sum()) for batch in loader]
    assert max(totals) <= 5000
    assert sum(totals) == sizes.sum()
    assert len(totals) == len(loader)


def test_error_names_sample_above_budget():
    with pytest.raises(InputError, match=r"900 edges in sample 2; 1 samples exceed.*max_edges=900 or more"):
        BudgetBatchSampler({"points": [1, 2, 3], "edges": [5, 6, 900]}, max_points=10, max_edges=100)


TWO_RANKS = {"num_replicas": 2, "rank": 0}


@pytest.mark.parametrize(
    ("sizes", "budgets", "options", "error", "words"),
    [
        ([10, 10, 10], (10,), TWO_RANKS, InputError, "3 samples, which give only 3 batches of one"),  # not equally many
        ([1], (10,), TWO_RANKS, InputError, "1 samples"),
        ([1, 2], (), {}, ConfigError, "no budget"),
        ([1, 2], (5, 6), {}, ConfigError, "max_points, max_edges"),
        ({"points": [1]}, (5, 6), {}, ConfigError, "sizes of points, but max_points, max_edges"),
        ({"points": [1], "edges": [1, 2]}, (5, 6), {}, InputError, "1 sizes of points and 2 sizes of edges"),
        ([1, -2], (5,), {}, InputError, "minimum -2"),
        ([1.5], (5,), {}, InputError, "float64"),
        (["a"], (5,), {}, InputTypeError, "dtype"),
        ([0], (0,), {}, ConfigError, "max_points=0"),
        ([0], (1e6,), {}, ConfigError, "got max_points=1000000.0; expected a whole number, 1 or more"),
        ([1], (5,), {"rank": 1}, ConfigError, "rank"),
        ([1], (5,), {"num_replicas": 0}, ConfigError, "num_replicas"),
        ([1], (5,), {"seed": -1}, ConfigError, "seed"),
    ],
)
def test_refuses(sizes, budgets, options, error, words):
    assert_refused(lambda: BudgetBatchSampler(sizes, *budgets, **options), error, words)


def test_a_budget_may_be_one_of_numpy():
    plain, given = BudgetBatchSampler([1, 2, 3], 4), BudgetBatchSampler([1, 2, 3], np.int64(4))
    assert given.state_dict() == plain.state_dict()


def test_resumes_with_workers():
    """A DataLoader with workers calls iter() twice: the first iterator must not use the place up."""
    order = BudgetBatchSampler(range(1, 30), max_points=40, seed=0)
    whole = list(order)
    loader = DataLoader(range(29), batch_sampler=order, collate_fn=list, num_workers=1)
    order.load_state_dict(order.state_dict(num_done=4))
    assert list(loader) == whole[4:]
    order.set_epoch(0)
    assert list(loader) == whole


def test_refuses_another_packing():
    state = BudgetBatchSampler([1, 2, 3], max_points=5).state_dict()
    for other in (BudgetBatchSampler([1, 2, 4], max_points=5), BudgetBatchSampler([1, 2, 3], max_points=6)):
        assert_refused(partial(other.load_state_dict, state), FileFormatError, "made of", "budgets")
    with pytest.raises(FileFormatError, match="got version 5, made of"):
        BudgetBatchSampler([1, 2, 3], max_points=5).load_state_dict(state | {"version": 5})


def test_state_is_plain():
    state = BudgetBatchSampler(torch.tensor([1, 2, 3]), max_bytes="5kB").state_dict()
    assert {type(value) for value in state.values()} <= {int, str}
