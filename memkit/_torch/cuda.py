"""What torch.cuda asks of itself before it answers, for whoever answers in its place; and what CUDA prefers."""

from dataclasses import dataclass

import torch

from memkit._torch.versions import parse

LAZY = ("_lazy_init", "_lazy_call")
"""Functions that start CUDA."""

EXCHANGE = ("_exchange_device", "_maybe_exchange_device")
"""Functions that make another device the current one, and return the one before."""

RECORD_HISTORY, SNAPSHOT = "_record_memory_history", "_snapshot"
"""Functions of the allocator's history, documented under these names."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What CUDA's side of PyTorch does in another way from version to version.

    Attributes:
        torch: Major and minor number of PyTorch; None for the installed one.
        cudnn: cuDNN's version as `torch.backends.cudnn.version` gives it; None for the one that PyTorch's wheels bring.
    """

    torch: tuple[int, int] | None = None
    cudnn: int | None = None

    @property
    def prefers_cudnn_attention(self) -> bool:
        """Whether attention asks cuDNN first on Hopper and Blackwell: with cuDNN 9.15.1, so in the wheels since 2.12.

        Source: `check_prefer_cudnn_attention` in torch's `sdp_utils.cpp`. A build for the CPU stands for that wheel.
        """
        cudnn = self.cudnn
        if cudnn is None and self.torch is None:
            cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if cudnn is None:
            return (self.torch or parse(torch.__version__)) >= (2, 12)
        return int(cudnn) > 91500
