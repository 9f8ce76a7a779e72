"""One run of the user's forward and backward for a check of the split, without side effects."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, NoReturn

from memkit._core.errors import StateError
from memkit._gradients.loss import Loss
from memkit._recorder.attributes import Attributes
from memkit._recorder.rehearsal import RanksError
from memkit._recovery.attempt import Caught, OutOfMemory
from memkit._recovery.batch import refuse_as_batch
from memkit.train.part_gradients import PartGradient


class CheckAttempt:
    """One run of the user's forward and backward for the check: ``with attempt as micro: ...``, without side effects.

    Attributes:
        part: The rows.
        size: Number of rows, or of elements.
        is_check: Always True: results of this run are dropped.
        counts: Always False, as for an attempt that ran out of memory.
        in_full_precision: Whether autocast must be off.
        error: The error that the block raised, as text.
    """

    is_check = True
    counts = False

    def __init__(
        self,
        part: Any,
        size: int,
        take: Callable[[Loss, int], PartGradient],
        around: contextlib.AbstractContextManager[None],
        *,
        in_full_precision: bool,
    ) -> None:
        self.part, self.size, self.in_full_precision = part, size, in_full_precision
        self._take, self._around = take, around
        self.gradient: PartGradient | None = None
        self._content: Attributes | None = None
        self.error = ""
        # The model may refuse a few rows though it runs on the real parts; the verdict says so.
        self._caught = Caught((Exception,), handled=sys.exception())

    @property
    def is_out_of_memory(self) -> bool:
        """Whether memory ran out."""
        return isinstance(self._caught.failure, OutOfMemory)

    @property
    def is_between_ranks(self) -> bool:
        """Whether the block tried to communicate with other processes."""
        return self._caught.failure is not None and isinstance(self._caught.failure.error, RanksError)

    def __getitem__(self, _: object) -> NoReturn:
        refuse_as_batch()

    def __iter__(self) -> NoReturn:
        refuse_as_batch()

    def __enter__(self) -> Any:
        self._content = Attributes([self.part], content="arrays")  # before: if it fails, nothing has been entered
        self._around.__enter__()
        return self.part

    def backward(self, loss: Loss) -> None:
        """Compute and record the gradient of the run's loss."""
        if self.gradient is not None:
            raise StateError(
                "trainer.backward(loss)",
                got="a second call for one micro-batch",
                expected="one call inside `with attempt as micro:`",
                fix="add up the losses first, and call backward once.",
            )
        self.gradient = self._take(loss, self.size)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_caught = self._caught.__exit__(kind, error, trace)
        self._around.__exit__(*((None, None, None) if is_caught else (kind, error, trace)))
        if self._content is not None:
            self._content.restore()
            self._content = None
        if is_caught:
            self.error = self._caught.failure.description if self._caught.failure else ""
            return True
        if error is None and self.gradient is None:
            self.error = "trainer.backward(loss) was not called"
        return False


Attempts = Generator[CheckAttempt, None, Any]
