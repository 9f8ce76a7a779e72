"""What lies in a storage, and who holds it."""

from collections.abc import Callable

import torch
from torch import Tensor, _prims_common
from torch._C import _storage_Use_Count as storage_use_count

swap_tensors = torch._C._swap_tensor_impl  # what two tensors are, without torch's questions who else holds them

_IS_DENSE = "is_non_overlapping_and_dense"  # until 2.10; 2.12 has it with a suffix, for sizes that are symbols too
is_dense: Callable[[Tensor], bool] = vars(_prims_common).get(f"{_IS_DENSE}_or_false") or vars(_prims_common)[_IS_DENSE]

memory_format_of: Callable[[Tensor], torch.memory_format] = _prims_common.suggest_memory_format
"""In which order of channels a tensor lies, as `suggest_memory_format` in C++ says."""

__all__ = ["is_dense", "memory_format_of", "storage_use_count", "swap_tensors"]
