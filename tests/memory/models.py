"""More small real models with real steps, beyond `tests.zoo`: other layers, optimizers and ways to take a gradient."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.predict.steps import STEPS
from tests.predict.truth import plain_step
from tests.zoo import (
    Case,
    Encoder,
    Mark,
    adamw,
    by_name,
    fused_adamw,
    language_loss,
    momentum,
    no_mark,
    supervised,
    tokens,
)

# ---------------------------------------------------------------------------------------------------- sequences


class Recomputed(Encoder):
    """Each layer runs again in backward, and its dropout with it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return self.head(h)


def recomputed_dropout() -> Case:
    return supervised(Recomputed(dropout=0.1), tokens, language_loss, fused_adamw)


class PackedGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 12)
        self.gru = nn.GRU(12, 16, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True)
        return self.head(self.gru(packed)[1].transpose(0, 1).flatten(1))


def packed_gru() -> Case:
    return supervised(
        PackedGru(),
        lambda: (torch.randint(0, 256, (6, 20)), torch.tensor([20, 17, 11, 9, 9, 2]), torch.randint(0, 4, (6,))),
        lambda m, x, lengths, y: F.cross_entropy(m(x, lengths), y),
        adamw,
    )


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        outputs = []
        for frame in x:
            state = self.cell(frame, state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs)


def speech_cells() -> Case:
    lengths = torch.full((4,), 10), torch.full((4,), 4)
    return supervised(
        Cells(),
        lambda: (torch.randn(10, 4, 8), torch.randint(1, 6, (4, 4))),
        lambda m, x, y: F.ctc_loss(m(x).log_softmax(-1), y, *lengths),
        momentum,
    )


class Bags(nn.Module):
    """Bags of words with sparse gradients, one dense layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(500, 24, mode="sum", sparse=True)
        self.head = nn.Linear(24, 5)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(words, offsets))


def bags() -> Case:
    model = Bags()
    optimizers = torch.optim.SparseAdam(model.bag.parameters()), adamw(model.head.parameters())

    def step(mark: Mark = no_mark) -> None:
        words, offsets, y = torch.randint(0, 500, (200,)), torch.arange(0, 200, 10), torch.randint(0, 5, (20,))
        F.cross_entropy(model(words, offsets), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return Case(model, step)


# ------------------------------------------------------------------------------------------------------ images, volumes


def grouped_dilated() -> Case:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(3, 12, 3, padding=2, dilation=2)), nn.InstanceNorm2d(12), nn.Mish(),
        nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.Conv2d(12, 16, 1), nn.GroupNorm(4, 16), nn.Hardswish(),
        nn.AvgPool2d(2), nn.PixelShuffle(2), parametrizations.spectral_norm(nn.Conv2d(4, 3, 3, padding=1)),
    )  # fmt: skip
    return supervised(
        model,
        lambda: (torch.randn(2, 3, 24, 24), torch.randn(2, 3, 24, 24)),
        lambda m, x, y: F.smooth_l1_loss(m(x), y),
        lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9),
    )


class ComplexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 32, dtype=torch.cfloat), nn.Linear(32, 8, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(torch.polar(F.relu(h.abs() - 0.1), h.angle())).abs()


def complex_numbers() -> Case:
    return supervised(
        ComplexNet(),
        lambda: (torch.randn(16, 24, dtype=torch.cfloat), torch.rand(16, 8)),
        lambda m, x, y: F.mse_loss(m(x), y),
        momentum,
    )


# ------------------------------------------------------------------------------------------------------ points, graphs


class VoxelNet(nn.Module):
    """Points sorted into voxels by `unique`, pooled by `scatter_reduce`; then ranked by `sort`."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, width), nn.ReLU())
        self.voxel = nn.Sequential(nn.Linear(width, width), nn.RMSNorm(width), nn.Linear(width, 1))

    def forward(self, points: Tensor) -> Tensor:
        cells, owner, counts = torch.unique((points * 3).long(), dim=0, return_inverse=True, return_counts=True)
        index = owner[:, None].expand(-1, 16)
        features = torch.zeros(len(cells), 16).scatter_reduce(0, index, self.point(points), "amax")
        return (self.voxel(features)[:, 0] * counts.log1p()).sort(descending=True).values


def voxels() -> Case:
    return supervised(
        VoxelNet(),
        lambda: (torch.randn(1500, 3),),
        lambda m, points: m(points).topk(5).values.logsumexp(0),
        adamw,
    )


def sparse_graph() -> Case:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)
            ends = torch.randint(0, 60, (2, 240))
            adjacency = torch.sparse_coo_tensor(ends, torch.full((240,), 0.25), (60, 60), check_invariants=True)
            self.register_buffer("adjacency", adjacency.coalesce())

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(torch.sparse.mm(self.adjacency, self.first(x)))
            return torch.sparse.mm(self.adjacency, self.second(h))

    return supervised(
        Convolution(),
        lambda: (torch.randn(60, 8), torch.randint(0, 3, (60,))),
        lambda m, x, y: F.nll_loss(F.log_softmax(m(x), -1), y),
        adamw,
    )


# -------------------------------------------------------------------------------- other gradients, other optimizers


class GaussianProcess(nn.Module):
    """Negative log likelihood of a regression, by Cholesky factor and triangular solve."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.log_noise = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x / self.log_scale.exp()
        kernel = torch.exp(-(x[:, None] - x).square().sum(-1) / 2) + self.log_noise.exp() * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)
        white = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
        return white.square().sum() / 2 + factor.diagonal().log().sum()


def gaussian_process() -> Case:
    model = GaussianProcess()
    x = torch.randn(40, 3)
    y = x.sin().sum(-1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def loss() -> Tensor:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        return loss

    return Case(model, lambda mark=no_mark: optimizer.step(loss))


def least_squares() -> Case:
    """A linear layer solved in closed form on top of learnt features."""
    features = nn.Sequential(nn.Linear(5, 12), nn.Tanh())

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        h = model(x)
        weight = torch.linalg.solve(h.T @ h + 0.1 * torch.eye(12), h.T @ y)
        return (h @ weight - y).square().mean() + torch.linalg.svdvals(h).sum() * 1e-3

    return supervised(features, lambda: (torch.randn(50, 5), torch.randn(50, 2)), loss_fn, momentum)


def adafactor() -> Case:
    model = nn.Sequential(nn.Linear(30, 60), nn.SiLU(), nn.Linear(60, 30), nn.Softplus(), nn.Linear(30, 1))
    return supervised(
        model,
        lambda: (torch.randn(40, 30), torch.rand(40, 1)),
        lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), y),
        lambda params: torch.optim.Adafactor(params),
    )


def per_sample_gradients() -> Case:
    """Gradients of each row by `vmap`, clipped row by row and averaged."""
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = momentum(model.parameters())

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    def step(mark: Mark = no_mark) -> None:
        params = {name: p.detach() for name, p in model.named_parameters()}
        rows = vmap(grad(loss), in_dims=(None, 0, 0))(params, torch.randn(32, 10), torch.randint(0, 3, (32,)))
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)
        scale = (1 / norms).clamp(max=1)
        for name, p in model.named_parameters():
            p.grad = torch.einsum("n,n...->...", scale, rows[name]) / 32
        optimizer.step()
        optimizer.zero_grad()

    return Case(model, step)


def meta_learning() -> Case:
    """Second-order: the gradient passes through two inner steps."""
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = adamw(model.parameters())

    def step(mark: Mark = no_mark) -> None:
        params = dict(model.named_parameters())
        x, run = torch.rand(16, 1), partial(functional_call, model)
        for _ in range(2):
            inner = (run(params, (x,)) - x.sin()).square().mean()
            slopes = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            params = {name: p - 0.1 * slope for (name, p), slope in zip(params.items(), slopes, strict=True)}
        (run(params, (x + 1,)) - (x + 1).sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Case(model, step)


def as_case(name: str) -> Case:
    """A step whose memory is estimated in `tests/predict`."""
    step = STEPS[name]()
    run = plain_step(step)
    return Case(step.model, lambda mark=no_mark: run())


CASES = by_name(
    recomputed_dropout, packed_gru, speech_cells, bags, grouped_dilated, complex_numbers, voxels, sparse_graph,
    gaussian_process, least_squares, adafactor, per_sample_gradients, meta_learning,
) | {name: partial(as_case, name) for name in ("fourier_operator", "inplace_residuals", "contrastive")}  # fmt: skip
