"""Times of a device's operators by its compute, transfer and launch speeds, such as those published for a GPU."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from memkit._core.packaged import packaged_text
from memkit.predict.gpus import GPU, all_gpus

_GIGA, _TERA = 10**9, 10**12
HALF = (torch.float16, torch.bfloat16)


class OperatorTimes(Protocol):
    """Times of a device's operators."""

    @property
    def operator_seconds(self) -> float:
        """Time of an operator that computes next to nothing."""

    @property
    def about(self) -> str:
        """Readable source of the times."""

    def seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        """Return the time of an operator call in a step, from its arguments and result on tensors without data."""

    def moving_seconds(self, num_bytes: int) -> float:
        """Return the time to move so many bytes to the place where activations can be offloaded, and back."""

    def following_seconds(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        """Return Python's time for an operator call that a dispatch mode follows, beside the call's own."""


class Untimed:
    """Takes the time of no operator: for a trial that is asked for its memory alone. All times are 0."""

    operator_seconds = 0.0
    about = "not timed"

    def seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:  # noqa: ARG002 - as in the protocol
        """Return 0."""
        return 0.0

    def moving_seconds(self, num_bytes: int) -> float:  # noqa: ARG002 - as in the protocol
        """Return 0."""
        return 0.0

    def following_seconds(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:  # noqa: ARG002 - as in the protocol
        """Return 0."""
        return 0.0


@dataclass(frozen=True)
class Speeds:
    """A roofline model of a device: an operator takes the longer of its compute and transfer time, plus a launch.

    Attributes:
        flops: Floating point operations per second by dtype; others count as float32.
        bandwidth: Bytes per second of its memory.
        link_bandwidth: Bytes per second to the place where activations can be offloaded.
        operator_seconds: Time to launch an operator.
        view_seconds: Time of a view, which computes and moves nothing.
        about: Readable source of these figures.
    """

    flops: Mapping[torch.dtype, float]
    bandwidth: float
    link_bandwidth: float
    operator_seconds: float
    view_seconds: float
    about: str

    def seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        """Return the time of an operator call."""
        if func.is_view:
            return self.view_seconds
        tensors = _tensors((out, args, tuple(kwargs.values())))
        rate = self.flops.get(tensors[0].dtype if tensors else torch.float32, self.flops[torch.float32])
        computing, moving = num_flops(func, args, kwargs, out) / rate, num_bytes(tensors) / self.bandwidth
        return max(computing, moving) + self.operator_seconds

    def moving_seconds(self, num_bytes: int) -> float:
        """Return the time to move so many bytes over the link and back."""
        return 2 * num_bytes / self.link_bandwidth

    def following_seconds(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:  # noqa: ARG002 - interface
        """Return a launch: Python's part of it is most of it."""
        return self.operator_seconds


def num_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Count the floating point operations of an operator by torch's formula; 0 if it has none."""
    formula = flop_registry.get(getattr(func, "overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def num_bytes(value: Any) -> int:
    """Add up the bytes of the tensors in nested sequences."""
    return sum(each.numel() * each.itemsize for each in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (tuple, list)) else []


def card_speeds(gpu: GPU) -> Speeds:
    """Return the published speeds of a GPU, which real kernels stay below.

    An unlisted GPU gets those of the listed GPU of its generation with the nearest number of multiprocessors, scaled
    in proportion to that number.
    """
    data = _table()
    rows: Mapping[str, Any] = data["cards"]
    name, share = (gpu.name, 1.0) if gpu.name in rows else _nearest(gpu, rows)
    row = rows[name]
    return Speeds(
        flops={
            torch.float32: row["float32"] * _TERA * share,
            **dict.fromkeys(HALF, row["half"] * _TERA * share),
        },
        bandwidth=row["bandwidth"] * _GIGA * share,
        link_bandwidth=row["link"] * _GIGA,
        operator_seconds=data["operator_seconds"],
        view_seconds=0.0,  # the GPU does not see it
        about=f"the published speeds of {name}" + ("" if share == 1 else f", times {share:.2f}"),
    )


def _nearest(gpu: GPU, rows: Mapping[str, Any]) -> tuple[str, float]:
    listed = [each for each in all_gpus() if each.name in rows]
    related = [each for each in listed if each.architecture == gpu.architecture] or listed
    own = gpu.num_multiprocessors or 0

    def distance(each: GPU) -> int:
        return abs((each.num_multiprocessors or 0) - own)

    nearest = min(related, key=distance)
    return nearest.name, own / nearest.num_multiprocessors if own and nearest.num_multiprocessors else 1.0


@functools.cache
def _table() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(packaged_text("memkit.predict", "gpu_speeds.json"))
    return data
