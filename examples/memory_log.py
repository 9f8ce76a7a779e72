"""Watch a training: phases, a log file, a leak that is found, memory given back, and a file about an out-of-memory.

A small network learns scikit-learn's 1797 digits. The validation has a mistake that many scripts have: it keeps every
output. At the end a batch is asked for that no machine holds.

Run: pip install -c constraints.txt -e ".[test]" && python examples/memory_log.py [--smoke]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import memkit as mk

BATCH, MANY = 256, 2**40


def main() -> None:
    parser = argparse.ArgumentParser(description="A training whose memory is watched.")
    parser.add_argument("--smoke", action="store_true", help="a few epochs only")
    num_epochs = 4 if parser.parse_args().smoke else 10
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())

    data = load_digits()
    x, y = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory = mk.MemoryManager("cpu", log=folder / "memory_events.jsonl")
    memory.mark("model_made", note={"parameters": sum(p.numel() for p in model.parameters())})

    def train_step(batch: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with memory.phase("forward"):
            loss = F.cross_entropy(model(batch), targets)
        with memory.phase("backward"):
            loss.backward()
        with memory.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        memory.step()
        return loss.detach()

    outputs = []  # the mistake: it is never emptied
    for _ in range(num_epochs):
        with memory.phase("epoch"):
            for batch, targets in zip(x[:1536].split(BATCH), y[:1536].split(BATCH), strict=True):
                loss = train_step(batch, targets)
            with memory.phase("validation"), torch.no_grad():
                outputs.append(model(x[1536:]))
        leaks = memory.leaks()
    print(f"loss {float(loss):.3f} after {memory.num_steps} steps\n")

    print(memory.summary(), end="\n\n")
    print(*leaks, sep="\n", end="\n\n")
    del outputs
    print(f"given back: {mk.memory.format_bytes(memory.release())}\n")

    with memory.track() as tracker, memory.phase("one step, watched"):
        train_step(x[:BATCH], y[:BATCH])
    print(f"a step takes {mk.memory.format_bytes(tracker.peak_bytes)} in tensors, most of it:")
    for category, nbytes in list(tracker.peak_by_category.items())[:4]:
        print(f"  {mk.memory.format_bytes(nbytes):>10}  {category}")

    try:
        with memory.post_mortem(folder), memory.phase("too large"):
            model(torch.empty(MANY, 64))
    except RuntimeError:
        record = json.loads((folder / "out-of-memory.json").read_text())
        print("\nout of memory:", *record["text"][1:8], sep="\n  ")

    memory.close()
    log = mk.report.read_memory_events(folder / "memory_events.jsonl")
    print(f"\nthe log has {len(log.events)} events; the last one is {log.events[-1].event!r}")


if __name__ == "__main__":
    main()
