"""Cooperation of ranks while saving and restoring: stop together on any rank's error, and share work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

import torch.distributed as dist

from memkit._core.errors import StateError

_T = TypeVar("_T")


@final
class RankGroup:
    """The processes of the default group, or just this process.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
    """

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1

    def share(self, names: list[str]) -> list[str]:
        """Return this rank's share of the names."""
        return names[self.rank :: self.size]

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in order; all must call it."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def together(self, work: Callable[[], _T]) -> list[_T]:
        """Run ``work`` on all ranks and return all results; an error on one is raised on all, so that none hangs.

        Raises:
            StateError: Another rank failed. A rank raises its own error unchanged.
        """
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised below, once all ranks know about it
            failure = error
        outcomes = self.gather((result, None if failure is None else repr(failure)))
        if failure is not None:
            raise failure
        for rank, (_, reason) in enumerate(outcomes):
            if reason is not None:
                raise StateError(
                    "TrainingStateManager on several ranks",
                    got=f"rank {rank}: {reason}",
                    expected="no error on any rank",
                    fix=f"see the error of rank {rank}; nothing was saved, and no object was changed.",
                )
        return [result for result, _ in outcomes]

    def first(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` on rank 0 and return its result on all ranks."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value] # rank 0's
