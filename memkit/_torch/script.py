"""TorchScript, and handlers of exceptions, inside a forward that is run again in the backward.

On its second call, a scripted function runs another plan, which saves other tensors than the first one. Torch ends the
second run by an exception, raised where a tensor is saved. Inside a scripted function that becomes a RuntimeError, and
the forward's own ``except Exception`` catches it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.jit._fuser import optimized_execution
from torch.utils.checkpoint import _StopRecomputationError

from memkit._torch.compiler import uncompiled
from memkit._torch.graph import saving_hooks


def as_written() -> contextlib.AbstractContextManager[None]:
    """Return a context in which scripted code runs its operators as written, so that reruns save the same tensors."""
    return optimized_execution(False)  # noqa: FBT003 - torch's form


@contextlib.contextmanager
def early_stop_through_handlers() -> Iterator[None]:
    """Let the exception arrive by which torch's checkpoint stops a recomputation once it has all tensors it needs.

    If a handler caught it, no further tensor is saved, which torch would report as one too many, and whatever the
    block raises then no longer matters.
    """
    hooks = saving_hooks()
    if hooks is None:
        yield
        return
    save, load = hooks
    has_stopped = False

    def pack(tensor: torch.Tensor) -> Any:
        nonlocal has_stopped
        if has_stopped:
            raise _StopRecomputationError
        try:
            return save(tensor)
        except _StopRecomputationError:
            has_stopped = True
            raise

    try:
        with saved_tensors_hooks(uncompiled(pack), load):
            yield
    except Exception as error:
        if has_stopped and not isinstance(error, _StopRecomputationError):
            raise _StopRecomputationError from None
        raise
