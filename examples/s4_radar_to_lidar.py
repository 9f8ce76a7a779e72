"""S4: from a sparse scan to a dense one on voxel grids: resolution, augmentation, losses, stages, validation, report.

In the place of radar and LiDAR stands a brain's surface (fsaverage5, in nilearn's wheel): a 3D U-Net sees 3% of its
points, the depth of its folds as intensity, and learns the whole surface. The source's latent diffusion is not here:
the network answers in one step. It trains on the left hemisphere and is validated on the right one.

Run: pip install -c constraints.txt -e ".[test]" && python examples/s4_radar_to_lidar.py [--smoke]
"""

import argparse
import tempfile
from pathlib import Path

import _hemisphere
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit as mk

SIDE_MM, FINEST = 192.0, 64  # of the cube, in mm and in voxels
SCAN = mk.voxel.VoxelLayout(("occupancy", "intensity"), value_range=[(0, 1), (-2, 2)])
SURFACE = mk.voxel.VoxelLayout(("occupancy",), value_range=[(0, 1)])


class Scans:
    """A hemisphere, scanned again for each sample, on a grid that its points pay for: a source for `VoxelDataset`."""

    def __init__(self, side: str, num_scans: int, most_voxels: int) -> None:
        brain = _hemisphere.load(side, "pial")
        self.points, self.depth = brain.points - brain.points.mean(0), brain.depth / brain.depth.std()
        self.num_scans, resolution = num_scans, mk.DynamicResolutionProcessor(max_active_voxels=most_voxels)
        self.size = FINEST >> resolution.choose((self.points / SIDE_MM * FINEST).floor().long()).level

    def __len__(self) -> int:
        return self.num_scans

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        order = torch.randperm(len(self.points), generator=torch.Generator().manual_seed(index))
        scan, whole = (self.voxelize(rows) for rows in (order[: len(order) // 33], order))
        return {"scan": scan, "surface": whole[:1]}

    def voxelize(self, rows: Tensor) -> Tensor:
        """Occupied or not, and the mean depth of what lies in a voxel: (2, D, H, W)."""
        coords = ((self.points[rows] / SIDE_MM + 0.5) * self.size).long().clamp(0, self.size - 1)
        index = mk.GridIndex.from_coords(coords.float(), grid_size=1.0)
        mean = mk.points.voxel_mean(torch.stack([torch.ones(len(rows)), self.depth[rows]], 1), index)
        cells = coords[mk.points.first_points(index)]
        return mk.voxel.SparseVoxels.from_coords(cells, mean, shape=(self.size,) * 3).to_dense()[0]


class UNet(nn.Module):
    """Two levels; how sure it is that a voxel is occupied."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(2, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU())
        smaller, larger = nn.Conv3d(width, 2 * width, 3, 2, 1), nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.inner = nn.Sequential(smaller, nn.SiLU(), nn.Conv3d(2 * width, 2 * width, 3, 1, 1), nn.SiLU(), larger)
        self.head = nn.Conv3d(2 * width, 1, 3, padding=1)

    def forward(self, scan: Tensor) -> Tensor:
        level = self.down(scan)
        return self.head(torch.cat([level, self.inner(level)], 1)).sigmoid()


def validate(trainer: mk.MemoryEfficientTrainingWrapper, scans: Scans) -> dict[str, float]:
    size, rows = SIDE_MM / scans.size, []
    with trainer.evaluation() as evaluate:
        for sample in mk.voxel.VoxelDataset(scans, use_augmentation=False, layout=SCAN):
            found = evaluate(sample["scan"][None], lambda model, scan: model(scan) > 0.5)
            target = sample["surface"][None] > 0
            pairs = mk.voxel.nearest_points(*(each[0, 0].nonzero() * size for each in (found, target)))
            chamfer = mk.voxel.chamfer_distance(pairs, convention="occnet", empty_distance=SIDE_MM)
            rows.append([mk.voxel.voxel_iou(found, target), chamfer, mk.voxel.f_score(pairs, threshold=size)])
    return dict(zip(("iou", "chamfer", "f_score"), torch.tensor(rows).mean(0).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="seconds, not minutes")
    num_scans, every, most_voxels = (8, 1, 600) if parser.parse_args().smoke else (192, 6, 3000)
    torch.manual_seed(0)
    folder, model = Path(tempfile.mkdtemp()), UNet()
    preset = mk.get_preset_config("medium", 24)  # the source's: two scans at a time, four times for a step
    batch_size = preset.effective_batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    memory = mk.MemoryManager("cpu", log=folder / "memory_events.jsonl")
    trainer = mk.MemoryEfficientTrainingWrapper.from_config(model, optimizer, preset, checkpoint=True, memory=memory)
    features = mk.Perceptual3DLoss(in_channels=1, base_channels=8, num_levels=3), lambda step: min(0.1, step / 200)
    losses = {"voxels": (mk.OccupancyAwareLoss(4.0), 1.0), "edges": (mk.StructurePreservingLoss(), 0.5)}
    criterion = mk.CompositeLoss3D(losses | {"features": features})  # a loss, and its weight: a number or of the step
    draws = {"flip_prob": 0.5, "rotate_prob": 0.3, "noise_std": 0.02, "intensity_jitter": 0.1, "layout": SCAN}
    left, right = Scans("left", num_scans, most_voxels), Scans("right", max(2, every), most_voxels)
    dataset = mk.voxel.VoxelDataset(left, augmentation_config=draws, layouts={"surface": SURFACE}, photometric=["scan"])
    state, monitor = mk.TrainingStateManager(folder / "states", keep=1), mk.ValidationMonitor(mode="max", metric="iou")
    parts = {"model": model, "optimizer": optimizer, "monitor": monitor}

    def step(batch: dict[str, Tensor], _: int) -> None:
        trainer.train_step(batch, lambda model, micro: criterion(model(micro["scan"]), micro["surface"]))
        criterion.step()
        memory.step()
        if trainer.num_steps % every == 0:
            figures = {name: round(value, 3) for name, value in validate(trainer, right).items()}
            if monitor.update(figures["iou"]):
                state.save(trainer.num_steps, **parts)
            print(f"step {trainer.num_steps}, {batch['scan'].shape[-1]} voxels to a side:", figures)

    stages = [mk.recipes.Stage(left.size // 2, batch_size), mk.recipes.Stage(left.size, batch_size)]
    mk.ProgressiveTrainer(
        step, stages, resize=lambda batch, side: {name: F.adaptive_max_pool3d(x, side) for name, x in batch.items()}
    ).run(mk.train.make_dataloader(dataset, batch_size, num_workers=0))
    memory.close()
    mk.write_report(mk.report.read_memory_events(folder / "memory_events.jsonl"), folder / "report.html")
    print(f"best: step {state.restore(**parts)}, IoU {monitor.best:.3f}; report: {folder / 'report.html'}")


if __name__ == "__main__":
    main()
