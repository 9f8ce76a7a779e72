"""Which of its kernels torch takes for a convolution."""

from torch._C import _ConvBackend as ConvBackend  # type: ignore[attr-defined]  # torch's stubs lack the underscore
from torch._C import _select_conv_backend as select_conv_backend

__all__ = ["ConvBackend", "select_conv_backend"]
