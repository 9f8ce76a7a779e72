"""Cost of an estimate on a virtual GPU, for each operator of its two steps, on models of the tests.

Processor time of one thread, the least of nine calls after the first; the operators are those that the steps dispatch.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.virtual_gpu_cost   (1 minute)
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.counting import cost
from benchmarks.result import write_result
from memkit.predict.usage import estimate_memory_usage
from tests.predict.steps import Step
from tests.predict.test_dryrun import build

MODELS = ("mlp", "resnet", "unet3d", "encoder", "message_passing", "tied_decoder")


def estimate(step: Step) -> None:
    estimate_memory_usage(
        step.model,
        step.batch,
        loss_fn=step.loss_fn,
        optimizer=step.optimizer,
        precision=step.precision,
        accumulation_steps=step.accumulation_steps,
        target="RTX 4090",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_result("virtual_gpu_cost", {name: cost(partial(estimate, build(name))) for name in MODELS})
