"""A sequence of augmentations as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from memkit._core.errors import InputError, InputTypeError
from memkit._core.settings import Checker
from memkit.voxel.augment_base import Augmentation, X, generator
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.params import AugmentationParams, ComposedParams


class ComposedAugmentation(Augmentation[ComposedParams]):
    """Apply augmentations in sequence; each draws its own parameters from the seed and its position.

    Args:
        augmentations: The augmentations, in the order in which they are applied.

    Raises:
        ConfigError: The sequence is empty.
        InputTypeError: An element is not an augmentation.

    Memory cost: that of the first one; later ones overwrite the previous result where they can.

    Source: `docs/augmentation.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> x = torch.rand(2, 4, 16, 16, 8)
        >>> aug = mk.ComposedAugmentation([mk.VoxelAugmentation(noise_std=0.0), mk.CutoutAugmentation()])
        >>> params = aug.sample(x.shape, seed=0, epoch=0, index=[4, 7])
        >>> bool(torch.equal(aug.inverse(aug.apply(x, params.geometry()), params), x))
        True
    """

    layout = None  # each step has its own
    _params = ComposedParams

    def __init__(self, augmentations: Sequence[Augmentation[Any]]) -> None:
        self.augmentations = tuple(augmentations)
        if not self.augmentations:
            check = Checker("ComposedAugmentation(augmentations)")
            raise check.refuse("augmentations", augmentations, "at least one augmentation")
        for each in self.augmentations:
            if not isinstance(each, Augmentation):
                raise InputTypeError(
                    "ComposedAugmentation(augmentations)",
                    got=f"a {type(each).__name__}",
                    expected="augmentations of memkit",
                    fix="pass for example VoxelAugmentation(); call your own functions before or after the composed "
                    "augmentation.",
                )

    def sample(
        self, shape: Sequence[int], *, seed: int, epoch: int = 0, index: int | Sequence[int] = 0
    ) -> ComposedParams:
        """Draw parameters for each; see `Augmentation.sample`.

        Raises:
            InputError: As for each augmentation.
        """
        check = Checker("ComposedAugmentation.sample(shape)", InputError)
        steps = []
        for number, each in enumerate(self.augmentations):
            of_its_own = generator(check, seed=seed, epoch=0, index=[number])
            steps.append(each.sample(shape, seed=int(of_its_own.integers(2**63)), epoch=epoch, index=index))
        return ComposedParams(tuple(steps))

    def _moves(self, params: ComposedParams, layout: VoxelLayout | None) -> list[Tensor] | None:
        found: list[Tensor] | None = None
        for each, step in self._pairs(params):
            moves = each._moves(step, layout or each.layout)  # noqa: SLF001 - of the same family
            if moves is not None:
                found = moves if found is None else [a @ b for a, b in zip(found, moves, strict=True)]
        return found

    def _apply(self, x: X, params: ComposedParams, layout: VoxelLayout | None, *, inplace: bool) -> X:
        return _run(x, list(self._pairs(params)), layout, inplace=inplace)

    def inverse(self, y: X, params: ComposedParams, *, layout: VoxelLayout | None = None) -> X:
        """Undo the flips and turns of each augmentation, last one first; see `Augmentation.inverse`.

        Raises:
            InputTypeError: As for `apply`.
            InputError: As for `apply`.
        """
        self._refuse_other_params("ComposedAugmentation.inverse(y, params)", params)
        pairs = [(each, step.inverse()) for each, step in self._pairs(params)]
        return _run(y, pairs[::-1], layout, inplace=False)

    def _pairs(self, params: ComposedParams) -> Iterator[tuple[Augmentation[Any], AugmentationParams]]:
        if len(params.steps) != len(self.augmentations):
            raise InputError(
                "ComposedAugmentation.apply(x, params)",
                got=f"parameters of {len(params.steps)} augmentations",
                expected=f"parameters of {len(self.augmentations)} augmentations",
                fix="pass the parameters that sample() of this augmentation returned.",
            )
        return zip(self.augmentations, params.steps, strict=True)


def _run(
    x: X,
    pairs: Sequence[tuple[Augmentation[Any], AugmentationParams]],
    layout: VoxelLayout | None,
    *,
    inplace: bool,
) -> X:
    for number, (each, step) in enumerate(pairs):
        x = each.apply(x, step, layout=layout, inplace=inplace or number > 0)  # own results may be overwritten
    return x
