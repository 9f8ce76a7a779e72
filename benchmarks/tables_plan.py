"""Tables of what makes a step fit: treatments of blocks, plans, scaling laws, advice."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.markdown import table


def block_treatments(result: dict[str, Any]) -> str:
    rows = []
    for model, ways in result["figures"]["cases"].items():
        for way, row in ways.items():
            name = way if way == "keep" or way.startswith("torch") else f"**{way}**"
            if "peak_bytes" not in row:
                rows.append([model, name, row["error"].partition("!")[0].strip(), "", "", "", ""])
                continue
            flops = row.get("backward_over_forward_flops")
            rows.append(
                [
                    model,
                    name,
                    f"{row['peak_bytes'] / 1e6:.1f} MB",
                    f"{row['saved_bytes'] / 1e6:.1f} MB",
                    f"{flops:.2f}" if flops else "",
                    "yes" if row["is_bit_equal"] else "no",
                    f"{row['time_ratio']:.2f}",
                ]
            )
    return table(["model", "treatment", "peak", "saved", "backward / forward FLOPs", "bit-equal", "time"], rows)


def s0_sweep(result: dict[str, Any]) -> str:
    rows = [
        [name.removeprefix("edge MLP "), *(f"{size / 2**30:.2f}" for size in peaks.values())]
        for name, peaks in result["figures"]["bytes_at_one_million_edges"].items()
        if name.startswith("edge MLP")
    ]
    return table(["MLP", "training", "inference"], rows)


_ADVISED = {
    "language": "transformer, text",
    "unet": "3D U-Net, MNI152 brain",
    "denoiser": "convolutions, a slice of it",
    "edge_mlp": "edge MLP, fsaverage5",
    "residual_net": "residual net with BatchNorm, digits",
    "vae": "variational autoencoder, digits",
    "point_net": "point net, fsaverage5",
    "wide_mlp": "wide MLP, foreach AdamW",
}


def advice(result: dict[str, Any]) -> str:
    def spread(rows: list[dict[str, Any]], key: str) -> str:
        errors = [row[key] for row in rows if row.get(key) is not None]
        return f"{statistics.median(errors):.1%} ({max(errors):.1%})" if errors else ""

    table_rows = []
    for model, figures in result["figures"]["models"].items():
        verified = [row for row in figures["advice"].values() if row["status"] == "verified"]
        best = max(verified, key=lambda row: row["allocator_saved_bytes"])
        table_rows.append(
            [
                _ADVISED[model],
                f"{figures['peak_bytes'] / 1e6:.1f} MB",
                str(len(verified)),
                f"{best['name']}: {best['allocator_saved_bytes'] / 1e6:.1f} MB",
                f"{max(row['saved_off_by'] for row in verified):.1%}",
                spread(verified, "allocator_off_by"),
                spread(verified, "naive_off_by"),
            ]
        )
    header = ["model", "plain peak", "verified", "saves most, by the allocator", "live tensors, largest error"]
    return table(
        [*header, "with what kernels take inside, median (largest)", "by subtraction, median (largest)"], table_rows
    )


def scaling_law(result: dict[str, Any]) -> str:
    rows = []
    for family, modes in result["figures"]["families"].items():
        row = modes["train"]
        if row["tier"] != "structural":
            rows.append([family, row["n"], row["tier"], "", f"{row['seconds']:.1f} s", "", "", ""])
            continue
        real = row.get("predicted_over_real")
        inside = row.get("real_is_in_interval")
        rows.append(
            [
                family,
                row["n"],
                f"structural, order {row['order']}",
                f"{row['predicted_over_dry_run']:.7f}",
                f"{row['seconds']:.1f} s",
                f"{row['secant_over_actual']:.3f}",
                "" if real is None else f"{real:.7f}",
                "" if inside is None else "yes" if inside else "no",
            ]
        )
    header = ["step", "n", "law", "law over dry run, 100 times as large", "processor time", "secant over dry run"]
    return table([*header, "law over a real run that fits", "real run within the interval"], rows)


def planner(result: dict[str, Any]) -> str:
    rows = []
    for model, row in result["figures"].items():
        budgets = row["budgets"]
        rows.append(
            [
                model,
                f"{sum(each['fits'] for each in budgets)} of {len(budgets)}",
                ", ".join(f"{each['time_over_best']:.2f}" for each in budgets),
                ", ".join(f"{each['by_prediction_over_best']:.2f}" for each in budgets),
                f"{max(each['gradient_error'] for each in budgets):.1e}",
            ]
        )
    header = ["model", "budgets that held", "time over the best that fits, `measure=True`", "by predicted times alone"]
    return table([*header, "gradient error, float64"], rows)


RENDERERS = (block_treatments, s0_sweep, advice, scaling_law, planner)
