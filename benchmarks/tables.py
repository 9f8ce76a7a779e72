"""Write the docs' tables from the committed result files.

A table stands between ``<!-- result: CASE -->`` and ``<!-- end -->``; ``CASE.part`` is another table of that case's
file. Run: python -m benchmarks.tables
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    tables_acceptance,
    tables_patches,
    tables_peers,
    tables_plan,
    tables_runs,
    tables_versions,
    tables_voxel,
)
from benchmarks.markdown import table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_TABLE = re.compile(r"(<!-- result: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tail_group(result: dict[str, Any]) -> str:
    versions = result["environment"]["versions"]
    names = {"plain": "plain loop, `loss / steps`", "memkit": "memkit"}
    rows = [
        [
            names.get(name, f"{name} {versions.get(name)}"),
            f"{row['whole_groups_mean_ratio']:.4f}",
            f"{row['last_group_ratio']:.4f}",
        ]
        for name, row in result["figures"].items()
    ]
    return table(["library", "whole groups", "last group"], rows)


def megabytes(num_bytes: int, of: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" + (f" ({num_bytes / of - 1:+.0%})" if num_bytes != of else "")


def wrapper_memory(result: dict[str, Any]) -> str:
    models = {"transformer": "transformer, 12 blocks", "unet": "3D U-Net"}
    rows = [
        [
            models[task],
            setting,
            *(megabytes(row[key], settings["plain"][key]) for key in ("peak_bytes", "activation_bytes", "saved_bytes")),
            f"{row['backward_flops'] / row['forward_flops']:.2f}",
            f"{row['time_ratio']:.2f}",
        ]
        for task, settings in result["figures"].items()
        for setting, row in settings.items()
    ]
    header = ["model", "setting", "peak", "activations", "saved for backward", "backward / forward FLOPs", "time"]
    return table(header, rows)


def wrapper_overhead(result: dict[str, Any]) -> str:
    figures = result["figures"]
    rows = [
        [
            f"{name} micro-batches",
            *(
                f"{row[f'{mode}_us_per_microbatch']:.0f} us ({row[f'{mode}_ratio'] - 1:+.1%})"
                for mode in ("raise", "exact")
            ),
        ]
        for name, row in figures["overhead"].items()
    ]
    reads = [[name, str(num)] for name, num in figures["host_reads"].items()]
    overhead = table(["step", 'per micro-batch, `on_oom="raise"`', 'per micro-batch, `on_oom="exact"`'], rows)
    return overhead + "\n" + table(["loss", "host reads per step"], reads)


def step_faults(result: dict[str, Any]) -> str:
    figures = result["figures"]
    rows = []
    for name, ends in figures["faults"].items():
        row = figures["memory"][name]["equal"]
        torn = [f"{ends[way]['torn']} of {ends[way]['faults']}" for way in ("plain", "guarded", "in chunks")]
        peaks = [f"{row[f'{way}_peak']:.2f}" for way in ("plain", "guarded", "in_chunks")]
        times = [f"{row[f'{way}_time_ratio']:.2f}" for way in ("guarded", "in_chunks")]
        rows.append([name, *torn, " / ".join(peaks), " / ".join(times)])
    header = [
        "step",
        "plain: torn of faults",
        "wrapper: torn",
        "`atomic_steps`: torn",
        "peaks of the three",
        "times of the last two",
    ]
    return table(header, rows)


def recovery_search(result: dict[str, Any]) -> str:
    figures = result["figures"]
    faults = [
        [name, str(row["operators"]), str(row["faults"]), str(row["cut"]), str(len(row["wrong"]))]
        for name, row in figures["faults"].items()
    ]
    interrupts = [
        [name, str(row["interrupts"]), str(row["done"]), str(row["interrupts"] - row["done"]), str(len(row["wrong"]))]
        for name, row in figures["interrupts"].items()
    ]
    first = table(
        ["model, optimizer", "operators", "faults, in three threads", "runs with other parts", "wrong"], faults
    )
    second = table(["model, optimizer", "interrupts", "step done", "step undone", "wrong"], interrupts)
    return first + "\n" + second


def hygiene(result: dict[str, Any]) -> str:
    rows = [
        [name, row["claim"], f"{row['saving']:.0%}", f"{row['bad_bytes'] / 1e6:.1f} MB", row["note"]]
        for name, row in result["figures"].items()
    ]
    return table(["habit", "claimed", "saves", "of", "note"], rows)


def track_cost(result: dict[str, Any]) -> str:
    sizes = result["figures"]
    ways = [way for way in next(iter(sizes.values()))["ways"] if way != "bare"]
    rows = [
        [
            f"`{way}`" if way.startswith("track") else way,
            *(
                f"{size['ways'][way]['steps_ratio']:.2f} ({size['ways'][way]['whole_ratio']:.2f})"
                for size in sizes.values()
            ),
        ]
        for way in ways
    ]
    return table(
        ["way", *(f"{name}, {size['ways']['bare']['ms_per_step']:.1f} ms" for name, size in sizes.items())], rows
    )


def first_step(result: dict[str, Any]) -> str:
    def ooms(row: dict[str, Any]) -> str:
        return str(row["num_ooms"][0]) if "num_ooms" in row else "died"

    cases = result["figures"]["cases"]
    shares = [f"{limit['share']:.0%}" for limit in next(iter(cases.values()))["limits"]]
    rows = [
        [name, way, *(ooms(limit[key]) for limit in case["limits"])]
        for name, case in cases.items()
        for way, key in (("foreseen", "with"), ("tried", "without"))
    ]
    return table(["model", "size", *shares], rows)


def edge_mlp(result: dict[str, Any]) -> str:
    rows = []
    for case in result["figures"]["cases"]:
        what = case["reduce"] + (", gathered" if case["gather"] else "")
        name = f"{case['hidden']}, {case['edges']:,} edges, {what}"
        for way, row in case["ways"].items():
            peak = f"{row['peak_bytes'] / 2**20:,.1f} MiB"
            error = f"{row['gradient_error']:.1e}" if "gradient_error" in row else ""
            rows.append([name, way, peak, f"{row['ratio']:.2f}" if "ratio" in row else "", error])
            name = ""
    return table(["hidden layers, edges, reduction", "way", "peak", "time", "gradient error"], rows)


def chunk_budget(result: dict[str, Any]) -> str:
    rows = []
    for case in result["figures"]["cases"]:
        name = f"{case['edges']:,} edges, {case['reduce']}" + (", gathered" if case["gather"] else "")
        for way, row in case["ways"].items():
            plan = [f"{row[key]:,}" if key in row else "" for key in ("chunk_size", "num_chunks", "num_kept")]
            peaks = [f"{row[key] / 2**20:,.2f} MiB" for key in ("peak_bytes", "first_peak_bytes")]
            rows.append([name, way, *plan, *peaks, f"{row['ratio']:.2f}"])
            name = ""
    return table(["edges, reduction", "budget", "rows", "chunks", "kept", "peak", "first call", "time"], rows)


def chunked_loss(result: dict[str, Any]) -> str:
    cases = {"MLP, 50,000 rows": result["figures"]["rows"]}
    for case in result["figures"]["cross_entropy"]:
        name = f"{case['rows']:,} tokens of width {case['width']}, {case['num_classes']:,} words"
        cases[name] = case["modes"]
    rows = []
    for name, modes in cases.items():
        for number, (way, row) in enumerate(modes.items()):
            peak, ratio = f"{row['peak_bytes'] / 2**20:,.1f} MiB", f"{row['time_ratio']:.2f}"
            rows.append(["" if number else name, way, peak, ratio, f"{row['gradient_difference']:.0e}"])
    return table(["loss", "way", "peak", "time", "gradients differ by"], rows)


def tiled(result: dict[str, Any]) -> str:
    figures = result["figures"]
    rows = []
    for way, row in figures["inference"].items():
        trained = figures["training"].get(way)
        training = [f"{trained['peak_bytes'] / 1e6:.0f} MB", f"{trained['time_ratio']:.2f}"] if trained else ["", ""]
        error = "" if row["error"] is None else f"{row['error']:.0e}"
        rows.append([way, *training, f"{row['peak_bytes'] / 1e6:.0f} MB", f"{row['time_ratio']:.2f}", error])
    return table(["way", "training: peak", "time", "inference: peak", "time", "error"], rows)


def manager_cost(result: dict[str, Any]) -> str:
    loops = result["figures"]["loops"]
    ways = {"memory only": "memory only", "log file": "log file", "reset_peaks": "`reset_peaks=True`"}
    rows = [
        [
            name.replace("step()", "`step()`").replace(", ", " and "),
            *(
                f"{loops[f'{way}: {name}']['extra_us']:.0f} us ({loops[f'{way}: {name}']['ratio'] - 1:.1%})"
                for way in ways
            ),
        ]
        for name in ("step()", "3 phases, step()", "4 phases, step()")
    ]
    return table(["in each training step", *ways.values()], rows)


def sparse_voxels(result: dict[str, Any]) -> str:
    convolutions = [
        [
            name,
            f"{row['occupancy']:.2%}",
            f"{row['dense']['peak_bytes'] / 1e6:.1f} MB",
            f"{row['sparse']['peak_bytes'] / 1e6:.2f} MB + {row['neighbours']['bytes'] / 1e6:.2f} MB",
            f"{row['sparse']['ratio']:.3f} ({row['neighbours']['ratio']:.3f})",
            f"{row['error_float64']:.0e}",
        ]
        for name, row in result["figures"]["convolution"].items()
    ]
    header = ["surface", "occupied", "dense, peak", "sparse, peak + neighbours", "time (neighbours)", "error, float64"]
    modes = [
        [
            name if way == "dense" else "",
            f"`{way}`" if way == row["mode"] else f"`{way}`: `{row['mode']}`",
            f"{row['computed']:.0%}",
            f"{row['peak_bytes'] / 1e6:.0f} MB",
            f"{row['ratio']:.2f}",
            f"{row['error']:.0e}",
        ]
        for name, ways in result["figures"]["modes"].items()
        for way, row in ways.items()
    ]
    return table(header, convolutions) + "\n" + table(["network", "mode", "runs over", "peak", "time", "error"], modes)


def resolution_levels(result: dict[str, Any]) -> str:
    figures = result["figures"]
    levels = [[str(level), f"{num:,}"] for level, num in enumerate(figures["num_active_by_level"])]
    times = [[name, f"{ms:.0f} ms"] for name, ms in figures["ms"].items()]
    return table(["level", "occupied voxels"], levels) + "\n" + table(["all levels by", "time"], times)


def leak_watch(result: dict[str, Any]) -> str:
    summary, costs = result["figures"]["summary"], result["figures"]["costs"]
    rows = [
        ["planted leaks named", f"{summary['named']} of {summary['planted']}"],
        ["reports of something else in those scripts", str(summary["other_reports"])],
        ["clean scripts with an alarm", f"{summary['false_alarms']} of {summary['clean']}"],
        [f"a check among {costs['objects']:,} Python objects", f"{costs['check_without_suspects_ms']:.0f} ms"],
        ["of it one garbage collection", f"{costs['collect_ms']:.0f} ms"],
        ["a check while something grows", f"{costs['check_with_a_leak_ms']:.0f} ms"],
    ]
    return table(["what", "figure"], rows)


def grid_sampler(result: dict[str, Any]) -> str:
    scenes = result["figures"]
    exact = {"loop", "global sort, float64", "global sort, int64"}
    ways = [way for way in next(iter(scenes.values()))["ms"] if way not in ("memkit", "index, cold")]

    def row(name: str, key: str, note: str) -> list[str]:
        cells = [f"{each['ms'][key]:.1f} ms" for each in scenes.values()]
        if key in ways:
            pairs = zip(cells, scenes.values(), strict=True)
            cells = [f"{cell} ({each['times_faster'][key]:#.3g})".replace(".)", ")") for cell, each in pairs]
        return [name, note, *cells]

    rows = [row("memkit", "memkit", "yes")]
    rows += [row(way, way, "" if way.endswith("pass") else "yes" if way in exact else "no") for way in ways]
    rows += [row("`GridIndex.from_coords`, once", "index, cold", "")]
    rows.append(["memory of a draw", "", *(f"{each['extra_bytes'] / 1e6:.1f} MB" for each in scenes.values())])
    return table(["way", "random sample", *scenes], rows)


def budget_batches(result: dict[str, Any]) -> str:
    ways: dict[str, list[str]] = {}
    for case in result["figures"]["cases"].values():
        for way, row in case.items():
            cell = f"{row['num_batches']:.0f}"
            if "fill" in row:
                cell += f" ({row['fill']:.1%} full, spread {row['spread']:.2f})"
            ways.setdefault(way, []).append(cell)
    return table(["way", *result["figures"]["cases"]], [[way, *cells] for way, cells in ways.items()])


def density_training(result: dict[str, Any]) -> str:
    figures = result["figures"]
    modes = [
        [f"`{mode}`", f"{row['peak_bytes'] / 1e6:.0f} MB", f"{row['time_ratio']:.2f}", f"{row['gradient_error']:.0e}"]
        for mode, row in figures["modes"].items()
    ]
    scores = [
        [
            way,
            *(f"{row[each]['right']:.1%} ({row[each]['right_if_dense']:.1%})" for each in ("dense", "half", "single")),
            f"{row['single']['same']:.1%}",
        ]
        for way, row in figures["training"].items()
    ]
    shares = [
        [f"{int(num_points):,}", f"{row['sampling_ms']:.1f} ms", f"{row['step_ms']:.0f} ms", f"{row['share']:.1%}"]
        for num_points, row in figures["sampling"].items()
    ]
    return (
        table(["mode", "peak of a step", "time", "gradient against joint"], modes)
        + "\n"
        + table(["trained on", "dense", "half", "single", "single as dense"], scores)
        + "\n"
        + table(["points", "sampling", "step", "share"], shares)
    )


def dry_run(result: dict[str, Any]) -> str:
    figures, versions = result["figures"], result["environment"]["versions"]
    truth, large = figures["truth"], figures["70B"]
    packages = {"memkit": "this", "MemTracker": f"torch {versions['torch']}, MemTracker"}
    scores = [
        [
            packages.get(tool, f"{tool} {versions.get(tool)}"),
            f"{score['answers']} of {truth['num_models']}",
            str(score["within_64_bytes"]),
            f"{score['median_error']:.2%}",
            f"{score['largest_error']:.0%}",
            f"{truth['interval_holds']} of {truth['num_models']}" if tool == "memkit" else "no interval",
        ]
        for tool, score in truth["scores"].items()
    ]
    speeds = [
        [name, f"{row['num_operators_in_two_steps']:,}", f"{row['ms_per_operator']:.3f} ms", f"{row['seconds']:.2f} s"]
        for name, row in figures["speed"].items()
    ]
    memory = large["highest_resident_bytes_of_the_process"] / 1e9
    parameters = f"{large['num_parameters'] / 1e9:.1f} billion parameters, {memory:.2f} GB of host memory"
    speeds.append([parameters, "", "", f"{large['seconds']:.1f} s"])
    header = ["tool", "answers", "within 64 bytes", "median error", "largest", "peak inside the interval"]
    return table(header, scores) + "\n" + table(["step", "operators, two steps", "each", "in all"], speeds)


def public_runs(result: dict[str, Any]) -> str:
    rows = [
        [
            name.replace("_", " ").replace("medium", "sequences of"),
            row["precision"],
            f"{row['gpu_peak_bytes']:,}",
            f"{row['peak_bytes'] - row['gpu_peak_bytes']:+,}" if row["peak_bytes"] != row["gpu_peak_bytes"] else "0",
            f"{row['gpu_reserved_bytes']:,}",
            f"{row['reserved_bytes'] / row['gpu_reserved_bytes'] - 1:+.2%}"
            if row["reserved_bytes"] != row["gpu_reserved_bytes"]
            else "0",
            f"{row['num_allocations_alike']:,} of {row['num_gpu_allocations']:,}" if row["num_gpu_allocations"] else "",
        ]
        for name, row in result["figures"].items()
    ]
    header = ["run", "precision", "GPU's peak", "memkit", "GPU's reserve", "memkit", "allocations in the same order"]
    return table(header, rows)


def liger_rows(result: dict[str, Any]) -> str:
    rows = [
        [
            name.partition(", ")[0].replace("_", " "),
            name.partition(", ")[2],
            f"{row['num_as_printed']} of {row['num_rows']}",
            f"{row['smallest_peak_bytes'] / 2**20:,.0f} to {row['largest_peak_bytes'] / 2**20:,.0f} MiB",
        ]
        for name, row in result["figures"].items()
    ]
    return table(["operator", "card", "rows met in every digit", "peaks"], rows)


RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    render_case.__name__: render_case
    for render_case in (
        tail_group,
        wrapper_memory,
        wrapper_overhead,
        step_faults,
        recovery_search,
        hygiene,
        track_cost,
        first_step,
        edge_mlp,
        chunk_budget,
        chunked_loss,
        tiled,
        manager_cost,
        leak_watch,
        sparse_voxels,
        resolution_levels,
        grid_sampler,
        budget_batches,
        density_training,
        dry_run,
        public_runs,
        liger_rows,
        *tables_acceptance.RENDERERS,
        *tables_peers.RENDERERS,
        *tables_plan.RENDERERS,
        *tables_runs.RENDERERS,
        *tables_versions.RENDERERS,
        *tables_voxel.RENDERERS,
    )
}


def load(case: str) -> dict[str, Any]:
    """A case's result file; of "all" every one, by its case."""
    if case == "all":
        return {path.stem: load(path.stem) for path in RESULTS.glob("*.json")}
    return json.loads((RESULTS / f"{case}.json").read_text())


def render(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        result = load(match[2].partition(".")[0])
        return match[1] + RENDERERS[match[2].replace(".", "_")](result) + match[3]

    return tables_patches.render(_TABLE.sub(replace, text))


def main() -> None:
    for path in DOCS:
        path.write_text(render(path.read_text()))


if __name__ == "__main__":
    main()
