"""S2: a point network that works at every density, trained on a scan and on thinned-out versions of it.

First the sampling, on a million points: the grid is found once, then each draw takes a random share of every cell, or
one point of it. Then from points on the left hemisphere of fsaverage5 (in nilearn's wheel) a PointNet with local
pooling learns which lie in a sulcus, at three densities at once, tied by a consistency loss. It is asked about the
right hemisphere, which it never saw, at each density, and so is the same network trained on the dense scan alone.

Run: pip install -c constraints.txt -e ".[test]" && python examples/s2_density_invariant.py [--smoke]
"""

import argparse
import time

import _hemisphere
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit as mk

GRID_MM, POOLING_MM, WIDTH = 6.0, (8.0, 16.0, 32.0), 32


def load(side: str, num_points: int) -> mk.recipes.PointScene:
    points, normals, depth = _hemisphere.load(side).scatter(num_points)
    return mk.recipes.PointScene(points, normals, (depth > 0).long(), key=side)


class Block(nn.Module):
    """Each point sees where it lies in its grid cell, and the largest features of the points there (PointNet)."""

    def __init__(self, cell_mm: float) -> None:
        super().__init__()
        self.cell_mm = cell_mm
        self.look = nn.Sequential(nn.LayerNorm(WIDTH + 7), nn.Linear(WIDTH + 7, WIDTH), nn.GELU())
        self.update = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, batch: mk.recipes.PointBatch) -> Tensor:
        index = mk.GridIndex.from_coords(batch.coords, self.cell_mm, batch.offsets)  # clouds stay apart
        cell = index.cell_of_point()
        offset = (batch.coords - mk.points.voxel_mean(batch.coords, index)[cell]) / self.cell_mm
        height = (offset * batch.features).sum(1, keepdim=True)
        seen = self.look(torch.cat([x, offset, batch.features, height], 1))
        largest = seen.new_zeros(index.num_cells, WIDTH).scatter_reduce(
            0, cell[:, None].expand_as(seen), seen, "amax", include_self=False
        )
        return x + self.update(torch.cat([seen, largest[cell]], 1))


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


def train(scene: mk.recipes.PointScene, num_steps: int, *, dense_alone: bool) -> nn.Module:
    torch.manual_seed(0)
    model = PointNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    sampler = mk.GridAwareSampler(ratio=(0.3, 0.7), seed=0)
    trainer = mk.DensityInvariantTrainer(
        model, sampler, F.cross_entropy, "kl", weight=1.0, optimizer=optimizer, grid_size=GRID_MM
    )
    batch = mk.recipes.PointBatch(scene.coords, scene.features, torch.tensor([len(scene.coords)]))
    for _ in range(num_steps):
        if dense_alone:
            F.cross_entropy(model(batch), scene.targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            result = trainer.train_step(scene)
        schedule.step()
    print("dense alone" if dense_alone else f"all densities; the last step: {result.line()}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="few points, a few steps")
    num_many, num_points, num_steps = (10_000, 3000, 3) if parser.parse_args().smoke else (1_000_000, 30_000, 100)

    scene, sampler = load("left", num_many), mk.GridAwareSampler(ratio=(0.3, 0.7), seed=1)
    for what in ("found", "found again", "a draw of three densities"):
        start = time.process_time()
        index = sampler.index(scene.coords, grid_size=0.8, key=scene.key)
        samples = sampler.sample_scenarios(index) if what.startswith("a draw") else {}
        took = 1000 * (time.process_time() - start)
        print(f"{index.num_points:,} points in {index.num_cells:,} cells, {what}: {took:.1f} ms")
    print(
        *(f"  {name}: {each.num_kept:,} points, a share of {each.ratio:.3f}" for name, each in samples.items()),
        sep="\n",
    )

    left, right = load("left", num_points), load("right", num_points)
    for dense_alone in (True, False):
        model = train(left, num_steps, dense_alone=dense_alone)
        for name, each in sampler.sample_scenarios(sampler.index(right.coords, GRID_MM)).items():
            coords, features, targets = each.take(right.coords, right.features, right.targets)
            with torch.no_grad():
                scores = model(mk.recipes.PointBatch(coords, features, each.offsets))
            is_right = scores.argmax(1) == targets
            print(f"  {name:6} {is_right.float().mean():.1%} of the other hemisphere's points are right")


if __name__ == "__main__":
    main()
