"""Simulated ranks."""

import importlib
import importlib.util

from torch.distributed._composable_state import _module_state_mapping as composable_states  # fully_shard's, by module
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore", "composable_states"]

# Shape functions of collectives for fake tensors: torch registers them itself, but 2.10 only on request.
if importlib.util.find_spec("torch.distributed._meta_registrations") is None:
    importlib.import_module("torch.distributed._tools.fake_collectives")
