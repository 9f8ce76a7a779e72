"""Gradient sketches: a few numbers per parameter, linear in the gradient, computed as soon as backward has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from memkit._gradients.streamed import catch_gradients

_EXACT_NUMEL, _WIDTH = 256, 64  # elements kept exactly, and numbers in a sketch of more
_MOST_ROWS = 512  # that are summed at a time

Vector = npt.NDArray[np.float64]
Look = Callable[[nn.Parameter, Tensor], object]


def sketches(loss: Tensor, slope: Tensor, parameters: Sequence[nn.Parameter], look: Look) -> list[Vector | None]:
    """Run backward, and return a sketch of each parameter's gradient that preserves differences of gradients.

    Args:
        loss: The loss, with its graph.
        slope: The gradient of the loss, with the same shape and dtype.
        parameters: The parameters, each with ``requires_grad``.
        look: Called with each parameter and its gradient, before that is gone.

    Returns:
        For each parameter up to 256 numbers on the host; None if the loss does not depend on it.

    Memory cost: one gradient at a time.
    """
    found: dict[int, Tensor] = {}

    def catch(index: int, gradient: Tensor) -> None:
        look(parameters[index], gradient)
        found[index] = _sketch(gradient)

    catch_gradients(loss, slope, parameters, catch)
    return _to_host(found, len(parameters))


def sketches_of_backward(
    loss: Tensor, slope: Tensor, parameters: Sequence[nn.Parameter], look: Look
) -> list[Vector | None]:
    """Same as `sketches`, but with ``backward()``, the only way through a reentrant checkpoint."""
    before = [each.grad for each in parameters]
    try:
        for each in parameters:
            each.grad = None
        torch.autograd.backward(loss, slope)
        for each in parameters:
            if each.grad is not None:
                look(each, each.grad)
        found = {index: _sketch(each.grad) for index, each in enumerate(parameters) if each.grad is not None}
    finally:
        for each, gradient in zip(parameters, before, strict=True):
            each.grad = gradient
    return _to_host(found, len(parameters))


@torch.no_grad()
def _sketch(gradient: Tensor) -> Tensor:
    """Reduce a gradient to a few numbers that are linear in it and approximately keep its norm."""
    dtype = torch.float64 if gradient.dtype in (torch.float64, torch.complex128) else torch.float32
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce()
        gradient = gradient.to_dense() if gradient.numel() <= _EXACT_NUMEL else _folded(gradient)
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    flat = gradient.reshape(-1)
    while len(flat) > _EXACT_NUMEL:  # few rows at a time: long sums lose digits
        width = math.ceil(len(flat) / min(_MOST_ROWS, len(flat) // _WIDTH))
        num_rows = len(flat) // width
        rest = flat[num_rows * width :]
        flat = _signs(num_rows, flat.device).to(dtype) @ flat[: num_rows * width].view(num_rows, width).to(dtype)
        flat[: len(rest)] += rest
    return flat.to(dtype)


def _folded(gradient: Tensor) -> Tensor:
    """Fold the rows of a sparse gradient, with random signs, onto a few rows."""
    rows = gradient.indices()[0]
    signs = (rows * 2654435761 % 4294967296 // 65536 % 2 * 2 - 1).to(gradient.dtype)
    values = gradient.values().reshape(len(rows), -1) * signs[:, None]
    return torch.zeros(16, values.shape[1], dtype=values.dtype, device=values.device).index_add_(0, rows % 16, values)


def _signs(num: int, device: torch.device) -> Tensor:
    # NumPy's generator: a torch draw would be treated as one of the user's, and replayed row by row.
    return torch.from_numpy(np.random.default_rng(0).integers(0, 2, num) * 2 - 1).to(device)


def _to_host(found: dict[int, Tensor], number: int) -> list[Vector | None]:
    """Bring sketches to the host in one copy per device and dtype."""
    vectors: list[Vector | None] = [None] * number
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, each in found.items():
        kinds.setdefault((each.device, each.dtype), []).append(index)
    for indices in kinds.values():
        together = torch.cat([found[index] for index in indices]).cpu().numpy().astype(np.float64)
        edges = np.cumsum([len(found[index]) for index in indices])[:-1]
        for index, vector in zip(indices, np.split(together, edges), strict=True):
            vectors[index] = vector
    return vectors
