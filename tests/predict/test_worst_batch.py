"""The worst batch is that of an estimate of every batch, each kind is estimated once, the loader draws as before."""

import dataclasses
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torch_geometric.data import Batch, Data
from transformers import BertConfig, BertForSequenceClassification

import memkit as mk
from memkit.predict import worst_batch
from memkit.predict.batch_kinds import batch_kind, values_of, with_data, without_data
from memkit.predict.size_law import search_highest
from tests.helpers import assert_refused


def loss_fn(model, x):
    return model(x).square().mean()


MODEL = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))


def test_is_the_largest_of_all_estimates():
    loader = [torch.ones(rows, 16) for rows in (40, 3, 400, 7, 400, 120)]
    worst = mk.predict.find_worst_batch(loader, MODEL, loss_fn)
    peaks = [mk.estimate_memory_usage(MODEL, batch, loss_fn).peak_bytes for batch in loader]
    assert worst.number == peaks.index(max(peaks))
    assert worst.batch is loader[2]
    assert worst.estimate.peak_bytes == max(peaks)
    assert worst.num_batches == 6
    assert {number: each.peak_bytes for number, each in worst.estimates.items()} == {
        number: peaks[number] for number in (2, 5, 0, 3, 1)
    }


def test_a_wide_batch_of_few_rows_may_be_the_worst_one():
    """The most rows are not the most memory: the naive choice fails here."""

    def attend(model, x):
        return (x @ x.mT).softmax(-1).sum() * model.weight.sum()

    loader = [torch.ones(64, 8, 4), torch.ones(2, 300, 4)]
    worst = mk.predict.find_worst_batch(loader, nn.Linear(4, 4), attend)
    assert worst.number == 1
    assert loader[0].shape[0] > loader[1].shape[0]


def test_equal_batches_are_estimated_once(monkeypatch):
    counted = []
    original = worst_batch.estimate_memory_usage
    monkeypatch.setattr(
        worst_batch, "estimate_memory_usage", lambda *args, **kwargs: counted.append(1) or original(*args, **kwargs)
    )
    rows = TensorDataset(torch.ones(40, 16))
    worst = mk.predict.find_worst_batch(DataLoader(rows, batch_size=16), MODEL, lambda model, b: loss_fn(model, b[0]))
    assert (len(counted), worst.num_batches, worst.number) == (2, 3, 0)


@dataclasses.dataclass
class Graph:
    nodes: torch.Tensor


def test_kinds_see_structure_dtype_and_dataclasses():
    assert batch_kind(Graph(torch.ones(3))) == batch_kind(Graph(torch.zeros(3)))
    assert batch_kind(Graph(torch.ones(3))) != batch_kind(Graph(torch.ones(4)))
    assert batch_kind((torch.ones(3),)) != batch_kind([torch.ones(3)])
    assert batch_kind(torch.ones(3)) != batch_kind(torch.ones(3).half())
    assert batch_kind({"x": torch.ones(3), "n": 3}) != batch_kind({"x": torch.ones(3), "n": 4})
    assert batch_kind({"x": torch.ones(3), "n": None}) == batch_kind({"x": torch.ones(3), "n": None})


def test_a_view_of_a_larger_storage_is_of_another_kind():
    """The whole storage is held, and two views of one are held once."""
    whole = torch.ones(100)
    assert batch_kind(whole[:3]) != batch_kind(torch.ones(3))
    assert batch_kind((whole[:3], whole[3:6])) != batch_kind((whole[:3], torch.ones(100)[3:6]))


def graph(num_nodes: int) -> Batch:
    return Batch.from_data_list([Data(x=torch.ones(num_nodes, 16), edge_index=torch.zeros(2, 5, dtype=torch.long))])


@pytest.mark.parametrize(
    ("make", "take"),
    [
        (graph, lambda batch: batch.x),
        (lambda rows: {"x": np.ones((rows, 16), np.float32)}, lambda batch: torch.from_numpy(batch["x"])),
        (lambda rows: torch.eye(max(rows, 16))[:rows, :16].to_sparse(), lambda batch: batch.to_dense()),
    ],
)
def test_non_tensors_have_sizes(make, take):
    """A comparison of tensors in containers alone would take both batches for one kind, and the first for the worst."""
    worst = mk.predict.find_worst_batch([make(5), make(500)], MODEL, lambda model, batch: loss_fn(model, take(batch)))
    assert (worst.number, len(worst.estimates)) == (1, 2)


def test_graphs_of_equal_sizes_are_of_one_kind():
    assert batch_kind(graph(5)) == batch_kind(graph(5))


def pad_packed(model, batch):
    """Rows of several samples and their lengths: the longest decides how much is padded."""
    rows, lengths = batch
    return loss_fn(model, nn.utils.rnn.pad_sequence(rows.split(lengths.tolist()), batch_first=True))


def packed(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(sum(lengths), 16), torch.tensor(lengths)


def test_values_read_by_the_step_define_the_kind():
    """Equal shapes, another longest sample: shapes alone would take the first batch for the worst."""
    loader = [packed(50, 50), packed(99, 1), packed(50, 50), packed(60, 40)]
    worst = mk.predict.find_worst_batch(loader, MODEL, pad_packed)
    peaks = [mk.estimate_memory_usage(MODEL, batch, pad_packed).peak_bytes for batch in loader]
    assert worst.number == peaks.index(max(peaks)) == 1
    assert worst.numbers == {1: [1], 3: [3], 0: [0, 2]}


def test_unread_values_do_not_define_the_kind():
    tokens = [torch.full((4, 9), number) for number in range(3)]
    model = nn.Sequential(nn.Embedding(10, 16), MODEL)
    worst = mk.predict.find_worst_batch(tokens, model, loss_fn, optimizer="sgd")
    assert (worst.num_kinds, worst.numbers) == (1, {0: [0, 1, 2]})
    assert values_of(tokens[0]) != values_of(tokens[1])


def test_optimizer_counters_are_not_batch_reads():
    loader = [torch.ones(4, 16)] * 3
    optimizer = torch.optim.AdamW(MODEL.parameters(), foreach=False)
    assert not mk.predict.find_worst_batch(loader, MODEL, loss_fn, optimizer=optimizer).estimate.reads_values
    assert mk.estimate_memory_usage(MODEL, packed(2, 2), pad_packed).reads_values


def test_lengths_read_from_card_define_kinds():
    """A copy to the host is real: reading it is no operator on the card."""

    def loss_fn(model, batch):
        x, lengths = batch
        return model(x[: max(lengths.cpu().tolist())]).square().mean()

    loader = [packed(50, 50), packed(99, 1), packed(50, 50), packed(60, 40)]
    worst = mk.predict.find_worst_batch(loader, MODEL, loss_fn, target="RTX 3060")
    assert (worst.number, worst.num_kinds) == (1, 3)


def test_a_batch_without_data_takes_the_same_memory():
    whole = torch.ones(100, 16)
    batch = {"x": whole[:40], "lengths": torch.tensor([30, 10]), "graph": Graph(torch.ones(3).requires_grad_())}

    def step(model, batch):
        return pad_packed(model, (batch["x"], batch["lengths"])) + batch["graph"].nodes.sum()

    bare = without_data(batch)
    assert (bare["x"].device.type, bare["graph"].nodes.device.type) == ("meta", "meta")
    assert bare["lengths"].tolist() == [30, 10]
    one, other = (mk.estimate_memory_usage(MODEL, each, step) for each in (batch, bare))
    assert one.parts() == other.parts()


def test_one_batch_in_place_of_a_loader_is_told():
    batch = torch.ones(8, 4), torch.ones(8, 4)
    with pytest.raises(IndexError) as caught:
        worst_batch.find_worst_batch(
            batch, torch.nn.Linear(4, 4), lambda model, batch: model(batch[0][:4, 0, :]).mean()
        )
    assert (
        "read 2 batches, each a tensor, from its first argument. For one batch, pass [batch]."
        in caught.value.__notes__[-1]
    )


def test_data_made_for_a_batch_without():
    batch = {"x": torch.randn(4, 3, dtype=torch.float64), "y": [torch.arange(4)]}
    made = with_data(without_data(batch))
    assert batch_kind(made) == batch_kind(batch)
    assert torch.equal(made["y"][0], batch["y"][0])
    assert made["x"].isfinite().all()


@pytest.mark.slow
def test_model_reading_its_mask():
    """Each batch with another mask is a kind; with a mask of one form, each shape is, and takes the same memory."""
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    model = BertForSequenceClassification(config)
    lengths = [(9, 5), (6, 9), (7, 4), (4, 7), (3, 9)]

    def make_batch(lengths, *, is_real):
        shape = len(lengths), max(lengths)
        mask = torch.ones(shape, dtype=torch.long)
        for row, length in zip(mask, lengths if is_real else (shape[1], shape[1] - 1), strict=True):
            row[length:] = 0
        tokens = torch.zeros(shape, dtype=torch.long) if is_real else torch.empty_like(mask, device="meta")
        labels = torch.zeros(2, dtype=torch.long, device=tokens.device)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    find = partial(mk.predict.find_worst_batch, lengths, model, lambda model, batch: model(**batch).loss)
    real = find(make_batch=partial(make_batch, is_real=True))
    formal = find(make_batch=partial(make_batch, is_real=False))
    assert (real.num_kinds, formal.num_kinds) == (5, 2)
    assert (real.number, real.estimate.parts()) == (formal.number, formal.estimate.parts())
    assert formal.estimate.verdict("1GiB") == "fits"


# --------------------------------------------------------------------------------- without loading anything


class NoData(torch.utils.data.Dataset):
    def __getitem__(self, index):
        raise AssertionError("a sample was loaded")

    def __len__(self):
        return 40


LENGTHS = [random.Random(0).randrange(1, 90) for _ in range(40)]


def sized(indices):
    return torch.empty(len(indices), max(LENGTHS[each] for each in indices), 16, device="meta")


def test_a_sampler_needs_no_data():
    loader = DataLoader(NoData(), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(0))
    worst = mk.predict.find_worst_batch(loader.batch_sampler, MODEL, loss_fn, make_batch=sized)
    order = list(loader.batch_sampler)  # the generator of the sampler was put back
    assert order[worst.number] == worst.indices
    loaded = [torch.ones(sized(indices).shape) for indices in order]
    assert worst.estimate.parts() == mk.predict.find_worst_batch(loaded, MODEL, loss_fn).estimate.parts()
    assert worst.num_batches == 6


def test_the_worst_of_any_order():
    """Neighbors in the order of lengths have every length with the fullest batch; no shuffled epoch exceeds them."""
    by_length = sorted(range(40), key=LENGTHS.__getitem__)
    any_order = [by_length[start : start + 7] for start in range(34)]
    worst = mk.predict.find_worst_batch(any_order, MODEL, loss_fn, make_batch=sized)
    shuffled = BatchSampler(RandomSampler(range(40), generator=torch.Generator().manual_seed(1)), 7, drop_last=False)
    epochs = [batch for _ in range(20) for batch in shuffled]
    found = mk.predict.find_worst_batch(epochs, MODEL, loss_fn, make_batch=sized)
    assert found.estimate.peak_bytes <= worst.estimate.peak_bytes


def test_missing_batch_values_are_not_known():
    def pad_to_the_longest(model, batch):
        return loss_fn(model, batch[0].new_zeros(2, int(batch[1].max()), 16))

    def make_batch(indices):
        return torch.empty(9, 16, device="meta"), torch.empty(2, dtype=torch.long, device="meta")

    worst = mk.predict.find_worst_batch([[0, 1]], MODEL, pad_to_the_longest, make_batch=make_batch)
    assert worst.estimate.verdict("1GiB") == "not known"
    assert worst.too_large("1GiB") == [0]


# --------------------------------------------------------------------------------------- too many to estimate


def attend(model, x):
    return (x @ x.mT).softmax(-1).square().sum() * model[0].weight.sum()


@pytest.mark.slow
def test_law_chooses_estimated_kinds(monkeypatch):
    """Rows times the square of the length decide: neither the most rows nor the longest are the most memory."""
    draw = random.Random(2)
    shapes = [(length, draw.randrange(1, 40_000 // length)) for length in draw.sample(range(20, 400), 120)]
    loader = [torch.empty(rows, length, 16, device="meta") for length, rows in shapes]
    exact = mk.predict.find_worst_batch(loader, MODEL, attend)
    assert exact.number not in (shapes.index(max(shapes)), max(range(120), key=lambda each: shapes[each][1]))
    found = mk.predict.find_worst_batch(loader, MODEL, attend, num_estimates=12)
    assert (found.number, found.estimate.peak_bytes) == (exact.number, exact.estimate.peak_bytes)
    assert (len(found.estimates), found.num_kinds) == (12, 120)
    assert "108 of 120 kinds of batch were not estimated" in str(found)


def test_warns_of_kinds_the_law_does_not_exclude():
    loader = [torch.empty(rows, 16, device="meta") for rows in range(100, 140)]
    with pytest.warns(mk.MemkitWarning, match=r"may be larger.*num_estimates=None"):
        mk.predict.find_worst_batch(loader, MODEL, loss_with_a_jump, num_estimates=3)


def loss_with_a_jump(model, x):
    return model(x.repeat(1 + 9 * (len(x) % 3 == 0), 1)).square().mean()


def test_equal_shapes_with_other_values_are_warned_of():
    with pytest.warns(mk.MemkitWarning, match="batches of equal shapes may differ"):
        mk.predict.find_worst_batch([packed(50, 50), packed(99, 1)], MODEL, pad_packed, num_estimates=5)


def test_search_is_exact_if_the_law_holds():
    sizes = [(3 * k % 17 + 1, 5 * k % 23 + 1) for k in range(60)]
    peaks = [1000 + 40 * rows * length + 7 * rows * length**2 for rows, length in sizes]
    batches = [torch.empty(*each, device="meta") for each in sizes]
    found = search_highest(batches, peaks.__getitem__, 8)
    assert max(peaks[each] for each in found.places) == max(peaks)
    assert len(found.places) == 8


def test_lists_of_other_lengths_are_summed():
    batches = [[torch.empty(rows, 4, device="meta")] * count for rows, count in ((5, 9), (30, 2), (12, 12), (8, 1))]
    peaks = [100 + sum(each.numel() for each in batch) for batch in batches]
    assert 2 in search_highest(batches, peaks.__getitem__, 3).places


# ----------------------------------------------------------------------------------------------- what it says


def test_lists_batches_that_do_not_fit():
    gib = 2**28
    loader = [torch.empty(rows, 16, device="meta") for rows in (1, gib, 2, gib, 3 * gib)]
    worst = mk.predict.find_worst_batch(loader, MODEL, loss_fn, target="RTX 4090")
    assert worst.too_large("RTX 4090") == [1, 3, 4]
    assert str(worst).startswith("batch 4 of 5 is the largest; does not fit RTX 4090")
    assert "3 of 5 batches do not fit" in str(worst)
    assert "mk.prepare(model, optimizer, worst, loss_fn, budget=...)" in str(worst)


# ---------------------------------------------------------------------------------------- the loader stays put


def test_resumed_sampler_keeps_its_position():
    """A pass would begin the epoch anew, and the next one would be warned of."""
    order = mk.points.BudgetBatchSampler([len(LENGTHS)] * 40, max_points=200)
    state = order.state_dict(num_done=3)
    rest = list(order)[3:]
    order.load_state_dict(state)
    loader = mk.recipes.ResumableLoader(DataLoader(TensorDataset(torch.ones(40, 16)), batch_sampler=order))
    loader.load_state_dict(state)
    mk.predict.find_worst_batch(loader, MODEL, lambda model, batch: loss_fn(model, batch[0]))
    assert len(list(loader)) == len(rest)
    order.load_state_dict(state)
    mk.predict.find_worst_batch(order, MODEL, loss_fn, make_batch=lambda indices: torch.empty(len(indices), 16))
    assert list(order) == rest


def test_a_generator_of_its_own_is_put_back():
    data, generator = torch.arange(40.0)[:, None].expand(40, 16), torch.Generator().manual_seed(3)
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=generator)
    expected = [batch[:, 0].tolist() for batch in loader]
    generator.manual_seed(3)
    mk.predict.find_worst_batch(loader, MODEL, loss_fn)
    assert [batch[:, 0].tolist() for batch in loader] == expected


def test_loader_draws_are_unaffected():
    loader = DataLoader(TensorDataset(torch.arange(40.0)[:, None].expand(40, 16)), batch_size=16, shuffle=True)
    torch.manual_seed(3)
    expected = [batch[0][:, 0].tolist() for batch in loader]
    torch.manual_seed(3)
    mk.predict.find_worst_batch(loader, MODEL, lambda model, b: loss_fn(model, b[0]), num_batches=2)
    assert [batch[0][:, 0].tolist() for batch in loader] == expected


SAMPLER = BatchSampler(RandomSampler(range(40)), 7, drop_last=False)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: mk.predict.find_worst_batch(MODEL, [torch.ones(2, 16)], loss_fn), "InputTypeError", "the model first"),
        (lambda: mk.predict.find_worst_batch(torch.ones(2, 16), MODEL, loss_fn), "InputTypeError", "loader = [batch]"),
        (lambda: mk.predict.find_worst_batch(3, MODEL, loss_fn), "InputTypeError", "a int as loader"),
        (lambda: mk.predict.find_worst_batch([], MODEL, loss_fn), "InputError", "an iterator is exhausted"),
        (lambda: mk.predict.find_worst_batch([1], MODEL, loss_fn, num_batches=0), "ConfigError", "num_batches=1"),
        (lambda: mk.predict.find_worst_batch([1], MODEL, loss_fn, num_estimates=0), "ConfigError", "num_estimates=1"),
        (lambda: mk.predict.find_worst_batch([1], MODEL, loss_fn, make_batch=3), "InputTypeError", "make_batch"),
        (lambda: mk.predict.find_worst_batch(SAMPLER, MODEL, loss_fn), "InputTypeError", "make_batch=..."),
        (lambda: mk.predict.find_worst_batch([1], MODEL, loss_fn, gpu="T4"), "InputTypeError", "target='T4')"),
    ],
)
def test_misuse(call, kind, words):
    assert_refused(call, getattr(mk.errors, kind), words)
