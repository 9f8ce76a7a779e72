"""The demo: a training run that dies under a real memory limit, and finishes under the same limit with memkit.

Three runs of `demo_worker`, each in its own process. This process only reads their output and does not need torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from memkit._core.units import MIB

NUM_STEPS = 6
LIMIT_BYTES = 100 * MIB  # a third of what the full batch needs
TOLERANCE = 1e-5  # float32 sums in a different order differ by about 1e-7
_PACKAGE = Path(__file__).parents[1]
# glibc keeps freed blocks below its growing threshold in the heap, where they count as used. With a fixed threshold,
# each tensor of 16 KiB or more goes back to the kernel when it is freed, so the kernel counts only live tensors.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "16384"}

RunName = Literal["plain_limited", "memkit", "plain_unlimited"]
_RUNS: tuple[tuple[RunName, str, int], ...] = (
    ("plain_limited", "plain", LIMIT_BYTES),
    ("memkit", "memkit", LIMIT_BYTES),
    ("plain_unlimited", "plain", 0),
)


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Outcome of one run.

    Attributes:
        losses: Loss of each finished step.
        sizes: Rows of each micro-batch, per step.
        num_ooms: Out-of-memory errors from which the run recovered.
        error: The error that ended the run early; None if it finished.
        is_out_of_memory: Whether that was an out-of-memory error.
        peak_bytes: Peak bytes in live tensors; None if the process died without reporting.
        seconds: Time of the steps; None if the process died without reporting.
        versions: The environment in which it ran: ``device``, ``python``, ``torch``.
    """

    losses: tuple[float, ...]
    sizes: tuple[tuple[int, ...], ...]
    num_ooms: int
    error: str | None
    is_out_of_memory: bool
    peak_bytes: int | None
    seconds: float | None
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The three runs.

    Attributes:
        plain_limited: Full batch, under the limit.
        memkit: With memkit, under the limit.
        plain_unlimited: Full batch without a limit: the reference result.
    """

    plain_limited: DemoRun
    memkit: DemoRun
    plain_unlimited: DemoRun

    @property
    def max_loss_difference(self) -> float | None:
        """Largest relative difference of a step's loss between memkit and the full batch; None if a run stopped."""
        if self.memkit.error or self.plain_unlimited.error:
            return None
        pairs = zip(self.memkit.losses, self.plain_unlimited.losses, strict=True)
        return max(abs(loss - right) / abs(right) for loss, right in pairs)

    @property
    def succeeded(self) -> bool:
        """Whether the plain run ran out of memory under the limit, and memkit's run had the reference losses."""
        difference = self.max_loss_difference
        return self.plain_limited.is_out_of_memory and difference is not None and difference <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """Return plain types: sizes in bytes, times in seconds."""
        runs: dict[RunName, DemoRun] = {name: getattr(self, name) for name, *_ in _RUNS}
        return {
            "plain_oom": self.plain_limited.is_out_of_memory,
            "plain_error": self.plain_limited.error,
            "memkit_completed": self.memkit.error is None,
            "memkit_error": self.memkit.error,
            "steps": NUM_STEPS,
            "losses": {"full_batch": self.plain_unlimited.losses, "memkit": self.memkit.losses},
            "max_loss_difference": self.max_loss_difference,
            "limit_bytes": LIMIT_BYTES,
            "peaks": {name: run.peak_bytes for name, run in runs.items()},
            "times": {name: run.seconds for name, run in runs.items()},
            "micro_batch_sizes": self.memkit.sizes,
            "num_ooms": self.memkit.num_ooms,
            **self.plain_unlimited.versions,
        }


def run_demo(on_step: Callable[[RunName, int], None]) -> DemoResult:
    """Run the three runs, one after the other; about 30 seconds.

    Args:
        on_step: Called with the run and its number of finished steps, first with 0.
    """
    runs: dict[RunName, DemoRun] = {}
    for name, kind, limit_bytes in _RUNS:
        worker = ("-m", "memkit.recipes.demo_worker", kind, str(NUM_STEPS), str(limit_bytes))
        runs[name] = run_worker(worker, partial(on_step, name))
    return DemoResult(**runs)


def run_worker(arguments: Sequence[str], on_step: Callable[[int], None]) -> DemoRun:
    """Run one worker until it exits or is killed.

    Args:
        arguments: Arguments of the Python interpreter.
        on_step: Called with the number of finished steps, first with 0.
    """
    steps: list[dict[str, Any]] = []
    end: dict[str, Any] = {}
    on_step(0)
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=_PACKAGE.parent,  # so that -m finds memkit, installed or not
            env=os.environ | _ENVIRONMENT,  # noqa: TID251 - passed on unchanged
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        for line in process.stdout or ():
            record = json.loads(line)
            if "loss" in record:
                steps.append(record)
                on_step(len(steps))
            else:
                end = record
        code = process.wait()
        stderr.seek(0)
        last_words = stderr.read().strip().rpartition("\n")[2]
    return DemoRun(
        losses=tuple(step["loss"] for step in steps),
        sizes=tuple(tuple(step["sizes"]) for step in steps),
        num_ooms=sum(step["num_ooms"] for step in steps),
        error=end.get("error", None if code == 0 else _cause_of_death(code, last_words)),
        is_out_of_memory=end.get("is_out_of_memory", False),
        peak_bytes=end.get("peak_bytes"),
        seconds=end.get("seconds"),
        versions={key: end[key] for key in ("device", "python", "torch") if key in end},
    )


def _cause_of_death(code: int, last_words: str) -> str:
    if code < 0:
        return f"killed by signal {-code} ({signal.strsignal(-code)})"
    return f"exit code {code}: {last_words}"
