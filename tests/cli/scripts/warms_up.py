"""A GAN whose discriminator is trained only after a warm-up, as ESRGAN's."""

import sys

import torch
from torch import nn

generator, discriminator = nn.Linear(64, 64).cuda(), nn.Linear(64, 4096).cuda()
optimizer_g = torch.optim.Adam(generator.parameters())
optimizer_d = torch.optim.Adam(discriminator.parameters())
for step in range(int(sys.argv[1])):
    fake = generator(torch.randn(8, 64, device="cuda"))
    optimizer_g.zero_grad()
    fake.square().mean().backward()
    optimizer_g.step()
    if step >= 4:
        optimizer_d.zero_grad()
        discriminator(fake.detach()).mean().backward()
        optimizer_d.step()
