"""The ladder, step 9: mixed precision, the only step that changes numbers. It must be asked for.

A complete file on purpose, to be read alone and compared with `diff`: steps repeat the code that they share.

Run: python examples/09_precision.py [--smoke]
"""

import argparse
import logging
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import memkit as mk

LENGTH, NUM_WORDS, WIDTH, NUM_BLOCKS, BATCH = (16, 400, 16, 2, 4) if "--smoke" in sys.argv else (128, 4000, 128, 4, 32)
BUDGET = "64MiB"


def read_rows(first: int, num_rows: int) -> TensorDataset:
    """Rows of words, (num_rows, LENGTH), and the word after each; the commonest words have numbers of their own."""
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))[:40]
    words = re.findall(r"\w+|[^\w ]| +", "".join(path.read_text("utf-8") for path in sources))
    number_of = {word: number for number, (word, _) in enumerate(Counter(words).most_common(NUM_WORDS - 1))}
    start, count = first * LENGTH, num_rows * LENGTH
    numbers = torch.tensor([number_of.get(word, NUM_WORDS - 1) for word in words[start : start + count + 1]])
    return TensorDataset(numbers[:-1].view(num_rows, LENGTH), numbers[1:].view(num_rows, LENGTH))


class LanguageModel(nn.Module):
    """Words (b, LENGTH) to features (b, LENGTH, WIDTH); `head` makes scores of all words from them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(NUM_WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, NUM_BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        past = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.blocks(self.words(words) + self.places.weight, mask=past, is_causal=True)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    words, targets = batch
    return mk.chunked_linear_cross_entropy(model(words), model.head.weight, targets)


def train(
    num_epochs: int, num_rows: int, memory: mk.MemoryManager, tracker: mk.Tracker, folder: Path, epochs: range
) -> None:
    torch.manual_seed(0)
    loader = DataLoader(read_rows(0, num_rows), BATCH, shuffle=True)
    val_batches = [read_rows(num_rows, BATCH // 4).tensors]
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * len(loader))
    plan = mk.plan_training(
        model, loader.dataset[:BATCH], loss_fn, optimizer, budget=BUDGET, precisions=("bf16-mixed",)
    )
    print(plan.explain().partition("\n\n")[0])
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, optimizer, **plan.wrapper_settings(), max_grad_norm=1.0, scheduler=schedule, memory=memory
    )
    state = mk.TrainingStateManager(folder / "states", keep=2)
    monitor = mk.ValidationMonitor(patience=2)
    loop = mk.MemoryEfficientTrainLoop(
        trainer, loader, loss_fn, val_loader=val_batches, monitor=monitor, report_every=2, state=state, progress=False
    )
    for epoch in epochs:  # the loop goes on where the last saved state ends
        start, mark = time.process_time(), tracker.mark()
        result = loop.run(epoch + 1)
        loss = result.validation["loss"]
        peak, seconds = mk.memory.format_bytes(tracker.peak_since(mark)), time.process_time() - start
        print(f"epoch {epoch + 1}: validation loss {loss:.5f}, peak {peak}, {seconds:.1f} s")
    state.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two epochs of small batches, a narrow model")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    num_epochs, num_rows = (2, 8) if parser.parse_args().smoke else (3, 128)
    folder = Path(tempfile.mkdtemp())
    memory = mk.MemoryManager("cpu", log=folder / "memory_events.jsonl")
    with memory.track() as tracker:
        for epochs in (range(num_epochs - 1), range(num_epochs - 1, num_epochs)):
            train(num_epochs, num_rows, memory, tracker, folder, epochs)
    print(memory.summary())
    memory.close()
    mk.write_report(mk.report.read_memory_events(folder / "memory_events.jsonl"), folder / "report.html")
    print(f"report: {folder / 'report.html'}")


if __name__ == "__main__":
    main()
