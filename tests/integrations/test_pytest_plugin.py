"""The pytest plugin, run by pytest on small test files: what fails, what the text says, what is not loaded."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memkit.integrations import pytest_memory, pytest_plugin

pytest_plugins = "pytester"
PLUGIN = "memkit.integrations.pytest_plugin"
ROOT = Path(__file__).parents[2]
HEAD = """
import pytest, torch, unittest
from torch import nn
limit = pytest.mark.memory_limit

def step(model, batch):
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).square().mean().backward()
    optimizer.step()

@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
"""


@pytest.fixture(autouse=True, scope="module")
def everything_is_loaded():
    """A run inside forgets the modules that it imported, and parts of torch cannot be imported twice.

    The leak watch ignores the objects that exist by then: in a whole test run they are half a million.
    """
    model = torch.nn.Linear(2, 2)
    for mode in ("allocator", "fake"):
        watch = pytest_memory.watch(pytest_plugin.memory_limit(0, mode=mode), model)
        with watch.block:
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        watch.table()
    gc.collect()
    gc.freeze()


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a test file with this plugin and no other one that is installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(body, *options, **modules):
        pytester.makepyfile(HEAD + body)
        for name, source in modules.items():
            (pytester.path / f"{name}.py").write_text(source)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options, plugins=[pytest_plugin])

    return run


def peaks(result):
    """Peaks in bytes by the name of the test, from the summary's inner reports."""
    reports = [call.report for call in result.reprec.getcalls("pytest_runtest_logreport")]
    calls = [report for report in reports if report.when == "call"]
    return {call.nodeid.partition("::")[2]: dict(call.user_properties).get("memkit_peak_bytes") for call in calls}


def test_limit_is_exact_and_counts_used_fixtures(run):
    result = run(
        """
@pytest.fixture
def used(): return torch.ones(1000)
@pytest.fixture
def unused(): return torch.ones(10**6)

@limit(8000)
def test_at_the_limit(used, unused): used * 2
@limit(8003)
def test_above_it(used): doubled = used * 2; total = doubled.sum()
@limit(0)
def test_without_tensors(): pass
@limit(40, device="cpu")
def test_one_device(): torch.ones(10); torch.ones(1000, device="meta")
"""
    )
    result.assert_outcomes(passed=3, failed=1)
    at_the_limit, above_it, without_tensors, one_device = peaks(result).values()
    assert (at_the_limit, above_it, without_tensors, one_device) == (8000, 8004, 0, 40)
    result.stdout.fnmatch_lines(["memory peak 7.82 KiB, limit 7.82 KiB", "8,004 B, limit 8,003 B"])


def test_the_peak_does_not_depend_on_the_tests_before(run):
    """Memory that is kept from an earlier test is not this one's."""
    result = run(
        """
KEPT = []
@pytest.mark.parametrize("number", [0, 1, 2])
@limit("1 MiB")
def test_small(number): KEPT.append(torch.zeros(100_000))
"""
    )
    result.assert_outcomes(passed=3)
    assert set(peaks(result).values()) == {400_000}


def test_failure_names_the_place_and_the_holders(run):
    result = run(
        """
@limit("4 MiB")
def test_step(model):
    step(model, torch.ones(64, 256))
"""
    )
    text = result.stdout.str()
    assert "limit 4.00 MiB" in text
    assert re.search(r"reached by aten\.\S+, optimizer, at \S+\.py:\d+ in step", text)
    for row in ("parameter", "gradient", "optimizer", "temporary", r"\S+\.py:\d+ in step"):
        assert re.search(rf"^ +[\d.]+ [KM]iB +[\d.]+%  {row}$", text, re.MULTILINE), row
    assert "mode='allocator' counts it" in text  # the way of a marker, not of track()
    assert "pluggy/" not in text  # a limit is no error of the code: no traceback


def test_modes_on_one_step(run):
    """Fake tensors count like real ones; the allocator also sees the workspace of sorting; the GPU rounds up."""
    result = run(
        """
@limit("1 GiB")
def test_real(model): step(model, torch.ones(64, 256))
@limit("1 GiB", mode="fake")
def test_fake(model): step(model, torch.ones(64, 256))
@limit("1 GiB", mode="fake", gpu="RTX 4090")
def test_card(model):
    step(model.cuda(), torch.ones(64, 256, device="cuda"))
    assert torch.cuda.max_memory_allocated() > 0
@limit("1 GiB")
def test_sort(): torch.zeros(2**16, dtype=torch.int64).unique()
@limit("1 GiB", mode="allocator")
def test_sort_inside(): torch.zeros(2**16, dtype=torch.int64).unique()
"""
    )
    result.assert_outcomes(passed=5)
    found = peaks(result)
    assert found["test_fake"] == found["test_real"] > 6 * 2**20
    assert found["test_card"] > found["test_real"]  # multi-tensor optimizers and cuBLAS' workspace
    assert found["test_sort_inside"] >= found["test_sort"] + 2**19


def test_fake_tensors_take_no_memory_and_keep_fixtures(run):
    result = run(
        """
@pytest.fixture(scope="module")
def shared(): return nn.Linear(8, 8)

@limit("64 GiB", mode="fake")
def test_larger_than_this_machine(shared):
    torch.zeros(2**33).square_()
    step(shared, torch.ones(2, 8))

def test_afterwards(shared):
    assert type(shared.weight) is nn.Parameter and shared.weight.grad is None
    assert shared(torch.ones(2, 8)).isfinite().all()

@limit("31 GiB", mode="fake")
def test_too_large(): torch.zeros(2**33)

@limit("1 GiB", mode="fake", selected_fraction=0.5)
def test_half_is_selected():
    x = torch.rand(1000)
    assert x[x > 0].shape == (500,)

"""
    )
    result.assert_outcomes(passed=3, failed=1)
    assert peaks(result)["test_too_large"] == 2**35
    result.stdout.fnmatch_lines(["memory peak 32.00 GiB, limit 31.00 GiB"])


@pytest.mark.parametrize("where", ['mode="fake"', 'mode="fake", gpu="T4"'])
def test_fake_mode_rejects_tests_of_values(run, where):
    result = run(
        f"""
@limit("1 GiB", {where})
def test_asserts():
    assert torch.rand(2, 8).cuda().sum().item() == 8.5
@limit("1 GiB", {where})
def test_asserts_close():
    torch.testing.assert_close(torch.rand(2).cuda(), torch.zeros(2).cuda())
@limit("1 GiB", {where})
def test_branches():
    x = torch.rand(2, 8).cuda()
    torch.zeros(1000 if x.sum() > 3 else 10)
@limit("1 GiB", {where})
def test_runs_code_that_checks():
    from checked import validate
    validate(torch.rand(2, 8).cuda())
@limit("1 GiB", {where})
def test_looks_at_shapes():
    assert torch.rand(2, 8).cuda().shape == (2, 8)
@limit("1 GiB", {where})
def test_fails_by_itself():
    assert torch.rand(2, 8).cuda().shape == (2, torch.rand(()).cuda().item())
""".replace(".cuda()", ".cuda()" if "gpu" in where else ""),
        "-Wdefault",
        checked="def validate(x):\n    if not x.isfinite().all():\n        raise ValueError('not finite')\n",
    )
    result.assert_outcomes(passed=2, failed=4, warnings=1)
    result.stdout.fnmatch_lines(
        [
            "this test asserts on values, and its tensors have none (mode='fake'):",
            "*.py:* in test_asserts raises no error",
            "Way out: assert on shapes, dtypes and devices here, and on values in a test without mode='fake'.",
            "this test asserts on values, and its tensors have none (mode='fake'):",
            "*.py:* in test_asserts_close raises no error",
            "the memory peak is not known: it depends on values, and tensors have none (mode='fake'):",
            "*.py:* in test_branches branches on a guessed value",
        ]
    )
    result.stdout.fnmatch_lines(
        ["*.py:24: MemkitWarning: *::test_runs_code_that_checks assumes: *checked.py:2 in validate *"]
    )


def test_a_test_keeps_its_own_failure_and_its_outcome(run):
    result = run(
        """
@limit(10)
def test_fails():
    kept = torch.ones(1000)
    assert kept.sum() == 7
@limit(10)
def test_skips():
    torch.ones(1000)
    pytest.skip("not today")
@limit(10)
@pytest.mark.xfail(strict=True)
def test_is_known_to_be_large(): torch.ones(1000)
def test_unmarked(): torch.ones(10**6)
"""
    )
    result.assert_outcomes(failed=1, skipped=1, xfailed=1, passed=1)
    result.stdout.fnmatch_lines(["E       assert tensor(1000.) == 7", "*Captured memkit call*", "4,0* B, limit 10 B"])
    assert peaks(result)["test_unmarked"] is None


def test_closest_marker_wins_for_every_kind_of_test(run):
    result = run(
        """
@limit(100)
class TestClass:
    def test_of_the_class(self): torch.ones(1000)
    @limit(10**6)
    def test_its_own(self): torch.ones(1000)

class TestCase(unittest.TestCase):
    @limit(100)
    def test_unittest(self): torch.ones(1000)

@pytest.mark.parametrize("size", [10, pytest.param(20, marks=limit(79)), pytest.param(30, marks=limit(120))])
def test_sizes(size): torch.ones(size)
"""
    )
    result.assert_outcomes(passed=3, failed=3)
    assert peaks(result) == {
        "TestClass::test_of_the_class": 4000,
        "TestClass::test_its_own": 4000,
        "TestCase::test_unittest": 4000,
        "test_sizes[10]": None,
        "test_sizes[20]": 80,
        "test_sizes[30]": 120,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('"1 MM"', "got the text '1 MM'"),
        ("", "missing 1 required positional argument: 'limit'"),
        ("1, n=3", "unexpected keyword argument 'n'"),
        ('1, mode="fakes"', "got mode='fakes'; expected a mode of ('tensors', 'allocator', 'fake')"),
        ('1, gpu="RTX 4090"', "expected gpu and selected_fraction with mode='fake'"),
        ("1, selected_fraction=0.5", "expected gpu and selected_fraction with mode='fake'"),
        ('1, mode="fake", selected_fraction=0', "expected selected_fraction in (0, 1]"),
        (
            '1, mode="fake", gpu="RTX 40900"',
            "got an unknown GPU; expected a GPU that `memkit gpus` lists, such as RTX 4090",
        ),
        ('1, mode="fake", device="cuda"', "expected no device with mode='fake'"),
    ],
)
def test_invalid_arguments_error_names_the_test(run, arguments, message):
    result = run(f"@limit({arguments})\ndef test_wrong(model): pass\ndef test_other(): pass\n", "-q")
    result.assert_outcomes(errors=1, passed=1)
    lines = [line for line in result.outlines if message in line]
    assert "::test_wrong: " in lines[0]
    assert "Traceback" not in result.stdout.str()
    assert "During handling" not in result.stdout.str()


def test_modes_of_the_test_itself_go_on_as_ever(run):
    result = run(
        """
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
class Names(TorchDispatchMode):
    names = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

@pytest.fixture
def around():
    with Names() as names: yield names

@limit(12_000_000)
def test_both(around, model):
    with FlopCounterMode(display=False) as flops:
        model(torch.ones(64, 256))
    assert flops.get_total_flops() == 2 * 2 * 64 * 256 * 1024
    assert around.names.count("aten.addmm.default") == 2
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x): step(model, torch.ones(4, 256))
"""
    )
    result.assert_outcomes(passed=1)
    assert peaks(result)["test_both"] > 6 * 2**20


def test_assert_no_leak(run):
    result = run(
        """
def test_kept(assert_no_leak, model):
    outputs = []
    def keep(): outputs.append(model(torch.ones(64, 256)))
    assert_no_leak(keep, repeat=3)

def test_without_a_holder(assert_no_leak):
    rows = torch.zeros(0, 256)
    def grow():
        nonlocal rows
        rows = torch.cat([rows, torch.ones(64, 256)])
    assert_no_leak(grow, repeat=3)

def test_thread(assert_no_leak):
    kept = []
    def in_thread():
        import threading
        thread = threading.Thread(target=lambda: kept.append(torch.zeros(10000)))
        thread.start()
        thread.join()
    assert_no_leak(in_thread, repeat=3)

def test_clean(assert_no_leak, model):
    log = []
    optimizer = torch.optim.AdamW(model.parameters())
    def train():
        loss = model(torch.ones(64, 256)).square().mean()
        loss.backward()
        optimizer.step()
        log.append(loss.detach())
    assert_no_leak(train, repeat=3, warmup=2)

def test_too_few(assert_no_leak): assert_no_leak(lambda: None, repeat=2)
"""
    )
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines(
        [
            ">       assert_no_leak(keep, repeat=3)",
            "E       Failed: memory grows: * more in live tensors after 3 calls (*)",
            "E       local `outputs` of function test_kept keeps 4 tensors, *",
            "E         grows at: *py:*",
            "E       Failed: memory grows: 192.00 KiB more in live tensors after 3 calls (64.00 KiB, *)",
            "E       No holder was found. Live bytes after the last call, by the line that created them:",
            "E           256.00 KiB  *.py:* in grow",
            "E       Failed: memory grows over 3 calls, by tensors that this thread's operators did not create:",
            "E       local `kept` of function test_thread keeps 4 tensors, *",
            "E   memkit.errors.ConfigError: assert_no_leak(step, repeat=2, warmup=1): got 2 calls *",
        ]
    )
    assert "pytest_memory.py" not in result.stdout.str().partition("test_too_few")[0]  # the traceback ends in the test


SIZES = """
@pytest.mark.parametrize("size", [1000, 3000, 2000])
@limit("10 KiB")
def test_sizes(size): torch.ones(size)
"""
HIGHEST = r"highest memory peaks =+\n +11\.72 KiB  \S+sizes\[3000\]\n +7\.81 KiB  \S+sizes\[2000\]\n="


def test_peaks_are_in_the_summary_and_in_the_junit_file(run, pytester):
    text = run(SIZES, "--memkit-peaks=2", "--junitxml=found.xml").stdout.str()
    assert re.search(HIGHEST, text)
    assert '<property name="memkit_peak_bytes" value="12000" />' in pytester.path.joinpath("found.xml").read_text()
    assert "highest memory peaks" not in run(SIZES).stdout.str()


def ran(pytester, *options, **environment):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    paths = os.pathsep.join([str(ROOT), str(pytester.path)])
    variables = {"PATH": "", "PYTHONPATH": paths} | environment
    return subprocess.run(command, cwd=pytester.path, env=variables, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_installed_and_spread_over_workers(pytester):
    """As a user has it: found by its entry point, turned off by its name, with pytest-xdist."""
    info = pytester.mkdir("memkit_check-1.dist-info")
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: memkit-check\nVersion: 1\n")
    info.joinpath("entry_points.txt").write_text(f"[pytest11]\nmemkit = {PLUGIN}\n")
    pytester.makepyfile(HEAD + SIZES)
    text = ran(pytester, "-n1", "--memkit-peaks=2")
    assert re.search(HIGHEST, text)
    assert "1 failed, 2 passed" in text
    assert "memory_limit(" not in ran(pytester, "--markers", "-p", "no:memkit")


def test_markers_option_explains_the_marker(run):
    text = run("", "--markers").stdout.str()
    assert re.search(r"@pytest\.mark\.memory_limit\(limit, \*, mode='tensors', .*\): fail the ", text)


def test_plugin_imports_no_torch_for_other_tests(pytester):
    pytester.makepyfile("import sys\ndef test_without(): assert not {'torch', 'numpy'} & set(sys.modules)")
    text = ran(pytester, "-p", PLUGIN, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "1 passed" in text, text


def test_page_matches_behavior(run):
    page = (ROOT / "docs/track.md").read_text().partition("\n## Limits in tests\n")[2].partition("\n## ")[0]
    blocks = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    run(blocks).assert_outcomes(passed=3)
    result = run(blocks.replace('"12 MiB"', '"4 MiB"').replace("loss.item()", "loss"))
    result.assert_outcomes(passed=1, failed=2)
    shown = re.findall(r"^```text\n(.*?)^(?:\.\.\.\n)?```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    line_of_code = re.compile(r"\S+\.py:\d+")
    printed = line_of_code.sub("LINE", result.stdout.str())
    for line in line_of_code.sub("LINE", "".join(shown)).splitlines():
        assert line.strip() in printed
