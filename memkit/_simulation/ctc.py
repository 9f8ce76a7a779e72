"""CTC loss of tensors without data: it saves a tensor of the longest target's length.

C++ makes tensors of lengths in lists, and copies those on a card to the host first. Tensors without data can be neither
filled nor copied, so the parts of the loss are put together here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memkit._core.errors import NotSimulatedError
from memkit._recorder.recorder import StepPosition
from memkit._simulation.tensors import Tensors, known_values
from memkit._torch import aten
from memkit._torch.dispatch import no_dispatch
from memkit._torch.fake import DynamicOutputShapeException, FakeTensor

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
    has_no_data = isinstance(log_probs, FakeTensor) and log_probs.dim() == 3
    if not has_no_data or num_steps is None or num_symbols is None or reduction not in _REDUCTIONS:
        return _PLAIN(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    if log_probs.is_cuda:
        _refuse_cudnn(log_probs, targets, blank)
    targets = targets.to(log_probs.device, torch.int64)
    loss: Tensor = aten.ctc_loss.default(log_probs, targets, num_steps, num_symbols, blank, zero_infinity)[0]
    if zero_infinity:
        zero = torch.zeros((), dtype=loss.dtype, device=loss.device)  # by C++'s operator: plans compare operators
        loss = torch.where(loss == math.inf, zero, loss)
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


def _refuse_cudnn(log_probs: Tensor, targets: Tensor, blank: int) -> None:
    if blank == 0 and targets.dim() == 1 and targets.dtype is torch.int32 and log_probs.dtype is torch.float32:
        raise NotSimulatedError(
            "ctc_loss on a virtual GPU",
            got=f"targets of dtype int32 in one row at {StepPosition().place().line}, for which cuDNN has a kernel of "
            "its own",
            expected="PyTorch's own kernel, since what cuDNN takes was not recorded",
            fix="write targets.long().",
        )
