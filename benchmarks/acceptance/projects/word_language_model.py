"""pytorch/examples, word_language_model: an LSTM whose logits are most of its step."""

from __future__ import annotations

from benchmarks.acceptance.project import Copy, Project, stdlib_text

SCRIPT = "word_language_model/main.py"


def prepare(copy: Copy) -> None:
    lines = stdlib_text(1_000_000).splitlines(keepends=True)
    bounds = {"train": (0, 0.9), "valid": (0.9, 0.95), "test": (0.95, 1)}
    for name, (start, end) in bounds.items():
        text = "".join(lines[int(start * len(lines)) : int(end * len(lines))])
        copy.write(f"word_language_model/stdlib/{name}.txt", text, "a part of the standard library's sources")
    copy.replace(SCRIPT, "loss {:5.2f} |", "loss {!r} |", "the loss is printed with all its digits")


PROJECT = Project(
    name="word_language_model",
    repository="pytorch/examples",
    commit="77f55b912142e11fcfdf5b530231fb9c52f181e8",
    licence="BSD-3-Clause",
    files=tuple(f"word_language_model/{name}.py" for name in ("main", "model", "data")),
    folder="word_language_model",
    command=(
        *("main.py", "--data", "stdlib", "--model", "LSTM", "--use-optimizer", "--lr", "0.001", "--epochs", "1"),
        *("--emsize", "64", "--nhid", "64", "--log-interval", "1"),
    ),
    num_steps=8,
    loss=r"loss (\S+) \| ppl",
    prepare=prepare,
    data="the standard library's sources by words, as the project's own tokenizer cuts them",
    failed="nothing; the script's Transformer keeps its own loss",
    shows="`chunked_linear_cross_entropy` for the decoder, its `log_softmax` and the loss, in training only: "
    "evaluation, generation and export stay as they are",
)
