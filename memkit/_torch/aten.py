"""Operators of torch.ops.aten by name, including private ones; operators that this torch lacks are left out."""

from typing import Any

import torch

_aten = torch.ops.aten


def overloads(*names: str) -> frozenset[Any]:
    """Return operators by name: ``"mm"`` for all its overloads, ``"mm.out"`` for one."""
    found: set[Any] = set()
    for name in names:
        packet_name, _, wanted = name.partition(".")
        packet = getattr(_aten, packet_name, None)
        there = packet.overloads() if packet is not None else []
        found.update(getattr(packet, each) for each in there if wanted in ("", each))
    return frozenset(found)


amp_foreach_non_finite_check_and_unscale_ = _aten._amp_foreach_non_finite_check_and_unscale_.default
amp_update_scale_ = _aten._amp_update_scale_.default
ctc_loss = _aten._ctc_loss
ctc_loss_backward = _aten._ctc_loss_backward
cudnn_attention = _aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward = _aten._scaled_dot_product_cudnn_attention_backward.default
cudnn_rnn = _aten._cudnn_rnn.default
cudnn_rnn_backward = _aten._cudnn_rnn_backward.default
efficient_attention = _aten._scaled_dot_product_efficient_attention
efficient_attention_backward = _aten._scaled_dot_product_efficient_attention_backward.default
embedding_bag_backward = _aten._embedding_bag_backward.default
flash_attention = _aten._scaled_dot_product_flash_attention
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward.default
fused_adagrad_ = _aten._fused_adagrad_.default
fused_sgd_ = _aten._fused_sgd_.default
is_all_true = _aten._is_all_true.default
is_any_true = _aten._is_any_true.default
local_scalar_dense = _aten._local_scalar_dense.default  # a tensor's value as a Python number
log_softmax = _aten._log_softmax.default
math_attention = _aten._scaled_dot_product_attention_math
pack_padded_sequence = _aten._pack_padded_sequence.default
softmax = _aten._softmax.default
to_copy = _aten._to_copy.default

FUSED_ATTENTION = overloads(
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_fused_attention_overrideable.default",
)
"""The operators of F.scaled_dot_product_attention."""

FUSED_RMS_NORM_BACKWARD = overloads("_fused_rms_norm_backward.default")
"""The backward of RMSNorm as one operator; 2.8 lacks it, and composes forward and backward of several on CUDA."""

FUSED_RMS_NORM = overloads("_fused_rms_norm.default") if FUSED_RMS_NORM_BACKWARD else frozenset()
"""The forward of RMSNorm as one operator: in 2.8 for Metal only."""

LINEAR_ALGEBRA = overloads(
    *("_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "cholesky_inverse"),
    *("cholesky_solve", "geqrf", "linalg_cholesky_ex", "linalg_eig", "linalg_eigvals", "linalg_householder_product"),
    *("linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lstsq", "linalg_lu", "linalg_lu_factor_ex"),
    *("linalg_lu_solve", "linalg_pinv", "linalg_qr", "linalg_solve_triangular", "ormqr", "triangular_solve"),
)
"""Operators that LAPACK runs on a CPU, and cuSOLVER or MAGMA on a card."""

MATRIX_EXPONENTIAL = overloads("linalg_matrix_exp")
FOURIER = overloads("_fft_c2c", "_fft_c2r", "_fft_r2c")
UNIQUE = overloads("_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive")
INDEXING = overloads("index.Tensor", "index_put.default", "index_put_.default", "_unsafe_index_put.default")
# Operators that make a nested tensor of the strided layout from others.
NESTING = overloads("_nested_tensor_from_tensor_list", "_nested_view_from_buffer", "_nested_view_from_buffer_copy")
