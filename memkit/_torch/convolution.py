"""Selection of torch's convolution kernel, and of the order of dimensions in which it works."""

from typing import Any

import torch
from torch._C import (  # type: ignore[attr-defined]  # torch's stubs lack the underscore
    _ConvBackend as ConvBackend,
    _select_conv_backend as select_conv_backend,
)

memory_format_owner: Any = torch._C
MEMORY_FORMAT = "_conv_determine_backend_memory_format"
"""Function of (input, weight, backend) that FakeTensor calls; without CUDA it returns contiguous for every GPU."""

__all__ = ["MEMORY_FORMAT", "ConvBackend", "memory_format_owner", "select_conv_backend"]
