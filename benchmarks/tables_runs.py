"""Tables of what whole runs did: scripts on the virtual card, loops, kills."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table


def dryrun_scripts(result: dict[str, Any]) -> str:
    rows = [
        [
            script["script"],
            f"{script['peak_bytes'] / 2**20:,.0f} MiB",
            f"{script['reserved_bytes'] / 2**20:,.0f} MiB",
            "equal" if script["is_equal"] else "differ",
            f"{script['activations_ratio']:.3f}",
            script["differs"] or "nothing",
        ]
        for script in result["figures"]["scripts"]
    ]
    header = ["script", "peak", "reserved", "parameters, gradients, optimizer state", "activations, card to CPU"]
    return table([*header, "what the card takes otherwise"], rows)


def kill_nine(result: dict[str, Any]) -> str:
    versions = result["environment"]["versions"]
    rows = []
    for name, row in result["figures"].items():
        library, _, rest = name.partition(",")
        version = versions.get(library.lower())
        shown = f"{library} {version}{',' + rest if rest else ''}" if version and library != "memkit" else name
        rows.append([shown, *(str(row[key]) for key in ("kills_in_save", "unreadable", "temporary_files_left"))])
    return table(["way", "killed in a save", "states that could not be read", "temporary files left"], rows)


def loop_semantics(result: dict[str, Any]) -> str:
    libraries = {name: result["figures"][name.lower()] for name in ("memkit", "accelerate", "Lightning")}
    rows = {
        "10 batches, one skipped by the loss scaler: optimiser steps / schedule steps": [
            f"{each['skipped_step']['optimizer_steps']} / {each['skipped_step']['schedule_steps']}"
            for each in libraries.values()
        ],
        "52 samples, 4 x 4 to a step: gradient of the last step (1 is right)": [
            f"{each['last_group']['last_group_ratio']:.2f}" for each in libraries.values()
        ],
        "stopped after 9 of 16 shuffled batches: samples of that epoch never trained on": [
            f"{each['resume']['never_trained_on']} of {each['resume']['trained_on']}" for each in libraries.values()
        ],
        "the same weights as without the stop": [
            "yes" if each["resume"]["same_weights"] else "no" for each in libraries.values()
        ],
    }
    return table(["", *libraries], [[name, *cells] for name, cells in rows.items()])


def loop_cost(result: dict[str, Any]) -> str:
    names = {
        "by hand again, over by hand": "the loop by hand, over another one",
        "loop, over train_step by hand": "`MemoryEfficientTrainLoop`, over `train_step` in a loop by hand",
        "loop with on_oom='raise', over by hand": '... with `on_oom="raise"`, over the loop by hand',
        "loop, over by hand": "`MemoryEfficientTrainLoop`, over the loop by hand",
        "lightning, over by hand": "Lightning, over the loop by hand",
    }
    cost = result["figures"]["cost"]
    return table(["", "ratio"], [[text, f"{cost[name]['ratio']:.3f}"] for name, text in names.items()])


def trainer_parts(result: dict[str, Any]) -> str:
    figures = dict(result["figures"])
    figures.pop("parameters_bytes")
    plain = figures["plain"]["peak_bytes"]
    rows = [
        [
            "`Trainer`" if name == "plain" else name,
            f"{row['peak_bytes'] / 1e6:.1f} MB"
            + ("" if name == "plain" else f" ({row['peak_bytes'] / plain - 1:+.0%})"),
            f"{row['gradient_error']:.1g}",
            f"{row['time_ratio']:.2f}",
        ]
        for name, row in figures.items()
    ]
    return table(["step", "peak", "gradient's error", "time"], rows)


def silence(result: dict[str, Any]) -> str:
    figures = result["figures"]
    verdicts = figures["verdicts"]
    rows = [
        ["steps, each split and judged", f"{figures['num_steps']:,}"],
        ["parts train something else than the whole batch", f"{figures['num_unequal']:,}"],
        ["... of these warned of", f"{verdicts.get('unequal, told', 0):,}"],
        ["... refused", f"{verdicts.get('unequal, refused', 0):,}"],
        ["... silent", f"{figures['num_silent']:,}"],
        ["raw errors", f"{figures['num_crashes']:,}"],
        ["equal", f"{figures['num_equal']:,}"],
        ["... warned of or refused all the same", f"{figures['num_false_alarms']:,}"],
    ]
    return table(["", "steps"], rows)


def split_check(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{found['look_bytes'] / 2**20:,.0f} of {found['plain_bytes'] / 2**20:,.0f} MiB",
            f"{found['look_flops'] / found['plain_flops']:.2f}",
            f"{found['time_ratio']:.2f}",
        ]
        for name, found in result["figures"].items()
    ]
    return table(
        ["step", "peak of a look, of a plain step", "operations, in plain steps", "time, in plain steps"], rows
    )


RENDERERS = (trainer_parts, dryrun_scripts, kill_nine, loop_cost, loop_semantics, silence, split_check)
