"""Tables of what makes a step fit: treatments of blocks, plans, scaling laws, advice."""

from __future__ import annotations

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
