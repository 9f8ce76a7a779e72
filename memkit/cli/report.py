"""`memkit report`: write a readable report of a memory log."""

from __future__ import annotations

import argparse

from memkit._events.reader import read_memory_events
from memkit.cli._codes import YES
from memkit.cli._collector import without_collector
from memkit.cli._terminal import ProgressLine, Tone, say
from memkit.recipes.report import make_report
from memkit.report.finding import Severity
from memkit.report.write import SUFFIXES, check_target, save_report

_TONES: dict[Severity, Tone] = {"fault": "bad", "warning": "unsure", "good": "good"}
_OUTPUT = "memory_analysis_report.md"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("report", help="write a readable report of a memory log")
    what = "the log; or a directory, the logs of several ranks, a CUDA memory snapshot, a profiler's trace"
    log = parser.add_mutually_exclusive_group(required=True)
    log.add_argument("log", nargs="?", metavar="LOG", help=what)
    log.add_argument("--log", dest="named_log", metavar="FILE", help="the log, given as an option")
    formats = ", ".join(SUFFIXES)
    parser.add_argument("-o", "--output", default=_OUTPUT, metavar="FILE", help=f"{formats}; without it {_OUTPUT}")
    parser.add_argument("--baseline", metavar="FILE", help="another log to compare with")
    parser.add_argument("--gpu", metavar="NAME", help="the GPU that it ran on, if the log does not say")
    parser.add_argument("--force", action="store_true", help="replace an earlier report")
    parser.add_argument("--language", default="en", metavar="LANGUAGE", help="en, or zh for Chinese")
    parser.set_defaults(run=_run)


@without_collector
def _run(arguments: argparse.Namespace) -> int:
    check_target(arguments.output, replaces=arguments.force)  # before the work
    log = arguments.log or arguments.named_log
    with ProgressLine(f"reading {log}") as progress:
        events = read_memory_events(log)
        baseline = None if arguments.baseline is None else read_memory_events(arguments.baseline)
        progress.show(f"writing {arguments.output}")
        report = make_report(events, baseline=baseline, gpu=arguments.gpu, language=arguments.language)
        save_report(report, arguments.output)
    say(report.headline, tone=_TONES.get(report.severity))
    for text in (*report.hints, report.verdict):
        say(text)
    say(arguments.output)
    return YES
