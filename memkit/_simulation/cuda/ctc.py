"""CTC loss on the virtual GPU: it saves and takes tensors of the longest target's length, as `LossCTC.cu` does.

C++ reads lengths from lists, or copies tensors of them to the host first. Tensors without data cannot be copied, so the
parts of the loss are put together here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memkit._core.errors import NotSimulatedError
from memkit._recorder.recorder import StepPosition
from memkit._simulation.cuda.recurrent import BlockOrder
from memkit._simulation.tensors import Tensors, known_values
from memkit._torch import aten
from memkit._torch.dispatch import no_dispatch
from memkit._torch.fake import DynamicOutputShapeException, FakeTensor

_INDEX = 8  # bytes of a length
_MOST_SMALL = 450  # of a sum of sizes, below which one kernel adds up all labels
_REDUCTIONS = ("none", "mean", "sum")


def _run(log_probs: Tensor, _: Tensor, __: Any, target_lengths: Any, *___: Any) -> tuple[Tensor, Tensor]:
    """`_ctc_loss` on tensors without data: a blank is before each symbol of a target, and after the last."""
    lengths = _as_list(target_lengths)
    if lengths is None:
        raise DynamicOutputShapeException(aten.ctc_loss.Tensor)
    num_steps, num_rows = log_probs.shape[:2]
    return log_probs.new_empty(num_rows), log_probs.new_empty(num_rows, num_steps, 2 * max(lengths) + 1)


def _run_backward(_: Tensor, log_probs: Tensor, *__: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


CTC: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.ctc_loss.default, aten.ctc_loss.Tensor), _run),
    **dict.fromkeys((aten.ctc_loss_backward.default, aten.ctc_loss_backward.Tensor), _run_backward),
}
"""By operator, a function of its arguments that returns its results."""


def ctc_order(args: Sequence[Any], out: Sequence[Tensor]) -> BlockOrder:
    """`ctc_loss_gpu_template`: both lengths and the places of the targets come to the card first."""
    loss, log_alpha = out
    lengths = _INDEX * args[0].shape[1]
    return lengths, lengths, lengths, log_alpha, loss, None, None, None


def ctc_backward_order(args: Sequence[Any], out: Tensor) -> BlockOrder:
    """`ctc_loss_backward_gpu_template`: as much as the forward saved; blanks of large alphabets are summed apart."""
    log_probs, log_alpha, zero_infinity = args[1], args[6], len(args) > 8 and args[8]
    num_steps, num_rows, num_labels = log_probs.shape
    lengths, log_beta = _INDEX * num_rows, log_alpha.numel() * log_alpha.element_size()
    begin, end = (lengths, lengths, lengths, log_beta), (None,) * 4
    if 2 * num_steps + 24 * num_rows // 10 + 2 * num_labels // 10 <= _MOST_SMALL:
        return *begin, out, *end
    row = num_rows * num_steps * log_probs.element_size()
    blanks = row * (log_alpha.shape[2] // 2 + 1)
    # logsumexp: the sum, its largest numbers, where they are infinite, the exponentials, and their sum.
    of_blanks: BlockOrder = blanks, row, row, num_rows * num_steps, None, None, blanks, row, -2, None, None, None
    if not zero_infinity:
        return *begin, out, *of_blanks, *end
    gradient = log_probs.numel() * log_probs.element_size()
    selected: BlockOrder = num_rows, log_probs.element_size(), out, None, None
    return *begin, gradient, *of_blanks, *selected, None, *end


@wraps(functional.ctc_loss)
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,  # noqa: FBT001, FBT002 - torch's signature
) -> Tensor:
    """`ctc_loss_impl` in LossCTC.cpp."""
    num_steps, num_symbols = _as_list(input_lengths), _as_list(target_lengths)
    is_on_card = isinstance(log_probs, FakeTensor) and log_probs.is_cuda and log_probs.dim() == 3
    if not is_on_card or num_steps is None or num_symbols is None or reduction not in _REDUCTIONS:
        return _PLAIN(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    if blank == 0 and targets.dim() == 1 and targets.dtype is torch.int32 and log_probs.dtype is torch.float32:
        _refuse_cudnn()
    targets = targets.to(log_probs.device, torch.int64)
    loss: Tensor = aten.ctc_loss.default(log_probs, targets, num_steps, num_symbols, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == math.inf, loss.new_zeros(()), loss)
    if reduction == "mean":
        return (loss / torch.tensor(num_symbols, dtype=loss.dtype, device=loss.device).clamp_min(1)).mean()
    return loss.sum() if reduction == "sum" else loss


_PLAIN = functional.ctc_loss


def _as_list(lengths: Any) -> list[int] | None:
    """Return lengths as numbers; None if they are not known."""
    if not isinstance(lengths, Tensor):
        return list(lengths)
    known = known_values(lengths)
    if known is None:
        return None
    if isinstance(lengths, FakeTensor) and isinstance(lengths.fake_mode, Tensors):
        lengths.fake_mode.guesses.num_true += 1
    with no_dispatch():
        return known.reshape(-1).tolist()


def _refuse_cudnn() -> None:
    raise NotSimulatedError(
        "ctc_loss on a virtual GPU",
        got=f"targets of dtype int32 in one row at {StepPosition().place().line}, for which cuDNN has its own kernel",
        expected="PyTorch's own kernel, since what cuDNN takes was not recorded",
        fix="write targets.long().",
    )
