"""Arguments such as ``train.py:build``: a function in the user's file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memkit._core.errors import InputError


def load_function(command: str, text: str, *, instead: str = "") -> Callable[..., Any]:
    """Import a function from a file, with the file's folder importable, as in `python FILE.py`.

    Args:
        command: The memkit command, for error messages.
        text: ``FILE.py:FUNCTION``.
        instead: Other valid forms of the argument, for error messages.

    Raises:
        InputError: The file does not exist, or has no such function.
    """
    call = f"memkit {command} {text}"
    file, _, name = text.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise InputError(
            call,
            got=f"{file!r}, which is not a Python file"
            if file
            else f"neither {instead or 'a file'} nor FILE.py:FUNCTION",
            expected=f"{instead} or FILE.py:FUNCTION" if instead else "FILE.py:FUNCTION",
            fix=f"write for example `memkit {command} train.py:build`.",
        )
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # a .py file always has a spec
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(
            call,
            got="a missing function",
            expected=f"a function {name} in {path.name}",
            fix="define it at the top level of the file.",
        )
    made: Callable[..., Any] = function
    return made
