"""`memkit dryrun`: run an unchanged training script on a virtual GPU."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memkit._core.errors import InputError, StateError
from memkit._core.printable import counted, percent, printable
from memkit._core.units import format_bytes
from memkit.cli._codes import FAILED, NO, NOT_KNOWN, YES
from memkit.cli._failures import say_error
from memkit.cli._terminal import ProgressLine, Tone, is_watched, say, say_all, say_json
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.gpus import GPU, capability_of, find_gpu

RUNS_SCRIPT = True
_STEPS = 3
_LEAST_SECONDS, _SLOWER = 60, 5  # time limit for a script when it runs again
_MORE = 1.01  # the cycle collector may run a moment later
_BETWEEN_RUNS = ("branches", "numbers", "other_way", "peaks")
_PACKAGE = Path(__file__).parents[1]
_NUM_LISTED = 5
_ENDINGS = {"out of memory": "when memory ran out", "error": "with an error"}
_TONES: dict[str, Tone] = {"fits": "good", "does not fit": "bad", "not known": "unsure", "failed": "bad"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "dryrun",
        help="run a training script, unchanged, on a virtual GPU",
        usage="memkit dryrun [-m] SCRIPT [ARGUMENT ...] --gpu NAME [--steps N]\n"
        "                     [--nproc-per-node N] [--selected-fraction F]\n"
        "                     [--calibrated FILE] [--json]",
        description="Options may be before or after the script's arguments; all after -- belongs to the script.",
        allow_abbrev=False,
    )
    _add_options(parser)
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module or package, as for python -m SCRIPT"
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments, as for python SCRIPT"
    )
    parser.set_defaults(run=_run, parser=parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help='the GPU, such as "RTX 4090"; `memkit gpus` lists them')
    parser.add_argument("--steps", type=int, default=_STEPS, metavar="N", help=f"optimizer steps to run ({_STEPS})")
    parser.add_argument(
        "--selected-fraction", type=float, metavar="F", help="the fraction of elements that masks are assumed to select"
    )
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="run the script as the first of N processes of torchrun"
    )
    parser.add_argument("--calibrated", metavar="FILE", help="prefer the GPUs of this file to the built-in table")
    parser.add_argument("--json", action="store_true", help="machine-readable output, sizes in bytes")


def _run(arguments: argparse.Namespace) -> int:
    options = argparse.ArgumentParser(prog="memkit dryrun", add_help=False, allow_abbrev=False)
    _add_options(options)
    _, own = options.parse_known_args(arguments.script, arguments)
    words = [*own, *arguments.after]
    _refuse_wrong(arguments, words)
    arguments.script, *own = words
    gpu = find_gpu(arguments.gpu, calibrated=arguments.calibrated)
    capability_of(gpu)
    try:
        report = _report(arguments, own, gpu)
    except _NoReportError as error:
        say_error(f"memkit: {'not known' if error.is_killed else 'error'}", error)
        return NOT_KNOWN if error.is_killed else FAILED
    if arguments.json:
        say_json(report)
    else:
        verdict, _, rest = render(report).partition("\n")
        say(verdict, tone=_TONES[report["verdict"]])
        say_all(rest)
    return {"fits": YES, "does not fit": NO, "not known": NOT_KNOWN, "failed": FAILED}[report["verdict"]]


def _refuse_wrong(arguments: argparse.Namespace, words: list[str]) -> None:
    """Refuse options and scripts that cannot be run."""
    if not words:
        arguments.parser.error("the following arguments are required: SCRIPT")
    if arguments.gpu is None:
        arguments.parser.error("the following arguments are required: --gpu")
    if arguments.steps < 1:
        arguments.parser.error("--steps: expected at least 1")
    if arguments.selected_fraction is not None and not 0 < arguments.selected_fraction <= 1:
        arguments.parser.error("--selected-fraction: expected a fraction above 0 and at most 1")
    if arguments.nproc_per_node is not None and arguments.nproc_per_node < 1:
        arguments.parser.error("--nproc-per-node: expected at least 1")
    if not arguments.is_module:
        _refuse_no_script(words[0], arguments.gpu)


def _refuse_no_script(script: str, gpu: str) -> None:
    """Refuse a path that is not a Python script."""
    path = Path(script)
    if path.is_file() and path.suffix != ".ipynb":
        return
    got = "a directory" if path.is_dir() else "no such file"
    fix = "write the script as for `python`, such as `train.py` or `-m package.train`."
    if path.is_file():
        converted = path.with_suffix(".py")
        got = "a notebook"
        fix = f"run `jupyter nbconvert --to script {script} && memkit dryrun {converted} --gpu '{gpu}'`."
    raise InputError(
        f"memkit dryrun {script}",
        got=got,
        expected="the path of a Python script, or -m and the name of a module",
        fix=fix,
    )


def _report(arguments: argparse.Namespace, own: list[str], gpu: GPU) -> dict[str, Any]:
    """Run the script in its own process, again if the result may depend on guesses, and report the outcome."""
    script = _Script(arguments, own)
    with tempfile.TemporaryDirectory(prefix="memkit-") as folder:
        sizes = Path(folder, "sizes.npy")
        if is_watched(sys.stderr):  # no line that is redrawn: the script writes to the same terminal
            say(f"memkit: running {arguments.script} on a virtual {gpu.name}; its output follows", is_error=True)
        found = script.run("plain", sizes)
        doubts: list[str] = found["estimate"]["doubts"]
        if found["ended"] != "error":
            outcome = script.with_answers(["contrary"], sizes, found) if found["branches"] else ""
            doubts = _settled(doubts, found["branches"], outcome)
            outcome = outcome or (
                script.with_answers(["large", "small", "other"], sizes, found) if found["numbers"] else ""
            )
            doubts = _settled(doubts, found["numbers"], outcome)
    found["estimate"]["doubts"] = doubts
    return {
        "script": arguments.script,
        "arguments": own,
        "gpu": gpu.name,
        "num_ranks": arguments.nproc_per_node,
        "capacity_bytes": gpu.total_bytes,
        "verdict": _word(found, doubts),
        "fits": {"fits": True, "does not fit": False}.get(_word(found, doubts)),
        **{name: value for name, value in found.items() if name not in _BETWEEN_RUNS},
    }


def _settled(doubts: list[str], guessed: list[str], outcome: str) -> list[str]:
    """Return the doubts that remain after the script ran again with other answers to the guesses."""
    if outcome:
        return [f"{doubt}: {outcome}" if doubt in guessed else doubt for doubt in doubts]
    return [doubt for doubt in doubts if doubt not in guessed]


def _word(found: dict[str, Any], doubts: list[str]) -> str:
    if found["ended"] == "error":
        is_scripts = found["problem"]["of"] == "script" and not doubts
        return "failed" if is_scripts else "not known"
    if doubts:
        return "not known"
    if found["ended"] != "out of memory":
        return "fits"
    # With an assumed share, the memory is an upper bound: if masks select less, the step may fit.
    return "does not fit" if found["estimate"]["selected_fraction"] is None else "not known"


class _NoReportError(StateError):
    """The script's process ended without a report: it was killed, or it exited bypassing Python's shutdown."""

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended it."""
        return self.got.startswith("killed")


class _Script:
    """A script and the settings to run it with."""

    def __init__(self, arguments: argparse.Namespace, own: list[str]) -> None:
        self._order = {
            "cwd": str(Path.cwd()),
            "script": arguments.script,
            "is_module": arguments.is_module,
            "arguments": own,
            "gpu": arguments.gpu,
            "calibrated": arguments.calibrated,
            "steps": arguments.steps,
            "num_ranks": arguments.nproc_per_node,
            "selected_fraction": arguments.selected_fraction,
        }

    def run(self, answers: str, sizes: Path, *, is_quiet: bool = False, timeout: float | None = None) -> dict[str, Any]:
        """Run it once; return what `memkit.predict.script.process` reports.

        Args:
            answers: How the virtual GPU answers questions about unknown values.
            sizes: File to which the allocation sizes are written, or with whose contents they are compared.
            is_quiet: Whether to discard the script's output.
            timeout: Seconds after which the script is stopped.

        Raises:
            _NoReportError: The script ended without a report.
        """
        with tempfile.TemporaryDirectory(prefix="memkit-") as folder:
            temporary = Path(folder, "t")  # short: holds workers' sockets, whose paths are limited to 107 characters
            temporary.mkdir()
            order = self._order | {"folder": folder, "answers": answers, "sizes": str(sizes)}
            settings = {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
            code = subprocess.run(
                [sys.executable, "-m", "memkit.predict.script.process", json.dumps(order)],
                cwd=_PACKAGE.parent,  # so that -m finds memkit, installed or not
                env=os.environ | settings,  # noqa: TID251 - passed on unchanged
                stdout=subprocess.DEVNULL if is_quiet else sys.stderr.fileno(),
                stderr=subprocess.DEVNULL if is_quiet else None,
                timeout=timeout,
                check=False,
            ).returncode
            path = Path(folder, "report.json")
            if not path.is_file():
                raise _NoReportError(
                    f"memkit dryrun {self._order['script']}",
                    got=f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code} and no report",
                    expected="a script that runs to its end or fails with an exception",
                    fix="see its output above; SIGKILL usually means that this machine's own memory ran out.",
                )
            if not sizes.is_file():
                shutil.move(Path(folder, sizes.name), sizes)
            report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return report

    def with_answers(self, ways: Sequence[str], sizes: Path, first: dict[str, Any]) -> str:
        """Run the script again with other answers.

        A script may fail with some numbers (such as an index of a list): then another is tried. The first two that
        work must both take at most the memory that the first run took.

        Returns:
            The difference; "" if there was none.
        """
        outcome, num_alike = "", 0
        for answers in ways:
            if num_alike < 2:
                differs, outcome = self._differs(answers, sizes, first)
                if differs:
                    return outcome
                num_alike += not outcome
        return "" if num_alike else outcome

    def _differs(self, answers: str, sizes: Path, first: dict[str, Any]) -> tuple[bool, str]:
        """Return whether the script's memory differs with these answers, and the difference."""
        timeout = _LEAST_SECONDS + _SLOWER * first["seconds"]
        try:
            with ProgressLine(f"running {self._order['script']} again with other guesses"):
                found = self.run(answers, sizes, is_quiet=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return True, "with another answer it does not end"
        except _NoReportError as error:
            return True, f"with another answer it ends differently, {error.got}"
        if found["other_way"]:
            return True, f"with another answer its memory differs from {found['other_way']} on"
        if found["ended"] == "error":
            return False, f"with another answer it fails, {found['problem']['message']}"
        highest, usual = max(found["peaks"]), max(first["peaks"])
        more = f"with another answer it takes {format_bytes(highest)}"
        return (True, more) if highest > _MORE * usual else (False, "")


def render(report: dict[str, Any]) -> str:
    """Format a report as readable text, with the verdict in the first line.

    Args:
        report: As printed by `--json`; see `docs/virtual-gpu.md` for its contents.
    """
    report = _shown(report)
    estimate = MemoryEstimate.from_dict(report["estimate"])
    steps = f"{counted(report['num_steps'], 'step')} in {report['seconds']:.1f} s"
    ranks = f", rank 0 of {report['num_ranks']} without NCCL's buffers" if report.get("num_ranks") else ""
    ended = _ENDINGS.get(report["ended"], report["ended"])
    lines = [
        _verdict(report),
        *_problem(report),
        "",
        f"{report['script']} on a virtual {report['gpu']}{ranks}: {steps}, ended {ended}",
        "",
        f"{'memory of the GPU':<28} {format_bytes(report['capacity_bytes']):>12}",
        replace(estimate, doubts=(), guesses=tuple(_first(estimate.guesses))).explain(),
    ]
    lines += _listed("written to a temporary folder and discarded", report["written"])
    return "\n".join(lines)


def _shown(value: Any) -> Any:
    """Return a report with its texts made safe for a terminal."""
    if isinstance(value, dict):
        return {name: _shown(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def _verdict(report: dict[str, Any]) -> str:
    if report["verdict"] in ("failed", "not known"):
        return f"NOT KNOWN: {_unknown(report)}"
    if report["verdict"] == "does not fit":
        return f"DOES NOT FIT: {report['gpu']} runs out of memory"
    num_ooms, num_assumed = len(report["out_of_memory"]), len(report["estimate"]["assumptions"])
    caught = f", after {counted(num_ooms, 'out-of-memory error')} that the script caught" if num_ooms else ""
    steps = "" if report["num_steps"] else ", but no training step was seen"
    checks = "1 check of values passes" if num_assumed == 1 else f"{num_assumed} checks of values pass"
    assumed = f", assuming that {checks}" if num_assumed else ""
    total_bytes = report["estimate"]["total_bytes"]
    room = "" if total_bytes is None else f": {format_bytes(total_bytes)} of {format_bytes(report['capacity_bytes'])}"
    condition = MemoryEstimate.from_dict(report["estimate"]).condition
    return f"fits {report['gpu']}{caught}{steps}{assumed}{room}{condition}"


def _unknown(report: dict[str, Any]) -> str:
    doubts = report["estimate"]["doubts"]
    if report["ended"] == "error":
        after = ", after it received guessed values" if doubts and report["verdict"] == "not known" else ""
        return f"the script failed ({report['problem']['error']}){after}"
    if doubts:
        return "its memory may differ from what was seen"
    share = percent(report["estimate"]["selected_fraction"])
    return f"{report['gpu']} runs out of memory if masks select {share}; if they select less, it may fit"


def _problem(report: dict[str, Any]) -> list[str]:
    problem, places = report["problem"], report["out_of_memory"]
    lines = [f"  {doubt}" for doubt in _first(report["estimate"]["doubts"])]
    if problem is not None:
        lines += [f"  at {problem['line']}"] * bool(problem["line"])
        lines += [f"  {problem['message']}", f"  way out: {problem['fix']}"]
    if places:
        place = places[-1]
        parts = (place["phase"], place["module"], place["line"] and f"made by {place['line']}")
        lines += [f"  out of memory in {', '.join(filter(None, parts))}"]
    return lines


def _listed(title: str, rows: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {row}" for row in _first(rows))] if rows else []


def _first(rows: Sequence[str]) -> list[str]:
    """Return the first rows, and how many more there are."""
    return [*rows[:_NUM_LISTED], *[f"and {len(rows) - _NUM_LISTED} more"] * (len(rows) > _NUM_LISTED)]
