import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import memkit
from memkit.cli import demo, main
from memkit.cli.demo import render
from memkit.recipes.demo import LIMIT_BYTES, NUM_STEPS, DemoResult, DemoRun, run_worker

VERSIONS = {"device": "cpu", "python": "3.11.7", "torch": "2.13.0"}
DONE = DemoRun((4.0, 2.0), ((4,), (4,)), 0, None, False, 300 * 2**20, 8.0, VERSIONS)
DIED = DemoRun((), (), 0, "RuntimeError: can't allocate memory", True, 90 * 2**20, 0.25, VERSIONS)
GOOD = DemoResult(DIED, replace(DONE, sizes=((2, 2), (2, 2)), num_ooms=2, losses=(4.0, 2.000002)), DONE)


@pytest.mark.slow  # CI runs the demo itself, whose exit status says the same
def test_the_demo_for_real_from_a_bare_source_tree(tmp_path):
    shutil.copytree(Path(memkit.__file__).parent, tmp_path / "memkit", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "memkit", "demo", "--json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no progress bar where nobody watches
    record = json.loads(done.stdout)
    assert record["plain_oom"] is True
    if record["device"] == "cpu":  # the allocator's own words, with errno 12
        assert "DefaultCPUAllocator: can't allocate memory" in record["plain_error"]
        assert "(Cannot allocate memory)" in record["plain_error"]
    assert record["memkit_completed"] is True
    assert record["memkit_error"] is None
    full_batch, through_memkit = record["losses"]["full_batch"], record["losses"]["memkit"]
    assert len(full_batch) == len(through_memkit) == record["steps"] == NUM_STEPS
    assert through_memkit == pytest.approx(full_batch, rel=1e-5)
    assert 0 < record["max_loss_difference"] <= 1e-5  # 0 would mean that nothing was split
    assert full_batch[-1] < full_batch[0] - 0.5  # it learns
    assert record["num_ooms"] >= 1
    assert {sum(sizes) for sizes in record["micro_batch_sizes"]} == {64}
    # The first step has no optimizer state yet: with all blocks recomputed, the whole batch may fit.
    assert all(len(sizes) > 1 for sizes in record["micro_batch_sizes"][1:])
    peaks = record["peaks"]
    assert record["limit_bytes"] == LIMIT_BYTES
    # The kernel holds the limit. Tensors in pieces of the heap that were free before come on top of it.
    assert max(peaks["memkit"], peaks["plain_limited"]) <= 1.01 * LIMIT_BYTES
    assert peaks["plain_unlimited"] > 2 * LIMIT_BYTES
    assert set(record["times"]) == set(peaks) == {"plain_limited", "memkit", "plain_unlimited"}
    assert all(seconds > 0 for seconds in record["times"].values())
    assert {"python", "torch"} <= set(record)


def test_a_table_for_people():
    table, rest = render(GOOD).split("\n\n", 1)
    assert table == (
        "run              limit        peak   time  result\n"
        "full batch  100.00 MiB   90.00 MiB  0.2 s  died in step 1\n"
        "memkit      100.00 MiB  300.00 MiB  8.0 s  2 steps, loss 4.0000 -> 2.0000\n"
        "full batch        none  300.00 MiB  8.0 s  2 steps, loss 4.0000 -> 2.0000"
    )
    assert rest.endswith(
        "failed attempts count.\n"
        "\n"
        "full batch, limited: RuntimeError: can't allocate memory\n"
        "memkit, limited: recovered from 2 out-of-memory errors by splitting the batch of 4 rows into micro-batches "
        "of 2\n"
        "memkit, limited: losses of the full batch, largest relative difference 1.0e-06"
    )


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, plain_limited=DONE),  # the limit was none
        replace(GOOD, plain_limited=replace(DIED, is_out_of_memory=False)),  # it died of something else
        replace(GOOD, memkit=replace(DONE, losses=(4.0, 2.0001))),  # other losses
        replace(GOOD, memkit=DIED),
        replace(GOOD, plain_unlimited=DIED),
    ],
)
def test_reports_unconvincing_result(bad, monkeypatch, capsys):
    assert GOOD.succeeded
    assert not bad.succeeded
    monkeypatch.setattr(demo, "run_demo", lambda _: bad)
    assert main(["demo"]) == 1
    verdict = capsys.readouterr().out.split("\n\n")[1]
    assert verdict == "This is NOT the result that the demo should show: see docs/tutorial.md#the-demo."


def test_the_first_line_is_there_before_the_first_run(monkeypatch, capsys):
    said = []

    def run_demo(on_step):
        said.append(capsys.readouterr().out)
        on_step("memkit", 3)
        return GOOD

    monkeypatch.setattr(demo, "run_demo", run_demo)
    assert main(["demo"]) == 0
    assert "less than a minute" in said[0]
    out, err = capsys.readouterr()
    assert out.startswith("\nUnder 100.00 MiB the full batch ran out of memory; memkit finished")
    assert err == ""


def test_killed_run():
    script = (
        "import os, signal\n"
        """print('{"loss": 3.0, "sizes": [2, 2], "num_ooms": 1}', flush=True)\n"""
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    seen = []
    run = run_worker(["-c", script], seen.append)
    assert seen == [0, 1]
    assert run == DemoRun((3.0,), ((2, 2),), 1, "killed by signal 9 (Killed)", False, None, None, {})


def test_run_failing_to_start():
    run = run_worker(["-m", "memkit.no_such_module"], lambda _: None)
    assert run.error.startswith("exit code 1: ")
    assert run.error.endswith("No module named memkit.no_such_module")


def test_the_command_when_every_run_crashes(tmp_path, monkeypatch, capsys):
    crash = tmp_path / "python"
    crash.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crash.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crash))
    assert main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "memkit, limited: killed by signal 11 (Segmentation fault)" in out
    assert "NOT the result that the demo should show" in out
    assert main(["demo", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["plain_oom"], record["memkit_completed"], record["max_loss_difference"]) == (False, False, None)
    assert record["peaks"] == {"plain_limited": None, "memkit": None, "plain_unlimited": None}
