"""What `torch.cuda` answers about a card that is not there, as long as a virtual card is on stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import cuda

from memkit._torch.cuda import EXCHANGE, LAZY, RECORD_HISTORY, SNAPSHOT
from memkit.planning.card.allocator import CachingAllocator
from memkit.planning.card.memory import CardMemory
from memkit.planning.card.methods import card_methods
from memkit.planning.card.tensors import CARD, patched
from memkit.planning.gpus import GPU


@contextmanager
def cuda_answers(gpu: GPU, memory: CardMemory) -> Iterator[None]:
    """Let `torch.cuda` and `torch.accelerator` speak of this card and its memory."""
    allocator, streams = memory.allocator, _streams(memory)
    with ExitStack() as stack:
        for name, answer in (_answers(gpu, memory) | streams).items():
            stack.enter_context(patched(cuda, name, answer))
            if name in vars(cuda.memory):
                stack.enter_context(patched(cuda.memory, name, answer))
        for name, answer in (_accelerator(gpu, allocator) | streams).items():
            if hasattr(torch.accelerator, name):
                stack.enter_context(patched(torch.accelerator, name, answer))
        # LSTMs run step by step: what cuDNN keeps for their backward is its own secret.
        stack.enter_context(patched(torch.backends.cudnn, "is_acceptable", lambda tensor: False))  # noqa: ARG005
        stack.enter_context(card_methods(cuda))
        for name, answer in _TORCH.items():
            stack.enter_context(patched(torch, name, answer))
        yield


class _Generator(torch.Generator):
    """Random numbers are drawn on the host alone."""

    def __new__(cls, device: Any = "cpu") -> Self:  # noqa: ARG004 - torch's own signature
        return super().__new__(cls)


def _set_default_tensor_type(kind: Any) -> None:
    """``torch.set_default_tensor_type("torch.cuda.FloatTensor")`` makes the card everybody's device."""
    name = kind if isinstance(kind, str) else torch.typename(kind)
    device_type = "cuda" if ".cuda." in name else "cpu"
    torch.set_default_device(device_type)  # memkit: ignore[global-cuda-default] - it stands in for torch's own
    dtypes = {"HalfTensor": torch.float16, "BFloat16Tensor": torch.bfloat16, "DoubleTensor": torch.float64}
    torch.set_default_dtype(dtypes.get(name.rpartition(".")[2], torch.float32))


def _compile(model: Any = None, **_: Any) -> Any:
    """Compiled code runs as written."""
    return (lambda model: model) if model is None else model


_TORCH = {"Generator": _Generator, "set_default_tensor_type": _set_default_tensor_type, "compile": _compile}


def _answers(gpu: GPU, memory: CardMemory) -> dict[str, Any]:
    capability = gpu.compute_capability or (0, 0)
    properties = SimpleNamespace(
        name=_driver_name(gpu),
        major=capability[0],
        minor=capability[1],
        total_memory=gpu.total_bytes,
        multi_processor_count=gpu.num_multiprocessors or 1,
        is_integrated=False,
        is_multi_gpu_board=False,
        warp_size=32,
    )
    state = torch.zeros(16, dtype=torch.uint8)

    def snapshot(*_: Any, **__: Any) -> dict[str, Any]:  # there is one card
        return {"segments": [], "device_traces": [[]]} if memory.history is None else memory.history.snapshot()

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing,
        **dict.fromkeys(LAZY, _nothing),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing,
        **dict.fromkeys(EXCHANGE, lambda device: 0),  # noqa: ARG005 - there is one card
        "synchronize": _nothing,
        "ipc_collect": _nothing,
        "get_device_name": lambda device=None: properties.name,  # noqa: ARG005
        "get_device_properties": lambda device=None: properties,  # noqa: ARG005
        "get_device_capability": lambda device=None: capability,  # noqa: ARG005
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "seed": _nothing,
        "seed_all": _nothing,
        "initial_seed": lambda: 0,
        "get_rng_state": lambda device=None: state.clone(),  # noqa: ARG005
        "get_rng_state_all": lambda: [state.clone()],
        "set_rng_state": _nothing,
        "set_rng_state_all": _nothing,
        "Stream": _Stream,
        "Event": _Event,
        "can_device_access_peer": lambda *_: False,
        "memory_snapshot": lambda: snapshot()["segments"],
        "is_current_stream_capturing": lambda: False,
        "utilization": lambda device=None: 0,  # noqa: ARG005
        **_memory(gpu, memory.allocator),
        RECORD_HISTORY: _nothing,
        SNAPSHOT: snapshot,
    }


def _memory(gpu: GPU, allocator: CachingAllocator) -> dict[str, Any]:
    def statistics(device: Any = None) -> dict[str, int]:  # noqa: ARG001 - there is one card
        return {
            "allocated_bytes.all.current": allocator.allocated_bytes,
            "allocated_bytes.all.peak": allocator.peak_allocated_bytes,
            "reserved_bytes.all.current": allocator.reserved_bytes,
            "reserved_bytes.all.peak": allocator.peak_reserved_bytes,
            "requested_bytes.all.current": allocator.requested_bytes,
            # No block waits for another stream here: what is not allocated is not active.
            "active_bytes.all.current": allocator.allocated_bytes,
            "active_bytes.all.peak": allocator.peak_allocated_bytes,
            "inactive_split_bytes.all.current": allocator.memory().inactive_split_bytes or 0,
            "num_alloc_retries": allocator.num_retries,
            "num_ooms": allocator.num_ooms,
        }

    def nested(device: Any = None) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, number in statistics(device).items():
            *path, last = name.split(".")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[last] = number
        return tree

    def reset(device: Any = None) -> None:  # noqa: ARG001
        allocator.reset_peaks()

    def fraction(fraction: float, device: Any = None) -> None:  # noqa: ARG001
        allocator.set_memory_fraction(fraction)

    return {
        "memory_allocated": lambda device=None: allocator.allocated_bytes,  # noqa: ARG005
        "max_memory_allocated": lambda device=None: allocator.peak_allocated_bytes,  # noqa: ARG005
        "memory_reserved": lambda device=None: allocator.reserved_bytes,  # noqa: ARG005
        "max_memory_reserved": lambda device=None: allocator.peak_reserved_bytes,  # noqa: ARG005
        "memory_cached": lambda device=None: allocator.reserved_bytes,  # noqa: ARG005
        "max_memory_cached": lambda device=None: allocator.peak_reserved_bytes,  # noqa: ARG005
        "mem_get_info": lambda device=None: (  # noqa: ARG005
            gpu.total_bytes - gpu.context_bytes - allocator.reserved_bytes,
            gpu.total_bytes,
        ),
        "memory_stats": statistics,
        "memory_stats_as_nested_dict": nested,
        "memory_summary": lambda device=None, abbreviated=False: str(statistics()),  # noqa: ARG005
        "empty_cache": allocator.empty_cache,
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "reset_max_memory_cached": reset,
        "reset_accumulated_memory_stats": _nothing,
        "set_per_process_memory_fraction": fraction,
    }


def _streams(memory: CardMemory) -> dict[str, Any]:
    """The current stream: what is allocated meanwhile comes from the stream's own cache."""

    def set_stream(stream: _Stream) -> None:
        memory.stream = stream.cuda_stream

    @contextmanager
    def within(stream: _Stream | None) -> Iterator[None]:
        before = memory.stream
        if stream is not None:
            set_stream(stream)
        try:
            yield
        finally:
            memory.stream = before

    return {
        "current_stream": lambda device=None: _Stream(number=memory.stream),  # noqa: ARG005
        "default_stream": lambda device=None: _Stream(number=0),  # noqa: ARG005
        "set_stream": set_stream,
        "stream": within,
    }


def _accelerator(gpu: GPU, allocator: CachingAllocator) -> dict[str, Any]:
    memory = _memory(gpu, allocator)
    shared = ("empty_cache", "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_accelerator": lambda check_available=False: CARD,  # noqa: ARG005
        "current_device_index": lambda: 0,
        "set_device_index": _nothing,
        "synchronize": _nothing,
        "get_memory_info": memory["mem_get_info"],
        "memory_stats": memory["memory_stats"],
        "reset_peak_memory_stats": memory["reset_peak_memory_stats"],
        **{name: memory[name] for name in shared},
    }


def _driver_name(gpu: GPU) -> str:
    return f"{gpu.vendor} {gpu.name}"


def _nothing(*_: Any, **__: Any) -> None:
    """A card that is not there has nothing to do."""


class _Stream:
    """A stream: all work of a virtual card is done when its call returns."""

    def __init__(self, *_: Any, number: int | None = None, **__: Any) -> None:
        self.cuda_stream = self.stream_id = id(self) if number is None else number
        self.device, self.device_index, self.device_type = CARD, CARD.index, 1  # c10::DeviceType::CUDA

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was changed."""

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    synchronize = wait_event = wait_stream = _nothing


class _Event:
    """An event that has always happened, and took no time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Options of timing have no effect."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    record = wait = synchronize = _nothing
