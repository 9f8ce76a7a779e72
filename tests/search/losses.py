"""Losses of the grammar: functions of (world, model's output, the batch's fields, model)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.search.models import CLASSES, WIDTH
from tests.search.worlds import Told

IGNORED = -100


@dataclass(frozen=True)
class Kind:
    """A loss in the grammar.

    Attributes:
        fn: Of (world, output, fields, model).
        needs: Fields of the batch that it reads.
        mixes: Whether parts, weighed by rows or by the count that is told, may train something else than the whole.
        refused: It must be refused whatever it trains: a bare tuple.
    """

    fn: Callable[..., Any]
    needs: tuple[str, ...] = ("target",)
    mixes: bool = False
    refused: bool = False


LOSSES: dict[str, Kind] = {}


def loss(*needs: str, mixes: bool = False, refused: bool = False) -> Callable[[Any], Any]:
    def register(fn):
        LOSSES[fn.__name__] = Kind(fn, needs or ("target",), mixes, refused)
        return fn

    return register


def errors(out, f):
    """Squared errors, (B, CLASSES)."""
    return (out.rows - f["target"]).pow(2)


def by_row(out, f):
    return errors(out, f).mean(1)


# Means over rows: parts add up.


@loss()
def mse(world, out, f, model):
    return F.mse_loss(out.rows, f["target"])


@loss()
def huber(world, out, f, model):
    return F.smooth_l1_loss(out.rows, f["target"])


@loss("label")
def cross_entropy(world, out, f, model):
    return F.cross_entropy(out.rows, f["label"])


@loss("label")
def label_smoothing(world, out, f, model):
    return F.cross_entropy(out.rows, f["label"], label_smoothing=0.1)


@loss("label")
def focal(world, out, f, model):
    ce = F.cross_entropy(out.rows, f["label"], reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


@loss()
def kl_batchmean(world, out, f, model):
    return F.kl_div(F.log_softmax(out.rows, 1), torch.softmax(f["target"], 1), reduction="batchmean")


@loss()
def mean_of_log(world, out, f, model):
    return torch.log1p(by_row(out, f)).mean()


@loss()
def dice_of_samples(world, out, f, model):
    p, t = torch.sigmoid(out.rows), (f["target"] > 0).to(out.rows.dtype)
    return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


@loss()
def relative_of_samples(world, out, f, model):
    return ((out.rows - f["target"]).norm(dim=1) / (f["target"].norm(dim=1) + 0.1)).mean()


@loss()
def gaussian(world, out, f, model):
    return F.gaussian_nll_loss(out.rows, f["target"], F.softplus(out.rows.flip(1)) + 0.1)


@loss()
def constant_float32(world, out, f, model):
    weights = torch.tensor([1.0, 0.2, 3.0], dtype=world.single)
    return (world.float(errors(out, f)) * weights).mean()


_TEACHERS: dict[torch.dtype, torch.nn.Module] = {}


def teacher_of(dtype):
    """A float32 teacher outside of the model."""
    if dtype not in _TEACHERS:
        generator = torch.Generator().manual_seed(5)
        net = torch.nn.Linear(4, CLASSES)
        with torch.no_grad():
            for each in net.parameters():
                each.copy_(torch.randn(each.shape, generator=generator))
        _TEACHERS[dtype] = net.requires_grad_(False).to(dtype)
    return _TEACHERS[dtype]


@loss("target", "x")
def teacher(world, out, f, model):
    with torch.no_grad():
        told = teacher_of(world.single)(world.float(f["x"]).mean(1))
    return F.mse_loss(world.float(out.rows), torch.tanh(told))


@loss()
def regularized(world, out, f, model):
    return F.mse_loss(out.rows, f["target"]) + 0.01 * sum(w.abs().pow(2).sum() for w in model.parameters())


@loss()
def one_element(world, out, f, model):
    return F.mse_loss(out.rows, f["target"]) * 1.0


@loss("target", "x")
def gradient_penalty(world, out, f, model):
    (slope,) = torch.autograd.grad(out.rows.pow(2).sum(), out.embeddings, create_graph=True)
    return F.mse_loss(out.rows, f["target"]) + 0.1 * ((slope.norm(dim=1) - 1) ** 2).mean()


@loss("ctc", "mask")
def ctc(world, out, f, model):
    steps = F.log_softmax(out.tokens.double() if world.exact else out.tokens.float(), 2).transpose(0, 1)
    sizes = torch.full((len(f["ctc"]),), steps.shape[0])
    return F.ctc_loss(steps, f["ctc"], sizes, torch.ones_like(sizes), zero_infinity=True)


@loss("words")
def tokens_of_even_rows(world, out, f, model):
    """A mean over all tokens, padding included."""
    return F.cross_entropy(out.tokens.flatten(0, 1), f["words"].clamp(min=0).flatten())


# With counts: parts add up.


@loss("words")
def told_tokens(world, out, f, model):
    total = F.cross_entropy(out.tokens.flatten(0, 1), f["words"].flatten(), ignore_index=IGNORED, reduction="sum")
    return Told(sum=total, count=int((f["words"] != IGNORED).sum()))


@loss("words")
def told_mean_of_tokens(world, out, f, model):
    count = (f["words"] != IGNORED).sum()
    mean = F.cross_entropy(out.tokens.flatten(0, 1), f["words"].flatten(), ignore_index=IGNORED)
    return Told(mean=mean, count=count)


@loss("label")
def told_class_weights(world, out, f, model):
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=world.single)
    total = F.cross_entropy(world.float(out.rows), f["label"], weight=weight, reduction="sum")
    return Told(sum=total, count=weight[f["label"]].sum())


@loss("label")
def told_outputs(world, out, f, model):
    accuracy = (out.rows.argmax(1) == f["label"]).double().mean()
    return Told(mean=F.cross_entropy(out.rows, f["label"]), count=len(f["label"]), outputs={"accuracy": accuracy})


@loss()
def told_rows(world, out, f, model):
    return Told(sum=by_row(out, f).sum(), count=len(out.rows), outputs=out.rows)


@loss("missing")
def told_missing(world, out, f, model):
    there = ~f["missing"].isnan()
    total = torch.where(there, out.rows - f["missing"].nan_to_num(), 0).pow(2).sum()
    return Told(sum=total, count=there.sum())


# Parts do not add up.


@loss("label", mixes=True)
def class_weights(world, out, f, model):
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=world.single)
    return F.cross_entropy(world.float(out.rows), f["label"], weight=weight)


@loss("label", mixes=True)
def class_weights_smoothed(world, out, f, model):
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=world.single)
    return F.cross_entropy(world.float(out.rows), f["label"], weight=weight, label_smoothing=0.1)


@loss("words", mixes=True)
def ignored_tokens(world, out, f, model):
    return F.cross_entropy(out.tokens.flatten(0, 1), f["words"].flatten(), ignore_index=IGNORED)


@loss("words", mixes=True)
def masked_mean(world, out, f, model):
    mask = (f["words"] != IGNORED).to(out.rows.dtype)
    return (out.tokens.pow(2).mean(2) * mask).sum() / mask.sum().clamp(min=1)


@loss("words", mixes=True)
def told_wrong_count(world, out, f, model):
    """Rows are told where the mean is over tokens."""
    mean = F.cross_entropy(out.tokens.flatten(0, 1), f["words"].flatten(), ignore_index=IGNORED)
    return Told(mean=mean, count=len(f["words"]))


@loss("label", mixes=True)
def told_one(world, out, f, model):
    """A mean whose count is told as 1."""
    return Told(mean=F.cross_entropy(out.rows, f["label"]), count=1)


@loss(mixes=True)
def summed(world, out, f, model):
    return errors(out, f).sum()


@loss(mixes=True)
def fixed_batch_size(world, out, f, model):
    return by_row(out, f).sum() / 8


@loss(mixes=True)
def summed_regularized(world, out, f, model):
    """The regularizer counts once for each part."""
    penalty = 0.05 * sum(w.abs().pow(2).sum() for w in model.parameters())
    return Told(sum=by_row(out, f).sum() + penalty, count=len(out.rows))


@loss("label", mixes=True)
def info_nce(world, out, f, model):
    z = F.normalize(world.float(out.embeddings), dim=1)
    t = F.normalize(world.float(out.rows) @ torch.ones(CLASSES, WIDTH, dtype=world.single) + z.flip(1), dim=1)
    return F.cross_entropy(z @ t.T / 0.2, torch.arange(len(z)))


@loss("label", mixes=True)
def triplet_hard(world, out, f, model):
    z = out.embeddings
    far = (z[:, None] - z[None]).pow(2).sum(2)
    same = f["label"][:, None] == f["label"][None]
    positive = torch.where(same, far, far.new_tensor(-1e3)).max(1).values
    negative = torch.where(same, far.new_tensor(1e3), far).min(1).values.clamp(max=10)
    return F.relu(positive - negative + 1).mean() + 0.01 * by_row(out, {"target": 0.5}).mean()


@loss(mixes=True)
def barlow_twins(world, out, f, model):
    a, b = out.rows, f["target"] + out.rows.tanh()
    a, b = (a - a.mean(0)) / (a.std(0, unbiased=False) + 0.1), (b - b.mean(0)) / (b.std(0, unbiased=False) + 0.1)
    return (a.T @ b / len(a) - torch.eye(CLASSES, dtype=a.dtype)).pow(2).sum()


@loss("label", mixes=True)
def supervised_contrastive(world, out, f, model):
    z = F.normalize(out.embeddings, dim=1)
    logits = z @ z.T / 0.5
    same = (f["label"][:, None] == f["label"][None]).to(z.dtype)
    return -(same * F.log_softmax(logits, 1)).sum(1).div(same.sum(1)).mean()


@loss(mixes=True)
def dice_of_batch(world, out, f, model):
    p, t = torch.sigmoid(out.rows), (f["target"] > 0).to(out.rows.dtype)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


@loss(mixes=True)
def correlation(world, out, f, model):
    a, b = out.rows.flatten(), f["target"].flatten()
    a, b = a - a.mean(), b - b.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-2)


@loss(mixes=True)
def r_squared(world, out, f, model):
    return errors(out, f).sum() / ((f["target"] - f["target"].mean(0)).pow(2).sum() + 0.1)


@loss(mixes=True)
def variance(world, out, f, model):
    spread = (out.embeddings.var(0, unbiased=False) + 1e-2).sqrt()
    return F.mse_loss(out.rows, f["target"]) + F.relu(2 - spread).mean()


@loss(mixes=True)
def root_mean(world, out, f, model):
    return by_row(out, f).mean().sqrt()


@loss("label", mixes=True)
def perplexity(world, out, f, model):
    return torch.exp(F.cross_entropy(out.rows, f["label"]))


@loss(mixes=True)
def log_of_mean(world, out, f, model):
    return torch.log(by_row(out, f).mean() + 0.1)


@loss(mixes=True)
def relative_of_batch(world, out, f, model):
    return (out.rows - f["target"]).norm() / (f["target"].norm() + 0.1)


@loss("missing", mixes=True)
def missing_labels(world, out, f, model):
    there = ~f["missing"].isnan()
    return F.mse_loss(out.rows[there], f["missing"][there])


@loss("missing", mixes=True)
def missing_by_task(world, out, f, model):
    there = ~f["missing"].isnan()
    total = torch.where(there, out.rows - f["missing"].nan_to_num(), 0).pow(2).sum(0)
    return (total / there.sum(0).clamp(min=1)).mean()


@loss(mixes=True)
def ranking(world, out, f, model):
    score, wanted = out.rows[:, 0], f["target"][:, 0]
    ahead = (wanted[:, None] > wanted[None]).to(score.dtype)
    return (F.softplus(score[None] - score[:, None]) * ahead).sum() / ahead.sum().clamp(min=1) + 0.1 * score.pow(
        2
    ).mean()


@loss(mixes=True)
def worst_row(world, out, f, model):
    return by_row(out, f).max()


@loss(mixes=True)
def median(world, out, f, model):
    return by_row(out, f).median()


@loss(mixes=True)
def quantile(world, out, f, model):
    return torch.quantile(world.float(by_row(out, f)), 0.8)


@loss("label", mixes=True)
def focal_by_positives(world, out, f, model):
    wanted = F.one_hot(f["label"], CLASSES)[:, 1:].to(out.rows.dtype)
    bce = F.binary_cross_entropy_with_logits(
        out.rows[:, 1:].float() if not world.exact else out.rows[:, 1:], world.float(wanted), reduction="none"
    )
    return bce.sum() / wanted.sum().clamp(min=1)


@loss(mixes=True)
def curriculum(world, out, f, model):
    """Only rows below the batch's mean loss count."""
    each = by_row(out, f)
    chosen = (each <= each.detach().mean()).to(each.dtype)
    return (each * chosen).sum() / chosen.sum().clamp(min=1)


@loss(mixes=True)
def by_spread_of_targets(world, out, f, model):
    return by_row(out, f).mean() / (f["target"].std(unbiased=False) + 0.1)


@loss("label", mixes=True)
def diversity(world, out, f, model):
    mean = torch.softmax(out.rows, 1).mean(0)
    return F.cross_entropy(out.rows, f["label"]) + (mean * mean.log()).sum()


@loss(mixes=True)
def finite_rows(world, out, f, model):
    """Rows whose loss is not finite are left out."""
    each = torch.where(f["target"][:, 0] > 0.5, torch.nan, by_row(out, f))
    each = each[each.isfinite()]
    return each.mean() if len(each) else out.rows.sum() * 0


@loss("label", mixes=True, refused=True)
def bare_tuple(world, out, f, model):
    """``return loss, accuracy``."""
    mean = F.cross_entropy(out.rows, f["label"])
    accuracy = (out.rows.argmax(1) == f["label"]).double().mean()
    return (mean, accuracy + 0.25)
