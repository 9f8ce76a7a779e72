"""Packed batches are cut between scenes, and each part is what its scenes alone would have been collated into."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import memkit as mk
from memkit.points.packed import cut_evenly, split_packed
from tests.helpers import assert_refused
from tests.points.patches import collate


def rows(size, number):
    values = torch.arange(size * 2.0).reshape(size, 2) + 100 * number
    return {
        "coord": values,
        "array": values.numpy(),
        "offset": torch.tensor([size]),
        "origin_coord": torch.arange(size + 3.0) - number,
        "origin_offset": torch.tensor([size + 3]),
        "name": f"scene{number}",
        "category": torch.tensor([number]),
        "grid": 0.05,
    }


def packed(scenes):
    batch = collate([{key: value for key, value in scene.items() if key not in ("array", "grid")} for scene in scenes])
    return batch | {"array": np.concatenate([scene["array"] for scene in scenes]), "grid": 0.05}


def assert_same(part, expected):
    assert part.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(part[key], value)
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(part[key], value, rtol=0, atol=0)
        else:
            assert part[key] == value


LEVELS = dict.fromkeys(("coord", "array"), "points") | {"name": "scenes", "category": "scenes"}


@settings(max_examples=20)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 10))
def test_parts_match_collated_scenes(sizes, n):
    scenes = [rows(size, number) for number, size in enumerate(sizes)]
    levels = LEVELS | {"origin_coord": "origin_offset"}
    parts = split_packed(packed(scenes), n, belongs_to=levels)
    start = 0
    for part in parts:
        stop = start + len(part["offset"])
        assert_same(part, packed(scenes[start:stop]))
        start = stop
    assert start == len(scenes)
    assert len(parts) <= n


@settings(max_examples=40)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 8))
def test_the_largest_part_is_as_small_as_any_cut_can_make_it(sizes, n):
    def largest(borders):
        return max(sum(sizes[start:stop]) for start, stop in itertools.pairwise(borders))

    inner = range(1, len(sizes))
    all_cuts = [
        (0, *chosen, len(sizes)) for k in range(min(n, len(sizes))) for chosen in itertools.combinations(inner, k)
    ]
    borders = cut_evenly(sizes, n)
    assert largest(borders) == min(map(largest, all_cuts))
    assert len(borders) - 1 <= n
    assert all(start < stop for start, stop in itertools.pairwise(borders))


def test_parts_by_number_of_scenes_would_be_four_times_as_large():
    sizes = [900, 40, 60, 50, 30, 20]
    borders = cut_evenly(sizes, 3)
    assert [sum(sizes[a:b]) for a, b in itertools.pairwise(borders)] == [900, 200]
    assert [sum(sizes[a:b]) for a, b in itertools.pairwise([0, 2, 4, 6])] == [940, 110, 50]


def test_tensors_are_views_and_the_batch_stays():
    batch = packed([rows(size, number) for number, size in enumerate((5, 4, 7))])
    before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    parts = split_packed(batch, 3)
    assert all(part["coord"].untyped_storage().data_ptr() == batch["coord"].data_ptr() for part in parts)
    assert parts[2]["coord"].data_ptr() == batch["coord"][9:].data_ptr()
    assert_same(batch, before)
    assert split_packed(batch, 1)[0] is batch


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_accepts_scene_numbers_with_empty_scenes(dtype):
    numbers = torch.tensor([0, 0, 2, 2, 2, 3], dtype=dtype)  # scene 1 has no point
    parts = split_packed({"pos": torch.arange(6.0)[:, None], "batch": numbers, "y": torch.arange(4)}, 2)
    assert [part["batch"].tolist() for part in parts] == [[0, 0], [0, 0, 0, 1]] or [
        part["batch"].tolist() for part in parts
    ] == [[0, 0, 2, 2, 2], [0]]
    assert parts[0]["batch"].dtype == dtype
    assert torch.cat([part["y"] for part in parts]).tolist() == [0, 1, 2, 3]
    assert torch.cat([part["pos"] for part in parts]).flatten().tolist() == list(range(6))


def test_accepts_further_offsets_with_scene_numbers():
    batch = {
        "pos": torch.arange(5.0),
        "batch": torch.tensor([0, 0, 0, 1, 1]),
        "origin_pos": torch.arange(9.0),
        "origin_offset": torch.tensor([4, 9]),
    }
    parts = split_packed(batch, 2)
    assert [part["origin_offset"].tolist() for part in parts] == [[4], [5]]
    assert [part["origin_pos"].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    named = {"pos": batch["pos"], "batch": batch["batch"], "inverse": batch["origin_pos"], "all_offset": [4, 9]}
    with pytest.raises(mk.errors.InputError, match=r"all_offset, a list.*belongs_to"):
        split_packed(named, 2, belongs_to={"inverse": "all_offset"})
    named["all_offset"] = torch.tensor([4, 9])
    parts = split_packed(named, 2, belongs_to={"inverse": "all_offset"})
    assert [part["all_offset"].tolist() for part in parts] == [[4], [5]]


def test_beside_scene_numbers_a_name_alone_makes_no_offset():
    batch = {
        "batch": torch.tensor([0, 0, 0, 1, 1]),
        "z_offset": torch.rand(5),
        "id_offset": torch.arange(5),
        "yaw_offset": torch.tensor([5.0, 0.5]),
        "step_offset": torch.tensor([1, 2]),
        "track_offset": torch.tensor([5, 3]),
        "kind_offset": ["wall", "door"],
    }
    parts = split_packed(batch, 2)
    for key, value in batch.items():
        if key != "batch":
            assert [each for part in parts for each in part[key]] == list(value), key
            assert [len(part[key]) for part in parts] in ([3, 2], [1, 1])


def test_an_own_kind_of_mapping_stays_one():
    class Point(dict):
        pass

    parts = split_packed(Point(packed([rows(3, 0), rows(4, 1)])), 2)
    assert [type(part) for part in parts] == [Point, Point]


def test_every_scene_of_one_point_is_not_unclear():
    batch = {"coord": torch.rand(3, 2), "category": torch.arange(3), "offset": torch.tensor([1, 2, 3])}
    assert [part["category"].tolist() for part in split_packed(batch, 3)] == [[0], [1], [2]]


def base():
    return {"coord": torch.rand(6, 3), "offset": torch.tensor([4, 6])}


class TestRefusals:
    def refused(self, batch, *words, error=mk.errors.InputError, **options):
        assert_refused(lambda: split_packed(batch, 2, **options), error, "split_packed(batch, 2): got", *words)

    def test_rejects_ambiguous_rows(self):
        batch = {"coord": torch.rand(2, 3), "category": torch.arange(2), "offset": torch.tensor([2, 2])}
        self.refused(batch, "'coord': 2 rows; expected as many rows as one of: 2 of 'offset', 2 of 'scenes'")
        levels = {"coord": "points", "category": "scenes"}
        parts = split_packed(batch | {"offset": torch.tensor([0, 2])}, 2, belongs_to=levels)
        assert [len(part["category"]) for part in parts] == [2]  # the empty scene stays with the other: nothing to gain

    def test_rejects_unmatched_rows(self):
        batch = base() | {"inverse": torch.arange(11), "name": ["a", "b", "c", "d"]}
        self.refused(batch, "'inverse': 11 rows; ", "6 of 'offset', 2 of 'scenes'", "belongs_to={'inverse'")
        batch["origin_offset"] = torch.tensor([5, 11])
        self.refused(batch, "'inverse': 11 rows")
        levels = {"inverse": "origin_offset", "name": "all"}
        parts = split_packed(batch, 2, belongs_to=levels)
        assert [part["inverse"].tolist() for part in parts] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
        assert [part["name"] for part in parts] == [["a", "b", "c", "d"]] * 2

    @pytest.mark.parametrize("levels", [{}, {"edge_index": "all"}])
    @pytest.mark.parametrize("num_edges", [2, 5])
    def test_edges_are_sent_to_those_who_renumber_them(self, num_edges, levels):
        """There are 2 scenes: an entry of shape (2, E) would be cut between its rows."""
        batch = base() | {"edge_index": torch.zeros(2, num_edges, dtype=torch.long)}
        self.refused(
            batch, "'edge_index': 2 rows; expected no edges", "split_graphs", "renumbers them", belongs_to=levels
        )
        pairs = base() | {"bonds": np.zeros((num_edges + 2, 2), np.int64)}
        self.refused(pairs, "numbers of points, which are not renumbered", "split_graphs", "belongs_to={'bonds'")
        assert len(split_packed(pairs, 2, belongs_to={"bonds": "all"})[0]["bonds"]) == num_edges + 2

    def test_rejects_invalid_belongs_to(self):
        self.refused(base(), "'coord': 6 rows for 'scene'", belongs_to={"coord": "scene"})
        self.refused(base(), "'coord': 6 rows for 'scenes'", belongs_to={"coord": "scenes"})
        self.refused(base() | {"n": 3}, "'n': a int for 'points'", belongs_to={"n": "points"})

    def test_rejects_opaque_entries(self):
        self.refused(base() | {"sparse": object()}, "'sparse': a object")
        assert split_packed(base() | {"extra": {"a": 1}}, 2, belongs_to={"extra": "all"})[0]["extra"] == {"a": 1}

    @pytest.mark.parametrize(
        "offset",
        [
            torch.tensor([4, 3]),
            torch.tensor([-1, 6]),
            torch.tensor([4.0, 6.0]),
            torch.tensor([[4, 6]]),
            torch.tensor([4, 2], dtype=torch.uint8),
            [4, 6],
        ],
    )
    def test_rejects_invalid_offsets(self, offset):
        self.refused(base() | {"offset": offset}, "offset, a ", "never decrease")

    def test_rejects_missing_or_impossible_offsets(self):
        self.refused(
            base() | {"offset": torch.tensor([4, 5])}, "'coord': 6 rows; expected as many rows as one of: 5 of 'offset'"
        )
        self.refused(base() | {"view_offset": torch.tensor([2, 4, 5, 6])}, "'offset': 2, 'view_offset': 4")
        self.refused({"pos": torch.rand(3, 1), "batch": torch.tensor([0, 1, 0])}, "batch, a Tensor", "never decrease")
        self.refused({"coord": torch.rand(3, 3)}, "entries ['coord']; expected \"offset\"")
        self.refused([torch.rand(3, 3)], "a list; expected a mapping", error=mk.errors.InputTypeError)
