"""memkit: train the PyTorch model you have on the GPU you have.

- `MemoryEfficientTrainingWrapper` runs your training step so that it fits, with
  the gradient of the whole batch.
- `estimate_memory_usage` says how much memory a step will need, and whether it
  fits, before it runs.
- `VirtualGPU` runs your own code on a simulated GPU, and shows where memory
  runs out.
- `prepare` plans micro-batches, precision and checkpointing for a budget, and
  returns the wrapper with these settings.
- `ChunkedProcessor` computes a function of many rows in chunks, forward and
  backward.
- `MemoryManager` measures the memory that was really used, and logs it for
  `write_report`.

Everything else is in the package of its topic: `memkit.predict`,
`memkit.train`, `memkit.chunk`, `memkit.memory`, `memkit.points`,
`memkit.voxel`, `memkit.report`, `memkit.check`, `memkit.recipes`,
`memkit.errors`, and for other frameworks `memkit.integrations`. `dir()` of each
lists its names.
"""

import logging
from typing import TYPE_CHECKING

from memkit._version import __version__ as __version__

if TYPE_CHECKING:
    from memkit import (
        check as check,
        chunk as chunk,
        errors as errors,
        memory as memory,
        points as points,
        predict as predict,
        recipes as recipes,
        report as report,
        train as train,
        voxel as voxel,
    )
    from memkit._core.errors import (
        MemkitError as MemkitError,
        MemkitOutOfMemoryError as MemkitOutOfMemoryError,
        MemkitWarning as MemkitWarning,
    )
    from memkit._gradients.loss import Loss as Loss
    from memkit._recovery.attempt import recover_from_oom as recover_from_oom
    from memkit._recovery.errors import is_out_of_memory as is_out_of_memory
    from memkit.chunk.cross_entropy import chunked_linear_cross_entropy as chunked_linear_cross_entropy
    from memkit.chunk.map import chunked_map as chunked_map
    from memkit.chunk.processor import ChunkedProcessor as ChunkedProcessor
    from memkit.chunk.resolution import DynamicResolutionProcessor as DynamicResolutionProcessor
    from memkit.chunk.segments import chunked_segment_reduce as chunked_segment_reduce
    from memkit.chunk.sparse import SparsityAwareProcessor as SparsityAwareProcessor
    from memkit.chunk.tiled import tiled_apply as tiled_apply
    from memkit.memory.manager import MemoryManager as MemoryManager
    from memkit.memory.track import Tracker as Tracker
    from memkit.points.grid import GridIndex as GridIndex
    from memkit.points.sampler import GridAwareSampler as GridAwareSampler
    from memkit.predict.gpus import find_gpu as find_gpu
    from memkit.predict.presets import get_preset_config as get_preset_config
    from memkit.predict.summary import print_config_summary as print_config_summary
    from memkit.predict.usage import estimate_memory_usage as estimate_memory_usage
    from memkit.predict.virtual_gpu import VirtualGPU as VirtualGPU
    from memkit.recipes.advice.advise import advise as advise
    from memkit.recipes.density import DensityInvariantTrainer as DensityInvariantTrainer
    from memkit.recipes.enhanced import create_enhanced_train_loop as create_enhanced_train_loop
    from memkit.recipes.loop import MemoryEfficientTrainLoop as MemoryEfficientTrainLoop
    from memkit.recipes.memory_test.config import MemoryTestConfig as MemoryTestConfig
    from memkit.recipes.planned import (
        plan_training as plan_training,
        prepare as prepare,
    )
    from memkit.recipes.progressive import ProgressiveTrainer as ProgressiveTrainer
    from memkit.recipes.report import write_report as write_report
    from memkit.recipes.state.manager import TrainingStateManager as TrainingStateManager
    from memkit.recipes.validation import ValidationMonitor as ValidationMonitor
    from memkit.train.accumulate import GradientAccumulator as GradientAccumulator
    from memkit.train.checkpointing import Checkpointing as Checkpointing
    from memkit.train.split_loss import SplitLoss as SplitLoss
    from memkit.train.wrapper import MemoryEfficientTrainingWrapper as MemoryEfficientTrainingWrapper
    from memkit.voxel.augment import VoxelAugmentation as VoxelAugmentation
    from memkit.voxel.compose import ComposedAugmentation as ComposedAugmentation
    from memkit.voxel.composite import CompositeLoss3D as CompositeLoss3D
    from memkit.voxel.cutout import CutoutAugmentation as CutoutAugmentation
    from memkit.voxel.losses import (
        OccupancyAwareLoss as OccupancyAwareLoss,
        StructurePreservingLoss as StructurePreservingLoss,
    )
    from memkit.voxel.mix import MixupAugmentation as MixupAugmentation
    from memkit.voxel.perceptual import Perceptual3DLoss as Perceptual3DLoss
else:  # hidden from type checkers, which would accept any name because of `__getattr__`
    from memkit._core.lazy import load_lazily

    _HOMES = {
        "Checkpointing": "memkit.train.checkpointing",
        "ChunkedProcessor": "memkit.chunk.processor",
        "ComposedAugmentation": "memkit.voxel.compose",
        "CompositeLoss3D": "memkit.voxel.composite",
        "CutoutAugmentation": "memkit.voxel.cutout",
        "DensityInvariantTrainer": "memkit.recipes.density",
        "DynamicResolutionProcessor": "memkit.chunk.resolution",
        "GradientAccumulator": "memkit.train.accumulate",
        "GridAwareSampler": "memkit.points.sampler",
        "GridIndex": "memkit.points.grid",
        "Loss": "memkit._gradients.loss",
        "MemkitError": "memkit._core.errors",
        "MemkitOutOfMemoryError": "memkit._core.errors",
        "MemkitWarning": "memkit._core.errors",
        "MemoryEfficientTrainLoop": "memkit.recipes.loop",
        "MemoryEfficientTrainingWrapper": "memkit.train.wrapper",
        "MemoryManager": "memkit.memory.manager",
        "MemoryTestConfig": "memkit.recipes.memory_test.config",
        "MixupAugmentation": "memkit.voxel.mix",
        "OccupancyAwareLoss": "memkit.voxel.losses",
        "Perceptual3DLoss": "memkit.voxel.perceptual",
        "ProgressiveTrainer": "memkit.recipes.progressive",
        "SparsityAwareProcessor": "memkit.chunk.sparse",
        "SplitLoss": "memkit.train.split_loss",
        "StructurePreservingLoss": "memkit.voxel.losses",
        "Tracker": "memkit.memory.track",
        "TrainingStateManager": "memkit.recipes.state.manager",
        "ValidationMonitor": "memkit.recipes.validation",
        "VirtualGPU": "memkit.predict.virtual_gpu",
        "VoxelAugmentation": "memkit.voxel.augment",
        "advise": "memkit.recipes.advice.advise",
        "chunked_linear_cross_entropy": "memkit.chunk.cross_entropy",
        "chunked_map": "memkit.chunk.map",
        "chunked_segment_reduce": "memkit.chunk.segments",
        "create_enhanced_train_loop": "memkit.recipes.enhanced",
        "estimate_memory_usage": "memkit.predict.usage",
        "find_gpu": "memkit.predict.gpus",
        "get_preset_config": "memkit.predict.presets",
        "is_out_of_memory": "memkit._recovery.errors",
        "plan_training": "memkit.recipes.planned",
        "prepare": "memkit.recipes.planned",
        "print_config_summary": "memkit.predict.summary",
        "recover_from_oom": "memkit._recovery.attempt",
        "tiled_apply": "memkit.chunk.tiled",
        "write_report": "memkit.recipes.report",
    }
    _PACKAGES = ("check", "chunk", "errors", "memory", "points", "predict", "recipes", "report", "train", "voxel")
    __getattr__, __dir__, __all__ = load_lazily(__name__, _HOMES, (*_PACKAGES, "integrations"))

# A library logs, and leaves it to the application to show the log.
logging.getLogger(__name__).addHandler(logging.NullHandler())
