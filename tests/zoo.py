"""Small real models, each with a real training step, for tests that compare memory: `CASES[name]()` builds one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Mark = Callable[[str], AbstractContextManager[object]]


def no_mark(name: str) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class Case:
    """A model, its optimizers and one step; `step(mark)` puts `mark(phase)` around each part of the step."""

    model: nn.Module
    step: Callable[[Mark], None]


def supervised(
    model: nn.Module,
    batch: Callable[[], tuple[Tensor, ...]],
    loss_fn: Callable[..., Tensor],
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
) -> Case:
    optimizer = make_optimizer(model.parameters())

    def step(mark: Mark = no_mark) -> None:
        with mark("data"):
            data = batch()
        with mark("forward"):
            loss = loss_fn(model, *data)
        with mark("backward"):
            loss.backward()
        with mark("optimizer"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return Case(model, step)


def adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, foreach=False)


def foreach_adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, foreach=True)


def fused_adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def momentum(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=False)


def foreach_momentum(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=True)


# ---------------------------------------------------------------------------------------------------- plain nets


def mlp() -> Case:
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    return supervised(
        model,
        lambda: (torch.randn(128, 64), torch.randint(0, 10, (128,))),
        lambda m, x, y: F.cross_entropy(m(x), y),
        adamw,
    )


def conv1d() -> Case:
    model = nn.Sequential(
        nn.Conv1d(4, 16, 5, padding=2), nn.BatchNorm1d(16), nn.SiLU(), nn.MaxPool1d(2),
        nn.Conv1d(16, 16, 5, padding=2, groups=4), nn.ELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return supervised(
        model,
        lambda: (torch.randn(16, 4, 64), torch.randint(0, 3, (16,))),
        lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1),
        foreach_momentum,
    )


class ResidualBlock(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x), inplace=True)


def resnet() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    return supervised(
        model,
        lambda: (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))),
        lambda m, x, y: F.cross_entropy(m(x), y),
        momentum,
    )


class UNet(nn.Module):
    """Two levels with skips; 2-D (GroupNorm, SiLU, interpolation) or 3-D (InstanceNorm, transposed convolution)."""

    def __init__(self, dims: int, width: int = 4) -> None:
        super().__init__()
        self.dims = dims
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2]

        def block(width_in: int, width_out: int) -> nn.Sequential:
            norm = nn.GroupNorm(2, width_out) if dims == 2 else nn.InstanceNorm3d(width_out, affine=True)
            act = nn.SiLU() if dims == 2 else nn.LeakyReLU(0.01, inplace=True)
            return nn.Sequential(conv(width_in, width_out, 3, padding=1), norm, act)

        self.down1, self.down2, self.down3 = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.pool = (nn.MaxPool2d, nn.MaxPool3d)[dims - 2](2)
        self.up2 = self.upsample(4 * width, 2 * width)
        self.up1 = self.upsample(2 * width, width)
        self.merge2, self.merge1 = block(4 * width, 2 * width), block(2 * width, width)
        self.head = conv(width, 2, 1)

    def upsample(self, width_in: int, width_out: int) -> nn.Module:
        if self.dims == 3:
            return nn.ConvTranspose3d(width_in, width_out, 2, 2)
        return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(width_in, width_out, 1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.down3(self.pool(b))
        d = self.merge2(torch.cat([self.up2(c), b], 1))
        return self.head(self.merge1(torch.cat([self.up1(d), a], 1)))


def unet3d() -> Case:
    return supervised(
        UNet(3),
        lambda: (torch.randn(1, 1, 16, 16, 16), torch.randint(0, 2, (1, 16, 16, 16))),
        lambda m, x, y: F.cross_entropy(m(x), y),
        adamw,
    )


def unet2d() -> Case:
    return supervised(
        UNet(2),
        lambda: (torch.randn(2, 1, 32, 32), torch.rand(2, 2, 32, 32)),
        lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), y),
        foreach_adamw,
    )


# --------------------------------------------------------------------------------------------------- sequences


class Encoder(nn.Module):
    def __init__(self, dropout: float, vocabulary: int = 100, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        # Not nn.TransformerEncoder: it copies a layer, and copies of fake tensors belong to another fake mode.
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 64, dropout, batch_first=True, norm_first=True) for _ in range(2))
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x)))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 100, (4, 32)), torch.randint(0, 100, (4, 32))


def language_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def encoder() -> Case:
    return supervised(Encoder(dropout=0.0), tokens, language_loss, adamw)


def encoder_dropout() -> Case:
    return supervised(Encoder(dropout=0.1), tokens, language_loss, fused_adamw)


class TiedDecoder(nn.Module):
    """Causal attention by `scaled_dot_product_attention`; the embedding is the output matrix as well."""

    def __init__(self, vocabulary: int = 100, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for qkv, norm, gate in zip(self.qkv, self.norms, self.gates, strict=True):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(norm(h)).chunk(3, dim=-1))
            h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            a, b = gate(norm(h)).chunk(2, dim=-1)
            h = h + (F.silu(a) * b).unflatten(-1, (2, -1)).sum(-2)
        return h @ self.embedding.weight.T


def tied_decoder() -> Case:
    return supervised(TiedDecoder(), tokens, language_loss, foreach_adamw)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def recurrent(kind: type[nn.RNNBase]) -> Case:
    return supervised(
        Recurrent(kind),
        lambda: (torch.randn(4, 12, 8), torch.randn(4, 1)),
        lambda m, x, y: F.l1_loss(m(x), y),
        adamw,
    )


def lstm() -> Case:
    return recurrent(nn.LSTM)


def gru() -> Case:
    return recurrent(nn.GRU)


class Experts(nn.Module):
    """Top-2 of 4 experts; tokens are sent out by index and come back by `index_add`: sizes depend on the data."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            row, slot = torch.where(choice == k)
            out = out.index_add(0, row, expert(x[row]) * weight[row, slot, None])
        return out


def experts() -> Case:
    return supervised(
        Experts(),
        lambda: (torch.randn(64, 16), torch.randn(64, 16)),
        lambda m, x, y: F.huber_loss(m(x), y),
        foreach_adamw,
    )


# ------------------------------------------------------------------------------------------- graphs and points


class MessagePassing(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lift = nn.Linear(4, width)
        self.edge = nn.Sequential(nn.Linear(2 * width + 3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.node = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, edges: Tensor) -> Tensor:
        h = self.lift(x)
        for _ in range(2):
            message = self.edge(torch.cat([h[source], h.index_select(0, target), edges], -1))
            received = torch.zeros_like(h).index_add(0, target, message)
            h = self.norm(h + self.node(torch.cat([h, received], -1)))
        return self.head(h)


def message_passing() -> Case:
    def batch() -> tuple[Tensor, ...]:
        ends = torch.randint(0, 50, (2, 300))
        return torch.randn(50, 4), ends[0], ends[1], torch.randn(300, 3), torch.randn(50, 1)

    return supervised(MessagePassing(), batch, lambda m, *b: F.l1_loss(m(*b[:4]), b[4]), adamw)


class PointNet(nn.Module):
    """Neighbors by `topk` of distances, gathered, and pooled by `max`: backward scatters into zeros."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width))
        self.wide = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU())
        self.head = nn.Linear(2 * width, 5)

    def forward(self, points: Tensor) -> Tensor:
        near = torch.cdist(points, points).topk(4, largest=False).indices
        index = near.flatten(1)[..., None].expand(-1, -1, 3)
        offset = points.gather(1, index).unflatten(1, (-1, 4)) - points[:, :, None]
        h = self.local(offset).max(dim=2).values
        h = h.gather(1, near[..., :1].expand(-1, -1, h.shape[-1])) + h
        return self.head(self.wide(h).amax(dim=1))


def point_net() -> Case:
    return supervised(
        PointNet(),
        lambda: (torch.randn(2, 40, 3), torch.randint(0, 5, (2,))),
        lambda m, x, y: F.cross_entropy(m(x), y),
        momentum,
    )


# --------------------------------------------------------------------------------------------------- other steps


class VariationalAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 48))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


def vae() -> Case:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        y, mean, log_var = model(x)
        return F.mse_loss(y, x) - 0.5 * (1 + log_var - mean.square() - log_var.exp()).mean()

    return supervised(VariationalAutoencoder(), lambda: (torch.randn(32, 48),), loss_fn, foreach_adamw)


def gan() -> Case:
    generator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.BatchNorm1d(32), nn.Linear(32, 24))
    critic = nn.Sequential(nn.Linear(24, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer_g, optimizer_c = adamw(generator.parameters()), adamw(critic.parameters())

    def step(mark: Mark = no_mark) -> None:
        with mark("critic"):
            real = torch.randn(16, 24)
            fake = generator(torch.randn(16, 8)).detach()
            mixed = torch.lerp(real, fake, torch.rand(16, 1)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
            optimizer_c.step()
            optimizer_c.zero_grad()
        with mark("generator"):
            (-critic(generator(torch.randn(16, 8))).mean()).backward()
            optimizer_g.step()
            optimizer_g.zero_grad()
            optimizer_c.zero_grad()

    return Case(nn.ModuleList([generator, critic]), step)


def checkpointed() -> Case:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for k, block in enumerate(self.blocks):
                x = x + checkpoint(block, x, use_reentrant=k == 1, preserve_rng_state=False)
            return x

    return supervised(
        Checkpointed(),
        lambda: (torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)),
        lambda m, x, y: F.l1_loss(m(x), y),
        adamw,
    )


def accumulated() -> Case:
    """Two backwards into the same gradients, under autocast, before one optimizer step."""
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    optimizer = adamw(model.parameters())

    def step(mark: Mark = no_mark) -> None:
        for _ in range(2):
            with mark("forward"), torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(torch.randn(16, 32)), torch.randint(0, 4, (16,)))
            with mark("backward"):
                loss.backward()
        with mark("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return Case(model, step)


def by_name(*builds: Callable[[], Case]) -> dict[str, Callable[[], Case]]:
    return {build.__name__: build for build in builds}


CASES = by_name(
    mlp, conv1d, resnet, unet3d, unet2d, encoder, encoder_dropout, tied_decoder, lstm, gru, experts,
    message_passing, point_net, vae, gan, checkpointed, accumulated,
)  # fmt: skip
