"""Small trainings, logged as the docs say, each with one fault or none. Run as a script: NAME PATH_OF_THE_LOG."""

import copy
import random
import sys

import numpy as np
import torch
from torch import nn

import memkit as mk

MIB = 2**20


class Training:
    """A regression with a small network, in phases, as people write it."""

    def __init__(self, memory, *, device="cpu", width=256, rows=512):
        torch.manual_seed(0)
        self.memory, self.device, self.width, self.rows = memory, device, width, rows
        self.model = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, width)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        memory.mark("model_made")

    def batch(self, rows=None):
        return torch.randn(rows or self.rows, self.width, device=self.device)

    def step(self, batch=None):
        batch = self.batch() if batch is None else batch
        with self.memory.phase("forward"):
            out = self.model(batch)
            loss = out.square().mean()
        with self.memory.phase("backward"):
            loss.backward()
        with self.memory.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss, out.detach()

    def validate(self, batch, *, grad=False):
        with self.memory.phase("validation"), torch.set_grad_enabled(grad):
            self.model(batch).square().mean().item()


# ---- the faults


def leak_per_step(memory, device, num_steps=30, rows=512):
    training, history = Training(memory, device=device, rows=rows), []
    for _ in range(num_steps):
        _, out = training.step()
        history.append(out)
        memory.step()


def leak_under_noise(memory, device):
    training, history, chance = Training(memory, device=device), [], random.Random(0)
    for _ in range(60):
        batch = training.batch(chance.randrange(100, 900))  # kept until the next one
        training.step(batch)
        history.append(torch.ones(MIB // 4, device=device))
        memory.step()


def leak_of_batches(memory, device):
    training, seen = Training(memory, device=device), []
    for batch in torch.utils.data.DataLoader(torch.randn(512 * 20, 256), batch_size=512):
        training.step(batch)
        seen.append(batch)
        memory.step()


def leak_per_epoch(memory, device, num_epochs=4, num_steps=5):
    training, best = Training(memory, device=device), []
    for _ in range(num_epochs):
        with memory.phase("epoch"):
            for _ in range(num_steps):
                training.step()
                memory.step()
            best.append(copy.deepcopy(training.model.state_dict()))


def graph_kept(memory, device):
    training, losses = Training(memory, device=device), []
    for _ in range(20):
        loss, _ = training.step()
        losses.append(loss)
        memory.step()


def graph_kept_unused(memory, device):
    training, losses = Training(memory, device=device), []
    for _ in range(20):
        training.step()
        losses.append(training.model(training.batch(64)).mean())  # for a figure, without a backward
        memory.step()


def evaluation_with_gradients(memory, device):
    training = Training(memory, device=device)
    for _ in range(3):
        for _ in range(5):
            training.step()
            memory.step()
        training.model.eval()
        training.validate(training.batch(1024), grad=True)
        training.model.train()


def fragmentation(memory, device):
    training = Training(memory, device=device, width=1024)
    for rows in range(2_000, 22_000, 1_000):
        training.step(training.batch(rows))
        memory.step()


def first_step_peak(memory, device):
    training = Training(memory, device=device)
    for number in range(10):
        if number == 0:  # scales that are looked for once
            with torch.no_grad():
                training.model(training.batch(8192)).std()
        training.step()
        memory.step()


def survived_out_of_memory(memory, device):
    training = Training(memory, device=device)
    trainer = mk.MemoryEfficientTrainingWrapper(training.model, training.optimizer, memory=memory)

    def loss_fn(model, batch):
        if len(batch) > 128:
            torch.empty(2**50, device=device)  # stands for what does not fit
        return model(batch).square().mean()

    for _ in range(6):
        trainer.train_step(training.batch(), loss_fn)
        memory.step()


def host_memory(memory, device, num_steps=20):
    training, rows = Training(memory, device=device), []
    for number in range(num_steps):
        training.step()
        rows.append(np.full(MIB // 2, number, dtype=np.float64))
        memory.step()


class Cached(torch.utils.data.Dataset):
    """A dataset that keeps what it has loaded, in each worker."""

    def __init__(self):
        self.cache = {}

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        self.cache[index] = torch.ones(MIB // 8)
        return self.cache[index][:256]


def workers(memory, device):
    training = Training(memory, device=device, rows=16)
    for number, batch in enumerate(torch.utils.data.DataLoader(Cached(), batch_size=16, num_workers=2)):
        training.step(batch)
        memory.step()
        if number % 5 == 0:
            memory.mark("batches_seen")  # written at once, with a reading of the workers, however fast the steps are
        if number == 100:
            break


def optimizer_twice(memory, device):
    training, kept = Training(memory, device=device), []
    for number in range(12):
        if number == 6:  # a new schedule, with a new optimizer; the old scheduler still has the old one
            kept.append(torch.optim.lr_scheduler.StepLR(training.optimizer, 1))
            training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-4)
        training.step()
        memory.step()


def large_validation(memory, device):
    training = Training(memory, device=device, rows=128)
    for _ in range(3):
        for _ in range(5):
            training.step()
            memory.step()
        training.validate(training.batch(4096))


def leak_and_evaluation(memory, device):
    training, history = Training(memory, device=device), []
    for _ in range(3):
        for _ in range(8):
            _, out = training.step()
            history.append(out)
            memory.step()
        training.validate(training.batch(), grad=True)


# ---- nothing wrong


def clean(memory, device, num_steps=30):
    training = Training(memory, device=device)
    for _ in range(num_steps):
        training.step()
        memory.step()


def clean_epochs(memory, device):
    training, losses = Training(memory, device=device), []
    for _ in range(4):
        with memory.phase("epoch"):
            outputs = []
            for _ in range(6):
                loss, out = training.step()
                losses.append(loss.item())
                outputs.append(out)  # until the epoch ends
                memory.step()
            torch.cat(outputs).mean()
            del outputs, out, loss
            training.validate(training.batch())


def clean_cache(memory, device):
    training, cache = Training(memory, device=device), {}
    for number in range(40):
        batch = cache.setdefault(number % 12, training.batch())
        training.step(batch)
        memory.step()


def clean_lengths(memory, device):
    training, chance = Training(memory, device=device), random.Random(1)
    for _ in range(40):
        batch = training.batch(chance.randrange(300, 330))
        _, _out = training.step(batch)
        memory.step()


def clean_resizing(memory, device):
    training = Training(memory, device=device)
    for rows in (400, 440, 480):
        for _ in range(10):
            batch = training.batch(rows)
            training.step(batch)
            memory.step()


def clean_preloaded(memory, device):
    training = Training(memory, device=device)
    for batch in [training.batch() for _ in range(30)]:
        training.step(batch)
        memory.step()


def clean_pair(memory, device):
    """Two optimizers, of two networks, as a GAN has them; an average of the weights."""
    one, two = Training(memory, device=device), Training(memory, device=device)
    average = copy.deepcopy(one.model)
    for _ in range(15):
        one.step()
        two.step()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), one.model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
        memory.step()


def run(train, path, *, device="cpu", track=True, **settings):
    """Run a training with a log; on "cuda" it is a virtual GPU."""
    with mk.MemoryManager(device, log=path) as memory:
        if track:
            with memory.track():
                train(memory, device, **settings)
        else:
            train(memory, device, **settings)
    return mk.report.read_memory_events(path)


if __name__ == "__main__":
    from memkit.memory import ledger

    ledger._CHILDREN_NS, ledger._CHILDREN_SHARE = 0, 0  # at each event: a run of seconds stands for one of hours
    run(globals()[sys.argv[1]], sys.argv[2], track=sys.argv[3] == "track")
