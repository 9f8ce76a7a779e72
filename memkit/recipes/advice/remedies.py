"""Remedies for a step's peak: each knows when it applies, what to write, and how to apply it."""

from __future__ import annotations

import importlib
import importlib.util
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from memkit._core.errors import ConfigError, InputError
from memkit.chunk.processor import ChunkedProcessor
from memkit.chunk.tiled import tiled_apply
from memkit.recipes.advice.step import AdvicePrecision, AdvisedStep, Observation, StepChange, Training
from memkit.recipes.advice.submodules import (
    chunkable,
    find_mlps,
    halve_widths,
    held_by_modules,
    replace_submodule,
    tileable,
)
from memkit.train.backward_steps import step_in_backward
from memkit.train.checkpointing import Choice, choose_blocks
from memkit.train.split import count_rows
from memkit.train.split_check import scan_modules
from memkit.train.treatments import Treatment

_SHARES = (0.5, 1.0)  # of what the blocks hold at the peak: with the fewest blocks, and with all


def nothing(step: AdvisedStep, stack: ExitStack) -> None:
    """Leave a step unchanged."""


def both(one: StepChange, other: StepChange) -> StepChange:
    """Apply two changes to a step, one after the other."""

    def apply(step: AdvisedStep, stack: ExitStack) -> None:
        one(step, stack)
        other(step, stack)

    return apply


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: some hold batches
class Remedy:
    """One change of a step.

    Attributes:
        name: Short name of the change.
        effect: Effect on the numbers, in words.
        settings: Settings of the wrapper.
        apply: Further changes to a step, whose tensors are stand-ins.
        change: Code to write for those.
        exact: Whether gradients and step stay the same except for rounding.
        compares: The values to compare with the plain step's; None if there is nothing to compare.
        redraws: Whether it draws random numbers in a different order.
        moves: Whether it costs transfers, which no operation count shows.
        batch: A batch that replaces the training's; None for the same one.
        obstacle: Reason why it is ruled out; it is then reported without figures.
    """

    name: str
    effect: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    apply: StepChange = nothing
    change: str = ""
    exact: bool = True
    compares: Literal["gradients", "updates"] | None = "gradients"
    redraws: bool = False
    moves: bool = False
    batch: Any = None
    obstacle: str = ""

    def code(self, precision: AdvicePrecision) -> str:
        """Return all the code to write; ``precision`` is that of the plain step."""
        given = {**({"precision": precision} if self.settings and precision else {}), **self.settings}
        settings = "".join(f", {name}={value!r}" for name, value in given.items())
        wrapper = f"mk.MemoryEfficientTrainingWrapper(model, optimizer{settings})" if settings else ""
        return "\n".join(filter(None, (wrapper, self.change)))

    def change_step(self, step: AdvisedStep, stack: ExitStack) -> None:
        """Apply everything to a step."""
        step.settings |= self.settings
        self.apply(step, stack)

    def with_other(self, other: Remedy) -> Remedy:
        """Combine two remedies, applied one after the other."""
        return Remedy(
            f"{self.name} + {other.name}",
            "; ".join(dict.fromkeys((self.effect, other.effect))),
            settings={**self.settings, **other.settings},
            apply=both(self.apply, other.apply),
            change="\n".join(filter(None, (self.change, other.change))),
            compares="gradients" if "gradients" in (self.compares, other.compares) else "updates",
            redraws=self.redraws or other.redraws,
            moves=self.moves or other.moves,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """The step that remedies are sought for.

    Attributes:
        training: The user's training.
        seen: The plain step on the target, without data.
        on_card: Whether the target is a card.
        changes_model: Whether the model may be changed.
        fewer_edges: Removes edges from a batch; None if not given.
    """

    training: Training
    seen: Observation
    on_card: bool
    changes_model: bool
    fewer_edges: Callable[[Any], Any] | None

    @property
    def num_rows(self) -> int | None:
        """Rows of the batch; None for packed points or graphs."""
        try:
            return count_rows(self.training.batch)
        except InputError:
            return None

    @property
    def obstacle(self) -> str:
        """Why the wrapper cannot run the step; empty if it can."""
        return "" if self.num_rows else "the wrapper cannot tell the rows of this batch, and needs a split_fn"


def find_remedies(case: Case) -> list[Remedy]:
    """List the remedies that apply to a step."""
    return [remedy for find in _FINDERS for remedy in find(case)]


# ------------------------------------------------------------------------------------------------ the batch


def _microbatches(case: Case) -> Iterator[Remedy]:
    mixing = scan_modules(case.training.model)
    obstacle = f"{mixing[0]} normalizes over the rows, and would see those of a part only" if mixing else ""
    for num_parts in (2, 4):
        if (case.num_rows or 0) < num_parts:
            return
        yield Remedy(
            f"{num_parts} micro-batches",
            "same gradient, summed in another order",
            settings={"accumulation_steps": num_parts},
            redraws=True,
            obstacle=obstacle,
        )


def _fewer_edges(case: Case) -> Iterator[Remedy]:
    if case.fewer_edges is not None:
        yield Remedy(
            "fewer edges",
            "an estimate of the same gradient from some of the edges",
            change="batch = fewer_edges(batch)",
            exact=False,
            batch=case.fewer_edges(case.training.batch),
        )


# ------------------------------------------------------------------------------------------- the activations


def _checkpoints(case: Case) -> Iterator[Remedy]:
    """Checkpoint the fewest blocks that hold half of the blocks' bytes at the peak, or all that hold any."""
    try:
        blocks = choose_blocks(case.training.model, "auto")
    except ConfigError:
        return
    everywhere = held_by_modules(case.seen)
    held = {name: everywhere[name] for name in blocks if everywhere.get(name)}
    order = sorted(held, key=lambda name: -held[name])
    until = list(accumulate(held[name] for name in order))
    numbers = {bisect_left(until, share * until[-1]) + 1 for share in _SHARES} if order else set()
    for number in sorted(numbers):
        names = [name for name in blocks if name in order[:number]]  # in the model's order
        yield _checkpoint(case, f"{number} of {len(blocks)} blocks", names)
    if order:
        selective: dict[str, Treatment] = {name: "selective" for name in blocks if name in held}
        yield _checkpoint(case, f"{len(order)} of {len(blocks)} blocks, selective", selective)


def _checkpoint(case: Case, name: str, choice: Choice) -> Remedy:
    return Remedy(
        f"checkpoint {name}", "same gradient, bit for bit", settings={"checkpoint": choice}, obstacle=case.obstacle
    )


def _offload(case: Case) -> Iterator[Remedy]:
    where = "host memory" if case.on_card else "the disk"
    yield Remedy(
        "offload activations",
        f"same gradient, bit for bit; all that waits for backward is written to {where} and read again",
        settings={"offload": ("activations",)},
        obstacle=case.obstacle,
        moves=True,
    )


def _bfloat16(case: Case) -> Iterator[Remedy]:
    is_float32 = any(each.dtype == torch.float32 for each in case.training.model.parameters())
    if case.training.precision is None and is_float32:
        yield Remedy(
            "bf16",
            "products in bfloat16, which has 8 significant bits",
            settings={"precision": "bf16-mixed"},
            obstacle=case.obstacle,
            exact=False,
        )


def _chunks(case: Case) -> Iterator[Remedy]:
    found = chunkable(case.training.model, case.seen)
    if found is None:
        return
    name, size = found

    def apply(step: AdvisedStep, stack: ExitStack) -> None:  # noqa: ARG001
        # Row independence is tested with NaN, which needs data; the run with data then refuses.
        check = step.has_data
        replace_submodule(step, name, lambda module: ChunkedProcessor(module, chunk_size=size, check=check))

    yield Remedy(
        f"chunks of {name}",
        "same gradient, summed in another order",
        apply=apply,
        change=f"mk.ChunkedProcessor({_path(name)}, chunk_size={size})(x) in place of {_path(name)}(x)",
        redraws=True,
    )


def _tiles(case: Case) -> Iterator[Remedy]:
    found = tileable(case.training.model, case.seen)
    if found is None:
        return
    name, dim, size = found

    def apply(step: AdvisedStep, stack: ExitStack) -> None:  # noqa: ARG001
        replace_submodule(step, name, lambda module: lambda x: tiled_apply(module, x, size, dims=(dim,)))

    yield Remedy(
        f"tiles of {name or 'the model'}",
        "same gradient, summed in another order",
        apply=apply,
        change=f"mk.tiled_apply({_path(name)}, x, {size}, dims=({dim},))",
        redraws=True,
    )


def _path(name: str) -> str:
    """A module's path as code."""
    parts = name.split(".") if name else []
    return "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


# --------------------------------------------------------------------------------------------- the optimizer


def _optimizer_forms(case: Case) -> Iterator[Remedy]:
    kind, settings = case.seen.optimizer
    takes_all_at_once = settings.get("foreach") or (case.on_card and settings.get("foreach", ...) is None)
    if takes_all_at_once and not settings.get("fused"):
        yield _form(kind, "foreach off", "same step, but for rounding", foreach=False)
    if settings.get("fused", ...) in (None, False):
        yield _form(kind, "fused", "same step, but for rounding", foreach=None, fused=True)
    yield Remedy(
        "step in backward",
        "same step, bit for bit; no clipping by the total norm, no accumulation",
        apply=_steps_in_backward,
        change="with mk.train.step_in_backward(optimizer): loss.backward(); optimizer.step()",
        compares="updates",
    )


def _form(kind: type[Optimizer], name: str, effect: str, **settings: bool | None) -> Remedy:
    def apply(step: AdvisedStep, stack: ExitStack) -> None:  # noqa: ARG001
        make = step.make_optimizer

        def make_so(parameters: Any) -> Optimizer:
            optimizer = make(parameters)
            for group in optimizer.param_groups:
                group.update(settings)
            return optimizer

        step.make_optimizer = make_so

    words = ", ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
    return Remedy(name, effect, apply=apply, change=f"torch.optim.{kind.__name__}(..., {words})", compares="updates")


def takes_foreach(step: AdvisedStep, stack: ExitStack) -> None:
    """Let the optimizer on the CPU process all parameters at once, as it does on a card."""
    _form(Optimizer, "", "", foreach=True).apply(step, stack)


def _steps_in_backward(step: AdvisedStep, stack: ExitStack) -> None:
    make = step.make_optimizer

    def make_so(parameters: Any) -> Optimizer:
        optimizer = make(parameters)
        stack.enter_context(step_in_backward(optimizer))
        return optimizer

    step.make_optimizer = make_so


def _eight_bits(case: Case) -> Iterator[Remedy]:
    kind, settings = case.seen.optimizer
    if kind not in (Adam, AdamW) or isinstance(case.training.optimizer, Optimizer):
        return
    name = f"{kind.__name__}8bit"
    kept = {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad")}

    def apply(step: AdvisedStep, stack: ExitStack) -> None:  # noqa: ARG001
        step.make_optimizer = partial(getattr(importlib.import_module("torchao.optim"), name), **kept)

    yield Remedy(
        "8-bit optimizer state",
        "averages of gradients with 8 bits: another step",
        apply=apply,
        change=f"torchao.optim.{name}(...)",
        exact=False,
        compares="updates",
        obstacle="" if importlib.util.find_spec("torchao") else "needs torchao, which is not installed",
    )


# ------------------------------------------------------------------------------------------------- the model


def _smaller_mlps(case: Case) -> Iterator[Remedy]:
    if not case.changes_model or isinstance(case.training.optimizer, Optimizer):
        return
    names = list(find_mlps(case.training.model))

    def apply(step: AdvisedStep, stack: ExitStack) -> None:  # noqa: ARG001
        for name in names:
            halve_widths(cast("nn.Sequential", step.model.get_submodule(name)))

    if names:
        yield Remedy(
            "half as wide MLPs",
            "another model, to be trained anew",
            apply=apply,
            change=f"half the hidden width in {', '.join(names)}",
            exact=False,
            compares=None,
        )


_FINDERS: tuple[Callable[[Case], Iterator[Remedy]], ...] = (
    _microbatches,
    _checkpoints,
    _offload,
    _bfloat16,
    _chunks,
    _tiles,
    _optimizer_forms,
    _eight_bits,
    _smaller_mlps,
    _fewer_edges,
)
