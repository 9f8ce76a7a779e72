"""A small training that the loop's tests share: handwritten digits, dropout, momentum, a schedule."""

import functools
import os
import signal

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memkit.recipes.loop import MemoryEfficientTrainLoop
from memkit.train.wrapper import MemoryEfficientTrainingWrapper
from tests.toys import classify


@functools.cache
def digits(num_rows=200):
    """Real input: scikit-learn's handwritten digits, (N, 64) float32 and (N,) classes."""
    images, classes = load_digits(return_X_y=True)
    return torch.from_numpy(images[:num_rows]).float() / 16, torch.from_numpy(classes[:num_rows])


def loader_of(num_rows=200, batch_size=16, **settings):
    return DataLoader(TensorDataset(*digits(num_rows)), batch_size=batch_size, shuffle=True, **settings)


def make(train_loader=None, precision=None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    trainer = MemoryEfficientTrainingWrapper(
        model, optimizer, precision=precision, accumulation_steps=2, scheduler=schedule
    )
    loop = MemoryEfficientTrainLoop(trainer, train_loader or loader_of(), classify, progress=False, **settings)
    return loop, model


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class StopAfter:
    """A data set that sends this process a SIGTERM when so many samples were read."""

    def __init__(self, num_samples):
        self.images, self.classes = digits()
        self.left = num_samples

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.images[index], self.classes[index]


def train_in_child():
    """What a forked or spawned process runs."""
    torch.set_num_threads(1)
    loop, model = make(val_loader=loader_of(50))
    result = loop.run(num_epochs=2)
    return weights(model).numpy(), result.num_steps, result.validation["loss"]
