"""`estimate_memory_usage`: by formula for a config, or by a dry run of the user's own model and step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from memkit._core.errors import ConfigError, InputTypeError, MemkitError
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit.predict.config import TrainingConfig
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.formula import estimate_by_formula
from memkit.predict.gpus import GPU, capability_of, look_up
from memkit.predict.words import ESTIMATE_WORDS

if TYPE_CHECKING:  # a config's estimate needs no torch
    from torch import nn
    from torch.optim import Optimizer

    from memkit._gradients.loss import LossFn
    from memkit._simulation.shard import Shard
    from memkit._simulation.simulation import MakeOptimizer


_CALL = "estimate_memory_usage(...)"
_SHARD_FIX = "write shard=mk.predict.Shard('fsdp2', 8)."
_AS_IT_IS = ("fp32", "float32", "32", "32-true", "no", "none")
_MEANT = {
    **dict.fromkeys(("bf16", "bfloat16", "amp", "16"), "bf16-mixed"),
    **dict.fromkeys(("fp16", "float16", "16-mixed", "half"), "fp16-mixed"),
}


# The signature for a model is repeated in full here and below: an overload cannot be shortened.
@overload
def estimate_memory_usage(model: TrainingConfig) -> MemoryEstimate: ...


@overload
def estimate_memory_usage(
    model: nn.Module,
    sample_batch: Any,
    loss_fn: LossFn,
    *,
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer] = "adamw",
    precision: Literal["bf16-mixed", "fp16-mixed"] | None = None,
    target: str | GPU = "cpu",
    accumulation_steps: int = 1,
    selected_fraction: float | None = None,
    shard: Shard | None = None,
) -> MemoryEstimate: ...


@guided(words=ESTIMATE_WORDS)
def estimate_memory_usage(
    model: TrainingConfig | nn.Module,
    sample_batch: Any = None,
    loss_fn: LossFn | None = None,
    *,
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer] = "adamw",
    precision: Literal["bf16-mixed", "fp16-mixed"] | None = None,
    target: str | GPU = "cpu",
    accumulation_steps: int = 1,
    selected_fraction: float | None = None,
    shard: Shard | None = None,
) -> MemoryEstimate:
    """Estimate the memory of a warm training step without training: by formula for a config, by a dry run for a model.

    **A config** describes the model family of ``benchmarks/reference_family.py``. Parameters and optimizer state are
    exact. The peak is within 0.5% of the family's step on a virtual NVIDIA GPU with the matrix library's workspaces of
    Hopper and Blackwell (others take 48 MiB less). On Hopper, cuDNN's convolutions add 3% to the presets' peaks, and up
    to 14% with checkpointing; the reserve is large enough for them. The allocator's reserve and the driver's context
    are those of the worst GPU in the preset's range, or of all GPUs without a preset. It takes milliseconds and does
    not import PyTorch. The config is the only argument.

    **A model** goes through two steps of your own code on fake tensors, which have sizes but no data: forward, loss,
    backward, optimizer, with hooks, checkpointing, autocast. The second step is recorded. Nothing is computed and
    nothing is left behind: parameters, buffers, gradients, optimizer state and random state are unchanged afterwards,
    even after an error. While it runs, the model holds fake tensors; do not use it in another thread.

    Args:
        model: A `TrainingConfig`; or a module, with data on any device or on the meta device (no memory needed).
        sample_batch: One micro-batch: tensors of any shape and dtype in any nesting of tuples (including named tuples),
            lists, dicts and objects such as `collections.UserDict`.
        loss_fn: ``loss_fn(model, micro_batch)`` returns the mean loss, or a `Loss`, as for
            `MemoryEfficientTrainingWrapper.train_step`.
        optimizer: The name of a class in `torch.optim` with its default settings, a class, a function of the
            parameters, the instance in use, or a list of those in use.
        precision: None keeps the model's own dtypes. ``"bf16-mixed"``, and on a GPU ``"fp16-mixed"``: autocast around
            `loss_fn`.
        target: ``"cpu"``: live bytes as the CPU allocator counts them. A GPU, as a name that `find_gpu` accepts or as a
            `GPU`: the bytes its allocator hands out and reserves; model and batch count as being on it.
        accumulation_steps: Micro-batches per optimizer step; each is as large as `sample_batch`.
        selected_fraction: The fraction in (0, 1] of elements that masks, `nonzero` and `torch.where(mask)` are assumed
            to select; 1.0 for the worst case. None: such an operator is an error.
        shard: Sharding over ranks by DDP, FSDP2 or ZeRO: the estimate is for the first rank, on the CPU or on one such
            GPU. None: one process.

    Returns:
        Bytes by part at the peak of the second step. For ``target="cpu"``, `reserved_bytes`, `context_bytes` and
        `total_bytes` are None: a CPU has no such counts.

    Raises:
        InputTypeError: ``model`` is neither a config nor a module, ``loss_fn`` is missing, or did not return a loss.
        InputError: A size depends on data; the message names the line.
        ConfigError: An option is not one of those above, or is given together with a config.
        StateError: With ``shard``: the process is already in a process group.

    Memory cost:
        No tensor of the model or of the step; about 1 kB of host memory for each operator of a step.

    Source:
        `docs/estimate.md`; checked against recorded CPU steps of 65 models in ``tests/predict/test_dryrun.py`` and
        ``tests/simulation/test_transformers.py``.

    Example:
        >>> import torch
        >>> from memkit import estimate_memory_usage, get_preset_config
        >>> estimate_memory_usage(get_preset_config("medium", 24)).fits("24GiB")
        True
        >>> model = torch.nn.Linear(1000, 1000, device="meta")
        >>> batch = torch.empty(64, 1000)
        >>> estimate = estimate_memory_usage(model, batch, loss_fn=lambda model, x: model(x).square().mean())
        >>> estimate.parameters_bytes, estimate.optimizer_bytes, estimate.confidence
        (4004000, 8008008, 'exact')
    """
    if isinstance(model, TrainingConfig):
        _refuse_arguments_with_config(
            sample_batch=sample_batch is not None,
            loss_fn=loss_fn is not None,
            optimizer=optimizer != "adamw",
            precision=precision is not None,
            target=target != "cpu",
            accumulation_steps=accumulation_steps != 1,
            selected_fraction=selected_fraction is not None,
            shard=shard is not None,
        )
        return estimate_by_formula(model)
    if sample_batch is None and loss_fn is None:
        return estimate_by_formula(model)  # type: ignore[arg-type]  # raises the error that states the expected type
    from memkit._simulation.simulation import Gpu, Host, TrainingStep, in_one_process
    from memkit._simulation.tensors import check_selected_fraction

    if loss_fn is None:
        raise InputTypeError(
            "estimate_memory_usage(model, sample_batch)",
            got="no loss_fn",
            expected="a function loss_fn(model, sample_batch) that returns the loss",
            fix="write estimate_memory_usage(model, sample_batch, loss_fn=lambda model, batch: "
            "criterion(model(batch[0]), batch[1])).",
        )
    gpu = None
    if target != "cpu":
        shown = target.name if isinstance(target, GPU) else repr(target)
        gpu = look_up(target, f"estimate_memory_usage(..., target={shown})")
    precisions = (None, "bf16-mixed") if gpu is None else (None, "bf16-mixed", "fp16-mixed")
    if precision not in precisions:
        raise _refuse_precision(precision, precisions, gpu.name if gpu else target)
    if accumulation_steps != 1:
        accumulation_steps = Checker(_CALL).whole("accumulation_steps", accumulation_steps, 1)
    check_selected_fraction(_CALL, selected_fraction)
    spread = in_one_process
    if shard is not None:
        from memkit._simulation.ranks import as_first_rank
        from memkit._simulation.shard import Shard

        if not isinstance(shard, Shard):
            raise Checker(_CALL).refusal("shard", shard, "None, or a Shard", fix=_SHARD_FIX)
        spread = partial(as_first_rank, shard)
    if gpu is not None:
        capability_of(gpu)  # rejects GPUs whose operators are not known
    step = TrainingStep(model, sample_batch, loss_fn, optimizer, precision, accumulation_steps, selected_fraction)
    return MemoryEstimate.of(step.record(Host() if gpu is None else Gpu(gpu), spread=spread))


def _refuse_precision(precision: object, known: tuple[str | None, ...], where: object) -> MemkitError:
    """Return the error for an unknown precision, with the memkit name that was probably meant."""
    word = str(precision).lower()
    meant = _MEANT.get(word)
    if word in _AS_IT_IS:
        fix = "write precision=None, which keeps the model as it is; to convert a model to float32 call model.float()."
    elif meant is None:
        fix = "write precision=None, which keeps the model's own dtypes, or precision='bf16-mixed'."
    elif meant in known:
        fix = f"write precision={meant!r}, or precision=None for a model that is in {word} itself."
    else:
        fix = "write precision='bf16-mixed', or a GPU as target: a CPU has no fp16 autocast here."
    return Checker(_CALL).refusal("precision", precision, f"one of {known} on {where}", fix=fix)


def _refuse_arguments_with_config(**is_given: bool) -> None:
    given = [name for name, is_there in is_given.items() if is_there]
    if given:
        raise ConfigError(
            f"estimate_memory_usage(config, {given[0]}=...)",
            got=f"{', '.join(given)} together with a config",
            expected="a config alone: it already sets precision, optimizer and micro-batches",
            fix="change the config with config.replace(...); estimate.fits('RTX 4090') checks a GPU.",
        )
