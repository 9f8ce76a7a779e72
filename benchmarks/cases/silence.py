"""Generated training steps that memkit splits: each is equal to the whole batch's, warned of, or refused.

The grammar, the float64 oracle and the judge are `tests/search`; ``python -m tests.search 16 INDEX`` shows one case.

Run: python -m benchmarks.cases.silence   (10 minutes); `tests/search/test_silence.py` runs a part of it.
"""

from __future__ import annotations

import torch

from benchmarks.result import write_result
from tests.search.searching import NUM_CASES, SEED, search, summarize


def main() -> None:
    torch.set_num_threads(1)
    figures = summarize(list(search(SEED, range(NUM_CASES))))
    print(figures["verdicts"], *figures["bad"], sep="\n")
    print(write_result("silence", {"seed": SEED} | figures))


if __name__ == "__main__":
    main()
