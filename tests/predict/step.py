"""Building blocks of `tests/predict/steps.py`: a step, the table of steps, common losses and data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Step:
    """The arguments of one call of `estimate_memory_usage`."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any, Any], Any]
    optimizer: Any = "adamw"
    precision: str | None = None
    accumulation_steps: int = 1


STEPS: dict[str, Callable[[], Step]] = {}


def case(build: Callable[[], Step]) -> Callable[[], Step]:
    STEPS[build.__name__] = build
    return build


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def regress(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.l1_loss(model(batch[0]), batch[1])


def language(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def labels(count: int, *shape: int) -> Tensor:
    return torch.randint(0, count, shape)


momentum = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


def from_zoo(
    build: Callable[[], nn.Module], batch: Callable[[], Any], loss_fn: Any, **options: Any
) -> Callable[[], Step]:
    return lambda: Step(build(), batch(), loss_fn, **options)
