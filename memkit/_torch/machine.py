"""What torch says of the machine without a public form."""

import torch


def allocator_history() -> object:
    """Return what torch has recorded of its CUDA allocator; documented under this name."""
    return torch.cuda.memory._snapshot()


def has_bfloat16_instructions() -> bool:
    """Say whether this processor multiplies bfloat16 by itself."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
