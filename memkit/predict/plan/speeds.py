"""Compute, transfer and launch speeds of a device: published for a GPU, or measured on this machine's CPU."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memkit._machine import random_state
from memkit.predict.gpus import GPU, all_gpus

_GIGA, _TERA = 10**9, 10**12
_HALF = (torch.float16, torch.bfloat16)
_NUM_RUNS = 7
_PROBE_WIDTH, _PROBE_BYTES, _PROBE_DEPTH = 384, 2**24, 32
_PROBE_OPERATORS = 10  # in a linear layer and its backward: 3 products, a sum, 2 sums of gradients, 4 views
_DISK_BANDWIDTH = 2e8  # a plain disk: the page cache in front of it takes memory too


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

    def seconds(self, *, num_flops: int, num_bytes: int, dtype: torch.dtype | None) -> float:
        """Return the time of one operator.

        Args:
            num_flops: Its floating point operations: for matrix products, convolutions and attention; 0 for others.
            num_bytes: Bytes that it reads and writes.
            dtype: The dtype that it computes in.
        """
        rate = self.flops.get(dtype or torch.float32, self.flops[torch.float32])
        return max(num_flops / rate, num_bytes / self.bandwidth) + self.operator_seconds


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
            **dict.fromkeys(_HALF, row["half"] * _TERA * share),
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
    text = Path(__file__).parents[1].joinpath("gpu_speeds.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def host_speeds() -> Speeds:
    """Measure this machine's CPU with a matrix product, a copy, and a chain of operators too small to compute much.

    Takes less than a second and 64 MiB.
    """
    squares = {dtype: torch.ones(_PROBE_WIDTH, _PROBE_WIDTH, dtype=dtype) for dtype in (*_HALF, torch.float64)}
    squares[torch.float32] = torch.ones(_PROBE_WIDTH, _PROBE_WIDTH)
    data = torch.ones(_PROBE_BYTES // 4)
    with random_state.preserved():
        chain = nn.Sequential(*(nn.Linear(1, 1) for _ in range(_PROBE_DEPTH)))
    one = torch.ones(1, 1)
    launch = _shortest(lambda: chain(one).backward()) / (_PROBE_OPERATORS * _PROBE_DEPTH)
    return Speeds(
        flops={
            dtype: 2 * _PROBE_WIDTH**3 / _shortest(functools.partial(torch.mm, each, each))
            for dtype, each in squares.items()
        },
        bandwidth=2 * _PROBE_BYTES / _shortest(data.clone),
        link_bandwidth=_DISK_BANDWIDTH,
        operator_seconds=launch,
        view_seconds=launch,
        about="speeds measured on this machine",
    )


def _shortest(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(_NUM_RUNS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
