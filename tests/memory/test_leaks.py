"""The leak watch names each planted leak, its line and what it keeps, and is silent on scripts without one."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._core.units import KIB
from memkit.memory.leaks import LeakWatch
from tests.helpers import one_in
from tests.memory.leak_clean import CLEAN
from tests.memory.leak_scripts import HEADER, PLANTED, run_script

# Close relatives of others run with `pytest -m slow`, and all of them in the benchmark.
RELATIVES = {
    "running = running + loss", "dict keyed by step", "records in a nested list", "backward hook", "class attribute",
    "deque without maxlen", "preallocated list", "calling frame", "custom function's context",
    "AdamW, baseline after it",
    "gradients kept between steps", "scheduler", "DataLoader", "best weights so far", "deque with maxlen in a dict",
    "hooks removed", "reference cycles",
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(4, PLANTED, slow=RELATIVES))
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_planted_leak_is_the_only_one_named(name, tmp_path):
    planted = PLANTED[name]
    found, line = run_script(planted.source, tmp_path)
    reports = [[(leak.holder, leak.kind, leak.line) for leak in leaks] for leaks in found]
    expected = [(planted.holder, planted.kind, line)]
    assert (line is None) == (name == "graph in the gradient")  # no statement of the script makes that one grow
    assert reports[0] == []
    assert reports[-1] == expected
    assert all(report in ([], expected) for report in reports)
    assert expected in reports[:4], "named at the fourth check at the latest"


@pytest.mark.parametrize("name", one_in(5, CLEAN, slow=RELATIVES))
def test_clean_script_raises_no_alarm(name, tmp_path):
    found, _ = run_script(CLEAN[name], tmp_path)
    assert len(found) >= 3
    assert not any(found)


@pytest.mark.slow
def test_script_run_by_its_own_python_names_the_main_module(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(HEADER + PLANTED["kept loss list"].source + "print(found[-1][0])\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, env=environment)
    assert (
        "global `losses` in train.py keeps 4 tensors, 16 B; since the last check 4 B, 7 of 28 graph nodes"
        in done.stdout
    )
    assert f"grows at: {script}:" in done.stdout
    assert "fix: keep `x.detach()`" in done.stdout


# ---- sizes


def grow(append, num_checks=4):
    watch = LeakWatch()
    watch.check()
    leaks = []
    for _ in range(num_checks):
        append()
        leaks = watch.check()
    return leaks


def test_views_of_one_storage_count_once():
    kept = []

    def append():
        base = torch.ones(1024)
        kept.extend([base, base[:512], base.view(32, 32)])

    (leak,) = grow(append)
    assert (leak.num_tensors, leak.nbytes, leak.growth_bytes) == (12, 4 * 4096, 4096)
    assert leak.num_graph_nodes == leak.growth_graph_nodes == 0


def test_graph_counts_saved_tensors_without_parameters():
    weight = nn.Parameter(torch.ones(100, 100))
    kept = []
    (leak,) = grow(lambda: kept.append((torch.ones(8, 100) @ weight).exp().sum()))
    # A step saves the matmul's input (8 x 100) and exp's result (8 x 100), and keeps its sum: 3 nodes.
    assert leak.growth_bytes == 2 * 8 * 100 * 4 + 4
    assert leak.nbytes == 4 * leak.growth_bytes
    assert (leak.growth_graph_nodes, leak.num_graph_nodes) == (3, 12)


def test_growing_graph_counts_its_new_part():
    weight = nn.Parameter(torch.ones(100))
    total = [torch.zeros(())]

    def append():
        total[0] = total[0] + (weight * torch.ones(100)).sum()

    leaks = grow(append, num_checks=5)
    assert [(leak.kind, leak.growth_graph_nodes, leak.num_graph_nodes) for leak in leaks] == [("graph", 3, 15)]
    assert leaks[0].growth_bytes == 400  # the factor of the product


def test_detached_growth_below_one_kib_is_no_leak_and_any_graph_is():
    kept, graphs = [], []
    assert grow(lambda: kept.append(torch.ones(KIB // 4 - 1))) == []
    assert len(grow(lambda: kept.append(torch.ones(KIB // 4)))) == 1
    weight = nn.Parameter(torch.ones(1))
    (leak,) = grow(lambda: graphs.append(weight * 2))
    assert leak.growth_bytes < KIB
    assert leak.growth_graph_nodes == 1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors_count_their_parts_and_meta_tensors_nothing():
    kept, on_meta = [], []
    indices = torch.arange(200)[None]
    (leak,) = grow(lambda: kept.append(torch.sparse_coo_tensor(indices.clone(), torch.ones(200), (500,))))
    assert leak.growth_bytes == 200 * (8 + 4)
    assert grow(lambda: on_meta.append(torch.ones(10_000, device="meta"))) == []


# ---- the rule: in functions of their own, since pytest's rewritten asserts ask for a frame's locals()


def check_and_append(gains):
    """Reports of a check after each gain in tensors; the first is the baseline."""
    kept = [torch.ones(1000)]
    watch = LeakWatch()
    reports = [watch.check()]
    for gain in gains:
        kept += [torch.ones(1000) for _ in range(gain)]
        reports.append(watch.check())
    return [[(leak.holder.split()[1], leak.num_tensors) for leak in leaks] for leaks in reports]


def test_growth_in_the_last_two_intervals_is_a_leak():
    assert check_and_append([1, 1, 0, 1, 1]) == [[], [], [("`kept`", 3)], [], [], [("`kept`", 5)]]


def test_second_check_reports_two_tensors_in_old_container():
    assert check_and_append([2]) == [[], [("`kept`", 3)]]

    def build_anew():
        watch = LeakWatch()
        watch.check()
        kept = []
        kept += [torch.ones(1000) for _ in range(3)]
        return watch.check(), kept

    assert build_anew()[0] == []


def fill_and_clear(num_checks):
    pending = []
    watch = LeakWatch()
    found = []
    for _ in range(num_checks):
        pending.append(torch.ones(1000))
        found.append(bool(watch.check()))
    pending.clear()
    return found


@pytest.mark.slow
def test_emptied_list_is_a_leak_only_after_thirty_intervals():
    found = fill_and_clear(34)
    assert found.index(True) == 30


def test_a_tensor_born_at_a_dead_ones_id_is_a_new_tensor():
    watch = LeakWatch()
    holder = [torch.ones(1000)]
    ids = set()
    for _ in range(6):
        ids.add(id(holder[0]))
        holder[0] = None
        holder[0] = torch.ones(1000)
        assert watch.check() == []
    assert len(ids) < 6, "this machine gave no id twice: the test shows nothing"


def train_and_let_go():
    kept = []
    watch = LeakWatch()
    for _ in range(4):
        out = torch.ones(1000)
        kept.append(out)
        leaks = watch.check()
    alive = weakref.ref(out)
    del kept, out
    return alive() is not None, leaks  # the frame that the watch looked into still runs


def test_watch_keeps_no_tensor_alive():
    is_alive, leaks = train_and_let_go()
    assert leaks
    assert not is_alive


def test_check_changes_nothing():
    torch.manual_seed(0)
    net, kept = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1)), []
    state = torch.random.get_rng_state()

    def train(check):
        torch.random.set_rng_state(state)
        result = []
        for _ in range(4):
            loss = net(torch.ones(4, 8)).square().mean()
            kept.append(loss)
            check()
            result += torch.autograd.grad(loss, list(net.parameters()))
        return result

    torch.testing.assert_close(train(LeakWatch().check), train(list), rtol=0, atol=0)
    assert gc.isenabled()


def test_result_states_its_certainty():
    """An empty list after the first call is no "nothing leaks"."""
    memory, kept = mk.MemoryManager("cpu"), []
    first = memory.leaks()
    assert (first, first.is_baseline, first.is_certain) == ([], True, False)
    assert str(first).startswith("no answer yet: this call took the baseline and compared nothing")
    assert "baseline" in repr(first)
    second = memory.leaks()
    assert (second, second.is_baseline, second.is_certain) == ([], False, False)
    assert "Call leaks() after another step" in str(second)
    third = memory.leaks()
    assert (third, third.is_certain, str(third)) == ([], True, "no leak found in 3 checks.")
    for _ in range(3):
        kept.append(torch.ones(1000))
        found = memory.leaks()
    assert len(found) == 1
    assert "keeps 3 tensors" in str(found)
