"""Files read, findings suppressed by comments, results; and no text of any kind makes the check crash."""

import json
import random

import pytest
from hypothesis import given, settings, strategies as st

from memkit._core.errors import ConfigError, FileFormatError, InputError
from memkit.check.check import RULES, SCRIPT_RULES, check_paths, check_source
from memkit.check.launch import RULES as SHELL_RULES
from tests.helpers import assert_refused

HABIT = "torch.autograd.set_detect_anomaly(True)"
SCRIPT = f"import torch\n{HABIT}\n"


def rules_of(text, **kwargs):
    return [finding.rule for finding in check_source(text, **kwargs)]


# ------------------------------------------------------------------------------------------------- suppression


@pytest.mark.parametrize(
    "comment", ["# memkit: ignore", "# memkit: ignore[anomaly-left-on]", "#memkit:ignore[ anomaly-left-on ]"]
)
def test_a_comment_takes_a_finding_out(comment):
    assert rules_of(SCRIPT) == ["anomaly-left-on"]
    assert rules_of(f"import torch\n{HABIT}  {comment}\n") == []


def test_comment_counts_on_lines_of_the_call_only():
    call = "import torch\ntorch.set_default_device(\n    'cuda',  # memkit: ignore[global-cuda-default]\n)\n"
    assert rules_of(call) == []
    assert rules_of(f"# memkit: ignore\n{SCRIPT}") == ["anomaly-left-on"]
    assert rules_of("import torch\nx = 1  # memkit: ignore[anomaly-left-on]\n" + HABIT) == ["anomaly-left-on"]


def test_comment_ignores_only_its_rule_and_reports_unknown_ids():
    assert rules_of(SCRIPT.replace("\n", "  # memkit: ignore[graph-kept]\n")) == ["anomaly-left-on"]
    other, finding = check_source(f"import torch\n{HABIT}  # memkit: ignore[anomaly]\n")
    assert (other.rule, finding.rule) == ("anomaly-left-on", "unknown-ignore")
    assert "'anomaly'" in finding.message


def test_string_is_not_a_comment():
    assert rules_of(f'import torch\n"# memkit: ignore[nothing]"; {HABIT}\n') == ["anomaly-left-on"]


def test_a_comment_in_a_shell_script():
    line = "CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node=2 train.py"
    assert rules_of(line, path="run.sh") == ["more-processes-than-gpus"]
    assert rules_of(f"{line} # memkit: ignore", path="run.sh") == []


# ------------------------------------------------------------------------------------------------- files


def test_selects_folders_and_files(tmp_path):
    for name in ("a.py", "sub/b.py", ".hidden/c.py", "venv/d.py", "e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SCRIPT)
    result = check_paths([tmp_path])
    assert [finding.path for finding in result.findings] == [str(tmp_path / "a.py"), str(tmp_path / "sub/b.py")]
    assert (result.num_files, result.unread) == (2, ())
    assert_refused(lambda: check_paths([tmp_path / "e.txt"]), InputError, "a .txt file")
    assert_refused(lambda: check_paths([tmp_path / "none.py"]), InputError, "no such file")


def test_encodings(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9\n" + SCRIPT.encode())
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbf" + SCRIPT.encode())
    (tmp_path / "crlf.py").write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    result = check_paths([tmp_path])
    assert {(finding.path.rpartition("/")[2], finding.line) for finding in result.findings} == {
        ("latin.py", 4), ("bom.py", 2), ("crlf.py", 2),
    }  # fmt: skip


def test_reports_unreadable_files_and_checks_the_rest(tmp_path):
    bad = {
        "bytes.py": b"import torch \xff\xfe",
        "null.py": b"import torch\n\0",
        "two.py": b"import torch\nprint 'loss'\n",
        "deep.py": b"import torch\n" + b"(" * 5000,
        "coding.py": b"# coding: nonsense\nimport torch\n",
        "book.ipynb": b"import torch",
        "list.ipynb": b"[1]",
        "without.py": b"def (:\n",
    }
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "good.py").write_text(SCRIPT)
    result = check_paths([tmp_path])
    assert {path.rpartition("/")[2] for path, _ in result.unread} == set(bad)
    assert all(reason and "\n" not in reason for _, reason in result.unread)
    assert dict(result.unread)[str(tmp_path / "two.py")].startswith("line 2: Missing parentheses")
    assert [finding.rule for finding in result.findings] == ["anomaly-left-on"]


def test_reports_invalid_python():
    with pytest.raises(FileFormatError, match=r"check mine\.py.*line 2"):
        check_source("import torch\nprint 'x'\n", path="mine.py")


def test_a_notebook_counts_its_code_cells(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# title"]},
        {"cell_type": "code", "source": ["import torch\n", "%matplotlib inline\n", "if True:\n", "    !pip install x"]},
        {"cell_type": "code", "source": "%%bash\necho not python"},
        {"cell_type": "code", "source": ["x = 1\n", HABIT]},
    ]
    path = tmp_path / "book.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    (finding,) = check_paths([path]).findings
    assert (finding.cell, finding.line) == (3, 2)
    assert str(finding).startswith(f"{path}[cell 3]:2:1: warning[anomaly-left-on]")


def test_a_script_without_torch_has_no_findings():
    assert rules_of("import paddle as torch\n" + HABIT) == []


def test_select_and_ignore(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(SCRIPT + "torch.set_default_device('cuda')\n")
    everything = ["anomaly-left-on", "global-cuda-default"]
    assert [f.rule for f in check_paths([path]).findings] == everything
    assert [f.rule for f in check_paths([path], select=everything[:1]).findings] == everything[:1]
    assert [f.rule for f in check_paths([path], ignore=everything[:1]).findings] == everything[1:]
    assert_refused(lambda: check_paths([path], select=["anomaly-left"]), ConfigError, "write 'anomaly-left-on'")


# ------------------------------------------------------------------------------------------------- robustness

TEXTS = [text for rule in SCRIPT_RULES for text in (rule.example, rule.near_miss)]


def mutate(random_, text):
    """A few characters deleted, doubled, swapped, or a piece of another example put in."""
    for _ in range(random_.randint(1, 6)):
        start = random_.randrange(len(text) + 1)
        end = min(len(text), start + random_.randint(0, 12))
        other = random_.choice(TEXTS)
        at = random_.randrange(len(other))
        text = text[:start] + random_.choice(("", text[start:end] * 2, other[at : at + 25])) + text[end:]
    return text


def survives(text, path="fuzz.py"):
    try:
        findings = check_source(text, path=path)
    except FileFormatError:
        return False
    last = text.count("\n") + text.count("\r") + 1
    assert all(1 <= finding.line <= last and finding.column >= 1 for finding in findings)
    return True


def fuzz(num_sources):
    random_ = random.Random(0)
    parsed = sum(survives(mutate(random_, random_.choice(TEXTS))) for _ in range(num_sources))
    assert parsed > num_sources / 20, "too few of them are Python to say anything"


def test_mutated_sources():
    fuzz(1000)


@pytest.mark.slow
def test_fifty_thousand_mutated_sources():
    fuzz(50_000)


@settings(max_examples=100, deadline=None)
@given(st.text(), st.sampled_from([rule.example for rule in SHELL_RULES]), st.text())
def test_any_text_as_a_shell_script(before, example, after):
    survives(before + example + after, path="run.sh")


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_as_python(text):
    survives(f"import torch # memkit: ignore\n{text}")


def test_ids_are_one_of_a_kind():
    assert len({rule.id for rule in RULES}) == len(RULES)
