"""karpathy/nanoGPT: GPT-2's vocabulary without its logits, and accumulation with the scaler and the clipping inside."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from benchmarks.acceptance.project import Copy, Project, stdlib_text


def prepare(copy: Copy) -> None:
    words = re.findall(r"\w+|\W", stdlib_text(2_000_000))
    ids = {word: number for number, (word, _) in enumerate(Counter(words).most_common())}
    tokens = np.array([ids[word] for word in words], dtype=np.uint16)
    what = f"{len(tokens):,} words of the standard library's sources, {len(ids):,} of them different"
    copy.write("data/stdlib/train.bin", tokens[: len(tokens) * 9 // 10].tobytes(), what)
    copy.write("data/stdlib/val.bin", tokens[len(tokens) * 9 // 10 :].tobytes(), "the last tenth of them")
    copy.replace("train.py", "loss {lossf:.4f}", "loss {lossf!r}", "the loss is printed with all its digits")


PROJECT = Project(
    name="nanogpt",
    repository="karpathy/nanoGPT",
    commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    licence="MIT",
    files=("train.py", "model.py", "configurator.py"),
    folder=".",
    command=(
        "train.py",
        *("--device=cpu", "--dtype=float32", "--compile=False", "--dataset=stdlib", "--eval_iters=1"),
        *("--n_layer=4", "--n_head=4", "--n_embd=128", "--block_size=128", "--batch_size=4"),
        *("--gradient_accumulation_steps=2", "--warmup_iters=2"),
    ),
    num_steps=6,
    loss=r"iter \d+: loss ([^,]+),",
    prepare=prepare,
    data="the standard library's sources by words, in GPT-2's 50,304 places",
    shows="`chunked_linear_cross_entropy` for the head and its loss; `GradientAccumulator` in place of "
    "accumulation, scaler and clipping by hand",
)
