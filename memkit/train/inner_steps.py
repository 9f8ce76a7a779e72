"""Steps that a loss function has kept from a loop of the user's own: each micro-batch would take them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memkit._core.errors import StateError
from memkit._torch.fake import FakeTensor


@contextlib.contextmanager
def refuse_inner_steps(optimizers: Sequence[Optimizer], schedules: Sequence[object], average: object) -> Iterator[None]:
    """Refuse, in the micro-batches of a step, steps of what the trainer itself steps after them.

    Raises:
        StateError: One of the optimizers steps, or one of the schedules or the average has counted a step. These have
            no hooks; they are looked at in the end.
    """
    own = {id(each) for wrapper in optimizers for each in (wrapper, getattr(wrapper, "optimizer", None))}

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in own:
            _refuse("optimizer.step()")

    handle = register_optimizer_step_pre_hook(before_step)
    before = [_count(each) for each in (*schedules, average)]
    try:
        yield
    finally:
        handle.remove()
    for each, count in zip((*schedules, average), before, strict=True):
        if _count(each) != count:
            _refuse("average.update_parameters(model)" if each is average else "scheduler.step()")


def _count(stepped: object) -> object:
    """Return how often a schedule or an average has stepped, where it says so as torch's do."""
    count = getattr(stepped, "n_averaged", getattr(stepped, "last_epoch", None))
    if isinstance(count, torch.Tensor):
        return None if isinstance(count, FakeTensor) else count.item()
    return count


def _refuse(call: str) -> NoReturn:
    raise StateError(
        "trainer.train_step",
        got=f"{call} inside loss_fn, which runs for each micro-batch",
        expected="a loss_fn that only computes the loss: the trainer steps after the micro-batches",
        fix=f"remove {call} from loss_fn; trainer.train_step(batch, loss_fn) calls it.",
    )
