"""memkit: train the PyTorch model you have on the GPU you have.

This module holds names only. Each one is loaded on first use (PEP 562), so that ``import memkit`` costs nothing and
has no side effect; the code behind a name lives in the room that `_HOMES` says.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from memkit._version import __version__

if TYPE_CHECKING:
    from memkit._errors import (
        ConfigError,
        FileFormatError,
        InputError,
        InputTypeError,
        MemkitError,
        MemkitOutOfMemoryError,
        MemkitWarning,
        StateError,
        TorchVersionError,
    )
    from memkit._eventlog import read_memory_events
    from memkit._loss import Loss
    from memkit._recovery.attempt import recover_from_oom
    from memkit._recovery.errors import is_out_of_memory
    from memkit._simulation.cuda.allocator import AllocatorSettings, CachingAllocator
    from memkit._simulation.shard import Shard
    from memkit._units import format_bytes, parse_bytes
    from memkit._voxels import SparseVoxels
    from memkit.assemble.advice.advise import advise
    from memkit.assemble.advice.record import Advice, AdviceTable
    from memkit.assemble.density import DensityInvariantTrainer
    from memkit.assemble.density_records import PointBatch, PointScene
    from memkit.assemble.enhanced import create_enhanced_train_loop
    from memkit.assemble.prepare import PreparedTrainer, plan_training, prepare
    from memkit.assemble.report import write_report
    from memkit.check.check import check_paths, check_source
    from memkit.check.findings import Finding
    from memkit.chunk.cross_entropy import chunked_linear_cross_entropy
    from memkit.chunk.loss import chunked_loss
    from memkit.chunk.map import chunked_map
    from memkit.chunk.processor import ChunkedProcessor
    from memkit.chunk.resolution import DynamicResolutionProcessor
    from memkit.chunk.segments import chunked_segment_reduce
    from memkit.chunk.sparse import SparsityAwareProcessor
    from memkit.chunk.submanifold import submanifold_conv3d
    from memkit.chunk.tiled import tiled_apply
    from memkit.memory.manager import MemoryManager
    from memkit.memory.track import Tracker
    from memkit.planning.config import TrainingConfig
    from memkit.planning.estimate import Holder, MemoryEstimate
    from memkit.planning.gpus import GPU, all_gpus, find_gpu
    from memkit.planning.plan.plan import TrainingPlan
    from memkit.planning.predict import estimate_memory_usage
    from memkit.planning.presets import get_preset_config
    from memkit.planning.scaling.config import MemoryTestConfig
    from memkit.planning.scaling.fit import fit_points
    from memkit.planning.scaling.measured import measure_scaling
    from memkit.planning.scaling.outputs import MemoryTestResult
    from memkit.planning.scaling.points import ScalingPoint
    from memkit.planning.scaling.profile import profile_scaling
    from memkit.planning.scaling.result import ScalingResult
    from memkit.planning.scaling.sweep import run_memory_test
    from memkit.planning.summary import print_config_summary
    from memkit.planning.virtual_gpu import VirtualGPU
    from memkit.points.batches import BudgetBatchSampler
    from memkit.points.edges import sample_edges
    from memkit.points.grid import GridIndex
    from memkit.points.packed import split_packed
    from memkit.points.sample import GridSample
    from memkit.points.sampler import GridAwareSampler
    from memkit.points.voxels import first_points, fragments, voxel_mean
    from memkit.report.exports import export_log
    from memkit.train.accumulate import GradientAccumulator
    from memkit.train.checkpointing import Checkpointing
    from memkit.train.compact import CompactRecords, CompactStrings
    from memkit.train.contrastive import cached_backward
    from memkit.train.loader import LoaderPlan, make_dataloader, to_device
    from memkit.train.loop import LoopResult, MemoryEfficientTrainLoop
    from memkit.train.offload import offload_activations
    from memkit.train.order import ResumableBatchSampler, ResumableLoader
    from memkit.train.parameterwise import materialize_state, register_parameterwise
    from memkit.train.penalty import gradient_penalty
    from memkit.train.progressive import ProgressiveTrainer, Stage
    from memkit.train.reducers import Accuracy, ConfusionCounts, Mean, WeightedMean
    from memkit.train.schedules import make_schedule
    from memkit.train.split_loss import SplitLoss
    from memkit.train.state import TrainingStateManager
    from memkit.train.state_offload import offload_state
    from memkit.train.step_in_backward import step_in_backward
    from memkit.train.transaction import atomic_steps
    from memkit.train.validation import ValidationMonitor
    from memkit.train.wrapper import MemoryEfficientTrainingWrapper
    from memkit.voxel.augment import VoxelAugmentation
    from memkit.voxel.augment_base import VoxelPoints
    from memkit.voxel.clouds import ChamferConvention, chamfer_distance, density_aware_chamfer, hausdorff_distance
    from memkit.voxel.compose import ComposedAugmentation
    from memkit.voxel.composite import CompositeLoss3D
    from memkit.voxel.cutout import CutoutAugmentation
    from memkit.voxel.dataset import VoxelDataset
    from memkit.voxel.grids import VoxelScores, feature_mae, voxel_iou, voxel_scores
    from memkit.voxel.layout import VoxelLayout
    from memkit.voxel.losses import ChamferLoss, OccupancyAwareLoss, StructurePreservingLoss
    from memkit.voxel.mix import CutmixAugmentation, MixedLabels, MixupAugmentation
    from memkit.voxel.nearest import NearestPoints, nearest_points
    from memkit.voxel.params import AugmentationParams, VoxelDraw, VoxelParams
    from memkit.voxel.perceptual import Perceptual3DLoss, SliceLoss
    from memkit.voxel.recall import PrecisionRecall, f_score, precision_recall
    from memkit.voxel.streaming import PointCloudMetrics, VoxelMetrics

_HOMES = {
    "Accuracy": "train.reducers",
    "Advice": "assemble.advice.record",
    "AdviceTable": "assemble.advice.record",
    "AllocatorSettings": "_simulation.cuda.allocator",
    "AugmentationParams": "voxel.params",
    "BudgetBatchSampler": "points.batches",
    "CachingAllocator": "_simulation.cuda.allocator",
    "ChamferConvention": "voxel.clouds",
    "ChamferLoss": "voxel.losses",
    "Checkpointing": "train.checkpointing",
    "ChunkedProcessor": "chunk.processor",
    "CompactRecords": "train.compact",
    "CompactStrings": "train.compact",
    "ComposedAugmentation": "voxel.compose",
    "CompositeLoss3D": "voxel.composite",
    "ConfigError": "_errors",
    "ConfusionCounts": "train.reducers",
    "CutmixAugmentation": "voxel.mix",
    "CutoutAugmentation": "voxel.cutout",
    "DensityInvariantTrainer": "assemble.density",
    "DynamicResolutionProcessor": "chunk.resolution",
    "FileFormatError": "_errors",
    "Finding": "check.findings",
    "GPU": "planning.gpus",
    "GradientAccumulator": "train.accumulate",
    "GridAwareSampler": "points.sampler",
    "GridIndex": "points.grid",
    "GridSample": "points.sample",
    "Holder": "planning.estimate",
    "InputError": "_errors",
    "InputTypeError": "_errors",
    "LoaderPlan": "train.loader",
    "LoopResult": "train.loop",
    "Loss": "_loss",
    "Mean": "train.reducers",
    "MemkitError": "_errors",
    "MemkitOutOfMemoryError": "_errors",
    "MemkitWarning": "_errors",
    "MemoryEfficientTrainLoop": "train.loop",
    "MemoryEfficientTrainingWrapper": "train.wrapper",
    "MemoryEstimate": "planning.estimate",
    "MemoryManager": "memory.manager",
    "MemoryTestConfig": "planning.scaling.config",
    "MemoryTestResult": "planning.scaling.outputs",
    "MixedLabels": "voxel.mix",
    "MixupAugmentation": "voxel.mix",
    "NearestPoints": "voxel.nearest",
    "OccupancyAwareLoss": "voxel.losses",
    "Perceptual3DLoss": "voxel.perceptual",
    "PointBatch": "assemble.density_records",
    "PointCloudMetrics": "voxel.streaming",
    "PointScene": "assemble.density_records",
    "PrecisionRecall": "voxel.recall",
    "PreparedTrainer": "assemble.prepare",
    "ProgressiveTrainer": "train.progressive",
    "ResumableBatchSampler": "train.order",
    "ResumableLoader": "train.order",
    "ScalingPoint": "planning.scaling.points",
    "ScalingResult": "planning.scaling.result",
    "Shard": "_simulation.shard",
    "SliceLoss": "voxel.perceptual",
    "SparseVoxels": "_voxels",
    "SparsityAwareProcessor": "chunk.sparse",
    "SplitLoss": "train.split_loss",
    "Stage": "train.progressive",
    "StateError": "_errors",
    "StructurePreservingLoss": "voxel.losses",
    "TorchVersionError": "_errors",
    "Tracker": "memory.track",
    "TrainingConfig": "planning.config",
    "TrainingPlan": "planning.plan.plan",
    "TrainingStateManager": "train.state",
    "ValidationMonitor": "train.validation",
    "VirtualGPU": "planning.virtual_gpu",
    "VoxelAugmentation": "voxel.augment",
    "VoxelDataset": "voxel.dataset",
    "VoxelDraw": "voxel.params",
    "VoxelLayout": "voxel.layout",
    "VoxelMetrics": "voxel.streaming",
    "VoxelParams": "voxel.params",
    "VoxelPoints": "voxel.augment_base",
    "VoxelScores": "voxel.grids",
    "WeightedMean": "train.reducers",
    "advise": "assemble.advice.advise",
    "all_gpus": "planning.gpus",
    "atomic_steps": "train.transaction",
    "cached_backward": "train.contrastive",
    "chamfer_distance": "voxel.clouds",
    "check_paths": "check.check",
    "check_source": "check.check",
    "chunked_linear_cross_entropy": "chunk.cross_entropy",
    "chunked_loss": "chunk.loss",
    "chunked_map": "chunk.map",
    "chunked_segment_reduce": "chunk.segments",
    "create_enhanced_train_loop": "assemble.enhanced",
    "density_aware_chamfer": "voxel.clouds",
    "estimate_memory_usage": "planning.predict",
    "export_log": "report.exports",
    "f_score": "voxel.recall",
    "feature_mae": "voxel.grids",
    "find_gpu": "planning.gpus",
    "first_points": "points.voxels",
    "fit_points": "planning.scaling.fit",
    "format_bytes": "_units",
    "fragments": "points.voxels",
    "get_preset_config": "planning.presets",
    "gradient_penalty": "train.penalty",
    "hausdorff_distance": "voxel.clouds",
    "is_out_of_memory": "_recovery.errors",
    "make_dataloader": "train.loader",
    "make_schedule": "train.schedules",
    "materialize_state": "train.parameterwise",
    "measure_scaling": "planning.scaling.measured",
    "nearest_points": "voxel.nearest",
    "offload_activations": "train.offload",
    "offload_state": "train.state_offload",
    "parse_bytes": "_units",
    "plan_training": "assemble.prepare",
    "precision_recall": "voxel.recall",
    "prepare": "assemble.prepare",
    "print_config_summary": "planning.summary",
    "profile_scaling": "planning.scaling.profile",
    "read_memory_events": "_eventlog",
    "recover_from_oom": "_recovery.attempt",
    "register_parameterwise": "train.parameterwise",
    "run_memory_test": "planning.scaling.sweep",
    "sample_edges": "points.edges",
    "split_packed": "points.packed",
    "step_in_backward": "train.step_in_backward",
    "submanifold_conv3d": "chunk.submanifold",
    "tiled_apply": "chunk.tiled",
    "to_device": "train.loader",
    "voxel_iou": "voxel.grids",
    "voxel_mean": "points.voxels",
    "voxel_scores": "voxel.grids",
    "write_report": "assemble.report",
}

__all__ = [  # noqa: RUF022 - in plain order, as dir() gives it
    "Accuracy",
    "Advice",
    "AdviceTable",
    "AllocatorSettings",
    "AugmentationParams",
    "BudgetBatchSampler",
    "CachingAllocator",
    "ChamferConvention",
    "ChamferLoss",
    "Checkpointing",
    "ChunkedProcessor",
    "CompactRecords",
    "CompactStrings",
    "ComposedAugmentation",
    "CompositeLoss3D",
    "ConfigError",
    "ConfusionCounts",
    "CutmixAugmentation",
    "CutoutAugmentation",
    "DensityInvariantTrainer",
    "DynamicResolutionProcessor",
    "FileFormatError",
    "Finding",
    "GPU",
    "GradientAccumulator",
    "GridAwareSampler",
    "GridIndex",
    "GridSample",
    "Holder",
    "InputError",
    "InputTypeError",
    "LoaderPlan",
    "LoopResult",
    "Loss",
    "Mean",
    "MemkitError",
    "MemkitOutOfMemoryError",
    "MemkitWarning",
    "MemoryEfficientTrainLoop",
    "MemoryEfficientTrainingWrapper",
    "MemoryEstimate",
    "MemoryManager",
    "MemoryTestConfig",
    "MemoryTestResult",
    "MixedLabels",
    "MixupAugmentation",
    "NearestPoints",
    "OccupancyAwareLoss",
    "Perceptual3DLoss",
    "PointBatch",
    "PointCloudMetrics",
    "PointScene",
    "PrecisionRecall",
    "PreparedTrainer",
    "ProgressiveTrainer",
    "ResumableBatchSampler",
    "ResumableLoader",
    "ScalingPoint",
    "ScalingResult",
    "Shard",
    "SliceLoss",
    "SparseVoxels",
    "SparsityAwareProcessor",
    "SplitLoss",
    "Stage",
    "StateError",
    "StructurePreservingLoss",
    "TorchVersionError",
    "Tracker",
    "TrainingConfig",
    "TrainingPlan",
    "TrainingStateManager",
    "ValidationMonitor",
    "VirtualGPU",
    "VoxelAugmentation",
    "VoxelDataset",
    "VoxelDraw",
    "VoxelLayout",
    "VoxelMetrics",
    "VoxelParams",
    "VoxelPoints",
    "VoxelScores",
    "WeightedMean",
    "__version__",
    "advise",
    "all_gpus",
    "atomic_steps",
    "cached_backward",
    "chamfer_distance",
    "check_paths",
    "check_source",
    "chunked_linear_cross_entropy",
    "chunked_loss",
    "chunked_map",
    "chunked_segment_reduce",
    "create_enhanced_train_loop",
    "density_aware_chamfer",
    "estimate_memory_usage",
    "export_log",
    "f_score",
    "feature_mae",
    "find_gpu",
    "first_points",
    "fit_points",
    "format_bytes",
    "fragments",
    "get_preset_config",
    "gradient_penalty",
    "hausdorff_distance",
    "is_out_of_memory",
    "make_dataloader",
    "make_schedule",
    "materialize_state",
    "measure_scaling",
    "nearest_points",
    "offload_activations",
    "offload_state",
    "parse_bytes",
    "plan_training",
    "precision_recall",
    "prepare",
    "print_config_summary",
    "profile_scaling",
    "read_memory_events",
    "recover_from_oom",
    "register_parameterwise",
    "run_memory_test",
    "sample_edges",
    "split_packed",
    "step_in_backward",
    "submanifold_conv3d",
    "tiled_apply",
    "to_device",
    "voxel_iou",
    "voxel_mean",
    "voxel_scores",
    "write_report",
]

# A library logs, and leaves it to the application whether anybody sees it.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"memkit.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return __all__
