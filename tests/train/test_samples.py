"""Batches whose samples are not stacked: lists of samples, lists in them, dataclasses; cut between samples."""

import dataclasses
import warnings
from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memkit as mk
from memkit.train.samples import SampleList, mark_samples, unmark_samples
from memkit.train.split import count_rows, join_rows, split_batch, take_rows
from memkit.train.split_check import check_split
from tests.toys import out_of_memory


def images(number, channels=3, *, is_even=False):
    generator = torch.Generator().manual_seed(number)
    sizes = [(6, 5) if is_even else (4 + place, 5) for place in range(number)]
    return [torch.randn(channels, *size, generator=generator, dtype=torch.float64) for size in sizes]


def targets(number):
    return [{"boxes": torch.rand(2 + place, 4), "labels": torch.ones(2 + place)} for place in range(number)]


class Detector(nn.Module):
    """Images of any size in, one number for each out."""

    def __init__(self, channels=3):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(channels, 2, 3, padding=1, dtype=torch.float64)

    def forward(self, images):
        return torch.stack([self.layer(each).tanh().mean().square() for each in images])


def of_samples(model, batch):
    return model(batch).mean()


def of_columns(model, batch):
    pictures, boxes = batch
    assert len(pictures) == len(boxes)
    weights = torch.tensor([float(len(each["boxes"])) for each in boxes], dtype=torch.float64)
    return (model(pictures) * weights).mean()


def of_mapping(model, batch):
    return (model(batch["image"]) * batch["label"]).mean()


def of_dicts(model, batch):
    return model([each["image"] for each in batch]).mean()


def of_tuples(model, batch):
    pictures, labels = zip(*batch, strict=True)
    return (model(pictures) * torch.tensor(labels)).mean()


def of_labels(model, batch):
    assert len(batch["image"]) == len(batch["label"])
    labels = [float(each["id"] if isinstance(each, dict) else each or 0) for each in batch["label"]]
    return (model(batch["image"]) * torch.tensor(labels, dtype=torch.float64)).mean()


SCALARS = list(torch.arange(6.0))
BATCHES = {
    "0-dim labels, as a custom collate function leaves them": ({"image": images(6), "label": SCALARS}, of_labels),
    "0-dim labels of stacked images": (
        {"image": torch.stack(images(6, is_even=True)), "label": tuple(SCALARS), "size": [5, 6, 3]},
        of_labels,
    ),
    "0-dim arrays, of which one lacks": (
        {"image": images(6), "label": [each.numpy() for each in SCALARS[1:]] + [None]},
        of_labels,
    ),
    "dicts of 0-dim labels": ({"image": images(6), "label": [{"id": each} for each in SCALARS]}, of_labels),
    "a list of images": (images(6), of_samples),
    "a list of images of one size": (images(6, is_even=True), of_samples),
    "as many channels as images": (images(4, 4, is_even=True), of_samples),
    "images and targets": ((images(6), targets(6)), of_columns),
    "as many targets as channels": ((images(3, is_even=True), targets(3)), of_columns),
    "targets that lack an entry": (
        (images(6), [each | ({"crowd": torch.ones(2)} if k % 2 else {}) for k, each in enumerate(targets(6))]),
        of_columns,
    ),
    "tuples, as tuple(zip(*batch)) makes": ((tuple(images(6)), tuple(targets(6))), of_columns),
    "a dict of a list and labels": ({"image": images(6), "label": torch.arange(6.0)}, of_mapping),
    "a UserDict": (UserDict(image=images(6), label=torch.arange(6.0), name="a"), of_mapping),
    "a list of dicts": ([{"image": each, "name": "a"} for each in images(6)], of_dicts),
    "a list of dicts, some with masks": (
        [{"image": each} | ({"mask": each > 0} if k % 2 else {}) for k, each in enumerate(images(6))],
        of_dicts,
    ),
    "a list of tuples": ([(each, 2.0) for each in images(6, is_even=True)], of_tuples),
    "a list of objects": (
        [SimpleNamespace(x=each) for each in images(6)],
        lambda m, b: of_samples(m, [n.x for n in b]),
    ),
}


def gradient(batch, loss_fn, channels, **settings):
    model = Detector(channels)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=1.0), **settings)
    before = model.layer.weight.detach().clone()
    result = trainer.train_step(batch, loss_fn)
    return before - model.layer.weight.detach(), result


@pytest.mark.filterwarnings("ignore:.*list of entries of one kind")
@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("name", BATCHES)
def test_samples_are_never_cut_inside(name, probe):
    """The gradient is the whole's, and each sample reaches the loss as it is, once."""
    batch, loss_fn = BATCHES[name]
    channels = 4 if "as many channels" in name else 3
    number = count_rows(batch)
    expected, _ = gradient(batch, loss_fn, channels)
    for steps in (2, number):
        seen = []

        def recorded(model, part, seen=seen):
            seen.append(part)
            return loss_fn(model, part)

        found, result = gradient(batch, recorded, channels, accumulation_steps=steps, probe=probe)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
        assert sum(result.sizes) == number
        assert result.num_microbatches == steps
        assert all(type(part) is type(batch) for part in seen)


def test_a_cut_inside_would_be_seen():
    """The negative control: columns of six images of one size, which a tuple says that they are."""
    batch = images(6, 6, is_even=True)
    expected, _ = gradient(batch, of_samples, 6)

    def inside(model, part):
        return model([torch.nn.functional.pad(each, (0, 0, 0, 0, 0, 6 - len(each))) for each in part]).mean()

    found, result = gradient(tuple(batch), inside, 6, accumulation_steps=2, probe=False)
    assert result.sizes == (3, 3)
    assert not torch.allclose(found, expected)


@pytest.mark.parametrize("number", [4, 6, 8])
def test_parts_are_cut_again_between_samples(number):
    """Also a part of three images in three channels, after an out-of-memory."""
    batch = images(number, 4 if number == 8 else 3, is_even=True)
    channels = len(batch[0])
    expected, _ = gradient(batch, of_samples, channels)

    def of_one(model, part):
        if len(part) > 1:
            out_of_memory()
        return of_samples(model, part)

    with pytest.warns(mk.MemkitWarning):
        found, result = gradient(batch, of_one, channels, probe=False)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert result.sizes == (1,) * number


def test_warns_once_of_lists_resembling_columns(recwarn):
    model = Detector()
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2, probe=False
    )
    batch = [torch.randn(5, 3, 4, 4, dtype=torch.float64) for _ in range(6)]
    for _ in range(2):
        assert trainer.train_step(batch, lambda m, b: sum(m(each).mean() for each in b) / len(b)).sizes == (3, 3)
    told = [str(each.message) for each in recwarn if "list of entries of one kind" in str(each.message)]
    assert len(told) == 1
    assert "pass tuple(batch)" in told[0]
    trainer.train_step(tuple(batch), lambda m, b: m(torch.cat(b)).mean())
    assert trainer.train_step(images(6), of_samples).sizes == (3, 3)
    assert len([each for each in recwarn if "of one kind" in str(each.message)]) == 1


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A batch of two columns."""

    x: torch.Tensor
    y: torch.Tensor
    name: str = "a"


@dataclasses.dataclass(slots=True)
class Nested:
    """A batch in a batch."""

    inner: Frozen
    scale: float


X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)
COLUMNS = {
    "as a DataLoader collates": (next(iter(DataLoader(TensorDataset(X, Y), 6))), 6),
    "one column of a DataLoader": (next(iter(DataLoader(TensorDataset(X), 6))), 6),
    "two columns of one kind": ([X, X + 1], 6),
    "two columns of one kind, and two rows": ([X[:2], X[:2] + 1], 2),
    "three columns of one kind, and three rows": ([X[:3], X[:3], X[:3]], 3),
    "tokens, masks, types, labels": ([Y.view(3, 2)] * 4, 3),
    "views of each row": ({"views": [X, X + 1], "label": Y}, 6),
    "two views of two rows": ({"views": [X[:2], X[:2] + 1], "label": Y[:2]}, 2),
    "pairs of two rows in tuples": (((X[:2], X[:2]), Y[:2]), 2),
    "a frozen dataclass": (Frozen(X, Y), 6),
    "a dataclass in another, with slots": (Nested(Frozen(X, Y), 0.5), 6),
    "a named tuple": (Pair(X, [X, X]), 6),
    "texts": ([X, ("a", "b", "c", "d", "e", "f")], 6),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_stay_columns(name):
    batch, number = COLUMNS[name]
    assert mark_samples(batch) is batch
    assert count_rows(batch) == number
    parts = split_batch(batch, 2)
    assert [count_rows(part) for part, _ in parts] == [size for _, size in parts]
    assert all(type(part) is type(batch) for part, _ in parts)
    assert str(join_rows([part for part, _ in parts])) == str(batch)


@pytest.mark.parametrize("batch", [[torch.ones(4, 2), torch.zeros(2, 9)], [torch.ones(3), torch.ones(4)], (X, Y[:3])])
def test_rejects_unequal_columns(batch):
    """Nodes and edges in a list, as a DataLoader makes it of a tuple, are no two samples."""
    with pytest.raises(mk.errors.InputError, match=r"tensors with \[\d, \d\] rows"):
        count_rows((batch, 0))
    with pytest.raises(mk.errors.InputError, match=r"tensors with \[\d, \d\] rows"):
        count_rows(batch)
    sequences = [torch.ones(3, 2), torch.ones(5, 2)]
    assert count_rows(sequences) == 2


def test_marks_are_made_once_and_undone():
    batch = {"image": images(6), "target": targets(6), "path": tuple("abcdef"), "label": Y}
    marked = mark_samples(batch)
    assert isinstance(marked["image"], SampleList)
    assert mark_samples(marked) is marked
    assert unmark_samples(marked)["image"] is batch["image"]
    part = unmark_samples(take_rows(marked, 1, 3))
    assert [each.shape for each in part["image"]] == [each.shape for each in batch["image"][1:3]]
    assert part["target"] == batch["target"][1:3]
    assert part["path"] == ("b", "c")
    whole = unmark_samples(join_rows([take_rows(marked, 0, 2), take_rows(marked, 2, 6)]))
    assert whole["target"] == batch["target"]
    assert all(map(torch.equal, whole["image"], batch["image"]))


def test_rejects_ambiguous_list_when_cut():
    batch = {"image": images(3, is_even=True), "label": torch.arange(3.0)}
    model = Detector()
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=3
    )
    with pytest.raises(mk.errors.InputError, match="a list of 3 tensors of 3 rows in a batch of 3 rows"):
        trainer.train_step(batch, of_mapping)
    batch["image"] = [(each,) for each in batch["image"]]
    result = trainer.train_step(batch, lambda model, b: (model([each for (each,) in b["image"]]) * b["label"]).mean())
    assert result.sizes == (1, 1, 1)


def test_check_detects_loss_comparing_samples():
    model = Detector()

    def compares(model, batch):
        return model(batch).softmax(0)[0]

    assert check_split(model, images(8), of_samples).exact is True
    assert check_split(model, images(8), compares).exact is False


def test_a_model_in_half_precision_is_checked_in_float32():
    """The samples of a list are cast as well."""
    model = Detector().bfloat16()
    assert check_split(model, [each.bfloat16() for each in images(8)], of_samples).exact is True


def test_evaluations_and_cached_embeddings_take_lists_of_samples():
    batch, model = images(6), Detector()
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = []

    def scores(model, rows):
        sizes.append(len(rows))
        if len(rows) > 2:
            out_of_memory()
        return model(rows)

    with trainer.evaluation() as evaluate:
        found = evaluate(batch, scores)
    torch.testing.assert_close(found, model(batch).detach())
    assert max(size for size in sizes if size <= 2) <= 2

    def contrast(embeddings):
        return (embeddings.softmax(0) * torch.arange(6.0)).sum()

    contrast(model(batch)).backward()
    expected, model.layer.weight.grad = model.layer.weight.grad, None
    mk.train.cached_backward(model, batch, contrast, chunk_size=2)
    torch.testing.assert_close(model.layer.weight.grad, expected, rtol=1e-12, atol=1e-15)


def unpack_four(model, batch):
    x, *others = batch["columns"] if isinstance(batch, dict) else batch
    assert len(others) == 3, "not four"
    return model(x).mean()


@pytest.mark.parametrize(
    ("batch", "split_fn", "expected"),
    [
        ([torch.randn(8, 3) for _ in range(4)], None, "a list of 4 entries and was cut between them, as a list of"),
        ({"columns": [torch.randn(3, each) for each in (4, 5, 6, 7)], "y": torch.zeros(4)}, None, "between their entr"),
        ((torch.randn(8, 3), torch.zeros(8)), None, "All tensors of the batch are cut along dimension 0"),
        (torch.randn(6, 3), lambda batch, n: list(batch.chunk(n)), "a part that split_fn has returned"),
    ],
    ids=["list", "lists", "columns", "split_fn"],
)
def test_an_error_in_a_part_says_how_the_batch_was_cut(batch, split_fn, expected):
    model = nn.Linear(3, 2)
    options = {"accumulation_steps": 2, "split_fn": split_fn, "probe": False}
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    with warnings.catch_warnings(), pytest.raises(Exception, match="four") as caught:
        warnings.simplefilter("ignore", mk.MemkitWarning)  # a list that resembles columns
        trainer.train_step(batch, unpack_four)
    (note,) = caught.value.__notes__
    assert expected in note
    assert ("pass tuple(batch)" in note) == isinstance(batch, list)


@pytest.mark.parametrize("cause", ["no return", "no mean", "zero_grad"])
def test_an_error_of_memkit_in_a_part_says_its_cause_and_no_other(cause):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, x):
        if cause == "zero_grad":
            optimizer.zero_grad()
        loss = model(x).mean()
        return {"no return": lambda: None, "no mean": mk.Loss, "zero_grad": lambda: loss}[cause]()

    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2, probe=False)
    with pytest.raises(mk.MemkitError) as caught:
        for _ in range(2):
            trainer.train_step(torch.randn(6, 3), loss_fn)
    assert not hasattr(caught.value, "__notes__")


def test_dataclasses_in_estimates():
    model = nn.Linear(2, 1)
    batch = Frozen(torch.randn(64, 2), torch.randn(64, 1))
    found = mk.estimate_memory_usage(model, batch, lambda m, b: (m(b.x) - b.y).square().mean(), target="RTX 4090")
    same = mk.estimate_memory_usage(
        model, (batch.x, batch.y), lambda m, b: (m(b[0]) - b[1]).square().mean(), target="RTX 4090"
    )
    assert found.peak_bytes == same.peak_bytes
    assert type(batch.x) is torch.Tensor


def test_invalid_list_error_shows_how_to_write_samples():
    """Two dicts without a key in common may be inputs and targets: columns, which here have other numbers of rows."""
    batch = [{"x": torch.ones(4, 3)}, {"y": torch.ones(5, 3)}]
    with pytest.raises(mk.errors.InputError) as caught:
        split_batch(mark_samples(batch), 2)
    assert "let each be a tuple: [(each,) for each in batch]" in str(caught.value)
    assert count_rows([(each,) for each in batch]) == 2


class Mixing(nn.Module):
    """Looks from each position of a sequence at all others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, sequence):
        return torch.softmax(sequence @ self.layer(sequence).T, 1).square().sum(1)


def of_sequences(model, batch):
    return torch.stack([model(each).mean() for each in batch]).mean()


def test_two_samples_read_as_columns_always_warn():
    """A list of two tensors of one shape is what a DataLoader makes of pairs; the check sees that these are not."""
    batch = [torch.randn(8, 3, dtype=torch.float64) for _ in range(2)]
    trainer = mk.MemoryEfficientTrainingWrapper(
        model := Mixing(), torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2
    )
    with pytest.raises(mk.errors.ConfigError, match="compares or mixes the rows") as caught:
        trainer.train_step(batch, of_sequences)
    (note,) = caught.value.__notes__
    assert "a list of 2 tensors, which are treated as columns of 8 rows" in note
    assert "[(each,) for each in batch]" in note
    result = trainer.train_step([(each,) for each in batch], lambda m, b: of_sequences(m, [each for (each,) in b]))
    assert result.sizes == (1, 1)


@pytest.mark.parametrize("number", [2, 3])
def test_warns_of_images_read_as_columns_before_failure(number):
    model = Detector()
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2
    )
    with (
        pytest.warns(mk.MemkitWarning, match=rf"a list of {number} tensors.*if columns, pass tuple\(batch\)"),
        pytest.raises(RuntimeError, match="channels"),
    ):
        trainer.train_step(images(number, is_even=True), of_samples)


@pytest.mark.parametrize("number", [2, 3])
def test_warns_of_equal_shapes_without_check(number):
    """Sequences that mix their rows train as something else then; only the probe would see it."""
    batch = [torch.randn(8, 3, dtype=torch.float64) for _ in range(number)]
    model = Mixing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2, probe=False)
    with pytest.warns(mk.MemkitWarning, match=rf"a list of {number} tensors.*columns of 8 rows"):
        trainer.train_step(batch, of_sequences)
    trainer.train_step(batch, of_sequences)  # it is said once


@pytest.mark.parametrize("batch", [[X, X[:, :1]], [X[:, 0], X[:, 1]], (X, X + 1), [X, X.long()], [X[:1], X[1:2]]])
def test_splits_clear_columns_silently_without_check(batch, recwarn):
    model = nn.Linear(batch[0].shape[-1], 1) if batch[0].ndim > 1 else nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2, probe=False)
    trainer.train_step(batch, lambda m, b: m(b[0] if b[0].ndim > 1 else b[0][:, None]).square().mean())
    assert not recwarn.list


@pytest.mark.parametrize("batch", [[X, X + 1], [X.view(6, 2, 1), X.view(6, 2, 1)], (X.view(3, 2, 2), X.view(3, 2, 2))])
def test_columns_are_split_without_a_word(batch, recwarn):
    trainer = mk.MemoryEfficientTrainingWrapper(
        model := nn.Linear(batch[0].shape[-1], 1), torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2
    )
    trainer.train_step(batch, lambda m, b: (m(b[0]) + b[1].mean(1, keepdim=True)).square().mean())
    assert not recwarn.list


ONE_SAMPLE = {
    "an image and its targets": (images(1), targets(1)),
    "in tuples": (tuple(images(1)), tuple(targets(1))),
    "without boxes": (images(1), [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0)}]),
    "stacked images": (torch.ones(1, 3, 4, 4), targets(1)),
    "a list of a dict": [{"image": images(1)[0], "boxes": torch.ones(2, 4)}],
    "a dict of lists": {"image": images(1), "boxes": [torch.ones(2, 4)], "name": "a"},
}


@pytest.mark.parametrize("name", ONE_SAMPLE)
def test_a_last_batch_of_one_sample_is_one_row(name):
    """It is not refused for its columns: boxes and channels of one image."""
    batch = ONE_SAMPLE[name]
    seen = []
    trainer = mk.MemoryEfficientTrainingWrapper(
        model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2
    )

    def loss_fn(model, part):
        seen.append(part)
        return model(torch.ones(1, 1)).mean()

    assert trainer.train_step(batch, loss_fn).sizes == (1,)
    assert str(seen) == str([batch])
    assert count_rows(batch) == 1


def test_unequal_columns_are_not_a_sample():
    with pytest.raises(mk.errors.InputError, match=r"\[2, 6\] rows"):
        count_rows({"x": torch.ones(6, 2), "edges": [torch.ones(2, 9)]})


@dataclasses.dataclass
class Episode:
    tokens: list
    reward: float


ENTRIES = {
    "dicts": lambda i: {"id": i},
    "dataclasses": lambda i: Episode([i], 0.5),
    "tuples": lambda i: ("a.png", i),
    "lists of one length": lambda i: [i, i, i],
    "lists of any length": lambda i: list(range(i)),
    "dicts and nothing": lambda i: {"id": i} if i % 2 else None,
}


@pytest.mark.parametrize("make", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("kind", [list, tuple])
def test_entries_without_tensors_stay_with_their_rows(make, kind):
    rows, entries = torch.arange(8), kind(map(make, range(8)))
    batch = mark_samples({"rows": rows, "entries": entries, "names": ["a", "b", "c"]})
    parts = [unmark_samples(part) for part, _ in split_batch(batch, 3)]
    assert [type(part["entries"]) for part in parts] == [kind] * 3
    assert [each for part in parts for each in part["entries"]] == list(entries)
    assert [len(part["entries"]) for part in parts] == [len(part["rows"]) for part in parts]
    assert all(part["names"] == ["a", "b", "c"] for part in parts)


def test_columns_of_texts_are_not_samples():
    """As a collate function makes them of (image, (title, caption)), also where there are as many of both."""
    rows, columns = torch.arange(2), [("title 0", "title 1"), ("caption 0", "caption 1")]
    (first, _), (second, _) = split_batch(mark_samples([rows, columns]), 2)
    assert [first[1], second[1]] == [[("title 0",), ("caption 0",)], [("title 1",), ("caption 1",)]]


@pytest.mark.parametrize(
    "batch",
    [
        [Episode(list(range(i)), 0.1 * i) for i in range(8)],
        [(list(range(i)), 0.1 * i) for i in range(8)],
        [{"tokens": list(range(i))} for i in range(8)],
        {"tokens": [list(range(i)) for i in range(8)], "names": [f"{i}.png" for i in range(8)]},
    ],
    ids=["objects", "tuples", "dicts", "columns of lists"],
)
def test_a_batch_without_tensors_is_cut_between_its_samples(batch):
    sizes = []

    def loss_fn(model, part):
        lists = part["tokens"] if isinstance(part, dict) else part
        sizes.append(len(lists))
        assert len(part["names"] if isinstance(part, dict) else part) == len(lists)
        return model(torch.ones(len(lists), 2)).mean()

    model = nn.Linear(2, 1)
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=4, probe=False
    )
    trainer.train_step(batch, loss_fn)
    assert sizes == [2, 2, 2, 2]
