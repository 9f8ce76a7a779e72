"""A child process that trains inside real memory limits; see test_wrapper_limits.py. Prints one JSON line per limit."""

import ctypes
import gc
import json
import resource
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk

MIB = 2**20
ROWS = 256


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def num_data_bytes():
    """What the limit counts, without what lies free in the heap: an earlier limit drives large blocks into it."""
    status = Path("/proc/self/status").read_text()
    mapped = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    return mapped - mallinfo2().fordblks


def limit(headroom_bytes):
    """Set the soft limit only, so that it can be raised again without privileges."""
    soft = resource.RLIM_INFINITY if headroom_bytes is None else num_data_bytes() + headroom_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.RLIM_INFINITY))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x.view(len(x), 32, 32)).flatten(1)


def mlp():
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(24)]
    return nn.Sequential(nn.Unflatten(1, (4, 256)), *layers, nn.Flatten())


def conv():
    frozen = nn.BatchNorm2d(8).requires_grad_(False).eval()
    return nn.Sequential(
        nn.Unflatten(1, (1, 32, 32)), nn.Conv2d(1, 8, 3, padding=1), frozen, nn.ReLU(), nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1), nn.Flatten(),
    )  # fmt: skip


MODELS = {"mlp": mlp, "conv": conv, "transformer": Encoder}


def loss_fn(model, x):
    return F.mse_loss(model(x), x)


def make(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    data = torch.randn(2, ROWS, 1024, generator=torch.Generator().manual_seed(5))
    for parameter in model.parameters():  # the optimizer's state is there before the limit: it is not what is tested
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, data


def run(name, headroom_bytes):
    model, optimizer, data = make(name)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False) as trainer:
        torch.manual_seed(9)
        limit(headroom_bytes)
        try:
            results = [trainer.train_step(batch, loss_fn) for batch in data]
        finally:
            limit(None)
    return model.state_dict(), [result.sizes for result in results], sum(result.num_ooms for result in results)


def undisturbed(name, sizes):
    model, optimizer, data = make(name)
    accumulator = mk.GradientAccumulator(optimizer)
    torch.manual_seed(9)
    for batch, parts in zip(data, sizes, strict=True):
        accumulator.expect(ROWS)
        for part in batch.split(parts):
            accumulator.backward(loss_fn(model, part), count=len(part))
        accumulator.flush()
    return model.state_dict()


def plain_dies(name, headroom_bytes):
    model, _, data = make(name)
    limit(headroom_bytes)
    try:
        loss_fn(model, data[0]).backward()
    except RuntimeError as error:
        return mk.is_out_of_memory(error)
    finally:
        limit(None)
    return False


def main():
    name, *headrooms = sys.argv[1:]
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # oneDNN crashes in backward when memory is short
    run(name, None)  # thread pools and caches exist from here on
    gc.freeze()  # each recovery collects: without the objects of the imports in a moment
    for headroom in map(int, headrooms):
        is_fatal = plain_dies(name, headroom * MIB)
        state, sizes, num_ooms = run(name, headroom * MIB)
        reference = undisturbed(name, sizes)
        is_same = all(torch.equal(value, reference[key]) for key, value in state.items())
        print(json.dumps({"headroom": headroom, "plain_dies": is_fatal, "num_ooms": num_ooms, "is_same": is_same,
                          "sizes": [list(parts) for parts in sizes]}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
