"""A dataset that augments volumes on access, with the same results for any number of workers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from memkit._core.errors import ConfigError, InputTypeError, warn_user
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import SparseVoxels
from memkit._torch import pytree
from memkit.voxel.augment import VoxelAugmentation
from memkit.voxel.augment_base import Augmentation
from memkit.voxel.layout import VoxelLayout

_MOST_AGAIN = 0.5  # fraction of the seen samples, repeated without a new one in between, that counts as a second pass
_EPOCH, _NUM_SEEN, _NUM_AGAIN, _HAS_WARNED = range(4)  # slots in shared memory

T_co = TypeVar("T_co", covariant=True)


class Samples(Protocol[T_co]):
    """Anything with a length and samples by index: a list, another dataset, a file reader."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class VoxelDataset(Dataset[Any]):
    """Samples of any source, augmented on access.

    A sample is a volume (C, D, H, W), dense or `SparseVoxels`, or a mapping, list, tuple or named tuple of these, all
    of which undergo the same flips and turns; other entries (labels, names) are passed through. An entry that has the
    size of a volume but none of these types is refused, since it would not be moved. An entry ``"affine"`` or
    ``"..._affine"``, (4, 4), follows the voxels, as does the affine of MONAI's MetaTensor. Parameters are drawn from
    the seed, the epoch and the sample's index: 0 and N workers give the same samples, and each epoch is reproducible.
    Therefore the epoch must be set, by `set_epoch` or by a memkit loop; a pass that repeats the previous one triggers a
    warning. The samples of the source are never written to.

    Args:
        samples: Anything with a length and samples by index. Workers must be able to copy it.
        use_augmentation: Whether to augment; False returns samples unchanged, for validation.
        augmentation_config: Attributes of `VoxelAugmentation`, as a mapping.
        augmentation: An augmentation to use instead, such as a `ComposedAugmentation`.
        layout: Meaning of the channels, if the configuration has no layout; not allowed with ``augmentation``.
        photometric: Names of a mapping's volumes (positions in a tuple) whose values change; the others are only
            flipped and turned. None means all. Values of integer volumes never change.
        layouts: Layouts by name, for volumes with other channels.
        seed: Seed of the run.

    Raises:
        ConfigError: A key of the configuration is invalid (the message names it), or two settings are mutually
            exclusive.

    Memory cost: one sample, and 1 byte of shared memory per sample of the source.

    Source: `docs/augmentation.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> volumes = [{"radar": torch.rand(2, 16, 16, 8), "mask": torch.ones(1, 16, 16, 8, dtype=torch.int64)}] * 4
        >>> config = {"flip_prob": 0.5}
        >>> dataset = mk.voxel.VoxelDataset(volumes, use_augmentation=True, augmentation_config=config, seed=0)
        >>> for epoch in range(2):
        ...     dataset.set_epoch(epoch)
        ...     for sample in torch.utils.data.DataLoader(dataset, batch_size=2):
        ...         pass
        >>> sample["radar"].shape
        torch.Size([2, 2, 16, 16, 8])
    """

    def __init__(
        self,
        samples: Samples[Any],
        *,
        use_augmentation: bool = True,
        augmentation_config: Mapping[str, Any] | None = None,
        augmentation: Augmentation[Any] | None = None,
        layout: VoxelLayout | None = None,
        photometric: Collection[Any] | None = None,
        layouts: Mapping[Any, VoxelLayout] | None = None,
        seed: int = 0,
    ) -> None:
        check = Checker("VoxelDataset(...)")
        check.flag("use_augmentation", use_augmentation)
        if augmentation is not None and (augmentation_config is not None or layout is not None):
            raise ConfigError(
                check.call,
                got="augmentation together with augmentation_config or layout",
                expected="either an augmentation or the settings of one",
                fix="pass layout and settings to the augmentation instead.",
            )
        self._samples = samples
        self._augmentation = augmentation or VoxelAugmentation.from_config(augmentation_config or {}, layout=layout)
        self._use_augmentation = use_augmentation
        self._photometric = photometric
        self._layouts = layouts
        self._seed = check.whole("seed", seed)
        self._told = torch.zeros(4, dtype=torch.int64)
        self._seen = torch.zeros(len(samples), dtype=torch.uint8)  # in this epoch
        self._share()

    def _share(self) -> None:
        """Move the state that persistent workers must read and update to shared memory."""
        for each in (self._told, self._seen):
            each.share_memory_()  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share()  # a copy's tensors are not shared: its workers would stay in the first epoch

    def __len__(self) -> int:
        return len(self._samples)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, for new draws. Call it before an epoch's loop; persistent workers see it too.

        Args:
            epoch: 0 or more. Passing the same number again repeats the same draws without a warning.

        Raises:
            ConfigError: It is not such a number.
        """
        number = Checker("VoxelDataset.set_epoch(epoch)").whole("epoch", epoch)
        self._told.zero_()
        self._seen.zero_()
        self._told[_EPOCH] = number

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"VoxelDataset[{index}] of {len(self)} samples")  # ends a for loop over the dataset
        sample = self._samples[index]
        if not self._use_augmentation:
            return sample
        if isinstance(sample, Mapping):
            return self._augmented(sample, index)
        if isinstance(sample, (tuple, list)):
            return _like(sample, self._augmented(dict(enumerate(sample)), index).values())
        return self._augmented({0: sample}, index)[0]

    def _augmented(self, sample: Mapping[Any, Any], index: int) -> dict[Any, Any]:
        volumes = {name: each for name, each in sample.items() if _is_volume(each)}
        if not volumes:
            raise InputTypeError(
                f"VoxelDataset[{index}]",
                got="a sample of " + ", ".join(type(each).__name__ for each in sample.values()),
                expected="a volume (C, D, H, W), or a mapping or tuple with such volumes",
                fix="wrap the source so that it returns tensors with a channel dimension.",
            )
        first = next(iter(volumes.values()))
        shape = first.shape if isinstance(first, Tensor) else (first.features.shape[1], *first.shape)
        place = index if index >= 0 else index + len(self)
        self._note(place)
        drawn = self._augmentation.sample(shape, seed=self._seed, epoch=int(self._told[_EPOCH]), index=place)
        moved = self._augmentation.apply_joint(volumes, drawn, photometric=self._photometric, layouts=self._layouts)
        others = {name: each for name, each in sample.items() if name not in moved}
        if self._augmentation.moves_voxels(drawn):
            for name, each in others.items():
                _refuse_unmoved(f"VoxelDataset[{index}]", name, each, tuple(shape[-3:]))
            others = {name: self._with_affine(name, each, drawn) for name, each in others.items()}
        return {name: moved[name] if name in moved else others[name] for name in sample}

    def _with_affine(self, name: Any, value: Any, drawn: Any) -> Any:
        """Update an affine next to the volumes, or in a metadata mapping, to follow their voxels."""
        if isinstance(value, Mapping):
            return {key: self._with_affine(key, each, drawn) for key, each in value.items()}
        is_named = isinstance(name, str) and (name == "affine" or name.endswith("_affine"))
        if not (is_named and isinstance(value, Tensor | np.ndarray) and tuple(value.shape) == (4, 4)):
            return value
        moved = self._augmentation.affine_after(torch.as_tensor(value), drawn)
        return moved.numpy() if isinstance(value, np.ndarray) else moved

    def _note(self, place: int) -> None:
        """Warn about a second pass with the same draws; a few repeated samples are tolerated."""
        if place >= len(self._seen):  # the source has grown
            return
        is_again = bool(self._seen[place])
        self._seen[place] = 1
        if is_again:
            self._told[_NUM_AGAIN] += 1
        else:
            self._told[_NUM_SEEN] += 1
            self._told[_NUM_AGAIN] = 0
        _, num_seen, num_again, has_warned = self._told.tolist()
        if is_again and num_again > max(2, _MOST_AGAIN * num_seen) and not has_warned:
            self._told[_HAS_WARNED] = 1
            epoch = int(self._told[_EPOCH])
            warn_user(
                f"VoxelDataset: {min(num_again, num_seen)} of {num_seen} samples of epoch {epoch} were returned "
                "again with the same random draws. Way out: call dataset.set_epoch(epoch) before each epoch's loop "
                f"(memkit's loops do); if you want the same draws, call set_epoch({epoch}); for a validation pass "
                "use_augmentation=False."
            )


def _like(sample: tuple[Any, ...] | list[Any], values: Iterable[Any]) -> Any:
    """Return a list for a list, a named tuple for a named tuple, otherwise a tuple."""
    if isinstance(sample, list):
        return list(values)
    make = getattr(sample, "_make", tuple)
    return make(values)


def _refuse_unmoved(call: str, name: object, value: Any, shape: tuple[int, ...]) -> None:
    """Refuse an entry that would not be moved while the volumes of its sample are flipped and turned."""
    for leaf in pytree.tree_leaves(value):
        is_array = isinstance(leaf, Tensor | np.ndarray)
        if is_array and tuple(leaf.shape[-3:]) == shape:
            got = f"a {type(leaf).__name__} of shape {tuple(leaf.shape)}"
        elif not is_array and (hasattr(leaf, "spatial_shape") or hasattr(leaf, "affine")):
            got = f"a {type(leaf).__name__}"
        else:
            continue
        raise InputTypeError(
            call,
            got=f"{name!r}, {got}, which would not be moved with the volumes of its sample",
            expected="volumes as tensors (C, D, H, W), or SparseVoxels, at the top of the sample",
            fix="add a channel dimension (mask[None]), convert it to a tensor (torch.from_numpy(mask), image.data), "
            "or remove it from the sample.",
        )


def _is_volume(each: object) -> bool:
    return isinstance(each, SparseVoxels) or (isinstance(each, Tensor) and each.dim() == 4)
