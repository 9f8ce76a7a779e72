"""`memkit demo`: a training run that dies under a memory limit, and finishes under the same limit with memkit."""

from __future__ import annotations

import argparse

from memkit._charts.text import align
from memkit._core.printable import counted
from memkit._core.units import format_bytes
from memkit.cli._codes import NO, YES
from memkit.cli._terminal import ProgressLine, say, say_all, say_json
from memkit.recipes.demo import LIMIT_BYTES, NUM_STEPS, DemoResult, DemoRun, RunName, run_demo

_TITLES: dict[RunName, str] = {
    "plain_limited": "full batch, limited",
    "memkit": "memkit, limited",
    "plain_unlimited": "full batch, no limit",
}

_INTRODUCTION = f"""\
A small transformer is trained on Python's own sources, {NUM_STEPS} steps each time:
plain and with memkit under a memory limit, then plain without one. This usually
takes less than a minute."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("demo", help="see training run out of memory, and finish with memkit")
    parser.add_argument("--json", action="store_true", help="machine-readable output, sizes in bytes")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.json:
        say_all(_INTRODUCTION)
    with ProgressLine("starting") as progress:
        result = run_demo(lambda name, num_done: progress.show(_progress_text(name, num_done)))
    if arguments.json:
        say_json(result.as_dict())
    else:
        say()
        say(_verdict(result), tone="good" if result.succeeded else "bad")
        say()
        say_all(render(result))
    return YES if result.succeeded else NO


def _progress_text(name: RunName, num_done: int) -> str:
    bar = "#" * num_done + "." * (NUM_STEPS - num_done)
    return f"{_TITLES[name]:<20} [{bar}] step {num_done} of {NUM_STEPS}"


def _verdict(result: DemoResult) -> str:
    if not result.succeeded:
        return "This is NOT the result that the demo should show: see docs/tutorial.md#the-demo."
    limit = format_bytes(LIMIT_BYTES)
    return f"Under {limit} the full batch ran out of memory; memkit finished, with the full batch's losses."


def render(result: DemoResult) -> str:
    """Format a result as readable text.

    Args:
        result: The result of `run_demo`.
    """
    runs: dict[RunName, DemoRun] = {name: getattr(result, name) for name in _TITLES}
    head = ("run", "limit", "peak", "time", "result")
    lines = [
        *align([head, *map(_row, runs, runs.values())], [False, True, True, True, False]),
        "",
        "limit: memory for training, enforced by the kernel or by CUDA",
        "peak: bytes in live tensors. A run that runs out of memory has used up the",
        "limit, even if it recovers: failed attempts count.",
        "",
        *(f"{_TITLES[name]}: {run.error}" for name, run in runs.items() if run.error),
    ]
    if result.memkit.num_ooms:
        sizes = result.memkit.sizes[-1]
        lines.append(
            f"{_TITLES['memkit']}: recovered from {counted(result.memkit.num_ooms, 'out-of-memory error')} by "
            f"splitting the batch of {sum(sizes)} rows into micro-batches of {max(sizes)}"
        )
    if (difference := result.max_loss_difference) is not None:
        lines.append(f"{_TITLES['memkit']}: losses of the full batch, largest relative difference {difference:.1e}")
    return "\n".join(lines)


def _row(name: RunName, run: DemoRun) -> tuple[str, ...]:
    limit = "none" if name == "plain_unlimited" else format_bytes(LIMIT_BYTES)
    peak = "-" if run.peak_bytes is None else format_bytes(run.peak_bytes)
    time = "-" if run.seconds is None else f"{run.seconds:.1f} s"
    if run.error:
        end = f"died in step {len(run.losses) + 1}"
    else:
        end = f"{len(run.losses)} steps, loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}"
    return "memkit" if name == "memkit" else "full batch", limit, peak, time, end
