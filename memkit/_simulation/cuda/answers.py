"""Answers of `torch.cuda` and of CUDA tensors in Python about a simulated GPU: queries, streams, files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce, wraps
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, cuda, nn

from memkit._core.errors import StateError
from memkit._core.protocols import SimulatedGpu
from memkit._simulation.cuda.memory import CudaMemory
from memkit._simulation.cuda.recurrent import flatten_parameters
from memkit._simulation.cuda.tensors import CARD, CudaTensors, convolution_format
from memkit._simulation.guesses import GuessedFloat, GuessedInt
from memkit._simulation.leftovers import Patches, patched
from memkit._torch.convolution import MEMORY_FORMAT, memory_format_owner
from memkit._torch.cuda import EXCHANGE, GET_ACCELERATOR, LAZY, RECORD_HISTORY, SNAPSHOT, accelerator_owner
from memkit._torch.fake import (
    PARSE_TO,
    FakeTensor,
    current_default_device,
    device_constructors,
    fake_mode_owner,
    to_owner,
)
from memkit._torch.tensors import storage_key

_OLD_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}
# Functions and methods that make tensors on a device.
_FACTORIES = (
    "arange", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones", "ones_like", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor", "tril_indices",
    "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
_NEW = ("new_empty", "new_full", "new_ones", "new_zeros")
_ACCELERATOR = torch.device("cuda")  # as torch names it: scripts append an index
_NVTX = ("range_push", "range_pop", "range_start", "range_end", "mark")


def answer_patches(card: SimulatedGpu, memory: CudaMemory, tensors: CudaTensors) -> list[Patches]:
    """Make the patches through which torch reports this GPU and its memory."""
    old_types = {name: _old_type(name, dtype) for name, dtype in _OLD_TYPES.items()}
    answers = _answers(card, memory) | _streams(memory) | old_types
    of_memory = {name: value for name, value in answers.items() if name in vars(cuda.memory)}
    accelerator = _accelerator(card, memory) | _streams(memory)
    loading = _Loading(tensors)
    return [
        Patches(cuda, "`torch.cuda` describes the virtual GPU", answers),
        Patches(cuda.memory, "the same functions under their other names", of_memory),
        *(
            Patches(
                owner,
                "`torch.accelerator` describes the virtual GPU",
                {name: value for name, value in accelerator.items() if hasattr(owner, name)},
            )
            for owner in (torch.accelerator, getattr(torch.accelerator, "memory", None))  # 2.8 has no memory
        ),
        Patches(accelerator_owner, "FSDP2 finds the virtual GPU", {GET_ACCELERATOR: lambda *_: _ACCELERATOR}),
        Patches(
            memory_format_owner,
            "convolutions use the order of dimensions that cuDNN would get",
            {MEMORY_FORMAT: _formatting(getattr(memory_format_owner, MEMORY_FORMAT))},
        ),
        Patches(torch.backends.cudnn, "nobody asks the CPU build for cuDNN", {"is_acceptable": _refusing}),
        Patches(
            nn.RNNBase,
            "weights of recurrent layers move into one buffer",
            {"flatten_parameters": flatten_parameters},
        ),
        Patches(Tensor, "Python methods of CUDA tensors", {**_numbered(Tensor, _NEW), **_methods(old_types)}),
        Patches(
            torch.UntypedStorage,
            "storages without data have addresses, as those of `Tensor.data_ptr`",
            {"data_ptr": _addressing(torch.UntypedStorage.data_ptr)},
        ),
        Patches(FakeTensor, "tensors without data can be saved", {"__reduce_ex__": _reduced}),
        Patches(cuda.nvtx, "marks for NVIDIA's profiler are ignored", dict.fromkeys(_NVTX, _nothing)),
        Patches(nn.parallel.scatter_gather, "`DataParallel` on one GPU", {"Scatter": _Scatter}),
        Patches(to_owner, "`module.to(0)`", {PARSE_TO: _parsing(getattr(to_owner, PARSE_TO))}),
        Patches(
            torch,
            "generators, compiled models, old defaults, tensors from data or on `device=0`, files",
            {
                "Generator": _Generator,
                "set_default_tensor_type": _set_default_tensor_type,
                "compile": _compile,
                **_numbered(torch, _FACTORIES),
                **_makers(),
                "load": loading.load(torch.load),
            },
        ),
    ]


def _refusing(_: Tensor) -> bool:
    return False


def _formatting(inner: Callable[..., torch.memory_format]) -> Callable[..., torch.memory_format]:
    def memory_format(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
        return convolution_format(x, weight) if x.device.type == "cuda" else inner(x, weight, backend)

    return memory_format


_GENERATOR = torch.Generator


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]  # its class differs between versions
    """Generators of before, torch's default one, and those that C++ returns are generators too."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _GENERATOR)


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    """A generator that always lives on the host, where all random numbers are drawn."""

    def __new__(cls, device: Any = "cpu") -> Self:  # noqa: ARG004 - torch's own signature
        return super().__new__(cls)


def _set_default_tensor_type(kind: Any) -> None:
    """Make the GPU the default device for ``torch.set_default_tensor_type("torch.cuda.FloatTensor")``."""
    name = kind if isinstance(kind, str) else torch.typename(kind)
    device_type = "cuda" if ".cuda." in name else "cpu"
    torch.set_default_device(device_type)  # memkit: ignore[global-cuda-default] - it stands in for torch's own
    dtypes = {"HalfTensor": torch.float16, "BFloat16Tensor": torch.bfloat16, "DoubleTensor": torch.float64}
    torch.set_default_dtype(dtypes.get(name.rpartition(".")[2], torch.float32))


def _compile(model: Any = None, **_: Any) -> Any:
    """Return the code uncompiled."""
    return (lambda model: model) if model is None else model


def _answers(card: SimulatedGpu, memory: CudaMemory) -> dict[str, Any]:
    capability = card.compute_capability or (0, 0)
    properties = SimpleNamespace(
        name=_driver_name(card),
        major=capability[0],
        minor=capability[1],
        total_memory=card.total_bytes,
        multi_processor_count=card.num_multiprocessors or 1,
        is_integrated=False,
        is_multi_gpu_board=False,
        warp_size=32,
    )
    state = torch.zeros(16, dtype=torch.uint8)

    def snapshot(*_: Any, **__: Any) -> dict[str, Any]:  # there is one card
        return memory.snapshot()

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
        **_memory(card, memory),
        RECORD_HISTORY: _nothing,
        SNAPSHOT: snapshot,
    }


def _memory(card: SimulatedGpu, memory: CudaMemory) -> dict[str, Any]:
    allocator = memory.allocator

    def statistics(device: Any = None) -> dict[str, int]:  # noqa: ARG001 - there is one card
        return {
            "allocated_bytes.all.current": allocator.allocated_bytes,
            "allocated_bytes.all.peak": allocator.peak_allocated_bytes,
            "reserved_bytes.all.current": allocator.reserved_bytes,
            "reserved_bytes.all.peak": allocator.peak_reserved_bytes,
            "requested_bytes.all.current": allocator.requested_bytes,
            # No block waits for another stream here, so only allocated blocks are active.
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
        memory.reset_peaks()

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
            card.total_bytes - card.context_bytes - allocator.reserved_bytes,
            card.total_bytes,
        ),
        "memory_stats": statistics,
        "memory_stats_as_nested_dict": nested,
        "memory_summary": lambda device=None, abbreviated=False: str(statistics()),  # noqa: ARG005
        "empty_cache": memory.empty_cache,
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "reset_max_memory_cached": reset,
        "reset_accumulated_memory_stats": _nothing,
        "set_per_process_memory_fraction": fraction,
        "get_per_process_memory_fraction": lambda device=None: allocator.memory_fraction,  # noqa: ARG005
    }


def _streams(memory: CudaMemory) -> dict[str, Any]:
    """Make the patches for streams: allocations come from the current stream's own cache."""

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


def _accelerator(card: SimulatedGpu, memory: CudaMemory) -> dict[str, Any]:
    """Make the patches that describe the card; whether it is there, and how many, torch itself asks `torch.cuda`."""
    of_cuda = _memory(card, memory)
    shared = (
        "empty_cache", "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved",
        "memory_stats", "reset_accumulated_memory_stats", "reset_peak_memory_stats",
    )  # fmt: skip
    return {
        "current_accelerator": lambda check_available=False: _ACCELERATOR,  # noqa: ARG005
        **dict.fromkeys(("current_device_index", "current_device_idx"), lambda: 0),
        **dict.fromkeys(("set_device_index", "set_device_idx"), _nothing),
        "device_index": nullcontext,
        "synchronize": _nothing,
        "empty_host_cache": _nothing,
        "get_memory_info": of_cuda["mem_get_info"],
        **{name: of_cuda[name] for name in shared},
    }


def _driver_name(card: SimulatedGpu) -> str:
    return f"{card.vendor} {card.name}"


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: a simulated GPU has no work to do."""


class _Stream:
    """A stream: all work of a virtual GPU is done when the call returns."""

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
        """Do nothing: there is nothing to restore."""

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    synchronize = wait_event = wait_stream = _nothing


class _Scatter:
    """Moves a batch to the only GPU; others are refused, as the card refuses every tensor for them."""

    @staticmethod
    def apply(gpus: list[int], chunk_sizes: Any, dim: int, tensor: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004 - torch's
        """Move the tensor."""
        return tuple(tensor.to(torch.device("cuda", each)) for each in gpus)


class _Event:
    """An event that is always complete and took no time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Ignore all options."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    record = wait = synchronize = _nothing


# ------------------------------------------------------------------------------------------------ methods


def _methods(old_types: dict[str, type]) -> dict[str, Any]:
    type_of, new, set_item = Tensor.type, Tensor.new, Tensor.__setitem__
    names = {dtype: name for name, dtype in _OLD_TYPES.items()}

    def put(self: Tensor, index: Any, value: Any) -> None:
        if isinstance(value, (GuessedFloat, GuessedInt)) and not isinstance(self, FakeTensor):
            value.guesses.into_data(value.line)
        set_item(self, index, value)

    def made_new(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, FakeTensor):
            return new(self, *args, **kwargs)
        return _made(args, self.dtype, self.device)

    def typed(self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        if dtype is None and isinstance(self, FakeTensor) and self.is_cuda and self.dtype in names:
            return f"torch.cuda.{names[self.dtype]}"
        name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
        short = name.rpartition(".")[2]
        if dtype in old_types.values() or (isinstance(dtype, str) and ".cuda." in dtype):
            return self.to("cuda", _OLD_TYPES[short], non_blocking=non_blocking)
        return type_of(self, dtype, non_blocking, **kwargs)

    def address(self: Tensor) -> int:
        if not isinstance(self, FakeTensor):
            return data_ptr(self)
        return self.untyped_storage().data_ptr() + int(self.storage_offset()) * self.element_size()

    data_ptr = Tensor.data_ptr
    return {
        "__setitem__": put,
        "new": made_new,
        "new_tensor": _new_tensor,
        "type": typed,
        "data_ptr": address,
        "pin_memory": lambda self, device=None: self,  # noqa: ARG005 - torch's own signature
        "record_stream": _nothing,
    }


def _addressing(data_ptr: Callable[[torch.UntypedStorage], int]) -> Callable[[torch.UntypedStorage], int]:
    """Give each storage without data an address of its own: by it, libraries tell which tensors share one."""

    def address(self: torch.UntypedStorage) -> int:
        return storage_key(self) if self.device.type == "meta" else data_ptr(self)

    return address


def _new_tensor(self: Tensor, data: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    device = self.device if device is None else device
    return torch.tensor(data, dtype=self.dtype if dtype is None else dtype, device=device, **options)


def _parsing(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Support ``module.to(0)``, for which PyTorch's own parser would query the machine's devices."""

    @wraps(parse)
    def parsed(*args: Any, **kwargs: Any) -> Any:
        return parse(*(torch.device("cuda", arg) if type(arg) is int else arg for arg in args), **kwargs)

    return parsed


# ------------------------------------------------------------------------------------------------ makers


def _makers() -> dict[str, Any]:
    """Patch ``torch.tensor(data, device="cuda")``: made on the host and copied, as on CUDA, but visible to modes."""

    def maker(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(make)
        def made(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
            chosen = torch.device(
                "cuda" if type(device) is int else device if device is not None else current_default_device()
            )
            if _holds_fakes(data):
                out = _stacked(data).to(chosen, kwargs.get("dtype"))
            elif chosen.type != "cuda":
                options = {"requires_grad": True} if requires_grad else {}
                return make(data, *args, device=device, **options, **kwargs)
            elif isinstance(data, FakeTensor):
                out = make(data, *args, device=device, **kwargs)
            else:
                out = make(data, *args, device="cpu", **kwargs).to(chosen)
            return out.requires_grad_() if requires_grad else out

        return made

    return {name: maker(getattr(torch, name)) for name in ("tensor", "as_tensor", "asarray")}


def _holds_fakes(data: Any) -> bool:
    """Whether a list contains tensors without data."""
    return isinstance(data, (list, tuple)) and any(isinstance(each, FakeTensor) or _holds_fakes(each) for each in data)


def _stacked(data: Any) -> Tensor:
    """Make a host tensor from a list of tensors and numbers without reading any, so that none is guessed."""
    if not isinstance(data, (list, tuple)):
        return data.detach().cpu() if isinstance(data, Tensor) else torch.as_tensor(data, device="cpu")
    parts = [_stacked(each) for each in data]
    dtype = reduce(torch.promote_types, (each.dtype for each in parts))
    return torch.stack([each.to(dtype) for each in parts])


def _numbered(owner: Any, names: Sequence[str]) -> dict[str, Any]:
    """Accept a device given as a number, for which C++ would query the machine's accelerator."""

    def numbered(make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            if type(kwargs.get("device")) is int:
                kwargs["device"] = torch.device("cuda", kwargs["device"])
            return make(*args, **kwargs)

        return made

    device_constructors()  # torch caches the functions on the first call
    return {name: numbered(getattr(owner, name)) for name in names}


class _OldType(type):
    """``torch.cuda.FloatTensor`` and the like: classes of which the GPU's tensors are instances."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> Tensor:
        return _made(args, cls.dtype, torch.device("cuda", 0))

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype is cls.dtype


def _old_type(name: str, dtype: torch.dtype) -> type:
    return _OldType(name, (), {"dtype": dtype, "__module__": "torch.cuda", "is_cuda": True})


def _made(args: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Construct a tensor the old way, from sizes or from data."""
    if args and not isinstance(args[0], (int, torch.Size)):
        return torch.tensor(args[0], dtype=dtype).to(device)
    return torch.empty(*args or (0,), dtype=dtype, device=device)


# ------------------------------------------------------------------------------------------------ files


class _Loading:
    """`torch.load` on a simulated GPU."""

    def __init__(self, tensors: CudaTensors) -> None:
        self._tensors = tensors

    def load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Load host tensors with data; copy those that belong on the GPU there afterwards."""

        @wraps(load)
        def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            def place_of(device: str) -> str:
                if callable(map_location):
                    return "cpu"
                chosen = map_location.get(device, device) if isinstance(map_location, dict) else map_location
                return device if chosen is None else str(chosen)

            def note(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
                if place_of(device).startswith("cuda"):
                    for_card.add(storage_key(storage))
                return storage

            for_card: set[int] = set()
            _now.place_of, _now.storages, _now.tensors = place_of, {}, self._tensors
            with (
                patched(fake_mode_owner, "detect_fake_mode", _nothing),  # otherwise host tensors would have no data
                torch.serialization.safe_globals([rebuilt]),
            ):
                try:
                    return _moved(load(f, note, *args, **kwargs), for_card)
                finally:
                    _now.__dict__.clear()

        return loaded


class _Now(threading.local):
    """State of the running `torch.load`, for `rebuilt`, which only torch calls; no tensors if none is running."""

    place_of: Callable[[str], str] = staticmethod(lambda device: device)
    storages: dict[int, Tensor]
    tensors: CudaTensors | None = None


_now = _Now()


def _moved(value: Any, for_card: set[int]) -> Any:
    if isinstance(value, Tensor):
        is_for_card = not isinstance(value, FakeTensor) and storage_key(value.untyped_storage()) in for_card
        return value.to("cuda") if is_for_card else value
    if isinstance(value, nn.Module):
        return value.to("cuda") if for_card else value
    if isinstance(value, dict):
        value.update({key: _moved(item, for_card) for key, item in value.items()})
    elif isinstance(value, list):
        value[:] = [_moved(item, for_card) for item in value]
    elif type(value) is tuple:
        return tuple(_moved(item, for_card) for item in value)
    return value


def _reduced(self: FakeTensor, _: Any) -> Any:
    """Pickle a tensor without data: its device, its storage, and its view of the storage."""
    storage = self.untyped_storage()
    view = self.dtype, tuple(self.shape), self.stride(), self.storage_offset()
    return rebuilt, (
        str(self.device),
        storage_key(storage),
        storage.nbytes(),
        *view,
        self.requires_grad,
        isinstance(self, nn.Parameter),
    )


def rebuilt(
    device: str,
    key: int,
    num_bytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    requires_grad: bool,  # noqa: FBT001
    is_parameter: bool,  # noqa: FBT001
) -> Tensor:
    """Rebuild a tensor saved by `torch.save` on a virtual GPU, on the device that `torch.load` chooses."""
    loading = _now.tensors
    if loading is None:
        raise StateError(
            "a tensor without data that another process sent",
            got=f"{num_bytes} bytes on {device}, made on a virtual GPU",
            expected="tensors with data: tensors without data stay in the process that made them",
            fix="send sizes, or small tensors, and make the large ones in this process.",
        )
    if key not in _now.storages:
        size, place = num_bytes // dtype.itemsize, torch.device(_now.place_of(device))
        is_host = place.type == "cpu"
        _now.storages[key] = loading.on_host(size, dtype) if is_host else torch.empty(size, dtype=dtype, device=place)
    base = _now.storages[key]
    if isinstance(base, FakeTensor) and not base.is_cuda:
        out = base.view(dtype).as_strided(shape, stride, offset)
        return nn.Parameter(out, requires_grad) if is_parameter else out.requires_grad_(requires_grad)
    with torch.no_grad():
        out = torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, shape, stride)
    return nn.Parameter(out, requires_grad) if is_parameter else out.requires_grad_(requires_grad)
