"""Times of a training step's operators on fake tensors: of each part of the step and of each block's forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memkit._torch.dispatch import LeanDispatchMode
from memkit._torch.graph import current_backward
from memkit.predict.plan.speeds import OperatorTimes, num_bytes

_NO_BACKWARD = -1
_UNTIMED = ("prim", "profiler")  # questions about tensors, and marks for torch's profiler


@dataclass
class BlockForward:
    """Cost of a block's forward.

    Attributes:
        seconds: Total time.
        light_seconds: Time of the operators whose results a selective treatment does not keep.
        num_operators: Number of operators.
        input_bytes: Bytes of its inputs.
    """

    seconds: float = 0.0
    light_seconds: float = 0.0
    num_operators: int = 0
    input_bytes: int = 0


@dataclass
class Following:
    """Python's time if a dispatch mode followed a forward.

    Attributes:
        seconds: The time.
        num_operators: Number of operators in the forward.
    """

    seconds: float = 0.0
    num_operators: int = 0

    @property
    def mean_seconds(self) -> float:
        """Time for an operator."""
        return self.seconds / max(1, self.num_operators)


class StepTimes(LeanDispatchMode):
    """Adds up the times of a step's operators, part by part. Enter it beneath the recorder.

    Args:
        speeds: Times of the device's operators.
        blocks: Modules that may be treated, with their names.
        kept_operators: Operators whose results a selective treatment keeps.

    Attributes:
        parts: Seconds of each part: before the first micro-batch, of each micro-batch, of each optimizer's step.
        following: Of each part, Python's seconds if a dispatch mode followed its forward, and the operators there.
        forwards: Each block's forward, over all micro-batches.
    """

    supports_higher_order_operators = True

    def __init__(self, speeds: OperatorTimes, blocks: Mapping[nn.Module, str], kept_operators: frozenset[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts, self.following = [0.0], [Following()]
        self.forwards = {name: BlockForward() for name in blocks.values()}
        self._speeds, self._blocks, self._kept_operators = speeds, blocks, kept_operators
        self._running: list[str] = []
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as cleanup:
            super().__enter__()  # type: ignore[no-untyped-call]
            cleanup.push(super().__exit__)
            # The recorder enters the same way with other hooks; a shared helper would hide which ones.
            for handle in (
                register_module_forward_pre_hook(self._enter_block),
                register_module_forward_hook(self._leave_block, always_call=True),
                register_optimizer_step_pre_hook(self.begin_part),
            ):
                cleanup.callback(handle.remove)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def begin_part(self, *_: object) -> None:
        """Count the following operators toward the next part."""
        self.parts.append(0.0)
        self.following.append(Following())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count its time."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in _UNTIMED:
            return out
        seconds = self._speeds.seconds(func, args, kwargs, out)
        self.parts[-1] += seconds
        if current_backward() != _NO_BACKWARD or not torch.is_grad_enabled():
            return out
        self.following[-1].seconds += self._speeds.following_seconds(args, kwargs, out)
        self.following[-1].num_operators += 1
        if self._running:
            forward = self.forwards[self._running[-1]]
            forward.num_operators += 1
            forward.seconds += seconds
            forward.light_seconds += 0.0 if func in self._kept_operators else seconds
        return out

    def _enter_block(self, module: nn.Module, inputs: Any) -> None:
        if module in self._blocks:
            self._running.append(self._blocks[module])
            self.forwards[self._running[-1]].input_bytes += num_bytes(inputs)

    def _leave_block(self, module: nn.Module, *_: object) -> None:
        if module in self._blocks:
            self._running.pop()
