"""Steps of plain nets and of nets on grids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memkit import Loss
from tests import zoo
from tests.predict.step import STEPS, Step, case, classify, from_zoo, labels, momentum, regress

STEPS["mlp"] = from_zoo(lambda: zoo.mlp().model, lambda: (torch.randn(128, 64), labels(10, 128)), classify)


@case
def mlp_accumulated() -> Step:
    model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    return Step(model, (torch.randn(128, 64), labels(10, 128)), classify, accumulation_steps=4)


@case
def mlp_bfloat16() -> Step:
    model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.LayerNorm(256), nn.Linear(256, 10))
    return Step(model, (torch.randn(128, 64), labels(10, 128)), classify, precision="bf16-mixed", accumulation_steps=2)


@case
def prelu_with_loss_sum() -> Step:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        valid = batch[1] != 3
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return Loss(sum=(losses * valid).sum(), count=valid.sum())

    model = nn.Sequential(nn.Linear(32, 64), nn.PReLU(), nn.Linear(64, 10), nn.Hardswish())
    return Step(model, (torch.randn(64, 32), labels(10, 64)), loss_fn, torch.optim.RMSprop)


STEPS["conv1d"] = from_zoo(
    lambda: zoo.conv1d().model, lambda: (torch.randn(16, 4, 64), labels(3, 16)), classify, optimizer=momentum
)
STEPS["resnet"] = from_zoo(
    lambda: zoo.resnet().model, lambda: (torch.randn(4, 3, 32, 32), labels(10, 4)), classify, optimizer=momentum
)


@case
def depthwise_channels_last() -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.Hardswish(inplace=True), nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False),
        nn.BatchNorm2d(16), nn.ReLU6(inplace=True), nn.Conv2d(16, 24, 1), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(24 * 64, 5),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    batch = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last), labels(5, 4)
    return Step(model, batch, classify)


@case
def vgg() -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Dropout(),
        nn.Linear(1024, 10),
    )  # fmt: skip
    return Step(model, (torch.randn(2, 3, 32, 32), labels(10, 2)), classify, torch.optim.Adagrad)


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 * k), nn.ReLU(), nn.Conv2d(8 * k, 8, 3, padding=1)) for k in range(1, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return x


@case
def densenet() -> Step:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), DenseBlock(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    return Step(model, (torch.randn(2, 3, 24, 24), labels(4, 2)), classify, "nadam")


STEPS["unet2d"] = from_zoo(
    lambda: zoo.UNet(2),
    lambda: (torch.randn(2, 1, 32, 32), torch.rand(2, 2, 32, 32)),
    lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1]),
)
STEPS["unet3d"] = from_zoo(
    lambda: zoo.UNet(3), lambda: (torch.randn(1, 1, 16, 16, 16), labels(2, 1, 16, 16, 16)), classify
)
STEPS["unet3d_bfloat16"] = from_zoo(
    lambda: zoo.UNet(3),
    lambda: (torch.randn(1, 1, 16, 16, 16), labels(2, 1, 16, 16, 16)),
    classify,
    precision="bf16-mixed",
)


@case
def autoencoder_conv_transpose() -> Step:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.InstanceNorm2d(16), nn.Softplus(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ELU(), nn.PixelShuffle(2), nn.Conv2d(2, 1, 3, 2, 1), nn.Sigmoid(),
    )  # fmt: skip
    x = torch.rand(2, 1, 32, 32)
    return Step(model, (x, x), lambda m, b: F.mse_loss(m(b[0]), b[1].narrow(2, 0, 16).narrow(3, 0, 16)), "adamax")


class FourierLayer(nn.Module):
    """A spectral convolution: FFT, complex weights on the low modes, inverse FFT."""

    def __init__(self, width: int = 8, modes: int = 6) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.skip = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        low = torch.einsum("bik,iok->bok", spectrum[..., : self.modes], self.weight)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = low
        return F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x))


@case
def fourier_operator() -> Step:
    model = nn.Sequential(nn.Conv1d(1, 8, 1), FourierLayer(), FourierLayer(), nn.Conv1d(8, 1, 1))
    return Step(model, (torch.randn(4, 1, 64), torch.randn(4, 1, 64)), regress)


@case
def inplace_residuals() -> Step:
    class Residuals(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.scale = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            h = x * self.scale
            for layer in self.layers:
                h += F.relu_(layer(h.tanh()))
            return h.mul_(0.5).tanh()

    return Step(Residuals(), (torch.randn(64, 32), torch.randn(64, 32)), regress, momentum)
