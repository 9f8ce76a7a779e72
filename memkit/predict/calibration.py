"""Measure the card of this machine: its total, what a process holds outside of torch's allocator, its workspaces."""

from __future__ import annotations

import datetime as dt
import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from memkit._core.errors import ConfigError, StateError
from memkit._machine.devices import allocator_counters, device_memory, resolve_device
from memkit.predict.gpus import GPU, find_gpu


def calibrate_gpu(device: str = "cuda") -> GPU:
    """Measure a card, in half a minute.

    A second process multiplies, convolves and goes backward on the card. What the card has less free meanwhile, and
    torch's allocator there does not hold, is the context. Other processes on the card must be quiet.

    Args:
        device: ``"cuda"``, ``"cuda:1"`` or ``"xpu"``.

    Returns:
        The card, its name and total as torch reports them, with one figure for its context. `write_gpus` keeps it.

    Raises:
        ConfigError: This machine does not have the device, or it does not say what it has free.
        StateError: The second process died.
    """
    gpu = find_gpu(device)
    resolved = resolve_device(device)
    before = device_memory(resolved).free_bytes
    if before is None:
        raise ConfigError(
            f"calibrate_gpu(device={device!r})",
            got=f"{resolved}, which does not say what it has free",
            expected="a device of type cuda or xpu",
            fix="run it on such a card.",
        )
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use the card
    here, there = spawn.Pipe()
    worker = spawn.Process(target=_work, args=(there, str(resolved)))
    worker.start()
    there.close()  # so that the worker's end is the end of the pipe
    try:
        reserved_bytes, workspace_bytes = here.recv()
        after = device_memory(resolved).free_bytes or 0
        here.send(None)
    except EOFError:
        raise StateError(
            f"calibrate_gpu(device={device!r})",
            got="a second process that died before it had measured",
            expected="room on the card, and a script whose code stands under `if __name__ == '__main__':`",
            fix="read its error above; or run `memkit gpus --calibrate FILE`.",
        ) from None
    finally:
        here.close()  # a worker that still waits to be let go ends too
        worker.join()
    context_bytes = before - after - reserved_bytes
    return replace(
        gpu,
        context_interval=(context_bytes, context_bytes),
        cublas_workspace_bytes=workspace_bytes,
        confidence="calibrated",
        source=f"memkit gpus --calibrate, torch {torch.__version__}",
        date=dt.datetime.now(dt.UTC).strftime("%Y-%m"),
    )


def _work(pipe: Connection, device_name: str) -> None:
    """Use the card as a training step does, tell (reserved, workspace of one handle), and wait to be let go."""
    device = torch.device(device_name)
    matrix = torch.ones(512, 512, device=device)
    before = allocator_counters(device).allocated_bytes or 0
    product = matrix @ matrix
    workspace_bytes = (allocator_counters(device).allocated_bytes or 0) - before - product.nbytes
    image = torch.ones(8, 16, 64, 64, device=device, requires_grad=True)
    weight = torch.ones(32, 16, 3, 3, device=device, requires_grad=True)
    (torch.nn.functional.conv2d(image, weight).mean() * product.mean()).backward()  # type: ignore[no-untyped-call]
    weight.sum().item()  # waits for the card
    pipe.send((allocator_counters(device).reserved_bytes or 0, workspace_bytes))
    pipe.recv()
