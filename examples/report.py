"""From a training to a page: watch two runs, compare them, and write a report that has a section of one's own.

A small network learns scikit-learn's 1797 digits, first with 256 images at once, then with 64. The report shows what
that saves, where the peak is, and what is not known.

Run: pip install "memkit[test]" && python examples/report.py [--smoke]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import memkit as mk
from memkit import write_report
from memkit.report.nodes import Paragraph, Section


def train(path: Path, batch_size: int, num_steps: int) -> float:
    """Train for some steps, with a log of phases and steps; the peak is taken apart at the end."""
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)
    memory = mk.MemoryManager("cpu", log=path)
    with memory.track() as tracker:
        memory.mark("start")
        model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
        memory.mark("network_loaded")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(num_steps):
            chosen = torch.arange(batch_size) + step * batch_size
            batch, targets = x[chosen % len(x)], y[chosen % len(x)]
            with memory.phase("forward"):
                loss = F.cross_entropy(model(batch), targets)
            with memory.phase("backward"):
                loss.backward()
            with memory.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            memory.step()
    splits = {"peak_by_category": tracker.peak_by_category, "peak_by_module": tracker.peak_by_module}
    memory.mark("peak taken apart", note=splits)
    memory.close()
    return loss.item()


def about_the_data(log, language: str) -> Section | None:
    """A section of one's own: any function of the log and the language; None leaves it out."""
    if language != "en":
        return None
    return Section("Data", (Paragraph(f"{len(log.events)} events of a training on 1797 images of 8 x 8 pixels."),))


def main() -> None:
    parser = argparse.ArgumentParser(description="From a training to a page.")
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    num_steps = 10 if parser.parse_args().smoke else 100
    folder = Path(tempfile.mkdtemp())

    for name, batch_size in (("before", 256), ("after", 64)):
        loss = train(folder / f"{name}.jsonl", batch_size, num_steps)
        print(f"{name}: batches of {batch_size}, loss {loss:.3f}")

    before, after = (mk.read_memory_events(folder / f"{name}.jsonl") for name in ("before", "after"))
    for suffix in ("html", "md", "txt", "json"):
        write_report(after, folder / f"report.{suffix}", baseline=before, sections=[about_the_data])
        print(f"{(folder / f'report.{suffix}').stat().st_size:>8,} B  report.{suffix}")

    text = (folder / "report.txt").read_text("utf-8").splitlines()
    print("", *text[2:3], sep="\n")
    start = next(number for number, line in enumerate(text) if line.startswith("Compared"))
    print("", *text[start : start + 12], sep="\n")


if __name__ == "__main__":
    main()
