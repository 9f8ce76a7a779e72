"""Commands that are mistyped: exit code 2, and a last line with the right command."""

import pytest

from memkit.cli import main
from tests.cli.commands import unfolded

STEPS = """
import torch


def build():
    return torch.nn.Linear(4, 4), torch.ones(2, 4), lambda model, x: model(x).sum()


def build_step(n):
    return lambda: torch.ones(n)


three = 3
"""

TABLE = [
    ("estimat medium", "write `memkit estimate medium`"),
    ("nothing", "one of check, compare, demo, dryrun, estimate, gpus, presets, profile, report"),
    ("estimate medum", "write `memkit estimate medium`."),
    ("estimate steps.py", "write `memkit estimate steps.py:build`, if the function is build."),
    ("estimate none.py:build", "write its path relative to this folder."),
    ("estimate steps.txt:build", "write for example `memkit estimate train.py:build`."),
    ("estimate steps.py:buld", "write `memkit estimate steps.py:build`."),
    ("estimate steps.py:three", "define `def three():` at the top level of steps.py."),
    ("estimate steps.py:build_step", "write `def build_step():`."),
    ("estimate medium --gpu 24G", "for a size write --budget 24G"),
    ("estimate steps.py:build --budget 24", "or a card of `memkit gpus`, such as 'RTX 4090'."),
    ("estimate steps.py:build --accumulation-steps 0", "pass accumulation_steps=1."),
    ("profile steps.py:build --sizes 1k", "write `def build(n):`."),
    ("gpus --need 24", "write '24GiB', or '24B' if bytes are meant."),
    ("gpus GTX-970", "estimate.fits('8GiB') says whether a size is enough."),
    ("presets medum", "write get_preset_config('medium')."),
    ("dryrun steps.py --gpu 24GB", "plan_training(..., budget='24GB')."),
]


@pytest.mark.parametrize(("command", "end"), TABLE)
def test_the_last_line_is_the_right_command(tmp_path, monkeypatch, capsys, command, end):
    monkeypatch.syspath_prepend(tmp_path)  # put back afterwards, with what the commands add
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "steps.txt").write_text(STEPS)
    try:
        code = main(command.split())
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert unfolded(capsys.readouterr().err).endswith(end)


def test_a_step_may_take_the_mode(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modes.py").write_text(STEPS.replace("build_step(n)", "build_step(n, mode)"))
    assert main(["profile", "modes.py:build_step", "--sizes", "1k,2k", "--output-dir", "out"]) == 0
    assert "build_step" in capsys.readouterr().out
