"""TorchScript inside a forward that is run again in the backward.

On its second call, a scripted function runs another plan, which saves other tensors than the first one; and an
exception raised inside it becomes a RuntimeError that holds only its text.
"""

import contextlib
from collections.abc import Iterator

from torch.jit._fuser import optimized_execution
from torch.utils.checkpoint import _StopRecomputationError


def as_written() -> contextlib.AbstractContextManager[None]:
    """Return a context in which scripted code runs its operators as written, so that reruns save the same tensors."""
    return optimized_execution(False)  # noqa: FBT003 - torch's form


@contextlib.contextmanager
def early_stop_through_scripts() -> Iterator[None]:
    """Restore the exception by which torch's checkpoint stops a recomputation once it has all tensors it needs.

    The exception has no text, and is raised where a tensor is saved; a scripted function turns it into a RuntimeError
    without text. If another exception without text is mistaken for it, torch's checkpoint finds tensors missing and
    reports them.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "TorchScript interpreter" in text and text.rstrip().endswith("RuntimeError:"):
            raise _StopRecomputationError from None
        raise
