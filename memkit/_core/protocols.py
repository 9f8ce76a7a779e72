"""Small protocols shared by the packages: the interfaces that components expect of objects they did not create."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, Protocol, Self, runtime_checkable

import torch

from memkit._core.errors import InputTypeError


class SimulatedGpu(Protocol):
    """A GPU as seen by a simulation, such as `memkit.predict.GPU`."""

    @property
    def name(self) -> str:
        """Name of the GPU, as commonly written."""

    @property
    def vendor(self) -> str:
        """Manufacturer of the GPU."""

    @property
    def total_bytes(self) -> int:
        """Total memory as reported by torch."""

    @property
    def context_bytes(self) -> int:
        """The most memory held by the driver and libraries."""

    @property
    def context_interval(self) -> tuple[int, int]:
        """Lower and upper bound of that memory."""

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Major and minor version."""

    @property
    def num_multiprocessors(self) -> int | None:
        """Number of multiprocessors; None if unknown."""

    @property
    def cublas_workspace_bytes(self) -> int | None:
        """Workspace that torch allocates for each cuBLAS handle; None if unknown."""


class Closing(ABC):
    """An object that is closed at the end of a ``with`` block, or by `close`."""

    @abstractmethod
    def close(self) -> None:
        """Restore everything to its original state."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SavedTogether(NamedTuple):
    """Objects that are saved together.

    Attributes:
        objects: The objects by name.
        call: The call that saves them all.
    """

    objects: Mapping[str, Any]
    call: str


class Composed(ABC):
    """An object whose own state leaves out those of objects that its steps depend on: they are saved beside it."""

    @abstractmethod
    def __saved_together__(self) -> SavedTogether:
        """Return these objects; the object itself may be among them. Only the saving of states asks for it."""


class Uncopied:
    """An object that hooks into a model, a device or files of this process; a copy would hook into them again.

    Attributes:
        instead: Advice on what to do instead of copying or pickling it.
    """

    instead = "save its state_dict(), and load it into a new object made for the other model."

    def __reduce_ex__(self, protocol: object, /) -> NoReturn:
        """Reject pickling and copying.

        Raises:
            InputTypeError: Always.
        """
        name = type(self).__name__
        raise InputTypeError(
            f"a pickle or a copy of a {name}",
            got=f"a {name} that holds hooks, locks or files of this process",
            expected="a separate one for each model and each process",
            fix=self.instead,
        )


class GradScaler(Protocol):
    """A loss scaler with the call forms of `torch.amp.GradScaler`."""

    def is_enabled(self) -> bool:
        """Return whether the scaler does anything."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the current scale."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and record infinities."""

    def step(self, optimizer: torch.optim.Optimizer) -> Any:
        """Step the optimizer unless an infinity was recorded."""

    def update(self) -> None:
        """Adapt the scale, once after all optimizers."""


class Scheduler(Protocol):
    """A learning-rate schedule."""

    def step(self) -> Any:
        """Advance by one optimizer step."""


class Average(Protocol):
    """A running average of a model's weights, such as `torch.optim.swa_utils.AveragedModel`."""

    def update_parameters(self, model: torch.nn.Module) -> Any:
        """Update the average with the model's weights."""


class MemoryWatch(Protocol):
    """A monitor of a device's memory, such as `memkit.MemoryManager`."""

    def available_bytes(self) -> int:
        """Return the bytes still available to tensors."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that measures its block."""

    def mark(self, name: str, *, note: dict[str, Any] | None = None) -> None:
        """Record an event."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and resumed."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore a state."""


@runtime_checkable
class ResumableOrder(Protocol):
    """A batch sampler whose batches are determined by seed and epoch, such as `memkit.points.BudgetBatchSampler`."""

    epoch: int

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; the epoch of a loaded state resumes where it stopped."""

    def state_dict(self, num_done: int | None = None) -> dict[str, Any]:
        """Return the seed, the epoch and ``num_done``, the number of the epoch's batches already trained on."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Resume in the middle of an epoch."""
