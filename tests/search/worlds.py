"""One piece of code in two worlds: as a user writes it, and in float64 with every draw of noise told beforehand."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
import torch


class Told(NamedTuple):
    """What a generated loss function says: a mean or a sum over a count, and what is to come back."""

    mean: torch.Tensor | None = None
    sum: torch.Tensor | None = None
    count: Any = None
    outputs: Any = None

    @property
    def value(self) -> torch.Tensor:
        """The loss over what the count counts."""
        if self.mean is not None:
            return self.mean
        return self.sum / self.count if float(self.count) else self.sum * 0.0


class Feed:
    """Noise by row: row 5 of a batch gets the same draw in the whole batch and in a part."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.at(0, 0)

    def at(self, start: int, stop: int) -> None:
        """The next forward sees these rows."""
        self._rows, self._site = range(start, stop), 0

    def draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        self._site += 1
        if not shape or shape[0] != len(self._rows):  # one draw for all rows
            return self._rand(shape, -1)
        return torch.stack([self._rand(shape[1:], row) for row in self._rows])

    def _rand(self, shape: tuple[int, ...], row: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._site * 1009 + row + 1)
        return torch.rand(shape, generator=generator, dtype=torch.float64)


class World:
    """What differs between the user's world and the oracle's.

    Args:
        exact: The oracle's: float32 constants, casts and autocast regions are float64.
        feed: Where noise comes from; None: from where the user's code takes it.
    """

    def __init__(self, *, exact: bool, feed: Feed | None = None) -> None:
        self.exact, self.feed = exact, feed

    @property
    def single(self) -> torch.dtype:
        """What the user's code calls torch.float32."""
        return torch.float64 if self.exact else torch.float32

    def float(self, x: torch.Tensor) -> torch.Tensor:
        """``x.float()``."""
        return x.double() if self.exact else x.float()

    def half(self, x: torch.Tensor) -> torch.Tensor:
        """``x.half()``."""
        return x.double() if self.exact else x.half()

    def region(self) -> contextlib.AbstractContextManager[Any]:
        """``torch.autocast("cpu", torch.bfloat16)``."""
        return contextlib.nullcontext() if self.exact else torch.autocast("cpu", torch.bfloat16)

    def rand(self, x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """``torch.rand(x.shape, generator=generator)``."""
        if self.feed is not None:
            return self.feed.draw(tuple(x.shape)).to(x.dtype)
        return torch.rand(x.shape, generator=generator, dtype=torch.float32).to(x.dtype)

    def numpy_rand(self, x: torch.Tensor) -> torch.Tensor:
        """``torch.from_numpy(np.random.rand(*x.shape))``."""
        if self.feed is not None:
            return self.feed.draw(tuple(x.shape)).to(x.dtype)
        return torch.from_numpy(np.random.rand(*x.shape)).to(x.dtype)
