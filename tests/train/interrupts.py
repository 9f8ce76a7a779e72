"""Interrupts at exact places: a KeyboardInterrupt at the n-th line that runs in some files."""

import contextlib
import sys
from pathlib import Path

import memkit

PACKAGE = str(Path(memkit.__file__).parent)


class InterruptedLine:
    """Counts the lines that run in the block, and raises KeyboardInterrupt before one of them.

    Args:
        place: The number of the line; None only counts.
        folders: Whose files' lines count.
    """

    def __init__(self, place=None, folders=(PACKAGE,)):
        self.place, self.folders = place, tuple(folders)
        self.num_lines = 0
        self.where = None

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(self.folders):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.place:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace

    @contextlib.contextmanager
    def around(self):
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield self
        finally:
            sys.settrace(before)
