"""What cuDNN's convolutions may take inside of themselves: an interval, since cuDNN chooses when it runs.

Lowest is nothing: implicit products need none. The highest is what known methods of cuDNN need; each is named where
it is computed. It is no proven bound: what of the published figures lies inside, and what not, is in
`docs/virtual-gpu.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memkit._units import MIB

_aten = torch.ops.aten
# Fixed sizes that recorded runs show whatever the tensors' sizes: split sums and tables (4 MiB, 128 MiB).
_FIXED_BYTES = 128 * MIB
# Non-fused Winograd F(4x4, 3x3): 36 numbers for each tile of 16 positions.
_WINOGRAD = 36 / 16


def convolution_bound(func: Any, args: Sequence[Any], out: Any) -> int:
    """Most bytes that a known method takes inside; zero where it is no convolution.

    With ``torch.backends.cudnn.enabled = False`` the truth is known: a column for each position of one image.
    """
    if func is _aten.convolution.default:
        x, weight, y, dilation, transposed = args[0], args[1], out, args[5], args[6]
    elif func is _aten.convolution_backward.default:
        y, x, weight, dilation, transposed = args[0], args[1], args[2], args[6], args[7]
    else:
        return 0
    if not torch.backends.cudnn.enabled:
        positions = x if transposed else y
        column = weight.numel() // weight.shape[1 if transposed else 0]
        return int(math.prod(positions.shape[2:]) * column * x.element_size())
    copies = sum(tensor.numel() * tensor.element_size() for tensor in (x, weight, y))  # into channels-last order
    methods = [copies]
    is_small = all(size <= 3 for size in weight.shape[2:]) and set(dilation) == {1}
    if torch.backends.cudnn.benchmark and is_small:
        methods.append(_winograd(x, y))
    return int(_FIXED_BYTES + max(methods))


def _winograd(x: Tensor, y: Tensor) -> int:
    return int(_WINOGRAD * (x.numel() + y.numel()) * 4)  # transformed in float32
