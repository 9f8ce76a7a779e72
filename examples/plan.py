"""One step under four budgets: how the planner takes it, what that really holds, and that the gradient stays.

A transformer reads the source of the standard library's argparse. For each budget it is planned, run through the
wrapper on the CPU, and compared with the plain step of the whole batch: the peak as PyTorch's profiler saw it, and the
gradient.

Run: python examples/plan.py [--smoke]
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from memkit import MemoryEfficientTrainingWrapper, plan_training

MIB = 2**20
LENGTH, WIDTH = 128, 64


def read_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Bytes of argparse's source and the byte after each, (rows, LENGTH)."""
    source = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    count = rows * LENGTH
    return source[:count].view(rows, LENGTH).clone(), source[1 : count + 1].view(rows, LENGTH).clone()


def make_model(num_blocks: int) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    blocks = nn.TransformerEncoder(layer, num_blocks, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(256, WIDTH), blocks, nn.Linear(WIDTH, 256))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def peak_of(step) -> int:
    """Highest sum of the allocator's events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = torch.tensor([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).cumsum(0)
    return int(live.max())


def run(model: nn.Module, batch: tuple[Tensor, Tensor], settings: dict) -> tuple[int, Tensor]:
    """Take two steps through the wrapper; return what the second held, and the first one's gradient."""
    model, gradients = copy.deepcopy(model), []
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: gradients.append([each.grad.flatten() for each in model.parameters()]))
    with MemoryEfficientTrainingWrapper(model, optimizer, **settings) as trainer:
        trainer.train_step(batch, loss_fn)
        gradient = torch.cat(gradients.pop())
        peak = peak_of(lambda: trainer.train_step(batch, loss_fn))
    state = [each for values in optimizer.state.values() for each in values.values()]
    return peak + sum(each.nbytes for each in (*model.parameters(), *state, *batch)), gradient


def main() -> None:
    parser = argparse.ArgumentParser(description="One step under four budgets.")
    parser.add_argument("--smoke", action="store_true", help="a smaller model and one budget")
    smoke = parser.parse_args().smoke
    model, batch = make_model(2 if smoke else 4), read_batch(8 if smoke else 16)
    plain_bytes, plain_gradient = run(model, batch, {})
    print(f"the whole batch at once: {plain_bytes / MIB:.1f} MiB\n")
    print(f"{'budget':>10} {'held':>10} {'gradient error':>15}  plan")
    for share in (0.6,) if smoke else (0.8, 0.6, 0.4, 0.3):
        budget = int(share * plain_bytes)
        plan = plan_training(model, batch, loss_fn, "adamw", budget=budget)
        held_bytes, gradient = run(model, batch, plan.wrapper_settings())
        error = float((gradient - plain_gradient).norm() / plain_gradient.norm())
        treated = sorted(set((plan.checkpoint or {}).values()))
        how = (
            f"{plan.accumulation_steps} x {plan.micro_batch_size} rows, {' and '.join(treated) or 'no'} blocks treated"
        )
        print(f"{budget / MIB:6.1f} MiB {held_bytes / MIB:6.1f} MiB {error:15.1e}  {how}")
    print(f"\nthe last one's frontier:\n\n{plan.explain()}")


if __name__ == "__main__":
    main()
