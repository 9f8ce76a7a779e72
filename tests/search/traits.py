"""Traits of models: what people put into a forward. Each is a module over rows, (B, H), or the input, (B, T, D)."""

from __future__ import annotations

import functools
import random
from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Trait(nn.Module):
    """A trait; `aux` is an auxiliary loss that it leaves behind, None where there is none."""

    on_input = False
    aux = None

    def __init__(self, width, world):
        super().__init__()
        self.world = world
        self.width = width
        self.make()

    def make(self):
        """Build what the trait needs."""

    def forward(self, z):
        return self.layer(z)


class OfALayer(Trait):
    """A trait with a linear layer."""

    def make(self):
        self.layer = nn.Linear(self.width, self.width)


class LayerNorm(Trait):
    def make(self):
        self.layer = nn.LayerNorm(self.width)


class GroupNorm(Trait):
    def make(self):
        self.layer = nn.GroupNorm(2, self.width)


class InstanceNorm(Trait):
    on_input = True

    def make(self):
        self.norm = nn.InstanceNorm1d(4, affine=True)

    def forward(self, x):
        return x + self.norm(x.transpose(1, 2)).transpose(1, 2)


class BatchNorm(Trait):
    def make(self):
        self.layer = nn.BatchNorm1d(self.width)


class BatchNormOverAll(Trait):
    """momentum=None: a cumulative average."""

    def make(self):
        self.layer = nn.BatchNorm1d(self.width, momentum=None)


class BatchNormNoStats(Trait):
    """Batch statistics in eval as well."""

    def make(self):
        self.norm = nn.BatchNorm1d(self.width, track_running_stats=False)

    def forward(self, z):
        return z + self.norm(z)


class BatchNormEval(BatchNorm):
    def train(self, mode=True):
        super().train(mode)
        self.layer.eval()
        return self


class BatchNormFrozen(BatchNormEval):
    def make(self):
        super().make()
        self.layer.requires_grad_(False)


class BatchNormFunctional(Trait):
    def make(self):
        self.register_buffer("mean", torch.zeros(self.width))
        self.register_buffer("var", torch.ones(self.width))

    def forward(self, z):
        return F.batch_norm(z, self.mean, self.var, training=self.training)


class BatchNormByHand(Trait):
    def forward(self, z):
        return (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-3).sqrt()


class BatchNormTiny(Trait):
    """Only a small side branch sees the batch: the other gradients hardly move, its own one does."""

    def make(self):
        self.side = nn.Linear(self.width, self.width)

    def forward(self, z):
        normed = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-3).sqrt()
        return z + 1e-5 * self.side(normed.detach())


class TinyBesideHuge(Trait):
    def make(self):
        self.tiny, self.huge = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width)

    def forward(self, z):
        return z + 1e-6 * self.tiny(z) + 50.0 * torch.tanh(0.01 * self.huge(z))


class Dropout(Trait):
    def make(self):
        self.drop = nn.Dropout(0.3)

    def forward(self, z):
        if self.world.feed is None:
            return self.drop(z)
        return z * (self.world.rand(z) > 0.3) / 0.7 if self.training else z


class DropoutFunctional(Trait):
    def forward(self, z):
        if self.world.feed is None:
            return F.dropout(z, 0.4, self.training)
        return z * (self.world.rand(z) > 0.4) / 0.6 if self.training else z


class Noise(Trait):
    def forward(self, z):
        return z + 0.3 * self.world.rand(z)


class NoiseFromGenerator(Trait):
    def make(self):
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, z):
        return z * (0.5 + self.world.rand(z, self.generator))


class NoiseFromNumpy(Trait):
    def forward(self, z):
        return z + 0.3 * self.world.numpy_rand(z)


class LayerDrop(OfALayer):
    """One draw of Python's for all rows."""

    def forward(self, z):
        draw = random.random() if self.world.feed is None else float(self.world.feed.draw(()))
        return z + self.layer(z) if draw < 0.5 else z + 0.1 * self.layer(z)


class BatchNormAndDropout(Trait):
    """Unequal beneath its noise."""

    def make(self):
        self.norm, self.drop = nn.BatchNorm1d(self.width), Dropout(self.width, self.world)

    def forward(self, z):
        return self.drop(self.norm(z))


class NoiseByBatch(Trait):
    """Noise as large as the batch's own spread: unequal beneath its noise."""

    def forward(self, z):
        return z + (z.std(0, unbiased=False) + 0.1) * self.world.rand(z)


class Queue(Trait):
    """MoCo's: a FIFO of keys in a buffer."""

    def make(self):
        self.register_buffer("queue", torch.randn(6, self.width))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, z):
        out = z + torch.softmax(z @ self.queue.clone().T, 1) @ self.queue.clone()
        with torch.no_grad():
            at = int(self.pointer)
            self.queue[at] = z.detach().mean(0).to(self.queue.dtype)
            self.pointer.fill_((at + 1) % 6)
        return out


class QueueOfList(Trait):
    """The same in a deque, which is no buffer."""

    def make(self):
        self.keys = deque([torch.randn(self.width) for _ in range(4)], maxlen=4)

    def forward(self, z):
        keys = torch.stack(list(self.keys)).to(z.dtype)
        out = z + torch.softmax(z @ keys.T, 1) @ keys
        self.keys.append(z.detach().mean(0))
        return out


class Teacher(Trait):
    """A momentum encoder that each forward updates."""

    def make(self):
        self.student, self.teacher = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width)
        self.teacher.requires_grad_(False)

    def forward(self, z):
        if self.training:
            with torch.no_grad():
                for ours, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    ours.lerp_(theirs, 0.1)
        return self.student(z) * self.teacher(z)


class Center(Trait):
    """DINO's."""

    def make(self):
        self.register_buffer("center", torch.zeros(self.width))

    def forward(self, z):
        out = torch.softmax((z - self.center) / 0.5, 1)
        if self.training:
            self.center = self.center * 0.5 + z.detach().mean(0) * 0.5
        return out


class RunningNorm(Trait):
    """Observations are counted in, then normalized by what was counted."""

    def make(self):
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("mean_square", torch.ones(self.width))

    def forward(self, z):
        if self.training:
            total = self.count + len(z)
            self.mean_square = self.mean_square + (z.detach().pow(2).sum(0) - len(z) * self.mean_square) / total
            self.count = total
        return z / (self.mean_square + 1e-3).sqrt()


class RunningNormByData(Trait):
    """The same through ``.data``, which leaves no version behind."""

    def make(self):
        self.register_buffer("scale", torch.ones(self.width))

    def forward(self, z):
        if self.training:
            self.scale.data.mul_(0.8).add_(0.2 * z.detach().abs().mean(0))
        return z / (self.scale.clone() + 0.1)


class Codebook(Trait):
    """Vector quantization; the codes move in forward."""

    def make(self):
        self.register_buffer("codes", torch.randn(4, self.width))

    def forward(self, z):
        codes = self.codes.clone()
        nearest = torch.cdist(self.world.float(z.detach()), self.world.float(codes)).argmin(1)
        if self.training:
            one_hot = F.one_hot(nearest, 4).to(z.dtype)
            sums, counts = one_hot.T @ z.detach(), one_hot.sum(0)[:, None]
            self.codes = torch.where(counts > 0, 0.7 * codes + 0.3 * sums / counts.clamp(min=1), codes)
        chosen = codes[nearest]
        self.aux = 0.5 * (z - chosen).pow(2).mean()
        return z + (chosen - z).detach()


class Seen(Trait):
    """Statistics that nothing reads."""

    def make(self):
        self.register_buffer("seen", torch.zeros(self.width))

    def forward(self, z):
        self.seen.add_(z.detach().sum(0))
        return z


class BatchAttention(Trait):
    def make(self):
        self.query, self.key = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width)

    def forward(self, z):
        return z + torch.softmax(self.query(z) @ self.key(z).T, 1) @ z


class BatchMax(Trait):
    def forward(self, z):
        return z - z.max(0).values


class BatchMean(Trait):
    def forward(self, z):
        return z - 0.5 * z.mean(0, keepdim=True)


class InputByMax(Trait):
    on_input = True

    def forward(self, x):
        return x / (x.abs().max() + 1e-3)


class TopK(Trait):
    """Keeps the upper half of all activations of the batch."""

    def forward(self, z):
        border = z.flatten().topk(max(1, z.numel() // 2)).values[-1]
        return torch.where(z >= border, z, 0.1 * z)


class Branch(Trait):
    """Takes the one way or the other by the batch's skew."""

    def forward(self, z):
        return torch.relu(z) + 0.1 * z if z[:, 0].mean() > z[:, 0].median() else torch.tanh(2 * z)


class Mixture(Trait):
    """Experts with a load-balancing loss: squares of means over the batch."""

    def make(self):
        self.router = nn.Linear(self.width, 3)
        self.experts = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(3))

    def forward(self, z):
        gates = torch.softmax(self.router(z), 1)
        self.aux = 3 * gates.mean(0).pow(2).sum()
        return sum(gates[:, i : i + 1] * expert(z) for i, expert in enumerate(self.experts))


class KeptMean(Trait):
    """An auxiliary loss that is a mean over rows."""

    def forward(self, z):
        self.aux = 0.1 * z.pow(2).mean()
        return z


class KeptActivation(Trait):
    def forward(self, z):
        self.last = z * 2
        return z


class CarriedState(Trait):
    """A recurrent state that one step leaves to the next."""

    def make(self):
        self.state = None

    def forward(self, z):
        state = self.state if self.state is not None and self.state.shape == z.shape else torch.zeros_like(z)
        out = z + 0.5 * state
        self.state = out.detach()
        return out


class FloatCast(Trait):
    def forward(self, z):
        return self.world.float(z).exp().clamp(max=4).to(z.dtype)


class FloatCastStays(Trait):
    """A layer kept in float32."""

    on_input = True

    def forward(self, x):
        return torch.sin(x.to(self.world.single)).to(x.dtype)


class HalfCast(Trait):
    def forward(self, z):
        return z + self.world.half(z * 0.5).to(z.dtype)


class Constant(Trait):
    def forward(self, z):
        scale = torch.tensor([0.5, 1.0, 1.5, 1.0, 0.5, 2.0], dtype=self.world.single)
        return (z * scale).to(z.dtype)


class ConstantKept(Trait):
    """A float32 tensor that is no buffer."""

    def make(self):
        self.scale = torch.linspace(0.5, 1.5, self.width, dtype=self.world.single)

    def forward(self, z):
        return (self.world.float(z) @ torch.diag(self.scale)).to(z.dtype)


@functools.lru_cache
def grid(width, dtype):
    return torch.linspace(-1, 1, width, dtype=dtype)


class CachedGrid(Trait):
    def forward(self, z):
        return z + grid(self.width, self.world.single).to(z.dtype)


class SpectralNorm(Trait):
    def make(self):
        self.layer = parametrizations.spectral_norm(nn.Linear(self.width, self.width))

    def forward(self, z):
        return 3 * self.layer(z)


class WeightNorm(Trait):
    def make(self):
        self.layer = parametrizations.weight_norm(nn.Linear(self.width, self.width))


class WarmUp(Trait):
    """A counter that changes what forward does."""

    def make(self):
        self.calls = 0

    def forward(self, z):
        self.calls += 1
        return z * min(1.0, self.calls / 10)


class Counter(Trait):
    def make(self):
        self.calls = 0

    def forward(self, z):
        self.calls += 1
        return z


class AutocastRegion(OfALayer):
    def forward(self, z):
        with self.world.region():
            return self.layer(z).to(z.dtype)


class InPlaceInput(Trait):
    on_input = True

    def forward(self, x):
        return x.mul_(0.5).clamp_(-1, 1)


class InPlaceSafe(Trait):
    """Repeating it changes nothing."""

    on_input = True

    def forward(self, x):
        return x.clamp_(-1, 1)


class Checkpointed(Trait):
    def make(self):
        self.layer = nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh())

    def forward(self, z):
        return checkpoint(self.layer, z, use_reentrant=False)


class Spectrum(Trait):
    def make(self):
        self.weight = nn.Parameter(torch.randn(self.width // 2 + 1, dtype=torch.complex64))

    def forward(self, z):
        return z + torch.fft.irfft(torch.fft.rfft(z) * self.weight, n=self.width)


class Frozen(Trait):
    def make(self):
        self.layer = nn.Linear(self.width, self.width).requires_grad_(False)

    def forward(self, z):
        return torch.tanh(self.layer(z)) + z


class ForSomeRows(OfALayer):
    """A layer that only some rows reach."""

    def forward(self, z):
        chosen = z[:, 0] > 0.2
        if chosen.any():
            z = z.index_add(0, chosen.nonzero()[:, 0], self.layer(z[chosen]).to(z.dtype))
        return z


class Unused(OfALayer):
    def forward(self, z):
        return z


class Tied(Trait):
    def make(self):
        self.one, self.other = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width)
        self.other.weight = self.one.weight

    def forward(self, z):
        return self.other(torch.tanh(self.one(z)))


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.view_as(z)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class GradientReversal(Trait):
    def forward(self, z):
        return z + 0.5 * _Reverse.apply(z)


class GradientHook(Trait):
    """Normalizes the gradient of the batch in backward: the loss does not show it."""

    def forward(self, z):
        if z.requires_grad:
            z.register_hook(lambda grad: grad / (grad.norm() + 1e-6))
        return z * 1.5


class ParameterHook(Trait):
    """Clips a parameter's gradient as it comes."""

    def make(self):
        self.layer = nn.Linear(self.width, self.width)
        self.layer.weight.register_hook(lambda grad: grad / (1e-3 + grad.abs().max()))


@dataclass(frozen=True)
class Kind:
    """A trait in the grammar.

    Attributes:
        make: Its class.
        mixes: Whether a row's gradient may depend on the other rows, or on the forwards before in the same step.
        noisy: Whether it draws.
    """

    make: type[Trait]
    mixes: bool = False
    noisy: bool = False


PLAIN = (
    *(LayerNorm, GroupNorm, InstanceNorm, BatchNormEval, BatchNormFrozen, TinyBesideHuge, Seen, KeptMean),
    *(KeptActivation, FloatCast, FloatCastStays, HalfCast, Constant, ConstantKept, CachedGrid, WeightNorm, Counter),
    *(AutocastRegion, InPlaceInput, InPlaceSafe, Checkpointed, Spectrum, Frozen, ForSomeRows, Unused, Tied),
    *(GradientReversal,),
)
MIXING = (
    *(BatchNorm, BatchNormOverAll, BatchNormNoStats, BatchNormFunctional, BatchNormByHand, BatchNormTiny, Queue),
    *(QueueOfList, Teacher, Center, RunningNorm, RunningNormByData, Codebook, BatchAttention, BatchMax, BatchMean),
    *(InputByMax, TopK, Branch, Mixture, CarriedState, SpectralNorm, WarmUp, GradientHook, ParameterHook),
)
NOISY = (Dropout, DropoutFunctional, Noise, NoiseFromGenerator, NoiseFromNumpy, LayerDrop)
TRAITS = {
    **{each.__name__: Kind(each) for each in PLAIN},
    **{each.__name__: Kind(each, mixes=True) for each in MIXING},
    **{each.__name__: Kind(each, noisy=True) for each in NOISY},
    **{each.__name__: Kind(each, mixes=True, noisy=True) for each in (BatchNormAndDropout, NoiseByBatch)},
}
