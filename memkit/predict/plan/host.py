"""Times of operators on this machine's CPU: each distinct call is run on tensors made for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from memkit._machine import random_state
from memkit._torch.dispatch import without_modes
from memkit._torch.fake import FakeTensor
from memkit._torch.pytree import tree_leaves, tree_map_only
from memkit.predict.plan.operations import StepTimes
from memkit.predict.plan.speeds import HALF, Speeds, num_bytes

_MOST_SECONDS = 3.0
_NUM_SETS = 3  # of operands for one call
_LONG_SECONDS = 0.02  # calls that take longer run twice, in a hot cache
_HOT_BYTES, _FAST_CACHE_BYTES = 2**19, 2**21  # smaller operands stay near, but other kernels evict code and data
# glibc gives large blocks back to the system until one of their size, up to 32 MiB, was freed; from then on it keeps
# them. Training steps soon are in that state: measuring starts with a block of that size, which later fills the cache.
_MOST_KEPT_BYTES = 2**25 - 2**16
_DISK_BANDWIDTH = 2e8  # a plain disk: the page cache in front of it takes memory too
_PROBE_WIDTH, _SMALL_WIDTH, _PROBE_BYTES, _NUM_PROBES = 256, 16, 2**24, 9
_PLAIN = (bool, int, float, complex, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format)


class HostTimes:
    """Measured times of operators with this process's number of threads.

    Calls are distinct if they differ in the operator, in shapes, strides or dtypes of tensors, or in another argument.
    Each distinct one is run a few times, and its processor time is remembered: the mean of runs in a cold and in a hot
    cache, since in a step some operands were just computed and others were saved long ago. A call that cannot be run
    counts by a roofline, scaled by how other calls of the operator compare with theirs.

    Args:
        most_bytes: Most bytes of operands and results of a call that is run.
        most_seconds: Total processor time of measuring, after which the roofline counts.

    Attributes:
        link_bandwidth: Bytes per second to the disk.
        operator_seconds: Time of a small operator in a forward pass, with all that Python adds.
        measuring_seconds: Processor time spent on measuring.
    """

    link_bandwidth = _DISK_BANDWIDTH

    def __init__(self, most_bytes: int, most_seconds: float = _MOST_SECONDS) -> None:
        self._most_bytes, self._most_seconds = most_bytes, most_seconds
        self._seconds: dict[Any, float | None] = {}  # None: cannot be run
        self._scales: dict[Any, tuple[float, float]] = {}  # by operator: seconds of its longest call, and their ratio
        self._clock_seconds = self._python_seconds = self.operator_seconds = self.measuring_seconds = 0.0
        with without_modes(), random_state.preserved():
            for _ in range(2):  # the second one is kept after the first one was freed
                self._cache_filler = torch.zeros(_MOST_KEPT_BYTES, dtype=torch.uint8, device="cpu")
            self._clock_seconds = min(self._time(lambda: None) for _ in range(_NUM_PROBES))
            self._roofline = self._measure_roofline()
            self.operator_seconds, self._python_seconds = self._measure_python()

    @property
    def about(self) -> str:
        """Readable source of the times."""
        rest = f", except {self.num_unmeasured} of {len(self._seconds)}, by its measured speeds"
        return "operators timed on this machine" + (rest if self.num_unmeasured else "")

    @property
    def num_measured(self) -> int:
        """Number of distinct calls that were run."""
        return len(self._seconds) - self.num_unmeasured

    @property
    def num_unmeasured(self) -> int:
        """Number of distinct calls that could not be run."""
        return sum(each is None for each in self._seconds.values())

    def seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        """Return the time of an operator call, in forward passes with what Python and autograd add to it."""
        key = (func, _key((args, tuple(kwargs.items()))))
        if key not in self._seconds:
            start = time.process_time()
            self._seconds[key] = self._measured(func, args, kwargs, out)
            self.measuring_seconds += time.process_time() - start
        seconds = self._seconds[key]
        if seconds is None:
            seconds = self._by_roofline(func, args, kwargs, out)
        return seconds + self._python_seconds * torch.is_grad_enabled()  # formulas of backward run without Python

    def _measured(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float | None:
        size = num_bytes((args, tuple(kwargs.values()), out))
        estimate = self._by_roofline(func, args, kwargs, out)
        is_cheap = size <= self._most_bytes and self.measuring_seconds + estimate <= self._most_seconds
        if not is_cheap or func.namespace != "aten" or not _can_be_made((args, kwargs)):  # others may do anything
            return None
        num_sets = min(_NUM_SETS, self._most_bytes // max(size, 1))
        with without_modes(), torch.no_grad(), random_state.preserved():
            try:
                sets = [tree_map_only(Tensor, _operand, (args, kwargs)) for _ in range(num_sets)]
                measured = self._time_calls([partial(func, *a, **k) for a, k in sets], size)
            except Exception:  # noqa: BLE001 - operators raise what they like, if the values do not suit them
                return None
        longest, scale = self._scales.get(func, (0.0, 1.0))
        if measured >= longest:
            self._scales[func] = measured, scale * measured / estimate
        return measured

    def _by_roofline(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        _, scale = self._scales.get(func, (0.0, 1.0))
        return scale * self._roofline.seconds(func, args, kwargs, out)

    def _time_calls(self, calls: Sequence[Callable[[], object]], size: int) -> float:
        """Return the processor time of an operator call from the same call on several sets of operands."""
        first = self._time(calls[0])
        if first > _LONG_SECONDS:
            return min(first, self._time(calls[0]))
        if size >= _HOT_BYTES:
            self._cache_filler.add_(1)
        cold, hot = [], []
        for call in calls:
            if size < _HOT_BYTES:
                self._cache_filler[:_FAST_CACHE_BYTES].add_(1)
            cold.append(self._time(call))
            hot.append(self._time(call))
        return (statistics.median(cold) + statistics.median(hot)) / 2

    def _time(self, call: Callable[[], object]) -> float:
        start = time.process_time()
        result = call()
        seconds = time.process_time() - start
        del result  # only now: a step does not free it at once
        return max(seconds - self._clock_seconds, 1e-7)

    def _measure_roofline(self) -> Speeds:
        """Measure a matrix product, a copy, and an operator too small to compute much."""
        size = _PROBE_WIDTH, _PROBE_WIDTH
        squares = {
            dtype: torch.ones(size, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64, *HALF)
        }
        data = torch.ones(_PROBE_BYTES, dtype=torch.uint8, device="cpu")
        launch = self._shortest(data[:1].clone)
        return Speeds(
            flops={
                dtype: 2 * _PROBE_WIDTH**3 / self._shortest(partial(torch.mm, each, each))
                for dtype, each in squares.items()
            },
            bandwidth=2 * _PROBE_BYTES / self._shortest(data.clone),
            link_bandwidth=_DISK_BANDWIDTH,
            operator_seconds=launch,
            view_seconds=launch,
            about="speeds measured on this machine",
        )

    def _shortest(self, call: Callable[[], object]) -> float:
        return min(self._time(call) for _ in range(_NUM_PROBES))

    def _measure_python(self) -> tuple[float, float]:
        """Measure an operator in the forward pass of a small layer: in total, and what is not the operator itself."""
        linear = nn.Linear(_SMALL_WIDTH, _SMALL_WIDTH, device="cpu", dtype=torch.float32)
        layer = nn.Sequential(linear, nn.GELU())
        x = torch.ones(_SMALL_WIDTH, _SMALL_WIDTH, device="cpu", dtype=torch.float32)
        with torch.enable_grad():
            with StepTimes(self, {layer: "layer"}, frozenset()) as trace:
                layer(x)
            seconds = self._time_calls([partial(layer, x)] * _NUM_PROBES, 0)
        forward = trace.forwards["layer"]
        return seconds / forward.num_operators, max(0.0, seconds - forward.seconds) / forward.num_operators


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        layout = value.stride() if value.layout is torch.strided else value.layout
        return type(value), value.shape, layout, value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_key, value))
    return repr(value) if isinstance(value, _PLAIN) else type(value)


def _can_be_made(arguments: Any) -> bool:
    return all(
        each.layout is torch.strided and each.device.type == "cpu" and type(each) in (FakeTensor, Tensor, nn.Parameter)
        if isinstance(each, Tensor)
        else isinstance(each, _PLAIN)
        for each in tree_leaves(arguments)
    )


def _operand(tensor: Tensor) -> Tensor:
    """Make a tensor like this one: of its known values, or of zeros (always valid as indices) or ones."""
    values = getattr(tensor, "constant", None)
    if values is not None:
        return values.clone()  # type: ignore[no-any-return]  # a tensor
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    value = int(tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool)
    storage = torch.full((max(length, 0),), value, dtype=tensor.dtype, device="cpu")
    return storage.as_strided(tensor.shape, tensor.stride())
