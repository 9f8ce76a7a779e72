"""Random quarter turns of volumes in XY."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from memkit._core.errors import InputError
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import Triple
from memkit._core.words import guided
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.operation import VoxelOperation
from memkit.voxel.words import CALLS, WORDS

OnNonsquare = Literal["half_turns", "error", "skip"]
_ONLY_XY = "turns are in XY, by one, two or three quarters"


@guided(words=WORDS | {_ONLY_XY: "max_k spatial_axes degrees"}, **CALLS)
@dataclass(frozen=True, kw_only=True)
class RotateAugmentation(VoxelOperation):
    """Turn a volume in XY by one, two or three quarters, about the center of the grid.

    Attributes:
        prob: Probability of a turn.
        on_nonsquare: Whether a grid whose X and Y differ in size or voxel size is turned by half turns only, refused,
            or not turned.
        same_on_batch: Whether all samples of a batch share the draw.
        layout: Meaning of the channels. Without one, all are scalars, and empty voxels hold 0.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> x = torch.rand(1, 8, 8, 4)
        >>> turn = mk.voxel.RotateAugmentation(prob=1.0)
        >>> bool(torch.equal(turn(x), x.rot90(turn.last_params.draws[0].turns, (1, 2))))
        True
    """

    prob: float = 0.3
    on_nonsquare: OnNonsquare = "half_turns"
    same_on_batch: bool = False
    layout: VoxelLayout | None = None

    fields = ("turns",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check = Checker("RotateAugmentation(...)")
        check.number("prob", self.prob, 0.0, 1.0)
        check.choice("on_nonsquare", self.on_nonsquare, get_args(OnNonsquare), fix="pass on_nonsquare='half_turns'.")

    def draw(self, chance: np.random.Generator, shape: Triple, layout: VoxelLayout) -> Mapping[str, int]:
        """Return ``{"turns": quarters}``."""
        turn, quarters = chance.random(), chance.integers(1, 4)
        turns = int(quarters) if layout.is_square(shape) else 2 if self.on_nonsquare == "half_turns" else 0
        return {"turns": turns if turn < self.prob else 0}

    def check_grid(self, call: str, shape: Triple, layout: VoxelLayout) -> None:
        """Refuse a grid that is not square with ``on_nonsquare="error"``."""
        if self.prob and self.on_nonsquare == "error" and not layout.is_square(shape):
            raise InputError(
                call,
                got=f"a grid {shape} with voxels of {tuple(layout.voxel_size)} m along X, Y, Z",
                expected="as many voxels along Y as along X, of the same size, for quarter turns",
                fix="pass on_nonsquare='half_turns' or 'skip', or crop the grid.",
            )

    def moved_axes(self, shape: Triple, layout: VoxelLayout) -> str:
        """Return ``"XY"`` if the grid may be turned."""
        return "XY" if self.prob and (layout.is_square(shape) or self.on_nonsquare == "half_turns") else ""
