"""Remembered sizes: never above a failed one without patience, and growing again when memory is free."""

import pytest
from hypothesis import given, strategies as st

from memkit._recovery.sizes import SizeMemory


def run(sizes, batch, capacity, steps, *, at_least=1):
    """Train ``steps`` steps with parts that fit up to ``capacity``; return the failures and the last part size."""
    failures, largest = 0, 0
    for _ in range(steps):
        num_parts = sizes.num_parts("key", batch, at_least)
        failed_here = 0
        while -(-batch // num_parts) > capacity:
            size = -(-batch // num_parts)
            sizes.note_failure("key", size)
            failed_here += 1
            limit = min(sizes.largest("key"), size - 1)
            assert limit >= 1
            num_parts = -(-batch // limit)
        largest = -(-batch // num_parts)
        sizes.note_success("key", largest)
        if not failed_here:
            sizes.note_clean_step("key")
        failures += failed_here
    return failures, largest


@given(batch=st.integers(1, 512), capacity=st.integers(1, 600))
def test_few_failures_and_a_good_size(batch, capacity):
    sizes = SizeMemory()
    failures, largest = run(sizes, batch, capacity, 100)
    assert failures <= batch.bit_length() + 8
    assert largest <= capacity
    assert largest >= min(batch, capacity) / 2


@given(batch=st.integers(2, 512), low=st.integers(1, 20), at_least=st.integers(1, 4))
def test_size_grows_back_when_memory_is_free(batch, low, at_least):
    sizes = SizeMemory()
    run(sizes, batch, low, 3)
    _, largest = run(sizes, batch, 10**6, 400, at_least=at_least)
    assert largest == -(-batch // min(at_least, batch))


def test_memory_taken_by_another_process():
    sizes = SizeMemory()
    assert run(sizes, 64, 64, 5) == (0, 64)
    failures, largest = run(sizes, 64, 10, 3)
    assert failures == 3
    assert largest == 8
    assert sizes.is_proven("key", 8)
    assert not sizes.is_proven("key", 16)


def test_keys_are_apart_and_survive():
    sizes = SizeMemory()
    sizes.note_failure("a", 8)
    assert sizes.num_parts("a", 8, 1) == 2
    assert sizes.num_parts("b", 8, 1) == 1
    restored = SizeMemory()
    restored.load_state_dict(sizes.state_dict())
    assert restored.num_parts("a", 8, 1) == 2


@pytest.mark.parametrize("at_least", [1, 3, 8])
def test_never_fewer_parts_than_asked_for(at_least):
    sizes = SizeMemory()
    sizes.note_failure("key", 4)
    for _ in range(200):
        assert sizes.num_parts("key", 8, at_least) >= at_least
        sizes.note_clean_step("key")


def test_ever_new_shapes_do_not_fill_the_memory_and_cost_no_limit_that_was_learnt(monkeypatch):
    monkeypatch.setattr("memkit._recovery.sizes._MOST_SHAPES", 8)
    memory = SizeMemory()
    memory.note_failure("failed", 8)
    for step in range(100):
        for key in ("usual", f"length {step}"):
            memory.note_success(key, 4)
            memory.note_clean_step(key)
    assert list(memory.state_dict()) == ["failed", *[f"length {step}" for step in range(93, 99)], "usual", "length 99"]
    assert memory.largest("failed") == 4
    assert memory.is_proven("usual", 4)
    for step in range(100):
        memory.note_failure(f"failed {step}", 8)
    assert sum(each["failed"] is not None for each in memory.state_dict().values()) == 8
    memory.note_success("another", 4)
    assert memory.largest("failed 92") == 4
    assert len(memory.state_dict()) <= 16
