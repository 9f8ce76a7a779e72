"""Memory use of CPU kernels that shape functions do not show.

Some results have larger storages than their shapes suggest, and kernels allocate workspaces internally. The CPU's
allocator keeps no statistics, so live memory is the sum of the storages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memkit._simulation.ctc import CTC
from memkit._simulation.tensors import Kernels, is_matrix, masks_bytes, selected_shape
from memkit._torch import aten
from memkit._torch.aten import ctc_loss_backward, overloads, pack_padded_sequence
from memkit._torch.convolution import ConvBackend, select_conv_backend
from memkit._torch.machine import onednn_version

_aten = torch.ops.aten
_PAGE = 4096
_ONE_BUFFER_OF_STATES = (3, 8)  # oneDNN 3.7 keeps a recurrent layer's states in three buffers, 3.11 in one
_SUMS_IN_PLACE = (3, 8)  # oneDNN 3.7 adds up some products of half precision in a buffer of its own
_LAPACK = 2**16  # workspaces of a few rows
_PER_POSITION = 128  # of an index and weights
_SMALL = 1024  # scalars, sizes and strides that a kernel keeps in tensors
_LIBRARY = 8192  # oneDNN's own allocations
_PER_HELPER = 2**20  # upper bound for each thread beyond the first
_PER_SELECTED = 16  # for each element that a mask may select
_TRANSPOSED = 2**14  # a block that is transposed at once
_CHUNK_CAT = "fsdp::chunk_cat"  # a CPU pads copies of gradients that cannot be split evenly


def _operators(*names: str) -> frozenset[Any]:
    return overloads(*(name if "." in name else f"{name}.default" for name in names))


class HostKernels:
    """Scratch memory of CPU kernels; there is no model of the allocator."""

    def counts(self, device: torch.device) -> bool:  # noqa: ARG002 - interface
        """Count all storages, whatever device they report."""
        return True

    def device_of(self, storage: torch.UntypedStorage) -> torch.device:
        """Return the storage's own device."""
        return storage.device

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Do nothing: the storage itself knows its size."""

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Do nothing, as in `hold`."""

    def pass_on(self, key: int, storage: torch.UntypedStorage) -> None:
        """Do nothing, as in `hold`."""

    def run_inside(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
        """Return the upper bound of a kernel's scratch memory."""
        if func.name() == _CHUNK_CAT:
            return int(kwargs["out"].nbytes)
        return workspace_bound(func, args, out)

    def divided(self, func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:  # noqa: ARG002 - interface
        """Return None: operators are never decomposed here."""
        return None


def workspace_bound(func: Any, args: Sequence[Any], out: Any) -> int:  # noqa: C901 - a table of kernels
    """Return the most scratch memory that a CPU kernel is expected to allocate and free, beyond its results.

    Zero for kernels that only wrap numbers in tensors (less than 64 bytes). Checked against the allocator in
    `tests/simulation/test_kernels.py`.
    """
    if func is _aten.convolution.default:
        return _convolution(args[0], args[1], out, args)
    if func is _aten.convolution_backward.default:
        grad, x, weight = args[:3]
        return _convolution(x, weight, grad, (x, weight, None, *args[4:10])) + _depthwise_sums(x, weight)
    if func in _CTC_BACKWARD:
        return _nbytes(args[6])  # the same sums as the forward's, from the end
    if func is pack_padded_sequence:
        return _nbytes(out[0])  # the rows of each step, before they are concatenated
    if func is _aten.mkldnn_rnn_layer.default and not torch.is_grad_enabled():  # at most what it would otherwise keep
        weights_bytes = _nbytes(args[1]) + _nbytes(args[2])  # in another layout
        return _gates_and_states(args[0], args[2]) + weights_bytes
    inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.dim()]
    outputs = [item for item in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(item, Tensor)]
    if func in _MULTIPLYING:
        return _product(inputs, outputs)
    bound = 0
    if func in _COPYING:
        bound += _SMALL + sum(map(_nbytes, inputs + outputs))
    if func in _ATTENDING:
        bound += _attention(*inputs[:2])
    if func in _ORDERED:
        bound += sum(_TRANSPOSED + _nbytes(tensor) for tensor in inputs if not tensor.is_contiguous())
    if func in _TURNING and not all(tensor.is_contiguous() for tensor in inputs):
        bound += _TRANSPOSED
    if func in _INDEXING:
        bound += _SMALL + sum(masks_bytes(args[1]))
    if func in _SELECTING:
        bound += _SMALL + _PER_SELECTED * math.prod(selected_shape(*inputs[:2]))
    if func in _TIMES:
        bound += _LAPACK + _TIMES[func] * sum(map(_nbytes, inputs + outputs))
    if func in _RESIZING:
        bound += _PER_POSITION * sum(sum(tensor.shape[2:]) for tensor in inputs + outputs)
    if func is _aten.roll.default and len(args[1]) > 1:  # one dimension after the other
        bound += _nbytes(args[0])
    if func is _aten.unfold_backward.default:
        bound += _SMALL + 2 * sum(map(_nbytes, outputs))
    if func in _TRILINEAR:  # each row's products
        bound += 3 * _nbytes(args[0]) * args[2].numel() // max(1, len(args[0]))
    if func in _COPYING_TWICE:  # also one that is contiguous
        bound += _SMALL + 2 * _nbytes(args[0])
    # Inputs of another dtype than the widest are converted to it first; a complex operator's result last.
    converted = inputs + outputs if any(tensor.is_complex() for tensor in inputs) else inputs
    itemsize = max((tensor.dtype.itemsize for tensor in inputs + outputs), default=0)
    return bound + sum(tensor.numel() * itemsize for tensor in converted if tensor.dtype.itemsize < itemsize)


# ------------------------------------------------------------------------------------------------- true results


def _norm(out: tuple[Tensor, Tensor, Tensor], x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Keep mean and deviation in float32 for a half-precision input with float32 weights."""
    weight = next((arg for arg in args if isinstance(arg, Tensor)), None)
    if weight is None or weight.dtype == x.dtype:
        return out
    return out[0], out[1].to(weight.dtype), out[2].to(weight.dtype)


def _batch_norm(out: tuple[Tensor, Tensor, Tensor], x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, deviation = _norm(out, x, *args)
    return torch.empty_like(y, memory_format=_suggested(x)), mean, deviation


def _batch_norm_backward(out: tuple[Tensor | None, ...], _: Tensor, x: Tensor, *__: Any) -> tuple[Tensor | None, ...]:
    gradient = None if out[0] is None else torch.empty_like(out[0], memory_format=_suggested(x))
    return gradient, *out[1:]


def _suggested(x: Tensor) -> torch.memory_format:
    """Return what `suggest_memory_format` does: channels last if the tensor has them so, else contiguous."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    is_last = channels_last is not None and x.is_contiguous(memory_format=channels_last)
    return channels_last if is_last and not x.is_contiguous() else torch.contiguous_format  # type: ignore[return-value]


def _log_sigmoid(out: tuple[Tensor, Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    return out[0].new_empty(out[0].shape), out[1]


def _log_sigmoid_backward(_: Tensor, gradient: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(gradient)


def _folded(out: Tensor, columns: Tensor, *_: Any) -> Tensor:
    """Leave the storage as large as the columns, in whose size the kernel makes it."""
    return out if out.numel() >= columns.numel() else columns.new_empty(columns.numel())[: out.numel()].view(out.shape)


def _embedding_bag(out: tuple[Tensor, ...], _: Tensor, indices: Tensor, *__: Any) -> tuple[Tensor, ...]:
    """Make the storage of the map from rows to bags one entry larger than the tensor."""
    bag_of_row = out[1]
    if bag_of_row.numel():
        bag_of_row = bag_of_row.new_empty(len(indices) + 1)[:-1]
    return out[0], bag_of_row, *out[2:]


def _recurrent(out: tuple[Tensor, ...], x: Tensor, _: Tensor, w_hidden: Tensor, *__: Any) -> tuple[Tensor, ...]:
    """Add the gates and states that oneDNN keeps for the backward; without a graph it frees them at once."""
    return *out[:3], out[3].new_empty(_gates_and_states(x, w_hidden) if torch.is_grad_enabled() else 0)


def _recurrent_backward(out: tuple[Tensor, ...], *_: Any) -> tuple[Tensor, ...]:
    """Make all gradients float32, as torch's shape function does in 2.13 but not yet in 2.12.

    Each bias has its own gradient; the shape function returns one tensor for both.
    """
    gradients = [each.float() for each in out]
    gradients[4] = torch.empty_like(gradients[3])
    return tuple(gradients)


def _gates_and_states(x: Tensor, w_hidden: Tensor) -> int:
    """Return their bytes, by `set_workspace_sizes` in oneDNN's `src/cpu/rnn/rnn_utils.cpp`."""
    num_steps, num_rows, width_in = x.shape
    width, itemsize = w_hidden.shape[1], x.dtype.itemsize

    def pages(rows: int, columns: int, size: int) -> int:
        return math.ceil(rows * columns * size / _PAGE)

    def padded(columns: int, size: int) -> int:
        per_line = 64 // size
        columns = math.ceil(columns / per_line) * per_line
        return columns + per_line if columns % 256 == 0 else columns

    calls, states, widest = num_steps * num_rows, 2 * (num_steps + 1) * num_rows, max(width, width_in)
    num_states = 1 if onednn_version() >= _ONE_BUFFER_OF_STATES else 3
    num_pages = (
        pages(calls, padded(4 * width, itemsize), itemsize)  # gates
        + pages(calls, padded(width, itemsize), itemsize)  # outputs
        + num_states * pages(states, padded(widest, itemsize), itemsize)
        + 2 * pages(states, padded(widest, 4), 4)  # their gradients by layer and by step, in float32
        + pages(states, width, itemsize)  # cells
        + pages(states, width, 4)  # their gradients
    )
    return num_pages * _PAGE


RESULTS: Kernels = {
    **dict.fromkeys(_operators("native_layer_norm", "native_group_norm"), _norm),
    **dict.fromkeys(_operators("native_batch_norm"), _batch_norm),
    **dict.fromkeys(_operators("native_batch_norm_backward"), _batch_norm_backward),
    **dict.fromkeys(_operators("log_sigmoid_forward"), _log_sigmoid),
    **dict.fromkeys(_operators("log_sigmoid_backward"), _log_sigmoid_backward),
    **dict.fromkeys(_operators("col2im"), _folded),
    **dict.fromkeys(_operators("_embedding_bag"), _embedding_bag),
    **dict.fromkeys(_operators("mkldnn_rnn_layer"), _recurrent),
    **dict.fromkeys(_operators("mkldnn_rnn_layer_backward"), _recurrent_backward),
}
"""By operator, a function of its shape function's result and its arguments that returns the kernel's true result."""


def _grouped_product(x: Tensor, y: Tensor, offsets: Tensor | None = None, *_: Any) -> Tensor:
    """Align rows to 16 bytes. torch's shape function accepts only bfloat16, as a GPU does."""
    groups = [len(offsets)] if offsets is not None and x.dim() == y.dim() else list(x.shape[:-2])[: y.dim() - 2]
    num_rows, num_columns = x.shape[-2], y.shape[-1]
    per_line = 16 // x.dtype.itemsize
    row = math.ceil(num_columns / per_line) * per_line
    strides = [num_rows * row] * len(groups) + [row, 1]
    return x.new_empty_strided([*groups, num_rows, num_columns], strides)


INSTEAD: Kernels = {
    **dict.fromkeys(_operators("_grouped_mm"), _grouped_product),
    **CTC,
}
"""By operator, a function of arguments that its shape function rejects; returns the kernel's result."""


# ---------------------------------------------------------------------------------------------------- workspace

_BY_COLUMNS = frozenset(
    {
        ConvBackend.Slow2d,
        ConvBackend.Slow3d,
        ConvBackend.SlowDilated2d,
        ConvBackend.SlowDilated3d,
        ConvBackend.SlowTranspose2d,
        ConvBackend.SlowTranspose3d,
    }
)
_MULTIPLYING = _operators("addmm", "baddbmm", "bmm", "mm")
_INDEXING = {_aten.index.Tensor} | _operators("index_put", "index_put_")
# The mask as integers, and their running total; or a copy of the mask as large as all that it selects from.
_SELECTING = _operators("masked_scatter", "masked_scatter_", "masked_scatter_backward", "masked_select")
_ORDERED = _operators(  # they copy inputs that are not contiguous
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "embedding_dense_backward",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "native_group_norm", "native_layer_norm",
    "_fft_c2c", "_fft_r2c", "batch_norm_backward", "channel_shuffle", "clamp.Tensor", "col2im", "gather", "ge.Tensor",
    "grid_sampler_2d", "grid_sampler_2d_backward", "grid_sampler_3d", "grid_sampler_3d_backward", "le.Tensor",
    "lt.Tensor", "pixel_shuffle", "pixel_unshuffle",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward", "repeat",
    "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward", "roll", "scatter.src",
    "scatter.value", "scatter_add", "scatter_reduce.two", "tril", "triu",
)  # fmt: skip
_CTC_BACKWARD = {ctc_loss_backward.default, ctc_loss_backward.Tensor}
_TRILINEAR = _operators("_trilinear")
_COPYING_TWICE = _operators("_fft_c2r", "im2col")
_RESIZING = _operators(  # with a table of source positions along each dimension
    "_upsample_nearest_exact1d", "_upsample_nearest_exact1d_backward", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact2d_backward", "_upsample_nearest_exact3d", "_upsample_nearest_exact3d_backward",
    "upsample_bicubic2d", "upsample_bicubic2d_backward", "upsample_linear1d", "upsample_linear1d_backward",
    "upsample_nearest1d", "upsample_nearest1d_backward", "upsample_nearest2d", "upsample_nearest2d_backward",
    "upsample_nearest3d", "upsample_nearest3d_backward",
)  # fmt: skip
_ORDERED |= _RESIZING
# How many times their inputs and results they take at most.
_TIMES: dict[Any, int] = {
    **dict.fromkeys(
        _operators(
            "_adaptive_avg_pool3d_backward", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors",
            "_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa_backward", "_upsample_bilinear2d_aa",
            "_upsample_bilinear2d_aa_backward", "dist", "histc", "isinf", "kthvalue", "ldexp.Tensor", "logsumexp",
            "median", "nanmedian", "renorm", "soft_margin_loss_backward",
        ),
        1,
    ),
    **dict.fromkeys(aten.LINEAR_ALGEBRA | _operators("allclose", "lu_unpack", "mvlgamma"), 2),
    **dict.fromkeys(
        _operators(
            "_unique", "_unique2", "isin.Tensor_Tensor", "unique_consecutive", "unique_dim", "unique_dim_consecutive"
        ),
        5,
    ),
    **dict.fromkeys(aten.MATRIX_EXPONENTIAL, 7),
}  # fmt: skip
_TURNING = _operators("_to_copy", "clone", "copy_")
_ATTENDING = _operators(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
)
_COPYING = _ATTENDING | _operators(
    "_adaptive_avg_pool2d_backward", "_embedding_bag", "_embedding_bag_backward", "_euclidean_dist", "_safe_softmax",
    "avg_pool2d_backward", "avg_pool3d_backward", "binary_cross_entropy_with_logits", "huber_loss", "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward", "mse_loss", "native_batch_norm", "native_batch_norm_backward",
    "native_group_norm_backward", "native_layer_norm_backward", "smooth_l1_loss", "upsample_bilinear2d",
    "upsample_bilinear2d_backward", "upsample_trilinear3d", "upsample_trilinear3d_backward",
)  # fmt: skip


def _helpers_bytes() -> int:
    return _LIBRARY + (torch.get_num_threads() - 1) * _PER_HELPER


def _convolution(x: Tensor, weight: Tensor, out: Tensor, args: Sequence[Any]) -> int:
    """Bound copies in the library's own layout, in blocks of channels; or a column for each output position."""
    if select_conv_backend(*args) in _BY_COLUMNS:
        is_transposed = args[6]
        columns_of = x if is_transposed else out
        num_columns = columns_of.numel() // columns_of.shape[1]
        column = weight.numel() // weight.shape[1 if is_transposed else 0]
        copies = num_columns * column * x.dtype.itemsize + sum(map(_nbytes, (x, weight, out)))
    else:
        copies = _blocked_bytes(x, 1) + _blocked_bytes(weight, 0, 1) + _blocked_bytes(out, 1)
    return _helpers_bytes() + 2 * copies


def _depthwise_sums(x: Tensor, weight: Tensor) -> int:
    """Bound the weight gradient's 258 partial sums, used with channels last and kernels larger than 3."""
    is_plain = weight.shape[1] > 1 or max(weight.shape[2:]) <= 3 or x.is_contiguous()
    return 0 if is_plain else _LIBRARY + 258 * weight.numel() * max(4, weight.dtype.itemsize)


def _product(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Bound copies of half-precision and complex matrices; of others only if neither rows nor columns are dense."""
    if inputs[0].dtype not in (torch.float32, torch.float64):
        is_apart = onednn_version() < _SUMS_IN_PLACE
        sums = sum(_tiled_bytes(each, 64) for each in outputs) if is_apart else 0
        return _helpers_bytes() + sum(map(_tiled_bytes, (*inputs, *outputs))) + sums
    dense = [tensor for tensor in inputs if tensor.layout is torch.strided and tensor.dim() > 1]
    return sum(_nbytes(tensor) for tensor in dense if not is_matrix(tensor))


def _tiled_bytes(tensor: Tensor, tile: int = 16) -> int:
    """Return the bytes in float32 with rows and columns in tiles, as matrix units take them."""
    itemsize, rows_and_columns = max(4, tensor.dtype.itemsize), tensor.shape[-2:]
    return (
        itemsize * math.prod(math.ceil(size / tile) * tile for size in rows_and_columns) * math.prod(tensor.shape[:-2])
    )


def _attention(query: Tensor, key: Tensor) -> int:
    """Bound the scores of a block of queries by a block of keys, and their gradients, for each thread."""
    queries, keys = min(256, query.shape[-2]), min(512, key.shape[-2])
    return torch.get_num_threads() * 16 * queries * (keys + query.shape[-1] + 2)


def _blocked_bytes(tensor: Tensor, *channels: int) -> int:
    """Return the bytes with channels in blocks of 16; half precision is computed in float32, in blocks of 32."""
    itemsize = tensor.dtype.itemsize
    block = 64 // min(itemsize, 4)
    sizes = [math.ceil(size / block) * block if dim in channels else size for dim, size in enumerate(tensor.shape)]
    return math.prod(sizes) * max(itemsize, 4)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
