"""Sizes: accepted texts, refused texts, and formatting."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import memkit as mk
from memkit._core.units import parse_budget

CLOUD = torch.zeros(2, 3)
FACTORS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@given(number=st.integers(0, 10**6), unit=st.sampled_from(sorted(FACTORS)), space=st.sampled_from(["", " "]))
def test_whole_sizes_are_exact(number, unit, space):
    assert mk.memory.parse_bytes(f"{number}{space}{unit}") == number * FACTORS[unit]
    assert mk.memory.parse_bytes(f" {number}{space}{unit.lower()} ") == number * FACTORS[unit]


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        ("0.1GB", 100_000_000),
        ("1.5MiB", 1_572_864),
        ("1_000B", 1000),
        ("24G", 24 * 10**9),
        ("512m", 512_000_000),
        (np.int64(7), 7),
        (0, 0),
        ("0.7B", 0),
    ],
)
def test_parses_sizes(value, num_bytes):
    assert mk.memory.parse_bytes(value) == num_bytes


def test_gigabyte_is_not_gibibyte():
    assert mk.memory.parse_bytes("24GiB") - mk.memory.parse_bytes("24GB") == 1_769_803_776


@pytest.mark.parametrize(
    "value", ["24", "24 gigs", "GiB", "", "1e3MB", "-1GB", "nanGB", "24GiB free", "٣GB", "1.MB", ".5GB", -1]
)
def test_rejects_invalid_sizes(value):
    with pytest.raises(mk.errors.InputError, match=r"budget=.*expected (a number and a unit|zero bytes or more)"):
        mk.memory.parse_bytes(value, name="budget")


@pytest.mark.parametrize(
    ("read", "fix"),
    [
        (lambda: mk.memory.parse_bytes(24, is_large=True), "write '24GiB', or '24B' if bytes are meant."),
        (lambda: mk.memory.parse_bytes(500, is_large=True), "write '500GiB', or '500B' if bytes are meant."),
        (lambda: mk.ChunkedProcessor(abs, memory_budget=500), "write '500GiB', or '500B' if bytes are meant."),
        (lambda: mk.train.offload_activations(to="disk", budget=500), "write '500GiB', or '500B' if bytes are meant."),
        (
            lambda: mk.voxel.nearest_points(CLOUD, CLOUD, memory_budget=500),
            "write '500GiB', or '500B' if bytes are meant.",
        ),
        (lambda: parse_budget(24, 2**34), "write '24GiB', or '24B' if bytes are meant."),
        (lambda: mk.memory.parse_bytes(614400, is_large=True), "write '614400B' if bytes are meant."),
        (lambda: mk.memory.parse_bytes("614_400"), "write '614_400B' if bytes are meant."),
        (lambda: parse_budget(24.0, 2**34), "pass '24GiB'."),
        (lambda: parse_budget(614400.0, 2**34), "pass 0.9 for 90%, or a size such as '22GiB'."),
        (lambda: parse_budget("90%", 2**34), "pass 0.9."),
        (lambda: parse_budget(-0.5, 2**34), "pass 0.9 for 90%, or a size such as '22GiB'."),
    ],
)
def test_a_number_of_gigabytes_is_not_taken_for_bytes(read, fix):
    with pytest.raises(ValueError, match=r"24|90|-0\.5|614_?400|500") as caught:
        read()
    assert caught.value.fix == fix


def test_small_sizes_of_devices_have_a_unit():
    assert mk.memory.parse_bytes("24B", is_large=True) == 24
    assert mk.memory.parse_bytes(2**20, is_large=True) == 2**20
    assert mk.memory.parse_bytes(0, is_large=True) == 0


@pytest.mark.parametrize("value", [True, 1.5, float("nan"), None, b"24GB", [24]])
def test_rejects_sizes_of_wrong_type(value):
    with pytest.raises(mk.errors.InputTypeError, match=f"a {type(value).__name__}; expected bytes as an int"):
        mk.memory.parse_bytes(value)


@given(st.text())
def test_any_text_is_a_size_or_a_typed_error(text):
    with contextlib.suppress(mk.errors.InputError):
        assert mk.memory.parse_bytes(text) >= 0


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (24_824_987_648, "23.12 GiB"),
        (-3 * 2**39, "-1.50 TiB"),
    ],
)
def test_formats_bytes(num_bytes, text):
    assert mk.memory.format_bytes(num_bytes) == text


@given(st.integers(2**10, 2**60))
def test_formatted_bytes_are_within_half_a_percent(num_bytes):
    number, unit = mk.memory.format_bytes(num_bytes).split()
    assert float(number) * FACTORS[unit] == pytest.approx(num_bytes, rel=0.0051)
