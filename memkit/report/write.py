"""Write a report to a file, in the format of its suffix; only an earlier report is ever overwritten."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from memkit._core.errors import InputError
from memkit._core.printable import printable_json
from memkit._machine.files import check_place, write_text
from memkit.report.html import to_html
from memkit.report.markdown import to_markdown, to_text
from memkit.report.nodes import AllocationView, Bars, Lines, Node, Paragraph, Report, Share, Size, Table

MARK = "memkit.report/1"
"""Mark at the beginning of every report: only a file that has it is replaced."""
_TO_PDF = ", and print it to PDF in a browser: the page has a style for paper"
_BEGINNING = 4096  # bytes in which to look for the mark: a text report begins with its findings

_FORMATS = {".md": to_markdown, ".html": to_html, ".txt": to_text}
SUFFIXES = (*_FORMATS, ".json")


def render_report(report: Report, suffix: str) -> str:
    """Render a report as text in the format of a suffix: ``".md"``, ``".html"``, ``".txt"`` or ``".json"``."""
    return _to_json(report) if suffix == ".json" else _FORMATS[suffix](report, MARK)


def check_target(path: str | os.PathLike[str], *, replaces: bool = True) -> Path:
    """Refuse a path to which no report can be written.

    Args:
        path: The file to write.
        replaces: Whether an earlier report may be replaced; any other file is refused.

    Raises:
        InputError: It is a directory, or in one that does not exist; its suffix is not a known format; or the file
            exists and may not be replaced.
        OSError: The file cannot be read.
    """
    target = Path(path)
    call = f"the report {str(target)!r}"
    if target.suffix.lower() not in SUFFIXES:
        meant = target.with_suffix(".html").name if target.name else "report.html"
        raise InputError(
            call,
            got=f"the suffix {target.suffix!r}",
            expected=f"one of {', '.join(SUFFIXES)}",
            fix=f"write {meant!r}{_TO_PDF if target.suffix.lower() == '.pdf' else ''}.",
        )
    check_place(f"write_report(log, {str(path)!r})", target, example="report.html")
    if target.is_symlink() and not target.exists():
        fix = "remove the link, or choose another name."
        raise InputError(call, got="a link to a missing file", expected="a new path", fix=fix)
    if target.exists():
        if not target.is_file():
            raise InputError(
                call, got="a path that is not a regular file", expected="a path for a file", fix="choose another name."
            )
        with target.open("rb") as file:
            if MARK.encode() not in file.read(_BEGINNING):
                raise InputError(
                    call,
                    got="an existing file that is not a memkit report",
                    expected="a new path, or the path of an earlier report",
                    fix="pass another path, or delete that file.",
                )
        if not replaces:
            raise InputError(
                call,
                got="an earlier report at this path",
                expected="a new path",
                fix="add --force to replace it, or pass another path.",
            )
    return target


def save_report(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a report atomically; see `check_target` for the errors."""
    target = check_target(path)
    write_text(target, render_report(report, target.suffix.lower()))


def _to_json(report: Report) -> str:
    sections = [
        {"title": section.title, "content": [_plain(node) for node in section.nodes]} for section in report.sections
    ]
    value = {
        "schema": MARK,
        "language": report.language,
        "title": report.title,
        "headline": report.headline,
        "severity": report.severity,
        "hints": report.hints,
        "verdict": report.verdict,
        "figures": report.figures(),
        "sections": sections,
    }
    return printable_json(json.dumps(value, ensure_ascii=False, indent=1)) + "\n"


def _plain(node: Node) -> dict[str, object]:
    if isinstance(node, AllocationView):
        return _plain(node.table)
    kind = type(node).__name__.lower()
    if isinstance(node, Table):
        rows = [[_plain_cell(cell) for cell in row] for row in node.rows]
        return {"kind": kind, "caption": node.caption, "columns": node.columns, "rows": rows}
    if isinstance(node, (Bars, Lines)):
        return {"kind": kind, **dataclasses.asdict(node)}
    return {"kind": kind, "text": node.text if isinstance(node, Paragraph) else node.items}


def _plain_cell(cell: object) -> object:
    if isinstance(cell, Size):
        return cell.low if cell.is_known else {"at_least": cell.low, "at_most": cell.high}
    return cell.value if isinstance(cell, Share) else cell
