"""What DistributedDataParallel and fully_shard (FSDP2) do around a forward."""

from typing import Any

import torch
from torch import nn


def before_forward(replica: nn.parallel.DistributedDataParallel) -> None:
    """Do what DistributedDataParallel does before its module's forward; it wants an argument to move to its device."""
    replica._pre_forward(None)  # type: ignore[no-untyped-call]


def after_forward(replica: nn.parallel.DistributedDataParallel, loss: torch.Tensor) -> torch.Tensor:
    """Do what DistributedDataParallel does after its module's forward: it prepares the exchange of gradients."""
    result: torch.Tensor = replica._post_forward(loss)  # type: ignore[no-untyped-call]
    return result


def state_of(module: Any) -> Any:
    """Return the state of a module sharded by fully_shard; several modules may share one."""
    return module._get_fsdp_state()


def parameter_group(state: Any) -> Any:
    """Return the parameters that a state gathers together; None without any.

    Raises:
        AssertionError: There are several, on several meshes.
    """
    return state._fsdp_param_group


def is_root(state: Any) -> bool:
    """Say whether a state is that of the outermost module."""
    return bool(state._is_root)


COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm")
"""Names of what a parameter group exchanges parameters and gradients by; 2.8 lacks them."""


def missing_for_lockstep() -> str:
    """Name what this torch lacks for ranks of fully_shard to recover together; empty where it has all, as 2.13 does."""
    from torch.distributed.fsdp import FSDPModule  # half a second, and whoever shards has it already

    needed = ("set_custom_all_gather", "reset_iter_state")
    lacking = next((name for name in needed if not hasattr(FSDPModule, name)), None)
    return f"PyTorch {torch.__version__}, which has no FSDPModule.{lacking}" if lacking else ""
