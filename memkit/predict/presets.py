"""Named settings for three sizes of GPU, and a warning when a preset does not match the GPU."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

from memkit._core.errors import ConfigError, warn_user
from memkit._core.units import GIB, format_gib
from memkit._core.words import guided
from memkit.predict.config import TrainingConfig
from memkit.predict.formula import RANGES_GB, estimate_by_formula


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Settings for a range of GPUs, by the size on the box; the largest preset has no upper limit."""

    range_gb: tuple[int, float]
    batch_size: int
    gradient_accumulation_steps: int
    model_channels: int

    @property
    def min_gpu_gb(self) -> int:
        """Size of the smallest GPU in the range."""
        return self.range_gb[0]

    @property
    def cards(self) -> str:
        """The range in words."""
        lowest, highest = self.range_gb
        return f"{lowest} GB and more" if highest == math.inf else f"{lowest}-{highest} GB"


# From the smallest GPU to the largest. The effective batch size is 8 in all of them.
PRESETS = {
    "low": Preset(range_gb=RANGES_GB["low"], batch_size=1, gradient_accumulation_steps=8, model_channels=48),
    "medium": Preset(range_gb=RANGES_GB["medium"], batch_size=2, gradient_accumulation_steps=4, model_channels=64),
    "high": Preset(range_gb=RANGES_GB["high"], batch_size=4, gradient_accumulation_steps=2, model_channels=96),
}


@guided(words={"name": "preset size preset_name"})
def get_preset_config(name: str, gpu_memory_gb: float | None = None, **overrides: Any) -> TrainingConfig:
    """Return the settings of a named preset.

    Args:
        name: ``"low"`` (GPUs of 8-12 GB), ``"medium"`` (16-24 GB) or ``"high"`` (32 GB and more).
        gpu_memory_gb: The size on the GPU's box. If given, a preset that does not match the GPU causes a warning that
            names the matching one; with overrides, the estimate decides instead of the name.
        **overrides: Fields of `TrainingConfig` to set differently; validated like all others.

    Returns:
        A frozen config.

    Raises:
        ConfigError: The name is unknown, or a value is invalid.

    Warns:
        MemkitWarning: The preset does not match the GPU.

    Example:
        >>> from memkit import get_preset_config
        >>> config = get_preset_config("medium", 24)
        >>> config.batch_size, config.gradient_accumulation_steps, config.model_channels
        (2, 4, 64)
        >>> get_preset_config("medium", 24, precision="fp16-mixed").precision
        'fp16-mixed'
    """
    shown = "".join(f", {field}={value!r}" for field, value in overrides.items())
    call = f"get_preset_config({name!r}, {gpu_memory_gb!r}{shown})"
    if name not in list(PRESETS):  # by equality: a name of the wrong type, such as a list, is unknown too
        raise _unknown_name(call, name, gpu_memory_gb)
    if "preset" in overrides:
        raise ConfigError(
            call,
            got=f"the override preset={overrides['preset']!r}",
            expected="overrides of other fields: the first argument chooses the preset",
            fix=f"call get_preset_config({overrides['preset']!r}).",
        )
    preset = PRESETS[name]
    values = {
        "preset": name,
        "gpu_memory_gb": gpu_memory_gb,
        "batch_size": preset.batch_size,
        "gradient_accumulation_steps": preset.gradient_accumulation_steps,
        "model_channels": preset.model_channels,
    }
    config = TrainingConfig.validated(call, {**values, **overrides})
    if config.gpu_memory_gb is not None:
        advice = _advice(config, config.gpu_memory_gb, overridden=bool(overrides))
        if advice:
            warn_user(advice)
    return config


def _unknown_name(call: str, name: object, gpu_memory_gb: object) -> ConfigError:
    near = difflib.get_close_matches(str(name).lower(), PRESETS, n=1)
    meant, size = near[0] if near else "medium", "" if gpu_memory_gb is None else f", {gpu_memory_gb!r}"
    if gpu_memory_gb in list(PRESETS):  # the two swapped
        meant, size = str(gpu_memory_gb), f", {name!r}"
    return ConfigError(
        call,
        got=f"the preset {name!r}",
        expected=f"one of {', '.join(map(repr, PRESETS))}",
        fix=f"write get_preset_config({meant!r}{size}).",
    )


def _advice(config: TrainingConfig, gpu_memory_gb: float, *, overridden: bool) -> str | None:
    """Suggest a better match for the GPU than ``config``; None if it matches."""
    if overridden:
        estimate = estimate_by_formula(config)
        if estimate.fits(int(gpu_memory_gb * GIB)):
            return None
        return (
            f"preset {config.preset!r} with these overrides is estimated at {format_gib(estimate.required_bytes)}, "
            f"more than a card of {gpu_memory_gb:g} GB has: lower batch_size or resolution, or set checkpointing=True."
        )
    fitting = [name for name, preset in PRESETS.items() if preset.min_gpu_gb <= gpu_memory_gb]
    if not fitting:
        lean = estimate_by_formula(get_preset_config("low", checkpointing=True))
        return (
            f"no preset fits a card of {gpu_memory_gb:g} GB: the smallest, 'low', is for {PRESETS['low'].cards}. "
            f"Override checkpointing=True (estimated at {format_gib(lean.required_bytes)}) or lower the resolution."
        )
    if fitting[-1] == config.preset:
        return None
    mismatch = "would leave memory unused on" if config.preset in fitting else "does not fit"
    return (
        f"preset {config.preset!r} ({PRESETS[config.preset].cards}) {mismatch} a card of {gpu_memory_gb:g} GB; "
        f"{fitting[-1]!r} fits."
    )
