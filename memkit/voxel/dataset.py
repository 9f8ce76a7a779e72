"""A dataset that augments volumes on access, with the same results for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import Dataset

from memkit._core.errors import ConfigError, InputTypeError, warn_user
from memkit._core.settings import Checker, as_whole
from memkit._core.words import guided
from memkit.voxel.augment import VoxelAugmentation
from memkit.voxel.augment_base import Augmentation, calling
from memkit.voxel.compose import ComposedAugmentation
from memkit.voxel.layout import VoxelLayout

_MOST_AGAIN = 0.5  # fraction of the seen samples, repeated without a new one in between, that counts as a second pass
_EPOCH, _NUM_SEEN, _NUM_AGAIN, _HAS_WARNED = range(4)  # slots in shared memory

T_co = TypeVar("T_co", covariant=True)


class Samples(Protocol[T_co]):
    """Anything with a length and samples by index: a list, another dataset, a file reader."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@guided(
    words={
        "samples": "data dataset",
        "augmentation": "transform transforms",
        "use_augmentation": "augment",
        "augmentation_config": "config",
        "cache the source itself, in its __getitem__": "cache_rate",
    }
)
class VoxelDataset(Dataset[Any]):
    """Samples of any source, augmented on access.

    A dataset of your own that returns ``aug(sample)`` has fresh draws in each epoch too. Use this one if draws must be
    repeatable: parameters are drawn from the seed, the epoch and the sample's index, so 0 and N workers give the same
    samples, and a run that resumes in the middle of an epoch continues with the same ones. Therefore the epoch must be
    set, by `set_epoch` or by a memkit loop; a pass that repeats the previous one triggers a warning. Samples have the
    forms that a call takes: see `Augmentation.apply_joint` for mappings and tuples. The source's samples are never
    overwritten.

    Args:
        samples: Anything with a length and samples by index. Workers must be able to copy it.
        use_augmentation: Whether to augment; False returns samples unchanged, for validation.
        augmentation_config: Attributes of `VoxelAugmentation`, as a mapping.
        augmentation: An augmentation to use instead, such as a `ComposedAugmentation`, or any other callable.
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
        augmentation: Augmentation[Any] | Callable[[Any], Any] | None = None,
        layout: VoxelLayout | None = None,
        photometric: Collection[Any] | None = None,
        layouts: Mapping[Any, VoxelLayout] | None = None,
        seed: int = 0,
    ) -> None:
        check = Checker("VoxelDataset(...)")
        if augmentation is not None and (augmentation_config is not None or layout is not None):
            raise ConfigError(
                check.call,
                got="augmentation together with augmentation_config or layout",
                expected="either an augmentation or the settings of one",
                fix="pass layout and settings to the augmentation instead.",
            )
        if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
            raise InputTypeError(
                check.call,
                got=f"a {type(samples).__name__} as samples",
                expected="a dataset or a list: a length, and samples by index",
                fix="write VoxelDataset(samples, ...)"
                + ", with samples = list(iterable)" * hasattr(samples, "__iter__"),
            )
        self._samples = samples
        if augmentation is None:
            augmentation = VoxelAugmentation.from_config(augmentation_config or {}, layout=layout)
        elif not isinstance(augmentation, Augmentation):
            augmentation = ComposedAugmentation([augmentation])
        self._augmentation: Augmentation[Any] = augmentation
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
            ConfigError: It is not a whole number of 0 or more.
        """
        number = Checker("VoxelDataset.set_epoch(epoch)").whole("epoch", epoch)
        self._told.zero_()
        self._seen.zero_()
        self._told[_EPOCH] = number

    def __getitem__(self, index: int) -> Any:
        if as_whole(index) is None:
            given: object = index
            raise InputTypeError(
                f"VoxelDataset[{index!r}]",
                got=f"a {type(index).__name__}",
                expected="the number of a sample",
                fix=f"write dataset[0][{given!r}] for an entry of a sample."
                if isinstance(given, str)
                else "write dataset[0]",
            )
        if not -len(self) <= index < len(self):
            raise IndexError(f"VoxelDataset[{index}] of {len(self)} samples")  # ends a for loop over the dataset
        sample = self._samples[index]
        if not self._use_augmentation:
            return sample
        place = index if index >= 0 else index + len(self)
        self._note(place)
        with calling(f"VoxelDataset[{index}]"):
            augmented, _ = self._augmentation.augment_with(
                sample,
                seed=self._seed,
                epoch=int(self._told[_EPOCH]),
                index=place,
                photometric=self._photometric,
                layouts=self._layouts,
            )
        return augmented

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
