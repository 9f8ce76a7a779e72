"""Check scripts, notebooks and folders for patterns that cost memory, without running or importing them."""

from __future__ import annotations

import difflib
import io
import os
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from memkit._core.errors import ConfigError, FileFormatError, InputError
from memkit.check import evaluation, graphs, launch, precision, setup, steps
from memkit.check.findings import Finding, Rule, SourceSpan
from memkit.check.launch import Launcher
from memkit.check.script import Script
from memkit.check.source import SUFFIXES, Source, read_source

SCRIPT_RULES = (*graphs.RULES, *evaluation.RULES, *steps.RULES, *precision.RULES, *setup.RULES)
RULES: tuple[Rule[Any], ...] = (*SCRIPT_RULES, *launch.RULES)
# It is about comments that name an unknown rule, not about code, so it is not one of RULES.
UNKNOWN = "unknown-ignore"
UNKNOWN_WHAT = "a comment ignores an unknown rule"
UNKNOWN_WHY = "the comment has no effect"
UNKNOWN_FIX = "correct or remove the comment."

_IDS = (*(rule.id for rule in RULES), UNKNOWN)

_COMMENT = re.compile(r"#\s*memkit:\s*ignore(?:\[([^\]]*)\])?")
_FOREIGN = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"})


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of checking files.

    Attributes:
        findings: In order of file and line.
        num_files: Files that were read.
        unread: Files that could not be read or parsed: the path and a one-line reason.
    """

    findings: tuple[Finding, ...]
    num_files: int
    unread: tuple[tuple[str, str], ...]


def check_source(text: str, *, path: str = "<source>") -> tuple[Finding, ...]:
    """Check one Python script given as text. It is parsed, never executed.

    Args:
        text: The script. A script that does not import torch has no findings.
        path: The file name for the findings. A name that ends in ``.sh`` makes it a shell script.

    Returns:
        The findings by line. A line with the comment ``# memkit: ignore[rule]``, or ``# memkit: ignore`` for all rules,
        has no findings.

    Raises:
        FileFormatError: The text is not valid Python 3.

    Example:
        >>> import memkit as mk
        >>> script = '''
        ... import torch
        ... for x in loader:
        ...     loss = model(x)
        ...     loss.backward()
        ...     optimizer.step()
        ...     history.append(loss)
        ... '''
        >>> [(finding.rule, finding.line) for finding in mk.check.check_source(script)]
        [('graph-kept', 7)]
    """
    return tuple(_check(Source(path, text, is_shell=path.endswith(".sh")), set(_IDS)))


def check_paths(
    paths: Iterable[str | os.PathLike[str]], *, select: Sequence[str] = (), ignore: Sequence[str] = ()
) -> CheckResult:
    r"""Check files and folders: ``.py``, ``.ipynb`` and ``.sh``.

    Args:
        paths: Files, and folders to search. Inside folders, hidden folders, virtual environments, ``build`` and
            ``dist`` are skipped.
        select: Ids of the rules to check; empty for all.
        ignore: Ids of rules to skip.

    Raises:
        ConfigError: A rule id is unknown.
        InputError: A path does not exist, or is a file of another kind.

    Example:
        >>> import memkit as mk, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "train.py").write_text("import torch\ntorch.autograd.set_detect_anomaly(True)\n")
        >>> result = mk.check.check_paths([folder])
        >>> result.num_files, [finding.rule for finding in result.findings]
        (1, ['anomaly-left-on'])
    """
    for name in (*select, *ignore):
        if name not in _IDS:
            near = difflib.get_close_matches(name, _IDS, 1)
            fix = f"write {near[0]!r}." if near else "`memkit check --list-rules` shows them."
            raise ConfigError(f"check_paths(rule {name!r})", got=f"{name!r}", expected="a known rule id", fix=fix)
    wanted = set(select or _IDS) - set(ignore)
    findings: list[Finding] = []
    unread = []
    files = [file for path in paths for file in _files_of(Path(path))]
    for file in files:
        try:
            findings += _check(read_source(file), wanted)
        except FileFormatError as error:
            unread.append((str(file), error.got))
        except OSError as error:
            unread.append((str(file), str(error)))
    return CheckResult(tuple(findings), len(files) - len(unread), tuple(unread))


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(_search(path))
    if path.exists() and path.suffix in SUFFIXES:  # anything but a regular file is refused when it is read
        return [path]
    got = f"a {path.suffix or 'nameless'} file" if path.is_file() else "no such file or folder"
    expected = "a folder, or a .py, .ipynb or .sh file"
    raise InputError(f"check_paths({str(path)!r})", got=got, expected=expected, fix="check the path.")


def _search(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _FOREIGN and not name.startswith(".")]
        yield from (Path(parent, name) for name in names if Path(name).suffix in SUFFIXES)


def _check(source: Source, wanted: set[str]) -> list[Finding]:
    if source.is_shell:
        launcher = Launcher(source.text)
        finds = ((rule, place) for rule in launch.RULES if rule.id in wanted for place in rule.find(launcher))
        return _findings(source, set(finds), wanted)
    script = _parse(source)
    if not script.uses_torch:
        return []
    rules = (rule for rule in SCRIPT_RULES if rule.id in wanted)
    found = set(chain.from_iterable(((rule, place) for place in rule.find(script)) for rule in rules))
    return _findings(source, found, wanted)


def _parse(source: Source) -> Script:
    try:
        return Script(source.text)
    except SyntaxError as error:
        got = f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        got = f"{type(error).__name__}: {error}"
    raise FileFormatError(
        f"check {source.path}", got=got, expected="Python 3", fix="correct the file, or exclude it."
    ) from None


def _findings(source: Source, found: set[tuple[Rule[Any], SourceSpan]], wanted: set[str]) -> list[Finding]:
    """Return the findings of a file in line order, without those that a comment suppresses."""
    ignored = dict(_comments(source))
    findings = []
    for rule, place in found:
        lines = range(place.line, place.last_line + 1)
        names = set().union(*(ignored.get(line, ()) for line in lines))
        if not names & {rule.id, "*"}:
            cell, line = source.cell_at(place.line)
            findings.append((place.line, rule.finding(source.path, place._replace(line=line), cell)))
    for line, names in ignored.items() if UNKNOWN in wanted else ():
        for name in sorted(names - {"*", *_IDS}):
            cell, line_in_cell = source.cell_at(line)
            message = f"unknown rule {name!r}: {UNKNOWN_WHY}"
            finding = Finding(UNKNOWN, "warning", source.path, line_in_cell, 1, message, UNKNOWN_FIX, None, cell)
            findings.append((line, finding))
    findings.sort(key=lambda item: (item[0], item[1].column, item[1].rule))
    return [finding for _, finding in findings]


def _comments(source: Source) -> Iterator[tuple[int, set[str]]]:
    """Yield the lines with a suppression comment, and the ids that each names; "*" for all."""
    if "memkit:" not in source.text:
        return
    text = io.StringIO(source.text, newline=None)
    lines: Iterable[tuple[int, str]] = enumerate(text, 1)
    if not source.is_shell:  # a string may contain such a comment
        tokens = tokenize.generate_tokens(text.readline)
        lines = ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)
    for number, line in lines:
        if comment := _COMMENT.search(line):
            yield number, {"*"} if comment[1] is None else {name.strip() for name in comment[1].split(",")}
