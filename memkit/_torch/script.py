"""TorchScript, through which an exception passes as a RuntimeError that holds only its text."""

import contextlib
from collections.abc import Iterator

from torch.utils.checkpoint import _StopRecomputationError


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
