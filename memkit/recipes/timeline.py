"""Where the training time goes, phase by phase, and a readable line of memory figures."""

from __future__ import annotations

import time

from memkit._core.units import format_bytes


class Timeline:
    """Adds up the seconds of named phases since the last restart, measured by the host's clock.

    An accelerator may still be working when a phase ends; that work shows up in the phase that waits for it.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start over."""
        self.seconds: dict[str, float] = {}
        self.num_steps = 0

    def phase(self, name: str) -> TimedBlock:
        """Return a context manager whose time counts for ``name``."""
        return TimedBlock(self.seconds, name)

    def line(self) -> str:
        """Return, for example, ``"12.3 ms a step: data 3%, transfer 1%, step 96%"``."""
        total = sum(self.seconds.values())
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in self.seconds.items())
        return f"{1000 * total / max(1, self.num_steps):.1f} ms a step: {shares}"


class TimedBlock:
    """Adds a block's time to its name; a class, because it runs several times in every step."""

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + time.perf_counter() - self._start


def memory_line(figures: dict[str, int]) -> str:
    """Return, for example, ``"allocated 1.20 GiB, reserved 2.00 GiB, peak 1.50 GiB, host resident 3.00 GiB"``."""
    names = {name: name.removesuffix("_bytes").replace("_", " ") for name in figures}
    return ", ".join(f"{names[name]} {format_bytes(value)}" for name, value in figures.items())
