"""Times of operators on this machine's CPU: each distinct call is run on tensors made for it."""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from memkit._machine import random_state
from memkit._machine.devices import host_memory
from memkit._torch.dispatch import LeanDispatchMode, without_modes
from memkit._torch.fake import FakeTensor
from memkit._torch.pytree import tree_leaves, tree_map_only
from memkit.predict.plan.speeds import HALF, Speeds, num_bytes

_MOST_SECONDS = 3.0
_NUM_SETS = 3  # of operands for one call
_ALIKE = 8  # calls up to so many times shorter, by the roofline, compare with it as the longest one does
_LONG_SECONDS = 0.02  # calls that take longer run twice, in a hot cache
_HOT_BYTES = 2**19  # smaller operands stay near, but other kernels evict code and other data
_COLD_BYTES = 2**20  # after a kernel on so many bytes, Python starts in a cold cache
_FAST_CACHE_BYTES = 2**22
_MOST_CACHE_BYTES = 2**24  # from then on what was not used for an operator or two comes from memory
_CACHE_BYTES = 2**25
# glibc gives large blocks back to the system until one of their size, up to 32 MiB, was freed; from then on it keeps
# them. Training steps soon are in that state, and so is measuring: before a call is timed, a block as large as its
# largest tensor is freed. That holds for the rest of the process and cannot be undone, so nothing larger is freed here.
_MOST_KEPT_BYTES, _PAGE_BYTES = 2**25 - 2**16, 2**12
_DISK_BANDWIDTH = 2e8  # a plain disk, without the page cache in front of it
_PROBED_BYTES = 2**20  # of a call that is run to measure what Python adds to it
_PROBE_WIDTH, _SMALL_WIDTH, _PROBE_BYTES, _PROBE_DEPTH, _NUM_PROBES, _NUM_COLD_PROBES = 256, 16, 2**24, 4, 9, 3
_PLAIN = (bool, int, float, complex, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class HostSpeeds:
    """Speeds of this machine, and what Python takes on it.

    Attributes:
        clock_seconds: Time to read the clock.
        roofline: Measured speeds.
        operator_seconds: See `HostTimes.operator_seconds`.
        added_seconds: What a step adds to an operator in backward and in forward, each in a hot and in a cold cache.
        following_seconds: What a dispatch mode adds, likewise.
    """

    clock_seconds: float = 0.0
    roofline: Speeds | None = None
    operator_seconds: float = 0.0
    added_seconds: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))
    following_seconds: tuple[float, float] = (0.0, 0.0)


@cache
def _this_machine(num_threads: int) -> HostSpeeds:  # noqa: ARG001 - the key of the cache
    return HostTimes(_PROBED_BYTES, machine=HostSpeeds()).measure_machine()


@cache
def _timed_calls(num_threads: int) -> dict[Any, float]:  # noqa: ARG001 - the key of the cache
    """Return the times that earlier plans of this process measured: the next plan is then made from the same ones."""
    return {}


class HostTimes:
    """Measured times of operators with this process's number of threads.

    Calls are distinct if they differ in the operator, in shapes, strides or dtypes of tensors, or in another argument.
    Each distinct one is run a few times, and its processor time is remembered: the mean of the shortest run in a cold
    and in a hot cache, since in a step some operands were just computed and others were saved long ago. A call that
    cannot be run counts by a roofline, scaled by how the operator's other calls of about its largest size compare with
    theirs: the median, since on a busy machine single measurements are off by an order of magnitude.

    Measuring leaves the process's allocator as a step would: freed blocks as large as the measured tensors are reused,
    instead of given back to the system.

    Args:
        most_bytes: Most bytes of operands and results of a call that is run.
        most_seconds: Total processor time of measuring, after which the roofline counts.
        machine: The machine; None is this one, which is measured once in a process for each number of threads.

    What is offloaded goes to a temporary file. Its speed is measured, too, if the memory that is free beside the budget
    is enough for the system to keep the file there; otherwise it is that of a plain disk.

    Attributes:
        measuring_seconds: Processor time spent on measuring.
    """

    def __init__(self, most_bytes: int, most_seconds: float = _MOST_SECONDS, machine: HostSpeeds | None = None) -> None:
        self._most_bytes, self._most_seconds = most_bytes, most_seconds
        num_threads = torch.get_num_threads()
        self._machine = _this_machine(num_threads) if machine is None else machine
        self._timed = _timed_calls(num_threads) if machine is None else {}
        self._seconds: dict[Any, float | None] = {}  # None: cannot be run
        # By operator: the roofline's seconds of each measured call, and how many times as long it took.
        self._compared: dict[Any, list[tuple[float, float]]] = {}
        self._scales: dict[Any, float] = {}  # by operator: the ratio that its other calls are given
        self.measuring_seconds = 0.0
        self._kept_bytes = 0
        with without_modes():
            self._cache_filler = _bytes_beside_the_heap(_CACHE_BYTES)
            self._moving_seconds = self._measure_file()

    def measure_machine(self) -> HostSpeeds:
        """Measure what all plans of this process have in common."""
        with without_modes(), random_state.preserved():
            clock_seconds = min(self._time(lambda: None) for _ in range(_NUM_PROBES))
            self._machine = HostSpeeds(clock_seconds=clock_seconds)
            self._machine = replace(self._machine, roofline=self._measure_roofline())
            return self._measure_python()

    @property
    def operator_seconds(self) -> float:
        """Time of a small operator in forward, with what Python and autograd add, in a hot cache."""
        return self._machine.operator_seconds

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
        """Return the time of an operator call in a step, with what Python and autograd add to it."""
        key = (func, _key((args, tuple(kwargs.items()))))
        if key not in self._seconds:
            start = time.process_time()
            self._seconds[key] = self._measured(key, func, args, kwargs, out)
            self.measuring_seconds += time.process_time() - start
        seconds = self._seconds[key]
        if seconds is None:
            seconds = self._by_roofline(func, args, kwargs, out)
        return seconds + _between(self._machine.added_seconds[torch.is_grad_enabled()], args, kwargs, out)

    def following_seconds(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        """Return Python's time for an operator call that a dispatch mode follows, beside the call's own."""
        return _between(self._machine.following_seconds, args, kwargs, out)

    def moving_seconds(self, num_bytes: int) -> float:
        """Return the time to write so many bytes to a temporary file and to read them back."""
        return num_bytes * self._moving_seconds

    def _measured(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float | None:
        size = num_bytes((args, tuple(kwargs.values()), out))
        estimate = self._roofline.seconds(func, args, kwargs, out)
        expected = 0.0 if key in self._timed else estimate * self._scales.get(func, 1.0)
        is_cheap = size <= self._most_bytes and self.measuring_seconds + expected <= self._most_seconds
        if not is_cheap or func.namespace != "aten" or not _can_be_made((args, kwargs)):  # others may do anything
            return None
        if key not in self._timed:
            num_sets = min(_NUM_SETS, self._most_bytes // max(size, 1))
            with without_modes(), torch.no_grad(), random_state.preserved():
                try:
                    self._have_kept(max((num_bytes(each) for each in tree_leaves((args, kwargs, out))), default=0))
                    sets = [tree_map_only(Tensor, _operand, (args, kwargs)) for _ in range(num_sets)]
                    self._timed[key] = self._time_calls([partial(func, *a, **k) for a, k in sets], size)
                except Exception:  # noqa: BLE001 - operators raise what they like, if the values do not suit them
                    return None
        measured = self._timed[key]
        compared = self._compared.setdefault(func, [])
        compared.append((estimate, measured / estimate))
        smallest = max(compared)[0] / _ALIKE
        self._scales[func] = statistics.median(ratio for seconds, ratio in compared if seconds >= smallest)
        return measured

    def _have_kept(self, size: int) -> None:
        """Free a block of this size, so that the allocator keeps such blocks from now on."""
        size = min(size + _PAGE_BYTES, _MOST_KEPT_BYTES)
        if size > self._kept_bytes:
            torch.empty(size, dtype=torch.uint8, device="cpu")
            self._kept_bytes = size

    @property
    def _roofline(self) -> Speeds:
        assert self._machine.roofline is not None  # noqa: S101 - it is measured first
        return self._machine.roofline

    def _by_roofline(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        return self._scales.get(func, 1.0) * self._roofline.seconds(func, args, kwargs, out)

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
        return (min(cold) + min(hot)) / 2

    def _time(self, call: Callable[[], object]) -> float:
        start = time.process_time()
        result = call()
        seconds = time.process_time() - start
        del result  # only now: a step does not free it at once
        return max(seconds - self._machine.clock_seconds, 1e-7)

    def _measure_roofline(self) -> Speeds:
        """Measure a matrix product, a copy, and an operator too small to compute much."""
        size = _PROBE_WIDTH, _PROBE_WIDTH
        squares = {
            dtype: torch.ones(size, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64, *HALF)
        }
        data, copy = _bytes_beside_the_heap(_PROBE_BYTES), _bytes_beside_the_heap(_PROBE_BYTES)
        launch = self._shortest(data[:1].clone)
        return Speeds(
            flops={
                dtype: 2 * _PROBE_WIDTH**3 / self._shortest(partial(torch.mm, each, each))
                for dtype, each in squares.items()
            },
            bandwidth=2 * _PROBE_BYTES / self._shortest(partial(copy.copy_, data)),
            link_bandwidth=_DISK_BANDWIDTH,
            operator_seconds=launch,
            view_seconds=launch,
            about="speeds measured on this machine",
        )

    def _measure_file(self) -> float:
        """Measure how long a byte takes to a temporary file and back."""
        if host_memory().available_bytes < 2 * self._most_bytes:
            return 2 / _DISK_BANDWIDTH
        data = memoryview(bytearray(_PROBE_BYTES))

        def move() -> None:
            file.seek(0)
            file.write(data)
            file.seek(0)
            file.readinto(data)

        try:
            with tempfile.TemporaryFile(buffering=0, prefix="memkit-probe-") as file:
                return self._shortest(move) / _PROBE_BYTES
        except OSError:  # no folder for it, or no space
            return 2 / _DISK_BANDWIDTH

    def _shortest(self, call: Callable[[], object]) -> float:
        seconds = [self._time(call)]
        while len(seconds) < _NUM_PROBES and sum(seconds) < _LONG_SECONDS:  # products in float16 take 10 ms on a CPU
            seconds.append(self._time(call))
        return min(seconds)

    def _measure_python(self) -> HostSpeeds:
        """Measure a small operator, what a step adds to it in forward and backward, and what a dispatch mode adds.

        Each in a hot and in a cold cache.
        """
        with torch.device("cpu"):  # timing within it would count it too
            x = torch.ones(_SMALL_WIDTH, _SMALL_WIDTH)
            kinds = (nn.LayerNorm, partial(nn.Linear, out_features=_SMALL_WIDTH), lambda _: nn.GELU())
            layers = [make(_SMALL_WIDTH) for _ in range(_PROBE_DEPTH) for make in kinds]
        with torch.enable_grad():
            with _Tally(self) as tally:
                nn.Sequential(*layers)(x).sum().backward()
            plain = {size: self._time_passes(layers, x, size) for size in (0, _FAST_CACHE_BYTES, _MOST_CACHE_BYTES)}
            followed = {size: self._time_passes(layers, x, size, _Followed()) for size in (0, _MOST_CACHE_BYTES)}

        def added(size: int, *, is_forward: bool) -> float:
            number, own_seconds = tally.sums[is_forward]
            return float(max(0.0, plain[size][is_forward] - own_seconds) / number)

        num_operators = tally.sums[True][0]
        hot_s, cold_s = (max(0.0, followed[size][True] - plain[size][True]) / num_operators for size in followed)
        backward, forward = (
            (added(0, is_forward=is_forward), added(_FAST_CACHE_BYTES, is_forward=is_forward))
            for is_forward in (False, True)
        )
        return replace(
            self._machine,
            operator_seconds=plain[0][True] / num_operators,
            added_seconds=(backward, forward),
            following_seconds=(hot_s, cold_s),
        )

    def _time_passes(
        self, layers: Sequence[nn.Module], x: Tensor, num_bytes: int, around: AbstractContextManager[Any] | None = None
    ) -> dict[bool, float]:
        """Time forward and backward with so many bytes of the cache overwritten between layers, not counting that.

        Layers run within ``around``.
        """
        seconds: dict[bool, list[float]] = {True: [], False: []}
        overwriting = 0.0

        def overwrite(*_: object) -> None:
            nonlocal overwriting
            overwriting += self._time(partial(self._cache_filler[:num_bytes].add_, 1))

        def forward() -> Tensor:
            y = x
            for layer in layers:
                with around or nullcontext():
                    y = layer(y)
                if num_bytes:
                    y.register_hook(overwrite)
                    overwrite()
            return y.sum()

        for _ in range(_NUM_PROBES if num_bytes < _MOST_CACHE_BYTES else _NUM_COLD_PROBES):
            loss = forward()
            for is_forward, run in ((True, forward), (False, loss.backward)):
                overwriting = 0.0
                seconds[is_forward].append(self._time(run) - overwriting)
        return {is_forward: statistics.median(each) for is_forward, each in seconds.items()}


class _Tally(LeanDispatchMode):
    """Counts operators and adds up their times, in forward (where gradients are enabled) and in backward."""

    def __init__(self, times: HostTimes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sums = {True: (0, 0.0), False: (0, 0.0)}
        self._times = times

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it."""
        out = func(*args, **(kwargs or {}))
        number, seconds = self.sums[torch.is_grad_enabled()]
        self.sums[torch.is_grad_enabled()] = number + 1, seconds + self._times.seconds(func, args, kwargs or {}, out)
        return out


def _between(hot_and_cold: tuple[float, float], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return the time that Python adds to a call: the larger what it computes on, the colder is the cache by then."""
    hot, cold = hot_and_cold
    return hot + (cold - hot) * min(1.0, num_bytes((args, tuple(kwargs.values()), out)) / _COLD_BYTES)


class _Followed(LeanDispatchMode):
    """Runs operators and does nothing else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        return func(*args, **(kwargs or {}))


def _bytes_beside_the_heap(size: int) -> Tensor:
    """Return zeros in memory of their own, which goes back to the system without a trace in the allocator."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).zero_()


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
