"""The scene and the network that training on several densities is measured on, and how they are judged.

From points on the left hemisphere of fsaverage5 (in nilearn's wheel) a PointNet with local pooling learns which lie in
a sulcus. It is asked about the right hemisphere, which it never saw, as dense as it was trained, at half the density,
and with one point for each grid cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from nilearn import datasets, surface
from torch import Tensor, nn

import memkit as mk

GRID_MM = 6.0
POOLING_MM = (8.0, 16.0, 32.0)
WIDTH = 32
Consistency = tuple[str, float]  # kind and weight


def load(side: str, num_points: int) -> mk.recipes.PointScene:
    """Points spread evenly over a hemisphere, with their normals, and whether the cortex is sunken there."""
    fsaverage = datasets.fetch_surf_fsaverage("fsaverage5")
    mesh = surface.load_surf_mesh(fsaverage[f"white_{side}"])
    points = torch.from_numpy(np.asarray(mesh.coordinates)).float()
    faces = torch.from_numpy(np.asarray(mesh.faces)).long()
    depth = torch.from_numpy(np.array(surface.load_surf_data(fsaverage[f"sulc_{side}"]), dtype=np.float32))
    if side == "right":  # as a left one: mirrored
        points, faces = points * torch.tensor([-1.0, 1.0, 1.0]), faces.flip(1)
    corners = points[faces]
    across = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    normals = F.normalize(torch.zeros_like(points).index_add(0, faces.flatten(), across.repeat_interleave(3, 0)))

    generator = torch.Generator().manual_seed(0)
    chosen = faces[torch.multinomial(across.norm(dim=1), num_points, replacement=True, generator=generator)]
    shares = -torch.rand(num_points, 3, 1, generator=generator).log()
    shares = shares / shares.sum(1, keepdim=True)

    def between_corners(values: Tensor) -> Tensor:
        return (values[chosen] * shares).sum(1)

    is_sunken = between_corners(depth[:, None])[:, 0] > 0
    return mk.recipes.PointScene(
        between_corners(points), F.normalize(between_corners(normals)), is_sunken.long(), key=side
    )


class Block(nn.Module):
    """Each point sees where it lies in its grid cell, and the largest features of the points there (PointNet)."""

    def __init__(self, cell_mm: float) -> None:
        super().__init__()
        self.cell_mm = cell_mm
        self.look = nn.Sequential(nn.LayerNorm(WIDTH + 7), nn.Linear(WIDTH + 7, WIDTH), nn.GELU())
        self.update = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, batch: mk.recipes.PointBatch) -> Tensor:
        index = mk.GridIndex.from_coords(
            batch.coords, self.cell_mm, batch.offsets
        )  # no cell holds points of two clouds
        cell, counts = index.cell_of_point(), torch.tensor(index.counts)
        center = batch.coords.new_zeros(len(counts), 3).index_add(0, cell, batch.coords) / counts[:, None]
        offset = (batch.coords - center[cell]) / self.cell_mm
        height = (offset * batch.features).sum(1, keepdim=True)
        seen = self.look(torch.cat([x, offset, batch.features, height], 1))
        largest = seen.new_zeros(len(counts), WIDTH).scatter_reduce(
            0, cell[:, None].expand_as(seen), seen, "amax", include_self=False
        )
        return x + self.update(torch.cat([seen, largest[cell]], 1))


# As in examples/s2_density_invariant.py: an example is one file that stands alone, and no module to import from.
class PointNet(nn.Module):
    """Features of points in, logits of points out; every cloud of the batch for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(map(Block, POOLING_MM))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))

    def forward(self, batch: mk.recipes.PointBatch) -> Tensor:
        x = self.first(batch.features)
        for block in self.blocks:
            x = block(x, batch)
        return self.head(x)


def predict(model: nn.Module, scene: mk.recipes.PointScene, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return model(mk.recipes.PointBatch(scene.coords[rows], scene.features[rows], torch.tensor([len(rows)]))).argmax(
            1
        )


class Score(NamedTuple):
    """How well a cloud is predicted.

    Attributes:
        right: Share of its points that are.
        right_if_dense: Share of the same points that are right in the dense scan's prediction.
        same: Share of the points that both predict alike.
    """

    right: float
    right_if_dense: float
    same: float


def scores(model: nn.Module, scene: mk.recipes.PointScene) -> dict[str, Score]:
    """The score of each density."""
    sampler = mk.GridAwareSampler(seed=1)
    samples = sampler.sample_scenarios(sampler.index(scene.coords, GRID_MM))
    dense = predict(model, scene, samples["dense"].indices)
    found = {}
    for scenario, sample in samples.items():
        rows = sample.indices
        here, there, targets = predict(model, scene, rows), dense[rows], scene.targets[rows]
        found[scenario] = Score(
            *((a == b).float().mean().item() for a, b in ((here, targets), (there, targets), (here, there)))
        )
    return found


def make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scene: mk.recipes.PointScene, consistency: Consistency | None
) -> Callable[[], tuple[float, str]]:
    """A step on all densities, or with None on the scan as it is; it returns the loss and where time went."""
    if consistency is not None:
        sampler = mk.GridAwareSampler(seed=0)
        trainer = mk.DensityInvariantTrainer(
            model, sampler, F.cross_entropy, *consistency, optimizer=optimizer, grid_size=GRID_MM
        )

        def step() -> tuple[float, str]:
            result = trainer.train_step(scene)
            return result.loss.item(), result.line()

    else:
        batch = mk.recipes.PointBatch(scene.coords, scene.features, torch.tensor([len(scene.coords)]))

        def step() -> tuple[float, str]:
            loss = F.cross_entropy(model(batch), scene.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item(), ""

    return step


def train(
    scene: mk.recipes.PointScene, num_steps: int, consistency: Consistency | None, seed: int = 0
) -> tuple[nn.Module, list[float], str]:
    """Return the trained model, the loss of each step, and where the last one's time went."""
    torch.manual_seed(seed)
    model = PointNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    step = make_step(model, optimizer, scene, consistency)
    losses = []
    for _ in range(num_steps):
        loss, line = step()
        losses.append(loss)
        schedule.step()
    return model, losses, line
