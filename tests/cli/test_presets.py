"""The `memkit presets` command, as typed in a shell."""

import json
import subprocess
import sys

import pytest

from memkit._version import __version__
from memkit.cli import main
from memkit.predict.formula import estimate_by_formula
from memkit.predict.presets import get_preset_config
from tests.cli.commands import assert_error, assert_wrong_usage, unfolded
from tests.helpers import run_python


def test_the_table(capsys):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["preset", "GPUs", "batch", "accumulation", "channels", "estimated", "total"]
    assert [line.split()[0] for line in lines[1:]] == ["low", "medium", "high"]
    assert lines[2].split()[-5:-2] == ["2", "4", "64"]


def test_the_table_as_json(capsys):
    assert main(["presets", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [(record["config"]["preset"], record["cards"]) for record in records] == [
        ("low", "8-12 GB"),
        ("medium", "16-24 GB"),
        ("high", "32 GB and more"),
    ]


def test_one_preset(capsys):
    assert main(["presets", "medium", "--gpu-memory", "24"]) == 0
    out, err = capsys.readouterr()
    assert "fits" in out
    assert not err


def test_one_preset_as_json(capsys):
    assert main(["presets", "medium", "--gpu-memory", "24", "--json"]) == 0
    config = get_preset_config("medium", 24)
    assert json.loads(capsys.readouterr().out) == {
        "config": config.model_dump(),
        "estimate": estimate_by_formula(config).as_dict(),
    }


def test_a_warning_goes_to_stderr_and_leaves_json_whole(capsys):
    assert main(["presets", "high", "--gpu-memory", "16", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["config"]["preset"] == "high"
    said = "memkit: warning: preset 'high' (32 GB and more) does not fit a card of 16 GB; 'medium' fits."
    assert unfolded(err) == said


@pytest.mark.parametrize("arguments", [["hgih"], ["low", "--gpu-memory", "nan"], ["low", "--gpu-memory", "-8"]])
def test_an_error_is_one_line_and_exit_code_2(capsys, arguments):
    assert_error(capsys, ["presets", *arguments], "memkit: error: get_preset_config(")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required: COMMAND"),
        (["presets", "low", "--gpu-memory", "24GB"], "invalid float value: '24GB'"),
        (["presets", "--gpu-memory", "24"], "needs the name of a preset"),
    ],
)
def test_wrong_usage_exits_with_2(capsys, arguments, text):
    assert_wrong_usage(capsys, arguments, text)


def test_python_dash_m_without_torch():
    """A table must not take the seconds that importing torch takes."""
    script = (
        "import runpy, sys; sys.argv = ['memkit', 'presets', 'low']\n"
        "try: runpy.run_module('memkit', run_name='__main__')\n"
        "except SystemExit as done: assert not done.code\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    assert "Estimated memory" in run_python(script).stdout


def test_version():
    done = subprocess.run([sys.executable, "-m", "memkit", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"memkit {__version__}\n"
