"""A virtual V100 against OpenMMLab's model zoos: the most that was allocated in trainings of FCN, TSN and I3D.

mmsegmentation and mmaction2 (PyTorch 1.3 to 1.7) print `torch.cuda.max_memory_allocated` of a whole training.
mmaction2's tables keep the whole mebibytes; mmsegmentation's are rounded to 0.1 "GB" without saying which. The unit is
settled by what ResNet-101 takes more than ResNet-50, in which nothing but 17 more blocks counts. The networks are
written anew, after their papers and configurations, which also tell the batches of two rows that lack one. Left out
are I3D's non-local blocks by Gaussian and dot product, which are recorded with less than the same net without them,
so that their batch is not the configuration's; and detection, whose memory follows the sizes and objects of its
images. Each GPU's part of the gradients in DistributedDataParallel's buckets is there. mmsegmentation trains with
`cudnn.benchmark`; "error_without_workspaces" takes memkit's rule for what it finds away.

Run: python -m benchmarks.cases.recorded_openmmlab FOLDER   (2 minutes; FOLDER has recorded_gpu_runs.json)
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memkit as mk
from benchmarks.recorded import held, read_rows
from benchmarks.result import write_result
from memkit._core.units import GIB, MIB

UNITS = {"GiB": GIB, "1000 MiB": 1000 * MIB, "GB": 10**9}
DEPTHS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
NUM_CLASSES = 19
NUM_ACTIONS = {"ucf101": 101, "kinetics400": 400}
WITHOUT_BATCH = {  # as in their configurations
    "tsn_r50_1x1x3_80e_ucf101_rgb": {"batch_per_gpu": 32, "input": [96, 3, 224, 224]},
    "i3d_nl_embedded_gaussian_r50_32x2x1_100e_kinetics400_rgb": {"batch_per_gpu": 8, "input": [8, 3, 32, 224, 224]},
}


def layer(conv: type[nn.Module], norm: type[nn.Module], shape: tuple[int, int, Any], **options: Any) -> list[nn.Module]:
    """A convolution that keeps the size (before its stride), and its normalization."""
    inputs, outputs, size = shape
    sizes = size if isinstance(size, tuple) else (size, size)
    dilation = options.get("dilation", 1)
    padding = options.pop("padding", tuple(dilation * (each // 2) for each in sizes))
    return [conv(inputs, outputs, size, padding=padding, bias=False, **options), norm(outputs)]


class Residual(nn.Module):
    """A residual block of ResNet."""

    def __init__(self, body: nn.Sequential, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.body, self.shortcut, self.relu = body, shortcut, nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.shortcut is None else self.shortcut(x)
        out: Tensor = self.body(x)
        out += kept
        return self.relu(out)


def stages(depth: int, strides: tuple[int, ...], dilations: tuple[int, ...]) -> nn.ModuleList:
    """ResNet's four stages in 2-D; of a dilated stage the first block has half the dilation."""
    found, inputs = nn.ModuleList(), 64
    conv, norm = nn.Conv2d, nn.BatchNorm2d
    for width, count, stage_stride, stage_dilation in zip(
        (64, 128, 256, 512), DEPTHS[depth], strides, dilations, strict=True
    ):
        blocks = []
        outputs = width if depth == 18 else 4 * width
        for number in range(count):
            stride = stage_stride if number == 0 else 1
            dilation = max(1, stage_dilation // 2) if number == 0 else stage_dilation
            relu = nn.ReLU(inplace=True)
            middle = layer(conv, norm, (inputs if depth == 18 else width, width, 3), stride=stride, dilation=dilation)
            if depth == 18:
                body = [*middle, relu, *layer(conv, norm, (width, width, 3))]
            else:
                first, last = layer(conv, norm, (inputs, width, 1)), layer(conv, norm, (width, outputs, 1))
                body = [*first, relu, *middle, nn.ReLU(inplace=True), *last]
            shortcut = None
            if number == 0 and (stride != 1 or inputs != outputs):
                shortcut = nn.Sequential(*layer(conv, norm, (inputs, outputs, 1), stride=stride))
            blocks.append(Residual(nn.Sequential(*body), shortcut))
            inputs = outputs
        found.append(nn.Sequential(*blocks))
    return found


class Head(nn.Module):
    """FCN's head: convolutions, joined with their input if it is the main one, and a classifier."""

    def __init__(self, inputs: int, width: int, num_convs: int, dilation: int, *, is_main: bool) -> None:
        super().__init__()
        shapes = [(inputs, width, 3)] + [(width, width, 3)] * (num_convs - 1)
        self.convs = nn.Sequential(
            *(
                nn.Sequential(*layer(nn.Conv2d, nn.BatchNorm2d, shape, dilation=dilation), nn.ReLU(inplace=True))
                for shape in shapes
            )
        )
        joined = (*layer(nn.Conv2d, nn.BatchNorm2d, (inputs + width, width, 3)), nn.ReLU(inplace=True))
        self.join = nn.Sequential(*joined) if is_main else None
        self.classify = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, NUM_CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.convs(x)
        if self.join is not None:
            out = self.join(torch.cat([x, out], dim=1))
        classes: Tensor = self.classify(out)
        return classes


class Segmentation(nn.Module):
    """FCN with an auxiliary head; its forward gives the loss."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__()
        name, reduction = row["backbone"].split("-")
        depth = int("".join(filter(str.isdigit, name)))
        relu = nn.ReLU
        if name.endswith("b"):
            stem = [*layer(nn.Conv2d, nn.BatchNorm2d, (3, 64, 7), stride=2), relu(inplace=True)]
        else:
            stem = []
            for inputs, outputs, stride in ((3, 32, 2), (32, 32, 1), (32, 64, 1)):
                stem += [*layer(nn.Conv2d, nn.BatchNorm2d, (inputs, outputs, 3), stride=stride), relu(inplace=True)]
        self.stem = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1))
        strides, dilations = ((1, 2, 1, 1), (1, 1, 2, 4)) if reduction == "d8" else ((1, 2, 2, 1), (1, 1, 1, 2))
        self.stages = stages(depth, strides, dilations)
        features, width = (512, 128) if depth == 18 else (2048, 512)
        dilation = 6 if row["config"].startswith("fcn_d6") else 1
        self.head = Head(features, width, 2, dilation, is_main=True)
        self.kept: list[Tensor] = []
        self.auxiliary = Head(features // 2, width // 2, 1, dilation, is_main=False)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        self.kept.clear()
        x, found = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return self._loss(self.head(found[3]), labels) + 0.4 * self._loss(self.auxiliary(found[2]), labels)

    def _loss(self, classes: Tensor, labels: Tensor) -> Tensor:
        full = F.interpolate(classes, size=labels.shape[2:], mode="bilinear", align_corners=False)
        losses = F.cross_entropy(full, labels.squeeze(1), reduction="none", ignore_index=255)
        full.topk(1, dim=1)  # the accuracy that is logged
        self.kept.append(full)  # PyTorch 1 saved the input of log_softmax too, until its backward
        full.register_hook(lambda _: self.kept.pop())
        return losses.mean()


class Frames(nn.Module):
    """TSN: a ResNet-50 over three frames, whose scores are averaged."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.num_actions = num_actions
        stem = [*layer(nn.Conv2d, nn.BatchNorm2d, (3, 64, 7), stride=2), nn.ReLU(inplace=True)]
        body = stages(50, (1, 2, 2, 2), (1, 1, 1, 1))
        self.body = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classify = nn.Sequential(nn.Dropout(0.4), nn.Linear(2048, num_actions))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        scores = self.classify(self.body(images)).reshape(len(labels), -1, self.num_actions).mean(dim=1)
        return F.cross_entropy(scores, labels)


class NonLocal(nn.Module):
    """A block of non-local neural networks: attention over all positions, by an embedded Gaussian."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // 2
        self.query = nn.Conv3d(channels, inner, 1)
        self.key, self.value = (nn.Sequential(nn.Conv3d(channels, inner, 1), nn.MaxPool3d((1, 2, 2))) for _ in range(2))
        self.out = nn.Sequential(*layer(nn.Conv3d, nn.BatchNorm3d, (inner, channels, (1, 1, 1))))

    def forward(self, x: Tensor) -> Tensor:
        values = self.value(x).flatten(2).transpose(1, 2)
        weights = (self.query(x).flatten(2).transpose(1, 2) @ self.key(x).flatten(2)).softmax(dim=-1)
        mixed = (weights @ values).transpose(1, 2).contiguous().unflatten(2, x.shape[2:])
        out: Tensor = x + self.out(mixed)
        return out


class Clips(nn.Module):
    """I3D: a ResNet-50 inflated in time, with a non-local block after each second block of the middle stages or not."""

    def __init__(self, num_actions: int, *, is_non_local: bool) -> None:
        super().__init__()
        conv, norm = nn.Conv3d, nn.BatchNorm3d
        parts: list[nn.Module] = [*layer(conv, norm, (3, 64, (5, 7, 7)), stride=2), nn.ReLU(inplace=True)]
        parts.append(nn.MaxPool3d((1, 3, 3), 2, (0, 1, 1)))
        inputs = 64
        for number, (width, count) in enumerate(zip((64, 128, 256, 512), DEPTHS[50], strict=True)):
            for block in range(count):
                stride = (1, 2, 2) if number and not block else (1, 1, 1)
                in_time = block % 2 == (number == 3) or number == 0
                body = [
                    *layer(conv, norm, (inputs, width, (3 if in_time else 1, 1, 1))),
                    nn.ReLU(inplace=True),
                    *layer(conv, norm, (width, width, (1, 3, 3)), stride=stride),
                    nn.ReLU(inplace=True),
                    *layer(conv, norm, (width, 4 * width, (1, 1, 1))),
                ]
                shortcut = layer(conv, norm, (inputs, 4 * width, (1, 1, 1)), stride=stride) if not block else None
                parts.append(Residual(nn.Sequential(*body), nn.Sequential(*shortcut) if shortcut else None))
                inputs = 4 * width
                if is_non_local and number in (1, 2) and block % 2:
                    parts.append(NonLocal(inputs))
            if number == 0:
                parts.append(nn.MaxPool3d((2, 1, 1), (2, 1, 1)))
        parts += [nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(inputs, num_actions)]
        self.body = nn.Sequential(*parts)

    def forward(self, clips: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(clips), labels)


def network(row: dict[str, Any]) -> nn.Module:
    """The network of a row; its forward gives the loss."""
    if row["source"] == "mmseg":
        return Segmentation(row)
    num_actions = next(number for name, number in NUM_ACTIONS.items() if name in row["config"])
    return Frames(num_actions) if row["family"] == "tsn" else Clips(num_actions, is_non_local="_nl_" in row["config"])


def estimate_of(row: dict[str, Any], *, tunes: bool = True) -> mk.predict.MemoryEstimate:
    """The estimate of three steps of SGD with momentum, on one of several GPUs."""
    is_segmentation = row["source"] == "mmseg"
    size = row["batch_per_gpu"]
    with (
        torch.backends.cudnn.flags(enabled=True, benchmark=is_segmentation and tunes),
        mk.VirtualGPU("V100 32GB") as gpu,
    ):
        model = network(row).cuda()
        parameters = list(model.parameters())
        buckets = [torch.empty_like(each) for each in parameters]  # DistributedDataParallel's
        optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)
        shape = (size, 3, *row["crop"]) if is_segmentation else row["input"]
        for _ in range(3):
            images = torch.zeros(shape).cuda()
            labels = torch.zeros((size, 1, *row["crop"]) if is_segmentation else (size,), dtype=torch.long).cuda()
            with torch.autocast("cuda", torch.float16, enabled="fp16" in row.get("precision", "fp32")):
                loss = model(images, labels)
            optimizer.zero_grad(set_to_none=False)  # as in these versions of PyTorch
            loss.backward()
            if not is_segmentation:
                nn.utils.clip_grad_norm_(parameters, 40)
            optimizer.step()
    del buckets
    return gpu.estimate()


def depth_growth(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Memory of 17 more blocks, of all pairs of ResNet-50 and -101 together: predicted, and recorded in each unit."""
    by_config = {row["config"]: row for row in rows.values()}
    deeper = {name: name.replace("r50", "r101") for name in by_config if "r50" in name}
    pairs = [(by_config[small], by_config[large]) for small, large in deeper.items() if large in by_config]
    recorded = sum(large["recorded"] - small["recorded"] for small, large in pairs)
    predicted = sum(large["peak_bytes"] - small["peak_bytes"] for small, large in pairs)
    return {
        "num_pairs": len(pairs),
        "predicted_bytes": predicted,
        "error_by_unit": {name: predicted / (recorded * unit) - 1 for name, unit in UNITS.items()},
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    taken = read_rows(given.folder, "mmseg")
    for row in read_rows(given.folder, "mmaction2"):
        if row["verified"] or row["config"] in WITHOUT_BATCH:
            taken.append(row | WITHOUT_BATCH.get(row["config"], {}))
    rows: dict[str, dict[str, Any]] = {}
    for row in taken:
        is_exact = "memory_mib" in row
        recorded = row["memory_mib"] if is_exact else row["memory_gb"]
        unit = MIB if is_exact else GIB
        estimate, without = estimate_of(row), estimate_of(row, tunes=False)
        last_digit = 10 ** -len(str(recorded).partition(".")[2])
        rows[row["id"]] = {
            "family": row["family"],
            "config": row["config"],
            "recorded": recorded,
            "unit": "MiB" if is_exact else "GiB",
            "peak_bytes": estimate.peak_bytes,
            "error": estimate.peak_bytes / (recorded * unit) - 1,
            "error_without_workspaces": without.peak_bytes / (recorded * unit) - 1,
            **held(
                estimate.peak_interval,
                (estimate.peak_bytes, estimate.peak_bytes),
                int(recorded * unit),
                rounded_by=0 if is_exact else int(last_digit * unit / 2),
            ),
        }
    families = sorted({row["family"] for row in rows.values()})
    by_family = {family: [row for row in rows.values() if row["family"] == family] for family in families}
    figures = {
        "growth_with_depth": depth_growth(rows),
        "summary": {
            family: {
                "num_rows": len(each),
                "median_error": statistics.median(abs(row["error"]) for row in each),
                "worst_error": max((row["error"] for row in each), key=abs),
                "within_5_percent": sum(abs(row["error"]) <= 0.05 for row in each) / len(each),
                "median_error_without_workspaces": statistics.median(
                    abs(row["error_without_workspaces"]) for row in each
                ),
            }
            for family, each in by_family.items()
        },
        "rows": rows,
    }
    print(write_result("recorded_openmmlab", figures))


if __name__ == "__main__":
    main()
