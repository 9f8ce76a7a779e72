"""A part of what `benchmarks/cases/voxel_augmentation.py` tries: its result file says how many inputs it tried."""

from benchmarks.cases.voxel_augmentation import fuzz
from benchmarks.result import read_result


def test_every_input_gives_lawful_result_or_typed_error():
    found = fuzz(1000, seed=1)
    assert found["anything_else"] == []
    assert found["counts"]["a result"] > 400
    assert {"ConfigError", "InputError", "InputTypeError", "FileFormatError"} <= found["counts"].keys()


def test_the_recorded_run_was_large_enough():
    figures = read_result("voxel_augmentation")["figures"]
    assert figures["fuzz"]["num_inputs"] >= 50_000
    assert figures["fuzz"]["anything_else"] == []
    for volume in figures["costs"].values():
        for way in ("memkit", "memkit, sparse"):
            assert volume["ways"][way]["peak_of_input"] <= 1.5
