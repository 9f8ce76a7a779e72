"""A card that is not there: tensors that say they are on ``cuda`` and hold no data, beside host tensors that do.

PyTorch's CPU build knows the name of the device, but neither its autograd nor its streams. So these tensors are fake
ones whose Python side says ``cuda``; towards autograd, whose C++ asks for the device, they are on ``lazy``, a device of
PyTorch's own that needs no driver and whose backward runs in the calling thread; and their dispatch keys are those for
private use, which nobody else's tensors carry. All of it ends with the context.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from memkit._errors import StateError
from memkit._torch import aten
from memkit._torch.dispatch import fake_mode, no_dispatch
from memkit._torch.dispatch import private_backend_name as private_name
from memkit._torch.fake import FakeTensor, device_context, device_patches, fallback_patch, set_default_device
from memkit._torch.modules import APPLY, LOAD, buffers_of
from memkit._torch.operators import schema_of
from memkit._torch.optimizers import foreach, lists_of_devices, lists_of_types
from memkit._torch.pytree import tree_map
from memkit._torch.storage import swap_tensors
from memkit._torch.tensors import MAKE_SUBCLASS, storage_key
from memkit.planning.card.autocast import CastCache
from memkit.planning.card.operators import cuda_operators
from memkit.planning.card.workspace import RESULTS
from memkit.planning.fakes import DryMode
from memkit.planning.kernels import Kernels
from memkit.planning.reading import note_known, reading

_aten = torch.ops.aten
_COPIED = aten.to_copy
CARD = torch.device("cuda", 0)
_one_at_a_time = threading.Lock()  # it changes what "cuda" means for all threads
# Host tensors of random or constant numbers above this size hold no data: weights on their way to the card.
_MOST_HOST_BYTES = 2**20
# GradScaler's operators: they write into gradients and scalars that are there, and find no infinity.
_SCALING = {aten.amp_foreach_non_finite_check_and_unscale_}
_UPDATING = {aten.fused_sgd_, aten.fused_adagrad_}  # in place, and without a shape function
_RESCALING = {aten.amp_update_scale_}


class CardMode(DryMode):  # type: ignore[no-untyped-call]  # torch's own class hook
    """Fake tensors for the card; operators on host tensors alone run as they are, with data.

    Args:
        selected_fraction: As for `DryMode`.
    """

    results = RESULTS
    instead: Kernels = MappingProxyType({})
    # Whatever torch.cuda.is_available() is made to say: nothing may be initialised.
    avoid_device_init = True

    def __init__(self, selected_fraction: float | None = None) -> None:
        super().__init__(selected_fraction)
        self._running = threading.local()  # whether an operator on tensors without data runs, in each thread

    def dispatch(  # noqa: C901 - where an operator runs is one decision
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator: on the host with data, on the card without."""
        args = tuple(map(_as_cuda, args))
        kwargs = {name: _as_cuda(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        device = kwargs.get("device")
        if func in _SCALING:
            args[1].constant = torch.zeros(())  # no infinity was found
            return None
        if func in _UPDATING:
            return None
        if func in _RESCALING:
            return args[0]
        is_on_host = device is None or device.type == "cpu"
        if not any(issubclass(kind, FakeTensor) for kind in types):
            is_inside = getattr(self._running, "is_inside", False)  # what such an operator makes has no data either
            if is_on_host and not is_inside and not _is_large_filling(args, kwargs):
                return func(*args, **kwargs)
            if device is not None and device.type == "cuda" and args and isinstance(args[0], Tensor):
                return self._transferred(func, args[0], kwargs)
        elif func is _COPIED and device is not None and device.type == "cpu":
            return self._to_host(args[0], kwargs)
        elif func is _COPIED and device is not None and args[0].constant is not None:
            return self._transferred(func, args[0], kwargs)
        elif _writes_to_host(func, args):
            with_data, named = tree_map(self._guessed, (args, kwargs))
            return func(*with_data, **named)
        names_card = any(
            isinstance(value, torch.device) and value.type == "cuda" for value in (*args, *kwargs.values())
        )
        with _without_values(args if names_card else ()), self._inside():
            out = super().dispatch(func, types, args, kwargs)
        is_known = isinstance(out, FakeTensor) and out.constant is not None and out.fake_device.type == "cpu"
        if not is_known or device is not None:
            return out
        on_card = [arg for arg in args if isinstance(arg, FakeTensor) and arg.fake_device.type == "lazy"]
        if _is_view(func, out, on_card):
            with _without_values(on_card), self._inside():
                view = super().dispatch(func, types, args, kwargs)
            return self._known(view, out.constant)
        # PyTorch puts what it computes from known values on the CPU.
        return self._on_card(out.constant, on_card[0].fake_device) if on_card else out

    @contextmanager
    def _inside(self) -> Iterator[None]:
        was_inside = getattr(self._running, "is_inside", False)
        self._running.is_inside = True
        try:
            yield
        finally:
            self._running.is_inside = was_inside

    def _without_data(self, tensor: Tensor) -> Tensor:
        return FakeTensor(self, self._copy(tensor, "meta"), CARD)

    def _with_values(self, tensor: Tensor) -> Tensor:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:  # an optimizer's step count stays on the host
            return super()._with_values(tensor)
        return self._on_card(self._copy(tensor, "cpu"), CARD)

    def _transferred(self, func: Any, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """A tensor's copy on the card; whole numbers that are known stay so."""
        known = tensor.constant if isinstance(tensor, FakeTensor) else tensor if self._has_values(tensor) else None
        with no_dispatch():
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            elem = func(empty, **{**kwargs, "device": torch.device("meta")})
        fake = FakeTensor(self, elem, kwargs["device"])
        if known is not None:
            with no_dispatch():
                fake.constant = func(known, **{**kwargs, "device": torch.device("cpu")})
            self.fake_tensor_converter.add_constant_storage_mapping(fake)
        return fake

    def _to_host(self, tensor: FakeTensor, kwargs: dict[str, Any]) -> Tensor:
        """A copy on the host, without data but for what is known."""
        if tensor.constant is not None:
            return cast("Tensor", _COPIED(tensor.constant, **kwargs))
        with no_dispatch():
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            elem = _COPIED(empty, **{**kwargs, "device": torch.device("meta")})
        fake = FakeTensor(self, elem, torch.device("cpu"))
        note_known(_COPIED, (tensor,), fake)
        return fake

    def _guessed(self, value: Any) -> Any:
        """What is written into a host tensor, which has data: guessed numbers where there are none."""
        if not isinstance(value, FakeTensor):
            return value
        if value.constant is not None:
            return value.constant
        return torch.full(value.shape, self.guesses.array(value.dtype), dtype=value.dtype, device="cpu")

    def _on_card(self, constant: Tensor, device: torch.device) -> Tensor:
        elem = torch.empty_strided(constant.shape, constant.stride(), dtype=constant.dtype, device="meta")
        return self._known(FakeTensor(self, elem, device), constant)

    def _known(self, fake: Any, constant: Tensor) -> Tensor:
        fake.constant = constant
        self.fake_tensor_converter.add_constant_storage_mapping(fake)
        return cast("Tensor", fake)


def _is_view(func: Any, out: FakeTensor, args: Sequence[FakeTensor]) -> bool:
    """Whether an operator on known values only looks at them, and so takes no memory."""
    storages = {storage_key(arg.constant.untyped_storage()) for arg in args if arg.constant is not None}
    is_alias = out.constant is not None and storage_key(out.constant.untyped_storage()) in storages
    return is_alias and not schema_of(func).is_mutable


@contextmanager
def _without_values(tensors: Sequence[Any]) -> Iterator[None]:
    """PyTorch computes with known values for real: it must not try to do so on the card."""
    known = [
        (tensor, tensor.constant)
        for tensor in tensors
        if isinstance(tensor, FakeTensor) and tensor.constant is not None
    ]
    for tensor, _ in known:
        tensor.constant = None
    try:
        yield
    finally:
        for tensor, constant in known:
            tensor.constant = constant


def _as_cuda(value: Any) -> Any:
    """What C++ made of a card's tensor's device, as Python knows it."""
    is_named = isinstance(value, torch.device) and value.type in ("lazy", "cuda")
    return torch.device("cuda", value.index or 0) if is_named else value


def _for_autograd(device: torch.device) -> torch.device:
    return torch.device("lazy", device.index or 0) if device.type in ("cuda", "lazy") else device


def without_data(size: int, dtype: torch.dtype) -> Tensor:
    """A host tensor without data, as what is copied from the card."""
    mode = fake_mode()
    with no_dispatch():
        return FakeTensor(mode, torch.empty(size, dtype=dtype, device="meta"), torch.device("cpu"))


def _writes_to_host(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator writes into a tensor that has data."""
    is_real = bool(args) and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor)
    return is_real and schema_of(func).is_mutable


def _is_large_filling(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this makes a large host tensor of floating point numbers out of nothing but its size."""
    size = args[0] if args else kwargs.get("size")
    if not isinstance(size, (list, tuple)) or not all(isinstance(length, int) for length in size):
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return bool(dtype.is_floating_point and math.prod(size) * dtype.itemsize > _MOST_HOST_BYTES)


# ----------------------------------------------------------------------------------------------------- the stage


@contextmanager
def on_stage(mode: CardMode, capability: tuple[int, int]) -> Iterator[None]:
    """Everything around a mode that makes PyTorch take its tensors for CUDA's; enter the mode inside."""
    if not _one_at_a_time.acquire(blocking=False):
        raise StateError(
            "with VirtualGPU(...)",
            got="a virtual GPU inside of another, or in another thread meanwhile",
            expected="one at a time in a process",
            fix="leave the first block before the next one begins.",
        )
    casts = CastCache()
    with ExitStack() as stack:
        stack.callback(_one_at_a_time.release)
        stack.callback(mode.close)
        stack.enter_context(reading())
        stack.enter_context(_keeping_defaults())
        stack.enter_context(_moving_modules())
        stack.enter_context(cuda_operators(casts, capability))
        for owner, name, replacement in (*_tensor_patches(), *_autocast_patches(casts)):
            stack.enter_context(patched(owner, name, replacement))
        for name in lists_of_devices():
            devices = [*getattr(foreach, name)(), "lazy"]
            stack.enter_context(patched(foreach, name, lambda devices=devices: devices))
        for types in lists_of_types():
            if FakeTensor not in types:
                types.append(FakeTensor)
                stack.callback(types.remove, FakeTensor)
        yield


@contextmanager
def _keeping_defaults() -> Iterator[None]:
    """``torch.set_default_device("cuda")`` inside is over outside."""
    dtype, context = torch.get_default_dtype(), device_context()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if device_context() is not context:
            set_default_device(None if context is None else context.device)


@contextmanager
def _moving_modules() -> Iterator[None]:
    """Let parameters stay the same objects when their module moves to the card, and give them their data back."""
    swap, apply, load = torch.utils.swap_tensors, getattr(nn.Module, APPLY), getattr(nn.Module, LOAD)
    swapped: list[tuple[Tensor, Tensor]] = []
    buffers: dict[nn.Module, dict[str, Tensor | None]] = {}

    def noted(tensor: Tensor, other: Tensor) -> None:
        if isinstance(other, FakeTensor) and not isinstance(tensor, FakeTensor):
            swapped.append((tensor, other))
        swap(tensor, other)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @wraps(apply)
    def applied(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not any(isinstance(buffer, FakeTensor) for buffer in buffers_of(module).values()):
            buffers.setdefault(module, buffers_of(module).copy())
        return apply(module, *args, **kwargs)  # type: ignore[no-any-return]  # torch leaves it untyped

    @wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> None:
        torch.__future__.set_swap_module_params_on_conversion(False)  # in place: gradients stay
        try:
            load(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(True)

    swapped_before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with (
            patched(torch.utils, "swap_tensors", noted),
            patched(nn.Module, APPLY, applied),
            patched(nn.Module, LOAD, loaded),
        ):
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped_before)
        for tensor, data in swapped:
            tensor.grad = None
            _swap_back(tensor, data)
        for module, content in buffers.items():
            buffers_of(module).update(content)


def _swap_back(tensor: Tensor, data: Tensor) -> None:
    """As `torch.utils.swap_tensors`, also where graphs of the card still refer to the tensor: they are useless now."""
    tensor.__class__, data.__class__ = data.__class__, tensor.__class__
    tensor.__dict__, data.__dict__ = data.__dict__, tensor.__dict__
    swap_tensors(tensor, data)


@contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Give an attribute another value for a while; one that was inherited is inherited again afterwards."""
    had = vars(owner).get(name, patched)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if had is patched:
            delattr(owner, name)
        else:
            setattr(owner, name, had)


def _tensor_patches() -> list[tuple[Any, str, Any]]:
    make_subclass, to, device_of = getattr(Tensor, MAKE_SUBCLASS), Tensor.to, FakeTensor.device

    def named(self: FakeTensor) -> torch.device:
        device: torch.device = _as_cuda(device_of.__get__(self))
        return device

    @wraps(make_subclass)
    def private(cls: type, data: Tensor, requires_grad: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        device = kwargs.get("device_for_backend_keys")
        if device is not None and device.type == "lazy":
            kwargs["device_for_backend_keys"] = torch.device(private_name(), device.index or 0)
        return make_subclass(cls, data, requires_grad, **kwargs)

    @wraps(to)
    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(_as_lazy(arg) if _is_device(arg) else arg for arg in args)
        if kwargs.get("device") is not None:
            kwargs["device"] = _as_lazy(kwargs["device"])
        return to(self, *args, **kwargs)

    def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:  # noqa: FBT001, FBT002
        return to(self, _as_lazy("cuda" if device is None else device), non_blocking=non_blocking, **kwargs)

    return [
        (Tensor, MAKE_SUBCLASS, staticmethod(private)),
        *device_patches(_for_autograd),
        fallback_patch(_for_autograd(CARD)),
        (FakeTensor, "device", property(named)),
        (FakeTensor, "__deepcopy__", _copied),
        (Tensor, "to", moved),
        (Tensor, "cuda", cuda),
        (Tensor, "is_cuda", property(lambda self: self.device.type == "cuda")),
    ]


def _copied(self: Tensor, memo: dict[int, Any]) -> Tensor:
    """``copy.deepcopy``, which for other tensors looks at their data."""
    if id(self) not in memo:
        copy = self.detach().clone()
        memo[id(self)] = nn.Parameter(copy) if isinstance(self, nn.Parameter) else copy
        memo[id(self)].requires_grad_(self.requires_grad)
        if self.grad is not None:
            memo[id(self)].grad = _copied(self.grad, memo)
    new: Tensor = memo[id(self)]
    return new


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) or type(value) is int


def _as_lazy(device: Any) -> torch.device:
    if isinstance(device, int):
        return torch.device("lazy", device)
    return _for_autograd(torch.device(device))


def _autocast_patches(casts: CastCache) -> list[tuple[Any, str, Any]]:
    """``cuda`` means the private key, whose kernels do as CUDA's."""

    def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(private_name() if isinstance(arg, str) and arg.startswith("cuda") else arg for arg in args)
            return function(*args, **kwargs)

        return call

    def is_enabled(device_type: str = "cuda") -> bool:
        return renamed(was_enabled)(device_type)  # type: ignore[no-any-return]  # a bool

    def clear() -> None:
        casts.clear()
        clear_cache()

    was_enabled, clear_cache = torch.is_autocast_enabled, torch.clear_autocast_cache
    return [
        (torch, "is_autocast_enabled", is_enabled),
        (torch, "clear_autocast_cache", clear),
        *(
            (torch, name, renamed(getattr(torch, name)))
            for name in ("get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")
        ),
    ]
