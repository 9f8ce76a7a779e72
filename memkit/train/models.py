"""Model inspection: the module under its wrappers, its device, and whether ranks can run independently."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memkit._core.errors import warn_user
from memkit._torch.autocast import without_gradients
from memkit._torch.modules import COMPILED, is_compiled_wrapper
from memkit._torch.ranks import missing_for_lockstep


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's own model from within DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif is_compiled_wrapper(model):
            model = model.get_submodule(COMPILED)
        else:
            return model


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    parameter = next(iter(model.parameters()), None)
    return parameter.device if parameter is not None else torch.device("cpu")


def may_recover_alone(
    model: nn.Module, num_ranks: int, *, is_sharded: bool, call: str = "MemoryEfficientTrainingWrapper"
) -> bool:
    """Return whether this process may rerun a micro-batch without the other ranks; warn if it may not."""
    if not is_sharded and not (num_ranks > 1 and exchanges_statistics(model)):
        return True
    obstacle = is_sharded and (
        missing_for_lockstep() or "split_fn=... is used, or this torch version shards differently"
    )
    warn_user(
        f"{call}: no recovery from out-of-memory here: the ranks exchange "
        + (f"parameters (and cannot agree: {obstacle})" if is_sharded else "batch statistics")
        + " inside forward and backward, so a single rank cannot run a micro-batch again. Out-of-memory errors pass "
        "through. Raise accumulation_steps or set checkpoint='auto' instead."
    )
    return False


def exchanges_statistics(model: nn.Module) -> bool:
    """Return whether ranks wait for each other inside the forward."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def has_lazy_parameters(model: nn.Module) -> bool:
    """Return whether a module needs its first input to create its parameters."""
    return any(map(is_lazy, model.parameters()))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients, for the block; then restore every module's mode."""
    modes = training_modes(model)
    try:
        model.eval()  # a module's own `train` may fail or be interrupted: LoRA's merges weights
        with without_gradients():
            yield
    except RuntimeError as error:
        if "does not require grad" in str(error):
            error.add_note(
                "memkit: validation runs without gradients. Way out: compute what needs them, such as forces, within "
                "`with torch.enable_grad():` in the validation function, and return detached tensors."
            )
        raise
    finally:
        restore_modes(modes)


def training_modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return each module with its mode."""
    return [(module, module.training) for module in model.modules()]


def restore_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Restore the modes of `training_modes`, by a module's own `train` where it does more: LoRA's merges weights."""
    for module, is_training in modes:
        if module.training != is_training and type(module).train is not nn.Module.train:
            module.train(is_training)
        module.training = is_training
