"""Finds batches that a forward has written to without a new version: it cannot run on them again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from memkit._recovery.attempt import insist
from memkit._torch.tensors import content_sums

_LOOK = "looking whether a forward writes to the batch"
Array: TypeAlias = torch.Tensor | npt.NDArray[Any]


class Contents:
    """Tells whether a batch still has the content that it has now.

    Args:
        leaves: Its tensors and arrays.
    """

    def __init__(self, leaves: Sequence[Array]) -> None:
        self._before = [(each, insist(partial(_content_of, each), _LOOK)) for each in leaves]

    def are_same(self) -> bool:
        """Return whether nothing was written to the batch."""
        return all(insist(partial(_content_of, each), _LOOK) == before for each, before in self._before)


class InputWatch:
    """Notes the contents of batches until a forward is seen to leave its batch as it was.

    Versions tell of writes by torch's operators; not of those through ``.data`` or NumPy, nor of those to arrays.

    Args:
        leaves_of: Lists the tensors and arrays of a batch.

    Attributes:
        leaves_of: See the argument.
        is_quiet: Whether a forward has left its batch as it was.
    """

    def __init__(self, leaves_of: Callable[[Any], Sequence[Array]]) -> None:
        self.leaves_of, self.is_quiet = leaves_of, False

    def note(self, batch: Any) -> Contents:
        """Note the contents of a batch."""
        return Contents(self.leaves_of(batch))


def _content_of(leaf: Array) -> tuple[object, ...]:
    """Return what identifies a leaf's content; for a tensor without data, as in a simulation, its shape and dtype."""
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype, zlib.crc32(leaf.tobytes())
    return (leaf.shape, leaf.dtype, *content_sums(leaf.detach()))
