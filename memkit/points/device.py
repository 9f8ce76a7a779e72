"""Draws on an accelerator: per-cell values are drawn on the host, per-point values on the device.

The host knows how many points are kept, so it never waits for the device. Samples match the host's bit for bit.
"""

from __future__ import annotations

import functools
import importlib
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memkit.points.bits import REDRAW_BITS, Key, redraw_bits, words_at
from memkit.points.grid import GridIndex
from memkit.points.layout import Layout


def array_to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to a device without waiting for the copy."""
    here = torch.from_numpy(array)
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


class DeviceLayout(NamedTuple):
    """A scene's `Layout` on a device.

    Attributes:
        slots: (N,) int32.
        left: (N + 1,) uint8, the points left at each slot; the last entry is for an unused slot.
        bounds: See `Layout`; `steps` holds the same on the device.
        steps: (T + 1,) int64.
        most_redrawn: Maximum number of slots that can be redrawn; the probability of more is below 1e-18.
    """

    slots: Tensor
    left: Tensor
    bounds: list[int]
    steps: Tensor
    most_redrawn: int


class DeviceDraws:
    """Draws on one device; caches the layouts of live indexes there, 5 bytes per point.

    Args:
        device: An accelerator, or the CPU.
        with_triton: Whether to use two Triton kernels; otherwise torch operators.
    """

    def __init__(self, device: torch.device, *, with_triton: bool) -> None:
        self._device = device
        self._with_triton = with_triton
        self._layouts: WeakKeyDictionary[GridIndex, dict[int, DeviceLayout]] = WeakKeyDictionary()

    def choose(self, index: GridIndex, place: int, needed: NDArray[np.uint8], num_kept: int, key: Key) -> Tensor:
        """Run `draw.choose` for a scene of an index; return the kept rows, ascending, (num_kept,) int64."""
        layout = self._layout(index, place)
        still = array_to_device(needed, self._device)
        if self._with_triton:
            kernels = importlib.import_module("memkit.points.kernels")  # imported lazily: Triton takes a second
            chosen = kernels.choose_on_device(layout.left, layout.steps, still, key)
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
        return functools.partial(DeviceDraws, with_triton=self._with_triton), (self._device,)


def _layout_on(layout: Layout, device: torch.device) -> DeviceLayout:
    taking_part = np.diff(layout.bounds)
    left = np.arange(len(taking_part), 0, -1)
    refused = float(((2**16 - 1) % left + 1) @ taking_part) / 2**16
    return DeviceLayout(
        slots=array_to_device(layout.slots, device),
        left=array_to_device(np.append(np.repeat(left.astype(np.uint8), taking_part), np.uint8(1)), device),
        bounds=layout.bounds.tolist(),
        steps=array_to_device(layout.bounds.copy(), device),
        most_redrawn=int(refused + 10 * refused**0.5) + 40,
    )


def _draw_below(layout: DeviceLayout, key: Key) -> Tensor:
    """Run `passes.draw_below` with torch operators, in int64."""
    num, left = len(layout.slots), layout.left.long()
    words = words_at(torch.arange(-(-num // 4), device=left.device), key.tag)
    drawn = torch.stack([words >> shift & 0xFFFF for shift in (0, 16, 32, 48)], 1).flatten()
    below = torch.zeros_like(left)
    below[:num] = drawn[:num] // ((2**16 - 1) // left[:num])
    slots = torch.nonzero_static(below == left, size=layout.most_redrawn, fill_value=num)[:, 0]
    below[slots] = redraw_bits(slots, key) * left[slots] >> REDRAW_BITS
    return below[:num].to(torch.uint8)


def _keep(layout: DeviceLayout, below: Tensor, needed: Tensor) -> Tensor:
    """Run `passes.keep` with torch operators."""
    chosen = torch.empty_like(below)
    for start, stop in pairwise(layout.bounds):
        still = needed[: stop - start]
        flags = below[start:stop] < still
        chosen[start:stop] = flags
        still -= flags.to(torch.uint8)
    return chosen
