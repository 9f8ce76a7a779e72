"""torch.compile queries that do not load it, since loading takes a second; compiled code that runs as it is written."""

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

T = TypeVar("T")
P = ParamSpec("P")


def is_loaded() -> bool:
    """Return whether torch.compile has been loaded."""
    return "torch._dynamo" in sys.modules


def uncompiled(hook: Callable[..., T]) -> Callable[..., T]:
    """Keep torch.compile from compiling a hook, as it does after a graph break in the surrounding layer."""
    return torch.compiler.disable(hook) if is_loaded() else hook  # type: ignore[no-untyped-call]


def runs_eagerly(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that torch.compile shall call as it is, with all that it calls.

    `torch.compiler.disable` would load torch.compile where it is applied.
    """
    disabled: Callable[P, T] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        if not is_loaded():
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


@contextmanager
def eagerly() -> Iterator[None]:
    """Return a context in which compiled code runs as it is written, and nothing is compiled.

    Otherwise torch.compile skips a function that is called under a dispatch mode: with ``fullgraph=True`` that is an
    error, and without it the function stays uncompiled for good. Torch has one stance for all threads, whose blocks may
    end in any order: the first to begin sets it, and the last to end sets it back.
    """
    if not is_loaded():
        yield
        return
    with _LOCK:
        if not _IN_EFFECT:
            _IN_EFFECT.append(torch.compiler.set_stance("force_eager"))  # in effect from here
        _IN_EFFECT.append(None)
    try:
        yield
    finally:
        with _LOCK:
            _IN_EFFECT.pop()
            if len(_IN_EFFECT) == 1:
                _IN_EFFECT.pop().__exit__(None, None, None)


def count_graphs() -> int:
    """Return the number of graphs compiled in this process, from the counters that torch's own tests read."""
    if not _counters and "torch._dynamo.utils" in sys.modules:
        _counters.append(sys.modules["torch._dynamo.utils"].counters)
    return _counters[0]["stats"].get("unique_graphs", 0) if _counters else 0


@contextmanager
def running_eagerly(note: Callable[[], object]) -> Iterator[None]:
    """Run compiled functions and modules as they are written, and call ``note`` whenever one is called."""
    from torch._dynamo import eval_frame

    with eagerly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)  # the hooks on all modules are memkit's
        choose = getattr(eval_frame, CHOOSE_CODE)

        def chosen(callback: Any) -> Any:
            if callback not in (None, False):  # not the ends of such calls, and not torch.compiler.disable
                note()
            return choose(callback)

        setattr(eval_frame, CHOOSE_CODE, chosen)
        try:
            yield
        finally:
            setattr(eval_frame, CHOOSE_CODE, choose)


CHOOSE_CODE = "_callback_from_stance"
"""Name of the function of torch._dynamo.eval_frame that chooses what runs when a compiled function is called."""
_LOCK = threading.Lock()
_IN_EFFECT: list[Any] = []  # torch's context, and an entry for each block of `eagerly` in it
_counters: list[Any] = []  # torch's own, once they are there
