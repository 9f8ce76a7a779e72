"""A batch in parts where a framework owns the step: peak memory, gradient and processor time of a training step.

Hugging Face's `Trainer` over a small GPT-2 (4 layers, width 128) and 16 rows of 128 bytes of the standard library's
text. "Whole" is the adapter with one part: what it costs where nothing is split. Live bytes at the step's peak over
those before it, from the profiler; processor time of steps in turns, medians of the differences.

Run: HF_HUB_OFFLINE=1 python -m benchmarks.cases.trainer_parts   (2 minutes)
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from benchmarks.result import write_result
from benchmarks.timing import in_turns, seconds_of
from memkit.integrations.transformers import MemoryEfficientTrainer
from tests.allocations import trace_allocations

ROUNDS = 15
ROWS, WIDTH = 16, 128


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor(list(Path(argparse.__file__).read_bytes()[: ROWS * WIDTH])).view(ROWS, WIDTH)
    return {"input_ids": ids, "labels": ids}


def make(num_parts: int | None, folder: str) -> Trainer:
    torch.manual_seed(0)
    sizes = {"n_positions": WIDTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    config = GPT2Config(vocab_size=256, **sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    args = TrainingArguments(folder, report_to="none", use_cpu=True, disable_tqdm=True)
    kind, settings = (Trainer, {}) if num_parts is None else (MemoryEfficientTrainer, {"num_microbatches": num_parts})
    return kind(GPT2LMHeadModel(config), args, **settings)


def step(trainer: Trainer) -> float:
    trainer.model.zero_grad()
    inputs = batch()
    num_items = (inputs["labels"][:, 1:] != -100).sum()
    return seconds_of(lambda: trainer.training_step(trainer.model, inputs, num_items))


def gradient(trainer: Trainer) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in trainer.model.parameters()])


def main() -> None:
    torch.set_num_threads(1)
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        trainers = {"plain": make(None, folder)}
        trainers |= {f"{num} parts" if num > 1 else "whole": make(num, folder) for num in (1, 2, 4, 8)}
        figures: dict[str, Any] = {}
        for name, trainer in trainers.items():
            step(trainer)  # measures what the loss is, and probes
            figures[name] = {
                "gradient_error": float((gradient(trainer) - gradient(trainers["plain"])).norm())
                / float(gradient(trainers["plain"]).norm()),
            }
        seconds = in_turns(trainers, ROUNDS, step)
        for name, trainer in trainers.items():
            trainer.model.zero_grad()
            figures[name]["peak_bytes"] = trace_allocations(lambda trainer=trainer: step(trainer)).peak
            extra = statistics.median(a - b for a, b in zip(seconds[name], seconds["plain"], strict=True))
            figures[name]["time_ratio"] = 1 + extra / statistics.median(seconds["plain"])
        figures["plain"]["milliseconds"] = 1e3 * statistics.median(seconds["plain"])
        figures["parameters_bytes"] = sum(each.nbytes for each in trainers["plain"].model.parameters())
    print(write_result("trainer_parts", figures, peers=("transformers", "accelerate")))


if __name__ == "__main__":
    main()
