"""Settings of the wrapper, checked before anything is touched, and the result of its steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from memkit._core.settings import Checker
from memkit._gradients.loss import Loss
from memkit.train.checks import check_norm

CALL = "MemoryEfficientTrainingWrapper"


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step.

    Attributes:
        losses: Loss and weight of each micro-batch, detached.
        grad_norm: Total gradient norm before clipping, a 0-dim tensor; None without clipping.
        stepped: Whether the optimizer actually stepped.
        num_microbatches: Micro-batches that the step took.
        num_ooms: Out-of-memory errors survived during the step.
        peak_bytes: The device's peak allocated bytes so far; None if the device has no counter.
        sizes: Size of each micro-batch, in rows (in elements with ``split_fn``).
        num_compilations: Graphs that torch.compile made during the step, for any model. More than zero after the first
            steps means that shapes change, also through new micro-batch sizes.
    """

    losses: tuple[Loss, ...]
    grad_norm: torch.Tensor | None
    stepped: bool
    num_microbatches: int
    num_ooms: int
    peak_bytes: int | None
    sizes: tuple[int, ...]
    num_compilations: int

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The ``outputs`` of each micro-batch's `Loss`, detached, in order; None for a micro-batch without."""
        return tuple(loss.outputs for loss in self.losses)

    @property
    def loss(self) -> torch.Tensor:
        """The batch's mean loss, a 0-dim detached tensor; only reading its value synchronizes with the device."""
        if len(self.losses) == 1 and self.losses[0].reduction == "mean":
            return self.losses[0].value
        total = torch.stack([loss.total() for loss in self.losses]).sum()
        mean: torch.Tensor = total / sum(loss.weight for loss in self.losses)
        return mean


def check_settings(
    accumulation_steps: object,
    on_oom: object,
    offload: Collection[str],
    memory: object,
    scheduler: object,
    split_fn: object,
    max_grad_norm: float | None,
) -> None:
    """Check the settings of `MemoryEfficientTrainingWrapper`."""
    check = Checker(CALL)
    check.whole("accumulation_steps", accumulation_steps, 1)
    check.choice("on_oom", on_oom, ("exact", "inexact", "raise"))
    check_norm(max_grad_norm, call=CALL)
    if isinstance(offload, str) or not set(offload) <= {"activations", "optimizer"}:
        raise check.refuse("offload", offload, "a collection of 'activations' and 'optimizer', or an empty one")
    if isinstance(scheduler, ReduceLROnPlateau):
        wanted = "a schedule that steps without a metric; step ReduceLROnPlateau yourself after validation"
        raise check.refuse("scheduler", "ReduceLROnPlateau", wanted)
    if isinstance(memory, bool) or not (
        memory is None or isinstance(memory, int | str | float) or callable(getattr(memory, "available_bytes", None))
    ):
        wanted = "a MemoryManager, or a budget: bytes, text such as '22GiB', or a fraction in (0, 1]"
        raise check.refuse("memory", memory, wanted)
    if split_fn is not None:
        check.function("split_fn", split_fn)
