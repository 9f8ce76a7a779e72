"""Simulated ranks."""

import importlib
import importlib.util

import torch
from torch.distributed._composable_state import _module_state_mapping as composable_states  # fully_shard's, by module
from torch.distributed.tensor import (
    DTensor,
    _random as draws_owner,  # holds what makes each rank draw its own numbers
)
from torch.distributed.tensor._random import _RNGStateTracker as ShardedDraws
from torch.distributed.tensor._sharding_prop import ShardingPropagator  # finds out what their results look like
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = [
    "INFER_SHAPES",
    "SETS_STATES",
    "TRACKER",
    "FakeStore",
    "ShardedDraws",
    "ShardingPropagator",
    "composable_states",
    "device_of_shard",
    "draws_owner",
]

INFER_SHAPES = "_propagate_tensor_meta_non_cached"
"""Name of the method of `ShardingPropagator` that runs an operator on fake tensors of the whole size."""

TRACKER = "_rng_tracker"
"""Name of the only `ShardedDraws` in `draws_owner`; None before the first draw."""

SETS_STATES = "distribute_region_enabled"
"""Name of the property of `ShardedDraws` that tells whether it sets the state of the GPU's generator at each draw."""


def device_of_shard(tensor: DTensor) -> torch.device:
    """Return the device of this rank's part of a sharded tensor."""
    return tensor._local_tensor.device


# Shape functions of collectives for fake tensors: torch registers them itself, but 2.10 only on request.
if importlib.util.find_spec("torch.distributed._meta_registrations") is None:
    importlib.import_module("torch.distributed._tools.fake_collectives")
