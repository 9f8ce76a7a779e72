"""Selection of torch's convolution kernel."""

from torch._C import (  # type: ignore[attr-defined]  # torch's stubs lack the underscore
    _ConvBackend as ConvBackend,
    _select_conv_backend as select_conv_backend,
)

__all__ = ["ConvBackend", "select_conv_backend"]
