"""The dry run of `estimate_memory_usage` next to three peers on the models of the tests, its time, a 70B model.

Truth is the highest sum of the CPU allocator's events of a warm step (torch.profiler), with what was there before.
The peers are torch's MemTracker on fake tensors, the arithmetic of `accelerate estimate-memory`, and torch-kitsune.
Time is processor time, the least of nine calls after the first. The 70B model is built on the meta device and estimated
in a process of its own, whose highest resident memory is reported.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.dry_run   (5 minutes; needs accelerate, torch-kitsune, transformers)
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from kitsune import predict_memory
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves

from benchmarks.counting import cost
from benchmarks.models import transformer
from benchmarks.result import write_result
from memkit.predict.usage import estimate_memory_usage
from tests.predict.steps import STEPS, Step
from tests.predict.steps_transformers import STEPS as TRANSFORMERS
from tests.predict.test_dryrun import build
from tests.predict.truth import NUMBERS, allocated_peak, estimate_of, real_step

# ------------------------------------------------------------------------------------------------------- truth


def mem_tracker(make_step: Callable[[], Step]) -> int:
    """On fake tensors, told of the model and the batch."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        step = make_step()
        tracker = MemTracker()
        tracker.track_external(step.model, *tensors(step.batch))
        with tracker:
            run = real_step(step)
            tracker.reset_mod_stats()
            run()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def accelerate_estimate(make_step: Callable[[], Step]) -> int:
    """The row "Training using Adam" of its table: four times the weights, whatever the batch."""
    step = make_step()
    num_bytes, _ = calculate_maximum_sizes(step.model)
    return max(estimate_training_usage(num_bytes, "bfloat16" if step.precision else "float32").values())


def kitsune_prediction(make_step: Callable[[], Step]) -> int:
    """Told the sizes of the first tensor of the batch; it runs the model itself."""
    step = make_step()
    x = tensors(step.batch)[0]
    optimizer = step.optimizer if step.optimizer in ("adam", "adamw", "sgd") else "adam"
    found = predict_memory(step.model, tuple(x.shape[1:]), batch_size=len(x), optimizer=optimizer)
    return int(found.total_bytes)


PEERS = {"MemTracker": mem_tracker, "accelerate": accelerate_estimate, "torch-kitsune": kitsune_prediction}


def tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def answer(peer: Callable[[Callable[[], Step]], int], make_step: Callable[[], Step]) -> int | str:
    """Its number, or the name of the error where it raises one."""
    try:
        return peer(make_step)
    except Exception as error:  # noqa: BLE001 - whatever it raises, it has no answer
        return type(error).__name__


def score(answers: dict[str, int | str], truths: dict[str, int]) -> dict[str, Any]:
    known = {name: num_bytes for name, num_bytes in answers.items() if isinstance(num_bytes, int)}
    errors = [abs(num_bytes / truths[name] - 1) for name, num_bytes in known.items()]
    return {
        "answers": len(known),
        "within_64_bytes": sum(abs(truths[name] - num_bytes) <= NUMBERS for name, num_bytes in known.items()),
        "median_error": round(statistics.median(errors), 6) if errors else None,
        "largest_error": round(max(errors), 6) if errors else None,
    }


def truth() -> dict[str, Any]:
    models = {name: partial(build, name) for name in STEPS} | TRANSFORMERS
    rows: dict[str, dict[str, Any]] = {}
    for name, make_step in models.items():
        low, high = estimate_of(make_step()).peak_interval
        step = make_step()
        rows[name] = {
            "allocator_peak_bytes": allocated_peak(real_step(step), step.model, step.batch),
            "interval_end_bytes": high,
            "memkit": low,
            **{peer: answer(ask, make_step) for peer, ask in PEERS.items()},
        }
    truths = {name: row["allocator_peak_bytes"] for name, row in rows.items()}
    return {
        "models": rows,
        "num_models": len(rows),
        "num_from_transformers": len(TRANSFORMERS),
        "interval_holds": sum(
            row["memkit"] <= truths[name] <= row["interval_end_bytes"] + NUMBERS for name, row in rows.items()
        ),
        "scores": {tool: score({name: row[tool] for name, row in rows.items()}, truths) for tool in ("memkit", *PEERS)},
    }


# -------------------------------------------------------------------------------------------------------- time


def speed() -> dict[str, Any]:
    cases = {name: build(name) for name in ("mlp", "resnet", "unet3d", "encoder", "message_passing", "tied_decoder")}
    task = transformer(num_blocks=12, width=768, length=512, rows=8)
    cases["transformer of 12 blocks"] = Step(task.model, task.batch, task.loss_fn)
    return {name: cost(partial(estimate_of, step)) for name, step in cases.items()}


# --------------------------------------------------------------------------------------------------------- 70B


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = (nn.Linear(width, n * width // heads, bias=False) for n in (heads, 2 * kv_heads))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, self.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        )
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def seventy_billion() -> dict[str, Any]:
    """In a process of its own: 80 blocks of 8192, 1 row of 2048 tokens, bfloat16 weights, AdamW."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(128256, 8192),
            *(LlamaBlock(8192, 64, 8, 28672) for _ in range(80)),
            nn.RMSNorm(8192),
            nn.Linear(8192, 128256, bias=False),
        ).to(torch.bfloat16)
    tokens = torch.zeros(1, 2048, dtype=torch.int64)
    start = time.process_time()
    estimate = estimate_memory_usage(
        model, tokens, loss_fn=lambda model, x: F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
    )
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.process_time() - start, 1),
        "peak_bytes": estimate.peak_bytes,
        "parameters_bytes": estimate.parameters_bytes,
        "optimizer_bytes": estimate.optimizer_bytes,
        "highest_resident_bytes_of_the_process": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1:] == ["70B"]:
        print(json.dumps(seventy_billion()))
        return
    command = [sys.executable, "-m", "benchmarks.cases.dry_run", "70B"]
    child = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = {"70B": json.loads(child.stdout), "speed": speed(), "truth": truth()}
    print(json.dumps(figures, indent=2))
    print(write_result("dry_run", figures, peers=("accelerate", "torch-kitsune", "transformers")))


if __name__ == "__main__":
    main()
