"""The dry run of `estimate_memory_usage`: truth on 39 models next to MemTracker, time per operator, a 70B model.

Truth is the highest sum of the CPU allocator's events of a warm step (torch.profiler), with what was there before.
Time is processor time of the second call. The 70B model is built on the meta device and estimated in a process of its
own, whose highest resident memory is reported.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.dry_run   (3 minutes)
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _get_dispatch_mode as get_dispatch_mode
from torch._C import _TorchDispatchModeKey as TorchDispatchModeKey
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.models import transformer
from benchmarks.result import write_result
from memkit.planning.dryrun import StepRecorder
from memkit.planning.predict import estimate_memory_usage
from tests.allocations import trace_allocations
from tests.planning.steps import STEPS, Step
from tests.planning.test_dryrun import NUMBERS, build, dry_run, real_step

ROUNDS = 5


class Count(TorchDispatchMode):
    """Counts operators of the steps, which run in a fake tensor mode, and not what prepares them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_step = get_dispatch_mode(TorchDispatchModeKey.FAKE) is not None
        self.num_operators += is_step and func is not torch.ops.prim.device.default
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------------- truth


def allocator_peak(step: Step) -> int:
    run = real_step(step)
    with StepRecorder() as recorder:
        recorder.hold(step.model, step.batch)
        run()
    there_before = sum(storage.nbytes for storage in recorder.recording().storages() if not storage.operator)
    return trace_allocations(run).peak + there_before


def mem_tracker_peak(name: str) -> int | str:
    """MemTracker on fake tensors, told of the model and the batch; the name of the error where it raises one."""
    try:
        with FakeTensorMode():
            step = build(name)
            tracker = MemTracker()
            tracker.track_external(step.model, *(leaf for leaf in tree_leaves(step.batch) if isinstance(leaf, Tensor)))
            with tracker:
                run = real_step(step)
                tracker.reset_mod_stats()
                run()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    except Exception as error:  # noqa: BLE001 - whatever it raises, it has no answer
        return type(error).__name__


def truth() -> dict[str, Any]:
    rows = {}
    for name in STEPS:
        low, high = dry_run(build(name)).estimate().peak_interval
        peak = allocator_peak(build(name))
        rows[name] = {
            "allocator_peak_bytes": peak,
            "estimate_bytes": low,
            "interval_end_bytes": high,
            "mem_tracker": mem_tracker_peak(name),
        }
    peaks = {name: row["allocator_peak_bytes"] for name, row in rows.items()}
    tracked = {name: row["mem_tracker"] for name, row in rows.items() if isinstance(row["mem_tracker"], int)}
    errors = [abs(row["estimate_bytes"] / peaks[name] - 1) for name, row in rows.items()]
    tracked_errors = [abs(peak / peaks[name] - 1) for name, peak in tracked.items()]
    return {
        "models": rows,
        "num_models": len(rows),
        "interval_holds": sum(
            row["estimate_bytes"] <= peaks[name] <= row["interval_end_bytes"] + NUMBERS for name, row in rows.items()
        ),
        "within_64_bytes": sum(peaks[name] - row["estimate_bytes"] <= NUMBERS for name, row in rows.items()),
        "median_error": statistics.median(errors),
        "mem_tracker_answers": len(tracked),
        "mem_tracker_within_64_bytes": sum(abs(peaks[name] - peak) <= NUMBERS for name, peak in tracked.items()),
        "mem_tracker_median_error": statistics.median(tracked_errors),
    }


# -------------------------------------------------------------------------------------------------------- time


def speed() -> dict[str, Any]:
    rows = {}
    cases = {name: build(name) for name in ("mlp", "resnet", "unet3d", "encoder", "message_passing", "tied_decoder")}
    task = transformer(num_blocks=12, width=768, length=512, rows=8)
    cases["transformer of 12 blocks"] = Step(task.model, task.batch, task.loss_fn)
    for name, step in cases.items():
        with Count() as count:
            dry_run(step).estimate()
        times = []
        for _ in range(ROUNDS):
            gc.collect()
            start = time.process_time()
            dry_run(step).estimate()
            times.append(time.process_time() - start)
        seconds = statistics.median(times)
        rows[name] = {
            "num_operators_in_two_steps": count.num_operators,
            "seconds": round(seconds, 3),
            "ms_per_operator": round(1e3 * seconds / count.num_operators, 4),
        }
    return rows


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
    print(write_result("dry_run", figures))


if __name__ == "__main__":
    main()
