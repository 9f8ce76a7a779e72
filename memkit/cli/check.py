"""`memkit check`: find patterns in training scripts that cost memory, without running them."""

from __future__ import annotations

import argparse

from memkit._charts.text import align
from memkit._core.printable import counted
from memkit.check.check import RULES, UNKNOWN, UNKNOWN_FIX, UNKNOWN_WHAT, UNKNOWN_WHY, CheckResult, check_paths
from memkit.cli._codes import NO, WRONG_USE, YES
from memkit.cli._terminal import say, say_all, say_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("check", help="find habits in scripts that cost memory, without running them")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a .py, .ipynb or .sh file, or a folder")
    parser.add_argument("--select", metavar="RULES", default="", help="check only these rules, separated by commas")
    parser.add_argument("--ignore", metavar="RULES", default="", help="skip these rules, separated by commas")
    parser.add_argument("--list-rules", action="store_true", help="list the rules and exit")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.list_rules:
        _show_rules(as_json=arguments.json)
        return YES
    if not arguments.paths:
        arguments.parser.error("expected a file or a folder, for example `memkit check train.py`")
    result = check_paths(arguments.paths, select=_ids(arguments.select), ignore=_ids(arguments.ignore))
    if arguments.json:
        unread = [{"path": path, "reason": reason} for path, reason in result.unread]
        findings = [finding.as_dict() for finding in result.findings]
        say_json({"findings": findings, "num_files": result.num_files, "unread": unread})
    else:
        _show(result)
    for path, reason in result.unread:
        say(f"memkit: cannot check {path}: {reason}", is_error=True)
    return WRONG_USE if result.unread else NO if result.findings else YES


def _ids(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _show(result: CheckResult) -> None:
    for finding in result.findings:
        say_all(str(finding))
    num_errors = sum(finding.level == "error" for finding in result.findings)
    num_warnings = len(result.findings) - num_errors
    say(
        f"{counted(result.num_files, 'file')}: {counted(num_errors, 'error')}, {counted(num_warnings, 'warning')}",
        tone="bad" if num_errors else "unsure" if num_warnings or result.unread else "good",
    )


def _show_rules(*, as_json: bool) -> None:
    fields = ("id", "level", "what", "why", "figure", "fix")
    rows = [tuple(getattr(rule, name) for name in fields) for rule in RULES]
    rows.append((UNKNOWN, "warning", UNKNOWN_WHAT, UNKNOWN_WHY, None, UNKNOWN_FIX))
    if as_json:
        say_json([dict(zip(fields, row, strict=True)) for row in rows])
        return
    for line in align([row[:3] for row in rows], [False] * 3):
        say(line)
