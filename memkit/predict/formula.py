"""Estimate a training step's memory by formula: the reference family written with sizes in place of tensors.

The layers here mirror ``benchmarks/reference_family.py`` one to one (a test keeps them in sync), and `Tape` adds up
the tensors they create and save. No tensor is made and PyTorch is not imported: an estimate takes milliseconds.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass, replace

from memkit._core.settings import Checker
from memkit._core.units import GIB, MIB
from memkit.predict.config import TrainingConfig
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.gpus import GPU, all_gpus
from memkit.predict.tape import Tape, TapeStorage, allocated_bytes

IN_CHANNELS = 4
LATENT_CHANNELS = 4
CHANNEL_MULTIPLIERS = (1, 2, 4, 4)

RANGES_GB = {"low": (8, 12), "medium": (16, 24), "high": (32, math.inf)}
"""GPU sizes that each preset is for, as printed on the box."""

# The allocator model reserves 1.01 to 1.18 times the peak for this family, the most with checkpointing.
RESERVED_PER_PEAK = (6, 5)
# Scratch memory inside convolutions besides copies of their tensors, as in `memkit._simulation.cuda.memory`.
CONVOLUTION_BYTES = 128 * MIB
# cuBLAS keeps one workspace for the forward thread and one for the backward thread.
NUM_HANDLES = 2


def estimate_by_formula(config: TrainingConfig) -> MemoryEstimate:
    """Estimate what a warm training step of ``config`` needs on a GPU: `memkit.estimate_memory_usage` of a config.

    Raises:
        InputTypeError: ``config`` is not a `TrainingConfig`.
    """
    fix = "pass get_preset_config('medium') or TrainingConfig(...), or (model, sample_batch, loss_fn=loss_fn)."
    check = Checker(f"estimate_memory_usage({type(config).__name__})")
    check.instance(config, TrainingConfig, "a TrainingConfig, or a model with a sample batch", fix)
    batch = TapeStorage(0, wants_grad=False)  # the batch is counted as other_bytes
    family = _Family(config)
    family.run(batch)
    tape = family.tape
    # The last micro-batch finds the gradients of earlier ones; a single one creates them during its backward.
    gradients_exist = config.gradient_accumulation_steps > 1
    peak = tape.peak(gradients_exist=gradients_exist)
    num_states = {"adamw": 2, "sgd": 1}[config.optimizer]  # the two moments, or the momentum, in float32
    num_counters = len(tape.weights) if config.optimizer == "adamw" else 0  # one float32 for each tensor
    sizes = [4 * number for number in tape.weights]
    lasting = [*sizes, *(sizes if gradients_exist else []), *(size for size in sizes for _ in range(num_states))]
    rounding_bytes = peak.rounding_bytes + allocated_bytes(lasting) - sum(lasting)
    batch_bytes = 4 * config.batch_size * IN_CHANNELS * config.resolution**3
    cards = _cards(config)
    handle_bytes = max(card.cublas_workspace_bytes or 0 for card in cards)
    library_bytes = NUM_HANDLES * handle_bytes + rounding_bytes
    estimate = MemoryEstimate(
        parameters_bytes=sum(sizes),
        gradients_bytes=peak.gradients_bytes,
        optimizer_bytes=num_states * sum(sizes) + 4 * num_counters,
        activations_bytes=peak.activations_bytes,
        temporaries_bytes=peak.temporaries_bytes,
        other_bytes=batch_bytes + library_bytes,
        library_bytes=library_bytes,
        context_bytes=max(card.context_bytes for card in cards),
        peak_where=peak.where,
        confidence="guessed",
        target="a GPU" if config.gpu_memory_gb is None else f"a GPU of {config.gpu_memory_gb:g} GB",
        target_bytes=None if config.gpu_memory_gb is None else int(config.gpu_memory_gb * GIB),
    )
    numerator, denominator = RESERVED_PER_PEAK
    return replace(estimate, reserved_bytes=estimate.peak_bytes * numerator // denominator + peak.workspace_bytes)


def _cards(config: TrainingConfig) -> list[GPU]:
    """List the NVIDIA GPUs in the preset's range, or all without a preset: the worst of them counts."""
    lowest, highest = RANGES_GB.get(config.preset, (0, math.inf))
    return [card for card in all_gpus() if card.compute_capability and lowest <= card.box_bytes / GIB <= highest]


@dataclass(frozen=True, slots=True)
class _Map:
    """A (batch, channels, edge, edge, edge) tensor."""

    block: TapeStorage
    channels: int
    edge: int


class _Family:
    """The reference family; methods and names follow its modules."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.mixed = config.precision != "fp32"
        self.itemsize = 2 if self.mixed else 4
        self.tape = Tape(cast_itemsize=2 if self.mixed else None)

    def run(self, batch: TapeStorage) -> None:
        """Record the example's `loss_fn`: encoder, posterior, U-Net, decoder and the three losses."""
        tape, edge = self.tape, self.config.resolution
        latent_bytes = 4 * self.config.batch_size * LATENT_CHANNELS * (edge // 4) ** 3
        statistics = self.single(self.encoder(_Map(batch, IN_CHANNELS, edge)), 2 * latent_bytes)
        spread = tape.apply("loss_fn", [statistics], latent_bytes, saves_output=True)
        drawn, variance, noise, noisy = (TapeStorage(latent_bytes, wants_grad=False) for _ in range(4))
        latent = tape.apply("loss_fn", [statistics, spread], latent_bytes, saves=[drawn])
        divergence = tape.apply("loss_fn", [statistics], 4, saves=[statistics, variance])
        noise_loss = self.mse(self.unet(_Map(noisy, LATENT_CHANNELS, edge // 4)), noise)
        volume = self.decoder(_Map(latent, LATENT_CHANNELS, edge // 4))
        tape.apply("loss_fn", [divergence, noise_loss, self.mse(volume, batch)], 4, shares_grad=True)

    def encoder(self, x: _Map) -> _Map:
        c1, c2, c4 = (self.config.vae_channels * multiplier for multiplier in (1, 2, 4))
        h = self.res_block("vae.encoder.1", self.conv("vae.encoder.0", self.cast(x), c1), c1)
        h = self.res_block("vae.encoder.3", self.conv("vae.encoder.2", h, c2, stride=2), c2)
        h = self.res_block("vae.encoder.5", self.conv("vae.encoder.4", h, c4, stride=2), c4)
        return self.norm_silu_conv("vae.encoder", h, 2 * LATENT_CHANNELS, first=6)

    def decoder(self, x: _Map) -> _Map:
        c1, c2, c4 = (self.config.vae_channels * multiplier for multiplier in (1, 2, 4))
        h = self.conv("vae.decoder.0", self.cast(x), c4)
        h = self.res_block("vae.decoder.2", self.res_block("vae.decoder.1", h, c4), c4)
        h = self.upsample("vae.decoder.3", h, c2)
        h = self.res_block("vae.decoder.5", self.res_block("vae.decoder.4", h, c2), c2)
        h = self.upsample("vae.decoder.6", h, c1)
        h = self.res_block("vae.decoder.8", self.res_block("vae.decoder.7", h, c1), c1)
        return self.norm_silu_conv("vae.decoder", h, IN_CHANNELS, first=9)

    def unet(self, x: _Map) -> _Map:
        channels = self.config.model_channels
        widths = [channels * multiplier for multiplier in CHANNEL_MULTIPLIERS]
        emb = self.embed(channels)
        h = self.conv("unet.enter", self.cast(x), channels)
        skips = []
        for level, width in enumerate(widths):
            if level > 0:
                h = self.conv(f"unet.shrink.{level - 1}", h, h.channels, stride=2)
            h = self.two_blocks(f"unet.down.{level}", h, width, emb)
            skips.append(h)
        h = self.two_blocks("unet.middle", self.attention("unet.attention", h), widths[-1], emb)
        for level in reversed(range(len(widths))):
            skip = skips.pop()
            both = self.tape.apply(
                "unet", [h.block, skip.block], h.block.num_bytes + skip.block.num_bytes, shares_grad=True
            )
            h = self.two_blocks(f"unet.up.{level}", _Map(both, 2 * h.channels, h.edge), widths[level], emb)
            if level > 0:
                h = self.upsample(f"unet.grow.{level - 1}", h, widths[level - 1])
        return self.norm_silu_conv("unet.leave", h, LATENT_CHANNELS)

    def embed(self, channels: int) -> TapeStorage:
        emb = TapeStorage(self.itemsize * self.config.batch_size * channels, wants_grad=False)
        for index, (a, b) in enumerate(itertools.pairwise((channels, 4 * channels, 4 * channels))):
            emb = self.silu(f"unet.embed.{2 * index + 1}", self.linear(f"unet.embed.{2 * index}", emb, a, b))
        return emb

    def two_blocks(self, name: str, x: _Map, out_channels: int, emb: TapeStorage) -> _Map:
        return self.res_block(f"{name}.1", self.res_block(f"{name}.0", x, out_channels, emb), out_channels, emb)

    def res_block(self, name: str, x: _Map, out_channels: int, emb: TapeStorage | None = None) -> _Map:
        inputs = [x.block] if emb is None else [x.block, emb]
        with self.tape.checkpoint(*inputs) if self.config.checkpointing else contextlib.nullcontext():
            h = self.norm_silu_conv(f"{name}.first", x, out_channels)
            if emb is not None:
                shift = self.linear(f"{name}.shift", emb, 4 * self.config.model_channels, out_channels)
                h = self.add(name, h, shift)
            h = self.norm_silu_conv(f"{name}.second", h, out_channels)
            shortcut = x if x.channels == out_channels else self.conv(f"{name}.shortcut", x, out_channels, kernel=1)
            return self.add(name, h, shortcut.block)

    def attention(self, name: str, x: _Map) -> _Map:
        tape = self.tape
        qkv = self.conv(f"{name}.qkv", self.norm(f"{name}.norm", x), 3 * x.channels, kernel=1)
        h = tape.apply(name, [qkv.block], x.block.num_bytes, saves=[qkv.block], saves_output=True)
        rows = tape.apply(name, [h], x.block.num_bytes)
        out = self.conv(f"{name}.out", _Map(rows, x.channels, x.edge), x.channels, kernel=1)
        return self.add(name, x, out.block)

    def norm_silu_conv(self, name: str, x: _Map, out_channels: int, *, first: int = 0) -> _Map:
        """Record three consecutive layers of an nn.Sequential, starting at index ``first``."""
        h = self.norm(f"{name}.{first}", x)
        active = self.silu(f"{name}.{first + 1}", h.block)
        return self.conv(f"{name}.{first + 2}", _Map(active, x.channels, x.edge), out_channels)

    def silu(self, name: str, x: TapeStorage) -> TapeStorage:
        return self.tape.apply(name, [x], x.num_bytes, saves=[x])

    def norm(self, name: str, x: _Map) -> _Map:
        weights = [x.channels, x.channels]
        block = self.tape.apply(name, [x.block], x.block.num_bytes, saves=[x.block], weights=weights)
        return _Map(block, x.channels, x.edge)

    def conv(self, name: str, x: _Map, out_channels: int, *, kernel: int = 3, stride: int = 1) -> _Map:
        return self.weighted(name, x, out_channels, x.edge // stride, kernel)

    def upsample(self, name: str, x: _Map, out_channels: int) -> _Map:
        return self.weighted(name, x, out_channels, 2 * x.edge, kernel=2)

    def weighted(self, name: str, x: _Map, out_channels: int, edge: int, kernel: int) -> _Map:
        output_bytes = self.itemsize * self.config.batch_size * out_channels * edge**3
        weights = [x.channels * out_channels * kernel**3, out_channels]
        copies = x.block.num_bytes + self.itemsize * weights[0] + output_bytes  # into another channel order
        output = self.tape.apply(
            name,
            [x.block],
            output_bytes,
            saves=[x.block],
            weights=weights,
            workspace_bytes=CONVOLUTION_BYTES + copies,
        )
        return _Map(output, out_channels, edge)

    def linear(self, name: str, x: TapeStorage, in_channels: int, out_channels: int) -> TapeStorage:
        output_bytes = self.itemsize * self.config.batch_size * out_channels
        return self.tape.apply(name, [x], output_bytes, saves=[x], weights=[in_channels * out_channels, out_channels])

    def add(self, name: str, x: _Map, other: TapeStorage) -> _Map:
        return _Map(self.tape.apply(name, [x.block, other], x.block.num_bytes, shares_grad=True), x.channels, x.edge)

    def cast(self, x: _Map) -> _Map:
        """Record autocast's low-precision copy of a float32 input."""
        if not self.mixed:
            return x
        num_bytes = self.itemsize * self.config.batch_size * x.channels * x.edge**3
        return _Map(self.tape.apply("loss_fn", [x.block], num_bytes), x.channels, x.edge)

    def single(self, x: _Map, num_bytes: int) -> TapeStorage:
        """Record a float32 copy of a low-precision result."""
        return self.tape.apply("loss_fn", [x.block], num_bytes) if self.mixed else x.block

    def mse(self, x: _Map, target: TapeStorage) -> TapeStorage:
        """Record float32 mean squared error: a scalar in a buffer for all squares, made from another such buffer."""
        num_bytes = 4 * self.config.batch_size * x.channels * x.edge**3
        single = self.single(x, num_bytes)
        return self.tape.apply("loss_fn", [single], num_bytes, saves=[single, target], inside_bytes=num_bytes)
