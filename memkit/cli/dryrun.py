"""`memkit dryrun`: a training script, unchanged, on a card that is not there."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memkit._errors import InputError, StateError
from memkit._units import format_bytes
from memkit.planning.estimate import MemoryEstimate
from memkit.planning.gpus import GPU, capability_of, find_gpu

_STEPS = 3
_PACKAGE = Path(__file__).parents[1]
_NUM_LISTED = 5


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "dryrun",
        help="run a training script, unchanged, on a card that is not there",
        usage="memkit dryrun SCRIPT.py [ARGUMENT ...] --gpu NAME [--steps N] [--selected-fraction F] "
        "[--calibrated FILE] [--json]",
        description="Options may stand before and after the script's arguments; all after -- is the script's.",
        allow_abbrev=False,
    )
    _add_options(parser)
    parser.add_argument("script", metavar="SCRIPT.py", help="the script, as for python SCRIPT.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="the script's own arguments")
    parser.set_defaults(run=_run, parser=parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help='the card, such as "RTX 4090"; `memkit gpus` lists them')
    parser.add_argument("--steps", type=int, default=_STEPS, metavar="N", help=f"optimizer steps to run ({_STEPS})")
    parser.add_argument(
        "--selected-fraction", type=float, metavar="F", help="the share of elements that masks are taken to select"
    )
    parser.add_argument("--calibrated", metavar="FILE", help="take the cards of this file before those of the table")
    parser.add_argument("--json", action="store_true", help="machine-readable output, sizes in bytes")


def _run(arguments: argparse.Namespace) -> int:
    options = argparse.ArgumentParser(prog="memkit dryrun", add_help=False, allow_abbrev=False)
    _add_options(options)
    given = arguments.arguments
    end = given.index("--") if "--" in given else len(given)
    _, own = options.parse_known_args(given[:end], arguments)
    if arguments.gpu is None:
        arguments.parser.error("the following arguments are required: --gpu")
    if arguments.steps < 1:
        arguments.parser.error("--steps: at least 1")
    if arguments.selected_fraction is not None and not 0 < arguments.selected_fraction <= 1:
        arguments.parser.error("--selected-fraction: a share above 0, and 1 at most")
    if not Path(arguments.script).is_file():
        raise InputError(
            f"memkit dryrun {arguments.script}",
            got="no such file",
            expected="the path of a Python script",
            fix="give the script as for `python SCRIPT.py`.",
        )
    gpu = find_gpu(arguments.gpu, calibrated=arguments.calibrated)
    capability_of(gpu)
    report = _report(arguments, [*own, *given[end + 1 :]], gpu)
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return {True: 0, False: 1, None: 2}[report["fits"]]


def _report(arguments: argparse.Namespace, own: list[str], gpu: GPU) -> dict[str, Any]:
    """Run the script in a process of its own, and say what came of it."""
    with tempfile.TemporaryDirectory(prefix="memkit-") as folder:
        temporary = Path(folder, "t")  # short: workers' sockets lie there, whose paths have at most 107 characters
        temporary.mkdir()
        order = {
            "folder": folder,
            "cwd": str(Path.cwd()),
            "script": arguments.script,
            "arguments": own,
            "gpu": arguments.gpu,
            "calibrated": arguments.calibrated,
            "steps": arguments.steps,
            "selected_fraction": arguments.selected_fraction,
        }
        code = subprocess.run(
            [sys.executable, "-m", "memkit.planning.card.script", json.dumps(order)],
            cwd=_PACKAGE.parent,  # where -m finds memkit, installed or not
            env=os.environ | {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"},  # noqa: TID251 - handed on
            stdout=sys.stderr.fileno(),
            check=False,
        ).returncode
        path = Path(folder, "report.json")
        if not path.is_file():
            raise StateError(
                f"memkit dryrun {arguments.script}",
                got=f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code} and no report",
                expected="a script that ends, whether it fails or not",
                fix="see its output above; SIGKILL most often means that this machine's own memory ran out.",
            )
        found = json.loads(path.read_text(encoding="utf-8"))
    fits = None if found["ended"] == "error" else found["ended"] != "out of memory"
    return {
        "script": arguments.script,
        "arguments": own,
        "gpu": gpu.name,
        "capacity_bytes": gpu.total_bytes,
        "fits": fits,
        **found,
    }


def render(report: dict[str, Any]) -> str:
    """Write a report for people.

    Args:
        report: As `--json` prints it; `docs/dryrun.md` says what is in it.
    """
    estimate = MemoryEstimate.from_dict(report["estimate"])
    steps = f"{report['num_steps']} steps in {report['seconds']:.1f} s"
    lines = [
        f"{report['script']} on a virtual {report['gpu']}: {steps}, ended {report['ended']}",
        "",
        _verdict(report),
        *_problem(report),
        "",
        f"{'memory of the card':<28} {format_bytes(report['capacity_bytes']):>12}",
        replace(estimate, guesses=tuple(_first(estimate.guesses))).explain(),
    ]
    lines += _listed("written to a temporary folder and thrown away", report["written"])
    if report["is_compiled"]:
        lines += ["", "The script compiles; here it ran eagerly. Compiled code often takes less."]
    return "\n".join(lines)


def _verdict(report: dict[str, Any]) -> str:
    if report["fits"] is None:
        return f"NOT KNOWN: the script failed ({report['problem']['error']})"
    if not report["fits"]:
        return f"DOES NOT FIT: {report['gpu']} runs out of memory"
    num_ooms = len(report["out_of_memory"])
    caught = f", after {num_ooms} out-of-memory errors that the script caught" if num_ooms else ""
    return f"fits {report['gpu']}{caught}" + ("" if report["num_steps"] else ", but no training step was seen")


def _problem(report: dict[str, Any]) -> list[str]:
    problem, places = report["problem"], report["out_of_memory"]
    lines = []
    if problem is not None:
        lines = [f"  at {problem['line']}"] * bool(problem["line"])
        lines += [f"  {problem['message']}", f"  way out: {problem['fix']}"]
    if places:
        place = places[-1]
        parts = (place["phase"], place["module"], place["line"] and f"made by {place['line']}")
        lines += [f"  out of memory in {', '.join(filter(None, parts))}"]
    return lines


def _listed(title: str, rows: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {row}" for row in _first(rows))] if rows else []


def _first(rows: Sequence[str]) -> list[str]:
    """The first of them, and how many there are more."""
    return [*rows[:_NUM_LISTED], *[f"and {len(rows) - _NUM_LISTED} more"] * (len(rows) > _NUM_LISTED)]
