"""A function of rows in chunks, forward and backward: `chunked_map` beside torch's own pieces.

The rows are 10,242 points of fsaverage5's cortex surface (nilearn's wheel), each with its sines and cosines at six
frequencies, the function is an MLP of width 256. Peers: `torch.vmap` with `chunk_size`, chunks in a loop, and
`torch.utils.checkpoint` around each chunk. A memory budget of less than half of what `torch.vmap` takes lets memkit
keep most matrix products. The same without gradients, also for results as wide as the hidden layers.

Run: python -m benchmarks.cases.rows_in_chunks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit as mk
from benchmarks.result import write_result
from benchmarks.twins import measure, step
from tests.chunk.scenes import vertices

CHUNK_SIZE = 1024
BUDGET = "40MiB"


def rows() -> Tensor:
    """(10242, 36): sines and cosines of the coordinates."""
    places = vertices().float()[:, :, None] * torch.pi * 2 ** torch.arange(6) / 128
    return torch.cat([places.sin(), places.cos()], dim=-1).flatten(1)


def network(num_outputs: int = 16) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(36, 256), nn.GELU()]
    for _ in range(3):
        layers += [nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(256, num_outputs))


def ways(net: nn.Module, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    processor = mk.ChunkedProcessor(net, memory_budget=BUDGET)
    return {
        "plain": lambda: net(x),
        "torch.vmap": lambda: torch.vmap(net, chunk_size=CHUNK_SIZE)(x),
        "torch, loop": lambda: torch.cat([net(chunk) for chunk in x.split(CHUNK_SIZE)]),
        "torch, checkpoint per chunk": lambda: torch.cat(
            [checkpoint(net, chunk, use_reentrant=False) for chunk in x.split(CHUNK_SIZE)]
        ),
        "memkit": lambda: mk.chunked_map(net, x, chunk_size=CHUNK_SIZE),
        f"memkit, {BUDGET}": lambda: processor(x),
    }


@torch.no_grad()
def inference(net: nn.Module, x: Tensor) -> dict[str, Any]:
    each = ways(net, x)
    del each["torch, checkpoint per chunk"], each[f"memkit, {BUDGET}"]  # without gradients there is nothing to keep
    return measure({name: lambda forward=forward: [forward()] for name, forward in each.items()})


def main() -> None:
    torch.set_num_threads(1)
    net, x = network(), rows()
    leaves = list(net.parameters())
    figures = {
        "training": measure({name: step(leaves, forward) for name, forward in ways(net, x).items()}),
        "inference": inference(net, x),
        "inference, 256 outputs": inference(network(256), x),
    }
    for name, row in figures.items():
        print(name, row)
    print(write_result("rows_in_chunks", figures, peers=("nilearn",)))


if __name__ == "__main__":
    main()
