"""`memkit compare`: what changed between two memory logs, and whether the peak grew too much."""

from __future__ import annotations

import argparse

from memkit._errors import InputError
from memkit._eventlog import read_memory_events
from memkit.cli._collector import without_collector
from memkit.report.build import build_comparison
from memkit.report.write import check_target, render, save_report


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("compare", help="show what changed between two memory logs")
    parser.add_argument("before", help="the log to compare with")
    parser.add_argument("after", help="the log to look at")
    parser.add_argument("--output", metavar="FILE", help=".md, .html, .txt or .json; without it, text to the terminal")
    parser.add_argument("--max-growth", type=float, metavar="PERCENT", help="exit with 1 where the peak grew by more")
    parser.add_argument("--language", default="en", metavar="LANGUAGE", help="en, or zh for Chinese")
    parser.set_defaults(run=_run)


@without_collector
def _run(arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        check_target(arguments.output)  # before the work
    before, after = read_memory_events(arguments.before), read_memory_events(arguments.after)
    report = build_comparison(before, after, language=arguments.language)
    growth = report.figures()["peak_share"]
    if arguments.max_growth is not None and growth is None:
        raise InputError(
            f"compare --max-growth {arguments.max_growth:g}",
            got="a log without a peak above zero in tensors",
            expected="a peak in both logs",
            fix="record peaks on the device, or leave --max-growth out.",
        )
    if arguments.output is None:
        print(render(report, ".txt"), end="")
    else:
        save_report(report, arguments.output)
        print(report.verdict)
        print(arguments.output)
    return int(arguments.max_growth is not None and 100 * growth > arguments.max_growth)
