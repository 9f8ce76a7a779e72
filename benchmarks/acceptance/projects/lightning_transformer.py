"""Lightning-AI/pytorch-lightning: its language model example as a `MemoryEfficientModule`."""

from __future__ import annotations

from benchmarks.acceptance.project import Copy, Project, stdlib_text

PRINT = """    def on_train_batch_end(self, outputs, batch, batch_idx):
        print("loss", outputs["loss"].item())

"""
QUIET = "logger=False, enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0"


def prepare(copy: Copy) -> None:
    script = "examples/pytorch/basics/transformer.py"
    copy.write("examples/pytorch/basics/data/wikitext-2.txt", stdlib_text(80_000), "the text")
    copy.replace(script, "[n - 4000, 2000, 2000]", "[n - 40, 20, 20]", "less text to validate with")
    copy.replace(script, "Transformer(voc", "Transformer(dropout=0.0, voc", "no dropout: parts would draw other masks")
    copy.replace(script, "max_epochs=20", f"max_epochs=20, accelerator='cpu', {QUIET}", "no files, no progress bar")
    configure = "    def configure_optimizers(self):"
    copy.replace(script, configure, PRINT + configure, "the loss of each step is printed")


PROJECT = Project(
    name="lightning_transformer",
    repository="Lightning-AI/pytorch-lightning",
    commit="7f0c3436cd3f6ad3753125672024fc415cbcb414",
    licence="Apache-2.0",
    files=("examples/pytorch/basics/transformer.py",),
    folder="examples/pytorch/basics",
    command=("transformer.py",),
    num_steps=8,
    loss=r"loss ([\d.e-]+)",
    prepare=prepare,
    data="the beginning of Python's standard library, by words",
    shows="`MemoryEfficientModule`: each batch of 20 in 5 parts; loop, clipping and logs are Lightning's",
    failed="with the probe of the first batch, in float64, that batch took 247 MB of host memory instead of 74",
    peers=("lightning",),
)
