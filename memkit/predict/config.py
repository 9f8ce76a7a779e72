"""The settings of a training run as one frozen, validated object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from memkit.predict.settings import Settings

PresetPrecision = Literal["fp32", "bf16-mixed", "fp16-mixed"]
OptimizerName = Literal["adamw", "sgd"]


class TrainingConfig(Settings):
    """Settings of a latent-diffusion run on voxel volumes (a 3D VAE and a U-Net, trained together).

    Frozen: `replace` gives a changed, validated copy (pydantic's own ``model_copy(update=...)`` does not validate).
    Types are strict: the text ``"2"`` is not the number 2. Each field affects the memory of a step; see
    `memkit.estimate_memory_usage`.

    Raises:
        ConfigError: A field is unknown, has the wrong type, or is out of range.

    Example:
        >>> from memkit.predict import TrainingConfig
        >>> config = TrainingConfig(batch_size=2, gradient_accumulation_steps=4)
        >>> config.effective_batch_size
        8
        >>> config.replace(checkpointing=True).checkpointing
        True
    """

    foreign_words: ClassVar[Mapping[str, str]] = {
        "gpu_memory_gb=24": "gpu gpu_memory memory memory_gb",
        "model_channels": "channels base_channels width",
    }

    preset: Literal["low", "medium", "high", "custom"] = "custom"
    """the preset that the values started from: 'low', 'medium', 'high', or 'custom' for none"""
    gpu_memory_gb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """the number on the graphics card's box (GiB), a positive finite number, or None when not known"""
    batch_size: int = Field(default=1, ge=1)
    """samples in one forward and backward pass (the micro-batch), 1 or more"""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """micro-batches per optimizer step, 1 or more"""
    model_channels: int = Field(default=48, ge=8, multiple_of=8)
    """width of the U-Net's first level, a multiple of 8; the next levels have 2 and 4 times as many"""
    vae_channels: int = Field(default=32, ge=8, multiple_of=8)
    """width of the VAE at full resolution, a multiple of 8; the next levels have 2 and 4 times as many"""
    resolution: int = Field(default=128, ge=32, multiple_of=32)
    """voxels along each edge of the cubic volume, a multiple of 32"""
    precision: PresetPrecision = "bf16-mixed"
    """'fp32', 'bf16-mixed' or 'fp16-mixed'; mixed keeps parameters, gradients and optimizer state in float32"""
    checkpointing: bool = False
    """True computes the inside of each residual block again in the backward pass instead of keeping it"""
    optimizer: OptimizerName = "adamw"
    """'adamw' (two float32 numbers per parameter) or 'sgd' (momentum, one number)"""

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step: ``batch_size * gradient_accumulation_steps``."""
        return self.batch_size * self.gradient_accumulation_steps
