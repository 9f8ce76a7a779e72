"""Argument checks of `plan_training`: precisions, the device of a budget, and how a batch may be split."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import nn

from memkit._core.errors import ConfigError, InputError, InputTypeError
from memkit._core.settings import Checker
from memkit._core.units import parse_bytes
from memkit._gradients.loss import LossFn
from memkit.predict.gpus import GPU, CapacityLike, capacity_bytes, find_gpu
from memkit.predict.plan.search import micro_batch_counts
from memkit.train.models import device_of, unwrap_model
from memkit.train.split import count_rows
from memkit.train.split_check import check_split, scan_modules

PlannedPrecision = Literal["bf16-mixed", "fp16-mixed"]


def check_precisions(precisions: Any) -> None:
    """Refuse anything that is not a list of precisions."""
    check, known = Checker("plan_training(...)"), (None, *get_args(PlannedPrecision))
    if not check.items("precisions", precisions) or any(each not in known for each in precisions):
        raise check.refuse("precisions", precisions, f"a list of one or more of {known}")


def find_place(model: nn.Module, budget: CapacityLike, target: str | GPU | None) -> tuple[GPU | None, int]:
    """Return the card, None for the CPU, and its budget in bytes."""
    try:
        num_bytes = parse_bytes(budget, name="budget")  # type: ignore[arg-type]  # refuses a card as not a size
    except (InputError, InputTypeError):
        if not isinstance(budget, (str, GPU)):
            raise
        capacity_bytes(budget)  # refuses anything that is neither a size nor a card, with a message on both
        gpu = find_gpu(budget)
        if target is not None:
            raise ConfigError(
                f"plan_training(..., budget={shown(budget)}, target={shown(target)})",
                got="two devices",
                expected="a budget in bytes where there is a target",
                fix="leave target out, or write the budget as a size such as '20GiB'.",
            ) from None
        return gpu, gpu.total_bytes
    where = target or device_of(model).type
    return (None if where in ("cpu", "meta") else find_gpu(where)), num_bytes


def check_measurable(model: nn.Module, gpu: GPU | None) -> None:
    """Refuse to measure steps that cannot run here."""
    if gpu is not None or device_of(model).type != "cpu":
        raise ConfigError(
            "plan_training(..., measure=True)",
            got=f"a model on {device_of(model)}" + (f" and a budget on {gpu.name}" if gpu else ""),
            expected="a model with data on the CPU, and a budget there: steps are run",
            fix="leave measure out: the plan then goes by the device's speeds.",
        )


def rows_to_plan(batch: Any) -> int:
    """Rows of a batch, at least one."""
    try:
        num_rows, got = count_rows(batch), "a batch without rows"
    except InputError as error:
        num_rows, got = 0, error.got
    if not num_rows:
        raise InputError(
            "plan_training(model, sample_batch)",
            got=got,
            expected="tensors that all have the rows of one optimizer step in dimension 0",
            fix="cut a packed batch yourself: MemoryEfficientTrainingWrapper(..., split_fn=...), and "
            "estimate_memory_usage(...) says what a part of it takes.",
        )
    return num_rows


def allowed_counts(
    model: nn.Module, batch: Any, loss_fn: LossFn, num_rows: int, micro_batch_size: int | None
) -> tuple[list[int], list[str], bool | None]:
    """Numbers of micro-batches to try, notes on them, and whether they have the gradient of the whole batch."""
    if micro_batch_size is None:
        counts = micro_batch_counts(num_rows)
    else:
        check = Checker(f"plan_training(...) of a batch of {num_rows} rows")
        counts = [-(-num_rows // check.whole("micro_batch_size", micro_batch_size, 1, num_rows))]
    if counts == [1]:
        return counts, [], None
    is_exact, reason = _judge_split(model, batch, loss_fn)
    if is_exact is None:
        return counts, [f"Not checked that the batch may be split: {reason}."], None
    if is_exact:
        return counts, [], True
    if micro_batch_size is None:
        return [1], [f"The batch is kept whole: {reason}"], False
    return counts, [f"Cut into {micro_batch_size} rows as asked, though {reason}"], False


def _judge_split(model: nn.Module, batch: Any, loss_fn: LossFn) -> tuple[bool | None, str]:
    """Whether parts have the gradient of the whole (None if unknown), and the reason."""
    if device_of(model).type == "meta":
        norms = scan_modules(model)
        if norms:
            return False, f"{', '.join(norms)} normalize over its rows."
        return None, "the model has no data"
    verdict = check_split(unwrap_model(model), batch, loss_fn)
    if verdict.exact is False or verdict.modules:
        return False, f"parts have another gradient. {verdict.advice}"
    return verdict.exact, verdict.reason


def shown(place: object) -> str:
    """Show a budget or a target the way the user may have written it."""
    return place.name if isinstance(place, GPU) else repr(place)
