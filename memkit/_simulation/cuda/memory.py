"""The memory of a GPU that is not there: each storage of its tensors is a block of the allocator until it dies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memkit._protocols import Card
from memkit._recorder import Recorder
from memkit._simulation.cuda.allocator import Block, CachingAllocator
from memkit._simulation.cuda.history import Asker, History
from memkit._simulation.cuda.kernels import (
    CONVOLVING,
    MULTIPLYING,
    TAKING,
    Processors,
    adds_bias,
    convolution_bound,
    inside,
)
from memkit._simulation.cuda.tensors import CARD, is_undivided, run_divided
from memkit._torch.cuda import Rules
from memkit._torch.graph import current_backward

_NO_BACKWARD = -1


class CudaMemory:
    """Feeds an allocator with what the tensors on one card do.

    Attributes:
        allocator: The model of the card's allocator.
        workspace_bytes: What the libraries' handles hold.
        timeline: Allocated bytes after each block that was taken or given back.
        stream: Number of the current stream, which blocks are taken for.
        history: What the allocator did; None where nobody asks for it.
        asker: Says who asks for a block now.
        shortages: Who asked for a block for which there was no room, each time.
        on_request: Called with the bytes of each request.
    """

    def __init__(self, card: Card, allocator: CachingAllocator, rules: Rules, history: History | None = None) -> None:
        self.allocator = allocator
        self.history = history
        self.asker: Callable[[], Asker] = lambda: Asker("", None)
        self.shortages: list[Asker] = []
        self.on_request: Callable[[int], None] | None = None
        self.workspace_bytes = 0
        self.timeline: list[int] = []
        self.stream = 0
        capability = card.compute_capability or (0, 0)
        self._processors = Processors.of(capability, card.num_multiprocessors)
        self._rules, self._workspace_size = rules, rules.workspace_bytes(capability)
        self._handles: set[tuple[str, bool]] = set()
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], Block]] = {}

    def snapshot(self) -> dict[str, Any]:
        """What ``torch.cuda.memory._snapshot`` would return; without a history there is nothing in it."""
        return {"segments": [], "device_traces": [[]]} if self.history is None else self.history.snapshot()

    def begin(self, recorder: Recorder) -> None:
        """Follow a recorder from here on; peaks begin anew."""
        self.asker = lambda: Asker(str(recorder.operator or ""), recorder.moment().place)
        self.allocator.reset_peaks()

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Take a block for a storage, until it dies."""
        if id(storage) not in self._blocks and storage.nbytes():
            self._watch(storage, self._take(storage.nbytes()))

    def pass_on(self, key: int, storage: torch.UntypedStorage) -> None:
        """Let a storage have the block of another one, whose `id` is ``key``."""
        if key in self._blocks:
            self._watch(storage, self._blocks.pop(key)[1])

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Take a block of a storage's new size and give its old one back."""
        old = self._blocks.pop(id(storage), None)
        self.hold(storage)
        if old is not None:
            self._give_back(old[1])

    def counts(self, device: torch.device) -> bool:
        """Whether a device is the card."""
        return device.type == "cuda"

    def device_of(self, storage: torch.UntypedStorage) -> torch.device:  # noqa: ARG002 - it does not say so itself
        """The card."""
        return CARD

    def run_inside(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
        """Take and give back what an operator's kernels take inside; return what cuDNN may take beside."""
        if func not in TAKING or not (is_on_card(out) or is_on_card(args)):
            return 0
        for phase in inside(func, args, self._processors):
            blocks = [self._take(num_bytes) for num_bytes in phase if num_bytes]
            if func in MULTIPLYING:
                blocks += map(self._take, self._workspaces(is_biased=adds_bias(func, args, kwargs, self._rules)))
            for block in reversed(blocks):  # as C++ destroys what a function holds
                self._give_back(block)
        return convolution_bound(func, args, out) if func in CONVOLVING else 0

    def divided(self, func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """What runs an operator's parts, where it comes undivided."""
        return run_divided(func) if is_undivided(func) and is_on_card(args) else None

    def _workspaces(self, *, is_biased: bool) -> list[int]:
        """What the libraries of a product take for this call; what they keep is taken at once."""
        lt_bytes, lt_life = self._rules.lt_workspace
        each = [lt_bytes] if is_biased and lt_life == "each" else []
        if self._rules.keeps_workspaces:
            self._keep("cublas", self._workspace_size)
        elif not is_biased:
            each.append(self._workspace_size)
        if is_biased and lt_life == "kept":
            self._keep("cublaslt", lt_bytes)
        return each

    def _keep(self, library: str, num_bytes: int) -> None:
        """A workspace for each handle; the thread that autograd runs in has a handle of its own."""
        handle = library, current_backward() != _NO_BACKWARD
        if handle not in self._handles:
            self._handles.add(handle)
            self.workspace_bytes += self._take(num_bytes).num_bytes

    def _watch(self, storage: torch.UntypedStorage, block: Block) -> None:
        key = id(storage)
        self._blocks[key] = weakref.ref(storage, lambda _: self._died(key)), block

    def _died(self, key: int) -> None:
        self._give_back(self._blocks.pop(key)[1])

    def _take(self, num_bytes: int) -> Block:
        if self.on_request is not None:
            self.on_request(num_bytes)
        history = self.history
        asker = None if history is None else self.asker()
        if history is not None:
            history.stream = self.stream
        try:
            block = self.allocator.allocate(num_bytes, self.stream)
        except torch.OutOfMemoryError:
            asker = asker or self.asker()
            self.shortages.append(asker)
            if history is not None:
                history.note_shortage(num_bytes, asker)
            raise
        if history is not None and asker is not None:
            history.note_alloc(block.address, num_bytes, asker)
        self.timeline.append(self.allocator.allocated_bytes)
        return block

    def _give_back(self, block: Block) -> None:
        if self.history is not None:
            self.history.note_free(block.address, block.requested_bytes, block.pool.stream)
        self.allocator.free(block)
        self.timeline.append(self.allocator.allocated_bytes)


def is_on_card(value: Any) -> bool:
    """Whether a tensor, or the first of several, is on the card."""
    if isinstance(value, (tuple, list)):
        return any(is_on_card(item) for item in value)
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"
