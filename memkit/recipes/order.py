"""Resumable epoch order: seed and epoch determine the batches, and the number of finished ones the position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from memkit._core.epochs import EpochOrder, refuse_to_go_on
from memkit._core.errors import ConfigError, InputTypeError, warn_user
from memkit._core.printable import described, list_some
from memkit._core.protocols import ResumableOrder
from memkit._core.settings import Checker


@final
class ResumableBatchSampler(EpochOrder):
    """Shuffled batches for ``DataLoader(dataset, batch_sampler=...)`` whose order is a function of seed and epoch.

    It does not use torch's random state, so an interrupted epoch resumes without reading samples twice: the
    remaining batches are a slice of a permutation. Wrap the loader in `ResumableLoader` for that.

    Each sample is in one batch of the epoch. Ranks split every global batch: rank r takes the r-th part of each, and
    the smaller last one is split evenly. Another number of ranks continues an epoch with the same global batches, if
    ``batch_size * num_replicas`` stays the same.

    Args:
        num_samples: Samples of the dataset, its ``len``.
        batch_size: Samples per batch and rank.
        seed: In [0, 2^63).
        shuffle: False keeps the samples in their own order.
        drop_last: Drop the samples that do not fill a batch on every rank; different samples in each epoch.
        num_replicas: Ranks that share the epoch. Required if torch.distributed has several.
        rank: The index of this rank.

    Attributes:
        seed: The seed.
        epoch: The current epoch, see `set_epoch`.

    Raises:
        ConfigError: A setting is out of range, ``num_replicas`` is missing although there are several ranks, or the
            last batch has fewer samples than there are ranks.

    Memory cost: 8 bytes per sample while an epoch runs. Time cost: one sort at the beginning of an epoch.

    Example:
        >>> import memkit as mk
        >>> batches = mk.recipes.ResumableBatchSampler(10, 4, seed=0)
        >>> whole = list(batches)
        >>> [len(batch) for batch in whole]
        [4, 4, 2]
        >>> batches.load_state_dict(batches.state_dict(num_done=2))
        >>> list(batches) == whole[2:]
        True
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(seed=seed, num_replicas=num_replicas, rank=rank)
        num_ranks = self._num_replicas
        check = Checker("ResumableBatchSampler(...)")
        check.whole("num_samples", num_samples)
        check.whole("batch_size", batch_size, 1)
        shuffle, drop_last = check.flag("shuffle", shuffle), check.flag("drop_last", drop_last)
        num_left = num_samples % (batch_size * num_ranks)
        if not drop_last and 0 < num_left < num_ranks:
            raise ConfigError(
                f"ResumableBatchSampler({num_samples}, {batch_size}, num_replicas={num_ranks})",
                got=f"{num_left} samples for the last batches of {num_ranks} ranks",
                expected="at least one sample for each rank",
                fix="pass drop_last=True, or another batch_size.",
            )
        order = f"{'shuffled' if shuffle else 'in order'}{', without the last' if drop_last else ''}"
        # The ranks' parts of a global batch are not in it: any number of ranks goes on with the same global batches.
        self._settings = f"{num_samples} samples, batches of {batch_size * num_ranks} over all ranks, {order}"
        self._num_samples, self._shuffle = num_samples, shuffle
        self._rows = batch_size * num_ranks
        self._num_batches = num_samples // self._rows + (num_left > 0 and not drop_last)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch over all ranks; ``drop_last`` leaves some of them out."""
        return self._num_samples

    def __len__(self) -> int:
        """Number of batches in an epoch, the same on each rank."""
        return self._num_batches

    def _batches_from(self, start: int) -> Iterator[list[int]]:
        order = self._permute()
        for number in range(start, self._num_batches):
            rows = order[number * self._rows : (number + 1) * self._rows]
            yield np.array_split(rows, self._num_replicas)[self._rank].tolist()

    def _made_of(self) -> str:
        return self._settings

    def _is_drawn(self) -> bool:
        return self._shuffle

    def _permute(self) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._num_samples)
        # The raw bits of a bit generator are the same in every NumPy version; its distributions may change.
        bits = np.random.Philox(key=np.array([self.seed, self.epoch], dtype=np.uint64))
        return bits.random_raw(self._num_samples).argsort(kind="stable")


_PLAIN = (bool, int, float, str)
_NAMES = ("dataset", "sampler", "batch_sampler", "loader", "dataloader")


def tell_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader, and every part of it whose order depends on the epoch, which epoch comes next.

    Samplers and datasets are found at any depth: in a `Subset`, a `ConcatDataset`, a `BatchSampler` around a
    `DistributedSampler`, or a wrapper of your own. A wrapper is told after the object it wraps, so it has the last
    word.

    Args:
        loader: A loader, or a list or mapping of loaders.
        epoch: 0 or more.
    """
    if isinstance(loader, ResumableLoader):  # first, because it has to notice that its order is at another epoch
        loader.set_epoch(epoch)
    for each in _drawing_parts(loader, set()):
        each.set_epoch(epoch)


def check_samples(loader: Any) -> None:
    """Check that a loader's batches cover exactly the samples of its dataset; warn if they leave some out.

    Raises:
        ConfigError: The batches cover more samples than the dataset has.
    """
    order, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    if not isinstance(order, EpochOrder) or not isinstance(dataset, Sized) or order.num_samples == len(dataset):
        return
    name, num_left = type(order).__name__, len(dataset) - order.num_samples
    if num_left < 0:
        raise ConfigError(
            f"DataLoader(dataset, batch_sampler={name}(...))",
            got=f"a sampler for {order.num_samples} samples and a dataset of {len(dataset)}",
            expected="a sampler for as many samples as the dataset has",
            fix=f"create it with {name}(len(dataset), ...).",
        )
    warn_user(
        f"{name}: the last {num_left} of the dataset's {len(dataset)} samples are in no batch. Way out: create it "
        f"with {name}(len(dataset), ...); to exclude samples on purpose, give the loader a torch.utils.data.Subset."
    )


def draws_by_epoch(dataset: Any) -> bool:
    """Return whether a dataset is told the epoch, as those are that draw from seed and epoch."""
    return any(True for _ in _drawing_parts(dataset, set()))


def repeat_epoch(loader: Any) -> None:
    """Allow another pass over the same batches, as validation does."""
    for each in _drawing_parts(loader, set()):
        if isinstance(each, EpochOrder):
            each.set_epoch(each.epoch)


def _drawing_parts(node: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the parts of a loader that have a ``set_epoch``, innermost first."""
    for each in all_parts(node, seen):
        if _is_part(each) and callable(getattr(each, "set_epoch", None)):
            yield each


def all_parts(node: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a loader's parts (datasets, samplers, other loaders), innermost first, and the loader itself.

    Args:
        node: The loader.
        seen: Ids of the parts that are left out; those that are found are added.
    """
    if id(node) in seen:  # some datasets refer to themselves
        return
    seen.add(id(node))
    for part in _parts(node):
        yield from all_parts(part, seen)
    yield node


def _parts(node: Any) -> Iterator[Any]:
    attributes = {"loader": node} if isinstance(node, Mapping | list | tuple) else getattr(node, "__dict__", {})
    for name, value in attributes.items():
        if isinstance(value, Mapping | list | tuple):
            elements = value.values() if isinstance(value, Mapping) else value
            if _is_part(next(iter(elements), None)):  # otherwise it may be a million samples
                yield from filter(_is_part, elements)
        elif name in _NAMES or _is_part(value):
            yield value


def reading_changes(changed: Sequence[str]) -> str:
    """Say that reading samples changes attributes of datasets."""
    return (
        f"reading samples changes {list_some(changed)}, which no saved state has: a resumed run begins with another "
        "value, and may read other samples."
    )


def changed_names(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of `plain_attributes` that have other values now; new ones do not count."""
    return [name for name, value in now.items() if value != before.get(name, value)]


def plain_attributes(dataset: Any, *, with_saving: bool = False) -> dict[str, Any]:
    """Return numbers and text that a dataset, or one that it wraps, holds, by name.

    Args:
        dataset: The dataset.
        with_saving: Whether those of a dataset with a ``state_dict`` count.
    """
    found, seen = dict[str, Any](), set[int]()
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        if with_saving or not hasattr(dataset, "state_dict"):
            of_it = {name: value for name, value in getattr(dataset, "__dict__", {}).items() if type(value) in _PLAIN}
            found |= {f"{type(dataset).__name__}.{name}": value for name, value in of_it.items()}
        dataset = getattr(dataset, "dataset", None)
    return found


def _is_part(value: Any) -> bool:
    is_known = isinstance(value, DataLoader | Dataset | Sampler) or callable(getattr(value, "set_epoch", None))
    return is_known and not isinstance(value, type)


@final
class ResumableLoader:
    """A DataLoader that counts the batches the loop has taken, however many its workers have prefetched.

    Datasets that draw by epoch, such as `VoxelDataset`, are told the epoch when it changes, also inside a `Subset` or
    `ConcatDataset`.

    Save after the training step on a batch: the batch that the loop holds counts as done.

    Args:
        loader: A DataLoader whose ``batch_sampler`` is a `ResumableBatchSampler` or `BudgetBatchSampler`. Give it its
            own ``generator=torch.Generator()``: otherwise each epoch, and each resumed one, draws its workers' seed
            from the random state that the model's dropout uses.

    Attributes:
        loader: The DataLoader.

    Raises:
        InputTypeError: The loader has no such batch sampler.
        ConfigError: Its batches cover more samples than its dataset has; if they cover fewer, there is a warning.

    Example:
        >>> import torch, memkit as mk
        >>> from torch.utils.data import DataLoader
        >>> batches = mk.recipes.ResumableBatchSampler(10, 4, seed=0)
        >>> loader = DataLoader(range(10), batch_sampler=batches, generator=torch.Generator())
        >>> loader = mk.recipes.ResumableLoader(loader)
        >>> for batch in loader:
        ...     break
        >>> state = loader.state_dict()
        >>> state["num_done"]
        1
        >>> loader.load_state_dict(state)
        >>> len(list(loader))  # the rest of the epoch
        2
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        order: Any = getattr(loader, "batch_sampler", None)
        if not isinstance(order, ResumableOrder):
            is_loader = isinstance(loader, DataLoader)
            raise InputTypeError(
                "ResumableLoader(loader)",
                got=f"a loader whose batch_sampler is {type(order).__name__}" if is_loader else described(loader),
                expected="a batch sampler whose order is determined by seed and epoch",
                fix="create the loader with DataLoader(dataset, batch_sampler=ResumableBatchSampler(len(dataset), "
                "32)).",
            )
        check_samples(loader)
        self.loader = loader
        self._order: ResumableOrder = order
        self._start = self._num_done = self._num_loads = 0
        self._told = 0  # the epoch that the datasets were told last; they keep it until another one is chosen
        self._counts: dict[str, Any] | None = None  # of the datasets, when the present epoch began

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate next; the epoch of a loaded state continues where it stopped."""
        if epoch != self._order.epoch:
            self._start = self._num_done = 0
        self._order.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches of the epoch; the first time after `load_state_dict` only the remaining ones."""
        if self._order.epoch != self._told:
            self._told = self._order.epoch
            tell_epoch(self.loader, self._told)
        self._num_done, self._start, num_loads = self._start, 0, self._num_loads
        self._counts = plain_attributes(self.loader.dataset)
        for batch in self.loader:
            if num_loads != self._num_loads:
                refuse_to_go_on("ResumableLoader")
            self._num_done += 1
            yield batch

    def __len__(self) -> int:
        """Number of batches in the whole epoch."""
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and how many of its batches the loop has taken.

        Warns if reading samples has changed numbers or text that a dataset holds: a state does not have them.
        """
        if self._counts and (changed := changed_names(self._counts, plain_attributes(self.loader.dataset))):
            self._counts = None  # once
            warn_user(
                f"ResumableLoader: {reading_changes(changed)} Way out: compute it from seed, epoch and index; or give "
                "the dataset state_dict() and load_state_dict(), and pass it to save and restore too."
            )
        return self._order.state_dict(num_done=self._num_done)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the middle of an epoch; a loop already iterating gets an error at its next batch.

        Raises:
            FileFormatError: The state belongs to other settings.
        """
        self._order.load_state_dict(state)
        self._start = self._num_done = state["num_done"]
        self._num_loads += 1
