"""Internals of DistributedDataParallel and fully_shard (FSDP2) around a forward."""

import sys
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import nn


def before_forward(replica: nn.parallel.DistributedDataParallel) -> None:
    """Run DistributedDataParallel's pre-forward step; it requires an argument to move to its device."""
    replica._pre_forward(None)  # type: ignore[no-untyped-call]


def after_forward(replica: nn.parallel.DistributedDataParallel, loss: torch.Tensor) -> torch.Tensor:
    """Run DistributedDataParallel's post-forward step, which prepares the gradient reduction."""
    result: torch.Tensor = replica._post_forward(loss)  # type: ignore[no-untyped-call]
    return result


def communication_hooks(replica: nn.parallel.DistributedDataParallel) -> list[str]:
    """Return the names of the hooks that reduce gradients in place of DistributedDataParallel's own all-reduce."""
    return [getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in replica._comm_hooks]


def announces_forwards(replica: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether each forward exchanges a number for torch's `Join`; once entered, that stays so."""
    return bool(replica._join_config.enable)


def synchronize_buffers(replica: nn.parallel.DistributedDataParallel) -> None:
    """Send the first rank's buffers around now, if DistributedDataParallel's next forward would; that one does not."""
    if replica._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
        replica._sync_buffers()  # type: ignore[no-untyped-call]
    replica.require_forward_param_sync = False


def is_sharded(value: object) -> TypeGuard[nn.Module]:
    """Return whether this is a module on which fully_shard was called."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes half a second, but is loaded where a model is sharded
    return fsdp is not None and isinstance(value, fsdp.FSDPModule)


def gathered_parameters(objects: Iterable[object]) -> set[int]:
    """Return the ids of parameters that fully_shard replaces, gathers and frees, and of the dicts that hold them.

    They are those of all objects that are modules under fully_shard, and of the modules inside.
    """
    roots = [each for each in objects if is_sharded(each)]
    held = {id(each._parameters): each._parameters for root in roots for each in root.modules()}
    return held.keys() | {id(each) for parameters in held.values() for each in parameters.values()}


def state_of(module: Any) -> Any:
    """Return the state of a module sharded by fully_shard; several modules may share one."""
    return module._get_fsdp_state()


def parameter_group(state: Any) -> Any:
    """Return the parameters that a state gathers together; None if it has none.

    Raises:
        AssertionError: There are several groups, on several meshes.
    """
    return state._fsdp_param_group


def is_root(state: Any) -> bool:
    """Return whether a state belongs to the outermost module."""
    return bool(state._is_root)


COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm")
"""Names of a parameter group's collectives for parameters and gradients; 2.8 lacks them."""


def missing_for_lockstep() -> str:
    """Name the parts that this torch lacks for joint recovery of fully_shard ranks; empty if complete, as in 2.13."""
    from torch.distributed.fsdp import FSDPModule  # takes half a second, but is already loaded in sharded training

    needed = ("set_custom_all_gather", "reset_iter_state")
    lacking = next((name for name in needed if not hasattr(FSDPModule, name)), None)
    return f"PyTorch {torch.__version__}, which has no FSDPModule.{lacking}" if lacking else ""
