"""Plans by saved tensors and by blocks on ten models: budgets that hold, equal bits, bytes and times as predicted.

The models are those of `benchmarks.ten_models`, all rows of their batches at once, so that plans differ in activations
alone. A budget is a share of what the plain step needs beyond what cannot shrink: parameters, buffers, batch, gradients
and optimizer state. Where a plan by blocks fits a share, the budget becomes what that plan needs, so that both ways are
compared at equal peaks. The last budgets are the least that each way can plan for. Then the same shares are planned for
with ``may_offload=False``, as where the disk is slow: the best that blocks allow is then all that they recompute.

Each plan is run by the wrapper. Its peak is the allocator's, of a first and of a warm step, with model, batch and
state; "off" is how far the recorded live tensors of a warm step are from the predicted ones: what kernels take inside
comes on top. Bits are gradients, parameters and buffers of two steps, compared with those of a loop by hand; in the
control one parameter starts one bit off. Time is processor time, all runs of a model in turns: medians, and medians of
ratios. The best that blocks allow is the fastest of the plan and of half or all blocks recomputed in whole or in part.
"Chosen" is the way that takes less time by prediction, as `plan_training` chooses without ``treat``.

Run: python -m benchmarks.cases.tensor_plans [MODEL ...]   (with names only these, kept beside earlier ones)
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

import memkit as mk
from benchmarks.result import read_result, write_result
from benchmarks.ten_models import TRAININGS, Training, build
from benchmarks.timing import in_turns, median_ratio
from memkit._recorder.recorder import Recorder
from memkit._simulation.simulation import hold
from memkit.predict.plan.plan import TrainingPlan
from memkit.recipes.planned import Treat
from memkit.train.blocks import choose_blocks
from tests.allocations import count_flops, trace_allocations

WAYS: tuple[Treat, ...] = ("blocks", "tensors")
SHARES = (1.0, 0.85, 0.7, 0.55, 0.4)
ROUNDS = 5
DISTINCT = 1.05  # times that differ by less have no order
ROOMY, LEAST = 2**40, 1


# ------------------------------------------------------------------------------------------------------------ planning


@contextlib.contextmanager
def trainable(model: nn.Module, part: str) -> Iterator[nn.Module]:
    """Within it only this part of the model takes gradients."""
    model.requires_grad_(requires_grad=False)
    try:
        yield model.get_submodule(part).requires_grad_()
    finally:
        model.requires_grad_()


def adamw(part: nn.Module) -> torch.optim.Optimizer:
    # Fused: no temporary copy of the parameters, which would hide what the activations take.
    return torch.optim.AdamW(part.parameters(), lr=1e-3, fused=True)


@dataclass(frozen=True)
class Blocks:
    """A treatment of blocks without a plan."""

    checkpoint: dict[str, str]

    def wrapper_settings(self) -> dict[str, Any]:
        return {"checkpoint": self.checkpoint}


@dataclass(frozen=True)
class Plans:
    """A plan for each of a model's steps, by the part that it trains."""

    parts: dict[str, Any]
    seconds: float = 0.0

    @property
    def required_bytes(self) -> int:
        return max(each.required_bytes for each in self.parts.values())

    def saved_tensors(self, part: str) -> Any:
        return getattr(self.parts.get(part), "saved_tensors", None)  # blocks without a plan have none

    def __str__(self) -> str:
        return "; ".join(map(describe, self.parts.values()))


def describe(plan: Any) -> str:
    if plan.saved_tensors is not None:
        return plan.saved_tensors.summary
    return ", ".join(f"{count} {each}" for each, count in Counter((plan.checkpoint or {}).values()).items()) or "-"


def plan_part(training: Training, part: str, **settings: Any) -> TrainingPlan:
    with trainable(training.model, part) as trained:
        return mk.plan_training(
            training.model,
            training.batch,
            training.losses[part],
            adamw(trained),
            micro_batch_size=len(training.tensors()[0]),
            **settings,
        )


def plan_all(training: Training, budget: int, way: Treat, *, may_offload: bool = True) -> Plans:
    start = time.process_time()
    settings = {"budget": f"{budget}B", "treat": way, "may_offload": may_offload}
    parts = {part: plan_part(training, part, **settings) for part in training.losses}
    return Plans(parts, time.process_time() - start)


def try_plans(training: Training, budget: int, way: Treat, *, may_offload: bool = True) -> Plans | str:
    """The plans, or why there are none."""
    try:
        return plan_all(training, budget, way, may_offload=may_offload)
    except Exception as error:  # noqa: BLE001 - a model that cannot be planned is a figure too
        return said(error)


def said(error: Exception) -> str:
    """Its first words: what follows names files of this machine."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].partition(";")[0]


def least_bytes(training: Training, way: Treat) -> int:
    """The least budget that all steps have a plan for."""
    least = 0
    for part in training.losses:
        try:
            plan_part(training, part, budget=f"{LEAST}B", treat=way)
        except mk.errors.ConfigError as error:
            least = max(least, int(re.search(r"at least (\d+) bytes", error.fix)[1]))
    return least


def fixed_bytes(training: Training) -> int:
    """The bytes that no plan can reduce, in the step where they are most."""
    trained = [num_bytes(training.model.get_submodule(part).parameters()) for part in training.losses]
    return num_bytes(training.tensors()) + 3 * max(trained)  # a gradient and two averages of AdamW


def num_bytes(tensors: Any) -> int:
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def coarse_treatments(model: nn.Module) -> list[Blocks]:
    """Half or all of a model's blocks recomputed, in part or in whole."""
    names = list(choose_blocks(model, "auto"))
    return [
        Blocks(dict.fromkeys(chosen, treatment))
        for chosen in (names[: len(names) // 2], names)
        for treatment in ("selective", "full")
    ]


# ----------------------------------------------------------------------------------------------------------- real runs


class Run:
    """A training of a copy of the model: by the wrapper as planned, or in a loop by hand."""

    def __init__(self, training: Training, plans: Plans | None = None, *, is_wrapped: bool = True) -> None:
        self.training = Training(copy.deepcopy(training.model), training.batch, training.losses)
        self.model = self.training.model
        self.plans, self.is_wrapped = plans or Plans({}), is_wrapped
        self.optimizers = {part: adamw(self.model.get_submodule(part)) for part in training.losses}
        self.trainers: dict[str, mk.MemoryEfficientTrainingWrapper] = {}
        self.steps = {part: functools.partial(self.step_part, part) for part in training.losses}

    def step(self) -> None:
        for step in self.steps.values():
            step()

    def step_part(self, part: str) -> None:
        with trainable(self.model, part):
            if self.is_wrapped and part in self.plans.parts:
                self.trainer(part).train_step(self.training.batch, self.training.losses[part])
                return
            self.loss(part).backward()
            self.optimizers[part].step()
            self.optimizers[part].zero_grad()

    def trainer(self, part: str) -> mk.MemoryEfficientTrainingWrapper:
        """The wrapper of a step; those of other steps are closed, for they may treat the same blocks."""
        if part not in self.trainers:
            for other in list(self.trainers):
                self.trainers.pop(other).close()
            settings = self.plans.parts[part].wrapper_settings()
            optimizer = self.optimizers[part]
            self.trainers[part] = mk.MemoryEfficientTrainingWrapper(self.model, optimizer, probe=False, **settings)
        return self.trainers[part]

    def loss(self, part: str) -> Tensor:
        """The loss as in a loop by hand, which treats saved tensors; blocks are treated once there is a trainer."""
        with contextlib.ExitStack() as around:
            if saved_tensors := self.plans.saved_tensors(part):
                around.enter_context(mk.train.treat_saved_tensors(saved_tensors))
            return self.training.losses[part](self.model, self.training.batch)

    def peaks(self) -> dict[str, tuple[int, int]]:
        """Of each step the allocator's peak, and that of recorded live tensors."""
        first = {part: self.peak_bytes(part) for part in self.steps}
        return {part: (max(first[part], self.peak_bytes(part)), self.recorded_bytes(part)) for part in self.steps}

    def peak_bytes(self, part: str) -> int:
        state = [value for values in self.optimizers[part].state.values() for value in values.values()]
        held = num_bytes([*self.training.tensors(), *state])  # what the plan of this step knows of
        return held + trace_allocations(self.steps[part]).peak

    def recorded_bytes(self, part: str) -> int:
        recorder = Recorder()
        with recorder:
            hold(recorder, self.model, self.training.batch)
            self.step_part(part)
        return recorder.recording().peak_bytes()

    def saved_bytes(self, part: str) -> int:
        """Live bytes after a forward, without the loss."""
        losses: list[Tensor] = []
        with trainable(self.model, part):
            live = trace_allocations(lambda: losses.append(self.loss(part))).live[-1]
        return int(live) - losses[0].untyped_storage().nbytes()  # a mean may share storage with its terms

    def bits(self) -> list[Tensor]:
        """All gradients of two steps, then parameters and buffers."""
        gradients: dict[str, list[Tensor]] = {name: [] for name, _ in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            keep = gradients[name]
            parameter.register_post_accumulate_grad_hook(lambda each, keep=keep: keep.append(each.grad.clone()))
        torch.manual_seed(1)
        for _ in range(2):
            self.step()
        state = [each.detach().clone() for each in self.model.state_dict().values()]
        return [each for found in gradients.values() for each in found] + state


def are_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def one_bit_off(training: Training) -> Training:
    model = copy.deepcopy(training.model)
    first = next(model.parameters()).data.view(-1)[:1]
    first.copy_(torch.nextafter(first, first + 1))
    return Training(model, training.batch, training.losses)


# ------------------------------------------------------------------------------------------------------------- figures


def measure(name: str) -> dict[str, Any]:
    training = build(name)
    wanted = Run(training).bits()
    plain_plans = plan_all(training, ROOMY, "blocks")
    plain, figures = observe(training, plain_plans, wanted)
    least = {way: least_bytes(training, way) for way in WAYS}
    coarse = [Run(training, Plans(dict.fromkeys(training.losses, each))) for each in coarse_treatments(training.model)]
    coarse_peaks = [max(map(run.peak_bytes, training.losses)) for run in coarse]
    rows, planned = observe_budgets(training, wanted, budgets(training, plain_plans, least))
    smaller = budgets(training, plain_plans, {}, may_offload=False)
    recomputing, without = observe_budgets(training, wanted, smaller, may_offload=False)
    runs = {"plain": plain, "by hand": Run(training), **dict(enumerate(coarse)), **planned, **without}
    seconds = in_turns({key: run.step for key, run in runs.items()}, ROUNDS)
    for row in rows + recomputing:
        compare(row, seconds, coarse_peaks)
    figures["seconds"] = statistics.median(seconds["plain"])
    figures["fixed_bytes"] = fixed_bytes(training)
    figures["is_control_equal"] = are_equal(Run(one_bit_off(training)).bits(), wanted)
    figures["time_of_loop_by_hand"] = median_ratio(seconds["plain"], seconds["by hand"])
    return {
        "summary": summary(rows + recomputing),
        "plain": figures,
        "least_bytes": least,
        "budgets": rows,
        "without_offload": recomputing,
        "order": {way: order(rows, way) for way in WAYS},
    }


Planned = dict[tuple[int, Treat, bool], "Run"]


def observe_budgets(
    training: Training,
    wanted: list[Tensor],
    wanted_budgets: list[tuple[str, int, Plans | str]],
    *,
    may_offload: bool = True,
) -> tuple[list[dict[str, Any]], Planned]:
    """The figures of both ways at each budget, and their runs."""
    rows, planned = [], {}
    for share, budget, by_blocks in wanted_budgets:
        row: dict[str, Any] = {"share": share, "budget_bytes": budget, "may_offload": may_offload, "ways": {}}
        rows.append(row)
        for way in WAYS:
            plans = by_blocks if way == "blocks" else try_plans(training, budget, way, may_offload=may_offload)
            try:
                if isinstance(plans, str):
                    row["ways"][way] = {"error": plans}
                else:
                    planned[budget, way, may_offload], row["ways"][way] = observe(training, plans, wanted)
            except Exception as error:  # noqa: BLE001 - a plan that fails is a figure too
                row["ways"][way] = {"error": said(error)}
    return rows, planned


def budgets(
    training: Training, plain: Plans, least: dict[str, int], *, may_offload: bool = True
) -> list[tuple[str, int, Plans | str]]:
    """Shares of what can shrink, then the least of each way: as bytes, with the plans by blocks or why there are none.

    Where there are some, the bytes are those that they need. Without offload all below the plain need.
    """
    fixed, found = fixed_bytes(training), {}
    wanted = {f"{share:.0%}": fixed + int(share * (plain.required_bytes - fixed)) for share in SHARES}
    for share, budget in (wanted | {f"least by {way}": each for way, each in least.items()}).items():
        if budget < min(least.values(), default=0) or (budget == plain.required_bytes and not may_offload):
            continue
        is_plain = budget == plain.required_bytes
        by_blocks = plain if is_plain else try_plans(training, budget, "blocks", may_offload=may_offload)
        needed = budget if isinstance(by_blocks, str) else by_blocks.required_bytes
        found.setdefault(needed, (share, needed, by_blocks))
    return [found[budget] for budget in sorted(found, reverse=True)]


def observe(training: Training, plans: Plans, wanted: list[Tensor]) -> tuple[Run, dict[str, Any]]:
    """Train as planned, and compare with what was predicted and with the bits of a loop by hand."""
    run = Run(training, plans)
    peaks = run.peaks()
    predicted = {part: each.predicted_peak_bytes for part, each in plans.parts.items()}
    figures = {
        "treatment": str(plans),
        "required_bytes": plans.required_bytes,
        "peak_bytes": max(peak for peak, _ in peaks.values()),
        "predicted_bytes": max(predicted.values()),
        "off_bytes": max((peaks[part][1] - each for part, each in predicted.items()), key=abs),
        "is_equal": are_equal(Run(training, plans).bits(), wanted),
        "flops": count_flops(run.step),
        "planning_seconds": plans.seconds,
        "predicted_seconds": sum(each.predicted_seconds for each in plans.parts.values()),
    }
    if any(map(plans.saved_tensors, plans.parts)):
        figures["is_loop_equal"] = are_equal(Run(training, plans, is_wrapped=False).bits(), wanted)
    return run, figures


def compare(row: dict[str, Any], seconds: dict[Any, list[float]], coarse_peaks: list[int]) -> None:
    """Add the times to a budget's figures: over the plain step's, and over those of the best that blocks allow.

    What nobody planned may take as much as the planned steps were measured to take.
    """
    ran = {way: found for way, found in row["ways"].items() if "error" not in found}
    taken = {way: seconds[row["budget_bytes"], way, row["may_offload"]] for way in ran}
    for way, found in ran.items():
        found["seconds"] = statistics.median(taken[way])
        found["time_of_plain"] = median_ratio(taken[way], seconds["plain"])
    most = max((found["peak_bytes"] for found in ran.values()), default=0)
    by_blocks = [seconds[number] for number, peak in enumerate(coarse_peaks) if peak <= most]
    if by_blocks := by_blocks + [taken[way] for way in ran if way == "blocks"]:
        best = min(by_blocks, key=statistics.median)
        row["best_by_blocks_of_plain"] = median_ratio(best, seconds["plain"])
        if "tensors" in taken:
            row["time_of_best_by_blocks"] = median_ratio(taken["tensors"], best)
            row["chosen"] = min(ran, key=lambda way: ran[way]["predicted_seconds"])
            row["chosen_time_of_best_by_blocks"] = median_ratio(taken[row["chosen"]], best)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of plans by tensors that are the same on every machine, although speeds choose other plans."""
    ran = [row | row["ways"]["tensors"] for row in rows if "error" not in row["ways"]["tensors"]]
    return {
        "are_budgets_held": all(each["peak_bytes"] <= each["budget_bytes"] for each in ran),
        "are_bits_equal": all(each["is_equal"] and each.get("is_loop_equal", True) for each in ran),
        "largest_off_bytes": max((each["off_bytes"] for each in ran), key=abs),
    }


def order(rows: list[dict[str, Any]], way: Treat) -> dict[str, int]:
    """Of pairs of plans that take clearly different times, those whose predicted times have the same order."""
    times = [found for row in rows if "seconds" in (found := row["ways"].get(way, {}))]
    pairs = [sorted(pair, key=lambda each: each["seconds"]) for pair in combinations(times, 2)]
    clear = [(a, b) for a, b in pairs if b["seconds"] > DISTINCT * a["seconds"]]
    return {"pairs": len(clear), "in_order": sum(a["predicted_seconds"] < b["predicted_seconds"] for a, b in clear)}


def main() -> None:
    torch.set_num_threads(1)
    figures = read_result("tensor_plans")["figures"] if sys.argv[1:] else {}
    for name in sys.argv[1:] or TRAININGS:
        figures[name] = measure(name)
        print(name, json.dumps(figures[name], indent=1), flush=True)
        print(write_result("tensor_plans", figures, peers=("nilearn", "scikit-learn")))


if __name__ == "__main__":
    main()
