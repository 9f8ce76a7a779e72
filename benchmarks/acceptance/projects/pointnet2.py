"""yanx27/Pointnet_Pointnet2_pytorch: layers that run again, with BatchNorm and random sampling inside."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.acceptance.project import Copy, Project

NUM_POINTS, NUM_TRAIN = 1024, 6
MESHES = ("airplane", "ant", "nut")


def prepare(copy: Copy) -> None:
    folder = copy.root / "data" / "modelnet40_normal_resampled"
    folder.mkdir(parents=True)
    (folder / "modelnet10_shape_names.txt").write_text("\n".join(MESHES))
    numbers = {"train": range(1, NUM_TRAIN + 1), "test": range(NUM_TRAIN + 1, NUM_TRAIN + 2)}
    for split, chosen in numbers.items():
        shapes = [f"{name}_{number:04d}" for name in MESHES for number in chosen]
        (folder / f"modelnet10_{split}.txt").write_text("\n".join(shapes))
    for name in MESHES:
        write_shapes(folder / name)
    copy.changes.append("data: points and normals of pyvista's meshes, in the form of ModelNet")
    script = "train_classification.py"
    copy.replace(script, "num_workers=10", "num_workers=0", "no workers")
    copy.replace(script, "loss.backward()", "loss.backward(); print('loss', loss.item())", "the loss is printed")


def write_shapes(folder: Path) -> None:
    """Draw points from the triangles of pyvista's mesh of that name by their area, anew for each shape."""
    from pyvista import examples

    folder.mkdir()
    mesh = getattr(examples, f"load_{folder.name}")()
    mesh = mesh.triangulate().compute_cell_sizes(length=False, volume=False).compute_normals(point_normals=False)
    corners, area = mesh.points[mesh.regular_faces], mesh["Area"]
    random = np.random.default_rng(0)
    for number in range(1, NUM_TRAIN + 2):
        chosen = random.choice(len(area), NUM_POINTS, p=area / area.sum())
        weights = random.dirichlet((1, 1, 1), NUM_POINTS)
        points = (corners[chosen] * weights[..., None]).sum(axis=1)
        rows = np.concatenate([points, mesh["Normals"][chosen]], axis=1)
        np.savetxt(folder / f"{folder.name}_{number:04d}.txt", rows, fmt="%.6f", delimiter=",")


PROJECT = Project(
    name="pointnet2",
    repository="yanx27/Pointnet_Pointnet2_pytorch",
    commit="eb64fe0b4c24055559cea26299cb485dcb43d8dd",
    licence="MIT",
    files=("train_classification.py", "provider.py", "data_utils", "models"),
    folder=".",
    command=(
        *("train_classification.py", "--model", "pointnet2_cls_ssg", "--use_cpu", "--use_normals"),
        *("--num_category", "10", "--batch_size", "2"),
    ),
    num_steps=8,
    loss=r"loss ([\d.e-]+)",
    prepare=prepare,
    data="1,024 points and normals of each of 18 shapes, drawn from 3 of pyvista's meshes",
    shows='`MemoryEfficientTrainingWrapper(..., checkpoint=["sa*"])`: statistics of BatchNorm and random points stay',
    control="`torch.utils.checkpoint` for the same layers: BatchNorm takes each batch into its statistics twice",
)
