"""Verified advice on eight models with real data: what was predicted against what was measured, for every remedy.

For each piece of advice: saved bytes and peak predicted without data, measured in live tensors of a real step, and
measured by the CPU allocator's own events, which count what kernels take inside; operations predicted and counted. The
same models in float64 for the gradients of what claims to be exact. Negative control: the saving as people reckon it,
what the treated part holds at the peak subtracted.

Run: python -m benchmarks.cases.advice   (3 minutes)
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from nilearn import datasets, surface
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import memkit as mk
from benchmarks.models import Decoder, UNet
from benchmarks.result import write_result
from memkit._simulation.simulation import Host
from memkit.recipes.advice.advise import advise
from memkit.recipes.advice.record import Advice
from memkit.recipes.advice.remedies import no_change
from memkit.recipes.advice.step import Observation, Training, observe_step
from memkit.recipes.advice.submodules import held_by_modules

Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor], dict[str, Any]]


# --------------------------------------------------------------------------------------------------- eight models


def language() -> Case:
    """A causal transformer on the source of argparse; text read byte by byte."""
    source = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    tokens = source[: 8 * 97].view(8, 97).clone()

    def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Decoder(num_blocks=6, width=96, length=96), tokens, loss_fn, {"changes_model": True}


def brain() -> Tensor:
    volume = torch.from_numpy(datasets.load_mni152_template(resolution=2).get_fdata()).float()
    return (volume - volume.mean()) / volume.std()


def unet() -> Case:
    """A 3D U-Net that finds tissue in four cubes of the MNI152 brain."""
    cubes = brain()[24:56, 32:96, 16:80].unfold(1, 32, 32).unfold(2, 32, 32).reshape(32, 4, 32, 32).transpose(0, 1)
    cubes = cubes[:, None].clone()

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return UNet(4), (cubes, (cubes[:, 0] > 0.5).long()), loss_fn, {}


def denoiser() -> Case:
    """Convolutions alone, which take noise out of a slice of the brain."""
    widths = (1, *(16,) * 5)
    layers = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GELU()) for a, b in itertools.pairwise(widths)]
    image = brain()[:, :, 40][None, None]
    noisy = image + 0.3 * torch.randn(image.shape)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return nn.Sequential(*layers, nn.Conv2d(16, 1, 3, padding=1)), (noisy, image), loss_fn, {}


class EdgeNet(nn.Module):
    """Messages along edges, averaged where they arrive: (v, 3) and (2, e) to (v, 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(
            nn.Linear(6, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, points: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        messages = self.message(torch.cat([points[end], points[start] - points[end]], 1))
        total = messages.new_zeros(len(points), messages.shape[1]).index_add(0, end, messages)
        degree = messages.new_zeros(len(points)).index_add(0, end, torch.ones_like(messages[:, 0])).clamp(min=1)
        return self.head(total / degree[:, None])


def edge_mlp() -> Case:
    """Says how deep the folds of fsaverage5 are, from the edges of its white surface."""
    fsaverage = datasets.fetch_surf_fsaverage("fsaverage5")
    mesh = surface.load_surf_mesh(fsaverage["white_left"])
    points = torch.from_numpy(np.asarray(mesh.coordinates)).float() / 100
    depth = torch.from_numpy(np.array(surface.load_surf_data(fsaverage["sulc_left"]), dtype=np.float32))[:, None]
    faces = torch.from_numpy(np.asarray(mesh.faces)).long()
    edges = torch.cat([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).T.contiguous()

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["points"], batch["edges"]), batch["depth"])

    def fewer(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch | {"edges": batch["edges"][:, mk.points.sample_edges(batch["edges"][1], 0.5, seed=0)]}

    batch = {"points": points, "edges": edges, "depth": depth}
    return EdgeNet(64), batch, loss_fn, {"changes_model": True, "fewer_edges": fewer}


class NormedBlock(nn.Module):
    """Two convolutions with BatchNorm, added to what came."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def residual_net() -> Case:
    """A residual network with BatchNorm reads 256 digits."""
    blocks = [NormedBlock(16) for _ in range(5)]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    images, labels = digits()
    return model, (images[:256].view(256, 1, 8, 8), labels[:256]), classify, {}


class VAE(nn.Module):
    """(rows, 64) to as many, and to mean and log variance of (rows, 8) between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.middle = nn.Linear(width, 16)
        self.decode = nn.Sequential(
            nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 64)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.middle(self.encode(x)).chunk(2, 1)
        return self.decode(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var


def vae() -> Case:
    """Draws digits; its noise comes from the global generator."""

    def loss_fn(model: nn.Module, images: Tensor) -> Tensor:
        drawn, mean, log_var = model(images)
        divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)
        return (F.mse_loss(drawn, images, reduction="none").sum(1) + divergence).mean()

    return VAE(256), digits()[0][:1024].clone(), loss_fn, {"changes_model": True}


class PointNet(nn.Module):
    """(rows, n, 3) to (rows, 2): an MLP of each point, the largest of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 256))
        self.head = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, clouds: Tensor) -> Tensor:
        return self.head(self.each(clouds).amax(1))


def point_net() -> Case:
    """Tells left from right pieces of the pial surface."""
    clouds = []
    for side in ("left", "right"):
        mesh = surface.load_surf_mesh(datasets.fetch_surf_fsaverage("fsaverage5")[f"pial_{side}"])
        clouds.append(torch.from_numpy(np.asarray(mesh.coordinates)).float()[:8192].view(8, 1024, 3) / 100)
    return PointNet(), (torch.cat(clouds), torch.arange(16) // 8), classify, {}


def wide_mlp() -> Case:
    """A wide MLP with few rows: what counts is the optimizer, which takes all parameters at once."""
    images, labels = digits()
    model = nn.Sequential(nn.Linear(64, 768), *(nn.Linear(768, 768) for _ in range(4)), nn.GELU(), nn.Linear(768, 10))
    options = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True)}
    return model, (images[:16], labels[:16]), classify, options


CASES = (language, unet, denoiser, edge_mlp, residual_net, vae, point_net, wide_mlp)


# ---------------------------------------------------------------------------------------------------- measuring


def naive_saving(advice: Advice, plain: Observation) -> int | None:
    """The naive estimate: without all bytes of checkpointed blocks, or half of the activations for half a batch."""
    activations = plain.recording.peak_by("category").get("activation", 0)
    settings = eval(
        advice.change.replace("mk.MemoryEfficientTrainingWrapper(model, optimizer, ", "dict(").split("\n")[0]
    )
    match settings:
        case {"checkpoint": list(blocks), **others} if not others:
            held = held_by_modules(plain)
            return sum(held[block] for block in blocks)
        case {"accumulation_steps": num_parts, **others} if not others:
            return activations - activations // num_parts
        case {"precision": _}:
            return activations // 2
        case {"offload": _}:
            return activations
    return None


def off_by(predicted: float | None, measured: float | None) -> float | None:
    return abs(predicted / measured - 1) if predicted is not None and measured else None


def measure(build: Callable[[], Case]) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch, loss_fn, options = build()
    table = advise(model, batch, loss_fn, **options)
    plain = observe_step(
        Training(model, batch, loss_fn, options.get("optimizer", "adamw"), None, None), no_change, Host
    )
    rows = {}
    for each in table:
        row = asdict(each) | {"naive_saved_bytes": None}
        if each.measured_saved_bytes is not None:
            if each.change.startswith("mk.MemoryEfficientTrainingWrapper"):
                row["naive_saved_bytes"] = naive_saving(each, plain)
            row["saved_off_by"] = off_by(each.predicted_saved_bytes, each.measured_saved_bytes)
            row["peak_off_by"] = off_by(each.predicted_peak_bytes, each.measured_peak_bytes)
            row["allocator_off_by"] = off_by(each.predicted_saved_bytes, each.allocator_saved_bytes)
            row["naive_off_by"] = off_by(row["naive_saved_bytes"], each.measured_saved_bytes)
        rows[each.name] = row
        keys = (
            "name",
            "status",
            "measured_saved_bytes",
            "saved_off_by",
            "allocator_off_by",
            "naive_off_by",
            "difference",
        )
        print(build.__name__, [row.get(key) for key in keys], flush=True)
    double = tree_map(lambda x: x.double() if torch.is_tensor(x) and x.is_floating_point() else x, batch)
    differences = {
        each.name: each.difference
        for each in advise(model.double(), double, loss_fn, **options)
        if each.exact and each.difference is not None
    }
    print(build.__name__, "float64", differences)
    return {"peak_bytes": table.peak_bytes, "measured_peak_bytes": table.measured_peak_bytes, "advice": rows,
            "float64_differences": differences}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    models = {build.__name__: measure(build) for build in CASES}
    rows = [row for figures in models.values() for row in figures["advice"].values()]

    def spread(key: str) -> dict[str, Any]:
        values = [row[key] for row in rows if row.get(key) is not None]
        return {"num": len(values), "median": statistics.median(values), "largest": max(values)}

    figures = {
        "models": models,
        "statuses": {
            status: sum(row["status"].startswith(status) for row in rows)
            for status in ("verified", "failed", "not run")
        },
        "off_by": {key: spread(key) for key in ("saved_off_by", "peak_off_by", "allocator_off_by", "naive_off_by")},
        "largest_float64_difference": max(
            difference for each in models.values() for difference in each["float64_differences"].values()
        ),
    }
    print({key: value for key, value in figures.items() if key != "models"})
    print(write_result("advice", figures))


if __name__ == "__main__":
    main()
