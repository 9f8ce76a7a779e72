"""Loss functions: how they are called, and their result: a mean or a sum, its weight, and additional outputs."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError, MemkitError
from memkit._core.words import guided
from memkit._torch import pytree

_WORDS = {
    "mean": "loss value mean_loss loss_mean",
    "sum": "total loss_sum sum_loss",
    "count": "n num weights batch_size size",
    "outputs": "output metrics logs log logits extra aux",
    "write Loss(mean=loss, count=n), or Loss(sum=loss, count=n)": "reduction",
}
_ABSENT = {
    **{f"loss.value.{name}()": name for name in ("item", "detach", "cpu", "tolist")},
    "loss.value, the tensor: float(loss.value)": "+ float() [] format()",
    "loss.value, loss.count": "iter()",
    "return loss in loss_fn, and leave backward to the step": "backward",
    "loss.value": "loss",
}


@guided(words=_WORDS, absent=_ABSENT, rewrite={"__init__": lambda _: "Loss(mean=loss, count=n)"})
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
        outputs: Anything else that you want back: metrics, logits, as a tensor or in dicts, lists, tuples and
            dataclasses. ``result.outputs`` has it for each micro-batch, with these tensors detached.

    Raises:
        InputError: Both or neither of ``mean`` and ``sum``, a ``sum`` without a ``count``, more than one element in
            the loss or in the count, or a complex loss.
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
        if self.value.is_complex():
            refuse_complex(self.value, call=f"mk.Loss({self.reduction}=...)")
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
            is_empty = (self.weight == 0).to(value.device)
            return value if self.mean is None else torch.where(is_empty, torch.zeros_like(value), value * self.weight)
        if self.mean is None:
            return value
        return value * self.weight if self.weight else torch.zeros_like(value)

    def average(self) -> Tensor:
        """The mean, with its graph."""
        return self.value / self.weight if self.mean is None else self.value

    def detached(self, count: float | Tensor) -> Loss:
        """Return the loss without its graph, 0-dim, with its weight in the batch."""
        is_sum = self.mean is None
        value = (self.sum if is_sum else self.mean).detach()  # type: ignore[union-attr]  # one of them is there
        value = value.reshape(()) if value.dim() else value
        try:
            if value.untyped_storage().nbytes() > value.nbytes:  # mse_loss on a CPU: that of all its elements
                value = value.clone()
        except (NotImplementedError, RuntimeError):  # a wrapper tensor has no storage of its own
            pass
        outputs = None if self.outputs is None else detached(self.outputs)
        return _unchecked(None, value, count, outputs) if is_sum else _unchecked(value, None, count, outputs)


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


_EXPECTED = "a function loss_fn(model, batch), which returns the loss"
_STEPS = ("training_step", "validation_step", "test_step")
# Errors that a wrong call raises; any other error, such as out of memory, is the function's own.
_MISTAKES = (TypeError, AttributeError, ValueError, LookupError, NotImplementedError)
# Names of parameters, which show what a failed function expects.
_MODELS = frozenset({"model", "net", "network", "module", "m"})
_BATCHES = frozenset({"batch", "b", "data", "sample", "samples", "xy", "micro", "micro_batch"})
_PREDICTIONS = frozenset(
    {"input", "inputs", "pred", "preds", "prediction", "predictions", "predicted", "output", "outputs", "out", "logits"}
    | {"logit", "scores", "y_pred", "y_hat", "yhat", "x"}
)
_TARGETS = frozenset({"target", "targets", "label", "labels", "y", "y_true", "truth", "gt", "ground_truth"})


def call_loss_fn(loss_fn: LossFn, model: Any, batch: Any, *, call: str) -> Loss:
    """Call a user's loss function and read its result.

    An error inside the function propagates unchanged. The function is inspected only after an error: for a criterion, a
    function with another number of arguments, or swapped ones, a new error shows the line to write.

    Args:
        loss_fn: Called as ``loss_fn(model, batch)``.
        model: The model.
        batch: The batch, or a part of it.
        call: The user's call, for messages.

    Raises:
        InputTypeError: It cannot be called this way, or does not return a loss.
        InputError: It returns several numbers, or a loss without a graph while gradients are enabled.
    """
    loss = read_loss(run_loss_fn(loss_fn, model, batch, call=call), call=call)
    value = loss.mean if loss.mean is not None else loss.value
    if not value.requires_grad and torch.is_grad_enabled() and not isinstance(loss.count, Tensor) and loss.weight:
        _refuse_without_graph(model, call)
    return loss


def run_loss_fn(loss_fn: LossFn, model: Any, batch: Any, *, call: str) -> object:
    """Call a user's loss function and return its result unchanged; see `call_loss_fn`."""
    try:
        return loss_fn(model, batch)
    except _MISTAKES as error:
        refusal = _misuse(loss_fn, model, batch, error, call)
        if refusal is None:
            raise
        raise refusal from error


def check_loss_fn(loss_fn: object, batch: object, *, call: str, before: str = "") -> None:
    """Check that a loss function can be called, before anything else is done.

    Args:
        loss_fn: The loss function.
        batch: The batch to pass to it.
        call: The user's call, for messages.
        before: The arguments before the batch, as written in the call.

    Raises:
        InputTypeError: It cannot be called, or it was swapped with the batch.
    """
    if callable(loss_fn) and not isinstance(loss_fn, type):
        return
    if isinstance(loss_fn, type):
        got, fix = f"the class {loss_fn.__name__}", f"write criterion = {loss_fn.__name__}() once, and {_line(batch)}"
    elif loss_fn is None:
        got, fix = "a NoneType", f"write {_line(batch)}"
    elif callable(batch):
        got, fix = f"a {type(loss_fn).__name__}, and a function as batch", f"write {call}({before}batch, loss_fn)"
    elif isinstance(loss_fn, list) or (isinstance(loss_fn, Tensor) and loss_fn.dim()):
        got, fix = f"a {type(loss_fn).__name__}, perhaps the targets", f"write {call}({before}(x, y), loss_fn)"
    else:
        got, fix = f"a {type(loss_fn).__name__}", "pass the function itself, not its result loss_fn()."
    raise InputTypeError(f"{call}(loss_fn=...)", got=got, expected=_EXPECTED, fix=fix)


def read_loss(result: object, *, call: str) -> Loss:
    """Read the result of a loss function; a tensor is a mean over rows.

    Args:
        result: A tensor, or a `Loss`.
        call: The user's call, for the message.

    Raises:
        InputError: The result is a tuple or a list, which does not say what its entries are, several numbers, or a
            complex one.
        InputTypeError: The result is anything else.
    """
    if isinstance(result, Loss):
        return result
    if isinstance(result, Tensor):
        if result.is_complex():
            refuse_complex(result, call=call)
        if result.numel() == 1:
            return _unchecked(result, None, None, None)
        raise InputError(
            call,
            got=f"a tensor of shape {tuple(result.shape)}",
            expected="the mean loss as a 0-dim tensor, or mk.Loss(...)",
            fix="reduce it: end loss_fn with `return losses.mean()`.",
        )
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


def refuse_complex(loss: Tensor, *, call: str) -> NoReturn:
    """Refuse a complex loss. Plain ``loss.backward()`` does so too, but a backward with a given slope does not.

    Raises:
        InputError: Always.
    """
    raise InputError(
        call,
        got=f"a complex loss ({loss.dtype})",
        expected="a real loss: nothing is smaller or larger than a complex number",
        fix="take its size, as in `return loss.abs()` or `d.abs().square().mean()`; or its real part, loss.real.",
    )


def _fix(result: object) -> str:
    if result is None:
        return "end loss_fn with `return loss`."
    if isinstance(result, np.ndarray | np.generic) and not isinstance(result, float):
        return "compute the loss with torch, not with NumPy, which has no gradients, and `return loss`."
    if isinstance(result, numbers.Number):
        return "return the loss itself, not loss.item()."
    if isinstance(result, Mapping) and isinstance(result.get("loss"), Tensor):
        return 'write `return result["loss"]`, or `return mk.Loss(mean=loss, outputs=...)` with the rest as outputs.'
    if isinstance(getattr(result, "loss", None), Tensor):
        return "write `return result.loss`, or `return mk.Loss(mean=loss, outputs=...)` with the rest as outputs."
    return "write `return mk.Loss(mean=loss, outputs=...)`, with the loss as a tensor and anything else as outputs."


def _refuse_without_graph(model: Any, call: str) -> None:
    is_frozen = isinstance(model, nn.Module) and not any(each.requires_grad for each in model.parameters())
    raise InputError(
        call,
        got="a loss without a graph" + (", from a model in which no parameter requires a gradient" * is_frozen),
        expected="a loss computed from the model's output with gradients enabled",
        fix="unfreeze the parameters to train: model.requires_grad_(True)."
        if is_frozen
        else "let loss_fn return the loss itself: not from torch.tensor(...), not under torch.no_grad(), not detached.",
    )


def _misuse(loss_fn: object, model: Any, batch: Any, error: Exception, call: str) -> InputTypeError | None:
    """Return an error that explains how a loss function was misused; None if its error has another cause."""
    if isinstance(error, MemkitError):
        return None
    if not callable(loss_fn):
        return InputTypeError(call, got=f"a {type(loss_fn).__name__}", expected=_EXPECTED, fix=f"write {_line(batch)}")
    found = _known_function(loss_fn, batch) or _by_its_signature(loss_fn, model, batch)
    if found is None and isinstance(error, TypeError) and "numpy.ndarray" in str(error) and _has_arrays(batch):
        found = "NumPy arrays in the batch", "batch = torch.utils.data.default_convert(batch) before the call"
    if found is None:
        return None
    got, line = found
    first = f"{type(error).__name__}: {error}".partition("\n")[0][:100]
    return InputTypeError(call, got=f"{got} ({first})", expected=_EXPECTED, fix=f"write {line}")


def _known_function(loss_fn: Any, batch: Any) -> tuple[str, str] | None:
    """Describe one of torch's criteria or a method of Lightning's, and return the line to write; None for others."""
    inner = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    name = getattr(inner, "__name__", "")
    if isinstance(getattr(inner, "__self__", None), nn.Module) and name in _STEPS:
        return f"the method {name}(batch, batch_idx)", f"loss_fn=lambda model, batch: model.{name}(batch, 0)"
    if type(inner).__module__ == "torch.nn.modules.loss":
        return f"the criterion {type(inner).__name__}", _line(batch)
    if getattr(inner, "__module__", "") == "torch.nn.functional":
        return f"the function {name}", _line(batch, f"torch.nn.functional.{name}")
    return None


def _by_its_signature(loss_fn: Any, model: Any, batch: Any) -> tuple[str, str] | None:
    """Describe a function that does not take a model and a batch, and return the line to write; None for others."""
    is_module = isinstance(loss_fn, nn.Module)
    try:
        signature = inspect.signature(loss_fn.forward if is_module else loss_fn)
    except (TypeError, ValueError):  # a function without one, such as a built-in
        return None
    name = getattr(loss_fn, "__name__", "criterion")
    taken = [each.name for each in signature.parameters.values() if each.kind < each.VAR_POSITIONAL]
    shown = f"loss_fn({', '.join(taken)})"
    if not _takes(signature, model, batch):
        if is_module:
            return ("the model itself" if loss_fn is model else f"a {type(loss_fn).__name__}"), _line(batch)
        if getattr(loss_fn, "__self__", None) is model and _takes(signature, batch):
            return f"the model's method {name}({taken[0]})", f"loss_fn=lambda model, batch: model.{name}(batch)"
        needed = [each for each in taken if signature.parameters[each].default is inspect.Parameter.empty]
        number = "one argument" if len(taken) == 1 else f"{len(taken)} arguments"
        return f"{shown} of {number}", _in_columns(batch, name, needed) or _line(batch)
    first, second = (each.lower() for each in (*taken, "", "")[:2])
    if first in _PREDICTIONS and second in _TARGETS:
        return shown, _line(batch, "criterion" if name == "<lambda>" else name)
    if second in _MODELS and first in _BATCHES | _PREDICTIONS:
        is_named = name not in ("<lambda>", "criterion")
        swapped = f"lambda model, batch: {name}(batch, model)" if is_named else f"lambda {taken[1]}, {taken[0]}: ..."
        return f"{shown}, its arguments swapped", f"loss_fn={swapped}"
    return None


def _in_columns(batch: object, name: str, needed: list[str]) -> str | None:
    """Return the line for a function of the model and of each column of the batch; None if it is not one."""
    places: list[object] = []
    if isinstance(batch, tuple | list) and len(needed) == len(batch) + 1:
        places = list(range(len(batch)))
    elif isinstance(batch, Mapping) and len(needed) > 1 and set(needed[1:]) <= set(batch):
        places = list(needed[1:])
    columns = ", ".join(f"batch[{place!r}]" for place in places)
    known = "your_loss" if name == "<lambda>" else name
    return f"loss_fn=lambda model, batch: {known}(model, {columns})" if places else None


def _has_arrays(batch: object) -> bool:
    return any(isinstance(leaf, np.ndarray) for leaf in pytree.tree_leaves(batch))


def _takes(signature: inspect.Signature, *args: object) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _line(batch: object, criterion: str = "criterion") -> str:
    """Return the loss function to write for a batch like this one and a criterion."""
    given, wanted = "batch[0]", "batch[1]"
    if isinstance(batch, Mapping) and len(batch) > 1:
        keys = list(batch)
        target = next((key for key in keys[1:] if str(key).lower() in _TARGETS), keys[1])
        given, wanted = f"batch[{keys[0]!r}]", f"batch[{target!r}]"
    return f"loss_fn=lambda model, batch: {criterion}(model({given}), {wanted})"


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
    """Detach all tensors in nested containers, dataclasses among them."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    children = pytree.children_of(outputs)
    return outputs if children is None else pytree.with_children(outputs, [detached(each) for each in children])
