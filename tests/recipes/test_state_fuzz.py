"""Random damage and forgery: nothing runs, nothing damaged is used, every refusal is typed and changes nothing."""

import os

import pytest
import torch

from tests.helpers import one_in
from tests.recipes import state_fuzz


def sharded(mesh):
    from torch.distributed.fsdp import fully_shard

    def make(value):
        objects = state_fuzz.make_objects(value)
        fully_shard(objects["model"], mesh=mesh)
        objects["optimizer"] = torch.optim.AdamW(objects["model"].parameters(), lr=0.1)
        objects["scheduler"] = torch.optim.lr_scheduler.StepLR(objects["optimizer"], 3)
        return objects

    return make


@pytest.mark.parametrize("kind", one_in(2, ["whole", "sharded"]))
@pytest.mark.parametrize("num_variants", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_changed_states(tmp_path, monkeypatch, one_rank, kind, num_variants):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    make = state_fuzz.make_objects if kind == "whole" else sharded(one_rank)
    outcomes = state_fuzz.fuzz(num_variants, 7, tmp_path, make)
    assert outcomes["refused"] > num_variants // 10
    assert outcomes["the older"] > num_variants // 10
