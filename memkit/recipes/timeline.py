"""Where the training time goes, phase by phase, and a readable line of memory figures."""

from __future__ import annotations

import time

from memkit._core.units import format_bytes


class Timeline:
    """Adds up the seconds of named phases since the last restart, measured by the host's clock.

    Phases follow one another: `start` before the first, then `lap` at the end of each. An accelerator may still be
    working when a phase ends; that work shows up in the phase that waits for it.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start over."""
        self.seconds: dict[str, float] = {}
        self.num_steps = 0

    def start(self) -> None:
        """Start a phase; the time since the last one counts for none."""
        self._began = time.perf_counter()

    def lap(self, name: str) -> None:
        """Count the time since the last phase began for ``name``, and start the next one."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._began
        self._began = now

    def line(self) -> str:
        """Return, for example, ``"12.3 ms a step: data 3%, transfer 1%, step 96%"``."""
        total = sum(self.seconds.values())
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in self.seconds.items())
        return f"{1000 * total / max(1, self.num_steps):.1f} ms a step: {shares}"


def memory_line(figures: dict[str, int]) -> str:
    """Return, for example, ``"allocated 1.20 GiB, reserved 2.00 GiB, peak 1.50 GiB, host resident 3.00 GiB"``."""
    names = {name: name.removesuffix("_bytes").replace("_", " ") for name in figures}
    return ", ".join(f"{names[name]} {format_bytes(value)}" for name, value in figures.items())
