"""Tables of clouds and voxels."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table


def clouds(result: dict[str, Any]) -> str:
    figures = result["figures"]
    of_process = figures["kdtree_process_peak_bytes"]
    rows = []
    for size, key in (("20k", "20000"), ("200k uniform", "200000"), ("200k lidar-like", None)):
        for way, row in figures[size].items():
            process = f"{of_process[key] / 1e6:.1f} MB" if way == "kdtree" and key else ""
            name = f"`torch.cdist`, {way}" if way == "all pairs" else f'`backend="{way}"`'
            rows.append([size, name, f"{row['peak_bytes'] / 1e6:,.1f} MB", f"{row['cpu_seconds']:.2f} s", process])
    return table(["points of each cloud", "way", "peak of tensors", "processor time", "peak of the process"], rows)


def clouds_far(result: dict[str, Any]) -> str:
    rows = [
        [f"{row['offset_m']:g} m", *(f"{row[way]:.1e}" for way in ("torch.cdist", "tiled", "pruned", "kdtree"))]
        for row in result["figures"]["far_away"]
    ]
    return table(["distance of the clouds from the origin", "`torch.cdist`", "tiled", "pruned", "k-d tree"], rows)


def clouds_oracles(result: dict[str, Any]) -> str:
    rows = [
        [name, f"{row['memkit']:.6f}", f"{row['other']:.6f}", f"{row['relative']:.0e}"]
        for name, row in result["figures"]["oracles"].items()
    ]
    return table(["metric", "memkit", "the other", "relative difference"], rows)


def voxel_losses(result: dict[str, Any]) -> str:
    figures = result["figures"]
    of_plain = figures["perceptual"]["4 x 64^3"]["plain"]["peak_bytes"]
    rows = [
        [
            way,
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
            f"1/{of_plain / row['peak_bytes']:.1f}",
            f"{figures['time_of_plain'][way]:.2f}",
        ]
        for way, row in figures["perceptual"]["4 x 64^3"].items()
    ]
    return table(["way", "peak, 4 x 4 x 64³", "of plain", "time, 2 x 4 x 48³"], rows)


def voxel_losses_growth(result: dict[str, Any]) -> str:
    rows = [
        [way, *(f"{num_bytes / 2**20:,.1f} MiB" for num_bytes in peaks.values())]
        for way, peaks in result["figures"]["growth"].items()
    ]
    return table(["way", "2 samples", "4", "8"], rows)


def voxel_losses_grids(result: dict[str, Any]) -> str:
    rows = [
        [f"{name}, {way}", f"{row['peaks_in_grids'][way]:.2f}", f"{row['time_of_plain'][way]:.2f}"]
        for name, row in result["figures"]["grids"].items()
        for way in ("plain", "memkit")
    ]
    return table(["loss", "peak", "time"], rows)


def voxel_augmentation(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{name}, {volume['occupancy']:.0%} occupied",
            way,
            f"{row['input_bytes'] / 1e6:.1f} MB",
            f"{row['peak_of_input']:.2f}",
            f"{row['time_ratio']:.2f}",
        ]
        for name, volume in result["figures"]["costs"].items()
        for way, row in volume["ways"].items()
    ]
    return table(["volume", "way", "input", "peak / input", "time / the usual form's"], rows)


def voxel_augmentation_inputs(result: dict[str, Any]) -> str:
    fuzz = result["figures"]["fuzz"]
    rows = [[name, f"{count:,}"] for name, count in fuzz["counts"].items()]
    return table(
        [f"{fuzz['num_inputs']:,} inputs", "number"], [*rows, ["anything else", str(len(fuzz["anything_else"]))]]
    )


RENDERERS = (
    clouds,
    clouds_far,
    clouds_oracles,
    voxel_losses,
    voxel_losses_growth,
    voxel_losses_grids,
    voxel_augmentation,
    voxel_augmentation_inputs,
)
