"""Predict the memory of a training step before it runs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit._simulation.cuda.allocator import (
        AllocatorSettings as AllocatorSettings,
        CachingAllocator as CachingAllocator,
    )
    from memkit._simulation.shard import Shard as Shard
    from memkit._tape.plan import SavedTensorPlan as SavedTensorPlan
    from memkit.predict.config import TrainingConfig as TrainingConfig
    from memkit.predict.estimate import (
        Holder as Holder,
        MemoryEstimate as MemoryEstimate,
    )
    from memkit.predict.gpus import (
        GPU as GPU,
        all_gpus as all_gpus,
        find_gpu as find_gpu,
    )
    from memkit.predict.plan.plan import TrainingPlan as TrainingPlan
    from memkit.predict.presets import get_preset_config as get_preset_config
    from memkit.predict.scaling.deterministic import fit_points as fit_points
    from memkit.predict.scaling.measured import measure_scaling as measure_scaling
    from memkit.predict.scaling.points import ScalingPoint as ScalingPoint
    from memkit.predict.scaling.profile import profile_scaling as profile_scaling
    from memkit.predict.scaling.result import ScalingResult as ScalingResult
    from memkit.predict.summary import print_config_summary as print_config_summary
    from memkit.predict.usage import estimate_memory_usage as estimate_memory_usage
    from memkit.predict.virtual_gpu import VirtualGPU as VirtualGPU
    from memkit.predict.worst_batch import (
        WorstBatch as WorstBatch,
        find_worst_batch as find_worst_batch,
    )
else:  # a type checker would assume that `__getattr__` may provide any name
    from memkit._core.lazy import load_lazily

    _HOMES = {
        "AllocatorSettings": "memkit._simulation.cuda.allocator",
        "CachingAllocator": "memkit._simulation.cuda.allocator",
        "GPU": "memkit.predict.gpus",
        "Holder": "memkit.predict.estimate",
        "MemoryEstimate": "memkit.predict.estimate",
        "SavedTensorPlan": "memkit._tape.plan",
        "ScalingPoint": "memkit.predict.scaling.points",
        "ScalingResult": "memkit.predict.scaling.result",
        "Shard": "memkit._simulation.shard",
        "TrainingConfig": "memkit.predict.config",
        "TrainingPlan": "memkit.predict.plan.plan",
        "VirtualGPU": "memkit.predict.virtual_gpu",
        "WorstBatch": "memkit.predict.worst_batch",
        "all_gpus": "memkit.predict.gpus",
        "estimate_memory_usage": "memkit.predict.usage",
        "find_gpu": "memkit.predict.gpus",
        "find_worst_batch": "memkit.predict.worst_batch",
        "fit_points": "memkit.predict.scaling.deterministic",
        "get_preset_config": "memkit.predict.presets",
        "measure_scaling": "memkit.predict.scaling.measured",
        "print_config_summary": "memkit.predict.summary",
        "profile_scaling": "memkit.predict.scaling.profile",
    }
    __getattr__, __dir__, __all__ = load_lazily(__name__, _HOMES)
