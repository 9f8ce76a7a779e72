"""Exit codes of all commands: 0 yes or done, 1 no, 2 wrong use, 3 not known, 4 the user's own code failed."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import memkit as mk
from memkit.cli import main
from memkit.cli._codes import INTERRUPTED, MEANINGS
from tests.cli.commands import unfolded
from tests.helpers import ROOT

STEPS = """
import sys

import torch
from torch import nn


def loss_fn(model, x):
    return model(x).square().mean()


def build():
    return nn.Linear(64, 64), torch.ones(8, 64), loss_fn, "sgd"


def guessed():
    def guess(model, x):
        return model(x).repeat(int(model(x).max()), 1).sum()

    return nn.Linear(64, 64), torch.ones(8, 64), guess, "sgd"


def selects():
    return nn.Linear(64, 64), torch.ones(8, 64), lambda model, x: model(x)[model(x) > 0].sum(), "sgd"


def convolution():
    return nn.Conv2d(64, 64, 3), torch.ones(8, 64, 64, 64), lambda model, x: model(x).sum(), "sgd"


def crash():
    raise KeyError("of mine")


def crash_in_step():
    return nn.Linear(64, 64), torch.ones(8, 63), loss_fn, "sgd"


def reads_a_file():
    open("there is no such file")


def leaves():
    sys.exit(0)


def nothing():
    pass


def build_step(n):
    x, weight = torch.ones(n, 64), nn.Parameter(torch.ones(64))
    return lambda: (x * weight).sum().backward()


def build_guess(n):
    x, weight = torch.ones(n, 64), nn.Parameter(torch.ones(64))
    return lambda: (x * weight).repeat(int(weight.sum()), 1).sum().backward()


def crash_step(n):
    raise KeyError("of mine")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # put back afterwards, with what the commands add
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "good.py").write_text("import torch\n")
    (tmp_path / "bad.py").write_text("import torch\ntorch.autograd.set_detect_anomaly(True)\n")
    (tmp_path / "python2.py").write_text("import torch\nprint 'x'\n")
    for name, peak in (("small", 1000), ("large", 2000), ("empty", 0)):
        (tmp_path / f"{name}.json").write_text(json.dumps([{"event": "forward", "peak_memory": peak}]))
    return tmp_path


TABLE = [
    ("estimate steps.py:build", 0),
    ("estimate steps.py:build --budget 1GiB", 0),
    ("estimate steps.py:build --budget 1kB", 1),
    ("estimate medium --budget 8GiB", 1),
    ("estimate steps.py:build --budget many", 2),
    ("estimate none.py:build", 2),
    ("estimate steps.py:nothing", 2),
    ("estimate steps.py:guessed", 3),
    ("estimate steps.py:guessed --budget 1GiB", 3),
    ("estimate steps.py:guessed --budget 1kB", 3),
    ("estimate steps.py:selects --budget 1GiB", 3),
    ("estimate steps.py:selects --budget 1GiB --selected-fraction 1", 0),
    ("estimate steps.py:selects --budget 1GiB --selected-fraction 0.2", 0),
    ("estimate steps.py:selects --budget 1kB --selected-fraction 1", 3),
    ("estimate steps.py:convolution --budget 30MiB", 3),
    ("estimate steps.py:crash", 4),
    ("estimate steps.py:crash_in_step", 4),
    ("estimate steps.py:reads_a_file", 4),
    ("estimate steps.py:leaves", 4),
    ("estimate broken.py:build", 4),
    ("check good.py", 0),
    ("check bad.py", 1),
    ("check bad.py python2.py", 2),
    ("check broken.py", 2),
    ("check none.py", 2),
    ("check good.py --select nothing", 2),
    ("compare small.json large.json", 0),
    ("compare large.json small.json --max-growth 10", 0),
    ("compare small.json large.json --max-growth 10", 1),
    ("compare small.json none.json", 2),
    ("compare empty.json large.json --max-growth 10", 3),
    ("report small.json --output page.md", 0),
    ("report none.json", 2),
    ("report small.json --output bad.py", 2),
    ("gpus", 0),
    ("gpus 4090", 0),
    ("gpus --need 14GiB", 0),
    ("gpus --need 2TiB", 1),
    ("gpus nonsense", 2),
    ("gpus --need many", 2),
    ("presets", 0),
    ("presets medium", 0),
    ("presets huge", 2),
    ("profile steps.py:build_step --sizes 1k,2k --modes train --output-dir out", 0),
    ("profile steps.py:build_step --sizes 1k,2G --modes train --output-dir out", 2),
    ("profile steps.py:build_step --sizes 1k,2000M --modes train --gpu T4 --output-dir out", 1),
    ("profile steps.py:build_step --sizes many --output-dir out", 2),
    ("profile steps.py:crash_step --sizes 1k,2k --output-dir out", 4),
    ("dryrun none.py --gpu T4", 2),
    ("dryrun good.py --gpu A100", 2),
]


@pytest.mark.parametrize(("command", "code"), TABLE)
@pytest.mark.usefixtures("folder")
def test_a_command_and_its_code(command, code, capsys):
    assert main(command.split()) == code
    out, err = capsys.readouterr()
    assert out or err
    assert "Traceback" not in out
    assert ("  File " in err) is (code == 4 and "leaves" not in command)


@pytest.mark.usefixtures("folder")
def test_guess_deciding_a_law_is_not_known():
    command = "profile steps.py:build_guess --sizes 1k,2k --modes train --output-dir out"
    with pytest.warns(mk.MemkitWarning, match=r"may be wrong: .*steps.py:\d+ in <lambda>"):
        code = main(command.split())
    assert code == 3


@pytest.mark.parametrize("function", ["crash", "crash_in_step", "reads_a_file"])
def test_traceback_begins_at_user_file_without_memkit(folder, function, capsys):
    assert main(["estimate", f"{folder}/steps.py:{function}"]) == 4
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if not re.match(r"[EW]\d{4} ", line)]  # newer versions of torch log the operator
    frames = [line for line in lines if line.startswith("  File ")]
    assert lines[0].startswith("Traceback")
    assert f'"{folder}/steps.py"' in frames[0]
    assert not any("/memkit/" in line for line in frames)
    lines = [line for line in lines if not line.startswith("memkit: ")]  # the note on where the step failed
    assert lines[-1].startswith(("KeyError: 'of mine'", "RuntimeError", "FileNotFoundError"))


def test_unknown_verdict_names_the_line(folder, capsys):
    assert main(["estimate", "steps.py:guessed", "--budget", "1GiB"]) == 3
    out = capsys.readouterr().out
    assert out.startswith("NOT KNOWN whether it fits into 1GiB\n")
    line = STEPS[: STEPS.index("repeat")].count("\n") + 1
    assert f"not known, because {folder}/steps.py:{line} in guess uses a guessed value" in unfolded(out)
    assert main(["estimate", "steps.py:guessed", "--budget", "1GiB", "--json"]) == 3
    record = json.loads(capsys.readouterr().out)
    assert (record["verdict"], record["fits"]) == ("not known", None)
    assert f"steps.py:{line}" in record["reason"]


def test_an_error_of_memkits_own_is_no_answer(monkeypatch, capsys):
    monkeypatch.setattr("memkit.cli.presets._show_table", None)
    assert main(["presets"]) == 3
    assert "please report it" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- names of files

EVIL = "a\x1b[31m\n\u202efits\x07.py"


def assert_harmless(text):
    assert not set(text) & {"\x1b", "\u202e", "\x07"}


@pytest.mark.parametrize(
    "command",
    [
        ["check", EVIL],
        ["check", "."],
        ["check", f"{EVIL}.none.py"],
        ["estimate", f"{EVIL}:build"],
        ["estimate", f"{EVIL}:none"],
        ["estimate", EVIL],
        ["compare", "small.json", EVIL],
        ["report", "small.json", "--output", f"{EVIL}.md"],
        ["gpus", EVIL],
        ["gpus", "--calibrated", EVIL],
        ["presets", EVIL],
        ["profile", f"{EVIL}:build_step", "--sizes", "10", "--modes", "train", "--output-dir", "out"],
        ["dryrun", EVIL + "x", "--gpu", "T4"],
    ],
    ids=lambda command: command[0],
)
def test_escapes_control_characters_in_names(folder, command, capsys):
    (folder / EVIL).write_text(STEPS + "\ndef habit():\n    torch.autograd.set_detect_anomaly(True)\n")
    main(command)
    out, err = capsys.readouterr()
    assert_harmless(out + err)
    assert out or err


def test_escapes_control_characters_in_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["presets", "medium", "--\x1b[31m\u202e"])
    assert_harmless(capsys.readouterr().err)


def test_escapes_control_characters_in_tracebacks(folder, capsys):
    (folder / "evil.py").write_text("def build():\n    raise KeyError('\\x1b[31m' + chr(0x202e))\n")
    assert main(["estimate", "evil.py:build"]) == 4
    assert_harmless(capsys.readouterr().err)


# ------------------------------------------------------------------------------------------- odd files


def test_pipes_and_devices_are_not_read(folder, capsys):
    os.mkfifo(folder / "pipe.py")
    (folder / "zero.py").symlink_to("/dev/zero")
    (folder / "huge.py").touch()
    os.truncate(folder / "huge.py", 2**40)  # takes no room
    result = mk.check.check_paths([folder])
    reasons = {path.rpartition("/")[2]: reason for path, reason in result.unread}
    assert reasons["pipe.py"] == "a pipe"
    assert reasons["zero.py"] == "a device"
    assert reasons["huge.py"] == "more than 32.00 MiB"
    assert main(["check", "pipe.py"]) == 2
    assert main(["gpus", "--calibrated", "pipe.py"]) == 2
    os.mkfifo(folder / "pipe.json")
    assert main(["profile", "--config", "pipe.json"]) == 2
    assert main(["estimate", "pipe.py:build"]) == 2
    assert main(["dryrun", "pipe.py", "--gpu", "T4"]) == 2
    capsys.readouterr()


def test_does_not_follow_dangling_link(folder, capsys):
    for name in ("page.md", "gpus.json"):
        (folder / name).symlink_to(folder / "elsewhere")
    assert main(["report", "small.json", "--output", "page.md"]) == 2
    with pytest.raises(FileNotFoundError, match="a link to a missing file"):
        mk.VirtualGPU("T4").save_snapshot(folder / "gpus.json")
    assert not (folder / "elsewhere").exists()
    capsys.readouterr()
    assert torch.zeros(1).item() == 0


def test_the_codes_stand_in_one_place_and_in_the_docs(capsys):
    assert list(MEANINGS) == [0, 1, 2, 3, 4, 130]
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out.partition("exit codes:\n")[2]
    page = (ROOT / "docs" / "cli.md").read_text()
    for code, meaning in MEANINGS.items():
        assert re.search(rf"^  {code} +{re.escape(meaning)}$", shown, re.MULTILINE)
        assert f"| {code} | {meaning} |" in page
    assert {code for _, code in TABLE} == set(MEANINGS) - {INTERRUPTED}


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("memkit.cli.presets._show_table", interrupted)
    assert main(["presets"]) == INTERRUPTED
    assert capsys.readouterr().err == "memkit: interrupted\n"


def test_closed_pipe_is_no_error():
    command = f"{sys.executable} -m memkit gpus --json | head -c 100 >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("0\n", "")
