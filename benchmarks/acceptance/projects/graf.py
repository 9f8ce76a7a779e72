"""autonomousvision/graf: its GAN trainer, the discriminator's step with R1 (second derivatives) in micro-batches."""

from __future__ import annotations

from benchmarks.acceptance.project import Copy, Project

# The loop of its own train.py, without files, logs and data sets.
TRAIN = """import torch
from sklearn.datasets import load_sample_images

from gan_training.distributions import get_zdist
from gan_training.models.resnet import Discriminator, Generator
from gan_training.train import Trainer, toggle_grad

SIZE, BATCH_SIZE = 32, 8

photographs = [torch.from_numpy(image) / 127.5 - 1 for image in load_sample_images().images]
tiles = [image[:416].unfold(0, SIZE, SIZE).unfold(1, SIZE, SIZE).flatten(0, 1) for image in photographs]
images = torch.cat(tiles).to(torch.get_default_dtype())
labels = torch.arange(2).repeat_interleave(len(tiles[0]))
generator = Generator(64, 2, SIZE, nfilter=16)
discriminator = Discriminator("resnet", 2, SIZE, nfilter=16)
toggle_grad(generator, True)
toggle_grad(discriminator, True)
g_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-4, alpha=0.99, eps=1e-8)
d_optimizer = torch.optim.RMSprop(discriminator.parameters(), lr=1e-4, alpha=0.99, eps=1e-8)
zdist = get_zdist("gauss", 64)
trainer = Trainer(generator, discriminator, g_optimizer, d_optimizer, "standard", "real", 10.0)
for rows in torch.randperm(len(images)).split(BATCH_SIZE):
    x_real, y = images[rows], labels[rows]
    print("loss", sum(trainer.discriminator_trainstep(x_real, y, zdist.sample((len(rows),)))))
    print("loss", trainer.generator_trainstep(y, zdist.sample((len(rows),))))
"""


def prepare(copy: Copy) -> None:
    copy.write("submodules/GAN_stability/short.py", TRAIN, "the loop of its train.py, without files and logs")


PROJECT = Project(
    name="graf",
    repository="autonomousvision/graf",
    commit="c50d342fb567aec335b92e3f867c54b4dc4e1d09",
    licence="MIT",
    files=tuple(
        f"submodules/GAN_stability/gan_training/{each}.py"
        for each in ("__init__", "train", "distributions", "models/resnet")
    ),
    folder="submodules/GAN_stability",
    command=("short.py",),
    num_steps=16,
    loss=r"loss ([\d.e-]+)",
    prepare=prepare,
    data="scikit-learn's two photographs as tiles of 32 by 32, a class each",
    shows="`train_step` for the discriminator: loss and gradient penalty of 8 images in 4 parts, its other modes stay",
    failed="checkpointing both networks saved nothing: a penalty's graph holds what the blocks compute again. In parts "
    "the discriminator's step saves, but the first batch's probe and the generator's step stay as large as before",
)
