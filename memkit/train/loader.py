"""Data loading: a DataLoader configured for the machine, and moving nested batches to a device."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from memkit._core.errors import InputError, InputTypeError
from memkit._core.settings import Checker
from memkit._core.units import format_bytes
from memkit._core.words import ForeignWords, refuse_call
from memkit._machine import devices, host, random_state
from memkit._torch import pytree
from memkit._torch.tensors import bytes_held
from memkit.train.split import Tree, map_leaves

_LOGGER = logging.getLogger("memkit")
_WORDS = {"num_workers": "workers n_workers", "pin_memory": "pin", "prefetch_factor": "prefetch"}
_MAX_WORKERS = 4
_PREFETCH = 2
_RAM_SHARE = 0.25  # of available memory, for prefetched batches
_SHARED_MEMORY_SHARE = 0.5  # of /dev/shm, through which workers hand their batches over


def to_device(batch: Tree, device: str | torch.device) -> Tree:
    """Move all tensors of a batch to a device; containers keep their types.

    Args:
        batch: Tensors in dicts and other mappings, lists, tuples, named tuples, dataclasses (frozen ones too), and
            objects with a method ``to(device)``, such as a PyG ``Batch``, in any nesting. Other leaves are left alone.
        device: Target device; ``"auto"`` is this machine's accelerator, or the CPU. From pinned memory the host does
            not wait for the copy; back to the host it does.

    Returns:
        The same containers with the moved tensors; a tensor already on the device is returned as is, and so is a batch
        of nothing else.

    Raises:
        ConfigError: The device name is unknown, or this machine does not have the device.
        InputError: A container holds itself.

    Memory cost: the moved tensors.

    Example:
        >>> import torch, memkit as mk
        >>> batch = {"points": torch.zeros(5, 3), "names": ["a", "b"]}
        >>> mk.train.to_device(batch, "meta")["points"].device
        device(type='meta')
    """
    target = device if isinstance(device, torch.device) else devices.resolve_device(device)
    if _is_there(batch, target):
        return batch
    try:
        return map_leaves(lambda leaf: _move(leaf, target), batch, _moves_itself)
    except RecursionError:
        raise InputError(
            "to_device(batch, device)",
            got=f"a {type(batch).__name__} that holds itself, or is nested too deep",
            expected="containers that end in tensors and other leaves",
            fix="move the tensors before that: to_device(tensors, device).",
        ) from None


def _is_there(batch: Any, device: torch.device) -> bool:
    """Whether a plain container has nothing but tensors on the device: each batch, in training on a CPU."""
    kind = type(batch)
    leaves = batch if kind is tuple or kind is list else batch.values() if kind is dict else (batch,)
    for leaf in leaves:  # noqa: SIM110 - faster than a generator
        if type(leaf) is not torch.Tensor or leaf.device != device:
            return False
    return True


def _moves_itself(node: Any) -> bool:
    return callable(getattr(node, "to", None)) and not isinstance(node, type)


def _move(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        if type(leaf) is torch.Tensor and leaf.device == device:
            return leaf
        # Only from pinned memory: any other copy blocks anyway, and one to the host must, before the values are read.
        return leaf.to(device, non_blocking=leaf.device.type == "cpu" != device.type and leaf.is_pinned())
    return leaf.to(device) if _moves_itself(leaf) else leaf


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine properties a plan is based on; `here` reads those of this machine."""

    num_cores: int
    available_bytes: int
    shared_memory_bytes: int | None
    has_accelerator: bool
    may_start_processes: bool

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        """Read the properties of this machine and process."""
        return cls(
            num_cores=host.usable_cores(),
            available_bytes=devices.host_memory().available_bytes,
            shared_memory_bytes=host.shared_memory_free_bytes(),
            has_accelerator=device.type not in {"cpu", "meta"},
            may_start_processes=not multiprocessing.current_process().daemon,
        )


def choose_settings(dataset: Dataset[Any], batch_size: int, machine: Machine) -> tuple[dict[str, Any], list[str]]:
    """Choose workers, prefetching and pinning for a dataset; return the settings and the reasons for them.

    Uses at most four workers and leaves one core to training; each worker prefetches two batches; batches in flight
    fit into a quarter of the available host memory and half of the shared memory. One sample is loaded to measure its
    size; the random state is preserved.
    """
    batch_bytes = _batch_bytes(dataset, batch_size)
    num_workers = min(_MAX_WORKERS, machine.num_cores - 1)
    reasons = [
        f"{num_workers} workers: {machine.num_cores} usable cores, one for the training, and {_MAX_WORKERS} at most"
    ]
    if isinstance(dataset, TensorDataset):
        num_workers = 0
        reasons.append("0 workers instead: the samples are tensors in memory, and there is nothing to prepare")
    elif not machine.may_start_processes:
        num_workers = 0
        reasons.append("0 workers instead: this is a daemonic process, which may not start others")
    prefetch = _PREFETCH
    if num_workers and batch_bytes:
        limits = {"available host memory": int(_RAM_SHARE * machine.available_bytes)}
        if machine.shared_memory_bytes is not None:
            limits["shared memory"] = int(_SHARED_MEMORY_SHARE * machine.shared_memory_bytes)
        scarce = min(limits, key=limits.__getitem__)
        fitting = limits[scarce] // batch_bytes  # batches that may be in flight
        if fitting < num_workers * prefetch:
            prefetch = 1
            num_workers = min(num_workers, fitting)
            reasons.append(
                f"{num_workers} workers instead, each one batch ahead: a batch takes {format_bytes(batch_bytes)}, and "
                f"{format_bytes(limits[scarce])} of {scarce} may hold waiting ones"
            )
    elif num_workers:
        reasons.append("host memory is not considered: the size of a batch is not known before it is loaded")
    reasons.append(
        "pinned memory, so that copies to the device do not wait"
        if machine.has_accelerator
        else "memory is not pinned: there is no accelerator to copy to"
    )
    settings: dict[str, Any] = {"num_workers": num_workers, "pin_memory": machine.has_accelerator}
    if num_workers:
        settings |= {"prefetch_factor": prefetch, "persistent_workers": True}
    return settings, reasons


def make_dataloader(
    dataset: Dataset[Any],
    batch_size: int = 8,
    *,
    device: str | torch.device = "auto",
    **torch_kwargs: Any,
) -> DataLoader[Any]:
    """Make a DataLoader with workers, prefetching and pinning chosen for this machine and container.

    The choices and their reasons are logged at level INFO to the logger ``"memkit"``.

    Args:
        dataset: Any torch dataset.
        batch_size: Samples per batch; with a ``batch_sampler`` an estimate, used to size the prefetched batches.
        device: Device the batches will be moved to; determines pinning.
        torch_kwargs: Any arguments of `torch.utils.data.DataLoader`; they override the automatic choices.

    Returns:
        A `torch.utils.data.DataLoader`.

    Raises:
        ConfigError: ``batch_size`` is not an integer of 1 or more, or ``num_workers`` is not one of 0 or more.
        InputTypeError: ``dataset`` is a DataLoader or cannot be indexed, or torch's DataLoader has no such argument.

    Memory cost: ``num_workers * prefetch_factor`` batches in host memory, plus the worker processes themselves.

    Source: settings from a GAN's training (workers capped at 4, prefetch 2, persistent, pinned).

    Example:
        >>> import torch, memkit as mk
        >>> dataset = torch.utils.data.TensorDataset(torch.zeros(20, 3))
        >>> loader = mk.train.make_dataloader(dataset, batch_size=8, device="cpu", shuffle=True)
        >>> len(loader), loader.num_workers, loader.pin_memory
        (3, 0, False)
    """
    batch_size = Checker("make_dataloader").whole("batch_size", batch_size, 1)
    _check_dataset(dataset, batch_size)
    refuse_call(
        DataLoader.__init__, "make_dataloader", (None, dataset), torch_kwargs, ForeignWords(_WORDS), is_method=True
    )
    _check_workers(torch_kwargs.get("num_workers", 0))
    chosen, reasons = choose_settings(dataset, batch_size, Machine.here(devices.resolve_device(device)))
    if torch_kwargs.get("num_workers", 0):
        chosen = {"prefetch_factor": _PREFETCH, "persistent_workers": True} | chosen
    elif "num_workers" in torch_kwargs:
        chosen = {"pin_memory": chosen["pin_memory"]}
    if "batch_sampler" not in torch_kwargs:
        chosen["batch_size"] = batch_size
    given = [f"{name} as given" for name in torch_kwargs]
    _LOGGER.info("make_dataloader: %s", "; ".join([*reasons, *given]))
    return DataLoader(dataset, **(chosen | torch_kwargs))


def _check_dataset(dataset: object, batch_size: int) -> None:
    if isinstance(dataset, DataLoader):
        got, fix = "a DataLoader", f"write make_dataloader(loader.dataset, batch_size={batch_size})"
    elif isinstance(dataset, type):
        got, fix = f"the class {dataset.__name__}", f"write make_dataloader({dataset.__name__}(...))"
    elif isinstance(dataset, tuple) and dataset and all(isinstance(each, torch.Tensor) for each in dataset):
        got, fix = "a tuple of tensors", "write make_dataloader(torch.utils.data.TensorDataset(*tensors))"
    elif isinstance(dataset, IterableDataset) or hasattr(dataset, "__getitem__"):
        return
    else:
        got, fix = f"a {type(dataset).__name__}", "write make_dataloader(list(samples)), or pass a torch Dataset"
    raise InputTypeError("make_dataloader(dataset)", got=got, expected="a dataset of samples", fix=fix)


def _check_workers(num_workers: object) -> None:
    is_chosen = isinstance(num_workers, str) or num_workers is None
    fix = "write make_dataloader(dataset): the number of workers is chosen for this machine" if is_chosen else None
    Checker("make_dataloader").whole("num_workers", num_workers, 0, fix=fix)


def _batch_bytes(dataset: Dataset[Any], batch_size: int) -> int | None:
    """Estimate a batch's bytes from its first sample; None if it cannot be indexed or has no tensors or arrays."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or len(dataset) == 0:
        return None
    with random_state.preserved():
        leaves = pytree.tree_leaves(dataset[0])
    sizes = [leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray)]
    sizes += [bytes_held(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return batch_size * sum(sizes) if sizes else None
