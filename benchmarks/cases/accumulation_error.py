"""Gradient errors of accumulation over one epoch of padded text, group by group: `loss / steps`, and memkit's weights.

The training is that of `examples/exact_accumulation.py`. An error is |gradient - that of the whole group in one batch|,
divided by |that|, in float64.

Run: python -m benchmarks.cases.accumulation_error   (1 minute)
"""

from __future__ import annotations

import copy

import torch

from benchmarks.result import write_result
from examples.exact_accumulation import CharModel, read_lines, train


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start, data = CharModel().double(), read_lines(1000)
    figures = {}
    for name, exact in (("loss / steps", False), ("memkit", True)):
        errors = train(copy.deepcopy(start), data, exact=exact)
        figures[name] = {
            "median": sorted(errors)[len(errors) // 2],
            "largest": max(errors),
            "last": errors[-1],
            "errors": errors,
        }
        print(name, {key: value for key, value in figures[name].items() if key != "errors"})
    print(write_result("accumulation_error", figures))


if __name__ == "__main__":
    main()
