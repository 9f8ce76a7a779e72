"""A loop's position in its data, so that a resumed loop continues with the very next batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from memkit._core.epochs import refuse_to_go_on
from memkit._core.errors import warn_user
from memkit._core.protocols import ResumableOrder
from memkit._core.settings import check_version
from memkit._machine import random_state
from memkit._torch.loaders import starts_persistent_workers
from memkit.recipes.order import (
    ResumableLoader,
    changed_names,
    check_samples,
    draws_by_epoch,
    plain_attributes,
    tell_epoch,
)
from memkit.recipes.samplers import Samplers
from memkit.recipes.state.ranks import RankGroup

_VERSION = 4


class Position:
    """Current epoch, and the number of its batches that are done.

    A batch sampler that knows its own position (`ResumableBatchSampler`, `BudgetBatchSampler`) resumes at once. Any
    other loader is replayed: the random state of the epoch's start is restored, the loader starts the same epoch, its
    first batches are skipped, and the current random state is restored; so are the generators of the loader's samplers,
    and what a sampler's ``state_dict`` holds. Samplers and datasets with a ``set_epoch`` are told the epoch, at any
    depth.

    Args:
        loader: The batches of an epoch; a `ResumableLoader` is replaced by the DataLoader inside it.

    Attributes:
        samplers: The samplers of the loader.
        epoch: Number of finished epochs.
        num_batches: Number of finished batches of the current epoch.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader.loader if isinstance(loader, ResumableLoader) else loader
        check_samples(self._loader)
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        self._order = batch_sampler if isinstance(batch_sampler, ResumableOrder) else None
        self.samplers = Samplers(self._loader)
        self._start: dict[str, Any] | None = None  # random state at the start of the epoch, as plain types
        self.epoch = self.num_batches = self._num_loads = 0
        self._counts: dict[str, Any] = {}  # of the dataset, when the epoch began

    def batches(self) -> Iterator[Any]:
        """Return the rest of the epoch; loading a state meanwhile ends it with a `StateError`."""
        is_whole = self.num_batches == 0
        return self._give(self._begin(), is_whole=is_whole)

    def _tell_of_other_ranks(self, num_ranks: int) -> None:
        """Warn if finished batches are skipped that other ranks had: what a sampler made of them is not known."""
        if (now := RankGroup().size) != num_ranks:
            warn_user(
                f"MemoryEfficientTrainLoop: the state was saved after {self.num_batches} batches of epoch "
                f"{self.epoch + 1} on each of {num_ranks} ranks, and now there are {now}. If the loader divides its "
                "samples among the ranks, as a DistributedSampler does, the rest of this epoch leaves some out or "
                f"repeats some; later epochs are whole. Way out: finish the epoch on {num_ranks} ranks "
                f"(run(num_epochs={self.epoch + 1})) and change their number then; or give the DataLoader "
                "batch_sampler=ResumableBatchSampler(len(dataset), batch_size, num_replicas=..., rank=...) from the "
                "start: with the same batch_size * num_replicas another number of ranks continues exactly."
            )

    def _give(self, batches: Iterator[Any], *, is_whole: bool) -> Iterator[Any]:
        num_loads = self._num_loads
        for batch in batches:
            if num_loads != self._num_loads:
                refuse_to_go_on("MemoryEfficientTrainLoop")
            if is_whole:
                self.samplers.note_begun()
                is_whole = False
            yield batch
        if num_loads != self._num_loads:  # otherwise this end of an epoch would count for the loaded state
            refuse_to_go_on("MemoryEfficientTrainLoop")

    def _begin(self) -> Iterator[Any]:
        tell_epoch(self._loader, self.epoch)
        self._counts = self._plain_attributes()
        if self.num_batches == 0 or self._start is None:
            self._start = {"random": random_state.capture().state_dict(), "samplers": self.samplers.state_dict()}
            return self._iterate()
        now = random_state.capture()
        try:
            random_state.restore(random_state.RandomState.from_state_dict(self._start["random"]))
            self.samplers.load_state_dict(self._start["samplers"])
            batches = self._iterate()
            if self._order is None:
                for _ in itertools.islice(batches, self.num_batches):
                    pass
        finally:  # reading a skipped batch may fail or be interrupted: the next run goes on from here
            random_state.restore(now)
        return batches

    def _iterate(self) -> Iterator[Any]:
        """Start the epoch as a run that was not stopped would: its workers, if they persist, are there already."""
        if not (self.epoch and starts_persistent_workers(self._loader)):
            return iter(self._loader)
        if not draws_by_epoch(getattr(self._loader, "dataset", None)):
            warn_user(
                "MemoryEfficientTrainLoop: the DataLoader has persistent workers, whose random numbers go on from "
                "epoch to epoch, and the training is resumed after its first one: if the dataset draws random numbers "
                "in its workers, they are not those of a run that was not stopped; the order of the samples is. Way "
                "out: DataLoader(..., persistent_workers=False), or a dataset that draws from (seed, epoch, index) and "
                "has a set_epoch method."
            )
        own, self._loader.generator = self._loader.generator, torch.Generator()  # type: ignore[attr-defined]  # a DataLoader
        try:
            return iter(self._loader)
        finally:
            self._loader.generator = own  # type: ignore[attr-defined]  # as above

    def _plain_attributes(self) -> dict[str, Any]:
        return plain_attributes(getattr(self._loader, "dataset", None), with_saving=True)

    def counted(self) -> list[str]:
        """Return the numbers and texts in attributes of the dataset that have changed since the epoch began."""
        return changed_names(self._counts, self._plain_attributes())

    def end_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch, self.num_batches, self._start = self.epoch + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return plain types and tensors."""
        return {
            "version": _VERSION,
            # Between two epochs: the next epoch begins with it.
            "samplers": None if self.num_batches else self.samplers.state_dict(),
            "epoch": self.epoch,
            "num_batches": self.num_batches,
            "start": self._start,
            "order": self._order.state_dict(num_done=self.num_batches) if self._order else None,
            "num_ranks": RankGroup().size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; `batches` then continues from there.

        Raises:
            FileFormatError: The state has another version.
        """
        check_version("loop.load_state_dict(state)", state, _VERSION)
        self._num_loads += 1
        self.epoch, self.num_batches, self._start = state["epoch"], state["num_batches"], state["start"]
        if self._order and state["order"] is not None and self.num_batches:
            self._order.load_state_dict(state["order"])
        elif self.num_batches:
            self._tell_of_other_ranks(state["num_ranks"])
        if state["samplers"] is not None:
            self.samplers.load_state_dict(state["samplers"])
