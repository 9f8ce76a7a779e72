"""`memkit compare`: show what changed between two memory logs, and whether the peak grew too much."""

from __future__ import annotations

import argparse
import math

from memkit._events.reader import read_memory_events
from memkit.cli._codes import NO, NOT_KNOWN, YES
from memkit.cli._collector import without_collector
from memkit.cli._terminal import say, say_all
from memkit.report.build import build_comparison
from memkit.report.write import check_target, render_report, save_report


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("compare", help="show what changed between two memory logs")
    parser.add_argument("before", help="the log to compare against")
    parser.add_argument("after", help="the log to examine")
    parser.add_argument("--output", metavar="FILE", help=".md, .html, .txt or .json; without it, text to the terminal")
    parser.add_argument("--max-growth", type=_percent, metavar="PERCENT", help="exit with 1 if the peak grew by more")
    parser.add_argument("--force", action="store_true", help="replace an earlier report")
    parser.add_argument("--language", default="en", metavar="LANGUAGE", help="en, or zh for Chinese")
    parser.set_defaults(run=_run)


def _percent(text: str) -> float:
    number = float(text)  # its error is told by argparse
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"got {text}; expected a number of percent: write for example --max-growth 5")
    return number


@without_collector
def _run(arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        check_target(arguments.output, replaces=arguments.force)  # before the work
    before, after = read_memory_events(arguments.before), read_memory_events(arguments.after)
    report = build_comparison(before, after, language=arguments.language)
    growth = report.figures()["peak_share"]
    if arguments.output is None:
        say_all(render_report(report, ".txt"))
    else:
        save_report(report, arguments.output)
        for text in (report.headline, *report.hints, arguments.output):
            say(text)
    if arguments.max_growth is None:
        return YES
    if growth is None:
        say(
            f"memkit: not known whether the peak grew by more than {arguments.max_growth:g}%: a log has no peak above "
            "zero in tensors; record peaks on the device, or omit --max-growth",
            is_error=True,
        )
        return NOT_KNOWN
    return NO if 100 * growth > arguments.max_growth else YES
