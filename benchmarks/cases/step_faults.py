"""Out-of-memory at every operator of an optimizer's step: what is torn, what the step's memory and time are.

A fault in place of the n-th operator, for every n of the first step (which makes the state) and of the third. "Torn":
the step raised and left a parameter, or its state, that is neither old nor new; "lost": it raised, all whole. The step
alone is what a loop does today; guarded is the step of `GradientAccumulator(guard_steps=True)` and of the wrapper.

Run: python -m benchmarks.cases.step_faults   (5 minutes)
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.result import write_result
from benchmarks.timing import in_turns, median_ratio, seconds_of
from memkit.train.chunked_steps import atomic_steps
from memkit.train.guard import StepGuard
from memkit.train.parameterwise import materialize_state
from tests.allocations import trace_allocations
from tests.train.faults import FailingOperator

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda parameters, **settings: torch.optim.AdamW(parameters, lr=0.01, **settings),
    "SGD, momentum": lambda parameters, **settings: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **settings),
    "Adam, amsgrad": lambda parameters, **settings: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, **settings),
}
SHAPES = [(40, 30), (7,), (2, 100), (), (3, 4, 5)]
LARGE = {"equal": [(1024, 1024)] * 12, "one large": [(8192, 1024), *[(256, 1024)] * 8]}  # 4 bytes each: 50, 42 MB
ROUNDS = 9


def plain(optimizer: Optimizer) -> None:
    optimizer.step()


def guarded(optimizer: Optimizer) -> None:
    StepGuard([optimizer]).run(lambda: optimizer.step() is None)


def in_chunks(optimizer: Optimizer) -> None:
    with atomic_steps(optimizer):
        optimizer.step()


def everything(parameters: list[nn.Parameter], optimizer: Optimizer) -> list[list[torch.Tensor]]:
    """For each parameter: its value and its state, copied."""
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return [
        [parameter.detach().clone(), *(state[name].clone() for name in sorted(state))]
        for parameter, state in zip(parameters, states, strict=True)
    ]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def prepare(kind: str, *, foreach: bool, num_steps: int) -> tuple[list[nn.Parameter], Optimizer]:
    """Parameters before a step, with its gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = OPTIMIZERS[kind](parameters, foreach=foreach)
    for number in range(num_steps + 1):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if number < num_steps:
            optimizer.step()
    return parameters, optimizer


def plant(kind: str, step: Callable[[Optimizer], None], *, foreach: bool) -> dict[str, int]:
    """Plant a fault at every operator; count how each step ended."""
    ends = dict.fromkeys(("faults", "finished", "lost", "torn"), 0)
    for num_steps in (0, 2):
        parameters, optimizer = prepare(kind, foreach=foreach, num_steps=num_steps)
        old = everything(parameters, optimizer)
        with FailingOperator() as counter:
            step(optimizer)
        new = everything(parameters, optimizer)
        for place in range(1, counter.num_operators + 1):
            parameters, optimizer = prepare(kind, foreach=foreach, num_steps=num_steps)
            raised = False
            with FailingOperator(place):
                try:
                    step(optimizer)
                except RuntimeError:
                    raised = True
            found = everything(parameters, optimizer)
            whole = all(same(a, b) or same(a, c) for a, b, c in zip(found, old, new, strict=True))
            finished = not raised and all(map(same, found, new))
            ends["faults"] += 1
            ends["finished" if finished else "lost" if whole else "torn"] += 1
    return ends


def measure(kind: str, shapes: list[tuple[int, ...]], *, foreach: bool) -> dict[str, float]:
    """Peak over what is there before the step, and processor time over the plain step's."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = OPTIMIZERS[kind](parameters, foreach=foreach)
    materialize_state(optimizer)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    state_bytes = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    there = state_bytes + 2 * sum(parameter.nbytes for parameter in parameters)
    ways = {"plain": plain, "guarded": guarded, "in chunks": in_chunks}
    seconds = in_turns(ways, ROUNDS, lambda step: seconds_of(lambda: step(optimizer)))
    return {
        "plain_peak": 1 + trace_allocations(lambda: plain(optimizer)).peak / there,
        "guarded_peak": 1 + trace_allocations(lambda: guarded(optimizer)).peak / there,
        "in_chunks_peak": 1 + trace_allocations(lambda: in_chunks(optimizer)).peak / there,
        "guarded_time_ratio": median_ratio(seconds["guarded"], seconds["plain"]),
        "in_chunks_time_ratio": median_ratio(seconds["in chunks"], seconds["plain"]),
    }


def main() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # each survived fault collects cycles: not among all that was imported
    faults: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    for kind in OPTIMIZERS:
        for foreach in (False, True):
            name = f"{kind}, {'foreach' if foreach else 'single'}"
            faults[name] = {
                "plain": plant(kind, plain, foreach=foreach),
                "guarded": plant(kind, guarded, foreach=foreach),
                "in chunks": plant(kind, in_chunks, foreach=foreach),
            }
            memory[name] = {sizes: measure(kind, shapes, foreach=foreach) for sizes, shapes in LARGE.items()}
            print(name, faults[name], memory[name])
    print(write_result("step_faults", {"faults": faults, "memory": memory}))


if __name__ == "__main__":
    main()
