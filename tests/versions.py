"""Tests on a PyTorch that lacks a tested feature: they are skipped, and the reason names the missing one."""

from __future__ import annotations

import functools
import re
import traceback
from pathlib import Path

import torch

from memkit._core.errors import MemkitWarning, TorchVersionError

_PINS = (Path(__file__).parents[1] / "constraints.txt").read_text("utf-8")
PINNED = re.search(r"^torch==([\d.]+)$", _PINS, re.MULTILINE)[1]
"""The version that CI runs: it has all that is tested, so that a test which asks for something else is wrong."""
_TESTS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "docs"))
_TORCH = str(Path(torch.__file__).parent)
_ATTRIBUTE = re.compile(r"module '(torch[\w.]*)' has no attribute '(\w+)'")
_KERNEL = re.compile(r"Could not run 'aten::(\w+)' with arguments from the 'CPU' backend")
_UNDER_MODES = re.compile(r"There was no rule registered for HOP (\w+) and mode")
_REFUSED = re.compile(r"(?:TorchVersionError|MemkitWarning): .*PyTorch \S+, which has no ([\w.]+)")


def has(name: str) -> bool:
    """Whether this PyTorch has a name, such as "torch.optim.Muon"."""
    try:
        functools.reduce(getattr, name.split(".")[1:], torch)
    except AttributeError:
        return False
    return True


def lacks(name: str, what: str) -> str:
    """The reason of a skip, in the form that the table of versions wants."""
    return f"PyTorch has no {name} ({what})"


def missing(error: BaseException) -> str | None:
    """The reason to skip a test that ended in an error because PyTorch is older than what it is about; None for others.

    Either memkit has refused it by name, or the test itself, and no line of memkit, asked torch for what is not there.
    """
    chain = [error, error.__cause__, error.__context__]  # a `pytest.raises` may have wanted something else
    error = next((each for each in chain if isinstance(each, TorchVersionError)), error)
    kind = f"{type(error).__name__}: " if isinstance(error, (TorchVersionError, MemkitWarning)) else ""
    if refused := _REFUSED.search(f"{kind}{error}".replace("\n", " ")):
        return lacks(f"torch.{refused[1].removeprefix('torch.')}", "memkit refuses what needs it")
    if isinstance(error, NotImplementedError) and (found := _UNDER_MODES.search(str(error))):
        return lacks(f"torch.ops.higher_order.{found[1]} under dispatch modes", "the test is about it")
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    asking = next((file for file in reversed(files) if not file.startswith(_TORCH)), "")
    if not asking.startswith(_TESTS):
        return None
    if isinstance(error, AttributeError) and (found := _ATTRIBUTE.search(str(error))):
        return lacks(f"{found[1]}.{found[2]}", "the test is about it")
    if isinstance(error, NotImplementedError) and (found := _KERNEL.search(str(error))):
        return lacks(f"torch.ops.aten.{found[1]} for the CPU", "the test is about it")
    return None
