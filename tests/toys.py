"""Toy models and losses that the tests of several packages share; `zoo.py` has small real models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit as mk


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


class _Adjoint(torch.autograd.Function):
    """Euler steps without a graph; backward differentiates each of them by itself, as an adjoint of an ODE does."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, num_steps: int, x: Tensor, *parameters: Tensor) -> Tensor:
        states = [x]
        with torch.no_grad():
            for _ in range(num_steps):
                states.append(states[-1] + field(states[-1]) / num_steps)
        ctx.field, ctx.num_steps = field, num_steps
        ctx.save_for_backward(*states[:-1], *parameters)
        return states[-1]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        states, parameters = ctx.saved_tensors[: ctx.num_steps], ctx.saved_tensors[ctx.num_steps :]
        of_state, totals = upstream[0], [torch.zeros_like(each) for each in parameters]
        for state in reversed(states):
            with torch.enable_grad():
                x = state.detach().requires_grad_()
                moved = x + ctx.field(x) / ctx.num_steps
                of_state, *found = torch.autograd.grad(moved, (x, *parameters), of_state)
            totals = [total + each for total, each in zip(totals, found, strict=True)]
        return None, None, of_state, *totals


class NeuralODE(nn.Module):
    """A field that moves its input, trained by the adjoint method as in torchdiffeq."""

    def __init__(self, width: int, num_steps: int = 4) -> None:
        super().__init__()
        self.field, self.num_steps = mlp(width, 2 * width, width), num_steps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Adjoint.apply(self.field, self.num_steps, x, *self.field.parameters())
        return out


class Residual(nn.Module):
    """A block as transformers have them: LayerNorm and a perceptron, added to the input."""

    def __init__(self, width: int, inner: int | None = None) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), mlp(width, inner or 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class SmallRoom(nn.Linear):
    """A layer that runs out of memory with more than `room` rows, and notes how many came."""

    def __init__(self, num_in: int, num_out: int, *, room: int = 10, dtype: torch.dtype | None = None) -> None:
        super().__init__(num_in, num_out, dtype=dtype)
        self.room, self.seen = room, []

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.append(len(rows))
        if len(rows) > self.room:
            out_of_memory()
        return self.whole(rows)

    def whole(self, rows: Tensor) -> Tensor:
        """The result, as with memory for any number of rows."""
        return super().forward(rows)


def out_of_memory(*_: object) -> NoReturn:
    """Fail as CUDA does; fits as a loss function and as a hook."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")


def fits(most: int, loss_fn: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
    """A loss function for which memory suffices up to so many rows."""

    def loss(model: nn.Module, batch: Any) -> Any:
        if len(batch[0] if isinstance(batch, (tuple, list)) else batch) > most:
            out_of_memory()
        return loss_fn(model, batch)

    return loss


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def square_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trainer_of(model: nn.Module, **settings: Any) -> mk.MemoryEfficientTrainingWrapper:
    """A wrapper that trains the model by plain SGD."""
    return mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
