"""Scratch memory of CTC loss on the virtual GPU, in the order in which `LossCTC.cu` allocates it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memkit._simulation.cuda.recurrent import BlockOrder

_INDEX = 8  # bytes of a length
_MOST_SMALL = 450  # of a sum of sizes, below which one kernel adds up all labels


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
