"""`memkit gpus`: show the table of GPUs, one GPU in full, or the GPUs that hold a size; or calibrate your own."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import groupby

from memkit._charts.text import align
from memkit._core.units import GIB, format_gib, parse_bytes
from memkit.cli._codes import NO, YES
from memkit.cli._terminal import WIDTH, say, say_json
from memkit.predict.gpus import GPU, all_gpus, find_gpu, write_gpus

_NUM_SHOWN = 12  # of the GPUs that hold a size
_LEGEND = {
    "observed": "a public report gives the memory that torch sees on this GPU",
    "derived": "derived from a related GPU; `memkit gpus NAME` says which",
    "calibrated": "measured, from the file of --calibrated",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("gpus", help="show the memory that torch can use on each GPU")
    parser.add_argument("name", nargs="?", help='a GPU such as "RTX 4090", or cuda; without it, all by size')
    parser.add_argument(
        "--need", metavar="SIZE", help="only GPUs with room for this size, such as 14GiB, smallest first"
    )
    parser.add_argument("--all", action="store_true", help="the whole table, one GPU per line")
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
        return _show_holding(gpus, arguments)
    if arguments.json:
        say_json([_record(gpu) for gpu in gpus])
    elif arguments.all:
        _show_table(gpus)
    else:
        _show_by_size(gpus)
    return YES


def _show_holding(gpus: list[GPU], arguments: argparse.Namespace) -> int:
    """Show the GPUs with room for a size, smallest first."""
    need_bytes = _need(arguments.need)
    holding = sorted((gpu for gpu in gpus if gpu.usable_bytes >= need_bytes), key=lambda gpu: gpu.usable_bytes)
    if arguments.json:
        say_json([_record(gpu) for gpu in holding])
    elif holding:
        say(f"{len(holding)} of {len(gpus)} GPUs hold {arguments.need}, the smallest first", tone="good")
        say()
        _show_table(holding if arguments.all else holding[:_NUM_SHOWN])
        if len(holding) > _NUM_SHOWN and not arguments.all:
            say(f"--all shows the other {len(holding) - _NUM_SHOWN} too")
    else:
        largest = max(gpus, key=lambda gpu: gpu.usable_bytes)
        room = f"the largest, {largest.name}, leaves {format_gib(largest.usable_bytes)}"
        say(f"no GPU in the table holds {arguments.need}: {room}", tone="bad")
    return YES if holding else NO


def _need(text: str) -> int:
    """Return a size; a bare number is refused, as in Python, because 24 would be meant as 24 GiB."""
    return parse_bytes(int(text) if text.strip().isdecimal() else text, name="--need", is_large=True)


def _show_one(gpu: GPU, *, as_json: bool) -> None:
    if as_json:
        say_json(_record(gpu))
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


def _show_by_size(gpus: list[GPU]) -> None:
    """Show all GPUs in few lines: by the number on the box, with the usable memory."""
    say("Memory that torch can use on each GPU, in GiB, by the number on its box.")
    say("No mark: observed in a public report. *: derived from a related GPU.")
    say()
    ordered = sorted(gpus, key=lambda gpu: (gpu.box_bytes, gpu.usable_bytes))
    for box_bytes, group in groupby(ordered, key=lambda gpu: gpu.box_bytes):
        entries = (f"{gpu.name} {gpu.usable_bytes / GIB:.2f}{'*' * (gpu.confidence == 'derived')}" for gpu in group)
        _show_packed(f"{box_bytes / GIB:3.0f} GB  ", entries)
    say()
    say('`memkit gpus "RTX 4090"` shows one with its sources, `--all` every figure,')
    say("`--need 14GiB` those that hold a size.")


def _show_packed(start: str, entries: Iterable[str]) -> None:
    """Show entries one after the other, without breaking any at the end of a line."""
    line = start
    for entry in entries:
        if len(line) + len(entry) >= WIDTH and line.strip():
            say(line.rstrip())
            line = " " * len(start)
        line += f"{entry}, "
    say(line.rstrip(", "))


def _show_table(gpus: list[GPU]) -> None:
    rows: list[tuple[str, ...]] = [("GPU (sizes in GiB)", "box", "torch sees", "context", "usable", "confidence")]
    for gpu in gpus:
        sizes = (f"{size / GIB:.2f}" for size in (gpu.total_bytes, gpu.context_bytes, gpu.usable_bytes))
        rows.append((gpu.name, f"{gpu.box_bytes / GIB:.0f}", *sizes, gpu.confidence))
    for line in align(rows, [False, True, True, True, True, False]):
        say(line)
    say()
    for word in dict.fromkeys(gpu.confidence for gpu in gpus):
        say(f"{word}: {_LEGEND[word]}")


def _record(gpu: GPU) -> dict[str, object]:
    return {**gpu.as_dict(), "usable": gpu.usable_bytes}
