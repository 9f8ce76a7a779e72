"""Runs a training script to a given optimizer step, unchanged, and records what the comparison needs.

Recorded through torch's global hooks, so that the script need not know. WHAT is one of:
    state: all parameters and buffers before the first optimizer step and after the last one, in the order in which the
        modules registered them
    peak: the allocator's events
    time: the processor time from the end of the first optimizer step to the end of the last
The losses are those that the script prints.

Run: python runner.py RECORD WHAT DTYPE NUM_STEPS SCRIPT [ARGUMENT ...]
"""

from __future__ import annotations

import contextlib
import json
import random
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.allocations import mark, trace_allocations


class EndOfRun(BaseException):
    """Not an Exception: a script that catches errors must not catch this."""


class Observer:
    """Sees every registration and every optimizer step of the process."""

    def __init__(self, num_steps: int, *, keeps_state: bool) -> None:
        self.num_steps, self.keeps_state = num_steps, keeps_state
        self.registered: list[tuple[nn.Module, str]] = []
        self.step_times: list[float] = []
        self.initial: list[Tensor] = []
        register_module_parameter_registration_hook(self.on_registration)
        register_module_buffer_registration_hook(self.on_registration)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)

    def on_registration(self, module: nn.Module, name: str, _: Any) -> None:
        self.registered.append((module, name))

    def before_step(self, *_: Any) -> None:
        if self.keeps_state and not self.initial:
            self.initial = self.read_state()
        # Ends here and not after the last step: scripts print the loss of a step when it is done.
        if len(self.step_times) == self.num_steps:
            raise EndOfRun

    def after_step(self, *_: Any) -> None:
        self.step_times.append(time.process_time())
        with mark(f"step {len(self.step_times)}"):
            pass

    def read_state(self) -> list[Tensor]:
        values = [getattr(module, name, None) for module, name in self.registered]
        tied_once = {id(value): value for value in values if isinstance(value, Tensor)}
        return [value.detach().clone() for value in tied_once.values()]


def run_script(script: str) -> None:
    with contextlib.suppress(EndOfRun):
        runpy.run_path(script, run_name="__main__")


def main() -> None:
    record, what, dtype, num_steps, *command = sys.argv[1:]
    script = command[0]
    sys.argv = command
    sys.path[0] = str(Path(script).resolve().parent)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for scripts that use the global state and seed nothing
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    observer = Observer(int(num_steps), keeps_state=what == "state")
    figures: dict[str, Any] = {}
    if what == "peak":
        trace = trace_allocations(lambda: run_script(script))
        ends = [end for name, _, end in trace.marks if name.startswith("step ")]
        figures["peak_bytes"] = trace.peak
        # The second half of the steps: the optimizer has its state by then, and memkit has tried what it tries once.
        figures["warm_peak_bytes"] = trace.highest(ends[len(ends) // 2 - 1], int(trace.times[-1]))
    else:
        run_script(script)
    times = observer.step_times
    assert times, "no optimizer has stepped"
    figures |= {"num_steps": len(times), "cpu_seconds": times[-1] - times[0]}
    if what == "state":
        torch.save([observer.initial, observer.read_state()], f"{record}.pt")
    Path(f"{record}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
