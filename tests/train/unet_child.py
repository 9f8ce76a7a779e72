"""A child process that trains a U-Net with BatchNorm inside real memory limits; see test_remedies.py.

Prints one JSON line per limit. The images are scikit-learn's digits, enlarged.
"""

import gc
import json
import sys
import warnings

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import memkit as mk
from tests.train.limit_child import MIB, limit

ROWS, SIZE, STEPS = 16, 64, 3


class Block(nn.Sequential):
    """Two convolutions with batch normalization."""

    def __init__(self, width_in, width):
        super().__init__(
            nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Three levels: (rows, 1, H, W) images to (rows, 1, H, W) logits."""

    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2, self.middle = Block(1, width), Block(width, 2 * width), Block(2 * width, 4 * width)
        self.up2, self.up1 = Block(6 * width, 2 * width), Block(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = F.interpolate(self.middle(F.max_pool2d(b, 2)), scale_factor=2)
        d = F.interpolate(self.up2(torch.cat([b, c], 1)), scale_factor=2)
        return self.head(self.up1(torch.cat([a, d], 1)))


def loss_fn(model, batch):
    images, masks = batch
    return F.binary_cross_entropy_with_logits(model(images), masks)


def make():
    torch.manual_seed(0)
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.from_numpy(load_digits().images[: STEPS * ROWS]).float()[:, None] / 16
    images = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear")
    data = [(x, (x > 0.5).float()) for x in images.split(ROWS)]
    for parameter in model.parameters():  # the optimizer's state is there before the limit: it is not what is tested
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, data


def plainly(headroom_bytes=None):
    model, optimizer, data = make()
    losses = []
    limit(headroom_bytes)
    try:
        for batch in data:
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    except RuntimeError as error:
        if not mk.is_out_of_memory(error):
            raise
        return None, None
    finally:
        limit(None)
    return losses, model.state_dict()


def with_memkit(headroom_bytes, on_oom="exact"):
    model, optimizer, data = make()
    found = {"losses": [], "sizes": [], "num_ooms": 0, "refusal": None, "cause": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mk.MemoryEfficientTrainingWrapper(model, optimizer, on_oom=on_oom) as trainer:
            limit(headroom_bytes)
            try:
                for batch in data:
                    result = trainer.train_step(batch, loss_fn)
                    found["losses"].append(result.loss.item())
                    found["sizes"].append(list(result.sizes))
                    found["num_ooms"] += result.num_ooms
            except mk.MemkitOutOfMemoryError as error:
                found["refusal"], found["cause"] = str(error), repr(error.__cause__)
            finally:
                limit(None)
            found["recomputed"] = list(trainer.checkpointed_blocks)
    found["told"] = [str(each.message) for each in caught if issubclass(each.category, mk.MemkitWarning)]
    return found, model.state_dict()


def main():
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # oneDNN crashes in backward when memory is short
    with_memkit(None)
    gc.freeze()  # each recovery collects: without the objects of the imports in a moment
    losses, state = plainly()
    for headroom in map(int, sys.argv[1:]):
        found, end = with_memkit(headroom * MIB)
        found |= {"headroom": headroom, "plain_dies": plainly(headroom * MIB)[0] is None, "plain_losses": losses}
        found["is_same"] = all(torch.equal(end[name], value) for name, value in state.items())
        if found["refusal"]:
            found["inexact"] = with_memkit(headroom * MIB, on_oom="inexact")[0]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
