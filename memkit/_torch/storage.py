"""Contents and owners of a storage."""

from collections.abc import Callable

import torch
from torch import Tensor, _prims_common
from torch._C import _storage_Use_Count as storage_use_count

swap_tensors = torch._C._swap_tensor_impl  # swaps two tensors, without torch's check of other references

_IS_DENSE = "is_non_overlapping_and_dense"  # until 2.10; 2.12 has it with a suffix, for symbolic sizes too
is_dense: Callable[[Tensor], bool] = vars(_prims_common).get(f"{_IS_DENSE}_or_false") or vars(_prims_common)[_IS_DENSE]

memory_format_of: Callable[[Tensor], torch.memory_format] = _prims_common.suggest_memory_format
"""Returns a tensor's memory format, as given by `suggest_memory_format` in C++."""

__all__ = ["is_dense", "memory_format_of", "storage_use_count", "swap_tensors"]
