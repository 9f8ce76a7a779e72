"""The commands' output for people: 80 columns everywhere, color and progress on a terminal only."""

import contextlib
import io
import itertools
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from memkit._charts.text import display_width, fold
from memkit.cli import _COMMANDS, _terminal, main
from memkit.cli._terminal import ProgressLine, say, say_all, say_json
from tests.cli.test_exit_codes import TABLE, folder  # noqa: F401 - a fixture
from tests.helpers import ROOT, one_in

ESCAPE = re.compile(r"\x1b\[[0-9;]*[mK]|\r")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Standard output and standard error as terminals, and no variable that says anything about colors."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    streams = Terminal(), Terminal()
    monkeypatch.setattr(_terminal, "sys", SimpleNamespace(stdout=streams[0], stderr=streams[1]))
    return streams


# ------------------------------------------------------------------------------------------- 80 columns


def long_lines(text, allowed=()):
    """Lines of more than 80 columns that could have been folded: those of several words."""
    return [line for line in text.splitlines() if display_width(line) > 80 and len(line.split()) > 1]


MORE = [
    "--help",
    "estimate steps.py:build --gpu T4",
    "estimate steps.py:build --budget 24GiB --accumulation-steps 2 --precision bf16-mixed",
    "estimate low",
    "estimate high --budget 4090",
    "estimate steps.py",
    "estimate steps.py:biuld",
    "estimate steps.py:build --gpu A100",
    "estimate steps.py:build --gpu 24GB",
    "estimate",
    "estimat",
    "check --list-rules",
    "check bad.py good.py --ignore unknown-ignore",
    "compare small.json large.json --output page.md",
    "report small.json --output page.txt",
    "report small.json --language zh --output page.html",
    "gpus --all",
    "gpus --need 14GiB",
    "gpus --need 14GiB --all",
    "gpus T4",
    "gpus RTX",
    "presets low",
    "presets high --gpu-memory 24",
    "presets medium --gpu-memory 8",
    pytest.param("profile --core --max-edges 500 --modes train --output-dir out", marks=pytest.mark.slow),
    pytest.param(
        "profile --full --max-edges 500 --output-dir out --gpu T4 --gpu 4090 --gpu 3090 --gpu A10G --gpu L4 --gpu 5090",
        marks=pytest.mark.slow,
    ),
    "profile steps.py:build_step --sizes 1k,2k --output-dir out",
    "profile steps.py:build_guess --sizes 1k,2k --output-dir out",
]


@pytest.mark.parametrize(
    "command",
    [
        *one_in(2, (command for command, code in TABLE if code != 4)),  # a traceback is Python's own
        *MORE,
        *(f"{command} --help" for command in _COMMANDS),
    ],
)
@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore::memkit.MemkitWarning")
def test_every_line_has_80_columns_however_wide_the_terminal_is(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.suppress(SystemExit):  # argparse's own end
        main(command.split())
    out, err = capsys.readouterr()
    assert out or err
    assert not long_lines(out)
    assert not long_lines(err)


def test_folded_lines_keep_every_word():
    text = "NOT KNOWN whether it fits: " + " ".join(f"/a/path/of/a/file_{n}.py:{n}" for n in range(9))
    parts = fold(text, 80)
    assert len(parts) > 2
    assert " ".join(part.strip() for part in parts) == text
    assert all(part.startswith("  ") and not part.startswith("   ") for part in parts[1:])


def test_a_folded_row_continues_in_its_last_column():
    row = "source                " + "one word after the other " * 8
    first, *rest = fold(row.rstrip(), 80)
    assert first.startswith("source                one")
    assert rest
    assert all(part.index("o") in (22, 23) or part.startswith(" " * 22) for part in rest)


@pytest.mark.parametrize("width", range(1, 40))
def test_only_a_single_word_is_wider(width):
    text = "  name   这是一个没有空格的很长的句子需要换行。 and/a/path/without/any/space then more"
    parts = fold(text, width)
    assert "".join("".join(parts).split()) == "".join(text.split())
    for part in parts:
        assert display_width(part) <= width or len(re.findall(r"[一-鿿]|\S+", part.strip())) <= 1


def test_json_and_tracebacks_are_not_folded(capsys):
    say_json({"reason": "word " * 40})
    assert max(map(len, capsys.readouterr().out.splitlines())) > 80


# ------------------------------------------------------------------------------------------- color


def test_a_verdict_has_its_color_on_a_terminal(terminal):
    for tone, code in (("good", "32"), ("bad", "31"), ("unsure", "33")):
        say("fits", tone=tone)
        assert terminal[0].getvalue().endswith(f"\x1b[1;{code}mfits\x1b[0m\n")
    say("plain")
    say_all("a\nb")
    assert terminal[0].getvalue().endswith("\nplain\na\nb\n")


@pytest.mark.parametrize(
    ("variables", "has_colors"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),  # as no-color.org has it
        ({"TERM": "dumb"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
)
def test_color_settings(terminal, monkeypatch, variables, has_colors):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    say("fits", tone="good")
    assert ("\x1b" in terminal[0].getvalue()) is has_colors


def test_never_in_a_pipe_unless_forced(monkeypatch, capsys):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    say("fits", tone="good")
    assert capsys.readouterr().out == "fits\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    say("fits", tone="good")
    assert capsys.readouterr().out == "\x1b[1;32mfits\x1b[0m\n"


def test_a_colored_text_from_outside_is_still_harmless(terminal):
    say("\x1b[31m\u202efits", tone="good")
    assert "\\x1b[31m" in terminal[0].getvalue()
    assert "\u202e" not in terminal[0].getvalue()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("estimate steps.py:build --budget 1GiB", "32"),
        ("estimate steps.py:build --budget 1kB", "31"),
        ("estimate steps.py:convolution --budget 30MiB", "33"),
        ("estimate steps.py:guessed --budget 1GiB", "33"),
        ("check good.py", "32"),
        ("check bad.py", "33"),
        ("gpus --need 14GiB", "32"),
        ("gpus --need 2TiB", "31"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_verdicts_of_commands_have_their_colors(command, code, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(command.split())
    lines = capsys.readouterr().out.splitlines()
    colored = [line for line in lines if "\x1b" in line]
    assert colored
    assert colored[0].startswith(f"\x1b[1;{code}m")
    if not command.startswith("check"):
        assert colored[0] == lines[0]  # the verdict is the first line


# ------------------------------------------------------------------------------------------- progress


def test_progress_on_a_terminal_is_redrawn_and_erased(terminal, monkeypatch):
    monkeypatch.setattr(_terminal, "_REDRAW_SECONDS", 0.01)
    with ProgressLine("working") as progress:
        for _ in range(1000):
            if "working" in terminal[1].getvalue():
                break
            time.sleep(0.01)
        progress.show("another part")
    text = terminal[1].getvalue()
    assert re.search(r"\r\x1b\[Kworking, \d+ s", text)
    assert re.search(r"\r\x1b\[Kanother part, \d+ s", text)
    assert text.endswith("\r\x1b[K")
    assert terminal[0].getvalue() == ""
    time.sleep(0.05)
    assert terminal[1].getvalue() == text  # nothing draws any more


def test_fast_work_draws_no_progress_line(terminal):
    with ProgressLine("working"):
        pass
    assert ESCAPE.sub("", terminal[1].getvalue()) == ""


def test_a_line_of_progress_fits_the_terminal(terminal):
    with ProgressLine("working") as progress:
        progress.show("a/very/long/path/" * 20)
    for line in terminal[1].getvalue().split("\r\x1b[K"):
        assert len(line) < 80


def test_no_progress_in_a_pipe(capsys):
    with ProgressLine("working") as progress:
        progress.show("another part")
    assert capsys.readouterr() == ("", "")


def test_no_progress_on_a_dumb_terminal(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with ProgressLine("working") as progress:
        progress.show("another part")
    assert terminal[1].getvalue() == ""


def test_error_erases_progress_line_first(terminal):
    with pytest.raises(KeyError), ProgressLine("working") as progress:
        progress.show("a part")
        raise KeyError
    assert terminal[1].getvalue().endswith("\r\x1b[K")


# ------------------------------------------------------------------------------------------- quick


def test_help_imports_no_heavy_modules():
    """`memkit --help` imports little: it takes far less than a second of processor time."""
    code = "import sys\nfrom memkit.cli import main\ntry:\n main(['--help'])\nexcept SystemExit:\n pass\n"
    code += "print(sorted({'torch', 'numpy', 'matplotlib', 'pandas', 'tqdm'} & set(sys.modules)), len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    *_, last = done.stdout.splitlines()
    heavy, num_modules = last.rsplit(" ", 1)
    assert heavy == "[]"
    assert int(num_modules) < 600


def test_commands_are_named_once(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    page = (ROOT / "docs" / "cli.md").read_text()
    for command in itertools.chain(_COMMANDS):
        assert re.search(rf"^    {command} ", text, re.MULTILINE)
        assert f"| `memkit {command}" in page
