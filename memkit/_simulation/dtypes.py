"""Dtypes that kernels refuse and shape functions accept: a step with them fails on every device, and fits nowhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from memkit._torch.aten import overloads

_HALF = frozenset({torch.float16, torch.bfloat16})
_LABELS, _PLACES = frozenset({torch.int64, torch.uint8}), frozenset({torch.int32, torch.int64})
# By operator, the positions of arguments that must have one dtype.
_SAME: Mapping[Any, tuple[int, ...]] = {
    **dict.fromkeys(overloads("mm.default", "mv.default"), (0, 1)),
    **dict.fromkeys(overloads("grid_sampler_2d.default", "grid_sampler_3d.default", "_cdist_forward.default"), (0, 1)),
    **dict.fromkeys(overloads("addmm.default", "addmv.default", "convolution.default"), (0, 1, 2)),
    **dict.fromkeys(overloads("binary_cross_entropy.default"), (0, 1, 2)),
    **dict.fromkeys(overloads("nll_loss_forward.default", "nll_loss2d_forward.default"), (0, 2)),
    **dict.fromkeys(overloads("index_put.default", "index_put_.default"), (0, 2)),
    **dict.fromkeys(overloads("index_add.default", "index_add_.default"), (0, 3)),
}
# By operator, the positions of weights that may also be of float32 where the first argument is in half precision.
_SCALED: Mapping[Any, tuple[int, ...]] = {
    **dict.fromkeys(overloads("native_layer_norm.default"), (2, 3)),
    **dict.fromkeys(overloads("native_batch_norm.default", "native_group_norm.default"), (1, 2)),
}
# By operator, the position of integers, and their dtypes.
_INTEGERS: Mapping[Any, tuple[int, frozenset[torch.dtype]]] = {
    **dict.fromkeys(overloads("nll_loss_forward.default", "nll_loss2d_forward.default"), (1, _LABELS)),
    **dict.fromkeys(overloads("index_select.default"), (2, _PLACES)),
    **dict.fromkeys(
        overloads("multi_margin_loss.default", "multilabel_margin_loss_forward.default"), (1, frozenset({torch.int64}))
    ),
}
CHECKED = frozenset({*_SAME, *_SCALED, *_INTEGERS})
"""Operators of `refuse_dtypes`."""


def refuse_dtypes(func: Any, args: Sequence[Any]) -> None:
    """Refuse dtypes as the operator's kernels do.

    Raises:
        RuntimeError: "expected ... to have the same dtype".
    """
    first = args[0]
    for position in _SAME.get(func, ()):
        _refuse_others(func, args, position, {first.dtype})
    for position in _SCALED.get(func, ()):
        _refuse_others(func, args, position, {first.dtype, torch.float32} if first.dtype in _HALF else {first.dtype})
    if func in _INTEGERS:
        _refuse_others(func, args, *_INTEGERS[func])


def _refuse_others(func: Any, args: Sequence[Any], position: int, expected: Set[torch.dtype]) -> None:
    given = args[position] if position < len(args) else None
    if isinstance(given, Tensor) and given.dtype not in expected:
        names = " or ".join(sorted(str(each).removeprefix("torch.") for each in expected))
        got = str(given.dtype).removeprefix("torch.")
        raise RuntimeError(
            f"expected argument {position} of {func} to have the same dtype as the first, {names}, but got {got}"
            if args[0].dtype in expected
            else f"expected argument {position} of {func} to be of dtype {names}, but got {got}"
        )
