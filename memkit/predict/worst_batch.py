"""`find_worst_batch`: the batch of a loader whose step takes the most memory, found before the first step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from memkit._charts.overview import Overview, Overviewed
from memkit._core.errors import InputError, InputTypeError
from memkit._core.foreign import LOADER
from memkit._core.settings import Checker
from memkit._core.units import format_bytes
from memkit._core.words import guided
from memkit._machine import random_state
from memkit._simulation.simulation import check_model
from memkit._torch.pytree import children_of
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.gpus import GPU
from memkit.predict.usage import estimate_memory_usage
from memkit.predict.words import ESTIMATE_WORDS

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from memkit._gradients.loss import LossFn
    from memkit._simulation.simulation import MakeOptimizer

_CALL = "find_worst_batch(...)"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class WorstBatch(Overviewed):
    """The batch whose step takes the most memory. It prints as its verdict, its place, and the parts of its memory.

    Attributes:
        number: Which batch of the loader it is, from 0.
        batch: The batch.
        estimate: The memory of its step.
        num_batches: Batches that were looked at.
        estimates: The memory of each kind of batch by the number of its first batch, the largest first. Batches of
            equal structure, shapes and dtypes are of one kind.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Linear(64, 64)
        >>> loader = [torch.ones(rows, 64) for rows in (8, 100, 8, 31)]
        >>> worst = mk.predict.find_worst_batch(loader, model, lambda model, x: model(x).square().mean())
        >>> worst.number, len(worst.batch), list(worst.estimates)
        (1, 100, [1, 3, 0])
    """

    number: int
    batch: Any
    estimate: MemoryEstimate
    num_batches: int
    estimates: dict[int, MemoryEstimate]

    def _overview(self) -> Overview:
        inside = self.estimate._overview()  # noqa: SLF001 - of the same package
        place = f"batch {self.number} of {self.num_batches}"
        others = [
            (f"batch {number}", format_bytes(each.required_bytes))
            for number, each in list(self.estimates.items())[:_SHOWN]
        ]
        return Overview(f"{place} is the largest; {inside.headline}", [*inside.rows, *others[1:]], inside.notes)


@guided(words=ESTIMATE_WORDS | {"loader": f"{LOADER} batches", "num_batches": "limit max_steps"})
def find_worst_batch(
    loader: Iterable[Any],
    model: nn.Module,
    loss_fn: LossFn,
    *,
    optimizer: str | MakeOptimizer | Optimizer = "adamw",
    precision: Literal["bf16-mixed", "fp16-mixed"] | None = None,
    target: str | GPU = "cpu",
    accumulation_steps: int = 1,
    selected_fraction: float | None = None,
    num_batches: int | None = None,
) -> WorstBatch:
    """Find the batch whose training step has the largest predicted peak, before the first step.

    A run over data of varying sizes ends when its largest batch comes, hours later. Here every batch is loaded once,
    and a step of each kind of batch is run on tensors without data. Batches are of one kind if structure, shapes and
    dtypes are equal, so a loader of equal batches costs one estimate.

    Args:
        loader: The batches: one pass is made over it. A shuffling loader draws as it would have without this call: the
            random state is restored. Pass the batch sampler's own order to know which step it will be.
        model: As for `memkit.estimate_memory_usage`.
        loss_fn: As for `memkit.estimate_memory_usage`.
        optimizer: As for `memkit.estimate_memory_usage`.
        precision: As for `memkit.estimate_memory_usage`.
        target: As for `memkit.estimate_memory_usage`.
        accumulation_steps: As for `memkit.estimate_memory_usage`.
        selected_fraction: As for `memkit.estimate_memory_usage`.
        num_batches: How many batches to look at; None for all.

    Returns:
        The batch, its number, and its estimate. Of equal peaks the first counts.

    Raises:
        InputTypeError: ``loader`` cannot be iterated, or ``model`` is not a module.
        InputError: The loader has no batches; a size depends on data.
        ConfigError: As for `memkit.estimate_memory_usage`.

    Memory cost:
        Two batches on the host, and about 1 kB for each operator of a step.

    Source:
        ``docs/estimate.md``; checked against an estimate of every batch in ``tests/predict/test_worst_batch.py``.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Linear(64, 64)
        >>> loader = [torch.ones(rows, 64) for rows in (8, 100_000, 31)]
        >>> worst = mk.predict.find_worst_batch(
        ...     loader, model, lambda model, x: model(x).square().mean(), target="RTX 4090"
        ... )
        >>> worst.number, worst.estimate.fits("RTX 4090")
        (1, True)
    """
    _check_loader(loader, model)
    if num_batches is not None:
        Checker(_CALL).whole("num_batches", num_batches, 1)
    estimates: dict[Hashable, tuple[int, MemoryEstimate]] = {}
    worst: tuple[int, Any, MemoryEstimate] | None = None
    number = -1
    with random_state.preserved():
        for number, batch in enumerate(islice(loader, num_batches)):
            kind = _kind_of(batch)
            if kind in estimates:
                continue
            estimate = estimate_memory_usage(
                model,
                batch,
                loss_fn,
                optimizer=optimizer,
                precision=precision,
                target=target,
                accumulation_steps=accumulation_steps,
                selected_fraction=selected_fraction,
            )
            estimates[kind] = number, estimate
            if worst is None or _size(estimate) > _size(worst[2]):
                worst = number, batch, estimate
    if worst is None:
        raise InputError(
            _CALL,
            got="a loader without batches",
            expected="at least one batch",
            fix="pass a DataLoader or a list; an iterator is exhausted after one pass.",
        )
    ordered = sorted(estimates.values(), key=lambda each: _size(each[1]), reverse=True)
    return WorstBatch(*worst, num_batches=number + 1, estimates=dict(ordered))


def _size(estimate: MemoryEstimate) -> tuple[int, int]:
    """Return the bytes reserved, which decide what fits, in steps of 2 MiB; among equals, the bytes in tensors."""
    return estimate.required_bytes, estimate.peak_bytes


def _check_loader(loader: Any, model: object) -> None:
    """Refuse what is no loader, and the model in its place."""
    if isinstance(loader, nn.Module) and not isinstance(model, nn.Module):
        got = "the model first and the batches second"
    elif not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        got = f"a {type(loader).__name__} as loader"
    elif isinstance(loader, Tensor):
        got = "one tensor as loader"
    else:
        check_model("find_worst_batch", model)
        return
    raise InputTypeError(
        _CALL,
        got=got,
        expected="batches to iterate over, such as a DataLoader, then the model",
        fix="write find_worst_batch(loader, model, loss_fn), with loader = [batch] for one batch.",
    )


def _kind_of(batch: Any) -> Hashable:
    """Return what batches of the same memory have in common: structure, shapes, strides and dtypes."""
    if isinstance(batch, Tensor):
        strides = batch.stride() if batch.layout is torch.strided else ()
        return batch.shape, strides, batch.dtype, batch.layout, batch.requires_grad
    children = children_of(batch)
    if children is None:
        return type(batch), repr(batch) if isinstance(batch, (bool, int, float, str)) else ""
    names = tuple(batch) if isinstance(batch, Mapping) else ()
    return type(batch), names, tuple(map(_kind_of, children))
