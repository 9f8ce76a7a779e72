"""One training run of the demo, in a process of its own because it may die.

``python -m memkit.recipes.demo_worker plain|memkit NUM_STEPS LIMIT_BYTES`` (0: no limit) writes JSON to stdout: one
line per step, and a final line with the resources used, even if the run fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import platform
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memkit._gradients.loss import Loss
from memkit._machine.devices import limit_memory, resolve_device
from memkit._recorder.recorder import Recorder
from memkit._recovery.attempt import ReportingErrors
from memkit._recovery.errors import describe_error, drop_frames
from memkit.train.wrapper import MemoryEfficientTrainingWrapper

_BATCH_ROWS = 64
_LENGTH = 256  # characters per row
_VOCABULARY = 128  # ASCII
_WIDTH = 64
_NUM_HEADS = 4
_NUM_BLOCKS = 4
_PADDING = -100
_Batch = tuple[torch.Tensor, torch.Tensor]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.attention_in = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.attention_out = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.hidden = nn.Linear(_WIDTH, 4 * _WIDTH, bias=False)
        self.out = nn.Linear(4 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attention_in(self.norms[0](x)).unflatten(-1, (3, _NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.out(F.gelu(self.hidden(self.norms[1](x))))
        return y


class _CharacterModel(nn.Module):
    """Predicts the next character. No dropout and no batch statistics: any split of a batch has the same gradient."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.characters = nn.Embedding(_VOCABULARY, _WIDTH)
        self.places = nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(_NUM_BLOCKS)))
        self.head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02, generator=generator)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        logits: torch.Tensor = self.head(self.blocks(self.characters(characters) + self.places(places)))
        return logits


def _loss(model: nn.Module, batch: _Batch) -> Loss:
    """Return the sum over the real characters and their count: rows differ in length."""
    characters, following = batch
    loss_sum = F.cross_entropy(
        model(characters).flatten(0, 1), following.flatten(), ignore_index=_PADDING, reduction="sum"
    )
    return Loss(sum=loss_sum, count=(following != _PADDING).sum())


def _batches(num_batches: int, num_rows: int, device: torch.device) -> list[_Batch]:
    """Read paragraphs of the standard library's sources, each cut or padded to one row."""
    modules = (argparse, dataclasses, inspect, subprocess, typing)
    paragraphs = [text for module in modules for text in inspect.getsource(module).split("\n\n") if len(text) > 1]
    characters = torch.zeros(num_batches * num_rows, _LENGTH, dtype=torch.long)
    following = torch.full_like(characters, _PADDING)
    for row, text in enumerate(paragraphs[: len(characters)]):
        codes = torch.tensor(list(text.encode("ascii", "replace")[: _LENGTH + 1]))
        characters[row, : len(codes) - 1] = codes[:-1]
        following[row, : len(codes) - 1] = codes[1:]
    parts = (torch.split(each.to(device), num_rows) for each in (characters, following))
    return list(zip(*parts, strict=True))


def _train(kind: str, batches: list[_Batch], device: torch.device) -> Iterator[dict[str, Any]]:
    model = _CharacterModel(torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if kind == "memkit":
        with MemoryEfficientTrainingWrapper(model, optimizer) as trainer:
            for batch in batches:
                result = trainer.train_step(batch, _loss)
                yield {"loss": result.loss.item(), "sizes": result.sizes, "num_ooms": result.num_ooms}
        return
    for batch in batches:
        loss = _loss(model, batch).average()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield {"loss": loss.item(), "sizes": (len(batch[0]),), "num_ooms": 0}


def _run(kind: str, num_steps: int, limit_bytes: int) -> None:
    device = resolve_device()
    if device.type != "cuda":
        device = torch.device("cpu")
    torch.set_num_threads(1)  # threads use extra memory, and wait for each other on a busy machine
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]  # oneDNN can crash if it gets no memory
    for _ in _train(kind, _batches(1, 2, device), device):
        pass  # warm-up: libraries and lazy imports allocate before the limit is set
    if limit_bytes:
        limit_memory(device, limit_bytes)
    recorder = Recorder()
    summary: dict[str, Any] = {
        "device": str(device),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    start = time.perf_counter()

    def tell(error: Exception, is_out_of_memory: bool) -> None:  # noqa: FBT001 - as the kernel calls it
        summary.update(error=describe_error(error), is_out_of_memory=is_out_of_memory)
        drop_frames(error)  # frees the tensors too: writing the summary needs some memory

    try:
        with ReportingErrors(tell), recorder:
            for step in _train(kind, _batches(num_steps, _BATCH_ROWS, device), device):
                _write(step)
    finally:
        summary |= {"seconds": time.perf_counter() - start, "peak_bytes": recorder.recording().peak_bytes(str(device))}
        _write(summary)


def _write(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
