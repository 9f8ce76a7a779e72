"""Print a config and its memory estimate as a table."""

from __future__ import annotations

import sys
from typing import TextIO

from memkit._core.units import GIB, format_gib
from memkit._core.words import guided
from memkit.predict.config import TrainingConfig
from memkit.predict.estimate import MemoryEstimate
from memkit.predict.formula import estimate_by_formula


@guided(rewrite={"print_config_summary": lambda _: "print_config_summary(get_preset_config('medium'))"})
def print_config_summary(config: TrainingConfig, file: TextIO | None = None) -> None:
    """Print the settings of a run and its estimated memory, in GiB with two decimals.

    Args:
        config: The run.
        file: Where to print; None means standard output.

    Raises:
        InputTypeError: ``config`` is not a `TrainingConfig`.

    Example:
        >>> from memkit import get_preset_config, print_config_summary
        >>> print_config_summary(get_preset_config("medium", 24))  # doctest: +ELLIPSIS
        Training config
          preset                       medium
        ...
    """
    estimate = estimate_by_formula(config)
    settings = {**config.model_dump(exclude_none=True), "effective_batch_size": config.effective_batch_size}
    lines = ["Training config", *(_row(name, str(value)) for name, value in settings.items())]
    lines += ["Estimated memory of a step", *_memory_rows(estimate)]
    if config.gpu_memory_gb is not None:
        headroom_bytes = estimate.headroom_bytes(int(config.gpu_memory_gb * GIB))
        verdict = "fits" if headroom_bytes >= 0 else "does not fit"
        left = f"{format_gib(abs(headroom_bytes))} {'free' if headroom_bytes >= 0 else 'short'}"
        lines.append(_row(f"card of {config.gpu_memory_gb:g} GB", f"{verdict}, {left}"))
    (sys.stdout if file is None else file).write("\n".join(lines) + "\n")


def _memory_rows(estimate: MemoryEstimate) -> list[str]:
    remarks = {
        "peak of live tensors": f"  in {estimate.peak_where}",
        "reserved by the allocator": f"  {estimate.confidence}",
        "driver and libraries": f"  {estimate.confidence}",
    }
    return [
        _row(name, format_gib(num_bytes) + remarks.get(name, ""))
        for name, num_bytes in estimate.parts().items()
        if num_bytes is not None
    ]


def _row(name: str, value: str) -> str:
    return f"  {name:<28} {value}"
