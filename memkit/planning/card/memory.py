"""The memory of a virtual card: every storage of its tensors as a block of the allocator model, from birth to death."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from memkit._resizing import UNSHARD
from memkit._torch.dispatch import pop_mode, push_mode
from memkit._torch.graph import current_backward
from memkit._torch.modules import APPLY, buffers_of, parameters_of
from memkit.planning.card.allocator import CachingAllocator
from memkit.planning.card.allocator_blocks import Block
from memkit.planning.card.convolution import convolution_bound
from memkit.planning.card.history import Asker, History
from memkit.planning.card.operators import is_undivided, run_divided
from memkit.planning.card.reductions import Processors
from memkit.planning.card.tensors import CARD, patched
from memkit.planning.card.workspace import MULTIPLYING, inside
from memkit.planning.dryrun import StepRecorder
from memkit.planning.estimate import MemoryEstimate
from memkit.planning.gpus import GPU

_NO_BACKWARD = -1
# What a card whose workspace is not known is taken to have: the default before compute capability 9.
_WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024


class CardMemory:
    """Feeds an allocator with what the tensors on one card do.

    Attributes:
        allocator: The model of the card's allocator.
        workspace_bytes: What the libraries' handles hold.
        timeline: Allocated bytes after each block that was taken or given back.
        stream: Number of the current stream, which blocks are taken for.
        history: What the allocator did; None where nobody asks for it.
        asker: Says who asks for a block now.
    """

    def __init__(self, gpu: GPU, allocator: CachingAllocator, history: History | None = None) -> None:
        self.allocator = allocator
        self.history = history
        self.asker: Callable[[], Asker] = lambda: Asker("", None)
        self.workspace_bytes = 0
        self.timeline: list[int] = []
        self.stream = 0
        self._gpu = gpu
        self._processors = Processors.of(gpu.compute_capability or (0, 0), gpu.num_multiprocessors)
        self._workspace_size = gpu.cublas_workspace_bytes or _WORKSPACE_BYTES
        self._handles: set[bool] = set()
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], Block]] = {}

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

    def run_inside(self, func: Any, args: Sequence[Any]) -> None:
        """Take and give back what an operator's kernels take inside."""
        for phase in inside(func, args, self._processors):
            blocks = [self._take(num_bytes) for num_bytes in phase if num_bytes]
            if func in MULTIPLYING:
                self._take_handle()
            for block in reversed(blocks):  # as C++ destroys what a function holds
                self._give_back(block)

    def complete(self, estimate: MemoryEstimate) -> MemoryEstimate:
        """What was seen of tensors, with what only the allocator knows: rounding, workspaces, reserve."""
        unseen_bytes = self.allocator.peak_allocated_bytes - estimate.peak_bytes
        return replace(
            estimate,
            other_bytes=estimate.other_bytes + unseen_bytes,
            reserved_bytes=self.allocator.peak_reserved_bytes,
            context_bytes=self._gpu.context_bytes,
        )

    def _take_handle(self) -> None:
        """CuBLAS keeps a workspace for each handle; the thread that autograd runs in has a handle of its own."""
        is_backward = current_backward() != _NO_BACKWARD
        if is_backward not in self._handles:
            self._handles.add(is_backward)
            self.workspace_bytes += self._take(self._workspace_size).num_bytes

    def _watch(self, storage: torch.UntypedStorage, block: Block) -> None:
        key = id(storage)
        self._blocks[key] = weakref.ref(storage, lambda _: self._died(key)), block

    def _died(self, key: int) -> None:
        self._give_back(self._blocks.pop(key)[1])

    def _take(self, num_bytes: int) -> Block:
        if self.history is None:
            block = self.allocator.allocate(num_bytes, self.stream)
        else:
            block = self._take_watched(num_bytes, self.history)
        self.timeline.append(self.allocator.allocated_bytes)
        return block

    def _take_watched(self, num_bytes: int, history: History) -> Block:
        asker, history.stream = self.asker(), self.stream
        try:
            block = self.allocator.allocate(num_bytes, self.stream)
        except torch.OutOfMemoryError:
            history.note_shortage(num_bytes, asker)
            raise
        history.note_alloc(block.address, num_bytes, asker)
        return block

    def _give_back(self, block: Block) -> None:
        if self.history is not None:
            self.history.note_free(block.address, block.requested_bytes, block.pool.stream)
        self.allocator.free(block)
        self.timeline.append(self.allocator.allocated_bytes)


class CardRecorder(StepRecorder):  # type: ignore[no-untyped-call]  # torch's own class hook
    """Records a step and lets the card's memory follow it."""

    def __init__(self, memory: CardMemory) -> None:
        super().__init__()
        self._memory = memory
        self._operator: Any = None
        memory.asker = lambda: Asker("" if self._operator is None else str(self._operator), self._where.place())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, then what it takes inside."""
        if is_undivided(func) and is_on_card(args):
            push_mode(self)
            try:
                return run_divided(func, args, kwargs or {})
            finally:
                pop_mode()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if is_on_card(out) or is_on_card(args):
            self._operator = func
            self._memory.run_inside(func, args)
        return out

    @contextmanager
    def noting_modules(self) -> Iterator[None]:
        """Know parameters and buffers from the moment when a module has them on the card, before any step uses them."""
        apply = getattr(nn.Module, APPLY)

        @wraps(apply)
        def applied(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            moved: nn.Module = apply(module, *args, **kwargs)
            self._label([each for each in parameters_of(moved).values() if each is not None], "parameter")
            self._label([each for each in buffers_of(moved).values() if each is not None], "buffer")
            return moved

        with ExitStack() as stack:
            stack.callback(register_module_parameter_registration_hook(self._note_parameter).remove)
            stack.callback(register_module_buffer_registration_hook(self._note_buffer).remove)
            stack.enter_context(patched(nn.Module, APPLY, applied))
            yield

    def _note_parameter(self, module: nn.Module, name: str, parameter: Any) -> None:  # noqa: ARG002 - torch's own form
        self._label([] if parameter is None else [parameter], "parameter")

    def _note_buffer(self, module: nn.Module, name: str, buffer: Any) -> None:  # noqa: ARG002 - torch's own form
        self._label([] if buffer is None else [buffer], "buffer")

    def _bound(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:  # noqa: ARG002
        return convolution_bound(func, args, out)  # what other kernels take inside is in the allocator

    def complete(self, estimate: MemoryEstimate) -> MemoryEstimate:
        """Add what only the allocator knows."""
        return self._memory.complete(estimate)

    def _book(self, storage: torch.UntypedStorage, device: torch.device, operator: Any) -> int | None:
        if operator == UNSHARD:
            device = CARD  # a storage without data does not say so
        if device.type != "cuda":
            return None
        self._operator = operator
        block = self._blocks.get(id(storage))
        if block is None:
            self._memory.hold(storage)  # first of all: what does not fit was never there
        elif storage.nbytes() != self._bytes[block.number]:
            self._memory.resize(storage)
        return super()._book(storage, device, operator)

    def _reuse(self, block: Any, out: torch.Tensor) -> None:
        self._memory.pass_on(block.key, out.untyped_storage())
        super()._reuse(block, out)


def is_on_card(value: Any) -> bool:
    """Whether a tensor, or the first of several, is on the card."""
    if isinstance(value, (tuple, list)):
        return any(is_on_card(item) for item in value)
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"
