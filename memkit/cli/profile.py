"""`memkit profile`: how memory grows with a neural operator's edges, or with the size of the user's own step."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memkit._core.errors import InputError
from memkit._core.units import format_bytes
from memkit.cli._codes import FAILED, NO, NOT_KNOWN, YES
from memkit.cli._functions import load_function
from memkit.cli._terminal import ProgressLine, say, say_all, say_json
from memkit.predict.scaling.points import ScalingPoint
from memkit.recipes.memory_test.config import MemoryTestConfig

if TYPE_CHECKING:
    from memkit.recipes.memory_test.outputs import MemoryTestResult

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kM]?)")
_FACTORS = {"": 1, "k": 1_000, "M": 1_000_000}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "profile",
        help="show how memory grows with the edges of a neural operator, or with the size of your own step",
        description="Without a step: the memory test of a neural operator. With one: your own step over --sizes.",
    )
    parser.add_argument("step", nargs="?", metavar="FILE.py:FUNCTION", help="FUNCTION(n) returns a step of size n")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--full", action="store_true", help="encoder, decoder and whole model")
    what.add_argument("--core", action="store_true", help="only the edge MLP, in all its settings")
    what.add_argument("--all", action="store_true", help="both (default)")
    what.add_argument(
        "--sizes", metavar="LIST", help="sizes for your own step, as in 5k,10k,1M, or 5k..1M for 12 sizes"
    )
    parser.add_argument("--modes", choices=("train", "inference", "both"), default="both", help="(default: both)")
    parser.add_argument("--config", metavar="FILE", help="the fields of MemoryTestConfig, as JSON")
    parser.add_argument("--max-edges", type=int, metavar="N", help="skip larger edge counts")
    parser.add_argument("--measured", action="store_true", help="run each point in a separate process")
    parser.add_argument("--device", metavar="NAME", help="where to measure (default: cuda:0)")
    parser.add_argument("--memory-limit", metavar="SIZE", help="the memory limit of each measuring process, as in 4GiB")
    parser.add_argument("--gpu", action="append", default=[], metavar="NAME", help="a GPU to compare with; repeatable")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="for the files (default: here)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, sizes in bytes")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.step is None) != (arguments.sizes is None):
        arguments.parser.error("your own step FILE.py:FUNCTION and --sizes must be given together")
    if arguments.step is not None and arguments.max_edges is not None:
        arguments.parser.error("--max-edges applies only to the memory test; --sizes sets the sizes of your own step")
    config = _config(arguments)
    if config.source != "measured":
        for name in ("device", "memory_limit"):
            if getattr(arguments, name) is not None:
                arguments.parser.error(
                    f"--{name.replace('_', '-')} applies only to measured runs: pass --measured as well"
                )
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    with (
        ProgressLine("preparing the steps") as progress,
        redirect_stdout(sys.stderr),
    ):  # for output of the user's own code
        results = _results(arguments, config, progress)
    paths = [path for result in results for path in result.write(arguments.output_dir)]
    if arguments.json:
        say_json([result.as_dict() for result in results])
    else:
        say_all("\n\n".join(result.explain() for result in results))
    say(f"written: {', '.join(map(str, paths))}", is_error=True)
    if not any(path.suffix == ".png" for path in paths):
        say("no PNG: it needs matplotlib, `pip install matplotlib`; the SVG shows the same", is_error=True)
    return max(_code(result, arguments.gpu) for result in results)


def _config(arguments: argparse.Namespace) -> MemoryTestConfig:
    path = arguments.config
    config = MemoryTestConfig(test_full_model=True) if path is None else MemoryTestConfig.from_file(path)
    changes: dict[str, Any] = {}
    if arguments.max_edges is not None:
        most = arguments.max_edges
        changes["min_edges"], changes["max_edges"] = min(config.min_edges, most), min(config.max_edges, most)
        changes["core_num_edges"] = tuple(n for n in config.core_num_edges if n <= most) or (most,)
    if arguments.modes != "both":
        changes["test_training_mode"] = arguments.modes == "train"
        changes["test_inference_mode"] = arguments.modes == "inference"
    if arguments.measured:
        changes["source"] = "measured"
    if arguments.device is not None:
        changes["device"] = arguments.device
    return config.replace(**changes)


def _results(arguments: argparse.Namespace, config: MemoryTestConfig, progress: ProgressLine) -> list[MemoryTestResult]:
    from memkit.recipes.memory_test.sweep import run_memory_test, sweep  # these import torch

    def on_point(name: str, point: ScalingPoint) -> None:
        progress.show(_line(name, point) if point.source == "measured" else f"{name}: predicted")

    options: dict[str, Any] = {
        "gpus": arguments.gpu,
        "memory_limit": arguments.memory_limit,
        "on_point": on_point,
    }
    if arguments.step is not None:
        build_step = load_function("profile", arguments.step, arguments=("n",))
        return [sweep("script", [(arguments.step, None, build_step)], _sizes(arguments.sizes), config, **options)]
    both: tuple[Literal["full", "core"], ...] = ("full", "core")
    analyses = [name for name in both if getattr(arguments, name)] or both
    return [run_memory_test(config, analysis, **options) for analysis in analyses]


def _sizes(text: str) -> list[int]:
    """Parse ``5k,10k,1M``, or ``5k..1M`` for twelve geometrically spaced sizes."""
    first, is_range, last = text.partition("..")
    numbers = [_SIZE.fullmatch(part.strip()) for part in ([first, last] if is_range else text.split(","))]
    sizes = [round(float(number[1]) * _FACTORS[number[2]]) for number in numbers if number is not None]
    if len(sizes) < len(numbers) or min(sizes) < 1 or (is_range and sizes[0] > sizes[1]):
        raise InputError(
            f"memkit profile --sizes {text}",
            got=repr(text),
            expected="positive numbers such as 5000 or 5k, separated by commas, or a range SMALLEST..LARGEST",
            fix="pass for example --sizes 5k,10k,20k or --sizes 5k..1M.",
        )
    return list(MemoryTestConfig(min_edges=sizes[0], max_edges=sizes[1]).num_edges) if is_range else sizes


def _line(name: str, point: ScalingPoint) -> str:
    said = {
        "ok": "" if point.peak_bytes is None else format_bytes(point.peak_bytes),
        "oom": f"out of memory{f', requested {format_bytes(point.requested_bytes)}' if point.requested_bytes else ''}",
        "skipped": "skipped: a smaller one ran out of memory",
        "error": f"failed: {point.peak_where}",
    }
    return f"{name}, {point.mode}, {point.size:,}: {said[point.status]}"


def _code(result: MemoryTestResult, gpus: list[str]) -> int:
    """Exit code for whether the named GPUs hold every size; the worst result counts, and a failed step most of all."""
    if any(point.status == "error" for curve in result.curves for point in curve.result.points):
        return FAILED
    if any(curve.result.doubts for curve in result.curves):
        return NOT_KNOWN
    rooms = [each.card.usable_bytes for each in result.capacities] if gpus else []
    predicted = [
        curve.predicted_bytes(point.mode, point.size) for curve in result.curves for point in curve.result.points
    ]
    if any((num_bytes or 0) > room for num_bytes in predicted for room in rooms):
        return NO
    return NOT_KNOWN if rooms and None in predicted else YES
