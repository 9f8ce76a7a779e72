"""What lies in a storage, and who holds it."""

import torch
from torch._C import _storage_Use_Count as storage_use_count
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense

swap_tensors = torch._C._swap_tensor_impl  # what two tensors are, without torch's questions who else holds them

__all__ = ["is_dense", "storage_use_count", "swap_tensors"]
