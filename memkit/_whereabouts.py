"""Where in the user's step an operator runs: phase, module and source line. Used by the Recorder only.

A backward operator is traced to the forward call that made its autograd node, by the node's sequence number.
"""

from __future__ import annotations

import sys
import threading
import weakref
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from memkit._recording import Phase
from memkit._torch.graph import ENGINE, current_backward, current_node, next_sequence_number, sequence_number

# Code in these folders is nobody's own: a source is the innermost frame outside of them.
_INTERNAL = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))
_NO_BACKWARD = -1


def running_node() -> torch.autograd.graph.Node | None:
    """The autograd node that the engine evaluates now, if any."""
    return current_node()


class Line(NamedTuple):
    """A line of code. The code object holds names and constants, never values as a frame would."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.number} in {self.code.co_name}"


class Place(NamedTuple):
    """Phase, module and source line of an operator; module "" and line None where there is none."""

    phase: Phase
    module: str
    line: Line | None


class Whereabouts:
    """Follow a step through its operators and module calls.

    Call `update` at every operator, `enter_module` and `leave_module` around module calls, and set `outside_backward`
    where an optimizer starts or ends.

    Attributes:
        phase: Phase of the latest operator.
        outside_backward: Phase of what runs while autograd's engine does not.
    """

    def __init__(self) -> None:
        self.phase: Phase = "other"
        self.outside_backward: Phase = "other"
        self._thread = threading.get_ident()
        self._next_sequence_number = next_sequence_number()
        self._origins: dict[int, tuple[str, Line | None]] = {}
        self._backward = _NO_BACKWARD
        self._backward_depth = 0
        self._modules: list[str] = []
        self._module_names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: set[str] = set()
        self._is_internal: dict[str, bool] = {}

    def update(self) -> None:
        """Notice what changed since the last operator: a backward began or ended, graph nodes were made."""
        backward = current_backward()
        if backward != self._backward:
            if self._backward == _NO_BACKWARD:
                self.outside_backward = "other"  # when it is over, the forward is too
            self._backward = backward
            self._backward_depth = len(self._modules)
        number = next_sequence_number()
        # The counter belongs to a thread: on an accelerator, backward runs in another one.
        if number != self._next_sequence_number and threading.get_ident() == self._thread:
            if self.outside_backward == "other" and backward == _NO_BACKWARD:
                self.outside_backward = "forward"
            self.phase = self.outside_backward if backward == _NO_BACKWARD else "backward"
            place = self.place()
            for node in range(self._next_sequence_number, number):
                self._origins[node] = place[1:]
            self._next_sequence_number = number
        else:
            self.phase = self.outside_backward if backward == _NO_BACKWARD else "backward"

    def place(self) -> Place:
        """Where the operator that runs now comes from."""
        line, by_engine = self._line()
        module = self._modules[-1] if self._modules else ""
        if self.phase != "backward":
            return Place(self.phase, module, line)
        node = running_node()
        origin = self._origins.get(sequence_number(node)) if node is not None else None
        if origin is not None:
            if len(self._modules) <= self._backward_depth:  # deeper: a checkpoint runs its module again
                module = origin[0]
            if by_engine:
                line = origin[1]
        return Place("backward", module, line)

    def called_by_engine(self) -> bool:
        """Whether the operator comes from autograd's C++ code, not from Python that runs inside the backward."""
        return self._line()[1]

    def enter_module(self, module: torch.nn.Module) -> bool:
        """Push a module call; True if no other module's call is around it."""
        self._modules.append(self.name_of(module))
        return len(self._modules) == 1

    def leave_module(self) -> None:
        """Pop a module call."""
        if self._modules:  # a call that began before the recorder did was never pushed
            self._modules.pop()

    def name_of(self, module: torch.nn.Module) -> str:
        """Dotted name of a module.

        One that was not met before gives names to all modules under it.

        The first root's are plain dotted names; those of later roots start with the root's class name.
        """
        known = self._module_names.get(module)
        if known is not None:
            return known
        class_name = type(module).__name__
        if self._modules:
            root, prefix = f"{self._modules[-1]}.{class_name}", f"{self._modules[-1]}.{class_name}."
        else:
            root, count = class_name, 1
            while root in self._roots:
                count += 1
                root = f"{class_name}#{count}"
            prefix = f"{root}." if self._roots else ""
            self._roots.add(root)
        for path, child in module.named_modules():
            self._module_names.setdefault(child, f"{prefix}{path}" if path else root)
        return self._module_names[module]

    def _line(self) -> tuple[Line | None, bool]:
        """Innermost line of the user's own code, and whether autograd's engine lies between it and the operator."""
        by_engine = False
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - no public form
        while frame is not None:
            code = frame.f_code
            is_internal = self._is_internal.get(code.co_filename)
            if is_internal is None:
                is_internal = self._is_internal[code.co_filename] = code.co_filename.startswith(_INTERNAL)
            if not is_internal:
                return Line(code, frame.f_lineno), by_engine
            by_engine = by_engine or code is ENGINE
            frame = frame.f_back
        return None, True  # a thread of the engine: it has no Python frames of its own
