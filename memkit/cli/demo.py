"""`memkit demo`: a training that dies inside a memory limit, and finishes inside the same limit through memkit."""

from __future__ import annotations

import argparse
import json
import sys

from memkit._charts.text import align
from memkit._core.units import format_bytes
from memkit.cli._codes import NO, YES
from memkit.cli._terminal import say_all
from memkit.recipes.demo import LIMIT_BYTES, NUM_STEPS, DemoResult, DemoRun, RunName, run_demo

_TITLES: dict[RunName, str] = {
    "plain_limited": "full batch, limited",
    "memkit": "memkit, limited",
    "plain_unlimited": "full batch, no limit",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("demo", help="see a training die of its memory, and finish through memkit; 30 seconds")
    parser.add_argument("--json", action="store_true", help="machine-readable output, sizes in bytes")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    result = run_demo(_draw_progress if sys.stderr.isatty() else lambda *_: None)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    say_all(json.dumps(result.as_dict(), indent=2) if arguments.json else render(result))
    return YES if result.succeeded else NO


def _draw_progress(name: RunName, num_done: int) -> None:
    bar = "#" * num_done + "." * (NUM_STEPS - num_done)
    sys.stderr.write(f"\r\x1b[K{_TITLES[name]:<20} [{bar}] step {num_done} of {NUM_STEPS}")
    sys.stderr.flush()


def render(result: DemoResult) -> str:
    """Format a result as readable text.

    Args:
        result: The result of `run_demo`.
    """
    runs: dict[RunName, DemoRun] = {name: getattr(result, name) for name in _TITLES}
    device = result.plain_unlimited.versions.get("device", "an unknown device")
    lines = [
        f"A character transformer learns the source of Python's standard library: float32, AdamW, on {device}.",
        f"Limited: the process gets {format_bytes(LIMIT_BYTES)} for it, and no more. Peak: bytes in live tensors.",
        "",
        *align([("run", "peak", "time", "result"), *map(_row, runs, runs.values())], [False, True, True, False]),
        "",
        *(f"{_TITLES[name]}: {run.error}" for name, run in runs.items() if run.error),
    ]
    if result.memkit.num_ooms:
        sizes = result.memkit.sizes[-1]
        lines.append(
            f"{_TITLES['memkit']}: survived {result.memkit.num_ooms} out-of-memory errors by cutting the batch of "
            f"{sum(sizes)} rows into micro-batches of {max(sizes)}"
        )
    if (difference := result.max_loss_difference) is not None:
        lines.append(f"{_TITLES['memkit']}: losses of the full batch, largest relative difference {difference:.1e}")
    if not result.succeeded:
        lines.append("This is NOT what the demo is to show: see docs/demo.md.")
    return "\n".join(lines)


def _row(name: RunName, run: DemoRun) -> tuple[str, str, str, str]:
    peak = "-" if run.peak_bytes is None else format_bytes(run.peak_bytes)
    time = "-" if run.seconds is None else f"{run.seconds:.1f} s"
    if run.error:
        end = f"died in step {len(run.losses) + 1}"
    else:
        end = f"finished {len(run.losses)} steps, loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}"
    return _TITLES[name], peak, time, end
