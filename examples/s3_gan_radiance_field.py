"""S3: the hygiene of a GAN with a radiance field and a frozen super-resolution network, on X-rays of a real head.

Real images are projections of the MNI152 template (in nilearn's wheel) from all sides. The generator is a radiance
field: it renders a small projection from a random side, which a frozen network enlarges. What costs memory, or is
wrong, in many such loops is done right here: see the comments.

Run: pip install -c constraints.txt -e ".[test]" && python examples/s3_gan_radiance_field.py [--smoke]
"""

import argparse
import math

import torch
import torch.nn.functional as F
from nilearn import datasets
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import memkit as mk

LATENT, SMALL, LARGE, BATCH = 8, 16, 32, 32


def turns(share: Tensor) -> Tensor:
    """Rotations (b, 3, 3) about the vertical axis by a share (b,) of a full turn."""
    cos, sin, zero, one = (2 * math.pi * share).cos(), (2 * math.pi * share).sin(), 0 * share, 0 * share + 1
    return torch.stack([cos, zero, sin, zero, one, zero, -sin, zero, cos], 1).view(-1, 3, 3)


def load(num_images: int) -> TensorDataset:
    """Projections (n, 1, LARGE, LARGE) of the head, in [0, 1]."""
    head = torch.from_numpy(datasets.load_mni152_template(resolution=2).get_fdata()).float().permute(1, 2, 0).flip(1)
    head = F.interpolate(head[None, None], (LARGE,) * 3, mode="trilinear")
    sides = turns(torch.arange(num_images) / num_images)
    grids = F.affine_grid(F.pad(sides, (0, 1)), [num_images, 1, *[LARGE] * 3], align_corners=False)
    images = torch.cat([F.grid_sample(head, grid[None], align_corners=False).mean(2) for grid in grids])
    return TensorDataset(images / images.max())


class RadianceField(nn.Module):
    """Noise (b, LATENT + 1), the last a side to look from, to X-rays (b, 1, SMALL, SMALL)."""

    def __init__(self) -> None:
        super().__init__()
        axis = torch.linspace(-1, 1, SMALL)
        self.register_buffer("points", torch.cartesian_prod(axis, axis, axis).flip(1))  # depth, height, width
        layers = [nn.Linear(18 + LATENT, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1), nn.Softplus()]
        self.field = nn.Sequential(*layers)
        self.pieces = mk.ChunkedProcessor(self.field, memory_budget="16MiB")  # the points along the rays

    def forward(self, noise: Tensor) -> Tensor:
        points = self.points @ turns(noise[:, -1])
        waves = torch.cat([wave(2**k * points) for k in range(3) for wave in (torch.sin, torch.cos)], 2)
        latent = noise[:, None, :-1].expand(-1, points.shape[1], -1)
        density = self.pieces(torch.cat([waves, latent], 2).flatten(0, 1))
        return density.view(-1, 1, SMALL, SMALL, SMALL).mean(2)


def kernel_distance(a: Tensor, b: Tensor) -> float:
    """KID's polynomial kernel distance, here of the images themselves."""
    a, b = a.flatten(1), b.flatten(1)
    inner, outer = ((x @ x.T / x.shape[1] + 1) ** 3 for x in (a, b)), (a @ b.T / a.shape[1] + 1) ** 3
    own = sum((k.sum() - k.trace()) / (len(k) * (len(k) - 1)) for k in inner)
    return float(own - 2 * outer.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    is_smoke = parser.parse_args().smoke
    num_steps, every = (2, 2) if is_smoke else (120, 30)
    torch.manual_seed(0)  # and no global default device or dtype: data stay on the host
    data = load(32 if is_smoke else 512)
    loader = mk.train.make_dataloader(data, BATCH, shuffle=True, drop_last=True, num_workers=0)

    enlarge = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(1, 16, 3, padding=1), nn.SiLU())
    enlarge.append(nn.Conv2d(16, 1, 3, padding=1))
    optimizer = torch.optim.Adam(enlarge.parameters(), lr=1e-2)
    for _ in range(every):
        F.mse_loss(enlarge(F.avg_pool2d(data.tensors[0][:64], 2)), data.tensors[0][:64]).backward()
        optimizer.step()
        optimizer.zero_grad()  # to None, not to zeros
    enlarge.requires_grad_(
        requires_grad=False
    )  # frozen parameters; under no_grad the generator behind it would learn nothing

    generator, discriminator = RadianceField(), nn.Sequential()
    for channels_in, channels in ((1, 16), (16, 32), (32, 64)):
        discriminator.extend([nn.Conv2d(channels_in, channels, 4, 2, 1), nn.LeakyReLU(0.2)])
    discriminator.extend([nn.Flatten(), nn.Linear(64 * 16, 1)])
    memory = mk.MemoryManager("cpu")
    settings = {"precision": "bf16", "accumulation_steps": 4}  # with "fp16" each has its own loss scaler
    d_optimizer, g_optimizer = (torch.optim.Adam(m.parameters(), 5e-4, (0.0, 0.99)) for m in (discriminator, generator))
    d_trainer = mk.MemoryEfficientTrainingWrapper(discriminator, d_optimizer, **settings)
    g_trainer = mk.MemoryEfficientTrainingWrapper(generator, g_optimizer, **settings)

    def d_loss(discriminator: nn.Module, micro: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():  # no graph through the generator in the discriminator's step
            fake = enlarge(generator(micro[1]))
        loss = F.softplus(discriminator(fake)).mean() + F.softplus(-discriminator(micro[0])).mean()
        return loss + mk.train.gradient_penalty(discriminator, micro[0])  # in float32

    def g_loss(generator: nn.Module, noise: Tensor) -> Tensor:
        return F.softplus(-discriminator(enlarge(generator(noise)))).mean()

    while g_trainer.num_steps < num_steps:
        for (real,) in loader:
            d = d_trainer.train_step((real, torch.rand(BATCH, LATENT + 1)), d_loss)
            g = g_trainer.train_step(torch.rand(BATCH, LATENT + 1), g_loss)
            if g_trainer.num_steps % every == 0:  # nothing is read from the device in other steps
                with g_trainer.evaluation() as evaluate:  # results go to the host at once, part by part
                    fakes = evaluate(torch.rand(len(data) // 2, LATENT + 1), lambda model, z: enlarge(model(z)).cpu())
                distance = kernel_distance(fakes.float(), data.tensors[0])
                given_back = mk.memory.format_bytes(memory.release())  # the cache is cleared here, and never in a step
                print(f"step {g_trainer.num_steps}: D {d.loss:.3f}, G {g.loss:.3f}, distance {distance:.4f}")
                print(f"  {memory.line()}, given back {given_back}")


if __name__ == "__main__":
    main()
