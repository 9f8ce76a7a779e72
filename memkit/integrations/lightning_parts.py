"""Everything that a Lightning training_step produces besides its loss, by part: logged values, outputs, metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from memkit._core.errors import InputError
from memkit._torch import pytree
from memkit.train.split import count_rows

_LOG = inspect.signature(LightningModule.log)
_HALF = {torch.float16, torch.bfloat16}
_States = dict[str, torch.Tensor | list[torch.Tensor]]


@dataclass(slots=True)
class BatchPart:
    """One part of a batch.

    Attributes:
        key: Its position in the batch: its first row, or the nested index of a part within a part.
        num_rows: Number of its rows; None for a packed batch, or one without common rows.
        weight: Its weight in means: its rows, or the count that came with its loss.
        outputs: The step's outputs besides the loss.
        logged: Arguments of `LightningModule.log`, and a metric's value on this part.
        before: States of the metrics before it, with their update counts.
    """

    key: tuple[int, ...]
    num_rows: int | None
    weight: float
    outputs: dict[str, Any] = field(default_factory=dict)
    logged: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    before: list[tuple[_States, int]] = field(default_factory=list)

    @torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
    def log(self, *args: Any, **kwargs: Any) -> None:
        """Record the arguments of a `LightningModule.log` call, without the graph."""
        arguments = _LOG.bind(None, *args, **kwargs).arguments
        value = arguments["value"]
        said = value
        if isinstance(value, Metric):
            said = value._forward_cache  # noqa: SLF001 - the value that Lightning itself logs for the step
        arguments.pop("self")
        self.logged.append((arguments, said.detach() if isinstance(said, torch.Tensor) else said))


class BatchParts:
    """The parts of one batch, in order. A part that ran out of memory is dropped when its rows are run again.

    Args:
        module: The module; its metrics are restored to their state before a failed part.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [each for each in module.modules() if isinstance(each, Metric)]
        self._parts: list[BatchPart] = []

    def begin(self, key: tuple[int, ...], num_rows: int | None) -> BatchPart:
        """Begin a part; any recorded part from its position on has failed."""
        kept = [part for part in self._parts if part.key < key and part.key != key[: len(part.key)]]
        if len(kept) < len(self._parts):
            for metric, (states, num_updates) in zip(self._metrics, self._parts[len(kept)].before, strict=True):
                for name, state in states.items():
                    setattr(metric, name, state)
                metric._update_count, metric._computed = num_updates, None  # noqa: SLF001 - there is no public API
        before = [(_copy_states(metric), metric.update_count) for metric in self._metrics]
        part = BatchPart(key, num_rows, float(num_rows or 0), before=before)
        self._parts = [*kept, part]
        return part

    def flush(self, log: Callable[..., None]) -> None:
        """Log each value once, for the whole batch: means are weighted, sums added up.

        Args:
            log: `LightningModule.log`.
        """
        calls: dict[str, list[tuple[dict[str, Any], Any, float]]] = {}
        for part in self._parts:
            for arguments, said in part.logged:
                weight = arguments.get("batch_size") or part.weight
                calls.setdefault(arguments["name"], []).append((arguments, said, float(weight)))
        for same in calls.values():
            arguments = dict(same[0][0])
            reduce_fx = arguments.get("reduce_fx", "mean")
            whole = _reduce([said for _, said, _ in same], [weight for *_, weight in same], reduce_fx)
            if arguments.get("batch_size") is not None:
                arguments["batch_size"] = sum(each["batch_size"] for each, *_ in same)
            if isinstance(arguments["value"], Metric):
                arguments["value"]._forward_cache = whole  # noqa: SLF001 - as above
            else:
                arguments["value"] = whole
            log(**arguments)

    def outputs(self) -> dict[str, Any]:
        """Return the step's outputs besides the loss, for the whole batch.

        Raises:
            InputError: An output is neither a tensor with one row per row of the batch, nor a number that can be
                averaged.
        """
        if len(self._parts) == 1:
            return self._parts[0].outputs
        joined: dict[str, Any] = {}
        for name in dict.fromkeys(name for part in self._parts for name in part.outputs):
            columns = [pytree.tree_flatten(part.outputs.get(name)) for part in self._parts]
            spec = columns[0][1]
            if any(each != spec for _, each in columns):  # for example a list as long as its part
                raise self._refusal(name, [part.outputs.get(name) for part in self._parts])
            leaves = [self._join(name, column) for column in zip(*(leaves for leaves, _ in columns), strict=True)]
            joined[name] = pytree.tree_unflatten(leaves, spec)
        return joined

    def _join(self, name: str, column: Sequence[Any]) -> Any:
        if all(_has_row_each(value, part.num_rows) for value, part in zip(column, self._parts, strict=True)):
            if len({value.shape[1:] for value in column}) == 1:
                return torch.cat(list(column))
        elif all(isinstance(value, float) or _is_number(value) for value in column):
            return _reduce(column, [part.weight for part in self._parts], "mean")
        raise self._refusal(name, column)

    def _refusal(self, name: str, column: Sequence[Any]) -> InputError:
        shown = (
            f"{type(each).__name__} {tuple(each.shape) if isinstance(each, torch.Tensor) else ''}" for each in column
        )
        return InputError(
            "MemoryEfficientModule.training_step(...)",
            got=f"{', '.join(dict.fromkeys(each.strip() for each in shown))} in {name!r} besides the loss, from a "
            "batch that was split",
            expected="a tensor with a row for each row of the batch, or a floating-point number, which is averaged",
            fix="log it with self.log(..., reduce_fx=...), which defines how to combine the parts.",
        )


def rows_of(batch: Any) -> torch.Tensor | tuple[()]:
    """Return the indices of a batch's rows, to be split with it; (rows,), int64. ``()`` if it has no common rows."""
    try:
        return torch.arange(count_rows(batch))
    except InputError:  # `SplitLoss` refuses it if it may have to be split
        return ()


def with_places(split_fn: Callable[[Any, int], list[Any]]) -> Callable[[Any, int], list[Any]]:
    """Wrap a ``split_fn`` so that it splits pairs of a packed batch and its position."""

    def split(item: Any, num_parts: int) -> list[Any]:
        batch, key = item
        parts = split_fn(batch, num_parts)
        return [(part, (*key, place)) for place, part in enumerate(parts)] if type(parts) is list else parts

    return split


def detached_part(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outputs without their graphs."""
    detached_part: dict[str, Any] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, dict(outputs))
    return detached_part


def _reduce(values: Sequence[Any], weights: Sequence[float], reduce_fx: Any) -> Any:
    """Combine the values of a batch's parts the way Lightning combines those of batches."""
    name = getattr(reduce_fx, "__name__", reduce_fx).lower()
    if len(values) == 1 or not all(isinstance(each, torch.Tensor | float | int) for each in values):
        return values[-1]  # a single part; or a metric without a value per step
    if name in {"min", "max"}:
        return (min if name == "min" else max)(values)
    if name == "sum":
        return sum(values)
    kept = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if not kept:
        return values[-1]
    total = sum(_in_float(value) * weight for value, weight in kept)
    return total / sum(weight for _, weight in kept)


def _has_row_each(value: Any, num_rows: int | None) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and num_rows in {None, value.shape[0]}


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _in_float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _copy_states(metric: Metric) -> _States:
    return {
        name: list(state) if isinstance(state, list) else state.detach().clone()
        for name, state in metric.metric_state.items()
    }
