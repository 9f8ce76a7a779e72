"""The `memkit check` command, as typed in a shell."""

import json
import re
from pathlib import Path

import pytest

from memkit.check.check import RULES
from memkit.cli import main
from tests.cli.commands import assert_wrong_usage, unfolded
from tests.helpers import assert_not_imported

CLEAN = "import torch\n"
IDS = [*(rule.id for rule in RULES), "unknown-ignore"]
HABIT = "import torch\ntorch.autograd.set_detect_anomaly(True)\n"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HABIT)
    return path


def test_findings_in_lines_and_exit_code_1(capsys, script):
    assert main(["check", str(script)]) == 1
    *finding, last = capsys.readouterr().out.splitlines()
    assert finding[0].startswith(f"{script}:2:1:")
    said = unfolded("\n".join(finding))
    assert said.startswith(f"{script}:2:1: warning[anomaly-left-on] anomaly detection is on for the whole run: ")
    assert sum(line.startswith("    fix: ") for line in finding) == 1
    assert last == "1 file: 0 errors, 1 warning"


def test_wrong_use(capsys, script):
    script.write_text("import torch\nprint 'x'\n")
    assert main(["check", str(script)]) == 2
    assert re.fullmatch(r"memkit: cannot check .*train\.py: line 2: .*", unfolded(capsys.readouterr().err))
    assert_wrong_usage(capsys, ["check"], "expected a file or a folder")


def test_json(capsys, script):
    assert main(["check", "--json", str(script)]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["num_files"], result["unread"]) == (1, [])
    (finding,) = result["findings"]
    assert (finding["rule"], finding["line"], finding["column"]) == ("anomaly-left-on", 2, 1)


def test_select_and_ignore(capsys, script):
    assert main(["check", str(script), "--ignore", "graph-kept, anomaly-left-on"]) == 0
    assert main(["check", str(script), "--select", "graph-kept"]) == 0
    assert main(["check", str(script), "--select", "anomaly-on"]) == 2
    assert "Way out: write 'anomaly-left-on'" in unfolded(capsys.readouterr().err)
    script.write_text("import torch  # memkit: ignore[nothing]\n")
    assert main(["check", str(script), "--select", "unknown-ignore"]) == 1
    assert main(["check", str(script), "--select", "graph-kept"]) == 0
    assert main(["check", str(script), "--ignore", "unknown-ignore"]) == 0


def test_the_list_of_rules(capsys):
    assert main(["check", "--list-rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == IDS
    assert main(["check", "--list-rules", "--json"]) == 0
    assert [rule["id"] for rule in json.loads(capsys.readouterr().out)] == IDS


def test_without_torch_and_without_running_the_script(script):
    script.write_text(HABIT + "raise SystemExit(7)\n")
    assert_not_imported({"torch"}, f"from memkit.cli import main; assert main(['check', {str(script)!r}]) == 1")


def test_the_hook_calls_the_command():
    hook = (Path(__file__).parents[2] / ".pre-commit-hooks.yaml").read_text()
    assert "id: memkit-check" in hook
    assert "entry: memkit check\n" in hook
