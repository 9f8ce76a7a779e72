"""Arguments such as ``train.py:build``: a function in the user's file."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from memkit._core.errors import InputError
from memkit._core.settings import nearest_word


def load_function(
    command: str, text: str, *, arguments: tuple[str, ...] = (), instead: str = "", words: Collection[str] = ()
) -> Callable[..., Any]:
    """Import a function from a file, with the file's folder importable, as in `python FILE.py`.

    Args:
        command: The memkit command, for error messages.
        text: ``FILE.py:FUNCTION``.
        arguments: Names of the arguments with which the function is called.
        instead: Other valid forms of the argument, for error messages.
        words: The words of these forms.

    Raises:
        InputError: The file does not exist, or has no such function, or one that takes other arguments.
    """
    call = f"memkit {command} {text}"
    file, _, name = text.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        got, fix = _not_a_file(command, text, path, instead, words)
        expected = f"{instead} or FILE.py:FUNCTION" if instead else "FILE.py:FUNCTION"
        raise InputError(call, got=got, expected=expected, fix=fix)
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # a .py file always has a spec
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(
            call,
            got="a missing function" if function is None else f"a {type(function).__name__} named {name}",
            expected=f"a function {name} in {path.name}",
            fix=_function_fix(command, module, file, name),
        )
    made: Callable[..., Any] = function
    _check_arguments(call, made, name, arguments)
    return made


def _not_a_file(command: str, text: str, path: Path, instead: str, words: Collection[str]) -> tuple[str, str]:
    """Describe a text that does not name a Python file, and the way out."""
    usual = f"write for example `memkit {command} train.py:build`."
    if text.endswith(".py"):
        return f"{text!r} without a function", f"write `memkit {command} {text}:build`, if the function is build."
    if not path.name:
        meant = nearest_word(text, words)
        what = f"{text!r}, which is neither {instead or 'a file'} nor FILE.py:FUNCTION"
        return what, f"write `memkit {command} {meant}`." if meant else usual
    if path.suffix != ".py" or path.exists():
        return f"{str(path)!r}, which is not a Python file", usual
    return f"{str(path)!r}, which does not exist in {Path.cwd()}", "write its path relative to this folder."


def _function_fix(command: str, module: ModuleType, file: str, name: str) -> str:
    own = [each for each, value in vars(module).items() if isinstance(value, FunctionType)]
    meant = nearest_word(name, own)
    if meant:
        return f"write `memkit {command} {file}:{meant}`."
    return f"define `def {name}():` at the top level of {file}."


def _check_arguments(call: str, function: Callable[..., Any], name: str, arguments: tuple[str, ...]) -> None:
    """Refuse a function that cannot be called with these arguments: the error would look like memkit's own."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function without one, such as a built-in
        return
    if arguments and "mode" in signature.parameters:  # a step that handles the modes itself
        arguments = (*arguments, "mode")
    try:
        signature.bind(*arguments)
    except TypeError as error:
        shown = ", ".join(arguments)
        raise InputError(
            call,
            got=f"{name}{signature}: {error}",
            expected=f"a function that is called as {name}({shown})",
            fix=f"write `def {name}({shown}):`.",
        ) from None
