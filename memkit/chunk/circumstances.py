"""Rerun a chunk as it ran the first time: with the caller's autocast, the same random numbers, parameters and modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memkit._core.errors import StateError
from memkit._gradients.captured import CapturedTensors
from memkit._machine.random_state import GENERATORS
from memkit._recovery.makeup import Makeup, WrittenBuffers
from memkit._recovery.snapshot import RandomNumbers, held_generators
from memkit._tape.kept import KeptResults
from memkit._tape.unread import UnreadEnd
from memkit.chunk.held import held_by
from memkit.chunk.traits import spared


@dataclass(slots=True)
class ReplayedChunk:
    """A chunk that ran with a graph.

    Attributes:
        rows: The leaf tensors passed to the function.
        results: The tensors of its result.
    """

    rows: list[Tensor]
    results: list[Tensor]


class Circumstances:
    """State of a call's forward that its backward needs.

    Args:
        tensors: The call's inputs; their devices' autocast is noted.
        fn: The call's function. Its modules run again with the parameters, buffers and modes that they have now, and
            the generators that it holds draw the same numbers again. Buffers that the forward has written to, and
            counters in attributes, stay as it left them.
        params: Leaf tensors that are trained besides.

    Attributes:
        kept: The last chunks, if their graphs were kept, each with what tells its own tensors from captured ones.
        products: By the first row of a chunk, its results of matrix products and convolutions, if they were kept.
        end: What rerunning a chunk leaves out, as learned from the first chunk.
    """

    def __init__(self, tensors: Sequence[Tensor], fn: object, params: Sequence[Tensor] = ()) -> None:
        kinds = {"cpu", *(tensor.device.type for tensor in tensors)}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]
        held = held_by(fn)
        modules = [each for each in held if isinstance(each, nn.Module)]
        owners = dict.fromkeys(child for module in modules for child in module.modules())
        self._owners, self._makeup, self._buffers = owners, Makeup(owners, params), WrittenBuffers(owners)
        own = [each for each in held if isinstance(each, GENERATORS)]
        self._at_start = RandomNumbers([*own, *held_generators(modules)])
        self.kept: list[tuple[ReplayedChunk, CapturedTensors]] = []
        self.products: dict[int, KeptResults] = {}
        self.end = UnreadEnd(modules)

    @property
    def drew_on_the_host(self) -> bool:
        """Whether NumPy or Python has drawn random numbers since the start of the forward."""
        return self._at_start.host_has_moved()

    @property
    def has_drawn(self) -> bool:
        """Whether any random number was drawn since the start of the forward."""
        return self._at_start.have_moved()

    def start_over(self) -> None:
        """Go back to the start of the forward, which runs once more."""
        self._at_start.restore()
        self.taken()

    def taken(self) -> tuple[list[tuple[ReplayedChunk, CapturedTensors]], dict[int, KeptResults]]:
        """Return the kept chunks and results, and drop them here: a graph is used once."""
        kept, products = self.kept, self.products
        self.kept, self.products = [], {}
        return kept, products

    def over(self) -> None:
        """Call at the end of the forward."""
        self._buffers.end()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Enter a block that reruns the chunks in order, except those whose graphs were kept.

        Raises:
            StateError: A buffer that the forward only reads was changed since.
        """
        if name := self._buffers.changed():
            raise StateError(
                "backward() through a function that ran in parts",
                got=f"the buffer {name!r}, changed since the forward, whose parts run again in backward",
                expected="buffers that are as they were in the forward",
                fix="change the buffer after backward(), or pass its values as an argument.",
            )
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(self._makeup.again())
            stack.enter_context(self._buffers.spared())
            stack.enter_context(spared(self._owners))
            stack.enter_context(self._at_start.again())
            yield
