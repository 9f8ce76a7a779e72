"""Cutting batches: every row once, in order, whatever the containers."""

import contextlib
import dataclasses
import math
from collections import OrderedDict, UserDict, deque, namedtuple
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memkit as mk
from memkit.train.split import (
    Surveyor,
    copied,
    count_elements,
    count_rows,
    cut_batch,
    join_rows,
    pick_rows,
    rows_left_out,
    split_batch,
    survey,
    survey_packed,
    take_rows,
)
from tests.helpers import assert_refused, assert_same
from tests.toys import trainer_of

Pair = namedtuple("Pair", "x y")


def batch_of(rows):
    x = torch.arange(rows * 2.0).view(rows, 2)
    return {
        "x": x,
        "nested": [(torch.arange(rows), np.arange(rows * 3).reshape(rows, 3)), Pair(x + 1, None)],
        "names": [f"row {i}" for i in range(rows)],
        "scale": torch.tensor(3.0),
        "mode": "train",
    }


@given(rows=st.integers(1, 40), num_parts=st.integers(1, 50))
def test_parts_hold_every_row_once_and_are_nearly_equal(rows, num_parts):
    parts, sizes = zip(*split_batch(batch_of(rows), num_parts), strict=True)
    assert list(sizes) == [count_rows(part) for part in parts]
    assert len(parts) == min(num_parts, rows)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    whole = batch_of(rows)
    assert_same(torch.cat([part["x"] for part in parts]), whole["x"])
    torch.testing.assert_close(torch.cat([part["nested"][0][0] for part in parts]), whole["nested"][0][0])
    np.testing.assert_array_equal(np.concatenate([part["nested"][0][1] for part in parts]), whole["nested"][0][1])
    assert [name for part in parts for name in part["names"]] == whole["names"]
    assert all(part["scale"] == 3 and part["mode"] == "train" for part in parts)
    assert all(type(part["nested"][1]) is Pair and part["nested"][1].y is None for part in parts)


@given(rows=st.integers(1, 40), num_parts=st.integers(1, 50), kind=st.sampled_from([dict, UserDict]))
def test_joining_undoes_a_split(rows, num_parts, kind):
    whole = kind(batch_of(rows), texts=tuple(f"row {i}" for i in range(rows)), size=(8, 8.5), waiting=deque([None]))
    joined = join_rows([part for part, _ in split_batch(whole, num_parts)])
    assert type(joined) is kind
    assert type(joined["nested"][1]) is Pair
    assert [str(value) for value in joined.values()] == [str(value) for value in whole.values()]
    assert list(joined) == list(whole)


@pytest.mark.parametrize(
    ("other", "got"),
    [
        ({"mode": "test"}, "'train', 'test'"),
        ({"scale": torch.tensor(4.0)}, r"tensor\(3.\), tensor\(4.\)"),
        ({"names": ["row 0"]}, r"\['row 0', 'row 1'\], \['row 0'\]"),
        ({"x": np.zeros((2, 2))}, "(?s)tensor.*, array.*"),
        ({"nested": {"x": 1}}, r"(?s)\[\(tensor.*, \['x'\]"),
        ({"nested": [(1, 2), Pair(1, None)]}, "(?s)tensor.*, 1"),
    ],
)
def test_does_not_join_dissimilar_batches(other, got):
    """Taking the first one's value would lose rows or mix up what belongs to them."""
    with pytest.raises(mk.errors.InputError, match=f"{got}; expected batches of the same structure"):
        join_rows([batch_of(2), batch_of(2) | other])


@pytest.mark.parametrize(
    "values",
    [
        (math.nan, float("nan")),
        (torch.tensor(math.nan), torch.tensor(math.nan)),
        (3, 3.0),
        (3, np.int64(3)),
        (None, None),
        [torch.ones((), device="meta")] * 2,  # one and the same: nobody looks at it
    ],
)
def test_joins_equal_shared_values(values):
    rows = torch.arange(2)
    joined = join_rows([{"x": rows, "value": value} for value in values])
    assert joined["value"] is values[0]
    assert joined["x"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("mapping", [dict, OrderedDict, UserDict])
def test_mappings_keep_their_type(mapping):
    """A tokenizer's BatchEncoding is a UserDict; the parts must still be what the model expects."""
    batch = mapping(input_ids=torch.arange(6).view(3, 2), lengths=torch.tensor([2, 1, 2]))
    (first, _), (second, _) = split_batch(batch, 2)
    assert type(first) is type(second) is type(batch)
    assert first["input_ids"].tolist() == [[0, 1], [2, 3]]
    assert second["lengths"].tolist() == [2]
    assert batch["lengths"].tolist() == [2, 1, 2]


def test_texts_as_a_data_loader_collates_them():
    """default_collate makes a tuple of a column of texts; a tuple of numbers, such as a size, belongs to all rows."""
    dataset = [(torch.full((2,), float(i)), f"caption {i}") for i in range(4)]
    batch = [*next(iter(torch.utils.data.DataLoader(dataset, batch_size=4))), (8, 8, 8, 8)]
    (first, _), (second, _) = split_batch(batch, 2)
    assert first[1] == ("caption 0", "caption 1")
    assert second[1] == ("caption 2", "caption 3")
    assert first[2] == second[2] == (8, 8, 8, 8)


def test_a_tensor_alone_and_a_single_part():
    x = torch.arange(5)
    assert split_batch(x, 1)[0][0] is x
    assert [part.tolist() for part, _ in split_batch(x, 2)] == [[0, 1, 2], [3, 4]]
    assert take_rows(x, 1, 3).tolist() == [1, 2]


def test_uncuttable_batch_error_has_the_reason():
    uneven = (torch.ones(3), torch.ones(4))
    with pytest.raises(mk.errors.InputError, match=r"tensors with \[3, 4\] rows.*give each tensor") as caught:
        split_batch(uneven, 2)
    assert "split_fn" not in str(caught.value)  # not everybody who calls it has that option
    with pytest.raises(mk.errors.InputError, match=r"tensors with \[3, 4\] rows.*split_fn=.*"):
        Surveyor("my call").survey(uneven)
    assert_refused(lambda: count_rows({"scale": torch.tensor(1.0)}), mk.errors.InputError, "no tensor with rows")
    with pytest.raises(mk.errors.InputError, match="a SimpleNamespace in it"):
        count_rows((torch.ones(3), SimpleNamespace(x=torch.ones(3))))
    with pytest.raises(mk.errors.InputError, match="a Tensor in it that is sparse or nested"):
        count_rows(torch.eye(3).to_sparse())


def test_keys_tell_shapes_apart_but_not_row_counts():
    def key(batch):
        return survey(batch)[1]

    assert key(batch_of(3)) == key(batch_of(8))
    assert key(torch.ones(2, 3)) != key(torch.ones(2, 4))
    assert key(torch.ones(2, 3)) != key(torch.ones(2, 3).double())
    assert count_elements((torch.ones(2, 3), torch.ones(4), "x")) == 10


@given(
    st.lists(
        st.sampled_from(
            [
                (torch.ones(3, 2), torch.ones(3)),
                (torch.ones(4, 2), torch.ones(4)),
                (torch.ones(3, 2), torch.ones(3).double()),
                (torch.ones(3, 2), torch.ones(3), torch.tensor(1.0)),
                {"x": torch.ones(3, 2), "y": torch.ones(3)},
                {"x": torch.ones(5, 2), "names": list("abcde")},
                torch.ones(3, 2),
                torch.tensor(1.0),
                (torch.ones(3), torch.ones(4)),
                [torch.ones(3), torch.ones(4)],
                [torch.ones(3, 2), torch.ones(3)],
                (torch.ones(3, 2), torch.ones(3).to_sparse()),
                (),
                nn.Parameter(torch.ones(3, 2)),
            ]
        ),
        max_size=6,
    )
)
def test_surveys_of_batches_are_independent(batches):
    surveyor = Surveyor("my call")
    for batch in batches:
        found = []
        for look in (surveyor.survey, Surveyor("my call").survey):
            try:
                marked, size, key, tensors = look(batch)
                found.append((type(marked), size, key, list(map(id, tensors))))
            except mk.errors.InputError as error:
                found.append(str(error))
        assert found[0] == found[1]


def test_measures_packed_batches_by_their_contents():
    class Graphs:
        def __init__(self):
            self.store = {"x": torch.ones(5, 3), "ends": torch.tensor([2, 5])}

    class Hidden:
        __slots__ = ("x",)

    assert survey_packed(Graphs())[0] == 17
    assert survey_packed({"coord": torch.ones(0, 3)})[0] == 0
    with pytest.raises(mk.errors.InputError, match="a Hidden in which memkit finds no tensor"):
        survey_packed(Hidden())


def rows_of(batch, chosen):
    return {name: column[chosen] for name, column in batch.items()}


DROPPING = {  # (batch, split_fn, what it has dropped)
    "an entry": (lambda b, n: [{"x": x} for x in b["x"].chunk(n)], r"no 'y' in any part"),
    "an entry of one part": (
        lambda b, n: [rows_of(b, slice(0, 4)), {"x": b["x"][4:]}],
        r"no 'y' in each part",
    ),
    "a remainder": (lambda b, n: [rows_of(b, slice(k * 4, k * 4 + 4)) for k in range(2)], r"8 of 9 rows, in 2 parts"),
    "the last part": (lambda b, n: [rows_of(b, slice(0, 5))], r"5 of 9 rows, in 1 part;"),
}


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("name", DROPPING)
def test_error_names_entries_dropped_by_split_fn(name, probe):
    """The error does not blame the loss, and training on fewer rows is not silent."""
    split_fn, expected = DROPPING[name]
    trainer = trainer_of(nn.Linear(3, 1), accumulation_steps=2, split_fn=split_fn, probe=probe)
    batch = {"x": torch.randn(9, 3), "y": torch.randn(9, 1), "name": "a"}
    with pytest.raises(mk.errors.InputError, match=rf"split_fn\(batch, \d\): got {expected}"):
        trainer.train_step(batch, lambda m, b: mk.Loss(mean=(m(b["x"]) - b["y"]).square().mean(), count=len(b["x"])))


def test_counts_samples_dropped_by_split_fn():
    trainer = trainer_of(nn.Linear(3, 1), accumulation_steps=2, split_fn=lambda b, n: [b[:2], b[2:4]])
    batch = [torch.randn(2 + k, 3) for k in range(5)]
    with pytest.raises(mk.errors.InputError, match="4 of 5 entries"):
        trainer.train_step(batch, lambda m, b: mk.Loss(mean=m(torch.cat(b)).mean(), count=len(torch.cat(b))))


PACKED = {"x": torch.randn(9, 3), "edge_index": torch.randint(3, (2, 14)), "starts": torch.tensor([0, 3, 6, 9])}


def packed_part(first, last):
    """Some of the three samples, with four, four and six edges."""
    edges = slice((0, 4, 8, 14)[first], (0, 4, 8, 14)[last])
    return {
        "x": PACKED["x"][3 * first : 3 * last],
        "edge_index": PACKED["edge_index"][:, edges],
        "starts": torch.arange(last - first + 1) * 3,
    }


def test_detects_dropped_samples_among_edges_and_offsets():
    """Both ends of the edges are in each part, and each part has a start too many: neither has fewer rows."""
    assert len(cut_batch(PACKED, 2, size=1, split_fn=lambda b, n: [packed_part(0, 1), packed_part(1, 3)])) == 2
    for dropping in (
        [packed_part(0, 1), packed_part(1, 2)],
        [packed_part(0, 1), packed_part(2, 3)],
        [packed_part(0, 2)],
    ):
        with pytest.raises(mk.errors.InputError, match=r"got \d+ of (9|14) rows, in"):
            cut_batch(PACKED, 2, size=1, split_fn=lambda b, n, parts=dropping: parts)


class GraphsOfDgl:
    """Counts by methods, as DGL's graphs do."""

    def __init__(self, nodes, edges):
        self._counts = nodes, edges

    def num_nodes(self):
        return self._counts[0]

    def num_edges(self):
        return self._counts[1]


def test_nodes_and_edges_of_graphs_are_counted():
    whole = GraphsOfDgl(9, 14), torch.ones(3)
    for parts, expected in (
        ([(GraphsOfDgl(3, 4), torch.ones(1)), (GraphsOfDgl(6, 10), torch.ones(2))], None),
        ([(GraphsOfDgl(3, 4), torch.ones(1)), (GraphsOfDgl(5, 10), torch.ones(2))], "8 of 9 nodes"),
        ([(GraphsOfDgl(3, 4), torch.ones(1)), (GraphsOfDgl(6, 9), torch.ones(2))], "13 of 14 edges"),
    ):
        with pytest.raises(mk.errors.InputError, match=expected) if expected else contextlib.nullcontext():
            cut_batch(whole, 2, size=1, split_fn=lambda b, n, parts=parts: parts)


KEEPING = {
    "trimmed padding, and a table that all share": lambda b, n: [
        {"ids": ids[:, :3], "table": b["table"]} for ids in b["ids"].chunk(n)
    ],
    "names left out": lambda b, n: [{"ids": ids, "table": b["table"]} for ids in b["ids"].chunk(n)],
    "time first, trimmed": lambda b, n: [{"ids": ids[:2], "table": b["table"]} for ids in b["ids"].split(4, 1)],
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_split_fn_may_trim_and_share(name):
    batch = {"ids": torch.ones(8, 8), "table": torch.ones(2, 8), "name": "a"}
    parts = cut_batch(batch, 2, size=80, split_fn=KEEPING[name])
    assert len(parts) == 2


@dataclasses.dataclass
class Graph:
    nodes: dict[str, torch.Tensor]
    others: tuple[torch.Tensor, ...] = ()


class Held:
    def __init__(self, content):
        self.content = content


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda nodes: nodes, "batch['noise']"),
        (lambda nodes: {"graph": Graph(nodes)}, "batch['graph'].nodes['noise']"),
        (lambda nodes: (Held([nodes]), 3), "batch[0].content[0]['noise']"),
    ],
)
@pytest.mark.parametrize("num_kept", [6, 1])
def test_parts_may_have_their_keys_in_another_order(wrap, place, num_kept):
    """The rows that are left out are those of the same place, which the text names."""
    x, sizes = torch.randn(12, 3), torch.tensor([6, 6])
    parts = [
        wrap({"noise": part[:num_kept], "sizes": size, "x": part})
        for part, size in zip(x.chunk(2), sizes.chunk(2), strict=True)
    ]
    told = rows_left_out(wrap({"x": x, "sizes": sizes, "noise": x}), parts)
    assert told == ("" if num_kept == 6 else f"2 of 12 rows of {place}, a tensor of the shape (12, 3)")


class Short(TorchDispatchMode):
    """Memory is short: operators whose results take more bytes than that run out of it."""

    def __init__(self, most_bytes):
        super().__init__()
        self.most_bytes, self.num_failed = most_bytes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_new = all(each.alias_info is None for each in func._schema.returns)
        if is_new and isinstance(result, torch.Tensor) and result.nbytes > self.most_bytes:
            self.num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result


BANDED = (torch.arange(64)[:, None] - torch.arange(64)).abs() < 8


@pytest.mark.parametrize(
    ("matrix", "is_mask"),
    [
        (torch.ones(64, 64).tril().bool(), True),
        (torch.ones(64, 64).triu(1).bool(), True),
        (torch.zeros(64, 64).masked_fill(BANDED, -math.inf), True),
        (torch.zeros(64, 64).masked_fill(torch.ones(64, 64).tril(-1).bool(), -math.inf), True),
        (torch.ones(64, 64).bool(), False),
        (torch.zeros(64, 64), False),
        (torch.arange(64 * 64).view(64, 64) % 11 == 0, False),
        (torch.arange(64.0 * 64).view(64, 64), False),
    ],
)
@pytest.mark.parametrize("most_bytes", [2**30, 1500, 600])
def test_a_mask_is_found_also_where_memory_is_short(matrix, is_mask, most_bytes):
    with (
        Short(most_bytes) as short,
        pytest.raises(mk.errors.InputError, match="looks as if it belongs") if (is_mask) else contextlib.nullcontext(),
    ):
        assert len(split_batch({"x": matrix}, 4, num_rows=64)) == 4
    assert bool(short.num_failed) == (most_bytes < 2**30)


def test_a_batch_whose_rows_there_is_no_memory_to_look_at_is_refused():
    batch = {"x": torch.zeros(64, 64)}
    with Short(8), pytest.raises(mk.MemkitOutOfMemoryError, match="looking for a mask in a batch"):
        split_batch(batch, 4, num_rows=64)


def test_a_read_only_mapping_is_cut_into_such():
    batch = MappingProxyType({"x": torch.arange(4), "name": "text"})
    parts = [part for part, _ in split_batch(batch, 2)]
    assert [(type(each), each["name"]) for each in parts] == [(MappingProxyType, "text")] * 2
    assert_same([each["x"] for each in parts], [batch["x"][:2], batch["x"][2:]])


class Scaled(torch.Tensor):
    """Rows that are to be multiplied by one number, as image tensors carry the size of their canvas."""

    scale = 1.0


def scaled(rows=6, **attributes):
    x = torch.arange(rows * 2.0).reshape(rows, 2).as_subclass(Scaled)
    vars(x).update({"scale": 2.0} | attributes)
    return x


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_parts_have_the_attributes_of_a_tensor(needs_gradient):
    x = scaled(sizes=(1, 2, 3, 4, 5, 6)).requires_grad_(needs_gradient)
    parts = [part["x"] for part, _ in split_batch({"x": x}, 3)]
    parts += [pick_rows(x, [4, 1], num_rows=6), copied(x), join_rows(parts)]
    assert [(type(each), each.scale, each.sizes) for each in parts] == [(Scaled, 2.0, x.sizes)] * 6
    parts[0].scale = 3.0
    assert x.scale == 2.0
    plain = torch.ones(4, 1)
    plain.tag = "mine"
    assert take_rows(plain, 1, 3).tag == "mine"


def test_a_split_step_reads_the_attributes_of_a_tensor():
    found = []
    for num_parts in (1, 3):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        trainer_of(model, accumulation_steps=num_parts).train_step(
            scaled() / 10, lambda model, x: (model(x.as_subclass(torch.Tensor) * x.scale)).square().mean()
        )
        found.append(model.weight.detach())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("ids", [torch.arange(6), np.arange(6), [0, 1, 2, 3, 4, 5], {"a": torch.zeros(6, 2)}])
def test_an_attribute_that_may_have_a_row_for_each_is_refused(ids):
    x = scaled(ids=ids)
    for call in (lambda: split_batch(x, 2), lambda: pick_rows(x, [5, 4, 3, 2, 1, 0], num_rows=6)):
        assert_refused(call, mk.errors.InputError, "whose attribute 'ids' has as many", "{'x': x, 'ids': x.ids}")
    assert take_rows(x, 0, 6).ids is ids


def test_tensors_with_different_attributes_are_not_joined():
    assert_refused(lambda: join_rows([scaled(), scaled(scale=3.0)]), mk.errors.InputError, "different attributes")
    assert_refused(
        lambda: join_rows([scaled(center=torch.zeros(2)), scaled(center=torch.zeros(2))]), mk.errors.InputError
    )


def test_a_class_that_gives_parts_their_attributes_has_its_way():
    class Counting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            result = super().__torch_function__(func, types, args, kwargs)
            if isinstance(result, Counting):
                result.made_by = func.__name__
            return result

    x = torch.ones(4, 2).as_subclass(Counting)
    x.made_by, x.unit = "me", "mm"
    part = take_rows(x, 0, 2)
    assert (part.made_by, part.unit) == ("detach", "mm")
