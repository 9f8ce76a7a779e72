"""Measured points of a scaling curve, each in its own process; running out of memory is a valid result."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import SupportsIndex

import torch

from memkit._core.errors import InputError
from memkit._core.units import parse_bytes
from memkit._machine.devices import limit_memory, peak_bytes, reset_peak, resolve_device
from memkit._recorder.recorder import Recorder
from memkit._recovery.attempt import Done, OutOfMemory, attempt
from memkit.predict.scaling.deterministic import fit_points
from memkit.predict.scaling.law import Law
from memkit.predict.scaling.points import ScalingPoint, Status, StepMode
from memkit.predict.scaling.profile import checked_sizes, profile_scaling
from memkit.predict.scaling.result import ScalingResult
from memkit.predict.scaling.traces import BuildStep, forward_alone, takes_mode

_REQUEST = re.compile(r"allocate (\d+) bytes|[Tt]ried to allocate ([\d.]+ [KMGT]?i?B)")


def measure_scaling(
    build_step: BuildStep,
    sizes: Sequence[int],
    modes: Sequence[StepMode] = ("train", "inference"),
    *,
    device: str | torch.device = "auto",
    memory_limit: SupportsIndex | str | None = None,
    on_point: Callable[[ScalingPoint], None] = lambda _: None,
) -> ScalingResult:
    """Find out how the memory of a step grows with its size by running it: `profile_scaling`, measured.

    Each point is measured in a process of its own, smallest first. It builds the step and runs it twice; the second
    (warm) step counts: the bytes that an accelerator's allocator counts as allocated, or on the CPU the bytes in live
    tensors. Running out of memory is a result: the point records the size of the failed request, and larger sizes are
    skipped.

    Args:
        build_step: As for `profile_scaling`. A function at the top level of a module, or an object that can be pickled:
            each process imports it again, so a script must make this call under ``if __name__ == "__main__":``.
            ``device`` is torch's default device there, so it need not be passed.
        sizes: One or more distinct sizes of 1 or more.
        modes: ``"train"``, ``"inference"``, or both.
        device: Where to run; ``"auto"``: the accelerator, or else the CPU.
        memory_limit: How much each process may use on the device beyond its usage after a step of the smallest size,
            such as ``"4GiB"``: a hard limit, enforced by the kernel on the CPU and by the allocator on CUDA. None: no
            limit. Where limits are not supported (other systems, other devices), each point is an error that says so.
        on_point: Called with each point as soon as it is available.

    Returns:
        A point per size and mode. The laws are the predicted ones of `profile_scaling`; if the step cannot be traced,
        those of `fit_points` through the measured peaks.

    Raises:
        ConfigError: No sizes or modes, unknown modes, or this machine has no such device.
        InputTypeError: A size is not an int.
        InputError: A size is below 1, ``build_step`` cannot be sent to another process, or ``memory_limit`` is not a
            size.

    Memory:
        The memory of one step, in one process at a time.

    Example:
        >>> import memkit as mk
        >>> result = mk.predict.measure_scaling(my_module.build_step, [1000, 10_000], device="cpu")  # doctest: +SKIP
        >>> result.peaks("train")[10_000] == result.law["train"].predict(10_000)  # doctest: +SKIP
        True
    """
    ascending = checked_sizes(f"measure_scaling(build_step, sizes={sizes!r}, modes={modes!r})", sizes, modes)
    _check_sendable(build_step)
    where = str(resolve_device(device))
    limit_bytes = None if memory_limit is None else parse_bytes(memory_limit, name="memory_limit", is_large=True)
    points = []
    for mode in modes:
        is_full = False
        for size in ascending:
            if is_full:
                point = ScalingPoint(size, mode, "skipped", None, "", "measured")
            else:
                point = _in_own_process(_Order(build_step, size, mode, where, limit_bytes, ascending[0]))
            is_full = is_full or point.status == "oom"
            points.append(point)
            on_point(point)
    measured = ScalingResult(tuple(points), {})
    laws: dict[StepMode, Law] = {}
    guesses: dict[str, None] = {}
    doubts: dict[str, None] = {}
    for mode in modes:
        by_mode = _laws(build_step, measured, mode)
        laws |= by_mode.law
        guesses |= dict.fromkeys(by_mode.guesses)
        doubts |= dict.fromkeys(by_mode.doubts)
    return ScalingResult(measured.points, laws, tuple(guesses), tuple(doubts))


def _laws(build_step: BuildStep, measured: ScalingResult, mode: StepMode) -> ScalingResult:
    """Find the law of a mode: traced, or else fitted to the measured peaks; no law if there are no peaks."""
    sizes = [point.size for point in measured.points if point.mode == mode and point.status in ("ok", "oom")]
    peaks = measured.peaks(mode)
    try:
        return profile_scaling(build_step, sizes, [mode])
    except Exception:  # noqa: BLE001 - the step may raise anything without data; with data it ran
        return ScalingResult((), {mode: fit_points(list(peaks), list(peaks.values()))} if peaks else {})


def _check_sendable(build_step: BuildStep) -> None:
    try:
        pickle.dumps(build_step)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            "measure_scaling(build_step, sizes)",
            got=f"a build_step that no other process can import ({error})",
            expected="a function at the top level of a module, or an object that pickle can send",
            fix="move it to the top level of a file, or use profile_scaling, which needs no other process.",
        ) from error


@dataclass(frozen=True, slots=True)
class _Order:
    """Task of a process: measure one point, after a step of the smallest size if there is a limit."""

    build_step: BuildStep
    size: int
    mode: StepMode
    device: str
    limit_bytes: int | None
    smallest: int


def _in_own_process(order: _Order) -> ScalingPoint:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, order))
    process.start()
    theirs.close()
    with ours, suppress(EOFError):
        point: ScalingPoint = ours.recv()
        process.join()
        return point
    process.join()
    code = process.exitcode or 0
    # When the machine runs out of memory, the kernel kills the largest process without a message.
    status: Status = "oom" if code == -signal.SIGKILL else "error"
    end = f"the process ended {f'by {signal.Signals(-code).name}' if code < 0 else f'with code {code}'}"
    return ScalingPoint(order.size, order.mode, status, None, end, "measured")


def _work(connection: Connection, order: _Order) -> None:
    outcome = attempt(_measure_within, order, resolve_device(order.device), others=(Exception,))
    if isinstance(outcome, Done):
        connection.send(outcome.result)
        return
    status: Status = "oom" if isinstance(outcome, OutOfMemory) else "error"
    request = _requested(str(outcome.error))
    connection.send(ScalingPoint(order.size, order.mode, status, None, outcome.description, "measured", request))


def _measure_within(order: _Order, device: torch.device) -> ScalingPoint:
    """Measure within the order's limit."""
    with redirect_stdout(sys.stderr), torch.device(device):
        if order.limit_bytes is not None:
            if device.type == "cpu":
                torch.set_num_threads(1)  # a thread's stack would count
                torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]  # can crash without memory
            _measure(order.build_step, order.smallest, order.mode, device)  # warm up: libraries allocate once
            limit_memory(device, order.limit_bytes)
        return _measure(order.build_step, order.size, order.mode, device)


def _measure(build_step: BuildStep, size: int, mode: StepMode, device: torch.device) -> ScalingPoint:
    """Run two steps in this process and read the peak of the second.

    An accelerator's allocator keeps its own count. On the CPU, a `Recorder` counts live tensors.
    """
    recorder = Recorder() if peak_bytes(device) is None else None
    with recorder or nullcontext():
        step = build_step(size, mode=mode) if takes_mode(build_step) else build_step(size)
        with nullcontext() if mode == "train" else forward_alone():
            step()
            if recorder is None:
                reset_peak(device)
                step()
                return ScalingPoint(size, mode, "ok", peak_bytes(device), "", "measured")
            start, mark = time.perf_counter(), recorder.num_events()
            step()
            seconds = time.perf_counter() - start
            return ScalingPoint(size, mode, "ok", recorder.peak_since(mark, device), "", "measured", seconds=seconds)


def _requested(message: str) -> int | None:
    found = _REQUEST.search(message)
    if found is None:
        return None
    return int(found[1]) if found[1] else parse_bytes(found[2])
