"""The two models that the wrapper's figures are measured on, with real data: a transformer and a 3D U-Net."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.reference_family import sample_batch
from memkit.predict import TrainingConfig

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Task:
    """A model, one batch with the rows in dimension 0, and the mean loss over a batch's rows."""

    model: nn.Module
    batch: Any
    loss_fn: Loss

    def make_optimizer(self) -> torch.optim.Optimizer:
        # Fused: no temporary copy of the parameters, which would hide what the activations take.
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step by hand, without memkit."""
        self.loss_fn(self.model, self.batch).backward()
        optimizer.step()
        optimizer.zero_grad()


class DecoderBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        # (rows, length, 3 * width) -> three of (rows, heads, length, width / heads)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A causal language model over bytes: (rows, length) integers to (rows, length, 256) logits."""

    def __init__(self, *, num_blocks: int, width: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, num_heads=4) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, width_in), nn.SiLU(), nn.Conv3d(width_in, width, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv3d(width, width, 3, padding=1))
        self.shortcut = nn.Conv3d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.second(self.first(x))


class UNet(nn.Module):
    """Three levels of residual blocks: (rows, 1, D, H, W) volumes to (rows, 2, D, H, W) logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        w1, w2, w4 = width, 2 * width, 4 * width
        self.enter = nn.Conv3d(1, w1, 3, padding=1)
        self.down1 = nn.Sequential(ResidualBlock(w1, w1), ResidualBlock(w1, w1))
        self.down2 = nn.Sequential(ResidualBlock(w2, w2), ResidualBlock(w2, w2))
        self.middle = nn.Sequential(ResidualBlock(w4, w4), ResidualBlock(w4, w4))
        self.shrink1, self.shrink2 = nn.Conv3d(w1, w2, 2, stride=2), nn.Conv3d(w2, w4, 2, stride=2)
        self.grow2, self.grow1 = nn.ConvTranspose3d(w4, w2, 2, stride=2), nn.ConvTranspose3d(w2, w1, 2, stride=2)
        self.up2 = nn.Sequential(ResidualBlock(w4, w2), ResidualBlock(w2, w2))
        self.up1 = nn.Sequential(ResidualBlock(w2, w1), ResidualBlock(w1, w1))
        self.leave = nn.Conv3d(w1, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(self.enter(x))
        b = self.down2(self.shrink1(a))
        c = self.grow2(self.middle(self.shrink2(b)))
        d = self.grow1(self.up2(torch.cat([c, b], dim=1)))
        return self.leave(self.up1(torch.cat([d, a], dim=1)))


def transformer(*, num_blocks: int = 12, width: int = 128, length: int = 128, rows: int = 8) -> Task:
    """A causal transformer, which reads the source of the standard library's argparse byte by byte."""
    torch.manual_seed(0)
    source = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    tokens = source[: rows * (length + 1)].view(rows, length + 1).clone()

    def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Task(Decoder(num_blocks=num_blocks, width=width, length=length), tokens, loss_fn)


def unet(*, width: int = 8, stride: int = 1, rows: int = 8) -> Task:
    """A 3D U-Net, which finds the surface of scikit-learn's digits in relief: every ``stride``-th of 32 voxels."""
    torch.manual_seed(0)
    relief = sample_batch(TrainingConfig(batch_size=rows, resolution=32))[..., ::stride, ::stride, ::stride]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        volume, surface = batch
        return F.cross_entropy(model(volume), surface)

    return Task(UNet(width), (relief[:, :1].clone(), relief[:, 3].long()), loss_fn)
