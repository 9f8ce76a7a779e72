"""Attention for the virtual GPU: choose CUDA's kernel for a call as sdp_utils.cpp and attention.cpp do."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from memkit._torch import aten
from memkit._torch.cuda import Rules

_LOW = (torch.float16, torch.bfloat16)


class Attention(NamedTuple):
    """The arguments of a `scaled_dot_product_attention` call that determine its kernel."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    enable_gqa: bool

    @property
    def needs_gradient(self) -> bool:
        """Whether the kernel saves tensors for its backward."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self[:3])


def attend(
    capability: tuple[int, int],
    rules: Rules,
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
    """`scaled_dot_product_attention` as CUDA dispatches it (sdp_utils.cpp and attention.cpp)."""
    call = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if query.dim() == key.dim() == value.dim() == 3 and rules.attends_unbatched:
        q, k, v = (each.unsqueeze(0) for each in (query, key, value))
        options = attn_mask, dropout_p, is_causal
        return attend(capability, rules, q, k, v, *options, scale=scale, enable_gqa=enable_gqa).squeeze(0)
    backend = attention_backend(call, capability, rules)
    if backend == "flash":
        return _flash(call, 1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    mask = _additive(attn_mask, query.dtype, rules)
    if backend == "math":
        # The fused float path does not exist on CUDA: half precision is computed in float32 by the operator itself.
        out: Tensor = aten.math_attention(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return out
    if mask is not None:
        shape = *query.shape[:-1], key.shape[-2]
        mask = _aligned(mask, shape, rules) if backend == "efficient" else mask.expand(*shape)
    operator = aten.efficient_attention if backend == "efficient" else aten.cudnn_attention
    trailing = () if backend == "efficient" else (False,)
    fused: Tensor = operator(
        query, key, value, mask, call.needs_gradient, dropout_p, is_causal, *trailing, scale=scale
    )[0]
    return fused


def attention_backend(call: Attention, capability: tuple[int, int], rules: Rules) -> str:
    """Return "cudnn", "flash", "efficient" or "math" for a call, in PyTorch's order of preference."""
    if call.query.dim() != 4 or 0 in (call.query.shape[-2], call.key.shape[-2]) or capability > (12, 1):
        return "math"
    choices = {
        "flash": _enabled("flash") and _flash_takes(call, capability),
        "efficient": _enabled("mem_efficient") and _efficient_takes(call, capability, rules),
        "cudnn": _enabled("cudnn") and _cudnn_takes(call, capability, rules),
        "math": _enabled("math"),
    }
    prefers_cudnn = any(
        capability[0] == major and minor in (None, capability[1]) for major, minor in rules.prefers_cudnn
    )
    order = ("cudnn", "flash", "efficient", "math") if prefers_cudnn else ("flash", "efficient", "math", "cudnn")
    return next((name for name in order if choices[name]), "math")


def _enabled(name: str) -> bool:
    return bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")())


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


def _same_heads(call: Attention) -> bool:
    return _heads_match(call) and call.query.shape[1] == call.key.shape[1] == call.value.shape[1]


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


def _efficient_takes(call: Attention, capability: tuple[int, int], rules: Rules) -> bool:
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
        and (_heads_match(call) if rules.attends_unbatched or not call.enable_gqa else _same_heads(call))
        and _last_stride_is_one(call, ignore_single=False)
    )


def _cudnn_takes(call: Attention, capability: tuple[int, int], rules: Rules) -> bool:
    widths = call.query.shape[-1], call.value.shape[-1]
    return (
        capability >= (8, 0)
        and _same_dtype(call, _half_types(capability))
        and not torch.are_deterministic_algorithms_enabled()
        and max(widths) <= 128
        and all(width % 8 == 0 for width in widths)
        and ((call.dropout * 16).is_integer() or not rules.checks_cudnn_dropout)
        and call.key.shape[-2] != 1
        and (call.dropout == 0 or call.query.shape[-2] != 1)
        and _last_stride_is_one(call, ignore_single=True)
    )


def _flash(call: Attention, scale: float) -> Tensor:
    width = call.query.shape[-1]
    missing = -width % 8
    query, key, value = (pad(tensor, (0, missing)) if missing else tensor for tensor in call[:3])
    out: Tensor = aten.flash_attention(
        query, key, value, call.dropout, call.is_causal, return_debug_mask=False, scale=scale
    )[0]
    return out[..., :width] if missing else out


def _additive(mask: Tensor | None, dtype: torch.dtype, rules: Rules) -> Tensor | None:
    """`convert_boolean_attn_mask`, at the mask's own size."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    if rules.makes_masks_at_once:
        return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _aligned(mask: Tensor, shape: tuple[int, ...], rules: Rules) -> Tensor:
    """`preprocess_mask`: rows are aligned to 8 numbers in memory, and the mask is expanded without a copy."""
    if rules.pads_masks_first:
        is_aligned = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
        return (mask if is_aligned else _padded(mask, 8)).expand(*shape)
    expanded = mask.expand(*shape)
    if expanded.shape[-1] % 16:
        return _padded(expanded, 16)
    return expanded.contiguous() if any(stride % 16 for stride in expanded.stride()[:-1]) else expanded


def _padded(mask: Tensor, alignment: int) -> Tensor:
    width = mask.shape[-1]
    return pad(mask, (0, alignment - width % alignment))[..., :width]
