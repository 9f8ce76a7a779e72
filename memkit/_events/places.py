"""Places in code, read from stacks: the line of user code, its module and function, and the part of the step."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import NamedTuple

from memkit._events.snapshot_rows import Frame, Stacks

NO_PLACE = "not recorded"
_PYTHON = re.compile(r"\.pyw?$|^<(ipython|stdin|string)")
_LIBRARY = re.compile(r"(site|dist)-packages|(^|[/\\])torch[/\\]|[/\\]lib[/\\]python3|^<frozen")
_OPERATOR = re.compile(r"at::_ops::(\w+)::")
_ATEN = "aten::"
_BACKWARD = re.compile(r"autograd::Engine|_engine_run_backward")
_OPTIMIZER = re.compile(r"torch[/\\]optim[/\\]")
_OWN = re.compile(r"(?P<module>.*) \((?P<phase>\w+)\)")  # a frame of a virtual GPU's snapshot


class Labels(NamedTuple):
    """The keys under which a stack is counted, by grouping."""

    phase: str
    module: str
    operator: str
    line: str


class _Place(NamedTuple):
    """The fields of one stack frame; missing ones are empty."""

    line: str = ""
    function: str = ""
    is_library: bool = True
    operator: str = ""
    phase: str = ""
    module: str = ""


def labels_of(stacks: Stacks) -> list[Labels]:
    """Return the labels of all stacks, by number."""
    places = [_read(frame) for frame in stacks.frames]
    return [_labels([places[number] for number in stack]) for stack in stacks.stacks]


def _labels(places: list[_Place]) -> Labels:
    """Read a stack, innermost frame first: the deepest line of user code, else of library code, else the operator."""
    python = [each for each in places if each.line]
    deepest = next((each for each in python if not each.is_library), python[0] if python else None)
    operator = next((each.operator for each in places if each.operator), "")
    phase = next((each.phase for each in places if each.phase), "forward and other code" if places else "")
    module = next((each.module for each in places if each.module), deepest.function if deepest else "")
    line = deepest.line if deepest else operator if operator.startswith(_ATEN) else ""
    return Labels(phase or NO_PLACE, module or NO_PLACE, operator or NO_PLACE, line or NO_PLACE)


def _read(frame: Frame) -> _Place:
    file, line, name = frame
    if file == "operator":
        return _Place(operator=name)
    if file == "module" and (own := _OWN.fullmatch(name)):
        return _Place(phase=own["phase"], module=own["module"])
    is_python = _PYTHON.search(file) is not None
    found = None if is_python else _OPERATOR.search(name)
    phase = "optimizer" if _OPTIMIZER.search(file) else "backward" if _BACKWARD.search(name) else ""
    return _Place(
        place_name(file, line, name) if is_python else "",
        place_name(file, None, name) if is_python else "",
        is_library(file),
        f"{_ATEN}{found[1]}" if found else "",
        phase,
    )


def is_library(file: str) -> bool:
    """Return whether a file is not the user's own code."""
    return _LIBRARY.search(file) is not None


def place_name(file: str, line: object, function: str) -> str:
    """Return a short name of a place in code: the last two parts of the path distinguish files."""
    short = "/".join(PurePosixPath(file.replace(chr(92), "/")).parts[-2:])
    return f"{short} {function}" if line is None else f"{short}:{line} {function}"
