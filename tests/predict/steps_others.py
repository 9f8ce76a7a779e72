"""Steps of nets on sequences, graphs and points, and steps with more than one network or derivative."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from memkit import Loss
from tests import zoo
from tests.predict.step import STEPS, Step, case, classify, from_zoo, labels, language, momentum, regress

# --------------------------------------------------------------------------------------------------- sequences


def tokens(rows: int = 4, length: int = 32) -> tuple[Tensor, Tensor]:
    return labels(100, rows, length), labels(100, rows, length)


STEPS["encoder"] = from_zoo(lambda: zoo.Encoder(dropout=0.0), tokens, language)
STEPS["encoder_dropout"] = from_zoo(lambda: zoo.Encoder(dropout=0.1), tokens, language, accumulation_steps=2)
STEPS["encoder_bfloat16"] = from_zoo(lambda: zoo.Encoder(dropout=0.0), tokens, language, precision="bf16-mixed")
STEPS["tied_decoder"] = from_zoo(
    zoo.TiedDecoder, tokens, language, optimizer=functools.partial(torch.optim.AdamW, foreach=True)
)
STEPS["tied_decoder_fused"] = from_zoo(
    zoo.TiedDecoder, tokens, language, optimizer=functools.partial(torch.optim.AdamW, fused=True)
)


@case
def checkpointed_transformer() -> Step:
    class Checkpointed(zoo.Encoder):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            for layer in self.layers:
                h = checkpoint(layer, h, use_reentrant=False, preserve_rng_state=False)
            return self.head(h)

    return Step(Checkpointed(dropout=0.0), tokens(), language, accumulation_steps=2)


@case
def translator() -> Step:
    """nn.Transformer: encoder and decoder, cross attention, masks; its layers are copies."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 32, padding_idx=0)
            self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
            self.head = nn.Linear(32, 100)

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            source, target = (self.embedding(x) for x in pair)
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.head(self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True))

    source, target = tokens()
    return Step(Translator(), ((source, target), target), language)


@case
def embedding_bag() -> Step:
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(200, 16, mode="mean"), "head": nn.Linear(16, 4)})

    def loss_fn(model: nn.ModuleDict, batch: tuple[tuple[Tensor, Tensor], Tensor]) -> Tensor:
        return F.cross_entropy(model["head"](model["bag"](*batch[0])), batch[1])

    return Step(model, ((labels(200, 60), torch.arange(0, 60, 5)), labels(4, 12)), loss_fn, momentum)


def series() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 12, 8), torch.randn(4, 1)


STEPS["lstm"] = from_zoo(lambda: zoo.Recurrent(nn.LSTM), series, regress)
STEPS["lstm_bfloat16"] = from_zoo(lambda: zoo.Recurrent(nn.LSTM), series, regress, precision="bf16-mixed")
STEPS["gru"] = from_zoo(lambda: zoo.Recurrent(nn.GRU), series, regress)
STEPS["rnn"] = from_zoo(lambda: zoo.Recurrent(nn.RNN), series, regress)


@case
def packed_lengths() -> Step:
    """A batch of sequences that is cut to its longest one: the lengths are numbers in the batch."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
    batch = torch.randn(3, 20, 8), labels(6, 3, 20), torch.tensor([15, 12, 9])

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
        x, y, lengths = batch
        longest = int(lengths.max())
        valid = torch.arange(longest) < lengths[:, None]
        losses = F.cross_entropy(model(x[:, :longest]).transpose(1, 2), y[:, :longest], reduction="none")
        return Loss(sum=(losses * valid).sum(), count=valid.sum())

    return Step(model, batch, loss_fn)


class Packed(nn.Module):
    """Reads padded rows of different lengths, in both directions, as packed ones; pads them again."""

    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(100, 12)
        self.layer = kind(12, 20, 2, bidirectional=True, batch_first=batch_first)
        self.head = nn.Linear(40, 6)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, lengths = batch
        x = self.embedding(rows if self.batch_first else rows.T)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=self.batch_first, enforce_sorted=False)
        padded, lengths = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(padded.sum(1) / lengths[:, None])


def ragged() -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (labels(100, 5, 16), torch.tensor([9, 16, 9, 2, 11])), labels(6, 5)


STEPS["packed_lstm"] = from_zoo(lambda: Packed(nn.LSTM, batch_first=True), ragged, classify)
STEPS["packed_gru"] = from_zoo(lambda: Packed(nn.GRU, batch_first=False), ragged, classify)


class DenseExperts(nn.Module):
    """Top-1 routing with a fixed capacity: sizes do not depend on the data."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 32) / 4)
        self.down = nn.Parameter(torch.randn(experts, 32, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)
        weight, rows = gate.topk(x.shape[0] // 2, dim=0)
        chosen = x[rows.T]
        out = torch.bmm(F.gelu(torch.bmm(chosen, self.up)), self.down) * weight.T[..., None]
        return x.index_add(0, rows.T.reshape(-1), out.flatten(0, 1))


STEPS["experts_with_capacity"] = from_zoo(DenseExperts, lambda: (torch.randn(64, 16), torch.randn(64, 16)), regress)


# --------------------------------------------------------------------------------------------- graphs and points


@case
def message_passing() -> Step:
    source, target = labels(50, 2, 300)
    batch = (torch.randn(50, 4), source, target, torch.randn(300, 3)), torch.randn(50, 1)
    return Step(zoo.MessagePassing(), batch, lambda m, b: F.l1_loss(m(*b[0]), b[1]))


@case
def graph_attention() -> Step:
    """Softmax over the edges of a node by `scatter_reduce`, and a pooling whose size is a number in the batch."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.score, self.head = nn.Linear(4, 16), nn.Linear(32, 1), nn.Linear(16, 3)

        def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
            h = self.lift(x)
            source, target = edges
            score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1)), 0.2).squeeze(-1)
            top = torch.full((len(x),), -1e9).scatter_reduce(0, target, score.detach(), "amax")
            weight = (score - top[target]).exp()
            total = torch.zeros(len(x)).scatter_add(0, target, weight)
            h = torch.zeros_like(h).index_add(0, target, h[source] * (weight / total[target])[:, None])
            return self.head(h.new_zeros(int(graph.max()) + 1, 16).index_add(0, graph, h))

    batch = (torch.randn(40, 4), labels(40, 2, 200), torch.arange(40) // 10), labels(3, 4)
    return Step(Attention(), batch, lambda m, b: F.cross_entropy(m(*b[0]), b[1]), "adam")


STEPS["point_net"] = from_zoo(zoo.PointNet, lambda: (torch.randn(2, 40, 3), labels(5, 2)), classify, optimizer=momentum)


# --------------------------------------------------------------------------------------------------- other steps


@case
def vae() -> Step:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        y, mean, log_var = model(x)
        return F.smooth_l1_loss(y, x) - (1 + log_var - mean.square() - log_var.exp()).mean()

    return Step(zoo.VariationalAutoencoder(), torch.randn(32, 48), loss_fn)


@case
def gan_critic() -> Step:
    """The critic's half of a step, with a gradient penalty; the other network is a variable of the loss."""
    generator, critic = zoo.gan().model

    def loss_fn(critic: nn.Module, real: Tensor) -> Tensor:
        fake = generator(torch.randn(16, 8)).detach()
        mixed = torch.lerp(real, fake, torch.rand(16, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        return critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return Step(critic, torch.randn(16, 24), loss_fn)


@case
def gan_generator() -> Step:
    generator, critic = zoo.gan().model
    return Step(generator, torch.randn(16, 8), lambda model, noise: -critic(model(noise)).mean())


@case
def diffusion() -> Step:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Linear(16, 8)
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
            self.register_buffer("alphas", torch.linspace(0.99, 0.01, 100))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            angle = t[:, None] * torch.exp(torch.arange(8) * -1.0)
            shift = self.time(torch.cat([angle.sin(), angle.cos()], -1))
            return self.second(F.silu(self.first(x) + shift[:, :, None, None]))

    def loss_fn(model: Denoiser, x: Tensor) -> Tensor:
        t, noise = torch.randint(0, 100, (len(x),)), torch.randn_like(x)
        alpha = model.alphas[t][:, None, None, None]
        return F.mse_loss(model(alpha.sqrt() * x + (1 - alpha).sqrt() * noise, t), noise)

    return Step(Denoiser(), torch.randn(4, 3, 16, 16), loss_fn)


@case
def contrastive() -> Step:
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))

    def loss_fn(model: nn.Module, views: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (F.normalize(model(view), dim=-1) for view in views)
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    return Step(model, (torch.randn(32, 32), torch.randn(32, 32)), loss_fn, "radam")


@case
def physics_informed() -> Step:
    """Second derivatives of a network by its inputs."""
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return (bend[:, 0] + slope[:, 1]).abs().mean()

    return Step(model, torch.randn(64, 2), loss_fn)


@case
def frozen_backbone() -> Step:
    """Fine-tuning with low-rank adapters; the optimizer gets a part of the parameters, a hook is registered."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(64, 64).requires_grad_(requires_grad=False)
            self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.base(x) + self.up(self.down(x)))

    model = nn.Sequential(Adapted(), Adapted(), nn.utils.parametrizations.weight_norm(nn.Linear(64, 8)))
    model[0].register_forward_hook(lambda module, inputs, out: out.clone())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return Step(model, (torch.randn(16, 64), labels(8, 16)), classify, optimizer)


@case
def masked_rows() -> Step:
    """Rows are chosen by a mask that is a part of the batch, so that its values are known."""
    chosen = torch.arange(64) % 2 == 0

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, mask = batch
        return F.cross_entropy(model(x[mask]), y[mask])

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    return Step(model, (torch.randn(64, 16), labels(5, 64), chosen), loss_fn)


@case
def laplacian() -> Step:
    """A network's second derivatives by torch.func, which adds tangents of zeros."""
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        bends = torch.func.vmap(torch.func.hessian(lambda point: model(point)[0]))(x)
        return bends.diagonal(0, 1, 2).sum(1).square().mean()

    return Step(model, torch.randn(64, 2), loss_fn)
