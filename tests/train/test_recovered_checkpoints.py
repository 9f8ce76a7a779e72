"""Checkpoints of a sharded training that has survived an out-of-memory: kill and go on, and torch's own checkpoints."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import memkit as mk
from tests.helpers import is_same
from tests.ranks import join, leave, spawn
from tests.toys import out_of_memory
from tests.train.faults import mlp
from tests.train.test_sharded_recovery import local

STEPS, FAULT, STOP, ROWS = 5, 1, 3, 8


class Training:
    """Dropout, AdamW with a schedule, and an out-of-memory on rank 1 in the step `FAULT`."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = mlp()
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for module in (self.model[0], self.model[3], self.model):
            fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.trainer = mk.MemoryEfficientTrainingWrapper(
            self.model, self.optimizer, scheduler=self.scheduler, max_grad_norm=0.5, probe=False
        )

    def run(self, rank, start, stop):
        data = torch.randn(STEPS, ROWS, 6, generator=torch.Generator().manual_seed(3 + rank))
        for step in range(start, stop):

            def loss_fn(model, micro, step=step):
                loss = model(micro).square().mean()
                if rank and step == FAULT and len(micro) == ROWS:
                    out_of_memory()
                return loss

            result = self.trainer.train_step(data[step], loss_fn)
            assert result.num_ooms == (step == FAULT)
            assert result.num_microbatches == (1 if step < FAULT else 2)


def values(training):
    """This rank's parameters and their optimizer state, in an order that a load keeps."""
    states = [training.optimizer.state[parameter] for parameter in training.model.parameters()]
    tensors = [*training.model.parameters(), *(state[name] for state in states for name in sorted(state))]
    return [local(tensor.detach()) for tensor in tensors]


def uninterrupted(rank, folder):
    join(rank, folder)
    training = Training()
    torch.manual_seed(100 + rank)
    training.run(rank, 0, STEPS)
    torch.save(values(training), f"{folder}/expected{rank}.pt")
    leave()


def killed(rank, folder):
    join(rank, folder)
    training = Training()
    torch.manual_seed(100 + rank)
    training.run(rank, 0, STOP)
    mk.TrainingStateManager(f"{folder}/states").save(STOP, **vars(training))
    model, optimizer = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/torch")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(rank, folder):
    join(rank, folder)
    by_torch = Training()
    model, optimizer = get_state_dict(by_torch.model, by_torch.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=f"{folder}/torch")
    set_state_dict(
        by_torch.model,
        by_torch.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    training = Training()
    assert mk.TrainingStateManager(f"{folder}/states").restore(**vars(training)) == STOP
    assert is_same(values(training), values(by_torch))
    training.run(rank, STOP, STEPS)
    assert is_same(values(training), torch.load(f"{folder}/expected{rank}.pt", weights_only=True))
    leave()


@pytest.mark.slow
def test_recovered_training_resumes_bit_for_bit_after_kill(tmp_path):
    spawn(uninterrupted, tmp_path)
    (tmp_path / "store").unlink()
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        spawn(killed, tmp_path)
    (tmp_path / "store").unlink(missing_ok=True)
    spawn(resumed, tmp_path)
