"""Models with a batch, a loss and an optimizer, in the form that `estimate_memory_usage` takes: `STEPS[name]()`."""

from tests.predict import steps_grids, steps_others
from tests.predict.step import STEPS, Step, classify, labels

__all__ = ["STEPS", "Step", "classify", "labels", "steps_grids", "steps_others"]
