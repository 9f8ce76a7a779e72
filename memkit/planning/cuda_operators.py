"""Operators as CUDA takes them where a composite one decides by device: autocast, attention, softmax of half precision.

The virtual card's tensors carry PyTorch's "private use" dispatch key. Kernels for that key alone are registered while
`cuda_operators` is entered and taken away afterwards, so that nobody else's tensors are touched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._C import _ExcludeDispatchKeyGuard as without_keys
from torch._C import _get_privateuse1_backend_name as private_name
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from memkit._errors import StateError

Kernel: TypeAlias = Callable[..., Any]
_aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)
_NO_AUTOCAST = DispatchKeySet(DispatchKey.AutocastPrivateUse1)


class CastCache:
    """Casts of weights that autocast keeps until its outermost block ends."""

    def __init__(self) -> None:
        self._casts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]  # torch's own

    def clear(self) -> None:
        """Forget all casts."""
        self._casts = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]  # torch's own

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """`at::autocast::cached_cast`: a float32 leaf that requires a gradient is cast once; others each time."""
        if not _is_eligible(value) or value.dtype is dtype:
            return value
        is_weight = value.dtype is torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        # Without gradients nothing is kept: so do the recorded allocations of inference under autocast.
        if not (is_weight and dtype in _LOW and torch.is_autocast_cache_enabled() and torch.is_grad_enabled()):
            return value.to(dtype)
        if value not in self._casts:
            self._casts[value] = value.to(dtype)
        return self._casts[value]


@contextmanager
def cuda_operators(casts: CastCache, capability: tuple[int, int]) -> Iterator[None]:
    """Let tensors of the virtual card take the operators that they would take on a card of this compute capability."""
    library = torch.library.Library("aten", "IMPL")
    fallthrough = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallthrough.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]  # torch's own
    try:
        for name, kernel in autocast_kernels(casts).items():
            library.impl(name, kernel, "AutocastPrivateUse1")
        for name, kernel in (
            ("scaled_dot_product_attention", attention(capability)),
            ("softmax.int", _softmax(_aten.softmax.int, _aten._softmax.default)),
            ("log_softmax.int", _softmax(_aten.log_softmax.int, _aten._log_softmax.default)),
        ):
            library.impl(name, kernel, "AutogradPrivateUse1")
            library.impl(name, kernel, "PrivateUse1")  # without autograd: inference_mode
        yield
    finally:
        library._destroy()
        fallthrough._destroy()


def is_undivided(func: Any) -> bool:
    """Whether a mode is asked for an operator made of others, which only inference_mode leaves undivided."""
    return torch.is_inference_mode_enabled() and _has_parts(func)


def run_divided(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the operators that it is made of on the card."""
    is_own = func.has_kernel_for_dispatch_key(DispatchKey.PrivateUse1)
    return func._op_dk(DispatchKey.PrivateUse1 if is_own else DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@cache
def _has_parts(func: Any) -> bool:
    return func is not torch.ops.prim.device.default and func.has_kernel_for_dispatch_key(
        DispatchKey.CompositeImplicitAutograd
    )


# ------------------------------------------------------------------------------------------------------- autocast


@cache
def cuda_autocast_lists() -> dict[str, tuple[str, ...]]:
    """The operators of each of CUDA's autocast policies, read from the header that PyTorch ships."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.is_file():
        raise StateError(
            "estimate for a GPU",
            got="a PyTorch without its header ATen/autocast_mode.h",
            expected="PyTorch as its wheels install it",
            fix="pip install torch; the header says which operators autocast lowers.",
        )
    text = header.read_text(encoding="utf-8").replace("\\\n", "")
    lists = {}
    for policy in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"):
        (line,) = re.findall(rf"#define AT_FORALL_{policy}\(_\)(.*)", text)
        entries = re.findall(r"_\(\s*(\w+)\s*(?:,\s*(\w+)\s*)?\)", line)
        lists[policy] = tuple(f"{name}.{overload}" if overload else name for name, overload in entries)
    return lists


def autocast_kernels(casts: CastCache) -> dict[str, Kernel]:
    """CUDA's autocast, operator by operator."""
    policies = {
        "LOWER_PRECISION_FP": lambda operator: _casting(
            operator, casts, lambda _: torch.get_autocast_dtype(private_name())
        ),
        "FP32": lambda operator: _casting(operator, casts, lambda _: torch.float32),
        "FP32_SET_OPT_DTYPE": _setting_dtype,
        "PROMOTE": lambda operator: _casting(operator, casts, _widest),
    }
    kernels = {
        name: make(_operator(name))
        for policy, make in policies.items()
        for name in cuda_autocast_lists()[policy]
        if _operator(name) is not None
    }
    for name in ("norm.Scalar", "norm.ScalarOpt_dim"):  # their redispatch has another signature
        kernels[name] = _norm_in_float32(_operator(name))
    return kernels


def _operator(name: str) -> Any:
    """The overload, or None where this PyTorch lacks it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet, None), overload or "default", None)


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type != "cpu"
    )


def _casting(operator: Any, casts: CastCache, choose: Callable[[Any], torch.dtype]) -> Kernel:
    @wraps(operator)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((args, kwargs))
        with without_keys(_NO_AUTOCAST):
            args, kwargs = tree_map(lambda value: casts.cast(value, dtype), (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _widest(arguments: Any) -> torch.dtype:
    has_float32 = any(leaf.dtype is torch.float32 for leaf in tree_leaves(arguments) if _is_eligible(leaf))
    return torch.float32 if has_float32 else torch.get_autocast_dtype(private_name())


def _setting_dtype(operator: Any) -> Kernel:
    @wraps(operator)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        num_positional = sum(not argument.kwarg_only for argument in operator._schema.arguments)
        has_dtype = kwargs.get("dtype") is not None or (
            len(args) == num_positional and isinstance(args[-1], torch.dtype)
        )
        if _is_eligible(args[0]) and not has_dtype:
            position = [argument.name for argument in operator._schema.arguments].index("dtype")
            args = args[:position]
            kwargs = {**kwargs, "dtype": torch.float32}
        with without_keys(_NO_AUTOCAST):
            return operator(*args, **kwargs)

    return kernel


def _norm_in_float32(operator: Any) -> Kernel:
    @wraps(operator)
    def kernel(x: Tensor, p: Any = 2, *args: Any, **kwargs: Any) -> Any:
        with without_keys(_NO_AUTOCAST):
            if not _is_eligible(x):
                return operator(x, p, *args, **kwargs)
            dim, keepdim = (*args, *kwargs.values(), *((), False)[len(args) + len(kwargs) :])
            return _aten.norm.ScalarOpt_dim_dtype(x, p, dim, keepdim, dtype=torch.float32)

    return kernel


# ------------------------------------------------------------------------------------------------------- softmax


def _softmax(_: Any, inner: Any) -> Kernel:
    """`at::softmax` on CUDA: the kernel itself widens float16; what else has another dtype is converted first."""

    def kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        widens = x.dtype is torch.float16 and dtype is torch.float32
        converted = x if widens or dtype is None else x.to(dtype)
        out: Tensor = inner(converted, dim, widens)
        return out

    return kernel


# ------------------------------------------------------------------------------------------------------- attention


class Attention(NamedTuple):
    """The arguments of a call of `scaled_dot_product_attention` that decide which kernel takes it."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    enable_gqa: bool

    @property
    def needs_gradient(self) -> bool:
        """Whether the kernel keeps what its backward needs."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self[:3])


def attention(capability: tuple[int, int]) -> Kernel:
    """`scaled_dot_product_attention` as CUDA dispatches it (sdp_utils.cpp and attention.cpp of PyTorch 2.13)."""

    def kernel(  # noqa: PLR0917  # the operator's own signature
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        backend = attention_backend(call, capability)
        if backend == "flash":
            return _flash(call, 1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        mask = _additive(attn_mask, query.dtype)
        if backend == "math":
            # The fused float path does not exist on CUDA: half precision is computed in float32 by the operator itself.
            out: Tensor = _aten._scaled_dot_product_attention_math(
                query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
            return out
        if mask is not None:
            mask = _aligned(mask.expand(*query.shape[:-1], key.shape[-2]))
        operator = _aten._scaled_dot_product_cudnn_attention
        if backend == "efficient":
            operator = _aten._scaled_dot_product_efficient_attention
        trailing = () if backend == "efficient" else (False,)
        out = operator(query, key, value, mask, call.needs_gradient, dropout_p, is_causal, *trailing, scale=scale)[0]
        return out

    return kernel


def attention_backend(call: Attention, capability: tuple[int, int]) -> str:
    """Which of "cudnn", "flash", "efficient" and "math" takes a call, in PyTorch's order of preference."""
    backends = torch.backends.cuda
    prefers_cudnn = capability[0] in (9, 10)
    if call.query.dim() != 4 or 0 in (call.query.shape[-2], call.key.shape[-2]) or capability > (12, 1):
        return "math"
    choices = {
        "flash": backends.flash_sdp_enabled() and _flash_takes(call, capability),
        "efficient": backends.mem_efficient_sdp_enabled() and _efficient_takes(call, capability),
        "cudnn": backends.cudnn_sdp_enabled() and _cudnn_takes(call, capability),
    }
    order = ("cudnn", "flash", "efficient") if prefers_cudnn else ("flash", "efficient", "cudnn")
    return next((name for name in order if choices[name]), "math")


def _half_types(capability: tuple[int, int]) -> tuple[torch.dtype, ...]:
    return _LOW if capability >= (8, 0) else (torch.float16,)


def _same_dtype(call: Attention, dtypes: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype in dtypes and call.query.dtype is call.key.dtype is call.value.dtype


def _last_stride_is_one(call: Attention, *, ignore_single: bool) -> bool:
    mask = () if call.mask is None else (call.mask,)
    fits = [t.stride(-1) == 1 or (ignore_single and t.shape[-1] == 1) for t in (*call[:3], *mask)]
    return all(fits)


def _heads_match(call: Attention) -> bool:
    (batch, heads), (_, key_heads), value_heads = call.query.shape[:2], call.key.shape[:2], call.value.shape[1]
    if not batch == call.key.shape[0] == call.value.shape[0]:
        return False
    if call.enable_gqa:
        return key_heads == value_heads and heads % key_heads == 0
    return bool(heads == key_heads == value_heads)


def _flash_takes(call: Attention, capability: tuple[int, int]) -> bool:
    width = call.query.shape[-1]
    is_wide = width > 192 and not (call.dropout == 0 and width > 224)
    return (
        capability >= (8, 0)
        and call.mask is None
        and _same_dtype(call, _half_types(capability))
        and width == call.key.shape[-1] == call.value.shape[-1]
        and width <= 256
        and not (call.needs_gradient and is_wide and ((8, 6) <= capability <= (8, 9) or capability >= (12, 0)))
        and not (call.is_causal and call.query.shape[-2] != call.key.shape[-2])
        and _heads_match(call)
        and _last_stride_is_one(call, ignore_single=True)
    )


def _efficient_takes(call: Attention, capability: tuple[int, int]) -> bool:
    is_half = call.query.dtype in _LOW
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and is_half):
        alignment = max(alignment, 8 if is_half else 4)
    offsets = [tensor.storage_offset() * tensor.element_size() for tensor in call[:3]]
    return (
        _same_dtype(call, (torch.float32, *_half_types(capability)))
        and call.query.shape[-1] == call.key.shape[-1]
        and call.query.shape[-1] % alignment == call.value.shape[-1] % alignment == 0
        and (capability < (8, 0) or all(o % (alignment * call.query.element_size()) == 0 for o in offsets))
        and _heads_match(call)
        and _last_stride_is_one(call, ignore_single=False)
    )


def _cudnn_takes(call: Attention, capability: tuple[int, int]) -> bool:
    widths = call.query.shape[-1], call.value.shape[-1]
    return (
        capability >= (8, 0)
        and _same_dtype(call, _half_types(capability))
        and not torch.are_deterministic_algorithms_enabled()
        and max(widths) <= 128
        and all(width % 8 == 0 for width in widths)
        and (call.dropout * 16).is_integer()
        and call.key.shape[-2] != 1
        and (call.dropout == 0 or call.query.shape[-2] != 1)
        and _last_stride_is_one(call, ignore_single=True)
    )


def _flash(call: Attention, scale: float) -> Tensor:
    width = call.query.shape[-1]
    missing = -width % 8
    query, key, value = (pad(tensor, (0, missing)) if missing else tensor for tensor in call[:3])
    out: Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout, call.is_causal, False, scale=scale
    )[0]
    return out[..., :width] if missing else out


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`convert_boolean_attn_mask`."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)


def _aligned(mask: Tensor) -> Tensor:
    """`preprocess_mask`: rows of a multiple of 16 numbers in memory."""
    width = mask.shape[-1]
    if width % 16:
        return pad(mask, (0, 16 - width % 16))[..., :width]
    return mask.contiguous() if any(stride % 16 for stride in mask.stride()[:-1]) else mask
