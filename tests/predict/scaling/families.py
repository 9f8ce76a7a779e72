"""Steps of many kinds, each with one size ``n`` that can grow: what the scaling law is tested and measured on.

Each ``build(n, mode)`` is what a user would write for `memkit.predict.profile_scaling`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit as mk
from memkit.predict.scaling.points import StepMode
from memkit.predict.scaling.traces import forward_alone
from tests.allocations import mark, trace_allocations

Step = Callable[[], object]


def training(model: nn.Module, loss_of: Callable[[], Tensor]) -> Step:
    """One step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return step


def allocated_peak(build_step: Callable[[int], Step], n: int, mode: StepMode) -> int:
    """Most bytes of the allocator during the second step, with what was built."""

    def run() -> None:
        step = build_step(n)
        with nullcontext() if mode == "train" else forward_alone():
            step()
            with mark("step"):
                step()

    trace = trace_allocations(run)
    ((_, start, end),) = trace.marks
    return trace.highest(start, end)


@dataclass(frozen=True)
class Family:
    """One kind of step.

    Attributes:
        build: The step of size n.
        what: What n counts.
        smallest: The smallest size; a multiple of what the model needs.
        order: The power of n that the training peak grows with in the end; None where there is no structural law.
        real: A size that fits into 1 GB.
    """

    build: Callable[[int], Step]
    what: str
    smallest: int
    order: int | None
    real: int


class EdgeMLP(nn.Module):
    """The encoder of a neural operator on a graph: an MLP per edge, summed per destination node."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32 + 32 + 3, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.out = nn.Linear(64, 1)

    def forward(self, x: Tensor, src: Tensor, dst: Tensor, offsets: Tensor) -> Tensor:
        # (edges, 32 + 32 + 3) -> (edges, 64) -> (nodes, 64) -> (nodes, 1)
        messages = self.mlp(torch.cat([x[src], x[dst], offsets], dim=1))
        return self.out(torch.zeros(len(x), 64).index_add(0, dst, messages))


def edge_mlp(num_edges: int, num_nodes: int) -> Step:
    model, x = EdgeMLP(), torch.randn(num_nodes, 32)
    src, dst = torch.randint(num_nodes, (2, num_edges))
    offsets = torch.randn(num_edges, 3)
    return training(model, lambda: model(x, src, dst, offsets).square().mean())


class Attention(nn.Module):
    """Attention by its formula: the (rows, heads, length, length) weights are there."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class FusedAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def language_model(
    attention: type[nn.Module], *, length: int = 64, rows: int = 2, vocabulary: int = 64, width: int = 32
) -> Step:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attention = nn.LayerNorm(width), attention(width, 4)
            self.norm2, self.mlp = (
                nn.LayerNorm(width),
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    model = nn.Sequential(nn.Embedding(vocabulary, width), Block(), Block(), nn.Linear(width, vocabulary))
    tokens = torch.randint(vocabulary, (rows, length + 1))
    return training(model, lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def resnet(rows: int) -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        Residual(16),
        Residual(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    images, labels = torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))
    return training(model, lambda: F.cross_entropy(model(images), labels))


class UNet3D(nn.Module):
    """Two levels down, two up: sides must be multiples of four."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.enter, self.down1 = nn.Conv3d(1, channels, 3, padding=1), nn.Conv3d(channels, wide, 2, stride=2)
        self.down2, self.up2 = nn.Conv3d(wide, wide, 2, stride=2), nn.ConvTranspose3d(wide, wide, 2, stride=2)
        self.up1, self.leave = nn.ConvTranspose3d(2 * wide, channels, 2, stride=2), nn.Conv3d(2 * channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.silu(self.enter(x))
        second = F.silu(self.down1(first))
        third = F.silu(self.down2(second))
        second = torch.cat([second, self.up2(third)], dim=1)
        return self.leave(torch.cat([first, self.up1(second)], dim=1))


def unet(rows: int, side: int) -> Step:
    model, volumes = UNet3D(8), torch.randn(rows, 1, side, side, side)
    return training(model, lambda: (model(volumes) - volumes).square().mean())


def mlp(width: int) -> Step:
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    x = torch.randn(64, 8)
    return training(model, lambda: model(x).square().mean())


def gan(rows: int) -> Step:
    maker = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 128), nn.Tanh())
    critic = nn.Sequential(nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    of_maker, of_critic = torch.optim.Adam(maker.parameters()), torch.optim.Adam(critic.parameters())
    real = torch.randn(rows, 128)

    def step() -> None:
        noise = torch.randn(rows, 16)
        of_critic.zero_grad()
        (F.softplus(critic(maker(noise).detach())).mean() + F.softplus(-critic(real)).mean()).backward()
        of_critic.step()
        of_maker.zero_grad()
        F.softplus(-critic(maker(noise))).mean().backward()
        of_maker.step()

    return step


def vae(rows: int) -> Step:
    encoder = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 32))
    decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 256))
    images = torch.rand(rows, 256)

    def loss() -> Tensor:
        mean, log_variance = encoder(images).chunk(2, dim=1)
        codes = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return F.binary_cross_entropy_with_logits(decoder(codes), images) + divergence

    return training(nn.ModuleList([encoder, decoder]), loss)


def point_net(num_points: int) -> Step:
    local = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 128), nn.ReLU())
    head = nn.Linear(128, 10)
    clouds, labels = torch.randn(4, num_points, 3), torch.randint(10, (4,))
    return training(
        nn.ModuleList([local, head]), lambda: F.cross_entropy(head(local(clouds).max(dim=1).values), labels)
    )


def graph_network(num_edges: int) -> Step:
    layers = nn.ModuleList([nn.Linear(2 * 16, 16), nn.Linear(2 * 16, 16)])
    num_nodes = 500
    src, dst = torch.randint(num_nodes, (2, num_edges))
    start = torch.randn(num_nodes, 16)

    def loss() -> Tensor:
        x = start
        for layer in layers:
            messages = F.silu(layer(torch.cat([x[src], x[dst]], dim=1)))
            x = x + torch.zeros_like(x).scatter_add(0, dst[:, None].expand_as(messages), messages)
        return x.square().mean()

    return training(layers, loss)


def distances(num_points: int) -> Step:
    model, points = nn.Linear(3, 8), torch.randn(num_points, 3)

    def loss() -> Tensor:
        codes = model(points)
        return (codes[:, None] - codes[None]).square().sum(dim=-1).exp().neg().mean()

    return training(model, loss)


def checkpointed(rows: int) -> Step:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    x = torch.randn(rows, 64)

    def loss() -> Tensor:
        y = x
        for block in blocks:
            y = y + torch.utils.checkpoint.checkpoint(block, y, use_reentrant=False)
        return y.square().mean()

    return training(blocks, loss)


def lstm(rows: int, length: int) -> Step:
    model, series = nn.LSTM(8, 16, batch_first=True), torch.randn(rows, length, 8)
    return training(model, lambda: model(series)[0].square().mean())


def cells(rows: int, length: int) -> Step:
    """A recurrent layer written out: one call of its cell per step of the series."""
    cell, series = nn.LSTMCell(8, 16), torch.randn(length, rows, 8)

    def loss() -> Tensor:
        state = torch.zeros(rows, 16), torch.zeros(rows, 16)
        for values in series:
            state = cell(values, state)
        return state[0].square().mean()

    return training(cell, loss)


def chunked(rows: int) -> Step:
    model, x = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)), torch.randn(rows, 32)
    return training(model, lambda: mk.chunked_map(model, x, chunk_size=256, check=False).square().mean())


FAMILIES: dict[str, Family] = {
    "edge MLP": Family(lambda n: edge_mlp(n, 1000), "edges", 500, 1, 100_000),
    "edge MLP by nodes": Family(lambda n: edge_mlp(5000, n), "nodes", 500, 1, 500_000),
    "language model, math attention": Family(lambda n: language_model(Attention, length=n), "tokens", 64, 2, 2048),
    "language model, fused attention": Family(
        lambda n: language_model(FusedAttention, length=n), "tokens", 64, 1, 8192
    ),
    "language model by rows": Family(lambda n: language_model(FusedAttention, rows=n), "rows", 2, 1, 256),
    "language model by width": Family(lambda n: language_model(FusedAttention, width=n), "width", 32, 2, 512),
    "language model by vocabulary": Family(
        lambda n: language_model(FusedAttention, vocabulary=n), "tokens known", 256, 1, 65536
    ),
    "ResNet": Family(resnet, "rows", 2, 1, 128),
    "3D U-Net": Family(lambda n: unet(n, 16), "volumes", 2, 1, 128),
    "3D U-Net by side": Family(lambda n: unet(1, n), "side", 8, 3, 96),
    "MLP by width": Family(mlp, "width", 16, 2, 2048),
    "GAN": Family(gan, "rows", 8, 1, 65536),
    "VAE": Family(vae, "rows", 8, 1, 65536),
    "PointNet": Family(point_net, "points", 64, 1, 65536),
    "graph network": Family(graph_network, "edges", 250, 1, 500_000),
    "all distances": Family(distances, "points", 32, 2, 1024),
    "checkpointed MLP": Family(checkpointed, "rows", 16, 1, 65536),
    "LSTM by length": Family(lambda n: lstm(8, n), "length", 8, 1, 512),
    "LSTM by rows": Family(lambda n: lstm(n, 12), "rows", 4, None, 4096),
    "LSTM cells by length": Family(lambda n: cells(8, n), "length", 2, None, 64),
    "chunked MLP": Family(chunked, "rows", 512, None, 65536),
}
