"""The answer of every memory prediction: bytes of one warm training step, taken apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from memkit._units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What the second (warm) optimizer step of a training run is expected to need on a GPU.

    The six parts are what is live at the moment of the peak; `peak_bytes` is their sum.

    Attributes:
        parameters_bytes: Model parameters.
        gradients_bytes: Parameter gradients that are live at the peak.
        optimizer_bytes: Optimizer state.
        activations_bytes: Tensors that autograd keeps for the backward pass.
        temporaries_bytes: Everything short-lived: outputs and gradients on their way, casts of weights.
        other_bytes: The batch.
        reserved_bytes: What the caching allocator will hold at most: the peak, fragmentation, library workspaces.
        context_bytes: Driver context and loaded libraries, which no allocator statistic shows.
        peak_where: The layer and the pass at the peak.
        confidence: How the figures came about: ``"exact"`` replay, exact but for library workspaces
            (``"workspace"``), or a formula with guessed constants (``"guessed"``).

    Example:
        >>> from memkit import TrainingConfig, estimate_memory_usage
        >>> estimate = estimate_memory_usage(TrainingConfig())
        >>> estimate.total_bytes == estimate.reserved_bytes + estimate.context_bytes
        True
        >>> estimate.headroom_bytes("8GiB") == 8 * 2**30 - estimate.total_bytes
        True
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    temporaries_bytes: int
    other_bytes: int
    reserved_bytes: int
    context_bytes: int
    peak_where: str
    confidence: Literal["exact", "workspace", "guessed"]

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in live tensors: what an allocator reports as its maximum allocated."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.temporaries_bytes
            + self.other_bytes
        )

    @property
    def total_bytes(self) -> int:
        """What the card must have free: ``reserved_bytes + context_bytes``."""
        return self.reserved_bytes + self.context_bytes

    def fits(self, capacity: int | str) -> bool:
        """Say whether `total_bytes` fits into ``capacity``.

        Args:
            capacity: Bytes as an int, or text such as ``"24GiB"`` (the number on a card's box counts GiB).

        Raises:
            InputError: ``capacity`` is negative, or text that is no size.
            InputTypeError: ``capacity`` is neither an int nor text.
        """
        return self.headroom_bytes(capacity) >= 0

    def headroom_bytes(self, capacity: int | str) -> int:
        """Return the bytes that stay free in ``capacity``; negative where the step does not fit.

        Args:
            capacity: As for `fits`.
        """
        return parse_bytes(capacity, name="capacity") - self.total_bytes

    def as_dict(self) -> dict[str, int | str]:
        """Return all figures by name, with `peak_bytes` and `total_bytes`, ready for JSON."""
        return {**asdict(self), "peak_bytes": self.peak_bytes, "total_bytes": self.total_bytes}
