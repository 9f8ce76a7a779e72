"""Ten models of the usual kinds with real data, a step of each some tenths of a second on one core.

A step's activations take 20 to 150 MB, and its largest operators enough time that Python's part is small. Data comes
with packages: the MNI152 brain and the surfaces of fsaverage5 with nilearn, digits with scikit-learn, text with Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from nilearn import datasets, surface
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks import reference_family
from benchmarks.cases.planner import VisionTransformer, brain
from benchmarks.gpu.models import Residual
from benchmarks.models import Loss
from memkit.predict import TrainingConfig


@dataclass
class Training:
    """A model, one batch with the rows in dimension 0, and the losses that are trained in turn.

    Attributes:
        losses: Each loss by the name of the part that it trains, "" for the whole model; the rest is frozen meanwhile.
    """

    model: nn.Module
    batch: Any
    losses: dict[str, Loss]

    def tensors(self) -> list[Tensor]:
        """Those of the batch, the first with its rows, then parameters and buffers."""
        batch = self.batch if isinstance(self.batch, tuple) else (self.batch,)
        return [*batch, *self.model.parameters(), *self.model.buffers()]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, classes = batch
    return F.cross_entropy(model(x), classes)


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, wanted = batch
    return F.mse_loss(model(x), wanted)


# ----------------------------------------------------------------------------------------------------------- sequences


def text(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Bytes of argparse's source (rows, length), and to each the next one."""
    source = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    windows = source[: rows * length + 1].unfold(0, length + 1, length)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def next_byte(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def transformer() -> Training:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return Training(nn.Sequential(nn.Embedding(256, 128), encoder, nn.Linear(128, 256)), text(8, 128), {"": next_byte})


def vit() -> Training:
    """Tells from slices of the brain how high they were cut."""
    slices = brain()[:96, :96, 20:84:8].permute(2, 0, 1)[:, None].contiguous()
    return Training(VisionTransformer(144, 128, 4), (slices, torch.linspace(0, 1, 8)[:, None]), {"": squared_error})


class Recurrent(nn.Module):
    """A layer of torch's LSTM, added to what came: (rows, length, width) to as much."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.net, self.drop = nn.LayerNorm(width), nn.LSTM(width, width, batch_first=True), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.net(self.norm(x))[0])


class NormedCell(nn.Module):
    """An LSTM that is written out, as its gates are normalized: (rows, length, width) to as much."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.turn = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.norm = nn.LayerNorm(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = torch.zeros_like(x[:, 0])
        states = []
        for entering in self.enter(x).unbind(1):
            i, f, g, o = self.norm(entering + self.turn(hidden)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            states.append(hidden)
        return torch.stack(states, 1)


def lstm() -> Training:
    layers = [Recurrent(128) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(256, 128), *layers, NormedCell(128), nn.Linear(128, 256))
    return Training(model, text(32, 32), {"": next_byte})


# -------------------------------------------------------------------------------------------------- images and volumes


def digits(rows: int, side: int) -> tuple[Tensor, Tensor]:
    """Handwritten digits (rows, 1, side, side) from -1 to 1, and what they are."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images[:rows]).float().view(-1, 1, 8, 8) / 8 - 1
    return F.interpolate(images, size=(side, side)), torch.from_numpy(labels[:rows]).long()


def resnet() -> Training:
    widths = (64, 64, 64, 128)
    blocks = [Residual(width_in, width) for width_in, width in pairwise(widths)]
    stem = [nn.Conv2d(1, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return Training(model, digits(24, 32), {"": cross_entropy})


class UNet(nn.Module):
    """Three levels with BatchNorm: (rows, 1, ...) in two or three dimensions to (rows, 2, ...)."""

    def __init__(self, num_dims: int, width: int) -> None:
        super().__init__()
        conv, grow, norm, pool = {
            2: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.MaxPool2d),
            3: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, nn.MaxPool3d),
        }[num_dims]

        def level(width_in: int, width: int) -> nn.Module:
            first = [conv(width_in, width, 3, padding=1), norm(width), nn.ReLU(inplace=True)]
            return nn.Sequential(*first, conv(width, width, 3, padding=1), norm(width), nn.ReLU(inplace=True))

        widths = (width, 2 * width, 4 * width)
        self.down = nn.ModuleList(level(a, b) for a, b in pairwise((1, *widths)))
        self.grow = nn.ModuleList(grow(b, a, 2, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(level(2 * a, a) for a in widths[:-1])
        self.pool, self.leave = pool(2), conv(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        held: list[Tensor] = []
        for level in self.down:
            x = level(self.pool(held[-1]) if held else x)
            held.append(x)
        held.pop()
        for grow, level in zip(reversed(self.grow), reversed(self.up), strict=True):
            x = level(torch.cat([grow(x), held.pop()], 1))
        return self.leave(x)


def unet_2d() -> Training:
    """Finds tissue in slices of the brain."""
    slices = brain()[:96, :96, 28:68:10].permute(2, 0, 1)[:, None].contiguous()
    return Training(UNet(2, 16), (slices, (slices[:, 0] > 0.5).long()), {"": cross_entropy})


def unet_3d() -> Training:
    """Finds tissue in two cubes of the brain."""
    cubes = brain()[24:56, 32:96, 32:64].unfold(1, 32, 32).permute(1, 0, 2, 3)[:, None].contiguous()
    return Training(UNet(3, 8), (cubes, (cubes[:, 0] > 0.5).long()), {"": cross_entropy})


def diffusion() -> Training:
    """Tells the noise from digits in relief: residual blocks with GroupNorm and SiLU, attention, an embedded time."""
    model = reference_family.UNet(16, checkpointing=False)
    volumes = reference_family.sample_batch(TrainingConfig(batch_size=4, resolution=32))[..., ::2, ::2, ::2].clone()

    def loss_fn(model: nn.Module, volumes: Tensor) -> Tensor:
        timesteps = torch.randint(reference_family.NUM_TIMESTEPS, (len(volumes),))
        signal = torch.cos(torch.pi / 2 * timesteps / reference_family.NUM_TIMESTEPS)[:, None, None, None, None]
        noise = torch.randn_like(volumes)
        return F.mse_loss(model(signal * volumes + (1 - signal.square()).sqrt() * noise, timesteps), noise)

    return Training(model, volumes, {"": loss_fn})


class Pair(nn.Module):
    """A generator (rows, 32) to (rows, 1, 32, 32), and its critic, to (rows, 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (4 * width, 2 * width, width)
        up = [
            nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in pairwise(widths)
        ]
        self.generator = nn.Sequential(
            nn.Linear(32, widths[0] * 16), nn.Unflatten(1, (widths[0], 4, 4)), *up,
            nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        down = [
            nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2), nn.Dropout2d(0.1))
            for a, b in pairwise((1, *reversed(widths)))
        ]
        self.critic = nn.Sequential(*down, nn.Flatten(), nn.Linear(widths[0] * 16, 1))

    def forward(self, images: Tensor, *, trains_critic: bool) -> Tensor:
        judged = self.critic(self.generator(torch.randn(len(images), 32)))
        if trains_critic:
            return F.softplus(judged).mean() + F.softplus(-self.critic(images)).mean()
        return F.softplus(-judged).mean()


def gan() -> Training:
    """Draws digits: a step of the critic, then one of the generator."""

    losses = {
        "critic": lambda model, images: model(images, trains_critic=True),
        "generator": lambda model, images: model(images, trains_critic=False),
    }
    return Training(Pair(32), digits(128, 32)[0], losses)


# --------------------------------------------------------------------------------------------------- graphs and points


def hemispheres() -> tuple[Tensor, Tensor, Tensor]:
    """The white surfaces of fsaverage5: points (2, v, 3), depths of the folds (2, v, 1), edges (2, e) of the first."""
    fsaverage = datasets.fetch_surf_fsaverage("fsaverage5")
    meshes = [surface.load_surf_mesh(fsaverage[f"white_{side}"]) for side in ("left", "right")]
    depths = [np.array(surface.load_surf_data(fsaverage[f"sulc_{side}"]), np.float32) for side in ("left", "right")]
    faces = torch.from_numpy(np.asarray(meshes[0].faces)).long()
    edges = torch.cat([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).T.contiguous()
    points = torch.stack([torch.from_numpy(np.asarray(each.coordinates)).float() / 100 for each in meshes])
    return points, torch.from_numpy(np.stack(depths))[..., None], edges


class Messages(nn.Module):
    """Messages along edges, summed where they arrive: (rows, v, width) to as much."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        messages = self.message(torch.cat([x[:, end], x[:, start] - x[:, end]], 2))
        return x + self.norm(torch.zeros_like(x).index_add(1, end, messages))


class GraphNet(nn.Module):
    """(rows, v, 3) points on a graph to (rows, v, 1)."""

    def __init__(self, edges: Tensor, width: int, num_layers: int) -> None:
        super().__init__()
        self.register_buffer("edges", edges)
        self.enter, self.leave = nn.Linear(3, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(Messages(width) for _ in range(num_layers))

    def forward(self, points: Tensor) -> Tensor:
        x = self.enter(points)
        for layer in self.layers:
            x = layer(x, self.edges)
        return self.leave(x)


def gnn() -> Training:
    """Says how deep the folds of the cortex are, from its mesh."""
    points, depth, edges = hemispheres()
    return Training(GraphNet(edges, 16, 2), (points, depth), {"": squared_error})


class Abstraction(nn.Module):
    """A level of PointNet++: each of every fourth point takes the largest features of its 16 nearest points."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in pairwise((width_in + 3, width, width))
        ]
        self.each = nn.Sequential(*layers)

    def forward(self, points: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, n, 3) and (rows, n, width_in) to (rows, n / 4, 3) and (rows, n / 4, width)."""
        centers = points[:, ::4]
        near = torch.cdist(centers, points).topk(16, largest=False).indices  # (rows, n / 4, 16)
        offsets = gathered(points, near) - centers[:, :, None]
        x = torch.cat([offsets, gathered(features, near)], 3).permute(0, 3, 1, 2)
        return centers, self.each(x).amax(3).transpose(1, 2)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """(rows, n, width) at (rows, m, k) to (rows, m, k, width)."""
    return x.gather(1, index.flatten(1)[..., None].expand(-1, -1, x.shape[2])).unflatten(1, index.shape[1:])


class PointNet(nn.Module):
    """(rows, n, 3) to (rows, 2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(Abstraction(a, b) for a, b in pairwise((3, width, 2 * width, 4 * width)))
        self.head = nn.Sequential(nn.Linear(4 * width, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 2))

    def forward(self, points: Tensor) -> Tensor:
        x = points
        for level in self.levels:
            points, x = level(points, x)
        return self.head(x.amax(1))


def point_net() -> Training:
    """Tells left from right pieces of the cortex."""
    points, _, _ = hemispheres()
    clouds = points[:, :8192].reshape(16, 1024, 3)
    return Training(PointNet(32), (clouds, torch.arange(16) // 8), {"": cross_entropy})


TRAININGS: dict[str, Callable[[], Training]] = {
    "transformer": transformer,
    "U-Net 2-D": unet_2d,
    "U-Net 3-D": unet_3d,
    "ResNet": resnet,
    "point net": point_net,
    "GNN": gnn,
    "GAN": gan,
    "ViT": vit,
    "LSTM": lstm,
    "diffusion U-Net": diffusion,
}


def build(name: str) -> Training:
    """Build a training; its weights are the same each time."""
    torch.manual_seed(0)
    return TRAININGS[name]()
