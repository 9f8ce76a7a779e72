"""Forty-five small trainings whose predicted memory is compared with a GPU's: every family of layers, 0.2 to 4 GiB."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import Decoder, UNet

Batch = tuple[Tensor, ...]
MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Task(NamedTuple):
    """A model and a batch, both still on the host, and what takes the loss of a batch."""

    model: nn.Module
    batch: Batch
    loss_fn: Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        build: Makes the task.
        precision: "fp32", or autocast to "bf16" or "fp16", the latter with a gradient scaler.
        optimizer: A name of `OPTIMIZERS`.
        is_channels_last: Whether the model's weights are in channels-last order.
        is_tuned: Whether ``cudnn.benchmark`` is on.
        num_microbatches: Backward passes before each optimizer step.
    """

    build: Callable[[], Task]
    precision: str = "fp32"
    optimizer: str = "adamw"
    is_channels_last: bool = False
    is_tuned: bool = False
    num_microbatches: int = 1

    def start(self) -> Callable[[], None]:
        """Put the model on the GPU; return what runs a step."""
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = self.is_tuned
        model, batch, loss_fn = self.build()
        model.cuda().train()
        if self.is_channels_last:
            model.to(memory_format=torch.channels_last)
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        # The usual first scale of 65,536 overflows in some of them, whose first steps would be skipped.
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0, enabled=self.precision == "fp16")

        def step() -> None:
            for _ in range(self.num_microbatches):
                here = tuple(tensor.cuda() for tensor in batch)
                with self.autocast():
                    loss = loss_fn(model, here) / self.num_microbatches
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.precision == "fp32" else torch.autocast("cuda", DTYPES[self.precision])


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "fused adamw": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "one-by-one adamw": partial(torch.optim.AdamW, lr=1e-4, foreach=False),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-4),
    "adafactor": torch.optim.Adafactor,
}


# ------------------------------------------------------------------------------------------------------------- data
# The source of the standard library's argparse: its bytes are tokens, pixels and coordinates.


def tokens(*shape: int) -> Tensor:
    source = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    num = torch.Size(shape).numel()
    return source.repeat(-(-num // len(source)))[:num].view(shape)


def numbers(*shape: int) -> Tensor:
    return (tokens(*shape).float() - 80) / 40


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    *inputs, labels = batch
    return F.cross_entropy(model(*inputs), labels)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    *inputs, expected = batch
    return F.mse_loss(model(*inputs), expected)


def classifying(model: nn.Module, shape: tuple[int, ...], num_classes: int = 1000) -> Task:
    return Task(model, (numbers(*shape), tokens(shape[0]) % num_classes), cross_entropy)


def regressing(model: nn.Module, shape: tuple[int, ...]) -> Task:
    return Task(model, (numbers(*shape), numbers(*shape)), squared_error)


# ----------------------------------------------------------------------------------------------- transformers and MLPs


def mlp(rows: int = 8192) -> Task:
    layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.GELU())]
    return classifying(nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(1024, 1000)), (rows, 1024))


def decoder(rows: int = 8, *, is_rerun: bool = False, is_masked: bool = False) -> Task:
    """A causal language model; blocks run again in backward, or attention has an explicit mask."""
    model: nn.Module = Decoder(num_blocks=8, width=512, length=512)
    if is_rerun:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if is_masked:
        model = Masked(8, 512)
    return Task(model, (tokens(rows, 513),), next_byte)


def next_byte(model: nn.Module, batch: Batch) -> Tensor:
    (text,) = batch
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class Masked(nn.Module):
    """Attention with a bias for each distance, as in ALiBi, which flash attention does not take."""

    def __init__(self, num_blocks: int, width: int, num_heads: int = 8) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.token, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(num_blocks))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(num_blocks))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        bias = -(places[:, None] - places).abs().to(torch.get_autocast_dtype("cuda")) / 8
        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=True):
            q, k, v = qkv(norm(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + out(F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype)).transpose(1, 2).flatten(2))
        return self.head(x)


def encoder(*, dropout: float = 0.0) -> Task:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return regressing(model, (16, 256, 512))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(256, 8, 3, 3, 1024, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.net(x, x, tgt_mask=mask)


def translator() -> Task:
    return regressing(Translator(), (16, 256, 256))


class ViT(nn.Module):
    def __init__(self, width: int = 384, num_blocks: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.place = nn.Parameter(torch.zeros(197, width))
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.patches(x).flatten(2).transpose(1, 2), (0, 0, 1, 0)) + self.place
        return self.head(self.blocks(x)[:, 0])


class Experts(nn.Module):
    """Each of 8 experts takes the eighth of the rows that want it most."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, rows = self.gate(x).softmax(-1).topk(len(x) // len(self.experts), dim=0)
        for number, expert in enumerate(self.experts):
            taken = rows[:, number]
            x = x.index_add(0, taken, (expert(x[taken]) * weights[:, number, None]).to(x.dtype))
        return x


# --------------------------------------------------------------------------------------------------- convolutional nets


def unit(width_in: int, width: int, side: int, *, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution, BatchNorm, ReLU."""
    conv = nn.Conv2d(width_in, width, side, stride, side // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]


class Residual(nn.Module):
    """The basic block of a ResNet, or with `middle` its bottleneck; a stride where the width changes."""

    def __init__(self, width_in: int, width: int, *, middle: int | None = None) -> None:
        super().__init__()
        stride = 1 if width_in in {width, 64} else 2
        if middle is None:
            units = unit(width_in, width, 3, stride=stride) + unit(width, width, 3)
        else:
            units = unit(width_in, middle, 1) + unit(middle, middle, 3, stride=stride) + unit(middle, width, 1)
        self.path = nn.Sequential(*units[:-1])  # the last ReLU comes after the sum
        self.shortcut = nn.Sequential(*unit(width_in, width, 1, stride=stride)[:2]) if width_in != width else None

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + (x if self.shortcut is None else self.shortcut(x)), inplace=True)


def resnet(rows: int = 32, *, is_deep: bool = False) -> Task:
    """A ResNet18, or with bottlenecks a ResNet50."""
    depths, times = ((3, 4, 6, 3), 4) if is_deep else ((2, 2, 2, 2), 1)
    blocks: list[nn.Module] = [*unit(3, 64, 7, stride=2), nn.MaxPool2d(3, 2, 1)]
    last = 64
    for width, depth in zip((64, 128, 256, 512), depths, strict=True):
        for _ in range(depth):
            blocks.append(Residual(last, times * width, middle=width if is_deep else None))
            last = times * width
    return classifying(
        nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 1000)), (rows, 3, 224, 224)
    )


def vgg(rows: int = 16) -> Task:
    layers: list[nn.Module] = []
    last = 3
    for width, depth in ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)):
        for _ in range(depth):
            layers += [nn.Conv2d(last, width, 3, padding=1), nn.ReLU(inplace=True)]
            last = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512 * 49, 1024), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(1024, 1000)]
    return classifying(nn.Sequential(*layers, *head), (rows, 3, 224, 224))


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext(rows: int = 16) -> Task:
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4)]
    for width, depth in ((96, 3), (192, 3), (384, 3)):
        layers += [ConvNextBlock(width) for _ in range(depth)]
        if width < 384:
            layers.append(nn.Conv2d(width, 2 * width, 2, 2))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 1000)]
    return classifying(nn.Sequential(*layers, *head), (rows, 3, 224, 224))


def mobilenet(rows: int = 64) -> Task:
    """Depthwise and pointwise convolutions in turns."""
    layers = unit(3, 32, 3, stride=2)
    for width_in, width, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 512, 2)):
        layers += unit(width_in, width_in, 3, stride=stride, groups=width_in) + unit(width_in, width, 1)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Hardswish(), nn.Linear(512, 1000)]
    return classifying(nn.Sequential(*layers, *head), (rows, 3, 224, 224))


class Attention2d(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).unflatten(2, x.shape[2:]))


class UNet2d(nn.Module):
    """GroupNorm and SiLU; with attention at the bottom it is that of a diffusion model."""

    def __init__(self, width: int = 64, *, has_attention: bool = False) -> None:
        super().__init__()

        def block(width_in: int, width_out: int) -> nn.Module:
            conv = nn.Conv2d(width_in, width_out, 3, padding=1)
            return nn.Sequential(
                conv, nn.GroupNorm(8, width_out), nn.SiLU(), nn.Conv2d(width_out, width_out, 3, padding=1), nn.SiLU()
            )

        widths = (width, 2 * width, 4 * width)
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.down = nn.ModuleList(block(a, b) for a, b in zip((width, *widths), widths, strict=False))
        self.middle = Attention2d(4 * width) if has_attention else nn.Identity()
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(block(2 * a, a) for a in widths[:-1])

    def forward(self, x: Tensor) -> Tensor:
        x, held = self.enter(x), []
        for block in self.down:
            x = block(x)
            held.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(F.interpolate(x, scale_factor=2.0))
        held.pop()
        for grow, block in zip(reversed(self.grow), reversed(self.up), strict=True):
            x = block(torch.cat([grow(x), held.pop()], 1))
        return self.leave(x)


def unet2d(rows: int = 4, side: int = 256, *, has_attention: bool = False) -> Task:
    return regressing(UNet2d(has_attention=has_attention), (rows, 3, side, side))


def unet3d() -> Task:
    return Task(UNet(24), (numbers(1, 1, 64, 64, 64), tokens(1, 64, 64, 64) % 2), cross_entropy)


def audio() -> Task:
    layers: list[nn.Module] = [nn.Conv1d(1, 64, 15, padding=7)]
    for _ in range(5):
        layers += [nn.ELU(), nn.Conv1d(64, 64, 9, 2, 4), nn.BatchNorm1d(64), nn.GLU(1), nn.Conv1d(32, 64, 1)]
    return classifying(
        nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10)), (16, 1, 2**16), 10
    )


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.SiLU(), nn.Conv2d(64, 128, 4, 2, 1), nn.SiLU())
        self.moments = nn.Conv2d(128, 16, 1)
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(8, 128, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.SiLU()
        )
        self.leave = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.moments(self.encode(x)).chunk(2, 1)
        return self.leave(self.decode(mean + torch.randn_like(mean) * (log_variance / 2).exp()))


def autoencoder() -> Task:
    return regressing(Autoencoder(), (16, 3, 256, 256))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        up = [nn.ConvTranspose2d(128, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.ReLU()]
        self.generator = nn.Sequential(
            *up, nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 3, 3, padding=1), nn.Tanh()
        )
        down = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2)]
        self.discriminator = nn.Sequential(*down, nn.Conv2d(128, 1, 3, padding=1))

    def forward(self, seed: Tensor, real: Tensor) -> Tensor:
        """Both losses at once, as in a GAN whose two gradients are taken in one pass."""
        made = self.generator(seed)
        critic = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(made.detach())).mean()
        return critic + F.softplus(-self.discriminator(made)).mean()


def gan() -> Task:
    return Task(Pair(), (numbers(16, 128, 32, 32), numbers(16, 3, 128, 128)), lambda model, batch: model(*batch))


# --------------------------------------------------------------------------------------- recurrent nets, points, graphs


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, is_bidirectional: bool = False) -> None:
        super().__init__()
        self.net = kind(256, 512, 2, batch_first=True, bidirectional=is_bidirectional)
        self.head = nn.Linear(1024 if is_bidirectional else 512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x)[0])


def recurrent(kind: type[nn.RNNBase], *, is_bidirectional: bool = False) -> Task:
    return regressing(Recurrent(kind, is_bidirectional=is_bidirectional), (256, 64, 256))


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 1024)
        layers = [[nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()] for a, b in pairwise(widths)]
        self.points = nn.Sequential(*(layer for each in layers for layer in each))
        self.head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 40))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(-1))


class EdgeNet(nn.Module):
    """Messages along edges, summed at their targets."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, width), nn.Linear(width, 4)
        self.edge = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(3)
        )

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.enter(x)
        for edge in self.edge:
            x = x.index_add(0, target, edge(torch.cat([x[source], x[target] - x[source]], 1)).to(x.dtype))
        return self.leave(x)


def edges(num_nodes: int = 20_000, num_edges: int = 160_000) -> Task:
    places = torch.arange(num_edges)
    graph = (numbers(num_nodes, 16), places % num_nodes, places * 7919 % num_nodes)
    return Task(EdgeNet(), (*graph, numbers(num_nodes, 4)), squared_error)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(500_000, 128, mode="mean"), nn.Linear(128, 1000)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.bag(words))


def words() -> Task:
    return Task(Words(), (tokens(1024, 64) * 3907 % 500_000, tokens(1024)), cross_entropy)


TRAININGS = {
    "mlp": Training(mlp),
    "mlp, momentum": Training(mlp, optimizer="momentum"),
    "mlp, bf16, rmsprop": Training(mlp, "bf16", "rmsprop"),
    "decoder": Training(decoder),
    "decoder, fused": Training(decoder, optimizer="fused adamw"),
    "decoder, one by one": Training(decoder, optimizer="one-by-one adamw"),
    "decoder, adafactor": Training(decoder, optimizer="adafactor"),
    "decoder, bf16": Training(decoder, "bf16"),
    "decoder, fp16": Training(decoder, "fp16"),
    "decoder, bf16, rerun": Training(partial(decoder, is_rerun=True), "bf16"),
    "decoder, bf16, 4 micro-batches": Training(partial(decoder, rows=2), "bf16", num_microbatches=4),
    "masked attention": Training(partial(decoder, rows=4, is_masked=True)),
    "masked attention, bf16": Training(partial(decoder, is_masked=True), "bf16"),
    "encoder": Training(encoder),
    "encoder, bf16, dropout": Training(partial(encoder, dropout=0.1), "bf16"),
    "translator": Training(translator),
    "vit": Training(lambda: classifying(ViT(), (32, 3, 224, 224))),
    "vit, bf16": Training(lambda: classifying(ViT(), (32, 3, 224, 224)), "bf16"),
    "experts, bf16": Training(lambda: regressing(Experts(), (16384, 512)), "bf16"),
    "resnet18": Training(resnet),
    "resnet18, tuned": Training(resnet, is_tuned=True),
    "resnet50, sgd": Training(partial(resnet, 16, is_deep=True), optimizer="momentum"),
    "resnet50, fp16, channels last": Training(partial(resnet, is_deep=True), "fp16", is_channels_last=True),
    "resnet50, fp16, channels last, tuned": Training(
        partial(resnet, is_deep=True), "fp16", is_channels_last=True, is_tuned=True
    ),
    "vgg11": Training(vgg, optimizer="sgd"),
    "vgg11, tuned": Training(vgg, optimizer="sgd", is_tuned=True),
    "convnext, bf16": Training(convnext, "bf16"),
    "convnext, channels last": Training(convnext, is_channels_last=True),
    "mobilenet": Training(mobilenet),
    "mobilenet, fp16, channels last, tuned": Training(mobilenet, "fp16", is_channels_last=True, is_tuned=True),
    "unet": Training(unet2d),
    "unet, fp16, tuned": Training(unet2d, "fp16", is_tuned=True),
    "diffusion unet, bf16": Training(partial(unet2d, 16, 128, has_attention=True), "bf16"),
    "3D unet": Training(unet3d),
    "3D unet, fp16": Training(unet3d, "fp16"),
    "3D unet, fp16, tuned": Training(unet3d, "fp16", is_tuned=True),
    "audio": Training(audio),
    "autoencoder": Training(autoencoder),
    "gan": Training(gan),
    "lstm": Training(partial(recurrent, nn.LSTM)),
    "lstm, fp16": Training(partial(recurrent, nn.LSTM), "fp16"),
    "gru, both directions": Training(partial(recurrent, nn.GRU, is_bidirectional=True)),
    "point net": Training(lambda: classifying(PointNet(), (32, 3, 4096), 40)),
    "graph": Training(edges),
    "embedding bag": Training(words, optimizer="sgd"),
}
