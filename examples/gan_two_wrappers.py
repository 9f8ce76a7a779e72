"""A GAN with two wrappers on real digits: two optimisers, micro-batches, gradient penalty, an average to sample from.

Each step's batch is split into micro-batches, and the gradients of discriminator and generator never mix. The data
are scikit-learn's 1797 digits of 8 x 8 pixels.

Run: pip install "memkit[test]" && python examples/gan_two_wrappers.py [--smoke]
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import memkit as mk

LATENT, BATCH, MICRO_BATCHES = 16, 128, 4


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="A GAN with two wrappers.")
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    num_steps = 20 if parser.parse_args().smoke else 300
    torch.manual_seed(0)
    digits = torch.from_numpy(load_digits().data).float() / 8 - 1

    generator, discriminator = mlp(LATENT, 128, 128, 64), mlp(64, 128, 128, 1)
    average = torch.optim.swa_utils.AveragedModel(
        generator, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    g_trainer = mk.MemoryEfficientTrainingWrapper(
        generator,
        torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        accumulation_steps=MICRO_BATCHES,
        average=average,  # follows real optimiser steps only
    )
    d_trainer = mk.MemoryEfficientTrainingWrapper(
        discriminator,
        torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        accumulation_steps=MICRO_BATCHES,
    )

    def d_loss(discriminator: nn.Module, micro: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        real, noise = micro
        with torch.no_grad():  # no graph through the generator in the discriminator's step
            fake = generator(noise)
        loss = F.softplus(discriminator(fake)).mean() + F.softplus(-discriminator(real)).mean()
        return loss + 0.5 * mk.gradient_penalty(discriminator, real)

    def g_loss(generator: nn.Module, noise: torch.Tensor) -> torch.Tensor:
        return F.softplus(-discriminator(generator(noise))).mean()

    for step in range(num_steps):
        real = digits[torch.randint(len(digits), (BATCH,))]
        d_result = d_trainer.train_step((real, torch.randn(BATCH, LATENT)), d_loss)
        g_result = g_trainer.train_step(torch.randn(BATCH, LATENT), g_loss)
        if step % max(1, num_steps // 6) == 0:
            print(
                f"step {step:4}  D {float(d_result.loss):.3f}  G {float(g_result.loss):.3f}  "
                f"{d_result.num_microbatches} + {g_result.num_microbatches} micro-batches"
            )

    with g_trainer.evaluation():
        samples = average(torch.randn(4, LATENT))
    shades = " .:-=+*#%@"
    for row in samples.view(4, 8, 8).permute(1, 0, 2):
        print("   ".join("".join(shades[int(v)] * 2 for v in (line.clamp(-1, 1) + 1) * 4.95) for line in row))


if __name__ == "__main__":
    main()
