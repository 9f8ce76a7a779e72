"""S0: how many edges fit. The memory analysis of a neural operator by its number of edges, without a GPU.

The GAOT-3D project ran it for 15 to 45 minutes on a GPU: encoder, decoder and whole model from 5,000 to 500,000 edges,
then the MLP of the edges alone up to a million, in training and inference, with tables and plots. Here both are
predicted on tensors without data. Then the same for a model of one's own; one of its steps is run for real, to see that
the prediction holds.

Run: pip install -c constraints.txt -e ".[plots]" && python examples/s0_edge_memory.py [--smoke] [--output-dir DIR]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import memkit as mk

NUM_NODES, WIDTH = 2_000, 32
CARDS = ("RTX 3060 12GB", "RTX 4090", "A100 80GB")


class MessagePassing(nn.Module):
    """Three rounds in which every edge sends a message, an MLP of both its ends, and every node adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for message in self.messages:
            sent = message(torch.cat([nodes[source], nodes[target]], 1))
            nodes = nodes + torch.zeros_like(nodes).index_add(0, target, sent)
        return nodes


def build_step(num_edges: int) -> Callable[[], None]:
    """All that is needed for the law: make model, optimizer and data of a size, and return one step."""
    model = MessagePassing()
    optimizer = torch.optim.AdamW(model.parameters())
    nodes, edges = torch.randn(NUM_NODES, WIDTH), torch.randint(NUM_NODES, (2, num_edges))

    def step() -> None:
        optimizer.zero_grad()
        model(nodes, edges).square().mean().backward()
        optimizer.step()

    return step


def measured_peak(num_edges: int) -> int:
    """The second step's peak, of a real run."""
    memory = mk.MemoryManager("cpu")
    with memory.track() as tracker:
        step = build_step(num_edges)
        step()
        mark = tracker.mark()
        step()
        peak = tracker.peak_since(mark)
    memory.close()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description="The memory of a neural operator by its number of edges.")
    parser.add_argument("--smoke", action="store_true", help="fewer sizes")
    parser.add_argument("--output-dir", default=tempfile.gettempdir(), help="for the table and the plot")
    arguments = parser.parse_args()
    torch.manual_seed(0)

    config = mk.MemoryTestConfig(test_full_model=not arguments.smoke, num_test_points=2 if arguments.smoke else 12)
    for analysis in ("full",) if arguments.smoke else ("full", "core"):
        start = time.process_time()
        result = mk.recipes.run_memory_test(config, analysis, gpus=CARDS)
        print(result.explain())
        written = ", ".join(path.name for path in result.write(arguments.output_dir))
        print(f"\n{time.process_time() - start:.0f} s of one core, no GPU; written: {written}\n")

    own = mk.predict.profile_scaling(build_step, sizes=[5_000, 50_000, 500_000])
    law = own.law["train"]
    print(f"A model of one's own, three rounds of messages between {NUM_NODES:,} nodes:")
    print(
        f"{law.tier} law, grows with n^{law.order}; training over inference at 500,000 edges: {own.ratio(500_000):.2f}"
    )
    for card in CARDS:
        print(f"  {card}: up to {law.max_n(card):,} edges in a training step")
    num_edges = 5_000 if arguments.smoke else 200_000
    predicted, measured = law.predict(num_edges), measured_peak(num_edges)
    print(f"{num_edges:,} edges: predicted {predicted:,} bytes, measured {measured:,}")


if __name__ == "__main__":
    main()
