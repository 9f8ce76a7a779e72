"""Plans keep every row, in order, whatever is done to them."""

import itertools

from hypothesis import given, strategies as st

from memkit._recovery.plan import Part, Plan


def cut(part, num_parts):
    """Cut a list into parts of nearly equal size, as a batch's rows are."""
    num_parts = max(1, min(num_parts, part.size))
    smaller, larger = divmod(part.size, num_parts)
    edges = [number * smaller + min(number, larger) for number in range(num_parts + 1)]
    return [Part(part.data[start:stop], stop - start) for start, stop in itertools.pairwise(edges)]


def todo(plan):
    return plan.parts[plan.num_done :]


def rows(plan):
    return [row for part in plan.parts for row in part.data]


@st.composite
def plans(draw):
    size = draw(st.integers(1, 40))
    plan = Plan(tuple(cut(Part(list(range(size)), size), draw(st.integers(1, 6)))))
    for _ in range(draw(st.integers(0, len(plan.parts)))):
        plan = plan.advance()
    return plan


@given(plans(), st.integers(0, 40))
def test_smaller_parts_are_the_same_rows(plan, limit):
    smaller = plan.shrink(limit, cut)
    if limit == 0 and todo(plan):
        assert smaller is None
        return
    assert rows(smaller) == rows(plan)
    assert smaller.num_done == plan.num_done
    assert smaller.parts[: plan.num_done] == plan.parts[: plan.num_done]
    assert all(part.size <= limit for part in todo(smaller))
    kept = [part for part in todo(plan) if part.size <= limit]
    assert [part for part in todo(smaller) if part in kept] == kept


@given(plans())
def test_starting_over_is_the_whole_plan_again(plan):
    again = plan.restart()
    assert again.num_done == 0
    assert rows(again) == rows(plan)
    assert again.sizes == plan.sizes


def test_indivisible_plan_cannot_shrink():
    assert Plan((Part("packed", 9),)).shrink(4, lambda part, _: [part]) is None


def test_empty_pieces_are_left_out():
    plan = Plan((Part("ab", 2),)).shrink(1, lambda part, _: [Part("a", 1), Part("", 0), Part("b", 1)])
    assert plan.parts == (Part("a", 1), Part("b", 1))


def test_a_plan_moves_on_without_a_copy_of_its_parts():
    plan = Plan(tuple(Part(row, 1) for row in range(5)))
    assert plan.advance().advance().parts is plan.parts
