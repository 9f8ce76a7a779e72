"""Generated inputs for all losses, right ones and wrong ones: each gives a finite result or a typed error."""

import math
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from memkit._core.errors import MemkitError
from memkit._core.sparse_voxels import SparseVoxels
from memkit.voxel.clouds import chamfer_distance
from memkit.voxel.composite import CompositeLoss3D
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.losses import OccupancyAwareLoss, StructurePreservingLoss
from memkit.voxel.perceptual import Perceptual3DLoss, SliceLoss

_DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)


def fuzz(num_inputs, *, seed):
    """How many gave a result (finite, with a finite gradient) and how many a typed error; anything else raises."""
    draw = np.random.default_rng(seed)
    losses = _losses()
    counts = {"results": 0, "typed errors": 0}
    for _ in range(num_inputs):
        kind = draw.choice(["settings", "clouds", "volumes"], p=[0.05, 0.15, 0.8])
        try:
            if kind == "settings":
                _settings(draw)
            elif kind == "clouds":
                _check(partial(chamfer_distance, empty_distance=1.0), *_clouds(draw))
            else:
                _check(losses[draw.integers(len(losses))], *_volumes(draw), autocast=draw.random() < 0.2)
            counts["results"] += 1
        except MemkitError as error:
            counts["typed errors"] += all((error.call, error.got, error.expected, error.fix))
    return counts


def _losses():
    perceptual = [
        Perceptual3DLoss(channels, 2, use_checkpoint, num_levels=levels, chunk_size=chunk)
        for channels, levels, chunk, use_checkpoint in [(1, 1, 1, False), (2, 3, 2, True), (4, 4, 3, False)]
    ]
    return [
        *perceptual,
        SliceLoss(nn.L1Loss(), chunk_size=3),
        StructurePreservingLoss(),
        *(OccupancyAwareLoss(kind=kind) for kind in ("l1", "mse", "bce")),
        OccupancyAwareLoss(layout=VoxelLayout(["occupancy", "scalar"], empty_value=-1.0)),
        CompositeLoss3D(
            {"edges": (StructurePreservingLoss(), lambda step: 0.5), "voxels": (OccupancyAwareLoss(), 1.0)}
        ),
    ]


def _check(loss, prediction, target, *, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(prediction, target)
    assert value.dim() == 0
    assert value.isfinite()
    value.backward()
    for each in [prediction] if isinstance(prediction, torch.Tensor) else prediction:
        assert each.grad is None or each.grad.isfinite().all()


def _volumes(draw):
    num_channels, *sizes = draw.integers(1, 6, size=4).tolist()
    num_samples = int(draw.choice([0, 1, 1, 2, 2, 3, 3, 4]))
    shape = [num_samples, int(draw.choice([1, 2, 4, num_channels])), *sizes]
    prediction, target = _volume(draw, shape), _volume(draw, shape)
    flaw = draw.random()
    if flaw < 0.05:
        target = target[..., :-1]
    elif flaw < 0.1:
        prediction = prediction.flatten(int(draw.integers(0, 3)), 3)
    elif flaw < 0.13:
        target = SparseVoxels.from_dense(target)
    elif flaw < 0.16:
        prediction = prediction.long()
    elif flaw < 0.2:
        target = target > 0
    elif flaw < 0.23:
        target = target.numpy() if target.dtype != torch.bfloat16 else None
    if prediction.is_floating_point():
        prediction = prediction.detach().requires_grad_()
    return prediction, target


def _volume(draw, shape):
    """Noise, empty space of several values, single voxels, large values, one not contiguous."""
    volume = torch.from_numpy(draw.normal(size=shape))
    kind = draw.integers(7)
    if kind == 0:
        volume = torch.full(shape, float(draw.choice([0.0, -1.0, 1.0])), dtype=torch.float64)
    elif kind == 1:
        volume = volume * (torch.from_numpy(draw.random(shape)) > 0.95)
    elif kind == 2:
        volume = volume * 10.0 ** float(draw.integers(-6, 4))
    elif kind == 3:
        volume = volume.transpose(2, 3).contiguous().transpose(2, 3)
    return volume.to(_DTYPES[draw.integers(len(_DTYPES))])


def _clouds(draw):
    batches = []
    for _ in range(2):
        sizes = draw.integers(0, 6, size=draw.integers(1, 4)) if draw.random() < 0.2 else draw.integers(0, 6, size=2)
        dim = 3 if draw.random() < 0.9 else 2
        batches.append([_cloud(draw, size, dim) for size in sizes])
    return batches


def _cloud(draw, size, dim):
    cloud = torch.from_numpy(draw.normal(size=(size, dim)) * 10.0 ** float(draw.integers(-3, 4)))
    if size and draw.random() < 0.05:
        cloud[0] = float(draw.choice([math.nan, math.inf]))
    return cloud.to(_DTYPES[draw.integers(4)]).requires_grad_()


def _settings(draw):
    value = [0, 1, -1, 1.5, True, "1", None, math.nan, math.inf, 3][draw.integers(10)]
    makers = (
        lambda: Perceptual3DLoss(value, 2, num_levels=1),
        lambda: Perceptual3DLoss(1, value, num_levels=1),
        lambda: Perceptual3DLoss(1, 2, num_levels=value),
        lambda: Perceptual3DLoss(1, 2, num_levels=1, chunk_size=value),
        lambda: Perceptual3DLoss(1, 2, num_levels=1, seed=value),
        lambda: Perceptual3DLoss(1, 2, value, num_levels=1),
        lambda: SliceLoss(nn.L1Loss(), axes=value),
        lambda: OccupancyAwareLoss(value),
        lambda: OccupancyAwareLoss(kind=value),
        lambda: CompositeLoss3D(value),
        lambda: CompositeLoss3D({"a": value}),
        lambda: CompositeLoss3D({"a": (F.l1_loss, value)}),
        lambda: CompositeLoss3D({value: (F.l1_loss, 1.0)}),
    )
    makers[draw.integers(len(makers))]()
