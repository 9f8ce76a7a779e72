"""SplitLoss under DistributedDataParallel: one exchange for each batch, also where a rank runs out of memory."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memkit as mk
from tests.helpers import assert_refused, assert_same
from tests.ranks import join, leave, spawn
from tests.toys import square_error
from tests.train.faults import FailingOperator
from tests.train.test_split_loss import ROWS, rows


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.body[1].eval()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        self.seen += x.sum()
        return self.body(x)


def replica_worker(rank, folder):
    """Rank 1 runs out of memory; both ranks must end where plain replicas end, through DDP's own exchange."""
    join(rank, folder)
    states = []
    for kind in ("plain", "split"):
        torch.manual_seed(rank)  # DistributedDataParallel itself makes them equal
        model = DistributedDataParallel(Normed().double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        split = mk.SplitLoss(model, num_microbatches=2 + rank, probe=False)
        for step in range(4):
            batch = [each + 0.1 * (rank + step) for each in rows()]
            optimizer.zero_grad()
            for is_last in (False, True):  # two batches for each step: the first without exchange
                model.require_backward_grad_sync = is_last
                if kind == "plain":
                    square_error(model, batch).backward()
                else:
                    with FailingOperator(*([40] if rank == 1 and is_last and step in (0, 2) else [])):
                        loss = split(batch, square_error)
                    loss.backward()
            optimizer.step()
        states.append(model.module.state_dict())
        if kind == "split":
            assert split.num_ooms == (2 if rank == 1 else 0)
        with torch.no_grad():
            model.module.seen.zero_()
    assert_same(*states, 1e-12)
    # A rank none of whose rows counts does not let the other one wait.
    optimizer.zero_grad()
    split(rows(), lambda m, b: mk.Loss(sum=m(b[0]).sum(), count=0 if rank else ROWS)).backward()
    assert model.module.body[0].weight.grad.abs().max() > 0
    assert_refused(lambda: mk.SplitLoss(nn.Sequential(model)), mk.errors.ConfigError, "only a part of the model")
    torch.save(list(model.module.parameters()), f"{folder}/{rank}.pt")
    leave()


@pytest.mark.slow
def test_replicas_exchange_once_and_one_may_run_out_of_memory(tmp_path):
    spawn(replica_worker, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert_same(first, second)
