"""Fixtures that several tests of states share."""

import os

import pytest
import torch.distributed as dist


@pytest.fixture
def no_flush(monkeypatch):
    """No disk loses power here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A mesh of this process alone."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
