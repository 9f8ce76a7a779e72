"""What torch says of the machine without a public form."""

import re

import torch


def allocator_history() -> object:
    """Return what torch has recorded of its CUDA allocator; documented under this name."""
    return torch.cuda.memory._snapshot()


def has_bfloat16_instructions() -> bool:
    """Say whether this processor multiplies bfloat16 by itself."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return the free and all bytes of an accelerator, as its driver says."""
    if hasattr(torch.accelerator, "get_memory_info"):  # 2.8 lacks it
        return torch.accelerator.get_memory_info(device)
    info: tuple[int, int] = torch.get_device_module(device).mem_get_info(device)
    return info


def reset_allocator_peak(device: torch.device) -> None:
    """Let an accelerator's peak counters start again."""
    if hasattr(torch.accelerator, "reset_peak_memory_stats"):  # 2.8 lacks it
        torch.accelerator.reset_peak_memory_stats(device)
    else:
        torch.get_device_module(device).reset_peak_memory_stats(device)


def empty_cache(device_type: str) -> None:
    """Give an accelerator's unused blocks back to its driver."""
    if device_type != "mps" and hasattr(torch.accelerator, "empty_cache"):  # 2.8 lacks it
        torch.accelerator.empty_cache()
    else:
        torch.get_device_module(device_type).empty_cache()


def onednn_version() -> tuple[int, int]:
    """Return the version of oneDNN in this torch, by which its CPU kernels differ; (0, 0) without it."""
    found = re.search(r"MKL-DNN v(\d+)\.(\d+)", torch.__config__.show())
    return (int(found[1]), int(found[2])) if found else (0, 0)
