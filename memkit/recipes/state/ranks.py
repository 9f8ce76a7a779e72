"""What the ranks of a run do together when they save and restore: stop at anybody's error, share work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

import torch.distributed as dist

from memkit._core.errors import StateError

_T = TypeVar("_T")


@final
class Crew:
    """The processes of the default group, or this one alone.

    Attributes:
        rank: This process.
        size: All of them.
    """

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1

    def share(self, names: list[str]) -> list[str]:
        """Return this rank's part of a piece of work."""
        return names[self.rank :: self.size]

    def gather(self, value: _T) -> list[_T]:
        """Return all ranks' values, in order; all must call it."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def together(self, work: Callable[[], _T]) -> list[_T]:
        """Run ``work`` on all ranks and return all results; an error on one is an error on all, so that none waits.

        Raises:
            StateError: Another rank failed. A rank's own error comes as it is.
        """
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised below, when all ranks know of it
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
        """Run ``work`` on rank 0 and return its result on all."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value] # rank 0's
