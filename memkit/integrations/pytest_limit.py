"""Argument checks of the marker `memory_limit`; without torch, because pytest loads this at every start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, SupportsIndex, get_args

from memkit._core.errors import ConfigError
from memkit._core.units import parse_bytes
from memkit.predict.gpus import capability_of, find_gpu

LimitMode = Literal["tensors", "allocator", "fake"]


@dataclass(frozen=True, slots=True)
class Limit:
    """The settings of a marker."""

    num_bytes: int
    mode: LimitMode
    device: str | None
    gpu: str | None
    selected_fraction: float | None


def memory_limit(
    limit: SupportsIndex | str,
    *,
    mode: LimitMode = "tensors",
    device: str | None = None,
    gpu: str | None = None,
    selected_fraction: float | None = None,
) -> Limit:
    """Check the arguments of ``@pytest.mark.memory_limit(...)``.

    Args:
        limit: Maximum live bytes at once, as an int, or text such as ``"64 MiB"``.
        mode: ``"tensors"``: live tensors that the test creates or uses. ``"allocator"``: including operators'
            workspace, from the allocator's own events. ``"fake"``: the test runs on tensors without data.
        device: Count only this device, as ``"cuda"``; None: all together.
        gpu: With ``mode="fake"``: run the test inside ``VirtualGPU(gpu)`` and count that GPU's bytes.
        selected_fraction: With ``mode="fake"``: as for `memkit.estimate_memory_usage`.

    Raises:
        ConfigError: The mode is unknown; ``gpu`` or ``selected_fraction`` is set in a mode other than ``"fake"``, or
            ``device`` is set in that mode; the GPU's operators are unknown; or the fraction is outside (0, 1].
        InputError: ``limit`` is not a size, or ``gpu`` is an unknown GPU.
        InputTypeError: ``limit`` is neither an int nor text.
    """
    rules = {
        f"a mode of {get_args(LimitMode)}": mode in get_args(LimitMode),
        "gpu and selected_fraction with mode='fake'": mode == "fake" or (gpu is None and selected_fraction is None),
        "no device with mode='fake': gpu names one": mode != "fake" or device is None,
        "selected_fraction in (0, 1]": selected_fraction is None or 0 < selected_fraction <= 1,
    }
    for rule, is_kept in rules.items():
        if not is_kept:
            given = {"mode": mode, "device": device, "gpu": gpu, "selected_fraction": selected_fraction}
            raise ConfigError(
                f"memory_limit({limit!r}, ...)",
                got=", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None),
                expected=rule,
                fix="see `pytest --markers` for the forms of this marker.",
            )
    if gpu is not None:
        capability_of(find_gpu(gpu))
    return Limit(parse_bytes(limit, name="memory_limit"), mode, device, gpu, selected_fraction)
