"""Validation during training: whether the model improves, and metrics that need the memory of only one batch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NoReturn, final

import torch
from torch import Tensor, nn

from memkit._core.calls import refuse_called_property
from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError
from memkit._core.printable import described
from memkit._core.settings import Checker, check_version
from memkit._core.words import guided
from memkit._gradients.loss import call_loss_fn
from memkit._machine import random_state
from memkit._recovery.attempt import Done, unless_failed
from memkit.recipes.order import repeat_epoch
from memkit.recipes.reducers import Mean, Reducer, TotalOverCount, WeightedMean
from memkit.recipes.words import MONITOR_ABSENT, MONITOR_WORDS
from memkit.train.checks import read_count
from memkit.train.evaluation import Evaluation
from memkit.train.loader import to_device
from memkit.train.split import count_rows

_VERSION = 2
_CALL = "ValidationMonitor"
_CALL_COUNT = "count of loss_fn of a validation"
_HOST = torch.device("cpu")
_LOWER_IS_BETTER = frozenset(
    (
        *("loss", "losses", "error", "err", "errors", "cost", "energy", "nll", "bpd", "bpc", "ppl", "perplexity"),
        *("mae", "mse", "rmse", "mape", "l1", "l2", "bce", "ce", "kl", "distance", "dist", "chamfer", "hausdorff"),
        *("fid", "kid", "lpips", "wer", "cer", "eer", "epe", "crps", "brier"),
    )
)
ValidationFn = Callable[[nn.Module, Any], Mapping[str, Any]]


@guided(words=MONITOR_WORDS, absent=MONITOR_ABSENT, methods=("update",))
@final
class ValidationMonitor:
    """Tells after each validation whether it is the best so far and whether to stop.

    Args:
        patience: Validations without a new best after which `should_stop` is true; None never stops.
        mode: ``"min"`` for a loss, ``"max"`` for an accuracy. None means ``"min"`` for a metric named like a loss, an
            error or a distance; for any other metric the mode must be given, or the worst state might be kept as the
            best.
        metric: The validation figure that a loop passes to the monitor.
        min_delta: How much a value must beat the best one to count as an improvement.

    Attributes:
        best: The best value; None before there is one.
        best_step: The step of the best value; None before there is one.
        history: Step and value of every validation, in order.
        plateau: Validations since the best one. A NaN is never the best and counts as no improvement.

    Raises:
        ConfigError: A setting is invalid.

    Example:
        >>> import memkit as mk
        >>> monitor = mk.ValidationMonitor(patience=2)
        >>> [monitor.update(value) for value in (0.9, 0.7, float("nan"), 0.8)], monitor.should_stop
        ([True, True, False, False], True)
        >>> monitor.best, monitor.best_step, monitor.history[0]
        (0.7, 2, (1, 0.9))
    """

    def __init__(
        self,
        patience: int | None = 5,
        mode: Literal["min", "max"] | None = None,
        *,
        metric: str = "loss",
        min_delta: float = 0.0,
    ) -> None:
        if not isinstance(metric, str):
            raise Checker(_CALL).refusal("metric", metric, "the name of a figure", fix="write metric='loss'.")
        if mode is None and not _LOWER_IS_BETTER.isdisjoint(re.split(r"[^a-z0-9]+", metric.lower())):
            mode = "min"
        check = Checker(_CALL)
        check.choice(
            "mode", mode, ("min", "max"), fix=f"pass mode='min' or mode='max', whichever is better for {metric!r}."
        )
        if patience is not None:
            check.whole("patience", patience, 1, fix=_patience_fix(patience))
        check.number("min_delta", min_delta, 0)
        self.patience, self.mode, self.metric, self.min_delta = patience, mode, metric, min_delta
        self.best: float | None = None
        self.best_step: int | None = None
        self.history: list[tuple[int, float]] = []
        self.plateau = 0

    @property
    def should_stop(self) -> bool:
        """Whether there has been no new best for ``patience`` validations; a property, so without parentheses."""
        refuse_called_property("monitor.should_stop()", "monitor.should_stop, without parentheses")
        return self.patience is not None and self.plateau >= self.patience

    def update(self, value: float | Tensor, step: int | None = None) -> bool:
        """Record the value of a validation.

        Args:
            value: A number, or a one-element tensor, which is read back to the host.
            step: The training step, for `best_step` and `history`. None counts validations, from 1.

        Returns:
            True if it is the best so far.

        Raises:
            InputTypeError: The value is not a number: None, as from a mean over no values, or a matrix.
            ConfigError: The step is not a whole number, 0 or more.
        """
        at = len(self.history) + 1 if step is None else Checker(f"{_CALL}.update(value, step)").whole("step", step)
        outcome = unless_failed((TypeError, ValueError, RuntimeError), float, value)
        if not isinstance(outcome, Done):
            raise InputTypeError(
                f"{_CALL}.update(value)",
                got=described(value) if isinstance(value, Tensor) else repr(value),
                expected=f"a number, the figure {self.metric!r} of a validation",
                fix=_value_fix(value, self.metric),
            ) from outcome.error
        number = outcome.result
        self.history.append((at, number))
        is_best = not math.isnan(number) and (self.best is None or self._gain(number, self.best) > self.min_delta)
        if is_best:
            self.best, self.best_step, self.plateau = number, at, 0
        else:
            self.plateau += 1
        return is_best

    def _gain(self, value: float, best: float) -> float:
        return 0.0 if value == best else best - value if self.mode == "min" else value - best  # inf - inf is NaN

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, how long ago it was reached, and the history."""
        return {
            "version": _VERSION,
            "mode": self.mode,
            "best": self.best,
            "best_step": self.best_step,
            "plateau": self.plateau,
            "history": [list(each) for each in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`.

        Raises:
            FileFormatError: The state has another version, or the other mode.
        """
        check_version("ValidationMonitor.load_state_dict(state)", state, _VERSION)
        if state.get("mode") != self.mode:
            raise FileFormatError(
                "ValidationMonitor.load_state_dict(state)",
                got=f"mode {state.get('mode')!r}",
                expected=f"mode {self.mode!r}",
                fix=f"write ValidationMonitor(mode={state.get('mode')!r}), as before, or start with a new one.",
            )
        self.best, self.best_step, self.plateau = state["best"], state["best_step"], state["plateau"]
        self.history = [(step, value) for step, value in state["history"]]


def _patience_fix(patience: object) -> str:
    try:
        meant = int(str(patience))
    except ValueError:
        meant = 0
    return f"write patience={meant}." if meant > 0 else "write patience=None to watch without stopping."


def _value_fix(value: object, metric: str) -> str:
    """Return the way out for a value that is not a number."""
    if isinstance(value, Mapping) and value:
        return f"write monitor.update(value[{(metric if metric in value else next(iter(value)))!r}])."
    if isinstance(value, (list, tuple)) and value:
        return "write monitor.update(sum(values) / len(values)), or monitor.update(values[-1])."
    if isinstance(value, Tensor) and value.numel() > 1:
        return "write monitor.update(value.mean())."
    return "let val_fn return rows with a weight above zero, or watch another figure with metric=..."


def validate(
    evaluate: Evaluation,
    loader: Iterable[Any],
    fn: ValidationFn,
    *,
    device: torch.device,
    reducers: Mapping[str, Reducer] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Run a validation; each batch's results leave the device at once, and only the figures are kept.

    The random state is restored afterwards, so training continues as if no validation had run.

    Args:
        evaluate: The object that ``with trainer.evaluation() as evaluate`` yields.
        loader: The batches.
        fn: ``fn(model, batch)`` returns a mapping: for each figure the input of its reducer, one row per row of the
            batch, as a tensor or a tuple of tensors. The loss of a `RowsOfLoss` is checked where a batch has to be cut.
        device: Where the model is.
        reducers: By name. A figure without one uses `Mean`, or `WeightedMean` for a tuple ``(values, weights)``.
        should_stop: Called before each batch.

    Returns:
        The figures; None if the validation was stopped.

    Raises:
        InputError: There was no batch; a figure is a single number for a whole batch, so its mean would be a mean of
            means; a reducer has the name of no figure; or the loss is no mean over independent rows, and was cut.
        InputTypeError: ``fn`` does not return a mapping, or a figure is not a tensor.
        MemkitOutOfMemoryError: Even one row does not fit.

    Memory cost: the outputs of one batch on the host, and those of one part of it on the device.
    """
    given = {} if reducers is None else dict(reducers)
    for reducer in given.values():
        reducer.reset()
    has_batch, first = False, True
    repeat_epoch(loader)

    def figures_of(model: nn.Module, part: Any) -> dict[str, Any]:
        return to_device(_check_figures(fn(model, part)), _HOST)

    is_of_loss = isinstance(fn, RowsOfLoss)
    evaluate.mean_of = RowsOfLoss.mean if is_of_loss else None
    with random_state.preserved():
        for batch in loader:
            has_batch = True
            if should_stop():
                return None
            rows = evaluate(to_device(batch, device), figures_of)
            if first and (unused := sorted(given.keys() - rows.keys())):
                _refuse_unused(unused, rows)
            first, size = False, _rows_in(batch)
            for name, values in rows.items():
                _check_rows(name, values, size)
                parts = values if isinstance(values, tuple) else (values,)
                usual: Reducer = TotalOverCount() if is_of_loss else Mean() if len(parts) == 1 else WeightedMean()
                reducer = given.setdefault(name, usual)
                if is_of_loss and not isinstance(reducer, TotalOverCount):
                    parts = parts[0] / parts[1], parts[1]  # the user's reducer takes means and weights
                reducer.update(*parts)
    if not (given and has_batch):
        raise InputError(
            "a validation",
            got="no batches, or no figures",
            expected="at least one batch, and a function that returns figures by name",
            fix="check the validation loader: an iterator is exhausted after one validation, so pass a DataLoader "
            "or a list.",
        )
    return {name: reducer.result() for name, reducer in given.items()}


def _check_figures(figures: Any) -> dict[str, Any]:
    if not isinstance(figures, Mapping):
        raise InputTypeError(
            "val_fn(model, batch)",
            got=f"a {type(figures).__name__}",
            expected="a mapping of figures, one row for each row of the batch",
            fix="return {'loss': losses} with reduction='none', or omit val_fn to validate with the mean of loss_fn.",
        )
    return dict(figures)


def _rows_in(batch: Any) -> int | None:
    try:
        return count_rows(batch)
    except InputError:
        return None  # packed


def _refuse_unused(names: list[str], figures: Mapping[str, Any]) -> NoReturn:
    raise InputError(
        f"reducers={{{names[0]!r}: ...}} of a validation",
        got=f"figures {', '.join(map(repr, figures))} from val_fn",
        expected="a figure for each reducer",
        fix="use the name of a figure as the key of the reducer.",
    )


def _check_rows(name: str, values: Any, num_rows: int | None) -> None:
    """Refuse a single number for a whole batch: its mean would weight a smaller last batch like the others."""
    parts = values if isinstance(values, tuple) else (values,)
    for each in parts:
        if not isinstance(each, Tensor):
            raise InputTypeError(
                "val_fn(model, batch)",
                got=f"a {type(each).__name__} as figure {name!r}",
                expected="tensors, one row for each row of the batch",
                fix="return the losses per row, not .item() of their mean.",
            )
        is_mean = not each.dim() or (len(each) == 1 and not isinstance(values, tuple) and num_rows not in {1, None})
        if is_mean:
            rows = "rows" if num_rows is None else f"{num_rows} rows"
            raise InputError(
                "val_fn(model, batch)",
                got=f"one number as figure {name!r} of a batch of {rows}",
                expected="one row for each row of the batch: a mean of batch means is not the mean over all rows",
                fix="return values per row, with reduction='none'; or (values, weights), two tensors (n,): "
                f"{{{name!r}: (loss[None], count[None])}}.",
            )


def metric_of(figures: Mapping[str, Any], monitor: ValidationMonitor) -> Any:
    """Return the figure that a monitor watches.

    Raises:
        ConfigError: No figure has that name.
    """
    if monitor.metric not in figures:
        raise ConfigError(
            f"ValidationMonitor(metric={monitor.metric!r})",
            got=f"a validation of {', '.join(figures)}",
            expected=f"a validation with the figure {monitor.metric!r}",
            fix=f"pass one of these as metric=..., or let val_fn return {monitor.metric!r}.",
        )
    return figures[monitor.metric]


class RowsOfLoss:
    """Turns a training loss function into a function for `validate`: the exact mean over all rows, as ``"loss"``.

    A batch without a common row dimension needs a `Loss` with a count: nothing else gives the weight of its mean.

    Args:
        loss_fn: Called as ``loss_fn(model, batch)``.
    """

    def __init__(self, loss_fn: Callable[[nn.Module, Any], Any]) -> None:
        self._loss_fn = loss_fn

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each row's share of the batch's total and of its count."""
        loss = call_loss_fn(self._loss_fn, model, batch, call="loss_fn of a validation")
        count = None if loss.count is None else read_count(loss.count, stay_on_device=False, call=_CALL_COUNT)
        try:
            num_rows = count_rows(batch)
        except InputError as error:  # packed, for split_fn: the loss has its own weight, and the batch is not split
            num_rows = 1
            if count is None:
                raise InputError(
                    "loss_fn of a validation",
                    got="a loss without its count, of a batch whose tensors have no common rows",
                    expected="the weight of this loss relative to other batches",
                    fix="return mk.Loss(mean=loss, count=n), or pass val_fn=...",
                ) from error
        count = float(num_rows) if count is None else count
        total = loss.detached(count).total() / num_rows
        dtype = torch.promote_types(total.dtype, torch.float32)
        weight = total.new_tensor(count / num_rows, dtype=dtype)
        return {"loss": (total.expand(num_rows), weight.expand(num_rows))}

    @staticmethod
    def mean(figures: dict[str, Any]) -> Tensor:
        """Return the mean over what the rows of a result count; their total if they count nothing."""
        pair: tuple[Tensor, Tensor] = figures["loss"]
        count = pair[1].sum()
        return pair[0].sum() / torch.where(count == 0, 1.0, count)
