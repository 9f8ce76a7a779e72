"""How many operators the steps of a simulation dispatch, and what it costs for each of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _get_dispatch_mode as get_dispatch_mode, _TorchDispatchModeKey as TorchDispatchModeKey
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.timing import seconds_of

ROUNDS = 9


class EmptyMode(TorchDispatchMode):
    """The least that any dispatch mode costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Count(TorchDispatchMode):
    """Counts operators of the steps, which run in a fake tensor mode, and not what prepares them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_step = get_dispatch_mode(TorchDispatchModeKey.FAKE) is not None
        self.num_operators += is_step and func is not torch.ops.prim.device.default
        return func(*args, **(kwargs or {}))


def cost(simulate: Callable[[], object]) -> dict[str, float]:
    """Processor time, the least of nine calls after the first: other programs on the machine only add to it."""

    def seconds() -> float:
        gc.collect()
        return seconds_of(simulate)

    with Count() as count:
        simulate()
    least = min(seconds() for _ in range(ROUNDS))
    return {
        "num_operators_in_two_steps": count.num_operators,
        "seconds": round(least, 3),
        "ms_per_operator": round(1e3 * least / count.num_operators, 4),
    }
