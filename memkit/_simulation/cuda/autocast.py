"""CUDA's autocast for the virtual GPU: the precision of each operator, and the cache of cast weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from memkit._simulation.cuda.recurrent import RecurrentCall
from memkit._torch import aten
from memkit._torch.autocast import kernels_of
from memkit._torch.dispatch import DispatchKey, DispatchKeySet, private_backend_name as private_name, without_keys
from memkit._torch.operators import schema_of
from memkit._torch.pytree import tree_leaves, tree_map
from memkit._torch.tensors import is_view
from memkit._torch.versions import refuse_unknown

Kernel: TypeAlias = Callable[..., Any]
Policy: TypeAlias = Literal["lower precision", "float32", "float32 by dtype", "widest"]
_aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)
_NO_AUTOCAST = DispatchKeySet(DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]  # not in torch's stubs


class CastCache:
    """Casts of weights that autocast keeps until its outermost block ends."""

    def __init__(self) -> None:
        self._casts: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def clear(self) -> None:
        """Forget all casts."""
        self._casts = WeakIdKeyDictionary()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """`at::autocast::cached_cast`: a float32 leaf that requires a gradient is cast once; others each time."""
        if not _is_eligible(value) or value.dtype is dtype:
            return value
        is_weight = value.dtype is torch.float32 and value.requires_grad and value.is_leaf and not is_view(value)
        # Nothing is kept in inference mode, as recorded allocations of inference under autocast show.
        is_kept = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
        if not (is_weight and dtype in _LOW and is_kept):
            return value.to(dtype)
        if value not in self._casts or (torch.is_grad_enabled() and not self._casts[value].requires_grad):
            self._casts[value] = value.to(dtype)
        return self._casts[value]


def autocast_kernels(casts: CastCache, version: tuple[int, int]) -> dict[str, Kernel]:
    """Return the kernels of CUDA's autocast, by operator."""
    policies: dict[Policy, Callable[[Any], Kernel]] = {
        "lower precision": lambda operator: _casting(
            operator, casts, lambda _: torch.get_autocast_dtype(private_name())
        ),
        "float32": lambda operator: _casting(operator, casts, lambda _: torch.float32),
        "float32 by dtype": _setting_dtype,
        "widest": lambda operator: _casting(operator, casts, _widest),
    }
    kernels = {
        name: policies[policy](_operator(name))
        for policy, names in operators_by_policy(version).items()
        for name in names
        if _operator(name) is not None
    }
    for name in ("norm.Scalar", "norm.ScalarOpt_dim"):  # their redispatch has another signature
        kernels[name] = _norm_in_float32(_operator(name))
    kernels["_cudnn_rnn"] = _reflattening(casts)
    kernels["binary_cross_entropy"] = _banned(_operator("binary_cross_entropy"))
    return kernels | {name: _unknown(name) for name in operators_without_a_rule() if _operator(name) is not None}


def _banned(operator: Any) -> Kernel:
    @wraps(operator)
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
            "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
            "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
            "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
            "safe to autocast."
        )

    return kernel


def _reflattening(casts: CastCache) -> Kernel:
    """`_cudnn_rnn_cast_reflatten` in AutocastRNN.cpp: float16 whatever autocast's own, with weights in a new buffer."""

    def kernel(x: Tensor, weights: Sequence[Tensor], weights_per_layer: int, buffer: Any, *others: Any) -> Any:
        hx, cx, *options = others
        with without_keys(_NO_AUTOCAST):
            if _is_eligible(weights[0]) and weights[0].dtype is not torch.float16:
                weights, buffer = _flattened(weights, RecurrentCall(x, weights, weights_per_layer, *others[:-1]))
            cx, hx, x = (casts.cast(each, torch.float16) for each in (cx, hx, x))
            return aten.cudnn_rnn(x, weights, weights_per_layer, buffer, hx, cx, *options)

    return kernel


def _flattened(weights: Sequence[Tensor], call: RecurrentCall) -> tuple[list[Tensor], Tensor]:
    """`copy_weights_to_flat_buf_views`: autograd follows the copies, but knows nothing of the buffer."""
    buffer = torch.zeros(call.num_weights, dtype=torch.float16, device=weights[0].device)
    views, first = [], 0
    for weight in weights:
        view = torch.empty(0, dtype=torch.float16, device=weight.device)
        view.set_(buffer.untyped_storage(), first, weight.shape, weight.stride())
        view.copy_(weight)
        views.append(view)
        first += weight.numel()
    return views, buffer


def _unknown(name: str) -> Kernel:
    def kernel(*_: Any, **__: Any) -> Any:
        refuse_unknown(f"{name} with autocast as memkit knows it", feature=f"a virtual GPU that runs {name}")

    return kernel


def _operator(name: str) -> Any:
    """Return the overload, or None if this PyTorch lacks it."""
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
            # From the last to the first: so the compiler of PyTorch's wheels, GCC, evaluates a C++ call's arguments.
            kwargs, args = tree_map(lambda value: casts.cast(value, dtype), (kwargs, args[::-1]))
            return operator(*args[::-1], **kwargs)

    return kernel


def _widest(arguments: Any) -> torch.dtype:
    has_float32 = any(leaf.dtype is torch.float32 for leaf in tree_leaves(arguments) if _is_eligible(leaf))
    return torch.float32 if has_float32 else torch.get_autocast_dtype(private_name())


def _setting_dtype(operator: Any) -> Kernel:
    @wraps(operator)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        num_positional = sum(not argument.kwarg_only for argument in schema_of(operator).arguments)
        has_dtype = kwargs.get("dtype") is not None or (
            len(args) == num_positional and isinstance(args[-1], torch.dtype)
        )
        if _is_eligible(args[0]) and not has_dtype:
            position = [argument.name for argument in schema_of(operator).arguments].index("dtype")
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
            given: list[Any] = [*args, *kwargs.values()]
            dim = given[0] if given else ()
            keepdim = len(given) > 1 and given[1]
            return _aten.norm.ScalarOpt_dim_dtype(x, p, dim, keepdim, dtype=torch.float32)

    return kernel


# ------------------------------------------------------------------------------------------------ table

_OPERATORS: dict[Policy, str] = {
    "lower precision": """
        _convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell
        _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution einsum gru_cell
        linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell
        scaled_dot_product_attention
    """,
    "float32": """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
        cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss
        kl_div l1_loss layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim pdist
        poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rsqrt sinh
        smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d
        upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """,
    "float32 by dtype": """
        cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod
        prod.dim_int softmax.int sum sum.dim_IntList
        cumprod.dimname cumsum.dimname log_softmax.Dimname prod.dim_Dimname softmax.Dimname sum.dim_DimnameList
    """,
    "widest": """
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
    """,
}
_SINCE: dict[str, tuple[Policy, tuple[int, int]]] = {"rms_norm": ("float32", (2, 12))}
_OF_THEIR_OWN = (
    "_cudnn_rnn",
    "binary_cross_entropy",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "norm.names_ScalarOpt_dim",
)


def operators_by_policy(version: tuple[int, int]) -> dict[Policy, tuple[str, ...]]:
    """Return the operators of each of CUDA's autocast policies: ATen/autocast_mode.h of PyTorch 2.6 to 2.15.

    Args:
        version: PyTorch version, as `memkit._torch.versions.parse` returns it.
    """
    later = [(name, policy) for name, (policy, since) in _SINCE.items() if version >= since]
    return {
        policy: (*names.split(), *(name for name, its in later if its == policy))
        for policy, names in _OPERATORS.items()
    }


def operators_without_a_rule() -> list[str]:
    """Return the operators that this PyTorch's autocast for CUDA knows but the table does not."""
    registered = {name.removeprefix("aten::") for name in kernels_of("AutocastCUDA") if name.startswith("aten::")}
    return sorted(registered - {*_SINCE, *_OF_THEIR_OWN, *" ".join(_OPERATORS.values()).split()})
