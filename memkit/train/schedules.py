"""Learning-rate schedules by name: a warm-up, then a decay, both in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from memkit._core.settings import Checker

_CALL = "make_schedule"
Decay = Literal["constant", "linear", "cosine", "polynomial"]


@dataclass
class LearningRateFactor:
    """Factor of the base learning rate; plain numbers, so that `LambdaLR.state_dict` holds them.

    Attributes:
        decay: Name of the decay.
        num_steps: The step from which on the factor is ``final``.
        warmup_steps: Steps of the warm-up.
        final: The factor at the end.
        power: Exponent of ``"polynomial"``.
    """

    decay: Decay
    num_steps: int
    warmup_steps: int
    final: float
    power: float

    def __call__(self, step: int) -> float:
        """Return the factor for optimizer step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay == "constant":
            return 1.0
        left = max(0.0, (self.num_steps - step) / (self.num_steps - self.warmup_steps))
        if self.decay == "cosine":
            left = 0.5 * (1 - math.cos(math.pi * left))
        elif self.decay == "polynomial":
            left **= self.power
        return self.final + (1 - self.final) * left


def make_schedule(
    optimizer: Optimizer,
    decay: Decay = "cosine",
    *,
    num_steps: int,
    warmup_steps: int = 0,
    final: float = 0.0,
    power: float | None = None,
) -> LambdaLR:
    """Make a learning-rate schedule: a linear warm-up, then a decay.

    Every learning rate is computed from the step's number, so nothing drifts, and a restored schedule gives the same
    rates. Pass it to `MemoryEfficientTrainingWrapper` as ``scheduler``, which steps it only after real optimizer steps.

    Args:
        optimizer: The optimizer; each of its parameter groups keeps its own base rate.
        decay: ``"constant"``, ``"linear"``, ``"cosine"``, or ``"polynomial"`` with ``power``.
        num_steps: Total optimizer steps, warm-up included; from then on the rate is ``final`` times the base rate.
        warmup_steps: Steps before the full rate: step i has ``(i + 1) / (warmup_steps + 1)`` of it, so none is wasted
            on a rate of zero.
        final: Fraction of the base rate at the end; not allowed for ``"constant"``.
        power: Exponent of the polynomial decay; not allowed for others. None is 2.

    Returns:
        A torch scheduler, with ``step()``, ``get_last_lr()``, ``state_dict()``.

    Raises:
        ConfigError: The name is unknown, or the numbers are inconsistent.

    Memory cost: none.

    Source: the cosine is that of Loshchilov and Hutter 2017 (SGDR) without restarts.

    Example:
        >>> import torch, memkit as mk
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = mk.train.make_schedule(optimizer, "linear", num_steps=4, warmup_steps=1)
        >>> rates = []
        >>> for _ in range(5):
        ...     rates += schedule.get_last_lr()
        ...     optimizer.step()
        ...     schedule.step()
        >>> [round(rate, 3) for rate in rates]
        [0.5, 1.0, 0.667, 0.333, 0.0]
    """
    check = Checker("make_schedule")
    check.choice("decay", decay, get_args(Decay))
    check.whole("num_steps", num_steps, 1)
    if check.whole("warmup_steps", warmup_steps) >= num_steps:
        raise check.refuse("warmup_steps", warmup_steps, f"fewer than num_steps={num_steps}")
    check.number("final", final, 0, 1)
    if decay == "constant" and final:
        raise check.refuse("final", final, "final=0.0 with decay='constant', which stays at the base rate")
    if power is not None and (decay != "polynomial" or not power > 0):
        raise check.refuse("power", power, "an exponent above 0 with decay='polynomial', and None with any other decay")
    return LambdaLR(
        optimizer, LearningRateFactor(decay, num_steps, warmup_steps, final, 2.0 if power is None else power)
    )
