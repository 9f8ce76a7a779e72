"""Tiles of one dimension: every place of the result once, all tiles of one length, each with all that it needs."""

from hypothesis import given, strategies as st

from memkit.chunk.tiles import ExactAxis, Reach, tiles

numbers = st.integers


@given(
    size=numbers(1, 150),
    tile=numbers(1, 160),
    reach=st.builds(Reach, numbers(0, 20), numbers(0, 20), numbers(1, 8), numbers(1, 4)),
    extra=numbers(-1, 3),
)
def test_exact_axis(size, tile, reach, extra):
    axis = ExactAxis.cut(size, tile, reach)
    out_size = -(-size // reach.period) * reach.step + extra  # a module may give a little more or less at its ends
    tile_out = out_size - (size - axis.length) // reach.period * reach.step
    # A result that is shorter at its end depends on what follows: `find_reach` gives such a module some `after`.
    if tile_out < 1 or (extra < 0 and not reach.after):
        return
    pieces = list(axis.pieces(tile_out))
    assert axis.out_size(tile_out) == out_size
    assert [place for piece in pieces for place in range(piece.out_start, piece.out_stop)] == list(range(out_size))
    for piece in pieces:
        stop = piece.start + axis.length
        assert piece.start % reach.period == 0
        assert stop % reach.period == size % reach.period
        assert piece.start >= 0
        assert stop <= size
        assert piece.offset >= 0
        assert piece.offset + piece.out_stop - piece.out_start <= tile_out
        assert piece.start // reach.period * reach.step + piece.offset == piece.out_start
        if axis.length < size:
            assert piece.out_stop - piece.out_start <= max(tile // reach.period, 1) * reach.step
        for place in (piece.out_start, piece.out_stop - 1):
            period = place // reach.step
            assert period * reach.period - reach.before >= piece.start or piece.start == 0
            assert (period + 1) * reach.period + reach.after <= stop or stop == size


def test_tiles_are_even():
    """Four tiles of 25 places, not three of 30 and one of 10: less to read, and the same number."""
    axis = ExactAxis.cut(100, 30, Reach(3, 3))
    assert [piece.out_stop - piece.out_start for piece in axis.pieces(axis.length)] == [25] * 4
    assert axis.length == 31
    assert [piece.start for piece in axis.pieces(31)] == [0, 22, 47, 69]


def test_tile_reading_everything_is_the_whole():
    assert list(ExactAxis.cut(20, 10, Reach(6, 6)).pieces(20)) == list(ExactAxis.cut(20, 99, Reach(0, 0)).pieces(20))


def test_tiles_are_all_pairs_of_pieces():
    axes = [ExactAxis.cut(10, 5, Reach(0, 0)), ExactAxis.cut(9, 3, Reach(1, 1))]
    found = [(a.out_start, b.out_start) for a, b in tiles(axes, [5, 5])]
    assert found == [(a, b) for a in (0, 5) for b in (0, 3, 6)]
