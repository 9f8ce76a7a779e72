"""Virtual GPUs against recorded GPU runs of language models: what they reserved, and the least they ran in.

The rows are public: `benchmarks.recorded_xmem` says how they came about. They are read from `recorded_gpu_runs.json`
in a folder outside of this repository. The models are built from their published configurations, without their weights.

A batch is as long as its longest row, and a row has at most 128 tokens. With more than ten rows a batch nearly always
has one of that length. With fewer, the lengths of a run are not known: what shorter ones would change is told beside.

Run: python -m benchmarks.cases.recorded_transformers FOLDER   (3 minutes; needs transformers 4.51, as recorded)
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.recorded import let_torchvision_be_imported, read_rows
from benchmarks.recorded_xmem import figures_of, scores
from benchmarks.result import write_result

RECORDED_WITH = "4.51"
_QWEN = {"vocab_size": 151936, "rms_norm_eps": 1e-6}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "cerebras/Cerebras-GPT-111M": {
        "model_type": "gpt2",
        "n_layer": 10,
        "n_inner": 3072,
        "n_positions": 2048,
        "activation_function": "gelu",
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        **_QWEN,
    },
    "distilbert/distilgpt2": {"model_type": "gpt2", "n_layer": 6},
    "EleutherAI/gpt-neo-125M": {
        "model_type": "gpt_neo",
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "attention_types": [[["global", "local"], 6]],
    },
    "openai-community/gpt2": {"model_type": "gpt2"},
    "Qwen/Qwen3-4B": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        **_QWEN,
    },
}
LONGEST, MANY_ROWS = 128, 10
FULL = (LONGEST,) * 4
SHORTER = (LONGEST, 120, LONGEST, LONGEST)  # what a longest row of 120 tokens in one batch changes
SHORT = (64,) * 4  # for batches of one row
_LENGTHS = (
    "explained if lengths differed: they were not recorded. Where the longest row of the second batch has 120 tokens, "
    "%s MiB are predicted, and %s MiB were recorded. The run does not need it: again, under a cap of %s MiB, it took "
    "%s, and %s MiB are predicted"
)
REASONS = {
    "x094": _LENGTHS % ("4,094", "4,088", "3,611", "3,392", "3,398"),
    "x109": _LENGTHS % ("3,454", "3,456", "3,093", "2,996", "3,004"),
    "x098": (
        "explained in part: one block of 5.6 MiB lies in the only free room for a batch's logits (368 MiB); with 2 MiB "
        "more at the start it lies elsewhere, and 3,768 MiB are predicted. What these 2 MiB are is not known"
    ),
}


def train(row: dict[str, Any], lengths: tuple[int, ...] = FULL) -> int:
    """The recorded loop; where the place of `zero_grad` was not recorded, it is after the step, as in the early code.

    Returns:
        Zero: this loop waits for two seconds before it moves the model, so that the first sample holds nothing of it.
    """
    import transformers
    from transformers.modeling_utils import no_init_weights

    mode = 2 if row["zero_grad_mode"] is None else row["zero_grad_mode"]
    config = transformers.AutoConfig.for_model(**CONFIGURATIONS[row["model"]])
    with no_init_weights():  # nothing reads them, so that they take no memory of the host
        model = transformers.AutoModelForCausalLM.from_config(config).train()
    model.tie_weights()  # which is part of the initialization
    if row["optimizer"] == "Adafactor":
        optimizer = transformers.Adafactor(model.parameters(), lr=1e-3, relative_step=False)
    else:
        optimizer = getattr(torch.optim, row["optimizer"])(model.parameters(), lr=1e-3)
    model.cuda()
    for length in lengths:
        tokens = torch.ones(row["batch"], length, dtype=torch.long)
        batch = {name: tokens.clone() for name in ("input_ids", "attention_mask", "labels")}
        if mode == 0:
            optimizer.zero_grad()
        batch = {name: each.cuda() for name, each in batch.items()}
        outputs = model(**batch)  # bound until the next ones are there, as in the recorded loop
        if mode == 1:
            optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        if mode == 2:
            optimizer.zero_grad()
    return 0


def figures_with_lengths(row: dict[str, Any]) -> dict[str, Any]:
    figures = figures_of(row, train)
    if row["batch"] > MANY_ROWS or row["oom"]:
        return figures
    lengths = SHORT if row["batch"] == 1 else SHORTER
    other = figures_of(row, partial(train, lengths=lengths))
    told = {"other_lengths_bytes": other["predicted_bytes"], "other_range": other["reserved_range"]}
    return figures | {"other_lengths": lengths, **told}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    let_torchvision_be_imported()  # transformers imports it where it is installed
    import transformers

    if not transformers.__version__.startswith(RECORDED_WITH):
        parser.error(
            f"transformers {transformers.__version__} is installed; these runs were recorded with {RECORDED_WITH}"
        )
    torch.set_num_threads(1)
    taken = [row for row in read_rows(given.folder, "xMem") if row["model"] in CONFIGURATIONS]
    figures = scores({row["id"]: figures_with_lengths(row) for row in taken}, REASONS)
    print(write_result("recorded_transformers", figures, peers=("transformers",)))


if __name__ == "__main__":
    main()
