"""Metadata in arrays reads like the lists it came from, and workers that read it do not grow."""

import gc
import multiprocessing
import sys

import numpy as np
import psutil
import pytest
from hypothesis import given, strategies as st

import memkit as mk
from memkit.train.compact import CompactRecords, CompactStrings

SURROGATES = st.text(st.characters(), max_size=8)  # file names that are no UTF-8 decode to such


@given(st.lists(SURROGATES, max_size=20), st.integers(-25, 25), st.slices(20))
def test_strings_read_like_a_tuple(strings, index, cut):
    compact = CompactStrings(strings)
    assert tuple(compact) == tuple(strings)
    assert compact[cut] == tuple(strings[cut])
    if -len(strings) <= index < len(strings):
        assert compact[index] == strings[index]
    else:
        with pytest.raises(IndexError):
            compact[index]


def test_records_come_back_with_their_own_types():
    rows = [
        {"file": f"{i}.png", "label": i, "share": i / 7, "is_new": i % 2 == 0, "box": np.arange(4) + i}
        for i in range(9)
    ]
    compact = CompactRecords(rows)
    for found, row in zip(compact, rows, strict=True):
        np.testing.assert_array_equal(found.pop("box"), row.pop("box"))
        assert found == row
        assert {type(value) for value in found.values()} == {str, int, float, bool}
    assert len(compact[2:5]) == 3
    assert compact.nbytes == 9 * (5 + 8 + 8 + 8 + 1 + 32) + 8


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "no records"),
        ([{"a": 1}, {"b": 1}], r"keys \['b'\] in record 1; expected the keys of the first, \['a'\]"),
        ([{"a": 1}, {"a": 1.5}], "got a float; expected a int, as before"),
        ([{"a": 1}, {"a": True}], "got a bool"),
        ([{"a": None}], "key 'a'.*NoneType"),
        ([{"a": 2**70}], "64-bit integers"),
        ([{"a": np.zeros(2)}, {"a": np.zeros(3)}], "arrays of the same shape"),
    ],
)
def test_what_no_array_holds(rows, text):
    with pytest.raises(mk.MemkitError, match=text):
        CompactRecords(rows)
    with pytest.raises(TypeError, match="expected strings"):
        CompactStrings(["a", 1])


def read_all(names, connection):
    """In a worker: read every entry, and say how much more memory is this process's alone."""
    gc.freeze()
    process = psutil.Process()
    before = process.memory_full_info().uss
    total = sum(map(len, (names[i] for i in range(len(names)))))
    connection.send((process.memory_full_info().uss - before, total))


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and /proc/PID/smaps for USS")
def test_a_forked_worker_that_reads_does_not_copy():
    """200,000 names are 14 MiB as Python strings, and a worker that reads them copies nearly all of it."""
    names = [f"scene-{i:06d}/frame.ply" for i in range(200_000)]
    growth = {}
    for kind, held in (("list", names), ("compact", CompactStrings(names))):
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=read_all, args=(held, theirs))
        child.start()
        growth[kind], total = ours.recv()
        child.join()
        assert total == sum(map(len, names))
    assert growth["list"] > 8 * 2**20
    assert growth["compact"] < 2 * 2**20
