"""From a sparse scan to a whole surface: voxels, augmentation, losses, the wrapper, an evaluation, a report.

A small 3D U-Net sees 3% of the points of a brain's surface (fsaverage5, in nilearn's wheel), the depth of its folds
as intensity, and learns the whole surface. It trains on the left hemisphere, at two resolutions, and is evaluated on
the right one, mirrored, which it never saw.

Run: pip install "memkit[test]" && python examples/voxel_completion.py [--smoke]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from nilearn import datasets, surface
from torch import Tensor, nn

import memkit as mk

SIDE_MM, SIDE = 192.0, 32  # of the cube, in mm and in voxels
SCAN = mk.VoxelLayout(("occupancy", "intensity"), value_range=[(0, 1), (-2, 2)])
SURFACE = mk.VoxelLayout(("occupancy",), value_range=[(0, 1)])


def hemisphere(side: str) -> tuple[Tensor, Tensor]:
    """Points (n, 3) in mm, the right side mirrored, and the depth of the sulci (n,)."""
    brain = datasets.fetch_surf_fsaverage("fsaverage5")
    points = torch.from_numpy(np.asarray(surface.load_surf_mesh(brain[f"pial_{side}"]).coordinates)).float()
    points[:, 0] *= -1 if side == "right" else 1
    depth = torch.from_numpy(np.array(surface.load_surf_data(brain[f"sulc_{side}"]), dtype=np.float32))
    return points - points.mean(0), depth / depth.std()


def voxelise(points: Tensor, depth: Tensor) -> Tensor:
    """Occupied or not, and the mean depth of what lies in a voxel: (2, D, H, W)."""
    coords = ((points / SIDE_MM + 0.5) * SIDE).long().clamp(0, SIDE - 1)
    index = mk.GridIndex.from_coords(coords.float(), grid_size=1.0)
    mean = mk.voxel_mean(torch.stack([torch.ones_like(depth), depth], 1), index)
    return mk.SparseVoxels.from_coords(coords[mk.first_points(index)], mean, shape=(SIDE,) * 3).to_dense()[0]


class Scans:
    """The same surface, scanned again for each sample: a source for `VoxelDataset`."""

    def __init__(self, side: str, num_scans: int) -> None:
        self.points, self.depth = hemisphere(side)
        self.num_scans = num_scans

    def __len__(self) -> int:
        return self.num_scans

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        seen = torch.randperm(len(self.points), generator=torch.Generator().manual_seed(index))[
            : len(self.points) // 33
        ]
        scan, whole = (voxelise(self.points[rows], self.depth[rows]) for rows in (seen, slice(None)))
        return {"scan": scan, "surface": whole[:1]}


class Epochs:
    """Batches of a data set that is drawn anew in each epoch."""

    def __init__(self, dataset: mk.VoxelDataset) -> None:
        self.dataset, self.epoch = dataset, 0
        self.loader = mk.make_dataloader(dataset, batch_size=4, num_workers=0)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.dataset.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)


class UNet(nn.Module):
    """Two levels; logits of the occupancy."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(2, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU())
        inner = nn.Conv3d(2 * width, 2 * width, 3, padding=1)
        smaller, larger = nn.Conv3d(width, 2 * width, 3, 2, 1), nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.inner = nn.Sequential(smaller, nn.SiLU(), inner, nn.SiLU(), larger)
        self.head = nn.Conv3d(2 * width, 1, 3, padding=1)

    def forward(self, scan: Tensor) -> Tensor:
        level = self.down(scan)
        return self.head(torch.cat([level, self.inner(level)], 1))


def evaluate(trainer: mk.MemoryEfficientTrainingWrapper, num_scans: int) -> dict[str, float]:
    voxels, size = mk.VoxelMetrics(), SIDE_MM / SIDE
    clouds = mk.PointCloudMetrics(thresholds=[size], conventions=["occnet"], empty_distance=SIDE_MM)
    with trainer.evaluation() as run:
        for sample in mk.VoxelDataset(Scans("right", num_scans), use_augmentation=False, layout=SCAN):
            found = run(sample["scan"][None], lambda model, scan: model(scan) > 0)
            target = sample["surface"][None] > 0
            voxels.update(found, target)
            clouds.update(*(each[0, 0].nonzero() * size for each in (found.float(), target.float())))
    return voxels.compute() | clouds.compute()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help="seconds, not minutes")
    smoke = parser.parse_args().smoke
    torch.manual_seed(0)
    folder, model = Path(tempfile.mkdtemp()), UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    memory = mk.MemoryManager("cpu", log=folder / "memory_events.jsonl")
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2, max_grad_norm=1.0)
    structure, features = (
        mk.StructurePreservingLoss(),
        mk.Perceptual3DLoss(in_channels=1, base_channels=8, num_levels=3),
    )
    criterion = mk.CompositeLoss3D(
        {
            "voxels": (mk.OccupancyAwareLoss(4.0, kind="bce", layout=SURFACE), 1.0),
            "edges": (lambda logits, whole: structure(logits.sigmoid(), whole), 0.5),
            "features": (lambda logits, whole: features(logits.sigmoid(), whole), lambda step: min(0.1, step / 200)),
        }
    )
    config = {"flip_prob": 0.5, "rotate_prob": 0.3, "noise_std": 0.02, "intensity_jitter": 0.1, "layout": SCAN}
    scans = Scans("left", 4 if smoke else 32)
    dataset = mk.VoxelDataset(scans, augmentation_config=config, layouts={"surface": SURFACE}, photometric=["scan"])

    def step(batch: dict[str, Tensor], _: int) -> None:
        with memory.phase("step"):
            trainer.train_step(batch, lambda model, micro: criterion(model(micro["scan"]), micro["surface"]))
        criterion.step()
        memory.step()

    def resize(batch: dict[str, Tensor], side: int) -> dict[str, Tensor]:
        values = " ".join(f"{name} {value.item():.3f}" for name, value in criterion.values.items())
        print(f"step {trainer.num_steps}, {side} voxels to a side: {values}")
        return {name: F.adaptive_max_pool3d(volume, side) for name, volume in batch.items()}

    stages = [mk.Stage(SIDE // 2, 4, epochs=1 if smoke else 8), mk.Stage(SIDE, 4, epochs=1 if smoke else 8)]
    mk.ProgressiveTrainer(step, stages, resize=resize).run(Epochs(dataset))
    print({name: round(value, 3) for name, value in evaluate(trainer, 2 if smoke else 8).items()})
    memory.close()
    mk.write_report(mk.read_memory_events(folder / "memory_events.jsonl"), folder / "report.html")
    print(f"report: {folder / 'report.html'}")


if __name__ == "__main__":
    main()
