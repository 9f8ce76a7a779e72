"""Checks of the model and the loss that `SplitLoss` runs before it computes a gradient in parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from memkit._core.errors import ConfigError, InputError, InputTypeError, warn_user
from memkit._torch.graph import inputs_of
from memkit._torch.modules import COMPILED, is_compiled_wrapper
from memkit.train.gradients import graph_nodes, has_reentrant_checkpoint

CALL = "SplitLoss"
_LAYERS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "ScaledDot", "Linear", "Embedding")
CALL_LOSS = "SplitLoss(model)(batch, loss_fn)"


def list_modules(model: object) -> list[nn.Module]:
    """Return the passed module or modules as a list."""
    modules = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Sequence) else []
    if modules and all(isinstance(each, nn.Module) for each in modules):
        return modules
    raise InputTypeError(
        f"{CALL}(model)",
        got=f"a {type(model).__name__}" + (f" of {[type(each).__name__ for each in modules]}" if modules else ""),
        expected="a torch.nn.Module, or a list of at least one",
        fix="pass the module whose parameters are trained, not its parameters or a function.",
    )


def list_trained(model: nn.Module) -> list[nn.Parameter]:
    """List the currently trainable parameters; they may be frozen between two batches."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trained:
        return trained
    raise InputError(
        CALL_LOSS,
        got="a model without any parameter that requires a gradient",
        expected="at least one parameter to train",
        fix="unfreeze the parameters to train, or pass the module that holds them; for inference call it under "
        "torch.no_grad().",
    )


def unwrap_replica(model: nn.Module) -> tuple[nn.Module, nn.parallel.DistributedDataParallel | None]:
    """Return the module that a DDP replica wraps (possibly compiled before wrapping), and the replica."""
    is_compiled = is_compiled_wrapper(model)
    replica = model.get_submodule(COMPILED) if is_compiled else model
    if not isinstance(replica, nn.parallel.DistributedDataParallel):
        return model, None
    if is_compiled:
        warn_user(
            f"{CALL}: torch.compile around DistributedDataParallel has no effect here, because the parts run the "
            "inner module. Compile the module first, then wrap it."
        )
    return replica.module, replica


def check_ranks(model: nn.Module) -> None:
    """Refuse models that communicate between ranks inside a forward: ranks may split their batches differently."""
    kinds = {type(module).__name__ for module in model.modules()}
    is_sharded = "FullyShardedDataParallel" in kinds or any(hasattr(each, "to_local") for each in model.parameters())
    if not is_sharded and "DistributedDataParallel" not in kinds:
        return
    raise ConfigError(
        f"{CALL}(model)",
        got="parameters that are sharded over ranks"
        if is_sharded
        else "DistributedDataParallel around only a part of the model",
        expected="a whole model, or one in DistributedDataParallel",
        fix="use MemoryEfficientTrainingWrapper, whose ranks split fully_shard models in step."
        if is_sharded
        else "wrap the whole model, or pass several wrapped ones: SplitLoss([encoder, head]).",
    )


def warn_of_float16(loss: torch.Tensor) -> None:
    """Warn if a loss whose backward runs here goes through float16 without a scale.

    A scaler comes too late: it multiplies the returned loss, whose gradient is already computed by then.
    """
    # Layers in float16, as autocast runs them; an explicit cast meets no scaler in the plain loop either.
    given = ((node.name().startswith(_LAYERS), inputs_of(node)) for node in graph_nodes(loss))
    if any(
        each.dtype == torch.float16 and (is_layer or math.prod(each.shape) == 1)
        for is_layer, metadata in given
        for each in metadata
    ):
        warn_user(
            f"{CALL_LOSS}: the loss is computed in float16, and no scale is given: small gradients become zero in "
            "backward, however the loss is scaled afterwards. Pass scale=scaler.get_scale(), or compute in "
            "bfloat16; scale=1.0 turns this warning off."
        )


def check_graph(loss: torch.Tensor, parameters: list[nn.Parameter], leaves: dict[int, str]) -> None:
    """Refuse a graph that would lose a gradient: of a leaf outside the model, or through a reentrant checkpoint."""
    if has_reentrant_checkpoint(loss):
        raise InputError(
            CALL_LOSS,
            got="a loss through checkpoint(use_reentrant=True), which only backward() can differentiate",
            expected="a graph that torch.autograd.grad can differentiate",
            fix="pass use_reentrant=False to the checkpoint; a trainer has a setting for it, such as "
            "gradient_checkpointing_kwargs={'use_reentrant': False}.",
        )
    known = set(map(id, parameters))
    for node in graph_nodes(loss):
        leaf = getattr(node, "variable", None)
        if leaf is None or id(leaf) in known:
            continue
        if isinstance(leaf, nn.Parameter):
            raise InputError(
                CALL_LOSS,
                got=f"a loss that trains a parameter of shape {tuple(leaf.shape)} which does not belong to the model",
                expected="a loss over the parameters of the model",
                fix="pass all modules that are trained: SplitLoss([model, criterion]).",
            )
        if id(leaf) in leaves:
            raise InputError(
                CALL_LOSS,
                got=f"{leaves[id(leaf)]}, of shape {tuple(leaf.shape)}, that requires a gradient",
                expected="only the model's parameters to require gradients: this tensor would silently get no gradient",
                fix="if it is trained, make it an nn.Parameter of a module that you pass; if not, detach() it; if "
                "loss_fn itself computes its gradient, call requires_grad_() inside loss_fn.",
            )
