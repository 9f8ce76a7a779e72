"""Sizes of a batch's rows where shapes do not tell them: samples in lists, and padding that a forward may cut off."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from memkit._torch.fake import FakeTensor
from memkit._torch.tensors import bytes_held
from memkit.train.samples import SampleList
from memkit.train.split import list_leaves, list_tensors


@dataclass(frozen=True)
class RowSizes:
    """The sizes of a batch's rows by one of its entries.

    Attributes:
        entry: A list of samples; or a tensor of integers, such as tokens, masks and lengths.
        kind: The entry's place and kind, the same in each batch of one structure.
    """

    entry: Any
    kind: Hashable

    @property
    def limit(self) -> float:
        """The largest size that a row of this shape can have."""
        is_bounded = isinstance(self.entry, Tensor) and self.entry.dim() > 1
        return self.entry[0].numel() if is_bounded else float("inf")

    @cached_property
    def values(self) -> list[int]:
        """Size of each row: bytes of a sample, width of a padded row without its padding, or the integer itself.

        Reading them waits for the tensor's device.
        """
        if isinstance(self.entry, SampleList):
            return [sum(map(bytes_held, list_tensors(item))) for item in self.entry.items]
        widths: list[int] = (_widths(self.entry.flatten(1)) if self.entry.dim() > 1 else self.entry).tolist()
        return widths

    @property
    def largest(self) -> int:
        """Size of the largest row."""
        return max(self.values)

    @property
    def is_wide(self) -> bool:
        """Whether some rows are at least twice as large as others."""
        return 2 * min(self.values) <= self.largest

    def order(self) -> list[int]:
        """Return the rows, the largest first."""
        return sorted(range(len(self.values)), key=lambda row: -self.values[row])


def row_sizes(batch: Any) -> list[RowSizes]:
    """Return the entries of a batch that tell sizes of its rows; of tensors, those with the most dimensions first.

    Args:
        batch: The batch, as `mark_samples` returns it, with at least one row.
    """
    entries = [
        RowSizes(leaf, (place, leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else place)
        for place, leaf in enumerate(list_leaves(batch))
        if isinstance(leaf, SampleList) or _may_tell(leaf)
    ]
    return sorted(entries, key=lambda each: -each.entry.dim() if isinstance(each.entry, Tensor) else -torch.inf)


def rows_in_turn(orders: Sequence[Sequence[int]], number: int) -> list[int]:
    """Return so many rows: the first of each order, then the second of each, and so on."""
    return list(dict.fromkeys(itertools.chain.from_iterable(zip(*orders, strict=True))))[:number]


def _may_tell(leaf: Any) -> bool:
    """Whether a tensor's numbers may tell how large its rows are: integers, other than the bytes of images."""
    is_integer = isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex())
    has_numbers = is_integer and not isinstance(leaf, FakeTensor) and leaf.device.type != "meta"
    return has_numbers and leaf.dtype is not torch.uint8 and leaf.dim() > 0 and leaf.numel() > 0


def _widths(rows: Tensor) -> Tensor:
    """Return the width of each row without the padding at its two ends; in masks, zeros are padding."""
    is_mask = rows.dtype is torch.bool or ((rows == 0) | (rows == 1)).all()
    is_content = rows != (torch.zeros_like(rows[0, 0]) if is_mask else _padding_of(rows))
    return (_last(is_content) + _last(is_content.flip(1)) - rows.shape[1]).clamp(min=0)


def _padding_of(rows: Tensor) -> Tensor:
    """Return the number that fills the longest end of a row."""
    runs = [rows.shape[1] - _last((each != each[:, :1]).flip(1)) for each in (rows, rows.flip(1))]
    return torch.cat([rows[:, 0], rows[:, -1]])[torch.cat(runs).argmax()]


def _last(is_content: Tensor) -> Tensor:
    """Return the number of columns up to the last one with content; zero without any."""
    places = torch.arange(1, is_content.shape[1] + 1, dtype=torch.int32, device=is_content.device)
    return (is_content * places).amax(1)
