"""`memkit estimate`: memory of a training step, of a preset or of the user's own model, and whether it fits."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from memkit._core.errors import InputError
from memkit.cli._codes import NO, NOT_KNOWN, YES
from memkit.cli._functions import load_function
from memkit.cli._terminal import ProgressLine, Tone, say, say_all, say_json
from memkit.predict.estimate import MemoryEstimate, Verdict
from memkit.predict.gpus import GPU, find_gpu, is_size_text
from memkit.predict.presets import PRESETS, get_preset_config
from memkit.predict.usage import estimate_memory_usage

_SENTENCES = {
    "fits": "fits into {}",
    "does not fit": "does not fit into {}",
    "too close": "too close to {} to say",
    "not known": "NOT KNOWN whether it fits into {}",
}
_TONES: dict[str, Tone] = {"fits": "good", "does not fit": "bad", "too close": "unsure", "not known": "unsure"}
_CODES = {"fits": YES, "does not fit": NO, "too close": NOT_KNOWN, "not known": NOT_KNOWN}
_NAMES = ("model", "sample_batch", "loss_fn", "optimizer")
_FORM = (
    "a function without arguments that returns (model, sample_batch, loss_fn) or (..., optimizer), or a dict of these"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("estimate", help="predict the memory of a training step, and whether it fits")
    parser.add_argument("step", help=f"a preset ({', '.join(PRESETS)}), or FILE.py:FUNCTION, {_FORM}")
    parser.add_argument("--gpu", metavar="NAME", help='the GPU, such as "RTX 4090"; without it, live bytes on a CPU')
    parser.add_argument(
        "--budget", metavar="SIZE", help="does it fit into this size or GPU? (default: the GPU of --gpu)"
    )
    parser.add_argument("--precision", choices=("bf16-mixed", "fp16-mixed"), help="autocast (default: the model's own)")
    parser.add_argument("--accumulation-steps", type=int, default=1, metavar="N", help="micro-batches per step")
    parser.add_argument(
        "--selected-fraction", type=float, metavar="F", help="fraction of elements that masks are assumed to select"
    )
    parser.add_argument("--calibrated", metavar="FILE", help="prefer the GPUs of this file to the built-in table")
    parser.add_argument("--json", action="store_true", help="machine-readable output, sizes in bytes")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.gpu is not None and is_size_text(arguments.gpu):
        arguments.parser.error(f"--gpu names a GPU; for a size write --budget {arguments.gpu}")
    gpu = None if arguments.gpu is None else find_gpu(arguments.gpu, calibrated=arguments.calibrated)
    capacity = gpu if arguments.budget is None else _budget(arguments.budget, arguments.calibrated)
    if arguments.calibrated is not None and gpu is None and not isinstance(capacity, GPU):
        arguments.parser.error("--calibrated needs a GPU: pass --gpu or --budget with a GPU name")
    with ProgressLine(f"running a step of {arguments.step} on tensors without data"):
        estimate = _estimate(arguments, gpu)
        verdict = None if capacity is None else estimate.verdict(capacity)
    if arguments.json:
        asked = None if capacity is None or verdict is None else _asked(estimate, capacity, verdict)
        unasked = dict.fromkeys(("verdict", "reason", "fits", "headroom_bytes"))
        say_json({**estimate.as_dict(), **(asked or unasked)})
    else:
        _show(estimate, verdict, arguments.budget or arguments.gpu)
    if verdict is None:
        return NOT_KNOWN if estimate.doubts else YES
    return _CODES[verdict]


def _show(estimate: MemoryEstimate, verdict: Verdict | None, where: str) -> None:
    if verdict is None:
        say(estimate.headline, tone="unsure" if estimate.doubts else None)
    else:
        reason = "" if estimate.doubts else f": {verdict.reason}"  # the doubts are listed below, each with its line
        say(f"{_SENTENCES[verdict].format(where)}{reason}", tone=_TONES[verdict])
    say()
    say_all(estimate.explain())


def _asked(estimate: MemoryEstimate, capacity: str | GPU, verdict: Verdict) -> dict[str, Any]:
    fits = {"fits": True, "does not fit": False}.get(verdict)
    headroom_bytes = estimate.headroom_bytes(capacity)
    return {"verdict": verdict, "reason": verdict.reason, "fits": fits, "headroom_bytes": headroom_bytes}


def _budget(text: str, calibrated: str | None) -> str | GPU:
    """Return a GPU from the calibration file, else the text: a size or a name that the estimate parses itself."""
    if calibrated is not None:
        with contextlib.suppress(InputError):
            return find_gpu(text, calibrated=calibrated)
    return text


def _estimate(arguments: argparse.Namespace, gpu: GPU | None) -> MemoryEstimate:
    if arguments.step in PRESETS:
        for name in ("precision", "accumulation_steps", "selected_fraction"):
            if getattr(arguments, name) != arguments.parser.get_default(name):
                arguments.parser.error(
                    f"--{name.replace('_', '-')} applies only to your own step: a preset already sets it"
                )
        return estimate_memory_usage(get_preset_config(arguments.step))
    step = _step(arguments.step)
    return estimate_memory_usage(
        step["model"],
        step["sample_batch"],
        loss_fn=step["loss_fn"],
        optimizer=step.get("optimizer", "adamw"),
        precision=arguments.precision,
        target=gpu or "cpu",
        accumulation_steps=arguments.accumulation_steps,
        selected_fraction=arguments.selected_fraction,
    )


def _step(text: str) -> dict[str, Any]:
    """Call the user's function."""
    made = load_function("estimate", text, instead="a preset", words=PRESETS)()
    step = dict(zip(_NAMES, made, strict=False)) if isinstance(made, tuple) else made
    if not isinstance(step, dict) or len(step) < len(made) or not set(_NAMES[:3]) <= step.keys() <= set(_NAMES):
        got = type(made).__name__
        if isinstance(made, (tuple, dict)):
            got += f" of {', '.join(map(repr, made)) if isinstance(made, dict) else len(made)}"
        raise InputError(
            f"memkit estimate {text}",
            got=f"a function that returned {got}",
            expected=_FORM,
            fix="return for example (model, (x, y), lambda model, batch: loss(model(batch[0]), batch[1]), 'adamw').",
        )
    return step
