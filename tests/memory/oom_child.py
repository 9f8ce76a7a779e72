"""A child process whose training really runs out of memory; see test_postmortem.py. Prints what passed, as JSON."""

import contextlib
import gc
import json
import os
import resource
import sys
import weakref

import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit._machine.devices import limit_memory

MIB = 2**20
CACHE = []  # planted: the largest of all, held by a global


class Net(nn.Module):
    """Keeps 4 MiB of activations for the backward in each of its layers."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))
        self.register_buffer("table", torch.zeros(MIB // 4))

    def forward(self, x, is_last):
        with self.memory.phase("encoder"):
            for layer in self.layers:
                x = layer(x).sin()
        with self.memory.phase("head"):
            if is_last:
                too_large = torch.empty(MIB // 4).repeat(600)
                return too_large.sum()
        return x.square().mean()


def train(memory, directory, where):
    net = Net(memory)
    optimizer = torch.optim.AdamW(net.parameters())
    batch = torch.randn(4096, 256)
    CACHE.append(torch.ones(24 * MIB // 4))
    with memory.post_mortem(directory):
        for step in range(3):
            is_last = step == 2
            watched = memory.track() if where == "tracked" and is_last else contextlib.nullcontext()
            with memory.phase("step"), watched:
                if is_last:
                    limit_memory(torch.device("cpu"), 500 * MIB)
                loss = net(batch, is_last)
                with memory.phase("backward"):
                    loss.backward()
                optimizer.step()
                if not is_last:
                    optimizer.zero_grad(set_to_none=step == 0)  # gradients of the second step stay, as zeros
            memory.step()


def fill(memory, directory, where):
    """Take all that is left in small pieces, so that next to nothing remains for the post-mortem."""
    kept = []
    with memory.post_mortem(directory), memory.phase("fill"):
        limit_memory(torch.device("cpu"), 64 * MIB)
        size = 4 * MIB if where == "tight" else 64 * 1024
        while True:
            kept.append(torch.ones(size // 4))


def main():
    directory, where = sys.argv[1:]
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # oneDNN crashes when memory is short
    memory = mk.MemoryManager("cpu")
    F.mse_loss(torch.ones(4, requires_grad=True), torch.ones(4)).backward()  # loads what a first use loads
    result = {}
    kind = fill if where in ("tight", "tightest") else train
    try:
        kind(memory, directory, where)
    except RuntimeError as error:
        soft = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        tensors = [weakref.ref(each) for each in gc.get_objects() if type(each) is torch.Tensor and each.nbytes >= MIB]
        result = {"error": str(error), "is_oom": mk.is_out_of_memory(error), "context": repr(error.__context__)}
    CACHE.clear()
    gc.collect()
    result["num_kept"] = sum(each() is not None for each in tensors)
    result["events"] = [[event.event, event.phase, event.note] for event in memory.events][-6:]
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
