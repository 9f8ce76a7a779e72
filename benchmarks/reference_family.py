"""The model family that memkit's presets are sized for: a 3D VAE and a latent-diffusion U-Net, trained together.

`build(config)` makes the model, `make_optimizer` its optimizer, `sample_batch(config)` one micro-batch, and
`loss_fn(model, batch)` the mean loss over it. Plain PyTorch: read it top to bottom. Three habits save memory here:
GroupNorm stays in the low precision of its input, up-sampling is a transposed convolution (no enlarged copy of the
input is kept), and residual blocks can be checkpointed.

The volumes are real: scikit-learn's handwritten digits as relief, each pixel a column of voxels as high as its ink.
"""

from __future__ import annotations

import contextlib
import itertools
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memkit.predict import TrainingConfig

IN_CHANNELS = 4  # occupancy, ink, height, surface
LATENT_CHANNELS = 4
CHANNEL_MULTIPLIERS = (1, 2, 4, 4)  # width of the U-Net's levels
NUM_GROUPS = 8
NUM_HEADS = 4
NUM_TIMESTEPS = 1000
AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


class LowPrecisionGroupNorm(nn.GroupNorm):
    """GroupNorm that returns its input's dtype: autocast would compute and keep two float32 tensors instead."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def norm(channels: int) -> nn.Module:
    return LowPrecisionGroupNorm(NUM_GROUPS, channels)


def conv(in_channels: int, out_channels: int, stride: int = 1) -> nn.Module:
    return nn.Conv3d(in_channels, out_channels, 3, stride=stride, padding=1)


def upsample(in_channels: int, out_channels: int) -> nn.Module:
    return nn.ConvTranspose3d(in_channels, out_channels, 2, stride=2)


class ResBlock(nn.Module):
    """Two normalized convolutions around a shortcut; `emb` (batch, emb_channels), where given, shifts the middle."""

    def __init__(self, in_channels: int, out_channels: int, *, emb_channels: int = 0, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.first = nn.Sequential(norm(in_channels), nn.SiLU(), conv(in_channels, out_channels))
        self.shift = nn.Linear(emb_channels, out_channels) if emb_channels else None
        self.second = nn.Sequential(norm(out_channels), nn.SiLU(), conv(out_channels, out_channels))
        self.shortcut = nn.Conv3d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor | None = None) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():  # nothing here is random: no generator state to keep
            return checkpoint(self.compute, x, emb, use_reentrant=False, preserve_rng_state=False)
        return self.compute(x, emb)

    def compute(self, x: Tensor, emb: Tensor | None) -> Tensor:
        h = self.first(x)
        if self.shift is not None:
            h = h + self.shift(emb)[:, :, None, None, None]
        return self.second(h) + self.shortcut(x)


class Attention(nn.Module):
    """Self-attention over all voxels of a (batch, channels, depth, height, width) volume."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.qkv = nn.Conv3d(channels, 3 * channels, 1)
        self.out = nn.Conv3d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, 3 * channels, D, H, W) -> three of (batch, heads, voxels, channels / heads)
        qkv = self.qkv(self.norm(x)).reshape(len(x), 3, NUM_HEADS, -1, x[0, 0].numel()).transpose(3, 4)
        h = F.scaled_dot_product_attention(*qkv.unbind(1))
        return x + self.out(h.transpose(2, 3).reshape(x.shape))


class VAE(nn.Module):
    """Volumes to latents at a quarter of the resolution, and back; the decoder is one block per level deeper."""

    def __init__(self, channels: int, *, checkpointing: bool) -> None:
        super().__init__()
        c1, c2, c4 = channels, 2 * channels, 4 * channels

        def block(channels: int) -> nn.Module:
            return ResBlock(channels, channels, checkpointing=checkpointing)

        self.encoder = nn.Sequential(
            conv(IN_CHANNELS, c1), block(c1),
            conv(c1, c2, stride=2), block(c2),
            conv(c2, c4, stride=2), block(c4),
            norm(c4), nn.SiLU(), conv(c4, 2 * LATENT_CHANNELS),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            conv(LATENT_CHANNELS, c4), block(c4), block(c4),
            upsample(c4, c2), block(c2), block(c2),
            upsample(c2, c1), block(c1), block(c1),
            norm(c1), nn.SiLU(), conv(c1, IN_CHANNELS),
        )  # fmt: skip


class UNet(nn.Module):
    """Predicts the noise in (batch, LATENT_CHANNELS, D, H, W) latents at timesteps (batch,)."""

    def __init__(self, channels: int, *, checkpointing: bool) -> None:
        super().__init__()
        widths = [channels * multiplier for multiplier in CHANNEL_MULTIPLIERS]
        emb_channels = 4 * channels

        def blocks(in_channels: int, out_channels: int) -> nn.ModuleList:
            return nn.ModuleList(
                ResBlock(width, out_channels, emb_channels=emb_channels, checkpointing=checkpointing)
                for width in (in_channels, out_channels)
            )

        self.channels = channels
        self.embed = nn.Sequential(
            nn.Linear(channels, emb_channels), nn.SiLU(), nn.Linear(emb_channels, emb_channels), nn.SiLU()
        )
        self.enter = conv(LATENT_CHANNELS, channels)
        self.down = nn.ModuleList(blocks(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.shrink = nn.ModuleList(conv(width, width, stride=2) for width in widths[:-1])
        self.attention = Attention(widths[-1])
        self.middle = blocks(widths[-1], widths[-1])
        self.grow = nn.ModuleList(upsample(b, a) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(blocks(2 * width, width) for width in widths)
        self.leave = nn.Sequential(norm(channels), nn.SiLU(), conv(channels, LATENT_CHANNELS))

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        emb = self.embed(sinusoids(timesteps, self.channels))
        h = self.enter(x)
        skips = []
        for level, blocks in enumerate(self.down):
            h = apply_blocks(blocks, h if level == 0 else self.shrink[level - 1](h), emb)
            skips.append(h)
        h = apply_blocks(self.middle, self.attention(h), emb)
        for level in reversed(range(len(skips))):
            h = apply_blocks(self.up[level], torch.cat([h, skips.pop()], dim=1), emb)
            h = self.grow[level - 1](h) if level > 0 else h
        return self.leave(h)


def apply_blocks(blocks: nn.ModuleList, x: Tensor, emb: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, emb)
    return x


class LatentDiffusion(nn.Module):
    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.vae = VAE(config.vae_channels, checkpointing=config.checkpointing)
        self.unet = UNet(config.model_channels, checkpointing=config.checkpointing)


def sinusoids(timesteps: Tensor, channels: int) -> Tensor:
    rates = torch.exp(-math.log(10_000.0) * torch.arange(channels // 2, device=timesteps.device) / (channels // 2))
    angles = timesteps[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def build(config: TrainingConfig) -> LatentDiffusion:
    return LatentDiffusion(config)


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    # Fused: the whole update in one kernel. The default "foreach" way makes one more copy of all parameters.
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def sample_batch(config: TrainingConfig) -> Tensor:
    """One micro-batch (batch_size, IN_CHANNELS, resolution, resolution, resolution), float32: digits as relief."""
    ink = torch.from_numpy(load_digits().images[: config.batch_size]).float()[:, None] / 16  # (batch, 1, 8, 8), 0 to 1
    ink = F.interpolate(ink, size=config.resolution)[:, :, None]  # (batch, 1, 1, height, width)
    height = ((torch.arange(config.resolution) + 1) / config.resolution)[:, None, None]  # (depth, 1, 1), above 0 to 1
    occupancy = (height <= ink).float()
    surface = occupancy * (height + 1 / config.resolution > ink)
    return torch.cat([occupancy, occupancy * ink, occupancy * height, surface], dim=1)


def loss_fn(model: LatentDiffusion, volume: Tensor) -> Tensor:
    """Reconstruction, Kullback-Leibler and noise-prediction losses: the mean over the micro-batch, one float32."""
    mean, log_variance = model.vae.encoder(volume).float().chunk(2, dim=1)
    latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
    divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).mean()

    timesteps = torch.randint(NUM_TIMESTEPS, (len(volume),), device=volume.device)
    signal = torch.cos(0.5 * math.pi * timesteps / NUM_TIMESTEPS)[:, None, None, None, None]  # cosine schedule
    noise = torch.randn_like(mean)
    noisy = signal * latent.detach() + (1 - signal.square()).sqrt() * noise  # the U-Net does not train the VAE
    noise_loss = F.mse_loss(model.unet(noisy, timesteps).float(), noise)

    reconstruction_loss = F.mse_loss(model.vae.decoder(latent).float(), volume)
    return reconstruction_loss + 1e-6 * divergence + noise_loss


def autocast(config: TrainingConfig, device_type: str) -> contextlib.AbstractContextManager[object]:
    """The part of `config.precision` that belongs around `loss_fn` (fp16-mixed also needs a gradient scaler)."""
    if config.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, AUTOCAST_DTYPES[config.precision])


def train_step(
    model: LatentDiffusion, optimizer: torch.optim.Optimizer, micro_batches: list[Tensor], config: TrainingConfig
) -> Tensor:
    """One optimizer step in plain PyTorch; returns the mean loss."""
    total = torch.zeros((), device=micro_batches[0].device)
    for volume in micro_batches:
        with autocast(config, volume.device.type):
            loss = loss_fn(model, volume) / len(micro_batches)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total
