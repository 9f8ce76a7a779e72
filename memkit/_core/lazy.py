"""Names of a package that are loaded when they are first used (PEP 562), so that importing it costs nothing."""

from __future__ import annotations

import difflib
import importlib
import opcode
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

_ROOT = "memkit"
_WRAPPER = "use memkit.MemoryEfficientTrainingWrapper for a step"
_ELSEWHERE = {  # advice by name: other libraries' names, and short names
    "Accelerator": _WRAPPER,
    "Fabric": _WRAPPER,
    "GradScaler": "MemoryEfficientTrainingWrapper(..., precision='fp16-mixed') has its own",
    "Trainer": "use memkit.MemoryEfficientTrainingWrapper for a step, memkit.MemoryEfficientTrainLoop for a whole loop",
    "autocast": "write MemoryEfficientTrainingWrapper(..., precision='bf16-mixed')",
    "checkpoint": "write memkit.Checkpointing(model, 'auto')",
    "estimate": "use memkit.estimate_memory_usage",
    "initialize": _WRAPPER,
    "plan": "use memkit.plan_training",
}


def load_lazily(
    package: str, homes: Mapping[str, str], packages: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: Its name.
        homes: By public name, the module that defines it.
        packages: Its public packages and modules.
    """
    names = sorted([*homes, *packages])

    def load(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            text = f"module {package!r} has no attribute {name!r}{_hint(name, names)}"
            if _is_import(sys._getframe(1)):  # noqa: SLF001 - no public form
                raise ImportError(text, name=package)  # Python would turn an AttributeError into one without the hint
            raise AttributeError(text, name=name, obj=None)  # with obj=package, Python would add a hint of its own
        value = getattr(importlib.import_module(homes[name]), name)
        vars(sys.modules[package])[name] = value  # the next access finds it without this function
        return value

    def list_names() -> list[str]:
        return list(names)

    return load, list_names, sorted(homes)


def _is_import(frame: FrameType) -> bool:
    """Return whether a frame is executing ``from ... import ...``."""
    return frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]


def _hint(name: str, names: Sequence[str]) -> str:
    """Say where a name is, or which one was meant."""
    if name.startswith("_"):
        return ""
    root = importlib.import_module(_ROOT)
    modules = {_ROOT: root, **{f"{_ROOT}.{each}": getattr(root, each) for each in vars(root)["_PACKAGES"]}}
    homes = {each: f"{path}.{each}" for path, module in reversed(modules.items()) for each in module.__all__}
    if name in homes:
        return f"; it is {homes[name]}"
    if name in _ELSEWHERE:
        return f"; {_ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    near = difflib.get_close_matches(name, homes, n=1)
    return f"; did you mean {homes[near[0]]}?" if near else f"; see help({_ROOT}) for all names"
