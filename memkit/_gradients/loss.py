"""The return value of a loss function: a mean or a sum, its weight, and additional outputs."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError
from memkit._torch import pytree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """A loss with its weight, for a ``loss_fn`` whose mean is not over rows, or that returns more than the loss.

    A plain tensor is a mean over rows. A mean over valid tokens, or over class weights, has another divisor: pass it as
    the ``count``, and a split batch has exactly the gradient of the whole.

    Args:
        mean: 0-dim mean over ``count``, with its graph.
        sum: 0-dim sum over ``count``, with its graph; give ``mean`` or ``sum``, not both.
        count: The divisor of the mean: a number of zero or more, or a 0-dim tensor. The counts of a batch's parts must
            add up to the batch's. A ``mean`` without ``count`` is a mean over rows.
        outputs: Anything else that you want back: metrics, logits, as a tensor or a pytree (dicts, lists and tuples) of
            tensors. ``result.outputs`` has it for each micro-batch, detached.

    Raises:
        InputError: Both or neither of ``mean`` and ``sum``, a ``sum`` without a ``count``, or more than one element in
            the loss or in the count.
        InputTypeError: The loss is not a tensor, or the count is neither a number nor a tensor.

    Memory cost: none; ``outputs`` are held for as long as the result is.

    Example:
        >>> import torch, memkit as mk
        >>> def loss_fn(model, batch):                          # mean over valid tokens, and a metric to look at
        ...     tokens, targets = batch
        ...     logits = model(tokens)
        ...     loss_sum = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        ...     valid = targets != -100
        ...     hits = (logits.argmax(1) == targets) & valid
        ...     return mk.Loss(sum=loss_sum, count=valid.sum(), outputs={"hits": hits.sum()})
    """

    mean: Tensor | None = None
    sum: Tensor | None = None
    count: float | Tensor | None = None
    outputs: Any = None

    def __post_init__(self) -> None:
        """Check everything that needs no synchronization with the device."""
        if (self.mean is None) == (self.sum is None):
            raise InputError(
                "mk.Loss(...)",
                got="neither mean nor sum" if self.mean is None else "both mean and sum",
                expected="exactly one of mean and sum",
                fix="write mk.Loss(mean=loss), mk.Loss(mean=loss, count=n) or mk.Loss(sum=loss, count=n).",
            )
        if not isinstance(self.value, Tensor):
            raise InputTypeError(
                f"mk.Loss({self.reduction}=...)",
                got=f"a {type(self.value).__name__}",
                expected="the loss as a 0-dim tensor with its graph",
                fix="pass the loss itself, not loss.item().",
            )
        if self.value.numel() != 1:
            raise InputError(
                f"mk.Loss({self.reduction}=...)",
                got=f"a tensor of shape {tuple(self.value.shape)}",
                expected="a scalar with its graph",
                fix="reduce the loss: mk.Loss(mean=losses.mean()) or mk.Loss(sum=losses.sum(), count=n).",
            )
        if self.sum is not None and self.count is None:
            raise InputError(
                "mk.Loss(sum=...)",
                got="a sum without its count",
                expected="the number of summed items as count",
                fix="write mk.Loss(sum=loss, count=n).",
            )
        if self.count is not None:
            _check_count(self.count, f"mk.Loss({self.reduction}=..., count=...)")

    @property
    def value(self) -> Tensor:
        """The loss as passed, mean or sum."""
        return self.sum if self.mean is None else self.mean  # type: ignore[return-value]  # one of them is there

    @property
    def reduction(self) -> Literal["mean", "sum"]:
        """Whether `value` is the mean or the sum over the count."""
        return "sum" if self.mean is None else "mean"

    @property
    def weight(self) -> float | Tensor:
        """The count; 1 for a mean without one."""
        return 1.0 if self.count is None else self.count

    def total(self) -> Tensor:
        """The loss summed over its count, at least in float32; a mean over a count of zero (NaN) sums to zero."""
        value = self.value.float() if self.value.dtype in {torch.float16, torch.bfloat16} else self.value
        if isinstance(self.weight, Tensor):
            is_nothing = (self.weight == 0).to(value.device)
            return value if self.mean is None else torch.where(is_nothing, torch.zeros_like(value), value * self.weight)
        if not self.weight:
            return torch.zeros_like(value)
        return value if self.mean is None else value * self.weight

    def average(self) -> Tensor:
        """The mean, with its graph."""
        return self.value / self.weight if self.mean is None else self.value

    def detached(self, count: float | Tensor) -> Loss:
        """Return the loss without its graph, 0-dim, with its weight in the batch."""
        value, outputs = self.value.detach(), None if self.outputs is None else detached(self.outputs)
        value = value.reshape(()) if value.dim() else value
        return _unchecked(None, value, count, outputs) if self.mean is None else _unchecked(value, None, count, outputs)


LossFn: TypeAlias = Callable[[Any, Any], Tensor | Loss]
"""``loss_fn(model, batch)``."""


def _unchecked(mean: Tensor | None, sum_: Tensor | None, count: float | Tensor | None, outputs: Any) -> Loss:
    """Make a loss from values that are already checked."""
    loss = object.__new__(Loss)
    _set_mean(loss, mean)
    _set_sum(loss, sum_)
    _set_count(loss, count)
    _set_outputs(loss, outputs)
    return loss


_set_mean, _set_sum, _set_count, _set_outputs = [
    vars(Loss)[name].__set__ for name in ("mean", "sum", "count", "outputs")
]


def read_loss(result: object, *, call: str) -> Loss:
    """Read the result of a loss function; a tensor is a mean over rows.

    Args:
        result: A tensor, or a `Loss`.
        call: The user's call, for the message.

    Raises:
        InputError: The result is a tuple or a list, which does not say what its entries are.
        InputTypeError: The result is anything else.
    """
    if isinstance(result, Loss):
        return result
    if isinstance(result, Tensor):
        return _unchecked(result, None, None, None) if result.numel() == 1 else Loss(mean=result)
    if isinstance(result, tuple | list):
        entries = (
            ", ".join("Tensor" if isinstance(each, Tensor) else type(each).__name__ for each in result) or "no entries"
        )
        raise InputError(
            call,
            got=f"a {type(result).__name__} of {entries}, whose entries are ambiguous",
            expected="the mean loss as a 0-dim tensor, or mk.Loss(...)",
            fix="write `return mk.Loss(sum=loss_sum, count=n)` or `return mk.Loss(mean=loss, count=n)` for a loss "
            "and its weight; write `return mk.Loss(mean=loss, outputs=...)` for a loss and other outputs.",
        )
    raise InputTypeError(
        call,
        got=f"a {'float' if isinstance(result, float) else type(result).__name__}",
        expected="the mean loss as a 0-dim tensor, or mk.Loss(...)",
        fix=_fix(result),
    )


def _fix(result: object) -> str:
    if result is None:
        return "end loss_fn with `return loss`."
    if isinstance(result, numbers.Number):
        return "return the loss itself, not loss.item()."
    return "write `return mk.Loss(mean=loss, outputs=...)`: the loss as a tensor, and what else you want to see."


def _check_count(count: object, call: str) -> None:
    if isinstance(count, Tensor) and count.numel() != 1:
        raise InputError(
            call,
            got=f"a tensor of shape {tuple(count.shape)}",
            expected="the divisor of the mean, a scalar",
            fix="add up the entries: count=valid.sum(), or count=weight[targets].sum().",
        )
    if isinstance(count, bool) or not isinstance(count, numbers.Real | Tensor | torch.SymInt | torch.SymFloat):
        raise InputTypeError(
            call,
            got=f"a {type(count).__name__}",
            expected="the divisor of the mean, as a number or a 0-dim tensor",
            fix="pass the divisor of the mean: count=len(x), or count=valid.sum().",
        )


def detached(outputs: Any) -> Any:
    """Detach all tensors of a pytree."""
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)
