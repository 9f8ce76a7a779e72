"""Simulated ranks."""

import importlib
import importlib.util

from torch.distributed._composable_state import _module_state_mapping as composable_states  # fully_shard's, by module
from torch.distributed.tensor import _dispatch as shards_dispatch  # runs the operators of sharded tensors
from torch.distributed.tensor._sharding_prop import ShardingPropagator  # finds out what their results look like
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["INFER_SHAPES", "RUN_RANDOM", "FakeStore", "ShardingPropagator", "composable_states", "shards_dispatch"]

INFER_SHAPES = "_propagate_tensor_meta_non_cached"
"""Name of the method of `ShardingPropagator` that runs an operator on fake tensors of the whole size."""

RUN_RANDOM = "run_dtensor_rng_op" if hasattr(shards_dispatch, "run_dtensor_rng_op") else None
"""Name of the higher-order operator in `shards_dispatch` that draws a shard's random numbers; older ones lack it."""

# Shape functions of collectives for fake tensors: torch registers them itself, but 2.10 only on request.
if importlib.util.find_spec("torch.distributed._meta_registrations") is None:
    importlib.import_module("torch.distributed._tools.fake_collectives")
