"""Noise in place of a module's parameters and buffers, to look at a module that has no data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from memkit._torch.dispatch import fake_mode, without_modes
from memkit._torch.fake import FakeTensor
from memkit._torch.modules import buffers_of, parameters_of


def lacks_data(module: nn.Module, x: Tensor) -> bool:
    """Return whether a volume, or what a module works with, has no data, as in an estimate."""
    if isinstance(x, FakeTensor):
        return True
    return fake_mode() is not None and any(
        isinstance(each, FakeTensor) for each in (*module.parameters(), *module.buffers())
    )


@contextlib.contextmanager
def on_noise(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """Let a module run for real in the block, if only to see where its results come from.

    Args:
        module: Its parameters and buffers without data become noise on the host in the block, with values as layers
            are initialized with: weights that keep the scale of what they see, and positive statistics.
        x: (B, C, *spatial), an input of the module.

    Yields:
        The input; if it has no data, one of its shape and dtype on the host, with zeros that take no memory.

    Memory cost: the parameters and buffers.
    """
    if not lacks_data(module, x):
        yield x
        return
    guesses = getattr(fake_mode(), "guesses", None)
    has_indices = any(
        isinstance(each, FakeTensor) and not each.is_floating_point() and each.dim() for each in module.buffers()
    )
    if guesses is not None and has_indices:
        guesses.looks_on_zeros(type(module).__name__)
    with without_modes(), contextlib.ExitStack() as stack:
        generator = torch.Generator().manual_seed(0)
        known: dict[Tensor, Tensor] = {}
        for owner in module.modules():
            for members in cast("list[dict[str, Any]]", [parameters_of(owner), buffers_of(owner)]):
                for name, tensor in members.items():
                    if isinstance(tensor, FakeTensor):
                        if tensor not in known:
                            known[tensor] = _noise(tensor, generator)
                        stack.callback(members.__setitem__, name, tensor)
                        members[name] = known[tensor]
        yield torch.zeros((), dtype=x.dtype).expand(x.shape) if isinstance(x, FakeTensor) else x


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        noise = torch.zeros(like.shape, dtype=like.dtype)
    elif like.dim() < 2:
        noise = torch.rand(like.shape, generator=generator) + 0.5
    else:
        noise = torch.randn(like.shape, generator=generator) / max(like[0].numel(), 1) ** 0.5
    noise = noise.to(like.dtype)
    return nn.Parameter(noise, like.requires_grad) if isinstance(like, nn.Parameter) else noise
