"""Runs one case, in the process that the command starts for it: python -m benchmarks.gpu.child CASE FOLDER [CARD]."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import memkit as mk
from benchmarks.gpu.cases import CASES, Place
from memkit._machine.files import write_text


def main(name: str, folder: str, virtual: str | None = None) -> None:
    place = Place(Path(folder), virtual)
    case = CASES[name]
    with mk.VirtualGPU(virtual) if virtual and not case.hides_gpu else nullcontext():
        figures = case.run(place)
    path = place.stem(name).with_suffix(".json")
    write_text(path, json.dumps({"figures": figures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
