"""pytorch/examples, dcgan: two optimizers, BatchNorm, activations changed in place."""

from __future__ import annotations

from benchmarks.acceptance.project import Copy, Project


def prepare(copy: Copy) -> None:
    copy.add_stand_in("torchvision", "dcgan", "a stand-in: scikit-learn's digits for MNIST, pictures are not written")
    old, new = "Loss_D: %.4f Loss_G: %.4f", "Loss_D: %r Loss_G: %r"
    copy.replace("dcgan/main.py", old, new, "the losses are printed with all their digits")


PROJECT = Project(
    name="dcgan",
    repository="pytorch/examples",
    commit="77f55b912142e11fcfdf5b530231fb9c52f181e8",
    licence="BSD-3-Clause",
    files=("dcgan/main.py",),
    folder="dcgan",
    command=(
        *("main.py", "--dataset", "mnist", "--dataroot", ".", "--manualSeed", "1", "--workers", "0"),
        *("--batchSize", "128", "--ngf", "32", "--ndf", "32"),
    ),
    num_steps=8,
    loss=r"Loss_D: (\S+) Loss_G: (\S+)",
    prepare=prepare,
    data="scikit-learn's digits, 64 by 64",
    failed="blocks as small as `checkpoint=['main.*']`: a block that changes its input in place is refused by name",
    shows="the wrapper's `checkpoint={...: \"offload\"}` lets the generator's activations wait on the disk while the "
    "discriminator trains; `GradientAccumulator` leaves the discriminator's gradients alone in the generator's step",
)
