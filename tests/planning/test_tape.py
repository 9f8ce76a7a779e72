"""The tape on chains small enough to add up by hand."""

import contextlib

from memkit.planning.tape import Block, Tape


def chain(tape, *, checkpointing=False):
    """batch -> wide (100 B) -> wide (100 B) -> narrow (10 B) -> loss (4 B); each keeps its input."""
    x = tape.apply("enter", [Block(0, wants_grad=False)], 100, weights=[5])
    with tape.checkpoint(x) if checkpointing else contextlib.nullcontext():
        h = tape.apply("middle", [x], 100, saves=[x])
        y = tape.apply("leave", [h], 10, saves=[h])
    tape.apply("loss", [y], 4, saves=[y])
    return tape


def test_the_peak_is_where_most_is_kept_and_on_its_way():
    peak = chain(Tape(cast_itemsize=None)).peak(gradients_exist=False)
    # In the backward of "leave": x and h are kept; the gradients of y and h are on their way; y itself is gone.
    assert (peak.activations_bytes, peak.temporaries_bytes, peak.gradients_bytes) == (200, 110, 0)
    assert peak.where == "leave, backward"


def test_earlier_gradients_are_there_all_along():
    peak = chain(Tape(cast_itemsize=None)).peak(gradients_exist=True)
    assert peak.gradients_bytes == 20  # 5 parameters of 4 bytes
    assert (peak.activations_bytes, peak.temporaries_bytes) == (200, 110)


def test_a_checkpoint_keeps_its_inputs_and_computes_the_rest_again():
    plain, lean = (chain(Tape(cast_itemsize=None), checkpointing=flag) for flag in (False, True))
    assert plain.num_parameters == lean.num_parameters == 5
    # The chain's backward is the same, and so is its peak; between two checkpoints only one is open at a time.
    assert lean.peak(gradients_exist=False) == plain.peak(gradients_exist=False)

    def two_chains(*, checkpointing):
        tape = Tape(cast_itemsize=None)
        x = tape.apply("enter", [Block(0, wants_grad=False)], 100, weights=[5])
        for number in range(2):
            with tape.checkpoint(x) if checkpointing else contextlib.nullcontext():
                h = tape.apply(f"{number}.0", [x], 100, saves=[x])
                x = tape.apply(f"{number}.1", [h], 100, saves=[h])
        tape.apply("loss", [x], 4)
        return tape.peak(gradients_exist=False)

    # x, h, x, h are kept, against x, x and the h of the open one; in both, one gradient comes in and one goes out.
    plain, lean = two_chains(checkpointing=False), two_chains(checkpointing=True)
    assert (plain.activations_bytes, plain.temporaries_bytes) == (400, 200)
    assert (lean.activations_bytes, lean.temporaries_bytes) == (300, 200)


def test_autocast_keeps_copies_of_the_weights():
    tape = Tape(cast_itemsize=2)
    x = tape.apply("a", [Block(0, wants_grad=False)], 1, weights=[300, 200])
    tape.apply("loss", [x], 4)
    peak = tape.peak(gradients_exist=False)
    # End of the backward of "a": the kept copies are gone, the gradient in low precision (2 B) becomes float32 (4 B).
    assert peak.activations_bytes + peak.temporaries_bytes == 500 * (2 + 4)
    assert tape.num_parameter_tensors == 2


def test_an_addition_shares_its_gradient():
    def peak(*, shares_grad):
        tape = Tape(cast_itemsize=None)
        x = tape.apply("enter", [Block(0, wants_grad=False)], 100, weights=[1])
        y = tape.apply("sum", [x, x], 100, shares_grad=shares_grad)
        tape.apply("loss", [y], 4)
        return tape.peak(gradients_exist=False)

    assert peak(shares_grad=True).temporaries_bytes < peak(shares_grad=False).temporaries_bytes == 300
