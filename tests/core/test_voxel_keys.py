"""Keys of grid cells: one for each, in order, steps never wrap, Morton order nests."""

import itertools
from functools import partial

import torch
from hypothesis import given, settings, strategies as st

from memkit._core.errors import InputError, InputTypeError
from memkit._core.voxel_keys import MORTON_BITS, LinearKeys, morton_encode
from tests.helpers import assert_refused


@st.composite
def boxes(draw):
    """A box, and cells in it."""
    num_axes = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 2**12)) for _ in range(num_axes))
    margin = tuple(draw(st.integers(0, 3)) for _ in range(num_axes))
    cell = st.tuples(*(st.integers(0, size - 1) for size in shape))
    cells = draw(st.lists(cell, min_size=1, max_size=20))
    return LinearKeys(shape, margin), cells


@given(boxes())
@settings(deadline=None)
def test_linear_keys_are_different_and_in_order(drawn):
    keys, cells = drawn
    found = keys.encode(torch.tensor(cells))
    assert len(found.unique()) == len({*cells})
    assert [cells[i] for i in found.argsort(stable=True)] == sorted(cells)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3))
@settings(deadline=None, max_examples=50)
def test_a_step_out_of_the_box_never_ends_in_it(axes):
    """Without a margin the neighbor left of a row's first cell would be the last cell of the row before."""
    shape, margin = (tuple(each) for each in zip(*axes, strict=True))
    keys = LinearKeys(shape, margin)
    cells = torch.tensor(list(itertools.product(*(range(size) for size in shape))))
    own = dict(zip(keys.encode(cells).tolist(), map(tuple, cells.tolist()), strict=True))
    for offset in itertools.product(*(range(-far, far + 1) for far in margin)):
        for key, cell in own.items():
            there = tuple(a + b for a, b in zip(cell, offset, strict=True))
            assert own.get(key + keys.step(offset), there) == there
            assert (key + keys.step(offset) in own) == (there in own.values())


@given(st.integers(2, 3), st.data())
@settings(deadline=None)
def test_morton_codes_interleave_the_bits_and_nest(num_axes, data):
    cell = st.tuples(*[st.integers(0, 2 ** MORTON_BITS[num_axes] - 1)] * num_axes)
    coords = torch.tensor(data.draw(st.lists(cell, min_size=1, max_size=20)))
    codes = morton_encode(coords)
    assert (codes >= 0).all()
    level = data.draw(st.integers(0, MORTON_BITS[num_axes] - 1))
    assert torch.equal(codes >> num_axes * level, morton_encode(coords >> level))
    expected = [
        sum((value >> bit & 1) << bit * num_axes + num_axes - 1 - axis for axis, value in enumerate(row)
            for bit in range(MORTON_BITS[num_axes]))
        for row in coords.tolist()
    ]  # fmt: skip
    assert codes.tolist() == expected


def test_keys_past_a_small_type():
    keys = LinearKeys((2**31 - 1, 2**31))
    assert keys.encode(torch.tensor([[2**31 - 2, 2**31 - 1]], dtype=torch.int32)).item() == (2**31 - 1) * 2**31 - 1


def test_no_points():
    empty = torch.empty(0, 3, dtype=torch.int64)
    assert LinearKeys((1, 1, 1), (1, 1, 1)).encode(empty).shape == (0,)
    assert morton_encode(empty).shape == (0,)


def test_rejects_coordinates_without_key():
    too_many = "extent of 2097152 x 2097152 x 1048577 cells; expected at most 2^62"
    assert_refused(lambda: LinearKeys((2**21, 2**21, 2**20 + 1)), InputError, too_many)
    assert_refused(lambda: LinearKeys((2**31, 2**31), (0, 1)), InputError, "extent of")
    keys = LinearKeys((4, 4))
    for bad in ([[-1, 0]], [[4, 0]], [[0, 4]]):
        assert_refused(partial(keys.encode, torch.tensor(bad)), InputError, "expected an extent of 4 cells from")
    assert_refused(lambda: keys.encode(torch.zeros(1, 2)), InputTypeError, "dtype torch.float32; expected integers")
    assert_refused(lambda: keys.encode(torch.zeros(1, 3).long()), InputError, "shape (1, 3); expected (N, 2)")
    outside = "from -1 to 3 along axis 2; expected an extent of 2097152 cells"
    assert_refused(lambda: morton_encode(torch.tensor([[0, 0, -1], [0, 0, 3]])), InputError, outside)
    assert_refused(lambda: morton_encode(torch.tensor([[2**31, 0]])), InputError, "along axis 0")
