"""Each habit that saves memory in a training loop, alone, on a small GAN: allocator bytes without and with it.

The habits and their claimed savings come from a source project's list. Real data: scikit-learn's handwritten digits,
enlarged to 32 x 32. What only a card can show (the allocator's cache, a default tensor type of the card) says so.

Run: python -m benchmarks.cases.hygiene   (1 minute)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.cases.wrapper_memory import Run, measure_peaks, total_bytes
from benchmarks.models import transformer
from benchmarks.result import write_result
from tests.allocations import mark, trace_allocations

ROWS = 32
NUM_EVALUATION_BATCHES = 16
WARM_STEPS = 2


def digits() -> Tensor:
    """All digits as (1797, 1, 32, 32) floats from -1 to 1."""
    return F.interpolate(torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1, size=32)


def make_generator() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 64 * 8 * 8), nn.Unflatten(1, (64, 8, 8)), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1), nn.Tanh(),
    )  # fmt: skip


def make_features() -> nn.Sequential:
    """Two convolutions and a wide layer: a perceptual loss's network, or a discriminator's trunk."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 64, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 128),
    )  # fmt: skip


def make_discriminator() -> nn.Sequential:
    return nn.Sequential(make_features(), nn.LeakyReLU(0.2), nn.Linear(128, 1))


class Gan:
    """Both networks with their optimizers, and what all the habits below leave on the device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator, self.discriminator = make_generator(), make_discriminator()
        self.optimizers = [
            torch.optim.AdamW(net.parameters(), lr=2e-4, fused=True) for net in (self.generator, self.discriminator)
        ]
        self.real = digits()[:ROWS].clone()

    def state_bytes(self) -> int:
        states = [v for each in self.optimizers for s in each.state.values() for v in s.values()]
        nets = [*self.generator.parameters(), *self.discriminator.parameters()]
        return total_bytes([*nets, *[p.grad for p in nets if p.grad is not None], *states])

    def fake(self) -> Tensor:
        return self.generator(torch.randn(ROWS, 64))

    def generator_loss(self) -> Tensor:
        return F.softplus(-self.discriminator(self.fake())).mean()

    def discriminator_loss(self, fake: Tensor) -> Tensor:
        return F.softplus(self.discriminator(fake)).mean() + F.softplus(-self.discriminator(self.real)).mean()

    def step(self, loss: Tensor, *, set_to_none: bool = True) -> None:
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


def peak_of(gan: Gan, run: Callable[[], object]) -> int:
    """Peak of a warm run, with parameters, gradients and optimizer state that were there before."""
    for _ in range(WARM_STEPS):
        run()
    before = gan.state_bytes()
    return before + trace_allocations(run).peak


def forward_peak_of(gan: Gan, *, set_to_none: bool) -> int:
    """Live bytes at the end of a forward, where the activations are all there."""
    for _ in range(WARM_STEPS):
        gan.step(gan.generator_loss(), set_to_none=set_to_none)
    before = gan.state_bytes()

    def run() -> None:
        with mark("forward"):
            loss = gan.generator_loss()
        gan.step(loss, set_to_none=set_to_none)

    trace = trace_allocations(run)
    (span,) = trace.marks
    return before + trace.highest(span[1], span[2])


def zero_fill() -> tuple[int, int]:
    return forward_peak_of(Gan(), set_to_none=False), forward_peak_of(Gan(), set_to_none=True)


def zero_fill_whole_step() -> tuple[int, int]:
    def peak(*, set_to_none: bool) -> int:
        gan = Gan()
        return peak_of(gan, lambda: gan.step(gan.generator_loss(), set_to_none=set_to_none))

    return peak(set_to_none=False), peak(set_to_none=True)


def kept_tensors() -> tuple[int, int]:
    """A loop whose names still hold the last step's images, features and loss, while the next forward runs."""

    def peak(*, release: bool) -> int:
        gan = Gan()
        kept: list[Tensor] = []

        def run() -> None:
            fake = gan.fake()
            features = gan.discriminator[0](fake)
            loss = F.softplus(-gan.discriminator[2](gan.discriminator[1](features))).mean()
            gan.step(loss + fake.square().mean() + features.square().mean())
            kept[:] = [] if release else [fake, features, loss]

        # The tensors that the step before left behind belong to the peak: two steps under one trace.
        return peak_of(gan, lambda: (kept.clear(), run(), run()))

    return peak(release=False), peak(release=True)


def loss_module_per_step() -> tuple[int, int]:
    """A perceptual loss's network, built in each step or once; built anew, the old one still has its name."""

    def peak(*, once: bool) -> int:
        gan = Gan()
        holder = [make_features().requires_grad_(requires_grad=False)]
        network_bytes = total_bytes(holder[0].parameters())

        def run() -> None:
            if not once:
                holder[0] = make_features().requires_grad_(requires_grad=False)
            fake = gan.fake()
            gan.step(F.mse_loss(holder[0](fake), holder[0](gan.real)) + F.softplus(-gan.discriminator(fake)).mean())

        return peak_of(gan, run) + network_bytes

    return peak(once=False), peak(once=True)


def discriminator_step(without: Callable[[Tensor], Tensor], context: Callable[[], Any]) -> int:
    gan = Gan()

    def run() -> None:
        with context():
            fake = gan.fake()
        gan.step(gan.discriminator_loss(without(fake)))

    return peak_of(gan, run)


def graph_of_the_generator() -> tuple[int, int]:
    return discriminator_step(lambda fake: fake, nullcontext), discriminator_step(lambda fake: fake, torch.no_grad)


def detached_with_graph() -> tuple[int, int]:
    """`fake.detach()` while the name `fake` keeps the generator's graph, against `no_grad`."""
    return discriminator_step(Tensor.detach, nullcontext), discriminator_step(lambda fake: fake, torch.no_grad)


def evaluation(*, reduce: bool, context: Callable[[], Any]) -> int:
    gan = Gan()
    gan.generator.eval()

    def run() -> None:
        results = []
        with context():
            for _ in range(NUM_EVALUATION_BATCHES):
                fake = gan.fake()
                results.append(fake.mean() if reduce else fake)

    return peak_of(gan, run)


def evaluation_results() -> tuple[int, int]:
    return evaluation(reduce=False, context=torch.no_grad), evaluation(reduce=True, context=torch.no_grad)


def evaluation_graphs() -> tuple[int, int]:
    return evaluation(reduce=True, context=nullcontext), evaluation(reduce=True, context=torch.no_grad)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def default_double() -> tuple[int, int]:
    """A transformer's step under `set_default_dtype(float64)`; the CPU's double convolutions would need more still."""

    def peak(dtype: torch.dtype) -> int:
        with default_dtype(dtype):
            return measure_peaks(Run(transformer(width=64), None))["peak_bytes"]

    return peak(torch.float64), peak(torch.float32)


def default_device() -> tuple[int, int]:
    """Bytes on the device if all tensors made without `device=` go there: here the whole data set's tensor.

    The device's bytes are counted, not used, so that the CPU can stand for a card: the same step, with the data set
    and an epoch's order on the device, and with one batch of it there.
    """
    gan = Gan()
    peak = peak_of(gan, lambda: gan.step(gan.generator_loss()))
    images = digits()
    order = torch.randperm(len(images))
    return peak + total_bytes([images, order]), peak + gan.real.nbytes


def all_together() -> tuple[int, int]:
    """A step of each network and an evaluation: all habits bad, and all good under bf16 autocast."""

    def peak(*, good: bool) -> int:
        gan = Gan()

        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=good):
                with torch.set_grad_enabled(not good):
                    fake = gan.fake()
                loss = gan.discriminator_loss(fake)
            gan.step(loss, set_to_none=good)
            if good:
                del fake
            with torch.autocast("cpu", torch.bfloat16, enabled=good):
                loss = gan.generator_loss()
            gan.step(loss, set_to_none=good)
            results = []
            with torch.set_grad_enabled(not good), torch.autocast("cpu", torch.bfloat16, enabled=good):
                for _ in range(NUM_EVALUATION_BATCHES):
                    images = gan.fake()
                    results.append(images.mean() if good else images)

        return peak_of(gan, run)

    return peak(good=False), peak(good=True)


# What a source project claims for the habit, and what to know of the figure.
HABITS: dict[str, tuple[Callable[[], tuple[int, int]], str, str]] = {
    "set_to_none, at the forward's end": (zero_fill, "5-10%", "gradients are not held through the forward"),
    "set_to_none, whole step": (zero_fill_whole_step, "5-10%", "the peak lies in the first part of the backward"),
    "release tensors when done": (
        kept_tensors,
        "15-20%",
        "claimed with cache clearing, which frees no tensors",
    ),
    "loss modules built once": (loss_module_per_step, "-", "old and new network overlap while the new one is built"),
    "no_grad for the generator in D's step": (graph_of_the_generator, "-", "against a graph through both networks"),
    "no_grad instead of detach": (detached_with_graph, "-", "the name `fake` keeps the generator's graph"),
    "reduce evaluation results at once": (evaluation_results, "-", f"{NUM_EVALUATION_BATCHES} batches"),
    "no_grad in evaluation": (evaluation_graphs, "-", "eval mode alone still records a graph"),
    "no global default dtype": (default_double, "10%", "float64 against float32, on the transformer"),
    "no global default device": (default_device, "10%", "counted: a data set of 1797 images would lie on the card"),
    "all together, with bf16": (all_together, "60-90%", "steps of both networks and an evaluation; most of it no_grad"),
}


def main() -> None:
    torch.set_num_threads(1)
    figures = {}
    for name, (measure, claim, note) in HABITS.items():
        bad, good = measure()
        figures[name] = {"claim": claim, "bad_bytes": bad, "good_bytes": good, "saving": 1 - good / bad, "note": note}
        print(f"{name:40} {bad:>10} -> {good:>10}  -{1 - good / bad:.1%}  claimed {claim}")
    print(write_result("hygiene", figures, peers=("scikit-learn",)))


if __name__ == "__main__":
    main()
