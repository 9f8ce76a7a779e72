"""`memkit convert`: a memory log for Perfetto, Chrome or a spreadsheet."""

from __future__ import annotations

import argparse

from memkit._eventlog import read_memory_events
from memkit.report.exports import export_log


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("convert", help="write a memory log as a trace (.json) or a table (.csv)")
    parser.add_argument("log", help="the log; also a directory, or a run of ranks")
    parser.add_argument("output", help="a new file: .json for ui.perfetto.dev and chrome://tracing, or .csv")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    export_log(read_memory_events(arguments.log), arguments.output)
    print(arguments.output)
    return 0
