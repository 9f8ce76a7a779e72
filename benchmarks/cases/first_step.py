"""Does the first real step fit at once, when two small runs have said what it takes? Real limits, one child for each.

Each child trains two steps of a model inside a soft RLIMIT_DATA that is a share of what the whole batch would take,
once with ``memory=MemoryManager()`` and once without, and counts the out-of-memory errors that were survived.

Run: python -m benchmarks.cases.first_step
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit as mk
from benchmarks.result import write_result
from memkit._machine.devices import limit_memory
from memkit._recorder.recorder import Recorder

ROWS = 192
SHARES = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
Case = tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]


def mlp() -> Case:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(24)]
    return nn.Sequential(*layers), torch.randn(ROWS, 8, 256), lambda model, x: F.mse_loss(model(x), x)


def convolutions() -> Case:
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1)]
    for _ in range(3):
        layers += [nn.Conv2d(24, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.SiLU()]
    model = nn.Sequential(*layers, nn.Conv2d(24, 3, 1))
    return model, torch.randn(ROWS, 3, 20, 20), lambda model, x: F.mse_loss(model(x), x)


def language_model() -> Case:
    """Characters of the standard library's own source."""
    text = os.__doc__ + json.__doc__ + subprocess.__doc__
    codes = torch.tensor([min(ord(letter), 127) for letter in text * 20])[: ROWS * 33].view(ROWS, 33)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(128, 64), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(64, 128)
    )
    return model, codes, lambda model, x: F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:])


def recurrent() -> Case:
    class Tagger(nn.Module):
        """(N, T, C) -> (N, T, C)."""

        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(64, 128, num_layers=2, batch_first=True)
            self.head = nn.Linear(128, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cells(x)[0])

    return Tagger(), torch.randn(ROWS, 64, 64), lambda model, x: F.mse_loss(model(x), x)


CASES = {"mlp": mlp, "convolutions": convolutions, "language model": language_model, "recurrent": recurrent}


def prepare(name: str) -> tuple[Case, torch.optim.Optimizer]:
    torch.manual_seed(0)
    case = CASES[name]()
    optimizer = torch.optim.AdamW(case[0].parameters(), lr=1e-3, foreach=False)
    for parameter in case[0].parameters():  # the optimizer's state exists before the limit: it is not measured
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return case, optimizer


def whole_bytes(name: str) -> int:
    """Return the bytes that forward and backward of the whole batch add at their peak."""
    (model, x, loss_fn), _ = prepare(name)
    before = sum(parameter.nbytes for parameter in model.parameters()) + x.nbytes
    with Recorder() as recorder:
        loss_fn(model, x).backward()
    return recorder.recording().peak_bytes() - before


def child(name: str, headroom_bytes: int, memory: mk.MemoryManager | None) -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # oneDNN crashes in backward when memory is short
    (model, x, loss_fn), optimizer = prepare(name)
    loss_fn(model, x[:2]).backward()  # thread pools and caches exist from here on
    optimizer.zero_grad()
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, memory=memory, probe=False)
    limit_memory(torch.device("cpu"), headroom_bytes)
    results = [trainer.train_step(x, loss_fn) for _ in range(2)]
    print(json.dumps({"num_ooms": [result.num_ooms for result in results], "sizes": [r.sizes[0] for r in results]}))


def run_child(name: str, headroom_bytes: int, way: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.cases.first_step", name, str(headroom_bytes), way]
    # Every tensor above 64 KiB is its own mapping, given back when it is freed, and MKL keeps no buffers: a limit means
    # what it says.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MKL_DISABLE_FAST_MM": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"died": done.stderr.strip().splitlines()[-1][:200]}


def main() -> None:
    figures: dict[str, Any] = {}
    for name in CASES:
        whole = whole_bytes(name)
        rows = []
        for share in SHARES:
            headroom = int(share * whole)
            row = {"share": share, "headroom_bytes": headroom}
            row |= {way: run_child(name, headroom, way) for way in ("with", "without")}
            print(name, row, flush=True)
            rows.append(row)
        figures[name] = {"whole_batch_bytes": whole, "rows": ROWS, "limits": rows}
    ran = [row for case in figures.values() for row in case["limits"] if "num_ooms" in row["with"]]
    summary = {
        "num_cases": len(SHARES) * len(CASES),
        "num_ran": len(ran),
        "num_first_steps_without_oom": sum(row["with"]["num_ooms"][0] == 0 for row in ran),
        "num_first_steps_without_oom_unforeseen": sum(row["without"].get("num_ooms", [1])[0] == 0 for row in ran),
    }
    print(summary)
    print(write_result("first_step", {"summary": summary, "cases": figures}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1], int(sys.argv[2]), mk.MemoryManager("cpu") if sys.argv[3] == "with" else None)
    else:
        main()
