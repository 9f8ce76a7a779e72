"""`memkit presets`: show the table of presets, or one preset with its estimated memory."""

from __future__ import annotations

import argparse
import warnings

from memkit._charts.text import align
from memkit._core.units import format_gib
from memkit.cli._codes import YES
from memkit.cli._terminal import say, say_json
from memkit.predict.config import TrainingConfig
from memkit.predict.formula import estimate_by_formula
from memkit.predict.presets import PRESETS, get_preset_config
from memkit.predict.summary import print_config_summary


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("presets", help="show the presets, or one of them in full")
    parser.add_argument("name", nargs="?", help=f"{', '.join(PRESETS)}; without it, the table of all")
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="the nominal memory of the GPU")
    parser.add_argument("--json", action="store_true", help="machine-readable output, sizes in bytes")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.name is not None:
        _show_one(arguments.name, arguments.gpu_memory, as_json=arguments.json)
    elif arguments.gpu_memory is not None:
        arguments.parser.error("--gpu-memory needs the name of a preset")
    else:
        _show_table(as_json=arguments.json)
    return YES


def _show_one(name: str, gpu_memory_gb: float | None, *, as_json: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = get_preset_config(name, gpu_memory_gb)
    for warning in caught:
        say(f"memkit: warning: {warning.message}", is_error=True)
    if as_json:
        say_json(_record(config))
    else:
        print_config_summary(config)


def _show_table(*, as_json: bool) -> None:
    configs = {name: get_preset_config(name) for name in PRESETS}
    if as_json:
        say_json([{"cards": PRESETS[name].cards, **_record(config)} for name, config in configs.items()])
        return
    rows: list[tuple[str, ...]] = [("preset", "GPUs", "batch", "accumulation", "channels", "estimated total")]
    for name, config in configs.items():
        numbers = (config.batch_size, config.gradient_accumulation_steps, config.model_channels)
        total = format_gib(estimate_by_formula(config).required_bytes)
        rows.append((name, PRESETS[name].cards, *map(str, numbers), total))
    for line in align(rows, [False, False, True, True, True, True]):
        say(line)


def _record(config: TrainingConfig) -> dict[str, object]:
    return {"config": config.model_dump(), "estimate": estimate_by_formula(config).as_dict()}
