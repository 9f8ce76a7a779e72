"""Machine information from torch that has no public API."""

import functools
import re
from collections.abc import Callable

import torch

built_accelerator: Callable[[], torch.device | None] = torch._C._accelerator_getAccelerator
"""Returns the accelerator that this torch is built for, or that is registered, whether or not one is there."""


def allocator_history() -> object:
    """Return torch's recorded history of its CUDA allocator; documented under this name."""
    return torch.cuda.memory._snapshot()


def keep_allocator_history(max_entries: int) -> None:
    """Let torch record its CUDA allocator's last actions with the Python lines that requested them; 0 stops it."""
    if max_entries:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_entries)
    else:
        torch.cuda.memory._record_memory_history(None)


def has_bfloat16_instructions() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return the free and total bytes of an accelerator, as reported by its driver."""
    if hasattr(torch.accelerator, "get_memory_info"):  # 2.8 lacks it
        return torch.accelerator.get_memory_info(device)
    info: tuple[int, int] = torch.get_device_module(device).mem_get_info(device)
    return info


def reset_allocator_peak(device: torch.device) -> None:
    """Reset an accelerator's peak counters."""
    if hasattr(torch.accelerator, "reset_peak_memory_stats"):  # 2.8 lacks it
        torch.accelerator.reset_peak_memory_stats(device)
    else:
        torch.get_device_module(device).reset_peak_memory_stats(device)


def empty_cache(device_type: str) -> None:
    """Return an accelerator's unused blocks to its driver."""
    if device_type != "mps" and hasattr(torch.accelerator, "empty_cache"):  # 2.8 lacks it
        torch.accelerator.empty_cache()
    else:
        torch.get_device_module(device_type).empty_cache()


def memory_fraction(index: int) -> float | None:
    """Return the share of a CUDA device's memory that this process's allocator may have; None if torch cannot say."""
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return None
    fraction: float = torch.cuda.get_per_process_memory_fraction(index)
    return fraction


@functools.cache
def onednn_version() -> tuple[int, int]:
    """Return the version of oneDNN in this torch, which its CPU kernels depend on; (0, 0) without oneDNN."""
    found = re.search(r"MKL-DNN v(\d+)\.(\d+)", torch.__config__.show())
    return (int(found[1]), int(found[2])) if found else (0, 0)
