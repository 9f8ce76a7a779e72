"""The tape on chains small enough to add up by hand."""

import contextlib

import pytest
from hypothesis import given, strategies as st

from memkit._core.units import KIB, MIB
from memkit._simulation.cuda.allocator import CachingAllocator
from memkit.predict.tape import Tape, TapeStorage, allocated_bytes


def chain(tape, *, checkpointing=False, inside_bytes=0, workspace_bytes=0):
    """batch -> wide (100 KiB) -> wide (100 KiB) -> narrow (10 KiB) -> loss (4 KiB); each keeps its input."""
    x = tape.apply("enter", [TapeStorage(0, wants_grad=False)], 100 * KIB, weights=[5 * KIB])
    with tape.checkpoint(x) if checkpointing else contextlib.nullcontext():
        h = tape.apply("middle", [x], 100 * KIB, saves=[x], inside_bytes=inside_bytes)
        y = tape.apply("leave", [h], 10 * KIB, saves=[h], workspace_bytes=workspace_bytes)
    tape.apply("loss", [y], 4 * KIB, saves=[y])
    return tape


def test_peak_has_most_kept_and_transient_bytes():
    peak = chain(Tape(cast_itemsize=None)).peak(gradients_exist=False)
    # In the backward of "leave": x and h are kept; the gradients of y and h are on their way; y itself is gone.
    assert (peak.activations_bytes, peak.temporaries_bytes) == (200 * KIB, 110 * KIB)
    assert (peak.gradients_bytes, peak.rounding_bytes, peak.workspace_bytes) == (0, 0, 0)
    assert peak.where == "leave, backward"


def test_earlier_gradients_are_there_all_along():
    peak = chain(Tape(cast_itemsize=None)).peak(gradients_exist=True)
    assert peak.gradients_bytes == 20 * KIB  # 5 Ki parameters of 4 bytes
    assert (peak.activations_bytes, peak.temporaries_bytes) == (200 * KIB, 110 * KIB)


def test_a_kernel_takes_more_inside():
    peak = chain(Tape(cast_itemsize=None), inside_bytes=300 * KIB).peak(gradients_exist=False)
    # In the forward of "middle": x is kept, h is there.
    assert (peak.activations_bytes, peak.temporaries_bytes) == (100 * KIB, 400 * KIB)
    assert peak.where == "middle, forward"


def test_workspace_counts_only_above_the_peak():
    def workspace_bytes(**inside):
        return chain(Tape(cast_itemsize=None), **inside).peak(gradients_exist=False).workspace_bytes

    assert workspace_bytes(workspace_bytes=50 * KIB) == 50 * KIB  # "leave" is the peak itself
    assert workspace_bytes(workspace_bytes=50 * KIB, inside_bytes=300 * KIB) == 0  # 310 and 50 KiB against 500


def test_a_checkpoint_keeps_its_inputs_and_computes_the_rest_again():
    plain, lean = (chain(Tape(cast_itemsize=None), checkpointing=flag) for flag in (False, True))
    assert plain.weights == lean.weights == [5 * KIB]
    # The chain's backward is the same, and so is its peak; between two checkpoints only one is open at a time.
    assert lean.peak(gradients_exist=False) == plain.peak(gradients_exist=False)

    def two_chains(*, checkpointing):
        tape = Tape(cast_itemsize=None)
        x = tape.apply("enter", [TapeStorage(0, wants_grad=False)], 100 * KIB, weights=[5])
        for number in range(2):
            with tape.checkpoint(x) if checkpointing else contextlib.nullcontext():
                h = tape.apply(f"{number}.0", [x], 100 * KIB, saves=[x])
                x = tape.apply(f"{number}.1", [h], 100 * KIB, saves=[h])
        tape.apply("loss", [x], 4 * KIB)
        return tape.peak(gradients_exist=False)

    # x, h, x, h are kept, against x, x and the h of the open one; in both, one gradient comes in and one goes out.
    plain, lean = two_chains(checkpointing=False), two_chains(checkpointing=True)
    assert (plain.activations_bytes, plain.temporaries_bytes) == (400 * KIB, 200 * KIB)
    assert (lean.activations_bytes, lean.temporaries_bytes) == (300 * KIB, 200 * KIB)


def test_autocast_keeps_copies_of_the_weights():
    tape = Tape(cast_itemsize=2)
    x = tape.apply("a", [TapeStorage(0, wants_grad=False)], 512, weights=[300 * KIB, 200 * KIB])
    tape.apply("loss", [x], 512)
    peak = tape.peak(gradients_exist=False)
    # End of the backward of "a": the kept copies are gone, the gradient in low precision (2 B) becomes float32 (4 B).
    assert peak.activations_bytes + peak.temporaries_bytes == 500 * KIB * (2 + 4)
    assert tape.weights == [300 * KIB, 200 * KIB]


def test_an_addition_shares_its_gradient():
    def peak(*, shares_grad):
        tape = Tape(cast_itemsize=None)
        x = tape.apply("enter", [TapeStorage(0, wants_grad=False)], 100 * KIB, weights=[128])
        y = tape.apply("sum", [x, x], 100 * KIB, shares_grad=shares_grad)
        tape.apply("loss", [y], 4 * KIB)
        return tape.peak(gradients_exist=False)

    assert peak(shares_grad=True).temporaries_bytes < peak(shares_grad=False).temporaries_bytes == 300 * KIB


def test_blocks_are_rounded_and_gradients_stay_so():
    tape = Tape(cast_itemsize=None)
    x = tape.apply("enter", [TapeStorage(0, wants_grad=False)], 11 * MIB, weights=[129])
    tape.apply("loss", [x], 512)
    peak = tape.peak(gradients_exist=False)
    # In the backward of "enter": the gradient of x in a segment of 12 MiB, and 129 numbers in a block of 1 KiB.
    assert peak.temporaries_bytes == 11 * MIB + 516
    assert peak.rounding_bytes == MIB + 508


@pytest.mark.parametrize(
    ("sizes", "num_bytes"),
    [
        ([1], 512),
        ([5 * MIB], 5 * MIB),
        ([5 * MIB] * 4, 20 * MIB),  # one segment
        ([19 * MIB + 1], 20 * MIB),  # the rest of a segment of its own is too small for another request
        ([6 * MIB] * 3, 18 * MIB),  # a rest of 2 MiB is not
        ([6 * MIB] * 3 + [MIB + 512], 20 * MIB),
    ],
)
def test_matches_the_allocator(sizes, num_bytes):
    assert allocated_bytes(sizes) == num_bytes


@given(st.lists(st.integers(1, 2 * MIB) | st.integers(MIB, 50 * MIB), max_size=40))
def test_the_model_of_the_allocator_counts_the_same(sizes):
    allocator = CachingAllocator(2**60)
    for size in sizes:
        allocator.allocate(size)
    assert allocated_bytes(sizes) == allocator.allocated_bytes
