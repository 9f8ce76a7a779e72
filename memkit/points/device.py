"""Draws on an accelerator: what belongs to cells is drawn on the host, what belongs to points on the device.

The host knows how many points are kept, so nothing waits for the device. Samples are those of the host, bit for bit.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memkit.points.grid import GridIndex
from memkit.points.layout import Layout
from memkit.points.philox import Key, Stream, blocks


def brought(array: NDArray[Any], device: torch.device) -> Tensor:
    """A host's array on a device; the host does not wait until it is there."""
    here = torch.from_numpy(array)
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


class DeviceLayout(NamedTuple):
    """A scene's `Layout` on a device.

    Attributes:
        slots: (N,) int32.
        left: (N + 1,) uint8; the last one stands for no slot.
        bounds: See `Layout`; `steps` is the same on the device.
        steps: (T + 1,) int64.
        most_again: So many slots may be refused in a draw; the probability of more is below 1e-18.
    """

    slots: Tensor
    left: Tensor
    bounds: list[int]
    steps: Tensor
    most_again: int


class DeviceDraws:
    """Draws on one device; keeps the layouts of indexes that are alive there, 5 bytes for each point.

    Args:
        device: An accelerator, or the CPU.
        with_triton: By two kernels; else by torch's operators.
    """

    def __init__(self, device: torch.device, *, with_triton: bool) -> None:
        self._device = device
        self._with_triton = with_triton
        self._layouts: WeakKeyDictionary[GridIndex, dict[int, DeviceLayout]] = WeakKeyDictionary()

    def choose(self, index: GridIndex, place: int, needed: NDArray[np.uint8], num_kept: int, key: Key) -> Tensor:
        """`draw.choose` for a scene of an index: its rows that are kept, ascending, (num_kept,) int64."""
        layout = self._layout(index, place)
        still = brought(needed, self._device)
        if self._with_triton:
            kernels = importlib.import_module("memkit.points.kernels")  # only here: Triton takes a second
            chosen = kernels.choose(layout.left, layout.steps, still, key)
        else:
            chosen = _keep(layout, _draw_below(layout, key), still)
        by_point = chosen.index_select(0, layout.slots)
        return torch.nonzero_static(by_point, size=num_kept)[:, 0]

    def _layout(self, index: GridIndex, place: int) -> DeviceLayout:
        held = self._layouts.setdefault(index, {})
        if place not in held:
            held[place] = _layout_on(index.scenes[place].layout, self._device)
        return held[place]

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self._device, self._with_triton)


def _remade(device: torch.device, with_triton: bool) -> DeviceDraws:  # noqa: FBT001 # what __reduce__ hands over
    return DeviceDraws(device, with_triton=with_triton)


def _layout_on(layout: Layout, device: torch.device) -> DeviceLayout:
    refused = float((2**16 % np.arange(1, 256) * np.bincount(layout.left, minlength=256)[1:]).sum()) / 2**16
    return DeviceLayout(
        slots=brought(layout.slots, device),
        left=brought(np.append(layout.left, np.uint8(1)), device),
        bounds=layout.bounds.tolist(),
        steps=brought(layout.bounds.copy(), device),
        most_again=int(refused + 10 * refused**0.5) + 40,
    )


def _draw_below(layout: DeviceLayout, key: Key) -> Tensor:
    """`passes.draw_below` by torch's operators, in int64."""
    num, left = len(layout.slots), layout.left.long()
    words = torch.stack(blocks(torch.arange(-(-num // 16), device=left.device), key, Stream.POINTS), 1)
    drawn = torch.stack([words >> shift & 0xFFFF for shift in (0, 16, 32, 48)], 2).flatten()
    product = torch.zeros_like(left)
    torch.mul(drawn[:num], left[:num], out=product[:num])
    refused = (product & 0xFFFF) < 2**16 % left
    slots = torch.nonzero_static(refused, size=layout.most_again, fill_value=num)[:, 0]
    more = blocks(slots, key, Stream.AGAIN)[0] >> 9 & 2**55 - 1
    below = product >> 16
    below[slots] = more * left[slots] >> 55
    return below[:num].to(torch.uint8)


def _keep(layout: DeviceLayout, below: Tensor, needed: Tensor) -> Tensor:
    """`passes.keep` by torch's operators."""
    chosen = torch.empty_like(below)
    for start, stop in pairwise(layout.bounds):
        still = needed[: stop - start]
        flags = below[start:stop] < still
        chosen[start:stop] = flags
        still -= flags.to(torch.uint8)
    return chosen
