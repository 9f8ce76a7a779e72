"""What a loss function returns: a mean or a sum, what it weighs, and whatever else the caller wants to see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from memkit._errors import InputError, InputTypeError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """A loss with its weight: what ``loss_fn`` returns where rows are not the weight, or where there is more to return.

    A plain tensor is a mean over rows. A mean over valid tokens, or over class weights, weighs something else: say
    what, and a batch that is cut has exactly the gradient of the whole.

    Args:
        mean: 0-dim mean over ``count``.
        sum: 0-dim sum over ``count``; give ``mean`` or ``sum``, not both.
        count: What the mean is divided by: a number or a 0-dim tensor of zero or more. The counts of a batch's parts
            must add up to the batch's. ``mean`` without ``count`` weighs as many rows as the part has.
        outputs: A pytree to be handed back in ``result.outputs``, detached: metrics, logits.

    Raises:
        InputError: Both or neither of ``mean`` and ``sum``, or a ``sum`` without a ``count``.
        InputTypeError: The loss is not a tensor.

    Example:
        >>> import torch, memkit as mk
        >>> def loss_fn(model, batch):                          # mean over valid tokens, and a metric to look at
        ...     tokens, targets = batch
        ...     logits = model(tokens)
        ...     losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        ...     valid = targets != -100
        ...     hits = (logits.argmax(1) == targets) & valid
        ...     return mk.Loss(sum=losses, count=valid.sum(), outputs={"hits": hits.sum()})
    """

    mean: Tensor | None = None
    sum: Tensor | None = None
    count: float | Tensor | None = None
    outputs: Any = None

    def __post_init__(self) -> None:
        """Check that there is one loss, with a weight where it needs one."""
        if (self.mean is None) == (self.sum is None):
            raise InputError(
                "mk.Loss(...)",
                got="neither mean nor sum" if self.mean is None else "both mean and sum",
                expected="the loss once",
                fix="write mk.Loss(mean=loss), mk.Loss(mean=loss, count=n) or mk.Loss(sum=loss, count=n).",
            )
        if not isinstance(self.value, Tensor):
            raise InputTypeError(
                f"mk.Loss({self.reduction}=...)",
                got=f"a {type(self.value).__name__}",
                expected="the loss as a 0-dim tensor with its graph",
                fix="pass the loss itself, not loss.item().",
            )
        if self.sum is not None and self.count is None:
            raise InputError(
                "mk.Loss(sum=...)",
                got="a sum without its count",
                expected="the number of items that were summed",
                fix="write mk.Loss(sum=loss, count=n).",
            )

    @property
    def value(self) -> Tensor:
        """The loss as it was given, mean or sum."""
        return self.sum if self.mean is None else self.mean  # type: ignore[return-value]  # one of them is there

    @property
    def reduction(self) -> Literal["mean", "sum"]:
        """Whether `value` is the mean or the sum over the count."""
        return "sum" if self.mean is None else "mean"

    @property
    def weight(self) -> float | Tensor:
        """The count; 1 for a mean without one, as if its batch were one item."""
        return 1.0 if self.count is None else self.count

    def total(self) -> Tensor:
        """The loss summed over its count, at least in float32; a mean over a count of zero (NaN) sums to zero."""
        if not isinstance(self.weight, Tensor) and not self.weight:
            return torch.zeros_like(self.value, dtype=torch.float32)
        value = self.value.float() if self.value.dtype in {torch.float16, torch.bfloat16} else self.value
        return value if self.mean is None else value * self.weight

    def average(self) -> Tensor:
        """The mean, with its graph."""
        return self.value / self.weight if self.mean is None else self.value

    def detached(self, count: float | Tensor) -> Loss:
        """The same without its graph, 0-dim, with the weight that it has in its batch."""
        value, outputs = self.value.detach().reshape(()), detached(self.outputs)
        if self.mean is None:
            return Loss(sum=value, count=count, outputs=outputs)
        return Loss(mean=value, count=count, outputs=outputs)


def read_loss(result: object, *, call: str) -> Loss:
    """Read what a loss function has returned: a tensor is a mean over rows.

    Args:
        result: A tensor, or a `Loss`.
        call: The user's call, for the message.

    Raises:
        InputError: A tuple, which does not say what its second entry is.
        InputTypeError: Anything else.
    """
    if isinstance(result, Loss):
        return result
    if isinstance(result, Tensor):
        return Loss(mean=result)
    if isinstance(result, tuple):
        raise InputError(
            call,
            got=f"a tuple of {', '.join(type(each).__name__ for each in result) or 'no entries'}, which does not say "
            "what its entries are",
            expected="the mean loss as a 0-dim tensor, or mk.Loss(...)",
            fix="write `return mk.Loss(sum=loss_sum, count=n)` or `return mk.Loss(mean=loss, count=n)` for a loss and "
            "its weight; write `return mk.Loss(mean=loss, outputs=...)` for a loss and what else you want to see.",
        )
    raise InputTypeError(
        call,
        got=f"a {type(result).__name__}",
        expected="the mean loss as a 0-dim tensor, or mk.Loss(...)",
        fix="return the loss itself, not loss.item().",
    )


def detached(outputs: Any) -> Any:
    """Detach all tensors of a pytree."""
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)
