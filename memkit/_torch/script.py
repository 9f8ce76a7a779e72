"""TorchScript inside a forward that runs again in backward.

It runs another plan when it is called for the second time, which saves other tensors than the first; and an exception
passes through it as a RuntimeError that holds only its text.
"""

import contextlib
from collections.abc import Iterator

from torch.jit._fuser import optimized_execution
from torch.utils.checkpoint import _StopRecomputationError


def as_written() -> contextlib.AbstractContextManager[None]:
    """Return a block in which scripted code runs its operators as they are written, so that reruns save the same."""
    return optimized_execution(False)  # noqa: FBT003 - torch's form


@contextlib.contextmanager
def early_stop_through_scripts() -> Iterator[None]:
    """Give back the exception with which torch's checkpoint stops a recomputation that has all that it needs.

    It has no text, and is raised where a tensor is saved: inside a scripted function, as a RuntimeError without text.
    Should another exception without text be taken for it, torch's checkpoint finds tensors missing, and says so.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "TorchScript interpreter" in text and text.rstrip().endswith("RuntimeError:"):
            raise _StopRecomputationError from None
        raise
