"""`memkit convert`: convert a memory log for Perfetto, Chrome, a spreadsheet, or PyTorch's memory viewer."""

from __future__ import annotations

import argparse
from pathlib import Path

from memkit._events.reader import read_memory_events
from memkit.cli._codes import YES
from memkit.cli._collector import without_collector
from memkit.cli._terminal import say
from memkit.report.exports import check_new, export_log

_SUFFIXES = {"perfetto": ".trace.json", "csv": ".csv", "jsonl": ".jsonl", "snapshot": ".pickle"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("convert", help="write a memory log, a snapshot or a trace in another form")
    parser.add_argument("log", help="the log, or a directory, a run of several ranks, a snapshot or a trace")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "output",
        nargs="?",
        help="a new file: .json for ui.perfetto.dev and chrome://tracing, .csv, .jsonl, .pickle for the memory viewer",
    )
    target.add_argument("--to", choices=_SUFFIXES, help="write the new file next to the log, with the log's name")
    parser.set_defaults(run=_run)


@without_collector
def _run(arguments: argparse.Namespace) -> int:
    output = arguments.output or _beside(Path(arguments.log), _SUFFIXES[arguments.to])
    check_new(output)  # before the work
    export_log(read_memory_events(arguments.log), output)
    say(str(output))
    return YES


def _beside(log: Path, suffix: str) -> Path:
    """Name a file after the log; a dot in a directory's name does not start a suffix."""
    if log.is_dir():
        log = log.resolve()  # "." has no name
        return log.with_name(log.name + suffix)
    return log.with_suffix(suffix)
