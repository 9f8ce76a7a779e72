"""Resumable epochs of batches: the progress of each epoch, and the inputs that determine its batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from typing import Any, NoReturn

import torch.distributed as dist
from torch.utils.data import Sampler

from memkit._core.errors import ConfigError, FileFormatError, StateError, warn_user
from memkit._core.settings import LARGEST_WHOLE, Checker, as_whole

_VERSION = 4


class EpochOrder(Sampler[list[int]], ABC):
    """Batches determined by settings, seed and epoch alone. Nothing is drawn from torch's random state.

    Args:
        seed: In [0, 2^63).
        num_replicas: Number of ranks that share the epoch; None means 1, for a single process.
        rank: This process's rank; None means 0, for a single process.

    Raises:
        ConfigError: A setting is out of range, or missing although there are several ranks.
    """

    def __init__(self, *, seed: int, num_replicas: int | None, rank: int | None) -> None:
        check = Checker(f"{type(self).__name__}(...)")
        self.seed, self.epoch = check.whole("seed", seed), 0
        self._is_shared = num_replicas is not None  # otherwise the split of the batches among ranks is undefined
        self._check_sharing()
        self._num_replicas = 1 if num_replicas is None else check.whole("num_replicas", num_replicas, 1)
        if rank is None and self._num_replicas > 1:
            raise ConfigError(
                check.call,
                got=f"num_replicas={self._num_replicas}, and no rank",
                expected="the rank of this process, counted from 0",
                fix="pass rank=torch.distributed.get_rank().",
            )
        self._rank = check.whole("rank", 0 if rank is None else rank, 0, self._num_replicas - 1)
        self._start = self._num_given = 0
        self._num_loads = 0
        self._is_over = False  # all batches of this epoch were yielded, and the next epoch has not been set

    @abstractmethod
    def _batches_from(self, start: int) -> Iterator[list[int]]:
        """Yield this rank's batches of the epoch, without the first ``start``."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Number of samples of an epoch, over all ranks."""

    @abstractmethod
    def _made_of(self) -> str:
        """Describe the inputs that determine the batches besides seed and epoch; the same on all ranks."""

    def _plan_epoch(self) -> None:
        """Update the plan after a change of seed or epoch."""

    def _is_drawn(self) -> bool:
        """Return whether the order differs between epochs."""
        return True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next batches; call it before each epoch, or all epochs are the same, with a warning.

        The epoch of a loaded state resumes where it stopped. Passing the same number again requests the same batches,
        as for validation.
        """
        self._is_over = False
        if epoch != self.epoch:
            self.epoch = epoch
            self._start = self._num_given = 0
            self._plan_epoch()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of the epoch; once after `load_state_dict`, only the remaining ones.

        Raises:
            ConfigError: There are several ranks now, and ``num_replicas`` was not given.
        """
        self._check_sharing()
        self._num_given = self._start
        return self._give(self._start)

    def state_dict(self, num_done: int | None = None) -> dict[str, Any]:
        """Return the progress of the epoch as plain types; it is the same on all ranks.

        Args:
            num_done: Number of batches of this epoch already trained on. None uses the number yielded, which is correct
                without workers; a DataLoader's workers prefetch, see `ResumableLoader`.

        Raises:
            ConfigError: The epoch does not have so many batches.
        """
        if num_done is not None:
            check = Checker(f"{type(self).__name__}.state_dict(...)")
            fix = "pass the number of batches of this epoch, not of all epochs, that were trained on."
            num_done = check.whole("num_done", num_done, 0, self._most_batches(), fix=fix)
        return {
            "version": _VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "num_done": self._num_given if num_done is None else num_done,
            "made_of": self._made_of(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume in the middle of an epoch: the next loop yields its remaining batches.

        Raises:
            FileFormatError: The state belongs to other samples, settings or ranks, which give different batches.
        """
        found, wanted = (state.get("version"), state.get("made_of")), (_VERSION, self._made_of())
        if found != wanted:
            raise FileFormatError(
                f"{type(self).__name__}.load_state_dict(state)",
                got=f"version {found[0]!r}, made of {found[1]!r}",
                expected=f"version {wanted[0]}, made of {wanted[1]!r}",
                fix="create the sampler so that it is made of the same (batches over all ranks: batch_size * "
                "num_replicas); or finish the epoch with the earlier settings; or begin a new epoch: restore the other "
                "objects without the loader, state.restore(step, model=model, optimizer=optimizer, ...), and give a "
                "MemoryEfficientTrainLoop a TrainingStateManager of another directory.",
            )
        num_done = as_whole(state["num_done"])
        if num_done is None or num_done < 0:
            raise FileFormatError(
                f"{type(self).__name__}.load_state_dict(state)",
                got=f"num_done={state['num_done']!r}",
                expected="the number of the epoch's batches that were trained on",
                fix="load a state that state_dict() has made.",
            )
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._start = self._num_given = num_done
        self._num_loads += 1
        self._is_over = False
        self._plan_epoch()

    def _most_batches(self) -> int:
        return len(self) if isinstance(self, Sized) else LARGEST_WHOLE

    def _give(self, start: int) -> Iterator[list[int]]:
        self._start = 0  # at the first batch: a DataLoader with workers creates an iterator that it does not use
        if self._is_over and self._is_drawn():
            self._warn()
        num_loads = self._num_loads
        for batch in self._batches_from(start):
            if num_loads != self._num_loads:
                refuse_to_go_on(type(self).__name__)
            self._num_given += 1  # before the yield: a state requested meanwhile includes this batch
            yield batch
        self._is_over = self._num_given > 1  # one batch has no order

    def _check_sharing(self) -> None:
        num_processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if num_processes > 1 and not self._is_shared:
            raise ConfigError(
                f"{type(self).__name__}(...)",
                got=f"{num_processes} processes without num_replicas: all of them would train on the same batches",
                expected="num_replicas and rank, which divide the batches of an epoch among the processes",
                fix="pass num_replicas=torch.distributed.get_world_size(), rank=torch.distributed.get_rank(); or "
                "num_replicas=1 if all processes should get the same batches, as for the parts of one model.",
            )

    def _warn(self) -> None:
        name = type(self).__name__
        warn_user(
            f"{name}: epoch {self.epoch} begins again, with the same batches in the same order. Way out: call "
            f"set_epoch(epoch) of the {name}, or of the ResumableLoader, before each epoch (memkit's loops do); if "
            f"you want the same batches, as in a validation, call set_epoch({self.epoch})."
        )


def refuse_to_go_on(name: str) -> NoReturn:
    """Reject the next batch of a loop that began before a state was loaded: it would be counted in the loaded epoch.

    Raises:
        StateError: Always.
    """
    raise StateError(
        f"{name}.load_state_dict(state)",
        got="a state that was loaded while a loop over the batches was running",
        expected="a loop that begins after the state was loaded",
        fix="load the state before the loop, or leave the loop with break and start it again.",
    )
