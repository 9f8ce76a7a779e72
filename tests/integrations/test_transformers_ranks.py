"""The adapter for Hugging Face's Trainer: on two ranks, and with packed inputs."""

import itertools
import os
import socket
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from memkit.integrations.transformers import MemoryEfficientTrainer
from tests.integrations.test_transformers import (
    PLAIN,
    SMALL,
    assert_same_training,
    failing,
    loss_func,
    one_step,
    run,
    tokens,
    weights,
    with_memkit,
)
from tests.ranks import leave, spawn


@pytest.mark.slow
def test_packed_inputs_are_cut_by_split_fn(tmp_path):
    """One row of several texts, as padding-free collators make it."""

    def collate(rows):
        flat = {key: torch.cat([row[key] for row in rows])[None] for key in rows[0]}
        flat["labels"][:, ::24] = -100
        return flat | {"position_ids": (torch.arange(flat["labels"].shape[1]) % 24)[None]}

    def cut(batch, n):
        edges = [24 * round(i * batch["labels"].shape[1] / 24 / n) for i in range(n + 1)]
        return [{key: value[:, a:b] for key, value in batch.items()} for a, b in itertools.pairwise(edges)]

    class Positions(GPT2LMHeadModel):  # attention within each text, as flash attention has it for packed rows
        def forward(self, input_ids, position_ids, labels=None, **kwargs):
            return super().forward(input_ids.view(-1, 24), labels=None)

    def flat_loss(outputs, labels, num_items_in_batch=None):
        return loss_func(outputs, labels.view(-1, 24), num_items_in_batch)

    settings = {"data_collator": collate, "compute_loss_func": flat_loss}
    make = lambda: (Positions(GPT2Config(**SMALL)), tokens())  # noqa: E731
    want = one_step(Trainer, make, tmp_path, {"remove_unused_columns": False}, **settings)
    settings |= {"num_microbatches": 3, "split_fn": cut}
    got = one_step(MemoryEfficientTrainer, make, tmp_path, {"remove_unused_columns": False}, **settings)
    assert got.split_loss.sizes == (144, 144, 144)
    torch.testing.assert_close(weights(got), weights(want), rtol=1e-10, atol=1e-12)


def replica(rank, folder):
    """Two ranks of one script; rank 1 runs out of memory."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (Path(folder) / "port").read_text()}
    script = PLAIN.replace("num_train_epochs=2", "max_steps=3").replace(
        "use_cpu=True,", 'use_cpu=True, ddp_backend="gloo",'
    )
    want = run(script, folder)
    fault = failing(pytest.MonkeyPatch(), *([100, 1500] if rank else []))
    got = run(with_memkit(script), folder)
    assert fault.num_failures == got.split_loss.num_ooms == (2 if rank else 0)
    assert got.accelerator.num_processes == 2
    assert_same_training(got, want, 1e-12)
    leave()


@pytest.mark.slow
def test_one_of_two_ranks_may_run_out_of_memory(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    spawn(replica, tmp_path)
