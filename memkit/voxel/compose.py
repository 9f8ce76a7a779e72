"""A sequence of augmentations as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from memkit._core.errors import InputError
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit.voxel.augment_base import Augmentation, X, check_mapping, generator
from memkit.voxel.foreign import ForeignStep, as_step, check_steps, composed_call
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.params import AugmentationParams, ComposedParams
from memkit.voxel.words import CALLS, WORDS


@guided(
    words=WORDS | {"augmentations": "transforms", "each augmentation has its own probability": "p"},
    rewrite={"__init__": composed_call},
    **CALLS,
)
class ComposedAugmentation(Augmentation[ComposedParams]):
    """Apply augmentations in sequence; each draws its own parameters from the seed and its position.

    Args:
        augmentations: The augmentations, in the order in which they are applied. Any other callable may be among them,
            such as a function or a transform of torchio, MONAI or torchvision: it receives the result of the previous
            step. Python's, NumPy's and torch's global generators are seeded for it and restored afterwards, so its
            draws repeat too. Whether it moves voxels is unknown, so `inverse` then raises an error.

    Raises:
        ConfigError: The sequence is empty.
        InputTypeError: An element cannot be called.

    Memory cost: with `apply`, that of the first augmentation; later ones overwrite the previous result where they can.
        In a call, two results.

    Source: `docs/augmentation.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> x = torch.rand(2, 4, 16, 16, 8)
        >>> aug = mk.ComposedAugmentation([mk.VoxelAugmentation(noise_std=0.0), mk.CutoutAugmentation()])
        >>> params = aug.sample(x.shape, seed=0, epoch=0, index=[4, 7])
        >>> bool(torch.equal(aug.inverse(aug.apply(x, params.geometry()), params), x))
        True
        >>> dimmed = mk.ComposedAugmentation([mk.VoxelAugmentation(), lambda x: x * 0.5])
        >>> dimmed(x).shape
        torch.Size([2, 4, 16, 16, 8])
    """

    layout = None  # each step has its own
    _params = ComposedParams

    def __init__(self, augmentations: Sequence[Augmentation[Any] | Callable[[Any], Any]]) -> None:
        call = "ComposedAugmentation(augmentations)"
        self.augmentations = check_steps(call, augmentations)
        self._steps = tuple(as_step(each, call) for each in self.augmentations)

    def sample(
        self, shape: Sequence[int], *, seed: int, epoch: int = 0, index: int | Sequence[int] = 0
    ) -> ComposedParams:
        """Draw parameters for each; see `Augmentation.sample`.

        Raises:
            InputError: As for each augmentation.
        """
        steps = (
            each.sample(shape, seed=own_seed, epoch=epoch, index=index) for each, own_seed in self._with_seeds(seed)
        )
        return ComposedParams(tuple(steps))

    def augment_with(
        self,
        sample: Any,
        *,
        seed: int,
        epoch: int = 0,
        index: int | Sequence[int] = 0,
        photometric: Collection[Any] | None = None,
        layouts: Mapping[Any, VoxelLayout] | None = None,
    ) -> tuple[Any, ComposedParams]:
        """Draw and apply one augmentation after the other; see `Augmentation.augment_with`.

        Raises:
            InputTypeError: As for each augmentation.
            InputError: As for each augmentation.
        """
        steps = []
        for each, own_seed in self._with_seeds(seed):
            sample, step = each.augment_with(
                sample, seed=own_seed, epoch=epoch, index=index, photometric=photometric, layouts=layouts
            )
            steps.append(step)
        return sample, ComposedParams(tuple(steps))

    def _with_seeds(self, seed: int) -> Iterator[tuple[Augmentation[Any], int]]:
        check = Checker("ComposedAugmentation.sample(shape)", InputError)
        for number, each in enumerate(self._steps):
            of_its_own = generator(check, seed=seed, epoch=0, index=[number])
            yield each, int(of_its_own.integers(2**63))

    def moves_voxels(self, params: ComposedParams) -> bool:
        """Return whether an augmentation can flip or turn voxels, regardless of the current draw."""
        pairs = self._pairs(params)
        return any(isinstance(each, ForeignStep) or each.moves_voxels(step) for each, step in pairs)

    def _moves(self, params: ComposedParams, layout: VoxelLayout | None) -> list[Tensor] | None:
        found: list[Tensor] | None = None
        for each, step in self._pairs(params):
            moves = each._moves(step, layout or each.layout)  # noqa: SLF001 - of the same family
            if moves is not None:
                found = moves if found is None else [a @ b for a, b in zip(found, moves, strict=True)]
        return found

    def apply(self, x: X, params: ComposedParams, *, layout: VoxelLayout | None = None, inplace: bool = False) -> X:
        """Apply each augmentation's parameters; see `Augmentation.apply`.

        Raises:
            InputTypeError: As for each augmentation.
            InputError: As for each augmentation.
        """
        self._refuse_other_params("ComposedAugmentation.apply(x, params)", params)
        return _run(x, list(self._pairs(params)), layout, inplace=inplace)

    def apply_joint(
        self,
        sample: Mapping[Any, Any],
        params: ComposedParams,
        *,
        photometric: Collection[Any] | None = None,
        layouts: Mapping[Any, VoxelLayout] | None = None,
    ) -> Any:
        """Apply each augmentation's parameters to several volumes; see `Augmentation.apply_joint`.

        Raises:
            InputError: As for each augmentation.
            InputTypeError: As for each augmentation.
        """
        check_mapping("ComposedAugmentation.apply_joint(sample, params)", sample)
        self._refuse_other_params("ComposedAugmentation.apply_joint(sample, params)", params)
        for each, step in self._pairs(params):
            sample = each.apply_joint(sample, step, photometric=photometric, layouts=layouts)
        return sample

    def _apply(self, x: X, params: ComposedParams, layout: VoxelLayout | None, *, inplace: bool) -> X:
        return self.apply(x, params, layout=layout, inplace=inplace)

    def inverse(self, y: X, params: ComposedParams, *, layout: VoxelLayout | None = None) -> X:
        """Undo the flips and turns of each augmentation, last one first; see `Augmentation.inverse`.

        Raises:
            InputTypeError: As for `apply`.
            InputError: As for `apply`; or a step is not an augmentation of memkit.
        """
        self._refuse_other_params("ComposedAugmentation.inverse(y, params)", params)
        pairs = [(each, step.inverse()) for each, step in self._pairs(params)]
        return _run(y, pairs[::-1], layout, inplace=False)

    def _pairs(self, params: ComposedParams) -> Iterator[tuple[Augmentation[Any], AugmentationParams]]:
        if len(params.steps) != len(self._steps):
            raise InputError(
                "ComposedAugmentation.apply(x, params)",
                got=f"parameters of {len(params.steps)} augmentations",
                expected=f"parameters of {len(self._steps)} augmentations",
                fix="pass the parameters that sample() of this augmentation returned.",
            )
        return zip(self._steps, params.steps, strict=True)


def _run(
    x: X,
    pairs: Sequence[tuple[Augmentation[Any], AugmentationParams]],
    layout: VoxelLayout | None,
    *,
    inplace: bool,
) -> X:
    is_own = inplace
    for each, step in pairs:
        x = each.apply(x, step, layout=layout, inplace=is_own)  # own results may be overwritten
        is_own = inplace or not isinstance(each, ForeignStep)  # any other callable may keep a reference to its result
    return x
