"""Virtual cards against recorded GPU runs of convolutional nets: what they reserved, and the least they ran in.

The rows are public: xMem (Stone-ResearchLife/xMem, Middleware 25) trained models of torchvision for four steps on
three cards, with PyTorch 2.6 and cuDNN 9.1 in float32, and recorded the most memory in use, whether it ran out, and
runs under caps. They are read from `recorded_gpu_runs.json` in a folder outside of this repository: a list "rows" of
records with the keys used below.

Run: python -m benchmarks.cases.recorded_convolutions FOLDER   (1.5 minutes; needs torchvision)
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import memkit as mk
from benchmarks.recorded import held, let_torchvision_be_imported, read_rows, roomy, told_on
from benchmarks.result import write_result
from memkit._core.units import MIB
from memkit.predict.gpus import GPU

MODELS = {  # torchvision's function, number of classes
    "ConvNeXtBase": ("convnext_base", 1000),
    "ConvNeXtTiny": ("convnext_tiny", 1000),
    "MnasNet": ("mnasnet1_0", 10),
    "MobeNetV3Large": ("mobilenet_v3_large", 10),
    "MobeNetV3Small": ("mobilenet_v3_small", 10),
    "MobileNetV2": ("mobilenet_v2", 1000),
    "RegNetX32GF": ("regnet_x_32gf", 1000),
    "RegNetX400MF": ("regnet_x_400mf", 1000),
    "RegNetY32GF": ("regnet_y_32gf", 1000),
    "RegNetY400MF": ("regnet_y_400mf", 1000),
    "ResNet101": ("resnet101", 1000),
    "ResNet152": ("resnet152", 1000),
    "ResNet50": ("resnet50", 1000),
    "VGG11": ("vgg11", 1000),
    "VGG16": ("vgg16", 1000),
    "VGG19": ("vgg19", 1000),
}
NUM_STEPS, SIDE = 4, 86


def train(row: dict[str, Any]) -> None:
    """The recorded loop. Where the place of `zero_grad` was not recorded, it is after the step, as in the early code.

    Between forward and backward it cannot be: in one of these runs (ConvNeXtBase, RMSprop) all that the forward keeps
    and the old gradients together are more than what was reserved.
    """
    import torchvision

    function, num_classes = MODELS[row["model"]]
    mode = 2 if row["zero_grad_mode"] is None else row["zero_grad_mode"]
    model = getattr(torchvision.models, function)(weights=None, num_classes=num_classes).cuda().train()
    optimizer = getattr(torch.optim, row["optimizer"])(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        if mode == 0:
            optimizer.zero_grad()
        inputs, labels = torch.zeros(row["batch"], 3, SIDE, SIDE), torch.zeros(row["batch"], dtype=torch.long)
        inputs, labels = inputs.cuda(), labels.cuda()  # bound until the next ones are there, as in the recorded loop
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, labels)
        if mode == 1:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs.max(1)
        if mode == 2:
            optimizer.zero_grad()


def card_of(row: dict[str, Any]) -> GPU:
    name = row["gpu"]
    return mk.find_gpu(" ".join(name.split()[:2]) if name.startswith("RTX") else "A100 40GB")


def figures_of(row: dict[str, Any]) -> dict[str, Any]:
    """What was recorded and what is predicted, without a limit and by the verdict on the row's own card."""
    card = card_of(row)
    with mk.VirtualGPU(roomy(card), torch="2.6", cudnn="9.1") as unlimited:
        train(row)
    estimate = unlimited.estimate()
    reserved, interval = estimate.reserved_bytes, estimate.reserved_interval
    assert reserved is not None
    assert interval is not None
    return {
        "family": row["family"],
        "model": row["model"],
        "gpu": card.name,
        "optimizer": row["optimizer"],
        "batch": row["batch"],
        "ran_out": row["oom"],
        "reserved_bytes": reserved,
        "least_reserved_bytes": estimate.least_reserved_bytes,
        "error": None if row["oom"] else reserved / row["peak_bytes_nvml"] - 1,
        "ran_in_bytes": row["feasible_at_most"],
        "ran_out_in_bytes": row["infeasible_at"],
        "verdict": told_on(card, row["gpu_total_bytes"], estimate),
        "xmem_error": row.get("error_xMem"),
        **({} if row["oom"] else held(interval, row["peak_bytes_nvml"], spread=estimate.spread)),
    }


def respects(row: dict[str, Any]) -> bool:
    """Whether the least lies between what a run is known to have run in and to have run out in."""
    ran, ran_out = row["ran_in_bytes"], row["ran_out_in_bytes"]
    return (ran is None or row["least_reserved_bytes"] <= ran + 2 * MIB) and (
        ran_out is None or row["least_reserved_bytes"] > ran_out
    )


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    rows = list(rows)
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    said = Counter((row["verdict"], row["ran_out"]) for row in rows)
    peers = [abs(row["xmem_error"]) for row in rows if row["xmem_error"] is not None]
    return {
        "num_rows": len(rows),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "within_5_percent": sum(error <= 0.05 for error in errors) / len(errors),
        "xmem_median_error": statistics.median(peers) if peers else None,
        "xmem_worst_error": max(peers, default=None),
        "bracket_respected": sum(map(respects, rows)) / len(rows),
        "verdicts": {
            f"{word}, {what}": said[word, ran_out]
            for word in ("fits", "too close", "does not fit")
            for what, ran_out in (("ran", False), ("ran out", True))
        },
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    let_torchvision_be_imported()
    torch.set_num_threads(1)
    taken = [row for row in read_rows(given.folder, "xMem") if row["model"] in MODELS]
    rows = {row["id"]: figures_of(row) for row in taken}
    groups = {
        "all": rows.values(),
        **{
            name: [row for row in rows.values() if row[key] == name]
            for key in ("family", "gpu")
            for name in sorted({row[key] for row in rows.values()})
        },
    }
    figures = {"summary": {name: summary(each) for name, each in groups.items()}, "rows": rows}
    print(write_result("recorded_convolutions", figures, peers=("torchvision",)))


if __name__ == "__main__":
    main()
