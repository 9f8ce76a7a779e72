"""pytorch/examples, vae: a loss that is a sum over the batch, in micro-batches."""

from __future__ import annotations

from benchmarks.acceptance.project import Copy, Project


def prepare(copy: Copy) -> None:
    copy.add_stand_in("torchvision", "vae", "a stand-in: scikit-learn's digits for MNIST, pictures are not written")
    copy.replace("vae/main.py", "{:.6f}'.format(", "{!r}'.format(", "the loss is printed with all its digits")
    old, new = "recon_batch.view(args.batch_size, 1, 28, 28)", "recon_batch.view(-1, 1, 28, 28)"
    copy.replace("vae/main.py", old, new, "the test set may be smaller than a batch")


PROJECT = Project(
    name="vae",
    repository="pytorch/examples",
    commit="77f55b912142e11fcfdf5b530231fb9c52f181e8",
    licence="BSD-3-Clause",
    files=("vae/main.py",),
    folder="vae",
    command=("main.py", "--batch-size", "1024", "--log-interval", "1"),
    num_steps=12,
    loss=r"Loss: (\S+)",
    prepare=prepare,
    data="scikit-learn's digits, 28 by 28",
    shows='`GradientAccumulator` with `objective="sum"`: the batch in 8 parts, with the noise and '
    "the gradient of the whole",
    failed="`train_step` of the wrapper takes a sum as `mk.Loss(sum=loss * num_rows, count=n)` only",
    control="the sum is taken for a mean: an eighth of the gradient, which Adam nearly hides",
)
