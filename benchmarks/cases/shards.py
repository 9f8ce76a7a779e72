"""One rank's estimate of large models on the meta device: bytes, time and host memory, each in a process of its own.

Decoders of the Llama shape with float32 parameters, computed in bfloat16 and reduced in float32; every block is
checkpointed and a unit, and so are embedding, norm and head. AdamW; every rank has one row. Time is processor time of
the estimate. Memory is the highest resident of the process, after and before the estimate.

Run: python -m benchmarks.cases.shards   (2 minutes), which cards they fit: python -m benchmarks.cases.shards cards
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.cases.dry_run import LlamaBlock
from benchmarks.result import write_result
from memkit._simulation.shard import Shard
from memkit.predict.usage import estimate_memory_usage

HALVES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CASES = {
    "7B": {
        "ddp, 8 ranks": Shard("ddp", 8),
        "zero1, 8 ranks": Shard("zero1", 8),
        "zero2, 8 ranks": Shard("zero2", 8, ("*",), **HALVES),
        "fsdp2, 8 ranks": Shard("fsdp2", 8, ("*",), **HALVES),
    },
    "70B": {
        "fsdp2, 8 ranks": Shard("fsdp2", 8, ("*",), **HALVES),
        "fsdp2, 64 ranks": Shard("fsdp2", 64, ("*",), **HALVES),
        "fsdp2, 64 ranks, resharded to 8": Shard("fsdp2", 64, ("*",), reshard_after_forward=8, **HALVES),
    },
}


CARDS = {
    "7B": {"8 ranks": ("H100", "A100 40GB")},
    "70B": {"8 ranks": ("H100", "A100 40GB"), "64 ranks": ("H100", "A100 40GB")},
}


class Checkpointed(LlamaBlock):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def decoder(size: str) -> nn.Module:
    num_blocks, width, heads, kv_heads, hidden, vocabulary = {
        "7B": (32, 4096, 32, 32, 11008, 32000),
        "70B": (80, 8192, 64, 8, 28672, 128256),
    }[size]
    with torch.device("meta"):
        return nn.Sequential(
            nn.Embedding(vocabulary, width),
            *(Checkpointed(width, heads, kv_heads, hidden) for _ in range(num_blocks)),
            nn.RMSNorm(width),
            nn.Linear(width, vocabulary, bias=False),
        )


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def resident_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_on_card(size: str, ranks: str, card: str) -> dict[str, Any]:
    tokens = torch.zeros(1, 4096, dtype=torch.int64)
    shard = CASES[size][f"fsdp2, {ranks}"]
    estimate = estimate_memory_usage(decoder(size), tokens, loss_fn=loss_fn, shard=shard, target=card)
    figures = {key: value for key, value in estimate.as_dict().items() if key.endswith("_bytes")}
    return {**figures, "peak_where": estimate.peak_where.split(", /")[0], "fits": estimate.fits(card)}


def measure(size: str, name: str) -> dict[str, Any]:
    before_bytes, model = resident_bytes(), decoder(size)
    tokens = torch.zeros(1, 4096, dtype=torch.int64)
    start = time.process_time()
    estimate = estimate_memory_usage(model, tokens, loss_fn=loss_fn, shard=CASES[size][name])
    seconds = time.process_time() - start
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(seconds, 1),
        **{key: value for key, value in estimate.as_dict().items() if key.endswith("_bytes") and value is not None},
        "highest_resident_bytes": resident_bytes(),
        "highest_resident_bytes_before": before_bytes,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1:] == ["cards"]:
        on_cards = {
            f"{size}, {ranks}, {card}": measure_on_card(size, ranks, card)
            for size, cards_of in CARDS.items()
            for ranks, cards in cards_of.items()
            for card in cards
        }
        print(json.dumps(on_cards, indent=2))
        print(write_result("shards_cards", on_cards))
        return
    if sys.argv[1:]:
        print(json.dumps(measure(*sys.argv[1:])))
        return
    figures: dict[str, Any] = {}
    for size, shards in CASES.items():
        for name in shards:
            command = [sys.executable, "-m", "benchmarks.cases.shards", size, name]
            child = subprocess.run(command, check=True, capture_output=True, text=True)
            figures[f"{size}, {name}"] = json.loads(child.stdout)
    print(json.dumps(figures, indent=2))
    print(write_result("shards", figures))


if __name__ == "__main__":
    main()
