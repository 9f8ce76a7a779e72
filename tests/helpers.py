"""Measures and assertions that the tests of several packages share."""

from __future__ import annotations

import gc
import itertools
import os
import queue
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from memkit.errors import MemkitError
from tests.allocations import trace_allocations

ROOT = Path(__file__).parents[1]
_PACKAGE = str(ROOT / "memkit")


class Noted:
    """Notes what runs do: memkit puts lists and attributes back after its own runs, but no queue."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def append(self, value: Any) -> None:
        self._queue.put(value)

    def take(self) -> list[Any]:
        """Return what was noted since the last time."""
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]


def assert_refused(
    call: Callable[[], object], error: type[BaseException] | tuple[type[BaseException], ...], *words: str
) -> BaseException:
    """Check that a call raises the error, that its message has each of the words, and that no part of it is empty.

    Words are text or a regular expression. A row of a table of refusals holds these arguments: `parametrize("refusal",
    [(lambda: f(0), ConfigError, "1 or more")])` for a test that calls `assert_refused(*refusal)`. The error is
    returned.
    """
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    missing = [each for each in words if each not in message and not re.search(each, message)]
    assert not missing, f"{missing} not in: {message}"
    if isinstance(caught.value, MemkitError):
        assert all((caught.value.call, caught.value.got, caught.value.expected, caught.value.fix))
    return caught.value


def one_in(few: int, values: Iterable[Any], *, slow: Container[Any] = ()) -> list[Any]:
    """All values for `parametrize`, of which one in a few runs by default, and the others among the slow tests.

    Args:
        few: How many there are for each that runs by default.
        values: The values.
        slow: Those that are among the slow tests in any case.
    """
    return [
        pytest.param(value, marks=[pytest.mark.slow] if number % few or value in slow else [])
        for number, value in enumerate(values)
    ]


def one_in_product(few: int, *axes: Iterable[Any]) -> list[Any]:
    """All combinations for `parametrize`, of which one in a few runs by default; see `one_in`."""
    return [
        pytest.param(*values, marks=[pytest.mark.slow] if number % few else [])
        for number, values in enumerate(itertools.product(*axes))
    ]


def assert_same(got: object, want: object, tolerance: float = 0.0) -> None:
    """Tensors in any containers that are equal, or differ by no more than the relative and absolute tolerance."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def is_same(got: object, want: object) -> bool:
    """Whether tensors in any containers are equal."""
    try:
        assert_same(got, want)
    except AssertionError:
        return False
    return True


def gradients(module: nn.Module) -> list[Tensor | None]:
    """A copy of each parameter's gradient, None where it has none."""
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def flat_gradient(module: nn.Module) -> Tensor:
    """The gradients of a module as one vector, without the parameters that have none."""
    return torch.cat([each.flatten() for each in gradients(module) if each is not None])


def gradient_of(loss: Tensor, module: nn.Module, *, flat: bool = False) -> Any:
    """The gradients of a loss, as a list or as one vector; the module has none afterwards."""
    loss.backward()
    found = flat_gradient(module) if flat else gradients(module)
    module.zero_grad()
    return found


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of the expected value."""
    return ((got - want).norm() / want.norm()).item()


def warm_peak_bytes(step: Callable[[], object], *leaves: Tensor) -> int:
    """Peak bytes of a step's second run: the first one makes what stays. Leaves lose their gradients before each."""
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        peak = trace_allocations(step).peak
    return peak


class FunctionsEntered:
    """Notes the Python functions that a block enters, once for each time: a cost that does not vary, as times do.

    Attributes:
        all: Their code.
        own: That of memkit's functions.
    """

    def __enter__(self) -> Self:
        self.all: list[types.CodeType] = []
        gc.collect()
        gc.disable()  # finalizers of other tests' objects are not the block's
        sys.setprofile(lambda frame, event, _: self.all.append(frame.f_code) if event == "call" else None)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()
        self.all.pop()  # this one
        self.own = [each for each in self.all if each.co_filename.startswith(_PACKAGE)]


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code, which may be indented, in a Python of its own; it must end without an error."""
    return _run("-c", textwrap.dedent(code), *arguments, **environment)


def run_module(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module in the same way."""
    return _run("-m", name, *arguments, **environment)


def _run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def assert_not_imported(modules: set[str], code: str, *arguments: object, **environment: str) -> None:
    """Check that code runs in a Python of its own and that it imports none of the modules."""
    run_python(f"{code}\nimport sys; assert not {modules} & set(sys.modules)", *arguments, **environment)


def assert_same_compiled(fn: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """A function that is compiled around memkit's calls has the same results and gradients, also in a second call."""
    torch.compiler.reset()
    compiled = torch.compile(lambda values: fn(values.sin()).cos(), backend="eager")
    for values in (x, x.flip(0)):
        leaves = [values.detach().clone().requires_grad_() for _ in range(2)]
        found, right = compiled(leaves[0]), fn(leaves[1].sin()).cos()
        torch.testing.assert_close(found, right)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sum(), leaf) for y, leaf in zip((found, right), leaves, strict=True))
        )
