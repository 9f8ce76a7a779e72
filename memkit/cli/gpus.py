"""`memkit gpus`: the table of cards, one card in full, the cards that hold a size, or a calibration of your own."""

from __future__ import annotations

import argparse
import json

from memkit._charts.text import align
from memkit._core.units import GIB, format_gib, parse_bytes
from memkit.cli._codes import NO, YES
from memkit.cli._terminal import say, say_all
from memkit.predict.gpus import GPU, all_gpus, find_gpu, write_gpus


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("gpus", help="show what torch can use of each card")
    parser.add_argument("name", nargs="?", help='a GPU such as "RTX 4090", or cuda; without it, the table of all')
    parser.add_argument(
        "--need", metavar="SIZE", help="only GPUs with room for this size, such as 14GiB, smallest first"
    )
    parser.add_argument("--calibrated", metavar="FILE", help="prefer the GPUs of this file to the built-in table")
    parser.add_argument(
        "--calibrate", metavar="FILE", help="measure the GPU NAME (cuda) and write the result to this file"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output, sizes in bytes")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.calibrate is not None:
        if arguments.need is not None or arguments.calibrated is not None:
            arguments.parser.error("--calibrate measures one GPU: omit --need and --calibrated")
        from memkit.predict.calibration import calibrate_gpu  # imports torch

        gpu = calibrate_gpu(arguments.name or "cuda")
        write_gpus(arguments.calibrate, [gpu])
        _show_one(gpu, as_json=arguments.json)
        return YES
    if arguments.name is not None:
        if arguments.need is not None:
            arguments.parser.error("--need searches all GPUs: omit the name")
        _show_one(find_gpu(arguments.name, calibrated=arguments.calibrated), as_json=arguments.json)
        return YES
    gpus = list(all_gpus(arguments.calibrated))
    if arguments.need is not None:
        need_bytes = _need(arguments.need)
        gpus = sorted((gpu for gpu in gpus if gpu.usable_bytes >= need_bytes), key=lambda gpu: gpu.usable_bytes)
    if not gpus:
        largest = max(all_gpus(arguments.calibrated), key=lambda gpu: gpu.usable_bytes)
        room = f"the largest, {largest.name}, leaves {format_gib(largest.usable_bytes)}"
        say(f"memkit: no card of the table holds {arguments.need}: {room}", is_error=True)
        if arguments.json:
            _show_table(gpus, as_json=True)
        return NO
    _show_table(gpus, as_json=arguments.json)
    return YES


def _need(text: str) -> int:
    """Return a size; a bare number is refused as in Python, because 24 means 24 GiB."""
    return parse_bytes(int(text) if text.strip().isdecimal() else text, name="--need", is_large=True)


def _show_one(gpu: GPU, *, as_json: bool) -> None:
    if as_json:
        say_all(json.dumps(_record(gpu), indent=2))
        return
    (lowest, highest), (least, most) = gpu.total_interval, gpu.context_interval
    lines = {
        "name": gpu.name,
        "vendor": f"{gpu.vendor}, architecture {gpu.architecture}",
        "on the box": f"{gpu.box_bytes / GIB:.0f} GiB",
        "torch sees": f"{lowest / GIB:.2f} to {format_gib(highest)}",
        "driver and libraries": f"{least / GIB:.2f} to {format_gib(most)}",
        "usable": format_gib(gpu.usable_bytes),
        "confidence": gpu.confidence,
        "source": f"{gpu.source} ({gpu.date})",
    }
    for name, text in lines.items():
        say(f"{name:<21} {text}")


def _show_table(gpus: list[GPU], *, as_json: bool) -> None:
    if as_json:
        say_all(json.dumps([_record(gpu) for gpu in gpus], indent=2))
        return
    rows: list[tuple[str, ...]] = [("card (sizes in GiB)", "box", "torch sees", "context", "usable", "confidence")]
    for gpu in gpus:
        sizes = (f"{size / GIB:.2f}" for size in (gpu.total_bytes, gpu.context_bytes, gpu.usable_bytes))
        rows.append((gpu.name, f"{gpu.box_bytes / GIB:.0f}", *sizes, gpu.confidence))
    for line in align(rows, [False, True, True, True, True, False]):
        say(line)


def _record(gpu: GPU) -> dict[str, object]:
    return {**gpu.as_dict(), "usable": gpu.usable_bytes}
