"""What scripts do with a card's tensors beside operators: pickle and pin them, ask for old types.

Patches of torch's Python methods, in force while a virtual card is on stage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from memkit._torch.fake import PARSE_TO, FakeTensor, current_default_device, fake_mode_owner, to_owner
from memkit._torch.tensors import storage_key
from memkit.planning.card.tensors import patched, without_data
from memkit.planning.guesses import GuessedFloat, GuessedInt

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
_NVTX = ("range_push", "range_pop", "range_start", "range_end", "mark")


@contextmanager
def card_methods(cuda: Any) -> Iterator[None]:
    """Let tensors of a virtual card do what CUDA's do in Python; ``cuda`` is `torch.cuda`."""
    old_types = {name: _old_type(name, dtype) for name, dtype in _OLD_TYPES.items()}
    with ExitStack() as stack:
        for owner, name, replacement in (
            *_methods(old_types),
            *_makers(),
            *((cuda, name, kind) for name, kind in old_types.items()),
            *((cuda.nvtx, name, _nothing) for name in _NVTX),
            (nn.parallel.comm, "scatter", lambda tensor, *_, **__: (tensor.to("cuda"),)),
            (to_owner, PARSE_TO, _parsing(getattr(to_owner, PARSE_TO))),
        ):
            stack.enter_context(patched(owner, name, replacement))
        stack.enter_context(torch.serialization.safe_globals([rebuilt]))
        stack.enter_context(patched(torch, "load", _loading(torch.load)))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Nothing to do."""


# ------------------------------------------------------------------------------------------------ methods


def _methods(old_types: dict[str, type]) -> list[tuple[Any, str, Any]]:
    type_of, new, set_item = Tensor.type, Tensor.new, Tensor.__setitem__

    def put(self: Tensor, index: Any, value: Any) -> None:
        if isinstance(value, (GuessedFloat, GuessedInt)) and not isinstance(self, FakeTensor):
            value.guesses.into_data(value.line)
        set_item(self, index, value)

    def made_new(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, FakeTensor):
            return new(self, *args, **kwargs)
        return _made(args, self.dtype, self.device)

    def typed(self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
        short = name.rpartition(".")[2]
        if dtype in old_types.values() or (isinstance(dtype, str) and ".cuda." in dtype):
            return self.to("cuda", _OLD_TYPES[short], non_blocking=non_blocking)
        return type_of(self, dtype, non_blocking, **kwargs)

    def address(self: Tensor) -> int:
        if not isinstance(self, FakeTensor):
            return data_ptr(self)
        number = storage_key(self.untyped_storage())
        return number + int(self.storage_offset()) * self.element_size()

    data_ptr = Tensor.data_ptr
    return [
        (Tensor, "__setitem__", put),
        (Tensor, "new", made_new),
        (Tensor, "type", typed),
        (Tensor, "data_ptr", address),
        (Tensor, "pin_memory", lambda self, device=None: self),  # noqa: ARG005 - torch's own signature
        (Tensor, "record_stream", _nothing),
        (FakeTensor, "__reduce_ex__", _reduced),
    ]


def _parsing(parse: Callable[..., Any]) -> Callable[..., Any]:
    """``module.to(0)``: PyTorch's own parser asks the machine for its devices."""

    @wraps(parse)
    def parsed(*args: Any, **kwargs: Any) -> Any:
        return parse(*(torch.device("cuda", arg) if type(arg) is int else arg for arg in args), **kwargs)

    return parsed


# ------------------------------------------------------------------------------------------------ makers


def _makers() -> list[tuple[Any, str, Any]]:
    """``torch.tensor(data, device="cuda")``: made on the host and copied, as with CUDA, but where a mode sees it."""

    def maker(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(make)
        def made(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
            chosen = torch.device(
                "cuda" if type(device) is int else device if device is not None else current_default_device()
            )
            if chosen.type != "cuda":
                options = {"requires_grad": True} if requires_grad else {}
                return make(data, *args, device=device, **options, **kwargs)
            if isinstance(data, FakeTensor):
                out = make(data, *args, device=device, **kwargs)
            else:
                out = make(data, *args, device="cpu", **kwargs).to(chosen)
            return out.requires_grad_() if requires_grad else out

        return made

    return [(torch, name, maker(getattr(torch, name))) for name in ("tensor", "as_tensor", "asarray")]


class _OldType(type):
    """``torch.cuda.FloatTensor`` and the like: classes of which a card's tensors are instances."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> Tensor:
        return _made(args, cls.dtype, torch.device("cuda", 0))

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype is cls.dtype


def _old_type(name: str, dtype: torch.dtype) -> type:
    return _OldType(name, (), {"dtype": dtype, "__module__": "torch.cuda", "is_cuda": True})


def _made(args: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Old constructors: of sizes, or of data."""
    if args and not isinstance(args[0], (int, torch.Size)):
        return torch.tensor(args[0], dtype=dtype).to(device)
    return torch.empty(*args or (0,), dtype=dtype, device=device)


# ------------------------------------------------------------------------------------------------ files


class _Loading(threading.local):
    """What the `torch.load` that runs now has to know."""

    place_of: Callable[[str], str] = staticmethod(lambda device: device)
    storages: dict[int, Tensor]


_now = _Loading()


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` with data for the host; what belongs on the card is copied there afterwards."""

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
        _now.place_of, _now.storages = place_of, {}
        with patched(fake_mode_owner, "detect_fake_mode", _nothing):  # it would leave the host's tensors without data
            return _moved(load(f, note, *args, **kwargs), for_card)

    return loaded


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
    """A tensor without data in a file: where it is, its storage, its view of it."""
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
    """A tensor from a file of `torch.save` on a virtual card, on the device that `torch.load` chooses."""
    if key not in _now.storages:
        size, place = num_bytes // dtype.itemsize, torch.device(_now.place_of(device))
        if place.type == "cpu":
            _now.storages[key] = without_data(size, dtype)
        else:
            _now.storages[key] = torch.empty(size, dtype=dtype, device=place)
    base = _now.storages[key]
    if isinstance(base, FakeTensor) and not base.is_cuda:
        out = base.view(dtype).as_strided(shape, stride, offset)
        return nn.Parameter(out, requires_grad) if is_parameter else out.requires_grad_(requires_grad)
    with torch.no_grad():
        out = torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, shape, stride)
    return nn.Parameter(out, requires_grad) if is_parameter else out.requires_grad_(requires_grad)
