"""Simulated GPU: tensors that report ``cuda`` as their device and hold no data, next to host tensors with data.

PyTorch's CPU build knows the name of the device, but neither its autograd nor its streams. So these are fake tensors
whose Python side reports ``cuda``; for autograd, whose C++ asks for the device, they are on ``lazy``, a PyTorch device
that needs no driver and whose backward runs in the calling thread; and they use the private-use dispatch keys, which no
other tensors carry. Kernels for that key provide the operators for which CUDA has kernels of its own. All of it ends
with `on_cuda`.
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from itertools import chain
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memkit._core.attributes import attributes_of, set_attributes
from memkit._core.errors import NotSimulatedError, StateError
from memkit._recorder.recorder import StepPosition
from memkit._simulation.ctc import CTC
from memkit._simulation.cuda.attention import attend
from memkit._simulation.cuda.autocast import CastCache, autocast_kernels
from memkit._simulation.cuda.recurrent import LAYERS, RECURRENT
from memkit._simulation.cuda.selection import MAY_ASK, asks_library
from memkit._simulation.leftovers import Patches, applied
from memkit._simulation.tensors import COMPRESSED, DATA_OF, ON_HOST, Tensors, has_values, set_data
from memkit._torch import aten
from memkit._torch.aten import overloads
from memkit._torch.cuda import Rules
from memkit._torch.dispatch import DispatchKey, no_dispatch, private_backend_name as private_name
from memkit._torch.fake import (
    IS_MADE_WITH_DEVICE,
    NORMALIZE_DEVICE,
    RUN_FALLBACK,
    FakeTensor,
    UnsupportedFakeTensorException,
    attributes_of_user,
    device_context,
    fake_tensor,
    set_default_device,
)
from memkit._torch.modules import APPLY, LOAD, buffers_of
from memkit._torch.operators import (
    has_fallback,
    has_kernel,
    remove_kernels,
    run_kernel_of,
    schema_of,
    scriptable,
)
from memkit._torch.optimizers import LISTS_OF_DEVICES, LISTS_OF_TYPES, foreach
from memkit._torch.pytree import tree_leaves, tree_map
from memkit._torch.storage import memory_format_of, swap_tensors
from memkit._torch.tensors import (
    MAKE_SUBCLASS,
    MAKE_WRAPPER,
    accumulate_hooks,
    hooks_of,
    set_accumulate_hooks,
    set_hooks,
    storage_key,
)

_aten = torch.ops.aten
_COPIED = aten.to_copy
CARD = torch.device("cuda", 0)
_LAZY = torch.device("lazy", 0)  # the device as autograd sees it
_META, _HOST = torch.device("meta"), torch.device("cpu")
_Device = torch.device
_one_at_a_time = threading.Lock()  # it changes the meaning of "cuda" for all threads
# Host tensors of random or constant numbers above this size hold no data: weights that are about to move to the GPU.
_MOST_HOST_BYTES = 2**20
# GradScaler's operators: they write into existing gradients and scalars, and find no infinity.
_SCALING = aten.amp_foreach_non_finite_check_and_unscale_
_RESCALING = aten.amp_update_scale_
_UPDATING = (aten.fused_sgd_, aten.fused_adagrad_)  # in place, and without a shape function
_NEVER_RUN = frozenset({_SCALING, _RESCALING, *_UPDATING})
# Operators that have a kernel on CUDA, but decompose into others on other devices.
_WHOLE = (_aten.silu_backward.default, _aten.mish_backward.default)
# Operators with shape functions that take tensors of several devices.
_UNCHECKED = frozenset({*aten.INDEXING, *RECURRENT}) | overloads(
    "convolution.default", "convolution_backward.default", "embedding.default", "_embedding_bag.default",
    "masked_select.default", "slice_scatter.default", "diagonal_scatter.default", "bincount.default",
)  # fmt: skip
_COPYING = overloads("copy_.default", "resize_as_.default", "set_")


class CudaTensors(Tensors):  # type: ignore[no-untyped-call]  # torch's own class hook
    """Fake tensors for the simulated GPU; operators on host tensors only run normally, with data."""

    # Whatever torch.cuda.is_available() is patched to return, nothing may be initialized.
    avoid_device_init = True

    def __init__(self, selected_fraction: float | None = None) -> None:
        super().__init__(selected_fraction, instead={**RECURRENT, **CTC})
        self._on_host: set[int] = set()  # by address, the storages of the optimizers' counts of steps
        self._running = threading.local()  # whether an operator on tensors without data runs, in each thread

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator: on the host with data, on the GPU without."""
        if func in _NEVER_RUN:
            return self._scaled(func, args)
        args, kwargs, names_card = _with_devices(args, kwargs)
        device = kwargs.get("device")
        if names_card and kwargs.get("layout") not in (None, torch.strided):
            _refuse_layout(kwargs["layout"])
        if FakeTensor in types or any(issubclass(kind, FakeTensor) for kind in types):
            if func is _COPIED and device is not None and (device.type == "cpu" or args[0].constant is not None):
                return self._to_host(args[0], kwargs) if device.type == "cpu" else self._transferred(func, args, kwargs)
            if _writes_to_host(func, args):
                with_data, named = tree_map(self._guessed, (args, kwargs))
                return func(*with_data, **named)
        elif device is None or device.type == "cpu":
            is_inside = getattr(self._running, "is_inside", False)  # tensors made within one have no data either
            if not is_inside and not _is_large_filling(args, kwargs):
                return func(*args, **kwargs)
        elif device.type == "cuda" and args and isinstance(args[0], Tensor):
            return self._transferred(func, args, kwargs)
        out = self._without_data(func, types, args, kwargs, args if names_card else ())
        if device is not None or not any(map(_is_known_on_host, _as_sequence(out))):
            return out
        return self._placed(func, types, args, kwargs, out)

    def without_data(self, tensor: Tensor) -> Tensor:
        """Make a stand-in on the GPU. Of a part of a host tensor, such as rows of a data set, only that is copied."""
        is_part = tensor.device.type == "cpu" and tensor.nbytes < tensor.untyped_storage().nbytes()
        meta = torch.empty_like(tensor, device="meta") if is_part else self.copies.view(tensor, "meta")
        return self.fake(meta, _LAZY)

    @contextmanager
    def standing_in(self, *values: Any, holders: Iterable[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Replace tensors as `Tensors` does; the numbers in an optimizer's state stay on the host."""
        flat = chain.from_iterable(each if isinstance(each, (list, tuple)) else (each,) for each in values)
        states = [each.state.values() for each in flat if isinstance(each, torch.optim.Optimizer)]
        numbers = [each for state in chain.from_iterable(states) for each in state.values()]
        on_host = (each.untyped_storage() for each in numbers if isinstance(each, Tensor) and has_values(each))
        self._on_host.update(map(storage_key, on_host))
        with super().standing_in(*values, holders=holders) as replaced:
            yield replaced

    def with_values(self, tensor: Tensor) -> Tensor:
        """Make a stand-in that keeps its values: on the GPU, except for an optimizer's step count."""
        if storage_key(tensor.untyped_storage()) in self._on_host:
            return super().with_values(tensor)
        return self._on_card(self.copies.view(tensor, "cpu"), CARD)

    def on_host(self, size: int, dtype: torch.dtype) -> Tensor:
        """Make a host tensor without data, as the result of a copy from the GPU."""
        with no_dispatch():
            return FakeTensor(self, torch.empty(size, dtype=dtype, device="meta"), torch.device("cpu"))

    def _without_data(self, func: Any, types: Any, args: Any, kwargs: Any, moved: Sequence[Any]) -> Any:
        """Run an operator on tensors without data.

        PyTorch really computes with known values; it must not try to compute on the GPU with those of ``moved``.
        """
        if func in _UNCHECKED:
            _refuse_mixed(func, args, self.note_original)
        known = [(each, each.constant) for each in moved if isinstance(each, FakeTensor) and each.constant is not None]
        for tensor, _ in known:
            tensor.constant = None
        running = self._running
        was_inside = getattr(running, "is_inside", False)
        running.is_inside = True
        on_card = func in MAY_ASK and any(isinstance(each, Tensor) and each.is_cuda for each in args)
        if on_card and asks_library(func, args, kwargs):
            self.guesses.runs_whole(func)
        try:
            return super().run(func, types, args, kwargs)
        except RuntimeError as error:
            is_unsupported = isinstance(error, UnsupportedFakeTensorException)
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor) and (each.layout in COMPRESSED or (is_unsupported and each.is_sparse)):
                    _refuse_layout(each.layout)
            raise
        finally:
            running.is_inside = was_inside
            for tensor, constant in known:
                tensor.constant = constant

    def _placed(self, func: Any, types: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Place results that were computed from known values, which PyTorch puts on the CPU."""
        leaves = tree_leaves(args)  # `cat` takes a list
        on_card = [arg for arg in leaves if isinstance(arg, FakeTensor) and arg.fake_device.type == "lazy"]
        if not on_card:
            return out
        results = _as_sequence(out)
        are_views = all(_is_known_on_host(each) and _is_view(func, each, on_card) for each in results)
        if are_views:
            views = _as_sequence(self._without_data(func, types, args, kwargs, on_card))
            placed = [self.known(view, each.constant) for view, each in zip(views, results, strict=True)]
        else:
            device = on_card[0].fake_device
            placed = [self._on_card(each.constant, device) if _is_known_on_host(each) else each for each in results]
        return type(out)(placed) if isinstance(out, (list, tuple)) else placed[0]

    def _scaled(self, func: Any, args: Any) -> Any:
        self.forget_written(func, args)
        if func is _SCALING:
            args[1].constant = torch.zeros(())  # no infinity was found
        return args[0] if func is _RESCALING else None

    def _transferred(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Make a tensor's copy on the GPU, or one like it there; known integers stay known."""
        tensor, *others = args
        if tensor.layout is not torch.strided:
            _refuse_layout(tensor.layout)
        known = tensor.constant if isinstance(tensor, FakeTensor) else tensor if has_values(tensor) else None
        with no_dispatch():
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            elem = func(empty, *others, **{**kwargs, "device": torch.device("meta")})
        fake = FakeTensor(self, elem, kwargs["device"])
        if known is not None:
            with no_dispatch():
                fake.constant = func(known, *others, **{**kwargs, "device": torch.device("cpu")})
            self.converter.add_constant_storage_mapping(fake)
        return fake

    def _to_host(self, tensor: FakeTensor, kwargs: dict[str, Any]) -> Tensor:
        """Make a copy on the host, without data except for known values, which the step can then read."""
        if tensor.constant is not None:
            self.guesses.num_true += 1
            return cast("Tensor", _COPIED(tensor.constant, **kwargs))
        with no_dispatch():
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            elem = _COPIED(empty, **{**kwargs, "device": torch.device("meta")})
        fake = FakeTensor(self, elem, torch.device("cpu"))
        self.note_known(_COPIED, (tensor,), fake)
        return fake

    def _guessed(self, value: Any) -> Any:
        """Return the value to write into a host tensor with data: guessed numbers if the source has no data."""
        if not isinstance(value, FakeTensor):
            return value
        if value.constant is not None:
            return value.constant
        return torch.full(value.shape, self.guesses.array(value.dtype), dtype=value.dtype, device="cpu")

    def _on_card(self, constant: Tensor, device: torch.device) -> Tensor:
        elem = torch.empty_strided(constant.shape, constant.stride(), dtype=constant.dtype, device="meta")
        return self.known(FakeTensor(self, elem, device), constant)

    def known(self, fake: Any, constant: Tensor) -> Tensor:
        """Attach values to a tensor on the card; one on the host is made of them."""
        if fake.fake_device == _HOST:
            return super().known(fake, constant)
        fake.constant = constant
        self.converter.add_constant_storage_mapping(fake)
        return cast("Tensor", fake)


def _as_sequence(out: Any) -> Sequence[Any]:
    """Return the results of an operator as a sequence, if there is only one, too."""
    return out if isinstance(out, (list, tuple)) else (out,)


def _is_known_on_host(out: Any) -> bool:
    return isinstance(out, FakeTensor) and out.constant is not None and out.fake_device.type == "cpu"


def _is_view(func: Any, out: FakeTensor, args: Sequence[FakeTensor]) -> bool:
    """Whether an operator on known values only makes a view, and so takes no memory."""
    storages = {storage_key(arg.constant.untyped_storage()) for arg in args if arg.constant is not None}
    is_alias = out.constant is not None and storage_key(out.constant.untyped_storage()) in storages
    return is_alias and not schema_of(func).is_mutable


_DEVICES = {_LAZY: CARD, torch.device("lazy"): CARD, torch.device("cuda"): CARD}


def _as_cuda(value: Any) -> Any:
    """Map the device that C++ gave a GPU tensor back to the one Python knows."""
    if type(value) is not _Device:
        return value
    if value.index and value.type in ("lazy", "cuda"):
        _refuse_card(value.index)
    return _DEVICES.get(value, value)


class NoSuchCardError(NotSimulatedError, RuntimeError):
    """A step uses a second GPU; scripts that try for one catch a RuntimeError, as torch's own is."""


def _refuse_card(index: int) -> NoReturn:
    raise NoSuchCardError(
        f"a tensor on cuda:{index}",
        got=f"CUDA error: invalid device ordinal at {StepPosition().place().line}",
        expected="cuda:0: only cuda:0 is there",
        fix="run a script with a process for each card as the first of N, memkit dryrun --nproc-per-node N SCRIPT; "
        'otherwise train on one card: model.to("cuda:0"), or nn.DataParallel(model, device_ids=[0]).',
    )


def _refuse_layout(layout: torch.layout) -> NoReturn:
    raise NotSimulatedError(
        "a sparse tensor on a virtual GPU",
        got=f"a tensor of layout {layout} at {StepPosition().place().line}",
        expected="dense tensors on the GPU: CUDA's sparse kernels are not simulated",
        fix="keep the indices and values as dense tensors (index_add, scatter), or estimate the step for the CPU: "
        "estimate_memory_usage(model, batch, loss_fn) supports sparse tensors there.",
    )


def _with_devices(args: Any, kwargs: Any) -> tuple[Any, dict[str, Any], bool]:
    """Return an operator's arguments with Python's devices and no pinning, and whether one of them is the GPU."""
    names_card = False
    if kwargs:
        kwargs = {name: _as_cuda(value) for name, value in kwargs.items() if name != "pin_memory"}
        names_card = kwargs.get("device") == CARD
    for arg in args:
        if type(arg) is _Device:
            args = tuple(map(_as_cuda, args))
            return args, kwargs, names_card or any(type(each) is _Device and each == CARD for each in args)
    return args, kwargs, names_card


def _for_autograd(device: torch.device) -> torch.device:
    return torch.device("lazy", device.index or 0) if device.type in ("cuda", "lazy") else device


def _refuse_mixed(func: Any, args: Sequence[Any], note_original: Callable[[Tensor], None] = lambda _: None) -> None:
    """Refuse tensors on the card together with others on the host, as kernels do.

    A number in a tensor on the host may go with tensors on the card, and rows on the card may be chosen by places on
    the host.

    Raises:
        RuntimeError: As a card's: "Expected all tensors to be on the same device".
    """
    if func in aten.INDEXING:
        args = (args[0], *args[2:3]) if args[0].is_cuda else args
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    first = next((each for each in tensors if each.is_cuda), None)
    other = next((each for each in tensors if not each.is_cuda and (each.dim() or each is tensors[0])), None)
    if first is not None and other is not None:
        note_original(other)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {CARD} and "
            f"{other.device}! (when {func} was given tensors of shape {tuple(first.shape)} and {tuple(other.shape)})"
        )


def _writes_to_host(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator writes into a tensor that has data; what is on the card may only be copied to it."""
    is_real = bool(args) and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor)
    writes = is_real and schema_of(func).is_mutable
    if writes and func not in _COPYING:
        _refuse_mixed(func, args)
    return writes


def _is_large_filling(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this makes a large floating point host tensor from nothing but its size."""
    size = args[0] if args else kwargs.get("size")
    if not isinstance(size, (list, tuple)) or not all(isinstance(length, int) for length in size):
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    if not dtype.is_floating_point or math.prod(size) * dtype.itemsize <= _MOST_HOST_BYTES:
        return False
    return torch.utils.data.get_worker_info() is None  # a worker of a DataLoader builds batches, not models


# ----------------------------------------------------------------------------------------------- operators


def is_undivided(func: Any) -> bool:
    """Whether an operator that reaches a mode is composite: only inference_mode leaves it undecomposed."""
    return torch.is_inference_mode_enabled() and _has_parts(func)


def run_divided(func: Any) -> Callable[..., Any]:
    """Return a function that runs a composite operator's parts on the GPU."""
    is_own = has_kernel(func, "PrivateUse1")
    key = DispatchKey.PrivateUse1 if is_own else DispatchKey.CompositeImplicitAutograd
    return lambda *args, **kwargs: run_kernel_of(func, key, args, kwargs)


@cache
def _has_parts(func: Any) -> bool:
    is_other = func is torch.ops.prim.device.default or func in (*_WHOLE, *aten.FUSED_RMS_NORM)
    return not is_other and has_kernel(func, "CompositeImplicitAutograd")


def _whole(rules: Rules) -> tuple[Any, ...]:
    return (*_WHOLE, *aten.FUSED_RMS_NORM) if rules.has_fused_rms_norm else _WHOLE


@contextmanager
def _cuda_operators(capability: tuple[int, int], rules: Rules) -> Iterator[torch.library.Library]:
    """Make the GPU's tensors use the operators that they would use on a GPU of this compute capability."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's own
    fallthrough = _passing("AutogradPrivateUse1")
    # The fast path is one operator for a whole inference layer; separate operators show its internal memory.
    fused_layers = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        for name, kernel in (
            ("scaled_dot_product_attention", partial(attend, capability, rules)),
            ("softmax.int", _softmax(aten.softmax)),
            ("log_softmax.int", _softmax(aten.log_softmax)),
            ("batch_norm", _batch_norm),
            ("linear", _linear),
            *((name, partial(run, capability, rules)) for name, run in LAYERS.items()),
        ):
            library.impl(name, kernel, "AutogradPrivateUse1")  # type: ignore[no-untyped-call]  # torch's own
            # Without autograd, as in inference_mode:
            library.impl(name, kernel, "PrivateUse1")  # type: ignore[no-untyped-call]  # torch's own
        for operator in _whole(rules):
            library.impl(operator, _never_called, "PrivateUse1")  # type: ignore[no-untyped-call]  # torch's own
        yield library
    finally:
        torch.backends.mha.set_fastpath_enabled(fused_layers)
        remove_kernels(library)
        remove_kernels(fallthrough)


def _passing(key: str) -> torch.library.Library:
    """Let operators without a kernel for a dispatch key fall through; for autograd torch does so, except 2.8."""
    library = torch.library.Library("_", "IMPL", key)  # type: ignore[no-untyped-call]  # torch's own
    if not has_fallback(getattr(DispatchKey, key)):
        library.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]  # torch's own
    return library


def _never_called(*_: Any, **__: Any) -> Any:
    """Serve as a kernel whose presence keeps PyTorch from decomposing its operator; the mode answers before it."""


def _batch_norm(
    x: Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,  # noqa: FBT001
    momentum: float,
    eps: float,
    *_: Any,
) -> Any:
    """`_batch_norm_impl_index`: cuDNN gets, and saves for the backward, a contiguous copy of the input if needed."""
    if _is_for_cudnn(x, weight, bias, mean, var, training=training):
        x = x.contiguous(memory_format=memory_format_of(x))
        return torch.cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps)[0]
    return torch.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)[0]


def _is_for_cudnn(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *, training: bool) -> bool:
    """`_select_batch_norm_backend`."""
    has_weights = weight is not None and bias is not None
    has_statistics = mean is not None and var is not None
    return (
        has_weights
        and torch.bfloat16 not in (x.dtype, weight.dtype)
        and (x.dtype is not torch.float16 or weight.dtype is torch.float32)
        and (has_statistics or (mean is None and var is None and training))
        and x.dim() >= 3
        and x.shape[0] <= (880801 if training else 65535)
        and 0 < x.numel() < 2**31 - 1
        and torch.backends.cudnn.enabled
    )


def convolution_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """`cudnn_conv_suggest_memory_format`: channels last if either tensor is; CUDA's own kernels know no such order."""
    if torch.backends.cudnn.enabled and torch.float64 not in (x.dtype, weight.dtype):
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
        if last in (memory_format_of(x), memory_format_of(weight)):
            return last
    return torch.contiguous_format


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`at::linear`, which adds a bias in place, but out of place for subclasses such as tensors without data."""
    if bias is None or weight.dim() != 2:
        out = torch.matmul(x, weight.t())
        return out if bias is None else out.add_(bias)
    if x.dim() == 2:
        return torch.addmm(bias, x, weight.t())
    if x.is_contiguous() and x.dim() > 2 and bias.dim() == 1:
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
    return torch.matmul(x, weight.t()).add_(bias)


def _softmax(inner: Any) -> Callable[..., Any]:
    """`at::softmax` on CUDA: the kernel itself widens float16; inputs of any other differing dtype are cast first."""

    def kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        widens = x.dtype is torch.float16 and dtype is torch.float32
        converted = x if widens or dtype is None else x.to(dtype)
        out: Tensor = inner(converted, dim, widens)
        return out

    return kernel


# ------------------------------------------------------------------------------------------------- the whole setup


@contextmanager
def on_cuda(
    tensors: CudaTensors, capability: tuple[int, int], rules: Rules, answers: Sequence[Patches]
) -> Iterator[Sequence[Patches]]:
    """Set up everything that makes PyTorch treat a mode's tensors as CUDA tensors; enter the mode inside.

    Yields:
        The patches to torch.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise StateError(
            "with VirtualGPU(...)",
            got="a virtual GPU inside another one, or in another thread at the same time",
            expected="one virtual GPU at a time in a process",
            fix="leave the first block before you enter the next one.",
        )
    with ExitStack() as stack:
        stack.callback(_one_at_a_time.release)
        stack.callback(tensors.close)
        stack.enter_context(_keeping_defaults())
        moving = stack.enter_context(_moving_modules())
        library = stack.enter_context(_cuda_operators(capability, rules))
        functions = _autocast_functions(library, rules, stack)
        casting = Patches(torch, "autocast for `cuda` follows CUDA's rules", functions)
        patches = (*moving, *tensor_patches(), casting, *answers)
        stack.enter_context(_still_scriptable(patches))
        stack.enter_context(applied(patches))
        for types in LISTS_OF_TYPES:
            if FakeTensor not in types:
                types.append(FakeTensor)
                stack.callback(types.remove, FakeTensor)
        yield patches


@contextmanager
def _still_scriptable(patches: Sequence[Patches]) -> Iterator[None]:
    """Let `torch.jit.script` treat patched functions of torch as the original operators."""
    table = scriptable()
    added = {
        id(value): table[id(vars(each.owner)[name])]
        for each in patches
        for name, value in each.values.items()
        if id(vars(each.owner).get(name)) in table
    }
    table.update(added)
    try:
        yield
    finally:
        for key in added:
            del table[key]


@contextmanager
def _keeping_defaults() -> Iterator[None]:
    """Restore the default dtype and device, such as ``torch.set_default_device("cuda")`` within the block."""
    dtype, context = torch.get_default_dtype(), device_context()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if device_context() is not context:
            set_default_device(None if context is None else context.device)


@contextmanager
def _moving_modules() -> Iterator[list[Patches]]:
    """Keep parameters the same objects when their module moves to the GPU, and restore their data afterwards.

    A parameter keeps its previous tensor, and a module's buffers are kept as long as the module: if these die in the
    meantime, their memory is freed with them.
    """
    apply, load = getattr(nn.Module, APPLY), getattr(nn.Module, LOAD)
    buffers: WeakKeyDictionary[nn.Module, dict[str, Tensor | None]] = WeakKeyDictionary()

    @wraps(apply)
    def applied_to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not any(isinstance(buffer, FakeTensor) for buffer in buffers_of(module).values()):
            buffers.setdefault(module, buffers_of(module).copy())
        with moved.keeping_objects():
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
    moved = _Moved()
    try:
        yield [
            Patches(torch.utils, "parameters stay the same objects when they move", {"swap_tensors": moved.swap}),
            Patches(Tensor, "`p.data = p.data.cuda()`", {"data": property(DATA_OF.__get__, moved.set_data)}),
            Patches(
                nn.Module, "modules from outside get their data back afterwards", {APPLY: applied_to, LOAD: loaded}
            ),
        ]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped_before)
        moved.put_back()
        for module, content in buffers.items():
            buffers_of(module).update(content)


class _Moved:
    """Tensors that were swapped for others and keep their previous tensor as an attribute."""

    def __init__(self) -> None:
        self._has_moved = self._keeps_objects = False

    @contextmanager
    def keeping_objects(self) -> Iterator[None]:
        """Let a swap stand for ``tensor.data = other``, through which a module's parameters move on a real GPU."""
        before, self._keeps_objects = self._keeps_objects, True
        try:
            yield
        finally:
            self._keeps_objects = before

    def swap(self, tensor: Tensor, other: Tensor) -> None:
        """Do the same as `torch.utils.swap_tensors`."""
        is_moved = isinstance(other, FakeTensor) and not isinstance(tensor, FakeTensor)
        data = vars(tensor).pop(ON_HOST, None)
        data = other if data is None and is_moved else data
        (_swap_data if self._keeps_objects else _swap)(tensor, other)
        vars(other).pop(ON_HOST, None)
        if data is not None:
            setattr(tensor, ON_HOST, data)
            self._has_moved = True

    def set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Do the same as ``tensor.data = value``."""
        if tensor.device == value.device:
            set_data(tensor, value)
            return
        gradient, tensor.grad = tensor.grad, None
        is_parameter, wants_grad, other = isinstance(tensor, nn.Parameter), tensor.requires_grad, value.detach()
        with self.keeping_objects():
            self.swap(tensor, nn.Parameter(other, wants_grad) if is_parameter else other.requires_grad_(wants_grad))
        if gradient is not None and gradient.device == value.device:
            tensor.grad = gradient

    def put_back(self) -> None:
        """Turn the swapped tensors back into tensors with data."""
        if not self._has_moved:
            return
        # The list of all objects is gone before anything dies: up to 2.10 a storage in it would outlive its memory.
        moved = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and ON_HOST in vars(each)]
        for each in moved:
            each.grad = None
            _swap(each, vars(each).pop(ON_HOST))


def _swap_data(tensor: Tensor, other: Tensor) -> None:
    """Swap, but leave the tensor its hooks, and the attributes that it was given, as ``tensor.data = other`` does."""
    given, hooks, after = attributes_of_user(tensor), hooks_of(tensor), accumulate_hooks(tensor)
    _swap(tensor, other)
    vars(tensor).update({name: value for name, value in given.items() if name not in vars(tensor)})
    if hooks is not None:
        set_hooks(tensor, hooks)
    if after:
        set_accumulate_hooks(tensor, after)


def _swap(tensor: Tensor, other: Tensor) -> None:
    """Swap as `torch.utils.swap_tensors` does, even if views, graphs or weak references hold the tensor.

    On a real GPU a parameter moves through `Tensor.data`, which does not check for other holders either.
    """
    own, others = attributes_of(tensor), attributes_of(other)  # a DTensor keeps its shard in a slot
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    set_attributes(tensor, others)
    set_attributes(other, own)
    swap_tensors(tensor, other)


def tensor_patches() -> list[Patches]:
    """Make the patches to torch through which its Python side treats these tensors as CUDA tensors."""
    make_subclass, make_wrapper, to = getattr(Tensor, MAKE_SUBCLASS), getattr(Tensor, MAKE_WRAPPER), Tensor.to

    def named(self: FakeTensor) -> torch.device:
        if self.fake_mode.in_kernel_invocation:
            return _META
        device: torch.device = self.fake_device
        return _DEVICES.get(device, device)

    @wraps(make_subclass)
    def private(cls: type, data: Tensor, requires_grad: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        device = kwargs.get("device_for_backend_keys")
        if device is not None and device.type == "lazy":
            kwargs["device_for_backend_keys"] = torch.device(private_name(), device.index or 0)
        return make_subclass(cls, data, requires_grad, **kwargs)

    @wraps(make_wrapper)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:  # autograd compares the device of a gradient with its parameter's
            kwargs["device"] = _as_lazy(kwargs["device"])
        return make_wrapper(*args, **kwargs)

    @wraps(to)
    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(_as_lazy(arg) if _is_device(arg) else arg for arg in args)
        if kwargs.get("device") is not None:
            kwargs["device"] = _as_lazy(kwargs["device"])
        return to(self, *args, **kwargs)

    def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:  # noqa: FBT001, FBT002
        return to(self, _as_lazy("cuda" if device is None else device), non_blocking=non_blocking, **kwargs)

    on_tensor = {
        MAKE_SUBCLASS: staticmethod(private),
        MAKE_WRAPPER: staticmethod(wrapper),
        "as_subclass": _subclassing(Tensor.as_subclass),
        "to": moved,
        "cuda": cuda,
        "is_cuda": property(lambda self: self.device.type == "cuda"),
    }
    lists = {name: _listing([*getattr(foreach, name)(), "lazy"]) for name in LISTS_OF_DEVICES}
    return [
        Patches(FakeTensor, "tensors may be on a device that does not exist", _device_functions()),
        Patches(fake_tensor, "operators without a shape function run on the host", {RUN_FALLBACK: _fallback()}),
        Patches(Tensor, "`.to` and `.cuda` reach the virtual GPU", on_tensor),
        Patches(FakeTensor, "tensors say `cuda`", {"device": property(named)}),
        Patches(foreach, "optimizers step several tensors at once, as on CUDA", lists),
    ]


def _subclassing(as_subclass: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(as_subclass)
    def subclassed(self: Tensor, cls: type[Tensor]) -> Any:
        if not isinstance(self, FakeTensor):
            return as_subclass(self, cls)
        alias = self.view_as(self)
        if issubclass(FakeTensor, cls):
            alias.__class__ = FakeTensor
        else:
            alias.__class__ = cls if issubclass(cls, FakeTensor) else _without_data_of(cls)
        return alias

    return subclassed


class _Converting(FakeTensor):
    """Lets `__torch_function__` of a subclass with its own behavior return results of that class, as `Tensor` does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})  # type: ignore[attr-defined]


@cache
def _without_data_of(cls: type[Tensor]) -> type[FakeTensor]:
    """Make the dataless counterpart of a user's subclass of `Tensor`."""
    return type(cls.__name__, (cls, _Converting), {"__module__": cls.__module__})


def _device_functions() -> dict[str, Any]:
    """Make patches that let tensors without data keep a simulated device; other devices are normalized as usual."""
    functions: dict[str, Any] = {}
    if NORMALIZE_DEVICE is not None:
        normalize = getattr(FakeTensor, NORMALIZE_DEVICE)

        @wraps(normalize)
        def normalized(device: torch.device) -> torch.device:
            named = _for_autograd(device)
            return named if named is not device else normalize(device)

        functions[NORMALIZE_DEVICE] = staticmethod(normalized)
    functions["__new__"] = staticmethod(_making(FakeTensor.__new__))
    return functions


def _making(new: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(new)
    def made(cls: type, first: Any, *others: Any, **options: Any) -> Any:
        is_mode = not isinstance(first, Tensor)
        if not is_mode and options.keys() <= {"requires_grad"} and len(others) < 2:
            return nn.Parameter(first, *others, **options)  # ``type(parameter)(value)``, as code makes a Parameter
        if is_mode and IS_MADE_WITH_DEVICE:
            elem, device, *rest = others
            others = elem, _for_autograd(torch.device(device)), *rest
        return new(cls, first, *others, **options)

    return made


def _fallback() -> Callable[..., Any]:
    """Run operators without a shape function on the CPU; torch runs them on zeros, on the device itself."""
    run: Callable[..., Any] = getattr(fake_tensor, RUN_FALLBACK)

    def moved(value: Any, device: torch.device) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        with no_dispatch():
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return FakeTensor(value.fake_mode, like, device)

    @wraps(run)
    def run_on_host(mode: Any, func: Any, flat_args: Sequence[Any], *args: Any) -> Any:
        if not any(isinstance(each, FakeTensor) and each.fake_device.type == "lazy" for each in flat_args):
            return run(mode, func, flat_args, *args)
        out = run(mode, func, [moved(each, torch.device("cpu")) for each in flat_args], *args)
        return tree_map(lambda value: moved(value, _LAZY), out)

    return run_on_host


def _listing(devices: list[str]) -> Callable[[], list[str]]:
    return lambda: devices


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) or type(value) is int


def _as_lazy(device: Any) -> torch.device:
    if isinstance(device, int):
        return torch.device("lazy", device)
    return _for_autograd(torch.device(device))


def _autocast_functions(library: torch.library.Library, rules: Rules, stack: ExitStack) -> dict[str, Any]:
    """Map autocast for ``cuda`` to the private key, whose kernels act like CUDA's and exist from the first block on."""
    casts: list[CastCache] = []
    was_enabled, clear_cache, set_enabled = (
        torch.is_autocast_enabled,
        torch.clear_autocast_cache,
        torch.set_autocast_enabled,
    )

    def is_enabled(device_type: str = "cuda") -> bool:
        return was_enabled(_renamed(device_type))

    @wraps(set_enabled)
    def enable(*args: Any, **kwargs: Any) -> None:
        if not casts:
            casts.append(CastCache())
            stack.callback(remove_kernels, _passing("AutocastPrivateUse1"))
            for name, kernel in autocast_kernels(casts[0], rules.version).items():
                library.impl(name, kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]  # torch's own
        set_enabled(*map(_renamed, args), **kwargs)

    def clear() -> None:
        for each in casts:
            each.clear()
        clear_cache()

    return {
        "is_autocast_enabled": is_enabled,
        "clear_autocast_cache": clear,
        "set_autocast_enabled": enable,
        "get_autocast_dtype": _of_card(torch.get_autocast_dtype),
        "set_autocast_dtype": _of_card(torch.set_autocast_dtype),
    }


def _of_card(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_renamed, args), **kwargs)

    return call


def _renamed(argument: Any) -> Any:
    return private_name() if isinstance(argument, str) and argument.startswith("cuda") else argument
