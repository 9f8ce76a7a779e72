"""The `memkit dryrun` command, as typed in a shell, on scripts as users write them."""

import importlib.util
import json
import re
import shutil
import tempfile
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from memkit._core.units import format_bytes
from memkit.cli import main
from memkit.cli.dryrun import render
from memkit.predict.gpus import find_gpu, write_gpus
from memkit.predict.usage import estimate_memory_usage
from tests.cli.commands import assert_error, assert_wrong_usage, unfolded
from tests.cli.forked import run
from tests.helpers import assert_not_imported

SCRIPTS = Path(__file__).parent / "scripts"
MIB = 2**20


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder: what is in it stays what it is."""
    shutil.copytree(SCRIPTS, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "project" / "kept").mkdir()
    (tmp_path / "project" / "kept" / "old.txt").write_text("old\n")
    (tmp_path / "project" / "kept" / "other.txt").write_text("other\n")
    (tmp_path / "project" / "runs" / "old").mkdir(parents=True)
    (tmp_path / "project" / "runs" / "old" / "first.txt").write_text("first\n")
    temporary = tempfile.mkdtemp(prefix="t")  # not in tmp_path: sockets' paths are short
    monkeypatch.setattr("tempfile.tempdir", temporary)
    monkeypatch.chdir(tmp_path / "project")
    before = contents(tmp_path)
    yield tmp_path / "project"
    assert contents(tmp_path) == before
    Path(temporary).rmdir()  # there is nothing in it


def contents(folder):
    """Every file under a folder, with its bytes and when it was changed."""
    return [(path, path.is_file() and path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def server():
    forkserver.ensure_running()  # with its own files where others have theirs


@pytest.fixture
def forked(server, folder, monkeypatch):
    """The same, with a process that starts in a moment; a few tests start one as users do."""
    monkeypatch.setattr("memkit.cli.dryrun.subprocess.run", run)
    return folder


def dryrun(capfd, *arguments):
    code = main(["dryrun", *arguments])
    out, err = capfd.readouterr()
    return code, out, err


_ECHO = """
import sys, torch
weight = torch.ones(3, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
for _ in range(9):
    weight.sum().backward()
    optimizer.step()
print(__name__, __package__, sys.argv, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "own", "num_steps"),
    [
        ("--gpu T4 {} -- --steps 7 --gpu 0", ["--steps", "7", "--gpu", "0"], 3),
        ("--gpu T4 --steps 2 -- {} --steps 7 -- -x", ["--steps", "7", "--", "-x"], 2),
        ("{} -m --gpu T4 one --steps 2 -- --help", ["-m", "one", "--help"], 2),
    ],
)
@pytest.mark.usefixtures("forked")
def test_words_after_dashes_are_the_scripts(capfd, tmp_path_factory, words, own, num_steps):
    script = tmp_path_factory.mktemp("echo") / "echo.py"
    script.write_text(_ECHO)
    code, out, _ = dryrun(capfd, "--json", *words.format(script).split())
    report = json.loads(out)
    assert (code, report["gpu"], report["arguments"], report["num_steps"]) == (0, "T4", own, num_steps)


@pytest.mark.parametrize(("name", "file"), [("package.train", "train.py"), ("package", "__main__.py")])
@pytest.mark.usefixtures("forked")
def test_a_module_runs_as_python_runs_it(capfd, monkeypatch, tmp_path_factory, name, file):
    package = tmp_path_factory.mktemp("project") / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("NUM = 7")
    (package / file).write_text(f"from .sizes import NUM\nassert NUM == 7{_ECHO.replace('range(9)', 'range(2)')}")
    monkeypatch.chdir(package.parent)
    code, out, err = dryrun(capfd, "--gpu", "T4", "-m", name, "--lr", "3", "--json")
    assert code == 0, err
    assert json.loads(out)["num_steps"] == 2
    assert f"__main__ package ['{package / file}', '--lr', '3']" in err


@pytest.mark.usefixtures("forked")
def test_a_module_that_is_not_there_says_so(capfd):
    code, out, _ = dryrun(capfd, "--gpu", "T4", "-m", "json.none", "--lr", "3")
    assert code == 4
    assert "No module named 'json.none'" in unfolded(out)


@pytest.mark.usefixtures("forked")
def test_what_compiled_code_takes_is_not_known(capfd):
    """A dry run runs it as written: the figures are there, but it does not say that the script fits."""
    code, out, _ = dryrun(capfd, "compiles.py", "--gpu", "RTX 4090", "--steps", "2", "--json")
    report = json.loads(out)
    assert (code, report["verdict"], report["fits"], report["is_compiled"]) == (3, "not known", None, True)
    assert any("calls torch.compile, and ran as written" in doubt for doubt in report["estimate"]["doubts"])
    assert report["estimate"]["parameters_bytes"] > 0


@pytest.mark.usefixtures("folder")
def test_a_training_script(capfd):
    code, out, err = dryrun(
        capfd, "train.py", "--width", "1024", "--gpu", "RTX 4090", "--steps", "4", "--json", "--", "--steps", "900"
    )
    assert code == 0
    assert "arguments ['train.py', '--width', '1024', '--steps', '900']" in err  # the script's output is not the report
    report = json.loads(out)
    assert report["fits"] is True
    assert (report["ended"], report["num_steps"], report["problem"]) == ("after its steps", 4, None)
    assert not report["is_compiled"]
    assert [Path(path).name for path in report["written"]] == ["last.pt", "train.log"]
    estimate = report["estimate"]
    num_parameters = 64 * 1024 + 1024 + 1024 * 10 + 10
    assert estimate["parameters_bytes"] == 4 * num_parameters
    assert estimate["optimizer_bytes"] >= 8 * num_parameters  # while the checkpoint is read there are two
    assert estimate["reserved_bytes"] >= estimate["peak_bytes"] > 16 * num_parameters
    assert estimate["total_bytes"] == estimate["reserved_bytes"] + estimate["context_bytes"]
    assert any("train.py" in guess for guess in estimate["guesses"])  # loss.item()
    assert any(holder["source"].startswith("train.py:") for holder in estimate["holders"])


@pytest.mark.usefixtures("forked")
def test_names_the_line_that_runs_out(capfd):
    code, out, _ = dryrun(capfd, "too_large.py", "--gpu", "T4")
    assert code == 1
    assert "DOES NOT FIT: T4 runs out of memory" in out
    said = unfolded(out)
    assert "at too_large.py:14 in <module>: hidden = model[:2]" in said
    assert "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 14.56 GiB" in said
    assert "out of memory in forward, 1, made by too_large.py:14" in said
    lines = [line for line in out.splitlines() if line[28:29] == " " and line.endswith("iB")]
    assert {"memory of the GPU", "parameters", "total"} < {line[:28].rstrip() for line in lines}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_an_optimizer_that_has_not_stepped_yet_is_not_counted_as_fitting(capfd):
    code, out, _ = dryrun(capfd, "warms_up.py", "100", "--gpu", "T4")
    assert code == 3
    said = unfolded(out)
    assert out.startswith("NOT KNOWN")
    assert "the optimizer made at warms_up.py:10 in <module> never stepped" in said
    assert "--steps with more than 3" in said
    for arguments in (("100", "--steps", "6"), ("2",)):  # it has stepped; or the script has ended by itself
        code, out, _ = dryrun(capfd, "warms_up.py", arguments[0], "--gpu", "T4", *arguments[1:])
        assert code == 0
        assert out.startswith("fits T4")


@pytest.mark.slow
def test_pages_match_command_output(capfd, tmp_path, monkeypatch):
    pages = Path(__file__).parents[2]
    shown = (pages / "docs/virtual-gpu.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(re.search(r"```py\n(.*?)```", shown, re.DOTALL)[1])
    code, out, _ = dryrun(capfd, "train.py", "--gpu", "RTX 3060 12GB")
    assert code == 1
    beginning, _, _ = out.partition("Including")
    code, out, _ = dryrun(capfd, "train.py", "--gpu", "RTX 4090")
    assert code == 0
    verdict, *report = out.splitlines()
    for page in (shown, (pages / "README.md").read_text()):
        assert beginning in page
        assert verdict in page
    assert "\n".join(report[3 : report.index("confidence: exact")]) in shown  # all but the seconds


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_recovering_script_fits_and_resets_hide_no_peak(capfd):
    code, out, _ = dryrun(capfd, "too_large.py", "--recover", "--gpu", "T4", "--json")
    assert code == 0
    report = json.loads(out)
    places = [(place["phase"], place["line"]) for place in report["out_of_memory"]]
    assert places == [
        ("forward", "too_large.py:14 in <module>"),
        ("backward", "too_large.py:14 in <module>"),
    ]
    assert report["estimate"]["peak_bytes"] > 8 * 1024 * MIB  # of the first try


@pytest.mark.usefixtures("forked")
def test_writes_are_visible_to_the_script_only(capfd, tmp_path_factory):
    cards = tmp_path_factory.mktemp("cards") / "own.json"
    write_gpus(cards, [replace(find_gpu("T4"), name="own card")])
    code, out, err = dryrun(capfd, "writes.py", "--gpu", "own card", "--calibrated", str(cards))
    assert code == 3, err
    assert "no gradient was seen" in out
    assert "/copied/deep/x.txt" in out


@pytest.mark.parametrize(
    ("ending", "code", "expected"),
    [
        pytest.param("exit", 4, ["failed (SystemExit)", "ends.py:10 in <module>: sys.exit(3)"], marks=pytest.mark.slow),
        (
            "missing",
            4,
            ["No such file or directory: 'data/train.bin'", "way out: prepare data/train.bin as for training"],
        ),
        pytest.param("package", 4, ["way out: install a_package_that_nobody_has"], marks=pytest.mark.slow),
        pytest.param(
            "safetensors",
            3,
            ["got 'weights.safetensors', a file that safetensors opens itself", "torch.save(model.state_dict(), PATH)"],
            marks=pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="comes with transformers"),
        ),
        pytest.param(
            "bytes of safetensors",
            3,
            ["a tensor without data, 'weight', whose bytes safetensors reads itself", "leave this write out"],
            marks=[
                pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="comes with transformers"),
                pytest.mark.slow,
            ],
        ),
        ("second card", 3, ["failed (NoSuchCardError)", "only cuda:0 is there", "device_ids=[0]"]),
        ("selects", 3, ["at ends.py:17 in <module>: print(x[x > 0].sum())", "pass --selected-fraction 1.0"]),
    ],
)
@pytest.mark.usefixtures("forked")
def test_failing_script(capfd, ending, code, expected):
    found, out, _ = dryrun(capfd, "ends.py", ending, "--gpu", "T4")
    assert found == code
    assert out.splitlines()[0].startswith("NOT KNOWN: the script failed")
    for text in expected:
        assert text in unfolded(out)


@pytest.mark.parametrize(
    ("fraction", "code", "verdict"),
    [
        ("1", 3, r"NOT KNOWN: T4 runs out of memory if masks select 100%; if they select less, it may fit"),
        ("0.01", 0, r"fits T4: .* of .*, if masks select at most 1%"),
    ],
)
@pytest.mark.usefixtures("forked")
def test_an_assumed_fraction_never_says_that_a_script_does_not_fit(capfd, fraction, code, verdict):
    found, out, err = dryrun(capfd, "ends.py", "selects much", "--gpu", "T4", "--selected-fraction", fraction)
    assert found == code, err
    assert re.match(verdict, unfolded(out))


@pytest.mark.usefixtures("forked")
def test_without_an_optimizer_a_step_is_a_backward_pass(capfd):
    code, out, _ = dryrun(capfd, "--gpu", "T4", "--steps", "5", "--json", "ends.py", "by hand")
    assert code == 0
    report = json.loads(out)
    assert (report["num_steps"], report["ended"]) == (5, "after its steps")
    assert report["estimate"]["guesses"] == []


@pytest.mark.usefixtures("forked")
def test_guess_becoming_a_size_is_not_known(capfd, monkeypatch):
    runs = []
    monkeypatch.setattr("memkit.cli.dryrun.subprocess.run", lambda *a, **kw: runs.append(a) or run(*a, **kw))
    code, out, err = dryrun(capfd, "guesses.py", "size", "--gpu", "T4", "--json")
    assert code == 3
    report = json.loads(out)
    assert (report["verdict"], report["fits"]) == ("not known", None)
    (doubt,) = report["estimate"]["doubts"]  # the branch on the best loss takes the same memory either way
    assert doubt.startswith("guesses.py:10 in <module> uses a guessed value")
    assert doubt.endswith("with another answer its memory differs from guesses.py:11 in <module> on")
    (assumption,) = report["estimate"]["assumptions"]
    assert assumption == "guesses.py:17 in <module> finds all numbers finite"
    assert "NOT KNOWN: its memory may differ from what was seen\n  guesses.py:10" in render(report)
    assert len(runs) == 3
    assert err.count("step 1:") == 1  # what it prints is printed once


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_script_that_only_logs_values_fits(capfd):
    code, out, _ = dryrun(capfd, "guesses.py", "--gpu", "T4")
    assert code == 0
    assert "fits T4, assuming that 1 check of values passes" in out


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_steps_without_a_gradient_are_not_known(capfd):
    code, out, _ = dryrun(capfd, "guesses.py", "lost", "--gpu", "T4", "--steps", "1")
    assert code == 3
    assert "guesses.py:22 in <module> steps AdamW, but no parameter had a gradient" in out


@pytest.mark.usefixtures("forked")
def test_training_without_the_card_is_not_known(capfd):
    code, out, _ = dryrun(capfd, "on_the_cpu.py", "--gpu", "T4")
    assert code == 3
    assert "the script trained on the CPU and put nothing on the card" in unfolded(out)


@pytest.mark.usefixtures("forked")
def test_a_branch_on_the_float_of_a_loss_is_not_known(capfd, tmp_path_factory):
    """A plain number: no comparison can be turned around, so other numbers are tried; one of them takes the branch."""
    script = tmp_path_factory.mktemp("branches") / "script.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(64, 64).cuda()\n"
        "loss = model(torch.randn(64, 64).cuda()).square().mean()\n"
        "loss.backward()\n"
        "if float(loss) < 0.5:\n"
        "    kept = torch.empty(40 << 30, dtype=torch.uint8, device='cuda')\n"
    )
    code, out, _ = dryrun(capfd, str(script), "--gpu", "RTX 4090")
    assert code == 3
    assert "script.py:5 in <module> uses a guessed value where memkit cannot follow it" in unfolded(out)


CHECKED = """
import torch
from torch.distributions import Normal
model = torch.nn.Linear(8, 2).cuda()
y = model(torch.randn(4, 8).cuda()).exp()
{check}
y.mean().backward()
"""
GOES_ON = """
try:
    assert (y > 0).all()
except AssertionError:
    y = y.repeat(10**6, 1)
"""


@pytest.mark.parametrize(
    ("check", "code", "text"),
    [
        ("assert (y > 0).all()", 0, "fits T4, assuming that 1 check of values passes"),
        ("if not (y > 0).all():\n    raise ValueError", 0, "fits T4, assuming that 1 check of values passes"),
        ("y = Normal(y, y).log_prob(y)", 0, "fits T4, assuming that 2 checks of values pass"),
        (GOES_ON, 3, "script.py:8 in <module> branches on a guessed value: with another answer its memory differs"),
        ("if not (y > 0).all():\n    1 / 0", 3, "let it raise its error itself, as `if not ok: raise ValueError(...)`"),
    ],
    ids=["assert", "raise", "distribution", "caught", "division"],
)
@pytest.mark.usefixtures("forked")
def test_checks_that_raise_are_assumed_to_pass(capfd, tmp_path_factory, check, code, text):
    script = tmp_path_factory.mktemp("checked") / "script.py"
    script.write_text(CHECKED.format(check=check))
    found, out, _ = dryrun(capfd, str(script), "--gpu", "T4")
    assert found == code
    assert text in unfolded(out)


@pytest.mark.parametrize(
    ("line", "doubt", "code"),
    [
        pytest.param("torch.ones(3)", "the script put nothing on the card", 3, marks=pytest.mark.slow),
        ("torch.ones(3, device='cuda') * 2", "no gradient was seen", 3),
        ("torch.ones(3, device='cuda', requires_grad=True).sum().backward()", "", 0),
    ],
)
@pytest.mark.usefixtures("forked")
def test_a_script_without_training_is_not_known(capfd, tmp_path_factory, line, doubt, code):
    script = tmp_path_factory.mktemp("without") / "script.py"
    script.write_text(f"import torch\n{line}\n")
    found, out, _ = dryrun(capfd, str(script), "--gpu", "T4")
    assert found == code
    assert doubt in unfolded(out)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none.py", "--gpu", "T4"], "got no such file"),
        (["/", "--gpu", "T4"], "got a directory"),
        (["cells.ipynb", "--gpu", "T4"], "nbconvert --to script cells.ipynb && memkit dryrun cells.py --gpu 'T4'"),
        (["ends.py", "--gpu", "A100"], "matches several GPUs"),
        (["ends.py", "--gpu", "Apple 16GB"], "an NVIDIA GPU"),
    ],
)
@pytest.mark.usefixtures("forked")
def test_wrong_use_prints_no_traceback(capfd, monkeypatch, tmp_path_factory, arguments, text):
    if arguments[0] == "cells.ipynb":
        monkeypatch.chdir(tmp_path_factory.mktemp("notebook"))
        Path("cells.ipynb").write_text("{}")
    assert_error(capfd, ["dryrun", *arguments], text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ends.py"], "--gpu"),
        (["ends.py", "--gpu", "T4", "--steps", "0"], "--steps"),
        (["ends.py", "--gpu", "T4", "--selected-fraction", "50"], "--selected-fraction"),
        ([], "required"),
    ],
)
@pytest.mark.usefixtures("forked")
def test_missing_options_are_wrong_usage(capsys, arguments, text):
    assert_wrong_usage(capsys, ["dryrun", *arguments], text)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_reports_dead_process(capfd):
    code, _, err = dryrun(capfd, "dies.py", "--gpu", "T4")
    assert code == 3
    assert "got killed by SIGKILL; expected a script that runs to its end" in unfolded(err)


@pytest.mark.usefixtures("folder")
@pytest.mark.slow
def test_a_traceback_of_ctrl_c_starts_in_the_script(capfd, tmp_path_factory):
    script = tmp_path_factory.mktemp("interrupted") / "script.py"
    # Python's own handler is not there where this run is in the background of a shell.
    script.write_text(
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler); print('so far')\n"
        "signal.raise_signal(signal.SIGINT)\n"
    )
    code, _, err = dryrun(capfd, str(script), "--gpu", "T4")
    assert code == 3
    assert "killed by SIGINT" in unfolded(err)  # as Python ends by it
    assert f'Traceback (most recent call last):\n  File "{script}", line 3, in <module>\n' in err
    assert "so far" in err
    assert err.count("KeyboardInterrupt") == 1


def test_the_command_itself_does_not_import_torch():
    assert_not_imported({"torch"}, "import memkit.cli.dryrun")


def test_reports_convolution_workspace_and_first_guesses():
    model, image = torch.nn.Conv2d(16, 16, 3), torch.ones(4, 16, 64, 64)
    estimate = estimate_memory_usage(model, image, lambda model, x: model(x).sum(), target="T4")
    assert estimate.workspace_bytes
    report = {
        "script": "train.py",
        "gpu": "T4",
        "capacity_bytes": find_gpu("T4").total_bytes,
        "verdict": "fits",
        "fits": True,
        "ended": "by itself",
        "num_steps": 1,
        "seconds": 1.0,
        "problem": None,
        "out_of_memory": [],
        "written": [],
        "is_compiled": False,
        "estimate": json.loads(json.dumps(replace(estimate, guesses=tuple("abcdefg")).as_dict())),
    }
    text = render(report)
    assert f"inside kernels, at most {format_bytes(estimate.workspace_bytes):>17}" in text
    assert text.endswith("answered without data\n  a\n  b\n  c\n  d\n  e\n  and 2 more")


# ---------------------------------------------------------------------------------------------------- torchrun


@pytest.mark.usefixtures("forked")
def test_a_script_for_torchrun_says_so_and_runs_as_the_first_rank(capfd):
    code, out, _ = dryrun(capfd, "ranks.py", "--gpu", "RTX 4090")
    assert code == 4
    assert "the script is for torchrun: run memkit dryrun --nproc-per-node N SCRIPT" in unfolded(out)
    code, out, err = dryrun(capfd, "--nproc-per-node", "4", "ranks.py", "--gpu", "RTX 4090", "--json")
    assert code == 0
    assert "rank 0 of 4 by nccl, 4 cards" in err
    found = json.loads(out)
    assert found["num_steps"] == 3
    assert "rank 0 of 4" in render(found)
    weights = 8 * (1024 * 1024 + 1024) * 4
    assert found["estimate"]["peak_bytes"] > 5 * weights  # DDP's buckets are there beside the gradients


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_sharding_script_holds_its_share(capfd):
    code, out, _ = dryrun(capfd, "--nproc-per-node", "8", "ranks.py", "fsdp", "--gpu", "RTX 4090", "--json")
    assert code == 0
    parameters_bytes = json.loads(out)["estimate"]["parameters_bytes"]
    assert parameters_bytes == pytest.approx(8 * (1024 * 1024 + 1024) * 4 / 8, rel=0.01)


@pytest.mark.usefixtures("forked")
def test_spawning_script_runs_as_first_process(capfd):
    code, out, _ = dryrun(capfd, "spawns.py", "--gpu", "RTX 4090", "--json")
    assert code == 0
    assert json.loads(out)["num_steps"] == 3


@pytest.mark.parametrize(
    ("module", "way"),
    [
        ("skimage", "install scikit-image into"),
        pytest.param(
            "no_such_module",
            "install no_such_module into .* if no_such_module is the project's own",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "torch._six", "torch._six is not part of the installed torch: install the version", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.usefixtures("forked")
def test_missing_module_error_names_the_package(capfd, module, way):
    if module == "skimage" and importlib.util.find_spec(module):
        pytest.skip("scikit-image is installed")
    code, out, _ = dryrun(capfd, "imports.py", module, "--gpu", "RTX 4090")
    assert code == 4
    assert re.search(way, unfolded(out))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_spawned_workers_find_the_script(capfd):
    code, out, _ = dryrun(capfd, "spawned_workers.py", "--gpu", "T4", "--json")
    assert code == 0
    assert json.loads(out)["num_steps"] == 3
