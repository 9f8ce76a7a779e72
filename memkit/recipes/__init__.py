"""Ready-made loops that combine packages: planned training, advice, validation, resumable state, densities."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit.recipes.advice.advise import advise as advise
    from memkit.recipes.advice.record import (
        Advice as Advice,
        AdviceTable as AdviceTable,
    )
    from memkit.recipes.density import DensityInvariantTrainer as DensityInvariantTrainer
    from memkit.recipes.density_records import (
        PointBatch as PointBatch,
        PointScene as PointScene,
    )
    from memkit.recipes.enhanced import create_enhanced_train_loop as create_enhanced_train_loop
    from memkit.recipes.loop import (
        LoopResult as LoopResult,
        MemoryEfficientTrainLoop as MemoryEfficientTrainLoop,
    )
    from memkit.recipes.memory_test.config import MemoryTestConfig as MemoryTestConfig
    from memkit.recipes.memory_test.outputs import MemoryTestResult as MemoryTestResult
    from memkit.recipes.memory_test.sweep import run_memory_test as run_memory_test
    from memkit.recipes.order import (
        ResumableBatchSampler as ResumableBatchSampler,
        ResumableLoader as ResumableLoader,
    )
    from memkit.recipes.planned import (
        PreparedTrainer as PreparedTrainer,
        plan_training as plan_training,
        prepare as prepare,
    )
    from memkit.recipes.progressive import (
        ProgressiveTrainer as ProgressiveTrainer,
        Stage as Stage,
    )
    from memkit.recipes.reducers import (
        Accuracy as Accuracy,
        Mean as Mean,
        WeightedMean as WeightedMean,
    )
    from memkit.recipes.report import write_report as write_report
    from memkit.recipes.state.manager import TrainingStateManager as TrainingStateManager
    from memkit.recipes.validation import ValidationMonitor as ValidationMonitor
else:  # hidden from type checkers, which would accept any name because of `__getattr__`
    from memkit._core.lazy import load_lazily

    _HOMES = {
        "Accuracy": "memkit.recipes.reducers",
        "Advice": "memkit.recipes.advice.record",
        "AdviceTable": "memkit.recipes.advice.record",
        "DensityInvariantTrainer": "memkit.recipes.density",
        "LoopResult": "memkit.recipes.loop",
        "Mean": "memkit.recipes.reducers",
        "MemoryEfficientTrainLoop": "memkit.recipes.loop",
        "MemoryTestConfig": "memkit.recipes.memory_test.config",
        "MemoryTestResult": "memkit.recipes.memory_test.outputs",
        "PointBatch": "memkit.recipes.density_records",
        "PointScene": "memkit.recipes.density_records",
        "PreparedTrainer": "memkit.recipes.planned",
        "ProgressiveTrainer": "memkit.recipes.progressive",
        "ResumableBatchSampler": "memkit.recipes.order",
        "ResumableLoader": "memkit.recipes.order",
        "Stage": "memkit.recipes.progressive",
        "TrainingStateManager": "memkit.recipes.state.manager",
        "ValidationMonitor": "memkit.recipes.validation",
        "WeightedMean": "memkit.recipes.reducers",
        "advise": "memkit.recipes.advice.advise",
        "create_enhanced_train_loop": "memkit.recipes.enhanced",
        "plan_training": "memkit.recipes.planned",
        "prepare": "memkit.recipes.planned",
        "run_memory_test": "memkit.recipes.memory_test.sweep",
        "write_report": "memkit.recipes.report",
    }
    __getattr__, __dir__, __all__ = load_lazily(__name__, _HOMES)
