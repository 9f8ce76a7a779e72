"""tatsu-lab/stanford_alpaca: supervised fine-tuning with the Hugging Face Trainer, only answers counted."""

from __future__ import annotations

import json

import torch

from benchmarks.acceptance.project import Copy, Project

UTILS = "import json\n\n\ndef jload(path):\n    return json.load(open(path))\n"
PRINT = """class Printer(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            print("LOSS", logs.get("loss"))

    trainer.add_callback(Printer())
    trainer.train()"""


def prepare(copy: Copy) -> None:
    write_model(copy)
    tasks = [json.loads(line) for line in (copy.root / "seed_tasks.jsonl").read_text().splitlines()]
    rows = [{"instruction": task["instruction"]} | task["instances"][0] for task in tasks]
    copy.write("data.json", json.dumps(rows), "its seed tasks, in the form of its data")
    copy.write("utils.py", UTILS, "the one function that is used; the rest needs openai")
    copy.replace("train.py", "tokenizer=tokenizer, args", "processing_class=tokenizer, args", "transformers 5's name")
    loaded = "    )\n\n    tokenizer = "
    dtype = f"        dtype=torch.get_default_dtype(),\n{loaded}"
    copy.replace("train.py", loaded, dtype, "computes in the dtype of the comparison")
    copy.replace("train.py", "trainer.train()", PRINT, "the loss is printed with all its digits")


def write_model(copy: Copy) -> None:
    """Write a small OPT, the script's default architecture, and a tokenizer of bytes, which needs no download."""
    from transformers import ByT5Tokenizer, OPTConfig, OPTForCausalLM

    tokenizer = ByT5Tokenizer()
    tokenizer.save_pretrained(copy.root / "model")
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        dropout=0.0,  # parts would draw other masks
    )
    OPTForCausalLM(config).save_pretrained(copy.root / "model")
    copy.changes.append("model: a small OPT without dropout, and a tokenizer of bytes")


PROJECT = Project(
    name="alpaca",
    repository="tatsu-lab/stanford_alpaca",
    commit="761dc5bfbdeeffa89b8bff5d038781a4055f796a",
    licence="Apache-2.0",
    files=("train.py", "seed_tasks.jsonl"),
    folder=".",
    command=(
        *("train.py", "--model_name_or_path", "model", "--data_path", "data.json", "--output_dir", "out"),
        *("--model_max_length", "256", "--per_device_train_batch_size", "16", "--learning_rate", "1e-3"),
        *("--logging_steps", "1", "--save_strategy", "no", "--report_to", "none", "--use_cpu"),
    ),
    num_steps=8,
    loss=r"LOSS ([\d.]+)",
    prepare=prepare,
    data="its own 175 seed tasks, by bytes: labels are the answers, of any length",
    exactness=1e-6,  # of the losses: transformers computes them in float32, whatever the dtype of the model
    shows="`MemoryEfficientTrainer` for `Trainer`: each batch of 16 in 4 parts, weighed by the tokens that count",
    failed="the probe of the first batch, in float64, takes more than the later steps: see warm_peak_bytes",
    peers=("transformers", "accelerate"),
)
