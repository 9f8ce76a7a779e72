"""Internals of DistributedDataParallel and fully_shard (FSDP2) around a forward."""

from typing import Any

import torch
from torch import nn


def before_forward(replica: nn.parallel.DistributedDataParallel) -> None:
    """Run DistributedDataParallel's pre-forward step; it requires an argument to move to its device."""
    replica._pre_forward(None)  # type: ignore[no-untyped-call]


def after_forward(replica: nn.parallel.DistributedDataParallel, loss: torch.Tensor) -> torch.Tensor:
    """Run DistributedDataParallel's post-forward step, which prepares the gradient reduction."""
    result: torch.Tensor = replica._post_forward(loss)  # type: ignore[no-untyped-call]
    return result


def synchronize_buffers(replica: nn.parallel.DistributedDataParallel) -> None:
    """Send the first rank's buffers around now, if DistributedDataParallel's next forward would; that one does not."""
    if replica._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
        replica._sync_buffers()  # type: ignore[no-untyped-call]
    replica.require_forward_param_sync = False


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
