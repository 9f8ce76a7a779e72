"""What a process of `python -m benchmarks gpu` does: one case, its figures in a file and its words in a log."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path

import torch

import memkit as mk
from benchmarks.gpu.cases import CASES, Place
from memkit._machine.files import write_text


def main(name: str, place: Place, log: Path) -> None:
    """Run a case in this process, which is forked from one without a context of CUDA."""
    os.setsid()  # so that what it starts ends with it
    with log.open("w") as text:
        for stream in (1, 2):
            os.dup2(text.fileno(), stream)
    case = CASES[name]
    if case.hides_gpu or place.virtual:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if case.hides_gpu:
        torch.set_num_threads(1)  # others run beside it
    with mk.VirtualGPU(place.virtual) if place.virtual and not case.hides_gpu else nullcontext():
        figures = case.run(place)
    write_text(place.stem(name).with_suffix(".json"), json.dumps({"figures": figures}))
