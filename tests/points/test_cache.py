"""The cache of indexes: it never returns another scene's index, and never holds more bytes than allowed."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from memkit.points.cache import IndexCache, fingerprint
from memkit.points.grid import GridIndex
from memkit.points.sampler import GridAwareSampler
from tests.points.scenes import in_cube


def is_of(index, coords, size):
    return (index.cells[index.cell_of_point()] == np.floor(np.float64(coords) / size)).all()


def test_the_same_scene_is_found_again():
    sampler, coords = GridAwareSampler(), in_cube(2000)
    index = sampler.index(coords, 5.0)
    assert sampler.index(torch.from_numpy(coords.copy()), 5.0) is index
    named = sampler.index(coords, 5.0, key="a")
    assert sampler.index(coords, 5.0, key="a") is named
    assert len(sampler.cache) == 2


def test_distinguishes_scenes_of_equal_size():
    """The source's cache knows a scene by its numbers of points and cells: a permutation has both."""
    sampler, coords = GridAwareSampler(), in_cube(2000)
    for other in (coords[::-1], coords + np.float32(1e-3), coords.astype(np.float64)):
        assert sampler.index(coords, 5.0).num_points == sampler.index(other, 5.0).num_points
        assert sampler.index(coords, 5.0) is not sampler.index(other, 5.0)
        assert is_of(sampler.index(other, 5.0), other, 5.0)


def test_detects_in_place_change_of_one_number():
    sampler, coords = GridAwareSampler(), torch.from_numpy(in_cube(2000))
    before = sampler.index(coords, 5.0)
    coords[777, 1] += 50
    assert sampler.index(coords, 5.0) is not before
    assert is_of(sampler.index(coords, 5.0), coords.numpy(), 5.0)


def test_a_key_never_gives_another_scene_or_grid():
    sampler, coords = GridAwareSampler(), in_cube(2000)
    index = sampler.index(coords, 5.0, key=17)
    others = [
        sampler.index(coords[:1999], 5.0, key=17),
        sampler.index(coords[::-1], 5.0, key=17),
        sampler.index(coords, 4.0, key=17),
        sampler.index(coords, (5.0, 5.0, 4.0), key=17),
        sampler.index(coords, 5.0, key=17, origin=1.0),
        sampler.index(coords, 5.0, key=17, offsets=torch.tensor([7, 2000])),
        sampler.index(coords, 5.0, key="17"),
    ]
    assert all(other is not index for other in others)
    assert is_of(others[1], coords[::-1], 5.0)
    assert sampler.index(coords, (5.0, 5.0, 5.0), key=17, origin=(0, 0, 0)).cells.tolist() == index.cells.tolist()


def test_the_least_recently_used_goes_when_bytes_run_out():
    scenes = [in_cube(1000, seed) for seed in range(5)]
    one = GridIndex.from_coords(scenes[0], 10.0).nbytes
    sampler = GridAwareSampler(cache_bytes=int(3.5 * one))
    first = sampler.index(scenes[0], 10.0)
    for number in (1, 2, 0, 3):
        sampler.index(scenes[number], 10.0)
    assert sampler.cache.nbytes <= 3.5 * one
    assert sampler.index(scenes[0], 10.0) is first
    kept = {id(each) for each in sampler.cache._kept.values()}
    assert id(sampler.index(scenes[2], 10.0)) in kept
    assert id(sampler.index(scenes[1], 10.0)) not in kept
    assert len(GridAwareSampler(cache_bytes=0).cache) == 0


def test_oversized_index_is_not_cached():
    small = np.zeros((3, 3))
    sampler = GridAwareSampler(cache_bytes="1KiB")
    kept = sampler.index(small)
    assert is_of(sampler.index(in_cube(1000), 10.0), in_cube(1000), 10.0)
    assert sampler.index(small) is kept  # it was not driven out
    assert len(sampler.cache) == 1


def test_offsets_are_not_taken_for_a_key():
    """`GridIndex.from_coords` has them in this place."""
    with pytest.raises(TypeError):
        GridAwareSampler().index(in_cube(10), 5.0, torch.tensor([4, 10]))


def test_concurrent_threads_share_one_index():
    cache, barrier, made = IndexCache(10**9), threading.Barrier(4), []

    def make():
        barrier.wait()  # all four are building
        made.append(GridIndex.from_cells([1, 2]))
        return made[-1]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: cache.get("a", make), range(4)))
    assert len(made) == 4
    assert len({id(each) for each in found}) == 1


def test_a_cache_arrives_empty():
    cache = IndexCache(1000)
    cache.get("a", lambda: GridIndex.from_cells([1]))
    arrived = pickle.loads(pickle.dumps(cache))
    assert (len(cache), len(arrived), arrived.max_bytes) == (1, 0, 1000)


def test_a_fingerprint_sees_shape_and_dtype():
    zeros = np.zeros(12, np.float32)
    kinds = [zeros, zeros.reshape(4, 3), zeros.reshape(3, 4), zeros.view(np.int32), np.zeros(6), zeros[:0]]
    assert len({fingerprint(each) for each in kinds}) == len(kinds)
    assert fingerprint(np.asfortranarray(zeros.reshape(4, 3))) == fingerprint(zeros.reshape(4, 3))
