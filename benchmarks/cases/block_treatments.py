"""Savings and costs of each treatment of a model's blocks: peak, saved bytes, FLOPs and time, beside torch's own.

Bytes are the allocator's events of forward and backward above their start, without the gradients of parameters, which
are there from the step before; "saved" is what lives after the forward. Predicted is the peak of a dry run under the
same treatment, recorded the one of the real step, both with model, batch and gradients. FLOPs are those of backward
over those of forward. Time is the processor's, interleaved with the plain step, the median of the ratios.

Peers are given the same blocks: torch's checkpoint_wrapper, the same with its selective contexts and the same kept
operators, save_on_cpu around the whole forward, and the compiler's activation_memory_budget of a half, with a backend
that needs no C++ compiler. What a peer cannot do is written down as its error. FLOPs of a compiled model are not
counted: a counter makes torch run it uncompiled.

Run: python -m benchmarks.cases.block_treatments   (2 minutes)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import Decoder
from benchmarks.result import write_result
from benchmarks.timing import in_turns, median_ratio
from memkit import estimate_memory_usage
from memkit._recorder.recorder import Recorder
from memkit._simulation.simulation import hold
from memkit._tape.kept import KEPT_OPERATORS
from memkit.train.checkpointing import Checkpointing
from tests.allocations import trace_allocations
from tests.train.test_treatments import UNet

ROUNDS = 3
MIX = ("full", "selective", "offload")


def mlp() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256), nn.Tanh())
            for _ in "12345678"
        )
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)


def decoder() -> nn.Module:
    return Decoder(num_blocks=8, width=128, length=128)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], str]] = {
    "MLP, 8 blocks": (mlp, lambda: torch.randn(512, 256), "[0-7]"),
    "encoder with dropout, 8 layers": (encoder, lambda: torch.randn(4, 128, 128), "layers.?"),
    "decoder, 8 blocks": (decoder, lambda: torch.randint(256, (4, 128)), "blocks.?"),
    "U-Net, 5 levels": (UNet, lambda: torch.randn(2, 3, 96, 96), "levels.?"),
}


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Subject:
    """One model and batch under one means; its gradients are there already."""

    def __init__(self, case: str, means: Callable[[nn.Module, list[nn.Module]], Any]) -> None:
        build, batch, pattern = CASES[case]
        torch.manual_seed(0)
        self.model, self.x = build(), batch()
        with Checkpointing(self.model, [pattern]) as checkpointing:
            names = list(checkpointing.blocks)
        self.around = means(self.model, names) or contextlib.nullcontext
        self.step()

    def forward(self) -> torch.Tensor:
        torch.manual_seed(1)
        with self.around():
            return loss_fn(self.model, self.x)

    def step(self) -> None:
        self.forward().backward()

    def outcome(self) -> list[torch.Tensor]:
        """Gradients of two steps, and the buffers after them."""
        self.model.zero_grad()
        self.step()
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        return gradients + [buffer.clone() for buffer in self.model.buffers()]

    def bytes(self) -> dict[str, int]:
        losses: list[torch.Tensor] = []
        saved = int(trace_allocations(lambda: losses.append(self.forward())).live[-1]) - 4
        losses.clear()
        return {"peak_bytes": trace_allocations(self.step).peak, "saved_bytes": saved}

    def flops_ratio(self) -> float:
        with FlopCounterMode(display=False) as forward:
            loss = self.forward()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
        return backward.get_total_flops() / forward.get_total_flops()


def treated(treatment: str) -> Callable[[nn.Module, list[str]], None]:
    def apply(model: nn.Module, names: list[str]) -> None:
        treatments = {name: MIX[k % 3] if treatment == "mix" else treatment for k, name in enumerate(names)}
        Checkpointing(model, treatments)

    return apply


def wrapped_by_torch(context_fn: Callable[[], Any] | None, model: nn.Module, names: list[str]) -> None:
    blocks = [model.get_submodule(name) for name in names]
    settings = {} if context_fn is None else {"context_fn": context_fn}
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, **settings),
        check_fn=lambda module: any(module is block for block in blocks),
    )


def compiled_with_a_budget(model: nn.Module, names: list[str]) -> Callable[[], Any]:  # noqa: ARG001 - as all means
    model.forward = torch.compile(model.forward, backend="aot_eager_decomp_partition")
    return lambda: functorch.patch(activation_memory_budget=0.5)


MEANS: dict[str, Callable[[nn.Module, list[str]], Any]] = {
    "keep": lambda model, names: None,  # noqa: ARG005 - as all means
    "full": treated("full"),
    "selective": treated("selective"),
    "offload": treated("offload"),
    "the three in turn": treated("mix"),
    "torch checkpoint_wrapper": functools.partial(wrapped_by_torch, None),
    "torch selective": functools.partial(
        wrapped_by_torch, functools.partial(create_selective_checkpoint_contexts, list(KEPT_OPERATORS))
    ),
    "torch save_on_cpu": lambda model, names: save_on_cpu,  # noqa: ARG005
    "torch activation_memory_budget 0.5": compiled_with_a_budget,
}


def peaks(subject: Subject) -> dict[str, int]:
    """The peak of a whole step, foretold without data and as recorded."""
    predicted = estimate_memory_usage(subject.model, subject.x, loss_fn=loss_fn, optimizer="sgd").peak_bytes
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-3)
    subject.model.zero_grad()
    for is_recorded in (False, True):
        recorder = Recorder()
        with recorder if is_recorded else contextlib.nullcontext():
            if is_recorded:
                hold(recorder, subject.model, subject.x)
            subject.step()
            optimizer.step()
            optimizer.zero_grad()
    return {"predicted_step_bytes": predicted, "recorded_step_bytes": recorder.recording().peak_bytes()}


def measure(case: str) -> dict[str, Any]:
    subjects: dict[str, Subject] = {}
    figures: dict[str, dict[str, Any]] = {}
    expected: list[torch.Tensor] = []
    for name, means in MEANS.items():
        try:
            subject = Subject(case, means)
            outcome = subject.outcome()
        except RuntimeError as error:  # what a peer cannot do
            figures[name] = {"error": str(error).partition("\n")[0]}
            continue
        expected = expected or outcome
        figures[name] = {"is_bit_equal": all(map(torch.equal, outcome, expected))} | subject.bytes()
        if "budget" not in name:
            figures[name]["backward_over_forward_flops"] = subject.flops_ratio()
        subjects[name] = subject
    seconds = in_turns({name: subject.step for name, subject in subjects.items()}, ROUNDS)
    for name, subject in subjects.items():
        figures[name]["time_ratio"] = median_ratio(seconds[name], seconds["keep"])
        if not name.startswith("torch"):
            figures[name] |= peaks(subject)
    return figures


def main() -> None:
    torch.set_num_threads(1)
    cases = {}
    for case in CASES:
        cases[case] = measure(case)
        for name, figures in cases[case].items():
            print(case, name, figures, flush=True)
    print(write_result("block_treatments", {"cases": cases}))


if __name__ == "__main__":
    main()
