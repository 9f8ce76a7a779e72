"""Measure the GPU of this machine: its total, the memory a process holds outside torch's allocator, its workspaces."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from memkit._core.errors import ConfigError, StateError
from memkit._core.units import MIB, format_bytes
from memkit._machine.devices import allocator_counters, device_memory, resolve_device
from memkit.predict.gpus import GPU, find_gpu

_MOST_DRIFT = 16 * MIB  # what drivers keep or free by themselves


def calibrate_gpu(device: str = "cuda") -> GPU:
    """Measure a GPU in half a minute.

    A second process runs a matrix product, a convolution and a backward pass on the GPU. The drop in the GPU's free
    memory minus what torch's allocator in that process holds is the context. Other processes on the GPU must be idle:
    if the free memory is not the same again after the second process has ended, the measurement is refused.

    Args:
        device: ``"cuda"``, ``"cuda:1"`` or ``"xpu"``.

    Returns:
        The GPU, with its name and total as torch reports them and one figure for its context. Save it with
        `write_gpus`.

    Raises:
        ConfigError: This machine does not have the device, or the device does not report its free memory.
        StateError: The second process died, or another process took or freed memory of the GPU meanwhile.
    """
    gpu = find_gpu(device)
    resolved = resolve_device(device)
    before = device_memory(resolved).free_bytes
    if before is None:
        raise ConfigError(
            f"calibrate_gpu(device={device!r})",
            got=f"{resolved}, a device that does not report its free memory",
            expected="a device of type cuda or xpu",
            fix="run it on a machine with such a GPU, and pass device='cuda' or device='xpu'.",
        )
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
    here, there = spawn.Pipe()
    worker = spawn.Process(target=_work, args=(there, str(resolved)))
    worker.start()
    there.close()  # so that the pipe closes when the worker ends
    try:
        reserved_bytes, workspace_bytes = here.recv()
        after = device_memory(resolved).free_bytes or 0
        here.send(None)
    except EOFError:
        raise StateError(
            f"calibrate_gpu(device={device!r})",
            got="a second process that died before it could measure",
            expected="free memory on the GPU, and a script whose code is under `if __name__ == '__main__':`",
            fix="read the error of that process above, or run `memkit gpus --calibrate FILE`.",
        ) from None
    finally:
        here.close()  # a worker that is still waiting to be released ends too
        worker.join()
    drift = _drift(resolved, before)
    if abs(drift) > _MOST_DRIFT:
        done = "taken" if drift > 0 else "freed"
        raise StateError(
            f"calibrate_gpu(device={device!r})",
            got=f"{format_bytes(abs(drift))} {done} on the GPU by other processes meanwhile",
            expected="a GPU on which no other process works",
            fix="call it again when the others are idle; `nvidia-smi` lists them.",
        )
    context_bytes = before - after - reserved_bytes
    return replace(
        gpu,
        context_interval=(context_bytes, context_bytes),
        cublas_workspace_bytes=workspace_bytes,
        confidence="calibrated",
        source=f"memkit gpus --calibrate, torch {torch.__version__}",
        date=dt.datetime.now(dt.UTC).strftime("%Y-%m"),
    )


def _drift(device: torch.device, before: int) -> int:
    """Return the bytes that are missing after the second process; a driver may free its memory a little later."""
    deadline = time.monotonic() + 1
    while (drift := before - (device_memory(device).free_bytes or 0)) > _MOST_DRIFT and time.monotonic() < deadline:
        time.sleep(0.05)
    return drift


def _work(pipe: Connection, device_name: str) -> None:
    """Use the GPU as a training step does, send (reserved, workspace of one handle), and wait to be released."""
    device = torch.device(device_name)
    matrix = torch.ones(512, 512, device=device)
    before = allocator_counters(device).allocated_bytes or 0
    product = matrix @ matrix
    workspace_bytes = (allocator_counters(device).allocated_bytes or 0) - before - product.nbytes
    image = torch.ones(8, 16, 64, 64, device=device, requires_grad=True)
    weight = torch.ones(32, 16, 3, 3, device=device, requires_grad=True)
    (torch.nn.functional.conv2d(image, weight).mean() * product.mean()).backward()  # type: ignore[no-untyped-call]
    weight.sum().item()  # waits for the GPU
    pipe.send((allocator_counters(device).reserved_bytes or 0, workspace_bytes))
    pipe.recv()
