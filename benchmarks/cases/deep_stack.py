"""A stack of 12 equal blocks, forward and backward: memkit's treatments of blocks beside `checkpoint_sequential`.

The rows are scikit-learn's 1,797 digits; a block is a residual MLP of width 128. `checkpoint_sequential` keeps the
input of each of its segments and runs all but the last again; memkit's treatments are those of the wrapper's
`checkpoint=` setting, block by block.

Run: python -m benchmarks.cases.deep_stack
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.result import write_result
from benchmarks.twins import Way, measure, step
from memkit.train.checkpointing import Checkpointing

NUM_BLOCKS, WIDTH = 12, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, WIDTH), *(Block() for _ in range(NUM_BLOCKS)))


def treated(choice: Sequence[str] | dict[str, str], x: Tensor) -> Way:
    net = stack()
    Checkpointing(net, choice)
    return step(list(net.parameters()), lambda: net(x))


def in_segments(num_segments: int, x: Tensor) -> Way:
    net = stack()

    def forward() -> Tensor:
        return checkpoint_sequential(net[1:], num_segments, net[0](x), use_reentrant=False)

    return step(list(net.parameters()), forward)


def main() -> None:
    torch.set_num_threads(1)
    x = torch.from_numpy(load_digits().data).float() / 16
    net = stack()
    names = [str(number) for number in range(1, NUM_BLOCKS + 1)]
    ways: dict[str, Callable[[], Sequence[Tensor]]] = {
        "plain": step(list(net.parameters()), lambda: net(x)),
        **{f"torch checkpoint_sequential, {n} segments": in_segments(n, x) for n in (2, 4, NUM_BLOCKS)},
        "memkit, all blocks full": treated(names, x),
        "memkit, 9 of 12 blocks full": treated(names[:9], x),
        "memkit, all blocks selective": treated(dict.fromkeys(names, "selective"), x),
        "memkit, all blocks offload": treated(dict.fromkeys(names, "offload"), x),
    }
    figures = measure(ways)
    for name, row in figures.items():
        print(f"{name:40} {row}")
    print(write_result("deep_stack", figures, peers=("scikit-learn",)))


if __name__ == "__main__":
    main()
