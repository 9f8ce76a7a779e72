"""Processes that are not there, and how fully_shard finds its states."""

from torch.distributed._composable_state import _module_state_mapping as composable_states
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore", "composable_states"]
