"""Augmentations, losses and metrics for voxels and point clouds."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit._core.sparse_voxels import SparseVoxels as SparseVoxels
    from memkit.voxel.augment import VoxelAugmentation as VoxelAugmentation
    from memkit.voxel.clouds import (
        ChamferConvention as ChamferConvention,
        chamfer_distance as chamfer_distance,
        hausdorff_distance as hausdorff_distance,
    )
    from memkit.voxel.compose import ComposedAugmentation as ComposedAugmentation
    from memkit.voxel.composite import CompositeLoss3D as CompositeLoss3D
    from memkit.voxel.cutout import CutoutAugmentation as CutoutAugmentation
    from memkit.voxel.dataset import VoxelDataset as VoxelDataset
    from memkit.voxel.dropout import DropoutAugmentation as DropoutAugmentation
    from memkit.voxel.flip import FlipAugmentation as FlipAugmentation
    from memkit.voxel.grids import (
        VoxelScores as VoxelScores,
        feature_mae as feature_mae,
        voxel_iou as voxel_iou,
        voxel_scores as voxel_scores,
    )
    from memkit.voxel.jitter import (
        DopplerJitterAugmentation as DopplerJitterAugmentation,
        IntensityJitterAugmentation as IntensityJitterAugmentation,
    )
    from memkit.voxel.layout import VoxelLayout as VoxelLayout
    from memkit.voxel.losses import (
        OccupancyAwareLoss as OccupancyAwareLoss,
        StructurePreservingLoss as StructurePreservingLoss,
    )
    from memkit.voxel.mix import (
        MixedLabels as MixedLabels,
        MixupAugmentation as MixupAugmentation,
    )
    from memkit.voxel.nearest import (
        NearestPoints as NearestPoints,
        nearest_points as nearest_points,
    )
    from memkit.voxel.noise import NoiseAugmentation as NoiseAugmentation
    from memkit.voxel.operation import VoxelOperation as VoxelOperation
    from memkit.voxel.params import (
        AugmentationParams as AugmentationParams,
        VoxelDraw as VoxelDraw,
        VoxelParams as VoxelParams,
    )
    from memkit.voxel.perceptual import (
        Perceptual3DLoss as Perceptual3DLoss,
        SliceLoss as SliceLoss,
    )
    from memkit.voxel.recall import (
        PrecisionRecall as PrecisionRecall,
        f_score as f_score,
        precision_recall as precision_recall,
    )
    from memkit.voxel.rotate import RotateAugmentation as RotateAugmentation
    from memkit.voxel.samples import VoxelPoints as VoxelPoints
else:  # hidden from type checkers, which would accept any name because of `__getattr__`
    from memkit._core.lazy import load_lazily

    _HOMES = {
        "AugmentationParams": "memkit.voxel.params",
        "ChamferConvention": "memkit.voxel.clouds",
        "ComposedAugmentation": "memkit.voxel.compose",
        "CompositeLoss3D": "memkit.voxel.composite",
        "CutoutAugmentation": "memkit.voxel.cutout",
        "DopplerJitterAugmentation": "memkit.voxel.jitter",
        "DropoutAugmentation": "memkit.voxel.dropout",
        "FlipAugmentation": "memkit.voxel.flip",
        "IntensityJitterAugmentation": "memkit.voxel.jitter",
        "MixedLabels": "memkit.voxel.mix",
        "MixupAugmentation": "memkit.voxel.mix",
        "NearestPoints": "memkit.voxel.nearest",
        "NoiseAugmentation": "memkit.voxel.noise",
        "OccupancyAwareLoss": "memkit.voxel.losses",
        "Perceptual3DLoss": "memkit.voxel.perceptual",
        "PrecisionRecall": "memkit.voxel.recall",
        "RotateAugmentation": "memkit.voxel.rotate",
        "SliceLoss": "memkit.voxel.perceptual",
        "SparseVoxels": "memkit._core.sparse_voxels",
        "StructurePreservingLoss": "memkit.voxel.losses",
        "VoxelAugmentation": "memkit.voxel.augment",
        "VoxelDataset": "memkit.voxel.dataset",
        "VoxelDraw": "memkit.voxel.params",
        "VoxelLayout": "memkit.voxel.layout",
        "VoxelOperation": "memkit.voxel.operation",
        "VoxelParams": "memkit.voxel.params",
        "VoxelPoints": "memkit.voxel.samples",
        "VoxelScores": "memkit.voxel.grids",
        "chamfer_distance": "memkit.voxel.clouds",
        "f_score": "memkit.voxel.recall",
        "feature_mae": "memkit.voxel.grids",
        "hausdorff_distance": "memkit.voxel.clouds",
        "nearest_points": "memkit.voxel.nearest",
        "precision_recall": "memkit.voxel.recall",
        "voxel_iou": "memkit.voxel.grids",
        "voxel_scores": "memkit.voxel.grids",
    }
    __getattr__, __dir__, __all__ = load_lazily(__name__, _HOMES)
