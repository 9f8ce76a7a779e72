"""Estimates that are made up: whatever is not given is zero."""

from typing import Any

from memkit.predict.estimate import MemoryEstimate

_PARTS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "other")


def estimate_with(**figures: Any) -> MemoryEstimate:
    return MemoryEstimate(
        **dict.fromkeys([f"{part}_bytes" for part in _PARTS], 0)
        | {"peak_where": "here", "confidence": "exact"}
        | figures
    )
