"""How many operators the steps of a simulation dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _get_dispatch_mode as get_dispatch_mode, _TorchDispatchModeKey as TorchDispatchModeKey
from torch.utils._python_dispatch import TorchDispatchMode


class Count(TorchDispatchMode):
    """Counts operators of the steps, which run in a fake tensor mode, and not what prepares them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_step = get_dispatch_mode(TorchDispatchModeKey.FAKE) is not None
        self.num_operators += is_step and func is not torch.ops.prim.device.default
        return func(*args, **(kwargs or {}))
