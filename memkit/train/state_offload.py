"""Offload the optimizer's state to disk, or from an accelerator to host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._core.errors import ConfigError
from memkit._core.settings import Checker
from memkit.train.chunked_steps import atomic_steps
from memkit.train.gradients import given_optimizers
from memkit.train.offload_files import given_folder, map_file
from memkit.train.parameterwise import materialize_state, require_own_state


@contextlib.contextmanager
def offload_state(optimizer: Optimizer | Sequence[Optimizer], *, folder: str | Path | None = None) -> Iterator[None]:
    """Offload an optimizer's state inside the block: to disk, or from an accelerator to pinned host memory.

    The state is created and moved on entry, and brought back at the end. `atomic_steps` runs the step chunk by chunk.
    On an accelerator each chunk's state is copied to the device, stepped there by the optimizer's own code, and copied
    back. On the CPU the state is a mapped, unlinked file, which the system may write out and drop from memory. The
    result is bit-identical. ``optimizer.state_dict()`` and ``load_state_dict()`` work as usual.

    Args:
        optimizer: Any of torch's own optimizers that `materialize_state` accepts, or several.
        folder: Folder of the file; None is the system's temporary folder, which some systems keep in memory.

    Raises:
        ConfigError: The optimizer is not supported, or the parameters are sharded.
        InputError: ``folder`` is not a directory that exists.
        MemkitOutOfMemoryError: The disk is full; the state is unchanged.

    Memory:
        One chunk's state, plus the memory of `atomic_steps`.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Linear(300, 300)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with mk.train.offload_state(optimizer):
        ...     model(torch.ones(2, 300)).sum().backward()
        ...     optimizer.step()
    """
    optimizers = given_optimizers("offload_state", optimizer)
    with moved_state(optimizers, given_folder(Checker("offload_state"), folder)), atomic_steps(optimizers):
        yield


@contextlib.contextmanager
def moved_state(optimizers: Sequence[Optimizer], folder: str | Path | None = None) -> Iterator[None]:
    """Do the same as `offload_state` for a caller that already runs the steps in chunks."""
    for parameter in _parameters(optimizers):
        if type(parameter) not in {torch.Tensor, nn.Parameter}:
            raise ConfigError(
                "offload_state(optimizer)",
                got=f"parameters of type {type(parameter).__name__}",
                expected="unsharded parameters on this device",
                fix="leave out offload_state: sharding has already divided the state.",
            )
    for each in optimizers:
        require_own_state(
            each,
            call="offload_state(optimizer)",
            fix="use one of these, or keep this optimizer's state where it is: omit offload_state, or leave "
            "'optimizer' out of offload=(...).",
        )
    materialize_state(optimizers)
    with contextlib.ExitStack() as stack:
        for each in optimizers:
            _move_out(each, folder)
            reload = each.register_load_state_dict_post_hook(lambda loaded: _move_out(loaded, folder))
            stack.callback(reload.remove)
        try:
            yield
        finally:
            for each in optimizers:
                _move(each, lambda value, device: value.to(device, copy=True))


def _parameters(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]


def _move(optimizer: Optimizer, move: Callable[[torch.Tensor, torch.device], torch.Tensor]) -> None:
    """Replace the state tensors of each parameter, except its counters; all of them or none."""
    moved = {
        parameter: {name: move(value, parameter.device) if value.dim() else value for name, value in state.items()}
        for parameter, state in optimizer.state.items()
    }
    for parameter, state in moved.items():
        optimizer.state[parameter] = state


def _move_out(optimizer: Optimizer, folder: str | Path | None) -> None:
    values = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    on_host = [value for value in values if value.device.type == "cpu"]
    mapped = dict(zip(map(id, on_host), map_file(on_host, folder), strict=True))

    def move(value: torch.Tensor, _: torch.device) -> torch.Tensor:
        if id(value) in mapped:
            return mapped[id(value)]
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)

    _move(optimizer, move)
