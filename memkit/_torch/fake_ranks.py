"""Processes that are not there."""

from torch.distributed._composable_state import _module_state_mapping as composable_states  # fully_shard's, by module
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore", "composable_states"]
