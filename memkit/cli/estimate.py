"""`memkit estimate`: what a training step needs, of a preset or of the user's own model, and whether it fits."""

from __future__ import annotations

import argparse
import json
from typing import Any

from memkit._errors import InputError
from memkit.cli._functions import load_function
from memkit.planning.estimate import MemoryEstimate
from memkit.planning.predict import estimate_memory_usage
from memkit.planning.presets import PRESETS, get_preset_config

_FORM = (
    "a function without arguments that returns (model, sample_batch, loss_fn) or (..., optimizer), or a dict of these"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("estimate", help="say what a training step needs, and whether it fits")
    parser.add_argument("step", help=f"a preset ({', '.join(PRESETS)}), or FILE.py:FUNCTION, {_FORM}")
    parser.add_argument("--gpu", metavar="NAME", help='the card, such as "RTX 4090"; without it, live bytes on a CPU')
    parser.add_argument("--budget", metavar="SIZE", help="does it fit into this size or card? (default: the card)")
    parser.add_argument("--precision", choices=("bf16-mixed", "fp16-mixed"), help="autocast (default: as the model is)")
    parser.add_argument("--accumulation-steps", type=int, default=1, metavar="N", help="micro-batches per step")
    parser.add_argument("--selected-fraction", type=float, metavar="F", help="share that masks are taken to select")
    parser.add_argument("--json", action="store_true", help="machine-readable output, sizes in bytes")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    estimate = _estimate(arguments)
    capacity = arguments.budget or arguments.gpu
    fits = None if capacity is None else estimate.fits(capacity)
    if arguments.json:
        headroom_bytes = None if capacity is None else estimate.headroom_bytes(capacity)
        print(json.dumps({**estimate.as_dict(), "fits": fits, "headroom_bytes": headroom_bytes}, indent=2))
    else:
        print(estimate.explain())
        if capacity is not None:
            print(f"\n{'fits' if fits else 'does not fit'} into {capacity}")
    return 1 if fits is False else 0


def _estimate(arguments: argparse.Namespace) -> MemoryEstimate:
    if arguments.step in PRESETS:
        return estimate_memory_usage(get_preset_config(arguments.step))
    step = _step(arguments.step)
    return estimate_memory_usage(
        step["model"],
        step["sample_batch"],
        loss_fn=step["loss_fn"],
        optimizer=step.get("optimizer", "adamw"),
        precision=arguments.precision,
        target=arguments.gpu or "cpu",
        accumulation_steps=arguments.accumulation_steps,
        selected_fraction=arguments.selected_fraction,
    )


def _step(text: str) -> dict[str, Any]:
    """Call the user's function."""
    made = load_function("estimate", text, instead="a preset")()
    if isinstance(made, tuple):
        made = dict(zip(("model", "sample_batch", "loss_fn", "optimizer"), made, strict=False))
    if not isinstance(made, dict) or not {"model", "sample_batch", "loss_fn"} <= made.keys():
        raise InputError(
            f"memkit estimate {text}",
            got=f"a function that returned {type(made).__name__}",
            expected=_FORM,
            fix="return for example (model, (x, y), lambda model, batch: loss(model(batch[0]), batch[1]), 'adamw').",
        )
    return made
