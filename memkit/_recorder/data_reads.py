"""Reads of ``tensor.data``: whoever has it can write to the tensor's memory, and autograd does not see that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from memkit._torch.dispatch import TensorBase, below_modes
from memkit._torch.tensors import bit_sums, storage_key, version_of

_data: Any = TensorBase.data  # the property of C++
# Blocks in several threads may end in a different order than they began: each removes its own listener.
_listeners: list[Callable[[Tensor], None]] = []
_WORD, _STRIDE = 8, 7


class _Exposed(NamedTuple):
    """A tensor whose ``.data`` was read, its version then, its storage as bytes, and their sum then."""

    tensor: Tensor
    version: int
    whole: Tensor
    content: list[int]


class DataReads:
    """Finds storages that are written to through ``.data`` within a block, and keeps them alive until asked for them.

    Args:
        concerns: Whether a tensor whose ``.data`` is read matters.
    """

    def __init__(self, concerns: Callable[[Tensor], bool]) -> None:
        self._concerns = concerns
        self._exposed: dict[int, _Exposed] = {}  # by storage address

    def __enter__(self) -> Self:
        _listeners.append(self._note)
        torch.Tensor.data = _told  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        _listeners.remove(self._note)
        if not _listeners and vars(torch.Tensor).get("data") is _told:
            del torch.Tensor.data

    def _note(self, tensor: Tensor) -> None:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not self._concerns(tensor):
            return
        key = storage_key(tensor.untyped_storage())
        if key not in self._exposed:
            _below = below_modes()
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self._exposed[key] = _Exposed(tensor.detach(), version_of(tensor), whole, _content_sums(whole))

    def written(self) -> list[Tensor]:
        """Return, as uint8 of shape ``(num_bytes,)``, each storage that was written to unseen since the first read.

        They are kept alive no longer, and not returned again.
        """
        exposed, self._exposed = self._exposed, {}
        return [
            each.whole
            for each in exposed.values()
            if version_of(each.tensor) == each.version and _content_sums(each.whole) != each.content
        ]


def _content_sums(whole: Tensor) -> list[int]:
    """Return sums over a storage's bytes: of its words, of every seventh word, and of what is left at its end."""
    words = whole[: len(whole) // _WORD * _WORD].view(torch.int64)
    return bit_sums([words, words[::_STRIDE], whole[len(whole) // _WORD * _WORD :]])


def _tell_and_read(tensor: Tensor) -> Tensor:
    for listener in tuple(_listeners):
        listener(tensor)
    return _data.__get__(tensor)  # type: ignore[no-any-return]


_told = property(_tell_and_read, _data.__set__)
