"""Search for silence from a shell.

``python -m tests.search SEED INDEX`` judges one case; ``python -m tests.search SEED FIRST LAST [FINDINGS.md]`` judges
cases, counts, and writes the bad ones, shrunk.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from tests.search.judging import describe
from tests.search.searching import findings, search, summarize
from tests.search.specs import generate


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    seed, first = int(arguments[0]), int(arguments[1])
    if len(arguments) == 2:
        print(generate(seed, first))
        for each in search(seed, [first]):
            print(describe(each), f"error {each.error:.3g} tolerances of {each.parameter}", *each.notes, sep="\n    ")
        return
    start = time.monotonic()
    verdicts = list(search(seed, range(first, int(arguments[2]))))
    summary = summarize(verdicts)
    print(json.dumps(summary, indent=1), f"{time.monotonic() - start:.0f} s")
    if len(arguments) > 3:
        Path(arguments[3]).write_text(findings(verdicts) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
