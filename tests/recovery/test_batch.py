"""The kernel of recovery as a state machine: whatever fails, and when, each row is in the sum once, or none is.

Memory, a counter that each forward raises (a buffer), and the sum are plain Python here; errors are real.
"""

import contextlib

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from memkit._core.errors import MemkitOutOfMemoryError, StateError
from memkit._recovery.batch import Attempt, BatchRun, Means, SingleProcess
from memkit._recovery.inputs import InputWatch
from memkit._recovery.plan import Part
from memkit._recovery.sizes import SizeMemory
from memkit._recovery.snapshot import Rollback, StateWatch
from tests.helpers import assert_refused
from tests.recovery.test_plan import cut


class Sums:
    """The rows whose gradient is in."""

    def __init__(self):
        self.rows, self.is_torn = [], False

    def discard(self):
        self.rows, self.is_torn = [], False


class World:
    """What a forward changes, and how much fits."""

    def __init__(self):
        self.counter, self.capacity = 0, 4
        self.num_snapshots = 0

    def snapshot(self):
        self.num_snapshots += 1
        return Undo(self)


class Undo:
    def __init__(self, world):
        self._world, self._counter = world, world.counter

    def discover(self):
        return contextlib.nullcontext()

    def learn(self):
        pass

    def restore(self, *, is_rerun=True):
        self._world.counter = self._counter


class Remedies:
    """Some remedies, each of which makes more rows fit; they are taken back when a batch goes on in smaller parts."""

    def __init__(self, world, number):
        self._world, self._left, self._taken = world, number, 0
        self.told = []

    def has_caused(self, error):
        return False

    def around(self):
        return None

    def improve(self, failure, what, *, is_last=False):
        if not self._left:
            return False
        self._left, self._taken = self._left - 1, self._taken + 1
        self._world.capacity += 2
        return True

    def ways_out(self):
        return ()

    def take_back(self):
        self._world.capacity -= 2 * self._taken
        self._taken = 0

    def tell(self, kind, what, done):
        self.told.append(kind)


def make_means(world, sizes, num_remedies):
    return Means(sizes, Remedies(world, num_remedies), world.snapshot, SingleProcess(), InputWatch(lambda _: []))


def cut_unevenly(part, num_parts):
    """The first row alone, as a function of the user's may cut."""
    if min(num_parts, part.size) < 2:
        return [part]
    return [Part(part.data[:1], 1), *cut(Part(part.data[1:], part.size - 1), num_parts - 1)]


class Kernel(RuleBasedStateMachine):
    """Batches of numbered rows; each part may fail before its gradient, in the middle of it, or after."""

    @initialize(num_remedies=st.integers(0, 2), is_uneven=st.booleans())
    def begin(self, num_remedies, is_uneven):
        self.cut = cut_unevenly if is_uneven else cut
        self.world, self.sums = World(), Sums()
        self.means = make_means(self.world, SizeMemory(), num_remedies)
        self.run_ = None

    @precondition(lambda self: self.run_ is None)
    @rule(size=st.integers(1, 12), num_parts=st.integers(1, 4))
    def open(self, size, num_parts):
        self.before = self.world.counter
        rows = list(range(size))
        self.run_ = BatchRun(rows, size, num_parts, means=self.means, sums=self.sums, cut=self.cut, key="rows")

    @precondition(lambda self: self.run_ is not None)
    @rule(where=st.sampled_from([*["nowhere"] * 4, *["forward", "backward", "late"] * 2, "interrupt"]))
    def go_on(self, where):
        run = self.run_
        attempt = run.means.peers.next_attempt(run)
        if attempt is None:
            self.finish()
            return
        if run.is_cut_anew:
            run.go_on_smaller(is_checked=True)
        try:
            with attempt as rows:
                self.world.counter += 1
                self.compute(attempt, rows, where)
            run.settle(attempt)
        except KeyboardInterrupt:
            self.abandon()
        except MemkitOutOfMemoryError:
            assert attempt.size == 1 or self.cut is cut_unevenly  # else it could have been smaller
            self.abandon()

    def compute(self, attempt, rows, where):
        """A part that does not fit fails somewhere; one that fits now and then, as others take memory too."""
        if attempt.size <= self.world.capacity and where == "nowhere":
            where = None
        if where == "interrupt":
            raise KeyboardInterrupt
        if where == "forward" or (where == "nowhere" and attempt.is_trial):
            raise MemoryError
        if where in {"backward", "nowhere"} and not attempt.is_trial:  # a trial's gradient comes all or not at all
            self.sums.is_torn = True
            self.sums.rows += rows[: len(rows) // 2]
            raise MemoryError
        self.sums.rows += rows
        attempt.is_added = True
        if where == "late":
            raise MemoryError

    @precondition(lambda self: self.run_ is not None)
    @rule(capacity=st.integers(1, 12))
    def take_or_give_memory(self, capacity):
        self.world.capacity = capacity

    def finish(self):
        run = self.run_
        assert self.sums.rows == list(range(run.size))
        assert sum(run.sizes) == run.size
        assert self.world.counter == self.before + len(run.done)
        assert run.is_complete
        self.sums.discard()
        self.run_ = None

    def abandon(self):
        """As the wrapper does with a batch whose step is lost."""
        self.sums.discard()
        self.run_.undo()
        assert self.world.counter == self.before
        self.run_ = None

    @invariant()
    def the_sum_is_what_is_done(self):
        run = getattr(self, "run_", None)
        if run is not None:
            assert self.sums.rows == [row for part in run.plan.parts[: run.plan.num_done] for row in part.data]
            assert [part.size for part in run.plan.parts[: run.plan.num_done]] == list(run.sizes)
            assert [row for part in run.plan.parts for row in part.data] == run.batch
            assert not self.sums.is_torn
            assert self.world.counter == self.before + len(run.done)


TestKernel = Kernel.TestCase
TestKernel.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def make_run(size=4, num_parts=1, **changes):
    world, sums = World(), Sums()
    means = make_means(world, SizeMemory(), 0)
    run = BatchRun(list(range(size)), size, num_parts, means=means, sums=sums, cut=cut, key="rows", **changes)
    return run, world, sums


def fail(run):
    attempt = run.means.peers.next_attempt(run)
    with attempt:
        raise MemoryError
    run.settle(attempt)


def test_does_not_rerun_batch_changed_in_place():
    rows = torch.ones(2)
    run, *_ = make_run(tensors=[rows])
    rows.add_(1)
    assert_refused(lambda: fail(run), MemkitOutOfMemoryError, "changes the batch in place")


def test_without_remedies_the_error_comes_through():
    world = World()
    means = Means(SizeMemory(), None, world.snapshot, SingleProcess(), InputWatch(lambda _: []))
    run = BatchRun([1, 2], 2, 1, means=means, sums=Sums(), cut=cut)
    with pytest.raises(MemoryError), run.means.peers.next_attempt(run):
        raise MemoryError
    assert world.num_snapshots == 0


def test_reverts_forbidden_split_if_other_remedy_exists():
    run, *_ = make_run()
    fail(run)
    assert run.is_cut_anew
    assert run.was_cut
    assert not run.undo_cut()  # no remedy is left
    run.means.remedies._left = 1
    assert run.undo_cut()
    assert run.plan.sizes == (4,)
    assert not run.was_cut
    assert not run.go_on_smaller(is_checked=True)
    assert run.means.sizes.largest("rows") is None  # the failure is forgotten


def test_rejects_attempt_without_backward():
    run, *_ = make_run()
    attempt = run.means.peers.next_attempt(run)
    assert_refused(lambda: run.settle(attempt), StateError, "never entered")
    with attempt:
        pass
    assert_refused(lambda: run.settle(attempt), StateError, r"without trainer\.backward")


def test_a_step_before_the_last_part_is_refused():
    run, *_ = make_run(num_parts=2)
    assert_refused(lambda: run.refuse_incomplete(), StateError, "unfinished micro-batches")


def test_errors_of_parts_say_so():
    run, *_ = make_run(num_parts=2)
    with pytest.raises(ValueError, match="mine") as error, run.means.peers.next_attempt(run):
        raise ValueError("mine")
    assert "micro-batch of 2 of 4" in error.value.__notes__[0]
    assert Part([0, 1], 2) in run.plan.parts[run.plan.num_done :]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_attempt_that_cannot_begin_leaves_no_hooks(error):
    """Its block is not entered, so that nothing would leave what it has entered before."""
    model, is_inside = nn.Linear(2, 2), []

    @contextlib.contextmanager
    def watching():
        is_inside.append(True)
        yield
        is_inside.append(False)

    @contextlib.contextmanager
    def failing():
        raise error
        yield

    class Offload(Remedies):
        def around(self):
            return failing()

    before = len(nn.modules.module._global_forward_pre_hooks)
    part = Part((torch.ones(4, 2),), 4)
    attempt = Attempt(part, 4, remedies=Offload(World(), 0), rollback=Rollback(StateWatch(model)), watching=watching())
    with pytest.raises(error), attempt:
        pass
    assert len(nn.modules.module._global_forward_pre_hooks) == before
    assert is_inside == [True, False]
