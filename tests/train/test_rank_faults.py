"""Out-of-memory at random places on two ranks: all finish, with the parameters of the run without fault."""

import pytest

from benchmarks.cases.rank_faults import KINDS, NAIVE_PLACES, PHASES, on_two_ranks


def check(num_places, seed):
    rows, others = on_two_ranks("plant", num_places, seed)
    assert rows == others
    for kind in KINDS:
        assert rows[kind]["finished"] == num_places
        without, with_dropout = rows[kind]["largest_difference"].values()
        assert without <= 1e-15
        assert with_dropout == 0
    return rows


@pytest.mark.slow
def test_a_few_random_places():
    check(1, seed=0)


@pytest.mark.slow
def test_fifty_random_places():
    rows = check(50, seed=1)
    assert all(set(PHASES) <= set(rows[kind]["by_phase"]) for kind in KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("place", NAIVE_PLACES[1:])
def test_independent_split_in_plain_ddp_hangs_or_differs(place):
    ends = on_two_ranks("control", *place, timeout_s=5)
    assert all(end["ends"] != "finished" or end["largest_difference"] > 1e-3 for end in ends)
