"""Behaviour that packages share, as small protocols: what a component may ask of an object that somebody else wrote."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol, Self, runtime_checkable

import torch

from memkit._core.errors import InputTypeError


class SimulatedGpu(Protocol):
    """What a simulation knows of a GPU; `memkit.predict.GPU` is one."""

    @property
    def name(self) -> str:
        """As people write it."""

    @property
    def vendor(self) -> str:
        """Who makes it."""

    @property
    def total_bytes(self) -> int:
        """What torch reports as its memory."""

    @property
    def context_bytes(self) -> int:
        """What driver and libraries hold."""

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Major and minor number."""

    @property
    def num_multiprocessors(self) -> int | None:
        """None where it is not known."""

    @property
    def cublas_workspace_bytes(self) -> int | None:
        """What torch takes for each handle of cuBLAS; None where it is not known."""


class Closing(ABC):
    """What is closed at the end of a ``with`` block, or by `close`."""

    @abstractmethod
    def close(self) -> None:
        """Leave everything as it was found."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Uncopied:
    """What hooks into a model, a device or the files of this process: a copy would do so a second time.

    Attributes:
        instead: What to do instead of copying or pickling it.
    """

    instead = "save its state_dict(), and load that into one that is made for the other model."

    def __reduce_ex__(self, protocol: object, /) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            InputTypeError: Always.
        """
        name = type(self).__name__
        raise InputTypeError(
            f"a pickle or a copy of a {name}",
            got=f"a {name} that holds hooks, locks or files of this process",
            expected="one of its own for each model and each process",
            fix=self.instead,
        )


class GradScaler(Protocol):
    """A loss scaler with the call forms of `torch.amp.GradScaler`."""

    def is_enabled(self) -> bool:
        """Say whether the scaler does anything."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the current scale."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimiser's gradients by the scale, and note infinities."""

    def step(self, optimizer: torch.optim.Optimizer) -> Any:
        """Step the optimiser unless an infinity was noted."""

    def update(self) -> None:
        """Adapt the scale, once after all optimisers."""


class Scheduler(Protocol):
    """A learning-rate schedule."""

    def step(self) -> Any:
        """Advance by one optimiser step."""


class Average(Protocol):
    """A running average of a model's weights, such as `torch.optim.swa_utils.AveragedModel`."""

    def update_parameters(self, model: torch.nn.Module) -> Any:
        """Take the model's weights in."""


class MemoryWatch(Protocol):
    """Somebody who knows a device's memory, such as `memkit.MemoryManager`."""

    def available_bytes(self) -> int:
        """Return what tensors can still take."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context that measures its block."""

    def mark(self, name: str, *, note: dict[str, Any] | None = None) -> None:
        """Note an event."""


@runtime_checkable
class Stateful(Protocol):
    """Something that can be saved, and gone on with."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Put a state back."""


@runtime_checkable
class ResumableOrder(Protocol):
    """A batch sampler whose batches follow from seed and epoch, such as `memkit.points.BudgetBatchSampler`."""

    epoch: int

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the one that a state was loaded into goes on where it stood."""

    def state_dict(self, num_done: int | None = None) -> dict[str, Any]:
        """Return seed, epoch, and ``num_done``, batches of the epoch that were trained on."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on in the middle of an epoch."""
