"""The catalog's remedies for a step's peak: when each one applies to a step, and how."""

from __future__ import annotations

import importlib
import importlib.util
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from memkit._advice.catalog import Remedy, remedy
from memkit._core.errors import InputError, InputTypeError
from memkit._simulation.simulation import is_own
from memkit.chunk.processor import ChunkedProcessor
from memkit.chunk.tiled import tiled_apply
from memkit.recipes.advice.step import AdvisedStep, Observation, StepChange, Training
from memkit.recipes.advice.submodules import (
    chunkable,
    find_mlps,
    halve_widths,
    held_by_modules,
    replace_submodule,
    tileable,
)
from memkit.train.backward_steps import step_in_backward
from memkit.train.blocks import Choice
from memkit.train.checkpointing import auto_blocks
from memkit.train.row_mixers import scan_modules
from memkit.train.split import count_rows
from memkit.train.treatments import Treatment

_SHARES = (0.5, 1.0)  # of the bytes that the blocks hold at the peak: with the fewest blocks, and with all


def no_change(step: AdvisedStep, stack: ExitStack) -> None:
    """Leave a step unchanged."""


def in_turn(one: StepChange, other: StepChange) -> StepChange:
    """Apply two changes to a step, one after the other."""

    def apply(step: AdvisedStep, stack: ExitStack) -> None:
        one(step, stack)
        other(step, stack)

    return apply


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: some hold batches
class AppliedRemedy:
    """A remedy of the catalog, with its placeholders filled in for a step, and how to apply it there.

    Attributes:
        entry: Its entry in the catalog; the settings are the wrapper's.
        apply: Further changes to a step, whose tensors are stand-ins.
        batch: A batch that replaces the training's; None for the same one.
        obstacle: Reason why it is ruled out; it is then reported without figures.
    """

    entry: Remedy
    apply: StepChange = no_change
    _: KW_ONLY
    batch: Any = None
    obstacle: str = ""

    def change_step(self, step: AdvisedStep, stack: ExitStack) -> None:
        """Apply everything to a step."""
        step.settings |= self.entry.settings
        self.apply(step, stack)

    def with_other(self, other: AppliedRemedy) -> AppliedRemedy:
        """Combine two remedies, applied one after the other."""
        return AppliedRemedy(self.entry.with_other(other.entry), in_turn(self.apply, other.apply))


@dataclass(frozen=True, slots=True)
class Case:
    """The step for which remedies are sought.

    Attributes:
        training: The user's training.
        seen: The plain step on the target, without data.
        on_card: Whether the target is a GPU.
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


def find_remedies(case: Case) -> list[AppliedRemedy]:
    """List the remedies that apply to a step."""
    return [found for find in _FINDERS for found in find(case)]


# ------------------------------------------------------------------------------------------------ the batch


def _microbatches(case: Case) -> Iterator[AppliedRemedy]:
    mixing = scan_modules(case.training.model)
    obstacle = f"{mixing[0]} normalizes over the rows, and would see only those of one part" if mixing else ""
    for num_parts in (2, 4):
        if case.training.split_fn is None and (case.num_rows or 0) < num_parts:
            return
        filled = remedy("micro_batches").filled(settings={"accumulation_steps": num_parts}, parts=num_parts)
        yield AppliedRemedy(filled, obstacle=obstacle)


def _fewer_edges(case: Case) -> Iterator[AppliedRemedy]:
    if case.fewer_edges is not None:
        yield AppliedRemedy(remedy("fewer_edges"), batch=case.fewer_edges(case.training.batch))


# ------------------------------------------------------------------------------------------- the activations


def _checkpoints(case: Case) -> Iterator[AppliedRemedy]:
    """Checkpoint the fewest blocks that hold half of the blocks' bytes at the peak, or all that hold any."""
    blocks = auto_blocks(case.training.model)
    everywhere = held_by_modules(case.seen)
    held = {name: everywhere[name] for name in blocks if everywhere.get(name)}
    order = sorted(held, key=lambda name: -held[name])
    until = list(accumulate(held[name] for name in order))
    numbers = {bisect_left(until, share * until[-1]) + 1 for share in _SHARES} if order else set()
    for number in sorted(numbers):
        names = [name for name in blocks if name in order[:number]]  # in the model's order
        yield _checkpoint(f"{number} of {len(blocks)} blocks", names)
    if order:
        selective: dict[str, Treatment] = {name: "selective" for name in blocks if name in held}
        yield _checkpoint(f"{len(order)} of {len(blocks)} blocks, selective", selective)


def _checkpoint(blocks: str, choice: Choice) -> AppliedRemedy:
    filled = remedy("checkpoint").filled(settings={"checkpoint": choice}, blocks=blocks)
    return AppliedRemedy(filled)


def _offload(case: Case) -> Iterator[AppliedRemedy]:
    place = "host memory" if case.on_card else "the disk"
    yield AppliedRemedy(remedy("offload_activations").filled(place=place))


def _bfloat16(case: Case) -> Iterator[AppliedRemedy]:
    is_float32 = any(each.dtype == torch.float32 for each in case.training.model.parameters())
    if case.training.precision is None and is_float32:
        yield AppliedRemedy(remedy("bfloat16"))


def _chunks(case: Case) -> Iterator[AppliedRemedy]:
    found = chunkable(case.training.model, case.seen)
    if found is None:
        return
    name, size = found

    def apply(step: AdvisedStep, stack: ExitStack) -> None:  # noqa: ARG001
        # Row independence is tested with NaN, which needs data; only the run with data refuses dependent rows.
        check = step.has_data
        replace_submodule(step, name, lambda module: ChunkedProcessor(module, chunk_size=size, check=check))

    yield AppliedRemedy(remedy("chunks").filled(name=name, module=_path(name), rows=size), apply)


def _tiles(case: Case) -> Iterator[AppliedRemedy]:
    found = tileable(case.training.model, case.seen)
    if found is None:
        return
    name, dim, size = found

    def apply(step: AdvisedStep, stack: ExitStack) -> None:  # noqa: ARG001
        replace_submodule(step, name, partial(_tiled, size=size, dim=dim))

    filled = remedy("tiles").filled(name=name or "the model", module=_path(name), size=size, dim=dim)
    yield AppliedRemedy(filled, apply)


def _tiled(module: nn.Module, *, size: int, dim: int) -> Callable[..., Any]:
    def run(x: Any, *others: Any) -> Any:
        if others:
            raise InputTypeError(
                "tiled_apply(module, x, ...)",
                got=f"a call of {type(module).__name__} with {1 + len(others)} arguments",
                expected="one tensor, which is cut into tiles",
                fix="make a module of the layers that take one tensor.",
            )
        return tiled_apply(module, x, size, dims=(dim,))

    return run


def _path(name: str) -> str:
    """A module's path as code."""
    parts = name.split(".") if name else []
    return "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


# --------------------------------------------------------------------------------------------- the optimizer


def _optimizer_forms(case: Case) -> Iterator[AppliedRemedy]:
    for kind, settings in case.seen.optimizers.items():
        takes_all_at_once = settings.get("foreach") or (case.on_card and settings.get("foreach", ...) is None)
        if takes_all_at_once and not settings.get("fused"):
            yield _form(kind, "foreach off", foreach=False)
        if settings.get("fused", ...) in (None, False):
            yield _form(kind, "fused", foreach=None, fused=True)
    yield AppliedRemedy(remedy("step_in_backward"), _steps_in_backward)


def _form(kind: type[Optimizer], form: str, **settings: bool | None) -> AppliedRemedy:
    def apply(step: AdvisedStep, stack: ExitStack) -> None:  # noqa: ARG001
        _change_groups(step, lambda each, group: group.update(settings if type(each) is kind else {}))

    words = ", ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
    return AppliedRemedy(remedy("optimizer_form").filled(form=form, kind=kind.__name__, setting=words), apply)


def takes_foreach(step: AdvisedStep, stack: ExitStack) -> None:  # noqa: ARG001
    """Let optimizers on the CPU process all parameters at once, as they do on a GPU unless told otherwise."""

    def take(_: Optimizer, group: dict[str, Any]) -> None:
        if group.get("foreach", ...) is None and not group.get("fused"):
            group["foreach"] = True

    _change_groups(step, take)


def _change_groups(step: AdvisedStep, change: Callable[[Optimizer, dict[str, Any]], None]) -> None:
    """Change the settings of the step's optimizers."""
    make = step.make_optimizers

    def make_so(parameters: Any) -> list[Optimizer]:
        optimizers = make(parameters)
        for each in optimizers:
            for group in each.param_groups:
                change(each, group)
        return optimizers

    step.make_optimizers = make_so


def _steps_in_backward(step: AdvisedStep, stack: ExitStack) -> None:
    make = step.make_optimizers

    def make_so(parameters: Any) -> list[Optimizer]:
        optimizers = make(parameters)
        stack.enter_context(step_in_backward(optimizers))
        return optimizers

    step.make_optimizers = make_so


def _eight_bits(case: Case) -> Iterator[AppliedRemedy]:
    kind, settings = next(iter(case.seen.optimizers.items()))  # one, unless they are the user's own
    if kind not in (Adam, AdamW) or is_own(case.training.optimizer):
        return
    name = f"{kind.__name__}8bit"
    kept = {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad")}

    def apply(step: AdvisedStep, stack: ExitStack) -> None:  # noqa: ARG001
        make = partial(getattr(importlib.import_module("torchao.optim"), name), **kept)
        step.make_optimizers = lambda parameters: [make(parameters)]

    obstacle = "" if importlib.util.find_spec("torchao") else "needs torchao, which is not installed"
    yield AppliedRemedy(remedy("eight_bit_state").filled(kind=name), apply, obstacle=obstacle)


# ------------------------------------------------------------------------------------------------- the model


def _smaller_mlps(case: Case) -> Iterator[AppliedRemedy]:
    if not case.changes_model or is_own(case.training.optimizer):
        return
    names = list(find_mlps(case.training.model))

    def apply(step: AdvisedStep, stack: ExitStack) -> None:  # noqa: ARG001
        for name in names:
            halve_widths(cast("nn.Sequential", step.model.get_submodule(name)))

    if names:
        yield AppliedRemedy(remedy("narrower_mlps").filled(modules=", ".join(names)), apply)


_FINDERS: tuple[Callable[[Case], Iterator[AppliedRemedy]], ...] = (
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
