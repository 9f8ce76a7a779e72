"""The tracker against the allocator on whole training steps: after each operator, and at the peak of a plain run."""

from itertools import pairwise

import pytest
import torch

from memkit._recorder.recording import Recording
from memkit._torch.versions import parse
from memkit.memory.track import Tracker
from tests.allocations import observe_operators, trace_allocations
from tests.helpers import one_in
from tests.memory.models import CASES as MORE_CASES
from tests.zoo import CASES, Case, no_mark

ALL_CASES = CASES | MORE_CASES
NUM_STEPS = 2
# Until 2.8 torch's own LBFGS takes the number of a loss with a graph, which warns.
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning")
# The profiler's peak of a plain run, minus the tracker's with workspace. In all other models the two are equal.
DIFFERENCES = {
    # A sparse gradient, which plain autograd takes over since 2.9, is copied under a dispatch mode: its indices.
    "bags": -1600 if parse(torch.__version__) >= (2, 9) else 0,
    "meta_learning": 32,  # Python numbers that autograd keeps, as tensors made in C++
    "inplace_residuals": 8,  # likewise
    "recomputed_dropout": 5056,  # the random state that a checkpoint keeps
    "vae": 4,  # numbers, as above
}
# A sparse result is booked while its parts are read, which are operators too.
READS_OF_PARTS = {"aten._indices.default", "aten._values.default"}
RANDOM_STATE = 5056


def fresh(name: str) -> Case:
    """A case before its first step: the profiler does not see the death of what was made before it looked."""
    torch.manual_seed(0)
    return ALL_CASES[name]()


def steps(case: Case) -> None:
    for _ in range(NUM_STEPS):
        case.step(no_mark)


def track(name: str, *, workspace: bool) -> Tracker:
    case = fresh(name)
    with Tracker(device="cpu", workspace=workspace) as tracker:
        steps(case)
    return tracker


def there_before(recording: Recording) -> int:
    """The bytes that existed before the block, which the allocator's events in the block do not count."""
    return sum(storage.nbytes for storage in recording.storages() if not storage.operator)


# `tests/recorder/test_workspace.py` holds the other cases to the same.
@pytest.mark.parametrize("name", one_in(2, MORE_CASES))
def test_live_bytes_equal_the_allocators_after_every_operator(name):
    case = fresh(name)
    operators, _ = observe_operators(lambda: steps(case), as_without_recorder=False)
    saved = may_save = num_states = 0
    for op, after in pairwise([*operators, operators[-1]]):
        if after.name in READS_OF_PARTS:
            continue
        beyond = op.allocated - op.recorded
        num_states += beyond - saved == RANDOM_STATE
        if name != "recomputed_dropout":
            assert 0 <= beyond <= saved + may_save, op
        saved, may_save = beyond, 8 * op.num_numbers
    assert (num_states > 0) == (name == "recomputed_dropout")


@pytest.mark.parametrize("name", one_in(4, ALL_CASES))
def test_peak_with_workspace_equals_the_profilers_in_a_plain_run(name):
    case = fresh(name)
    truth = trace_allocations(lambda: steps(case)).peak
    tracker = track(name, workspace=True)
    assert truth - (tracker.peak_bytes - there_before(tracker.recording)) == DIFFERENCES.get(name, 0)
    for split in (
        tracker.peak_by_category,
        tracker.peak_by_module,
        tracker.peak_by_operator,
        tracker.peak_by_line,
        tracker.peak_by_phase,
    ):
        assert sum(split.values()) == tracker.peak_bytes
    without = track(name, workspace=False)
    assert without.peak_bytes <= tracker.peak_bytes
    assert without.peak_bytes >= tracker.peak_bytes - max(s.nbytes for s in workspaces(tracker.recording))
    assert without.live_bytes == tracker.live_bytes


def workspaces(recording: Recording):
    return [s for s in recording.storages() if s.category == "workspace"]


@pytest.mark.parametrize("name", ["mlp", "encoder", "point_net"])
def test_new_model_peak_is_weights_and_step_allocations(name):
    case = fresh(name)
    truth = trace_allocations(lambda: steps(case)).peak
    tensors = [*case.model.parameters(), *case.model.buffers()]
    weights = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    case = fresh(name)
    with Tracker(device="cpu", workspace=True) as tracker:
        steps(case)
    assert tracker.peak_bytes == truth + weights
