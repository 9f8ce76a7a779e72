"""The split check knows which modules and losses cannot be split, over a zoo with known answers; it leaves no trace."""

import copy
import ctypes
import random
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import memkit as mk
from memkit import Loss
from memkit._gradients.loss import read_loss
from memkit._torch.dispatch import num_modes
from memkit.train import sketches, split_ways
from memkit.train.split_check import Computation, Examination, check_split
from memkit.train.split_ways import ways_to_cut
from memkit.train.wrapper import MemoryEfficientTrainingWrapper
from tests.allocations import trace_allocations
from tests.helpers import (
    assert_refused,
    assert_same,
    flat_gradient,
    gradient_of,
    one_in,
    one_in_product,
    relative_error,
)
from tests.search.batches import Data, cast, make_fields
from tests.search.doing import tell
from tests.search.losses import LOSSES
from tests.search.oracle import build, make_loss_fn
from tests.search.specs import Spec, Step
from tests.search.traits import TRAITS
from tests.search.worlds import World
from tests.toys import NeuralODE, fits, mean_square, trainer_of

ROWS = 12


def net(*layers):
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Tanh(), nn.Linear(8, 5))


def conv(*layers):
    return nn.Sequential(nn.Conv2d(2, 8, 3), *layers, nn.SiLU(), nn.Conv2d(8, 3, 1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, x):
        return self.block(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0]


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class HandWrittenNorm(nn.Module):
    """A batch normalization that is no subclass of torch's."""

    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-5) if self.training else x


class AutoCorrelation(nn.Module):
    """Chooses channels by a mean over the batch, in evaluation mode for each row, as Autoformer chooses delays."""

    def forward(self, x):
        scores = x.mean(0, keepdim=True) if self.training else x
        chosen = scores.topk(2, dim=-1).indices
        return x.gather(-1, chosen.expand(len(x), -1))


class AlwaysCentred(nn.Module):
    """Mixes the rows in evaluation mode too."""

    def forward(self, x):
        return x - x.mean(0)


class OwnBatchNorm(nn.BatchNorm1d):
    """A user's subclass."""


class Words(nn.Module):
    def __init__(self, **keywords):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0, **keywords)
        self.head = nn.Linear(8, 20)

    def forward(self, words):
        return self.head(self.embed(words))


class Gram(nn.Module):
    """A temperature beside an encoder."""

    def __init__(self, *layers):
        super().__init__()
        self.encoder = net(*layers)
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, views):
        a, b = (F.normalize(self.encoder(view)) for view in views)
        return self.log_scale.exp() * a @ b.T


def info_nce(model, views):
    logits = model(views)
    return F.cross_entropy(logits, torch.arange(len(logits)))


def make_tokens():
    words = torch.randint(1, 20, (ROWS, 7))
    labels = words.clone()
    labels[torch.arange(7)[None] >= torch.arange(1, ROWS + 1)[:, None] % 7 + 1] = -100
    return words, labels


def token_mean(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def token_sum(model, batch):
    loss_sum = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
    return Loss(sum=loss_sum, count=(batch[1] != -100).sum())


def plain_sum(model, batch):
    return model(batch).pow(2).sum()


def autocast_loss(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch).pow(2).mean()


def rows(*shape):
    return lambda: torch.randn(ROWS, *shape)


def views():
    return torch.randn(ROWS, 6), torch.randn(ROWS, 6)


def evaluated(model, *names):
    for name in names:
        model.get_submodule(name).eval()
    return model


# Cases that the grammar of tests/search lacks, and the modules at fault.
OWN = {
    "group norm of images": (lambda: conv(nn.GroupNorm(2, 8)), rows(2, 6, 6), mean_square),
    "instance norm with statistics": (
        lambda: conv(nn.InstanceNorm2d(8, track_running_stats=True)),
        rows(2, 6, 6),
        mean_square,
    ),
    "attention with dropout": (Attention, rows(4, 8), mean_square),
    "GRU with dropout": (Recurrent, rows(4, 8), mean_square),
    "hand-written norm in evaluation": (lambda: evaluated(net(HandWrittenNorm()), "1"), rows(6), mean_square),
    "sparse embedding": (lambda: Words(sparse=True), make_tokens, token_sum),
    "autocast": (net, rows(6), autocast_loss),
    "batch norm 2d": (lambda: conv(nn.BatchNorm2d(8)), rows(2, 6, 6), mean_square, "1"),
    "batch norm 3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 4, 2), nn.BatchNorm3d(4), nn.Tanh()),
        rows(1, 4, 4, 4),
        mean_square,
        "1",
    ),
    "synchronized batch norm": (lambda: net(nn.SyncBatchNorm(8)), rows(6), mean_square, "1"),
    "subclass of batch norm": (lambda: net(OwnBatchNorm(8)), rows(6), mean_square, "1"),
    "batch norm without statistics, in evaluation": (
        lambda: evaluated(net(nn.BatchNorm1d(8, track_running_stats=False)), "1"),
        rows(6),
        mean_square,
        "1",
    ),
    "two batch norms, one in evaluation": (
        lambda: evaluated(net(nn.BatchNorm1d(8), nn.BatchNorm1d(8)), "2"),
        rows(6),
        mean_square,
        "1",
    ),
    "batch norm behind functional dropout": (
        lambda: net(FunctionalDropout(), nn.BatchNorm1d(8)),
        rows(6),
        mean_square,
        "2",
    ),
    "hand-written norm": (lambda: net(HandWrittenNorm()), rows(6), mean_square, "1"),
    "hand-written norm and batch norm": (
        lambda: net(HandWrittenNorm(), nn.BatchNorm1d(8)),
        rows(6),
        mean_square,
        "2",
        "1",
    ),
    "InfoNCE over batch norm": (lambda: Gram(nn.BatchNorm1d(8)), views, info_nce, "encoder.1"),
}
MODULES = {name: modules for name, (_, _, _, *modules) in OWN.items() if modules} | {
    **{f"BatchNorm{kind}": ["traits.0.layer"] for kind in ("", "OverAll")},
    **{name: ["traits.0"] for name in ("BatchNormFunctional", "RunningNorm", "RunningNormByData")},
    **{f"BatchNorm{kind}": ["traits.0.norm"] for kind in ("NoStats", "AndDropout")},
    "class_weights, BatchNorm": ["traits.0.layer"],
}
# The fault of a loss, and losses and traits of the grammar that have it.
AT_FAULT = {
    "weights": (
        *("class_weights", "class_weights_smoothed", "ignored_tokens", "masked_mean", "told_wrong_count", "told_one"),
        *("log_of_mean", "missing_labels", "finite_rows", "class_weights, BatchNorm"),
    ),
    "sum": ("summed", "fixed_batch_size"),
    "state": ("Queue", "QueueOfList", "Teacher", "Center", "Codebook", "SpectralNorm", "WarmUp"),
    "hooks": ("ParameterHook",),
    "rows": (
        *("summed_regularized", "info_nce", "triplet_hard", "barlow_twins", "supervised_contrastive", "dice_of_batch"),
        *("correlation", "r_squared", "variance", "root_mean", "perplexity", "relative_of_batch", "missing_by_task"),
        *("ranking", "quantile", "focal_by_positives", "by_spread_of_targets", "diversity", "BatchNormByHand"),
        *("BatchNormTiny", "BatchAttention", "BatchMax", "BatchMean", "InputByMax", "Mixture", "GradientHook"),
        *("NoiseByBatch", "InfoNCE over batch norm", "worst_row", "median"),
    ),
}
FAULTS = {name: fault for fault, names in AT_FAULT.items() for name in names}
NOT_IN_EVERY_BATCH = {"bare_tuple", "curriculum", "TopK", "Branch", "CarriedState"}  # the search takes several steps
INEXACT = list(dict.fromkeys([*MODULES, *FAULTS]))
EXACT = [name for name in (*OWN, *LOSSES, *TRAITS) if name not in {*INEXACT, *NOT_IN_EVERY_BATCH}]
WAYS_OUT = {
    "rows": "cached_backward",
    "weights": "mk.Loss(mean=loss, count=n)",
    "wrong count": "mk.Loss(sum=total, count=n)",
    "sum": "mk.Loss(sum=loss * num_rows, count=n)",
    "state": "once per step",
    "hooks": "max_grad_norm",
    None: "",
}


def case(name, setting="float32"):
    """A model, a batch and a loss function: one of this file's, or a loss and traits of the grammar."""
    dtype = getattr(torch, setting)
    if name in OWN:
        make_model, make_batch, loss_fn, *_ = OWN[name]
        batch = pytree.tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, make_batch())
        return make_model().to(dtype), batch, loss_fn
    loss, *traits = name.split(", ") if name.split(", ")[0] in LOSSES else ("mse", name)
    step = Step(Data(ROWS, padded="words" in LOSSES[loss].needs, classes="skewed"), container="dict")
    spec, world = Spec(0, 0, loss=loss, traits=tuple(traits), setting=setting, steps=(step,)), World(exact=False)
    said = make_loss_fn(spec, step, world)
    fields = cast(make_fields(step.data, spec.needs, dtype, seed=3), dtype)
    return build(spec, world).train(), fields, lambda model, batch: tell(said(model, batch))


def in_float64_too(names):
    """Each in float32, and those that are no losses or traits in float64; a third of all by default."""
    return one_in_product(3, names, ["float32"]) + one_in_product(3, filter(OWN.__contains__, names), ["float64"])


@pytest.mark.parametrize(("name", "setting"), in_float64_too(EXACT))
def test_accepts_splittable_steps(name, setting):
    verdict = check_split(*case(name, setting))
    assert verdict.exact is True, verdict
    assert (verdict.modules, verdict.state, verdict.loss, verdict.advice) == ((), (), None, "")


@pytest.mark.parametrize(("name", "setting"), in_float64_too(INEXACT))
def test_explains_unsplittable_steps(name, setting):
    model, batch, loss_fn = case(name, setting)
    before = copy.deepcopy(model.state_dict())
    verdict = check_split(model, batch, loss_fn)
    assert verdict.exact is False, verdict
    assert verdict.error > 1e-6
    assert (list(verdict.modules), verdict.loss) == (MODULES.get(name, []), FAULTS.get(name))
    assert all(module in verdict.advice for module in verdict.modules)
    cause = "wrong count" if name.startswith("told_") and verdict.loss == "weights" else verdict.loss
    assert WAYS_OUT[cause] in verdict.advice
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("name", one_in(12, sorted({*OWN, *LOSSES, *MODULES} - NOT_IN_EVERY_BATCH - {"autocast"})))
def test_distinguishes_half_precision_rounding_from_difference(name):
    """A small bfloat16 model is checked in float32: no false alarm, and errors above 2% are found."""
    verdict = check_split(*case(name, "bfloat16"))
    if name in EXACT:
        assert verdict.exact is True, verdict
    elif check_split(*case(name, "float64")).error > 0.02:
        assert verdict.exact is False, verdict


@pytest.mark.parametrize("num_rows", range(2, 8))
def test_few_rows_are_enough(num_rows):
    x = torch.randn(num_rows, 6)
    assert check_split(net(), x, mean_square).exact is True
    assert check_split(Gram(), (x, x + 1), info_nce).loss == "rows"


@pytest.mark.parametrize("name", one_in(12, sorted({*OWN, *INEXACT} - {"told_one"})))  # one each is right
def test_four_rows_tell_as_much_as_eight(monkeypatch, name):
    monkeypatch.setattr(split_ways, "_NUM_ROWS", 4)
    assert check_split(*case(name)).exact is (name in EXACT)


def test_a_part_without_any_label_is_a_matter_of_weights():
    words, labels = make_tokens()
    labels[6:] = -100  # the second part's mean is 0 / 0
    assert check_split(Words(), (words, labels), token_mean).loss == "weights"
    assert check_split(Words(), (words, labels), token_sum).exact is True


def test_names_permutation_of_rows():
    def mixup(model, x):
        return mean_square(model, 0.7 * x + 0.3 * x[torch.randperm(len(x))])

    verdict = check_split(net(), torch.randn(12, 6), mixup)
    assert verdict.exact is None
    assert verdict.is_permuted
    assert "permutes the rows at random (mixup, SMOTE, a codebook" in verdict.reason


def test_a_sum_has_a_way_out_of_its_own():
    x = torch.randn(12, 6)
    assert "mk.Loss(sum=loss * num_rows, count=n)" in check_split(net(), x, plain_sum).advice
    assert check_split(net(), x, lambda model, x: Loss(sum=plain_sum(model, x), count=len(x))).exact is True


def test_probes_differing_rows_at_any_position():
    """Padding in two rows of 200 is enough to see that the mean is over tokens."""
    words = torch.randint(1, 20, (200, 7))
    labels = words.clone()
    labels[[33, 150], 2:] = -100
    assert check_split(Words(), (words, labels), token_mean).loss == "weights"
    assert check_split(Words(), (words, words), token_mean).exact is True  # nothing is padded: rows weigh the same


def test_keeps_pairs_of_rows_together():
    def adjacent_pairs(model, x):
        z = model(x)
        return (z[0::2] - z[1::2]).pow(2).mean()

    def triplets(model, x):
        anchor, near, far = model(x).view(-1, 3, 5).unbind(1)
        return F.relu((anchor - near).norm(dim=1) - (anchor - far).norm(dim=1) + 1).mean()

    x = torch.randn(24, 6)
    assert check_split(net(), x, adjacent_pairs, num_parts=3).exact is True
    assert check_split(net(), x, triplets, num_parts=4).exact is True  # few rows refuse, or mix; real parts decide
    halves = check_split(net(), x, lambda model, x: (model(x)[::2] - model(x).flip(0)[::2]).pow(2).mean(), num_parts=4)
    assert halves.loss == "rows"


# ----------------------------------------------------------------------------------------------- what used to be silent


class Casting(nn.Module):
    """Casts to float32 inside, whatever comes, and then mixes the rows."""

    def __init__(self, mixes=True):
        super().__init__()
        self.net, self.mixes = net(), mixes

    def forward(self, x):
        out = self.net(x.float())
        return out - out.mean(0) if self.mixes else out


class Keeping(Casting):
    """Keeps its activation, which no deep copy takes: it is no leaf."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Noisy(Casting):
    """Adds noise of its own."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


class NoisyFromGenerator(Casting):
    def __init__(self, mixes=True):
        super().__init__(mixes)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return super().forward(x + torch.randn(x.shape, generator=self.generator))


class Checkpointed(Noisy):
    """Draws again in backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedReentrant(Noisy):
    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("kind", [Casting, Keeping, Noisy, NoisyFromGenerator, Checkpointed, CheckpointedReentrant])
def test_models_failing_in_float64(kind, mixes):
    verdict = check_split(kind(mixes), torch.randn(ROWS, 6), lambda model, x: (model(x) - 0.3).pow(2).mean())
    assert (verdict.exact, verdict.loss) == ((False, "rows") if mixes else (True, None)), verdict


def test_float32_class_weights_and_teachers_in_the_loss():
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2, 3.0, 1.0]))
    teacher = net().requires_grad_(False)
    x, y = torch.randn(ROWS, 6), torch.randint(0, 5, (ROWS,))
    weighted = check_split(net(), (x, y), lambda model, batch: criterion(model(batch[0]), batch[1]))
    assert (weighted.exact, weighted.loss) == (False, "weights")
    distilled = check_split(net(), x, lambda model, x: F.mse_loss(model(x), teacher(x)))
    assert distilled.exact is True
    compared = check_split(net(), x, lambda model, x: F.mse_loss(model(x) @ model(x).T, teacher(x) @ teacher(x).T))
    assert (compared.exact, compared.loss) == (False, "rows")


class Center(nn.Module):
    """DINO's center, a plain attribute that each forward replaces."""

    def __init__(self):
        super().__init__()
        self.encoder, self.center = net(), torch.zeros(5)

    def forward(self, x):
        out = self.encoder(x) - self.center
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        return out


class Normalizer(nn.Module):
    """A running normalizer, a plain Python object outside of any buffer, as in reinforcement learning."""

    class Moments:
        def __init__(self):
            self.count, self.total = 1, 0.0

    def __init__(self):
        super().__init__()
        self.net, self.moments = net(), self.Moments()

    def forward(self, x):
        out = self.net(x * self.moments.count / (1 + self.moments.total))
        self.moments.count += len(x)
        self.moments.total += float(x.detach().abs().sum())
        return out


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of each position."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class MaskedNorm(nn.Module):
    """GroupNorm of one group over the valid positions alone; it gets a zero at each of the others."""

    def forward(self, x):
        valid = (x != 0).to(x.dtype)
        mean = (x * valid).sum((1, 2), True) / valid.sum((1, 2), True)
        variance = ((x - mean).square() * valid).sum((1, 2), True) / valid.sum((1, 2), True)
        return (x - mean) * (variance + 1e-5).rsqrt()


class PaddedEncoder(nn.Module):
    """Normalizes sequences that it cuts to the longest of the rows it gets, and pools the valid positions."""

    def __init__(self, norm, *, cuts=True):
        super().__init__()
        self.conv, self.norm, self.out, self.cuts = nn.Conv1d(6, 8, 3, padding=1), norm, nn.Linear(8, 3), cuts

    def forward(self, x, lengths):
        x = x[:, :, : int(lengths.max())] if self.cuts else x
        valid = (torch.arange(x.shape[2]) < lengths[:, None])[:, None]
        return self.out((self.norm(self.conv(x) * valid).relu() * valid).sum(2) / lengths[:, None])


def check_padded(norm, *, cuts=True):
    lengths = torch.tensor([20, 6, 9, 14, 5, 11, 8, 17])
    x = torch.randn(8, 6, 20) * (torch.arange(20) < lengths[:, None])[:, None]
    model = PaddedEncoder(norm, cuts=cuts)
    return check_split(model, (x, lengths), lambda model, batch: model(*batch).square().mean())


def test_names_padding_that_differs_from_part_to_part():
    assert (
        "padded to the longest one of each part, LayerNorm over the channels" in check_padded(nn.BatchNorm1d(8)).advice
    )
    verdict = check_padded(nn.GroupNorm(2, 8))
    assert (verdict.exact, verdict.loss) == (False, "rows")
    for way_out in ("one length before the split", "mask the padding", "LayerNorm over the channels of each position"):
        assert way_out in verdict.advice


@pytest.mark.parametrize(("norm", "cuts"), [(nn.GroupNorm(2, 8), False), (MaskedNorm(), True), (ChannelNorm(8), True)])
def test_the_ways_out_of_padding_split_exactly(norm, cuts):
    assert check_padded(norm, cuts=cuts).exact is True


@pytest.mark.parametrize(("kind", "state"), [(Center, "center"), (Normalizer, "Moments.count")])
def test_detects_changing_state_in_the_gradient(kind, state):
    model = kind()
    before = copy.deepcopy(model.state_dict()), dict(vars(getattr(model, "moments", model)))
    verdict = check_split(model, torch.randn(ROWS, 6), lambda model, x: (model(x) - 0.3).pow(2).mean())
    assert (verdict.exact, verdict.loss) == (False, "state")
    assert state in verdict.advice
    assert_same(model.state_dict(), before[0])
    assert vars(getattr(model, "moments", model)) == before[1]


BY_PARAMETRIZATION = "layer.parametrizations.train(); layer.weight; layer.parametrizations.eval()"
BY_A_ROW = "with torch.no_grad(): network(x[:1])"


@pytest.mark.parametrize(
    ("normalize", "how", "other"),
    [
        (nn.utils.parametrizations.spectral_norm, BY_PARAMETRIZATION, BY_A_ROW),
        (nn.utils.spectral_norm, BY_A_ROW, BY_PARAMETRIZATION),
    ],
)
def test_tells_how_to_update_a_spectral_norm_once_per_step(normalize, how, other):
    layer, x = normalize(nn.Linear(6, 5)), torch.randn(ROWS, 6)
    verdict = check_split(nn.Sequential(layer), x, mean_square)
    assert (verdict.exact, verdict.loss) == (False, "state")
    assert how in verdict.advice
    assert other not in verdict.advice
    assert how not in check_split(Center(), x, lambda model, x: (model(x) - 0.3).pow(2).mean()).advice


def test_a_spectral_norm_of_a_network_that_the_loss_runs_is_named_with_its_place():
    critic, x = nn.ModuleDict({"body": nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 5)))}), torch.randn(ROWS, 6)
    verdict = check_split(nn.Linear(6, 6), x, lambda model, x: critic["body"](model(x)).square().mean())
    assert verdict.loss == "state"
    assert set(verdict.state) == {"body.0.weight_u of ModuleDict", "body.0.weight_v of ModuleDict"}
    assert BY_A_ROW in verdict.advice


def test_spectral_norms_by_hooks_that_a_row_updates_have_the_training_of_the_whole():
    torch.manual_seed(0)
    plain = net()
    for each in (plain[0], plain[-1]):
        nn.utils.spectral_norm(each)
    plain = plain.double()
    split, batches = copy.deepcopy(plain), torch.randn(5, ROWS, 6).double()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, split)]
    layers = [each for each in split.modules() if hasattr(each, "weight_u")]
    trainer = MemoryEfficientTrainingWrapper(split, optimizers[1], accumulation_steps=3, probe="require")
    for x in batches:
        for each in layers:
            each.train()
        with torch.no_grad():
            split(x[:1])
        for each in layers:
            each.eval()
        trainer.train_step(x, mean_square)
        mean_square(plain, x).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert_same(split.state_dict(), plain.state_dict(), 1e-12)


def test_a_spectral_norm_that_is_updated_once_per_step_may_be_split():
    layer, x = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)), torch.randn(ROWS, 6)
    before = layer.weight.detach()
    layer.parametrizations.train()
    layer.weight  # noqa: B018 - a step of power iteration
    layer.parametrizations.eval()
    assert not torch.equal(layer.weight, before)
    assert check_split(nn.Sequential(layer), x, mean_square).exact is True


@pytest.mark.parametrize(("name", "state"), [("Queue", "queue"), ("Teacher", "teacher.weight"), ("WarmUp", "calls")])
def test_names_buffers_and_counts_changed_by_forward(name, state):
    verdict = check_split(*case(name))
    assert f"traits.0.{state}" in verdict.state
    assert f"traits.0.{state}" in verdict.advice


def copy_into(parameter, value):
    parameter.data.copy_(value)


def give_other_data(parameter, value):
    parameter.data = value


class ActNorm(nn.Module):
    """Glow's: the first forward sets its parameters from the rows."""

    def __init__(self, write=copy_into, *, only_in_training=False):
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
        self.is_set, self.write, self.only_in_training = False, write, only_in_training

    def forward(self, x):
        if not self.is_set and (self.training or not self.only_in_training):
            self.write(self.loc, -x.detach().mean(0))
            self.write(self.scale, 1 / (x.detach().std(0) + 1e-6))
            self.is_set = True
        return self.scale * (x + self.loc)


@pytest.mark.parametrize(
    ("layers", "modules"),
    [
        ([ActNorm], ()),
        ([partial(ActNorm, give_other_data)], ()),
        ([partial(ActNorm, only_in_training=True)], ()),
        ([ActNorm, partial(nn.BatchNorm1d, 8)], ("2",)),
    ],
)
def test_names_parameters_that_the_first_forward_sets(layers, modules):
    model, x = net(*(make() for make in layers)).double(), torch.randn(ROWS, 6).double()
    before = copy.deepcopy(model.state_dict())
    verdict = check_split(model, x, mean_square)
    assert (verdict.exact, verdict.loss, verdict.modules) == (False, "rows", modules)
    assert verdict.state == ("1.is_set", "1.loc", "1.scale")
    assert "run the model once on a whole batch before training" in verdict.advice
    assert not model[1].is_set
    assert_same(model.state_dict(), before)
    model(x)
    assert check_split(model, x, mean_square).modules == modules
    assert check_split(model, x, mean_square).exact is not bool(modules)


def test_a_split_that_was_refused_for_its_first_forward_is_not_doubted_after_it():
    model, x = net(ActNorm()), torch.randn(ROWS, 6)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.Adam(model.parameters()), accumulation_steps=2)
    with pytest.raises(mk.errors.ConfigError, match=r"first forward sets 1\.is_set, 1\.loc, 1\.scale"):
        trainer.train_step(x, mean_square)
    with torch.no_grad():
        model(x)
    trainer.train_step(x, mean_square)  # without a warning


class OfLoss(nn.Module):
    """DINO's loss: a centre in a buffer, which each call assigns anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(5))

    def forward(self, out):
        loss = F.softplus(out - self.center).mean()
        self.center = self.center * 0.9 + out.detach().mean(0)
        return loss


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm, nn.Identity()])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_names_a_buffer_of_the_loss_not_a_weight_that_hooks_compute_anew(norm):
    model, criterion = nn.Sequential(norm(nn.Linear(6, 5))).eval(), OfLoss()
    before = criterion.center
    verdict = check_split(model, torch.randn(ROWS, 6), lambda model, x: criterion(model(x)))
    assert (verdict.exact, verdict.loss, verdict.state) == (False, "state", ("OfLoss.center",))
    assert criterion.center is before
    assert_same(before, torch.zeros(5))


def test_a_count_that_is_not_the_divisor_has_a_way_out_of_its_own():
    """SimMIM's loss: the advice to give a count has been followed, and the count lacks the epsilon of the divisor."""
    model, x, mask = nn.Linear(6, 6).double(), torch.randn(16, 6).double(), (torch.rand(16, 6) < 0.5).double()

    def of(model, batch):
        return ((model(batch[0]) - batch[0]).abs() * batch[1]).sum(), batch[1].sum()

    def given(model, batch):
        total, count = of(model, batch)
        return mk.Loss(mean=total / (count + 1e-5), count=count)

    def way_out(model, batch):
        total, count = of(model, batch)
        return mk.Loss(sum=total, count=count)

    verdict = check_split(model, (x, mask), given)
    assert (verdict.exact, verdict.loss) == (False, "weights")
    assert "count that loss_fn gives is not the divisor of its mean" in verdict.advice
    assert "return mk.Loss(sum=total, count=n)" in verdict.advice
    assert check_split(model, (x, mask), way_out).exact


class Gain(nn.Module):
    """A parameter that each forward casts: the sum of its gradient over the rows is rounded to that."""

    def __init__(self, dtype, inner):
        super().__init__()
        self.inner = inner
        self.first, self.last = nn.Linear(6, 8, dtype=dtype), nn.Linear(8, 3, dtype=dtype)
        self.gain = nn.Parameter(torch.ones(8, dtype=dtype))

    def forward(self, x):
        return self.last(F.silu(self.first(x)) * self.gain.to(self.inner))


GAIN_LOSSES = {
    "equal": (lambda out, labels: F.cross_entropy(out, labels), (True, None)),
    "rows": (lambda out, labels: F.cross_entropy(out, labels) + 0.1 * out.std(), (False, "rows")),
    "weights": (lambda out, labels: F.cross_entropy(out, labels, ignore_index=2), (False, "weights")),
}


@pytest.mark.parametrize("seed", one_in(3, range(3)))
@pytest.mark.parametrize("loss", GAIN_LOSSES)
@pytest.mark.parametrize(
    ("dtype", "inner"),
    [(torch.float64, torch.float32), (torch.float32, torch.float16), (torch.float32, torch.bfloat16)],
)
def test_the_gradient_of_a_cast_parameter_is_as_coarse_as_the_cast(dtype, inner, loss, seed):
    torch.manual_seed(seed)
    model, batch = Gain(dtype, inner), (torch.randn(16, 6, dtype=dtype), torch.arange(16) * 7 // 5 % 3)
    criterion, expected = GAIN_LOSSES[loss]
    verdict = check_split(model, batch, lambda model, batch: criterion(model(batch[0]), batch[1]))
    assert (verdict.exact, verdict.loss) == expected


@pytest.mark.parametrize("num_masked", [0, 2, 5, 9])
def test_a_sum_over_unmasked_rows_is_named_where_the_rows_of_a_part_are_all_masked(num_masked):
    """Divided by the whole batch's count, as language models do with num_items_in_batch."""
    torch.manual_seed(0)
    model, x, labels = nn.Linear(6, 4).double(), torch.randn(12, 6).double(), torch.randint(4, (12,))
    labels[:num_masked] = -100
    batch = {"x": x, "labels": labels, "num_items": (labels != -100).sum()}

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum") / batch["num_items"]

    verdict = check_split(model, batch, loss_fn, num_parts=4)
    assert (verdict.exact, verdict.loss) == (False, "sum")


@pytest.mark.parametrize(("mixes", "expected"), [(False, (True, None)), (True, (False, "rows"))])
def test_a_backward_that_differentiates_by_itself_is_judged(mixes, expected):
    torch.manual_seed(0)
    model, x = NeuralODE(3).double(), torch.randn(8, 3, dtype=torch.float64)

    def loss_fn(model, x):
        out = model(x)
        return (out - mixes * out.mean(0)).square().mean()

    verdict = check_split(model, x, loss_fn)
    assert (verdict.exact, verdict.loss) == expected


def toggle(model, is_trained):
    for each in model.parameters():
        each.requires_grad_(is_trained)


def of_discriminator(nets, rows):
    toggle(nets["G"], False)
    toggle(nets["D"], True)
    return F.softplus(-nets["D"](rows)).mean() + F.softplus(nets["D"](nets["G"](rows))).mean()


def of_generator(nets, rows):
    toggle(nets["G"], True)
    toggle(nets["D"], False)
    return F.softplus(-nets["D"](nets["G"](rows))).mean()


def of_mixing_generator(nets, rows):
    return of_generator(nets, rows) + nets["G"](rows).std()


@pytest.mark.parametrize(("num_rows", "num_long"), [(16, 2), (16, 3), (64, 1), (64, 4)])
@pytest.mark.parametrize("name", ["a share of the longest", "a mean up to the longest"])
def test_losses_that_depend_on_the_longest_row_are_not_called_equal(name, num_rows, num_long):
    """Both halves may have one of the longest rows: these parts are equal then, others are not."""
    loss_fn = {
        "a share of the longest": lambda model, b: (model(b[0][:, 0]) * (b[1] / b[1].max())[:, None]).square().mean(),
        "a mean up to the longest": lambda model, b: model(b[0][:, : int(b[1].max())]).mean(1).square().mean(),
    }[name]
    lengths = torch.randint(1, 4, (num_rows,))
    lengths[torch.randperm(num_rows)[:num_long]] = 9
    verdict = check_split(net(), (torch.randn(num_rows, 9, 6), lengths), loss_fn)
    assert verdict.exact is False or "of the same rows in another order do not" in verdict.reason


@pytest.mark.parametrize("share", [0.98, 2.0], ids=["above", "below"])
def test_a_whole_whose_gradient_is_zero_is_compared_with_its_parts(share):
    """A mean that is clamped: of the whole batch it is above the limit, of a part it may be below."""
    model, rows = net(), torch.randn(ROWS, 6)
    limit = share * mean_square(model, rows).item()

    def loss_fn(model, rows):
        return mean_square(model, rows).clamp(max=limit)

    assert check_split(model, rows, loss_fn).exact is (share > 1)


@pytest.mark.parametrize("name", ["G", "D"])
@pytest.mark.parametrize("loss", [of_discriminator, of_generator, of_mixing_generator])
@pytest.mark.parametrize("before", [True, False])
def test_a_loss_that_freezes_parameters_itself_is_checked(name, loss, before):
    """As GAN_stability does; what trains is known after the forward, and the flags are as they were after the check."""
    nets = nn.ModuleDict({"G": nn.Linear(6, 6), "D": nn.Linear(6, 1)})
    toggle(nets, before)
    is_own = (loss is of_discriminator) == (name == "D")
    for model in (nets, nets[name]):
        verdict = check_split(model, torch.randn(ROWS, 6), lambda model, rows: loss(nets, rows))
        assert {each.requires_grad for each in nets.parameters()} == {before}
        if model is nets or is_own:
            assert verdict.exact is (loss is not of_mixing_generator)
        else:
            assert "no parameter to train" in verdict.reason


class Observer(nn.Module):
    """Quantization-aware training: a buffer that the first forward resizes, and a module that uses it afterwards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5).double()
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))
        self.register_buffer("most", torch.zeros(0, dtype=torch.float64))

    def forward(self, x):
        scale = self.linear.weight.detach().abs().amax(1)
        if not len(self.most):
            self.scale.resize_(scale.shape).copy_(scale)
            self.most.resize_(scale.shape).copy_(scale)
        return self.linear(x) / self.scale * self.most


@pytest.mark.parametrize("is_first", [True, False])
def test_a_buffer_that_the_first_forward_resizes_is_as_it_was(is_first):
    model = Observer()
    if not is_first:
        model(torch.randn(ROWS, 6).double())
    twin, objects = copy.deepcopy(model), list(model.buffers())
    x, loss_fn = torch.randn(ROWS, 6).double(), lambda model, x: model(x).square().mean()
    assert check_split(model, x, loss_fn).exact
    assert_same(model.state_dict(), twin.state_dict())
    assert list(map(id, model.buffers())) == list(map(id, objects))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2)
    trainer.train_step(x, loss_fn)
    loss_fn(twin, x).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


class Counting(nn.Module):
    """State that does not reach the gradient."""

    def __init__(self):
        super().__init__()
        self.net, self.num_calls, self.seen = net(), 0, []
        self.register_buffer("num_rows", torch.tensor(0))

    def forward(self, x):
        self.num_calls += 1
        self.seen.append(len(x))
        self.num_rows += len(x)
        return self.net(x)


def test_irrelevant_state_raises_no_alarm_and_is_restored():
    model = Counting()
    losses = []

    def loss_fn(model, x):
        losses.append(len(x))
        return mean_square(model, x)

    assert check_split(model, torch.randn(ROWS, 6), loss_fn).exact is True
    assert (model.num_calls, model.seen, int(model.num_rows), losses) == (0, [], 0, [])


class Capacity(nn.Module):
    """Warms up as BetaVAE does: the count moves a target; only the sign of the distance has a slope."""

    def __init__(self):
        super().__init__()
        self.net, self.num_iter = net(), 0

    def loss(self, x):
        self.num_iter += 1
        return (self.net(x).pow(2).mean() + 1 - self.num_iter / 1000).abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_detects_state_in_the_loss_before_its_gradient(dtype):
    model = Capacity().to(dtype)
    verdict = check_split(model, torch.randn(ROWS, 6, dtype=dtype), lambda model, x: model.loss(x))
    assert (verdict.exact, verdict.loss, verdict.state, model.num_iter) == (False, "state", ("num_iter",), 0)


def test_a_count_in_the_loss_function_itself():
    count = {"calls": 0}

    def loss_fn(model, x):
        count["calls"] += 1
        return mean_square(model, x) + 0.1 * count["calls"]

    verdict = check_split(net(), torch.randn(ROWS, 6), loss_fn)
    assert (verdict.exact, verdict.loss, count) == (False, "state", {"calls": 0})


@pytest.mark.parametrize("what", ["statistic", "draw", "count"])
def test_displayed_values_raise_no_alarm(what):
    """They differ in parts that start from one state too, so that state is not what makes them differ."""

    def loss_fn(model, x):
        model.num_calls += 1
        out = model(x)
        shown = {"statistic": out.detach().std(), "draw": torch.tensor(random.random()), "count": out.new_zeros(())}
        return out.pow(2).mean() + shown[what]

    assert check_split(Counting(), torch.randn(ROWS, 6), loss_fn).exact is True


def test_tiny_gradients_count_like_huge_ones():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.huge, self.tiny = nn.Linear(6, 5), nn.Linear(6, 5)

        def forward(self, x):
            tiny = self.tiny(x)
            return self.huge(x) * 1e3, (tiny - tiny.mean(0)) * 1e-3

    verdict = check_split(Two(), torch.randn(ROWS, 6), lambda model, x: sum(out.pow(2).mean() for out in model(x)))
    assert (verdict.exact, verdict.loss) == (False, "rows")


# --------------------------------------------------------------------------------------------------- it leaves no trace


@pytest.mark.parametrize("seed", [73, 78, 98])
def test_rounding_of_terms_that_cancel_is_no_difference(seed):
    """A discriminator's last bias: real and false rows pull it up and down by nearly as much."""
    torch.manual_seed(seed)
    digits = torch.from_numpy(load_digits().data).float() / 8 - 1
    generator = nn.Sequential(nn.Linear(16, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64))
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    trainer_g, trainer_d = (
        mk.MemoryEfficientTrainingWrapper(each, torch.optim.Adam(each.parameters()), accumulation_steps=4)
        for each in (generator, discriminator)
    )

    def d_loss(discriminator, micro):
        real, noise = micro
        with torch.no_grad():
            fake = generator(noise)
        loss = F.softplus(discriminator(fake)).mean() + F.softplus(-discriminator(real)).mean()
        return loss + 0.5 * mk.train.gradient_penalty(discriminator, real)

    for _ in range(5):  # a warning is an error
        real = digits[torch.randint(len(digits), (128,))]
        trainer_d.train_step((real, torch.randn(128, 16)), d_loss)
        trainer_g.train_step(torch.randn(128, 16), lambda g, noise: F.softplus(-discriminator(g(noise))).mean())


def test_leaves_user_objects_unchanged():
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.5))
    evaluated(model, "2")
    model(torch.randn(4, 6)).sum().backward()
    batch = torch.randn(ROWS, 6)
    torch.randn(3), np.random.rand(3), random.random()
    own = torch.Generator().manual_seed(5)
    before = (
        copy.deepcopy(model.state_dict()),
        [p.grad.clone() for p in model.parameters()],
        [module.training for module in model.modules()],
        batch.clone(),
        (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate(), own.get_state()),
        [(id(p), p.dtype) for p in model.parameters()],
    )

    def loss_fn(model, x):
        noise = random.random() + np.random.rand() + torch.rand(()) + torch.rand((), generator=own)
        return model(x.mul_(2)).pow(2).mean() + 0 * noise

    verdict = check_split(model, batch, loss_fn)
    assert (verdict.exact, verdict.modules) == (False, ("1",))
    state, gradients, training, kept_batch, random_state, parameters = before
    assert_same(model.state_dict(), state)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), gradients, strict=True))
    assert [module.training for module in model.modules()] == training
    assert torch.equal(batch, kept_batch)
    assert torch.equal(torch.get_rng_state(), random_state[0])
    assert np.array_equal(np.random.get_state()[1], random_state[1])
    assert random.getstate() == random_state[2]
    assert torch.equal(own.get_state(), random_state[3])
    assert [(id(p), p.dtype) for p in model.parameters()] == parameters


def test_works_with_gradients_disabled():
    with torch.no_grad():
        assert check_split(net(), torch.randn(ROWS, 6), mean_square).exact is True


def test_hooks_on_parameters_see_the_gradient_of_each_part():
    model = net()
    handle = model[0].weight.register_hook(lambda gradient: 2 * gradient)
    assert check_split(model, torch.randn(ROWS, 6), mean_square).exact is True
    handle.remove()
    model[0].weight.register_hook(lambda gradient: gradient / gradient.abs().max())
    verdict = check_split(model, torch.randn(ROWS, 6), mean_square)
    assert (verdict.exact, verdict.loss) == (False, "hooks")
    assert "max_grad_norm" in verdict.advice


class ClampedGradient(nn.Module):
    """Clamps the gradient of an activation, as loops for recurrent networks do."""

    def __init__(self, most=1e-3):
        super().__init__()
        self.most = most
        self.layer = nn.Linear(6, 5)

    def forward(self, x):
        h = self.layer(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-self.most, self.most))
        return h


def tokens_with_padding():
    targets = torch.randint(5, (ROWS, 7))
    targets[torch.rand(ROWS, 7) < 0.4] = -100
    valid = (targets != -100).sum()
    return {"x": torch.randn(ROWS, 7, 6), "targets": targets, "items_per_row": (valid.double() / ROWS).expand(ROWS)}


def token_losses(model, batch):
    return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["targets"], reduction="none")


def mean_over_tokens(model, batch):
    valid = (batch["targets"] != -100).sum()
    return Loss(mean=token_losses(model, batch).sum() / valid, count=valid)


def sum_over_tokens(model, batch):
    return Loss(sum=token_losses(model, batch).sum(), count=(batch["targets"] != -100).sum())


def mean_over_rows(model, batch):
    return (token_losses(model, batch).sum(1) / batch["items_per_row"]).mean()


@pytest.mark.parametrize("loss_fn", [mean_over_tokens, sum_over_tokens])
def test_a_backward_that_is_not_linear_is_found_where_counts_weigh_the_parts(loss_fn):
    model, batch = ClampedGradient().double(), cast(tokens_with_padding(), torch.float64)
    verdict = check_split(model, batch, loss_fn)
    assert (verdict.exact, verdict.loss) == (False, "scale")
    assert "batch['items_per_row']" in verdict.advice
    # A clamp that no gradient reaches is none; the check's slopes are about those of the step.
    assert check_split(ClampedGradient(most=1.0).double(), batch, loss_fn).exact is True
    with pytest.warns(mk.MemkitWarning, match="a hook which clamps an activation's gradient"):
        split = gradient_of_parts(model, batch, loss_fn)
    assert relative_error(split, gradient_of(loss_fn(model, batch).average(), model, flat=True)) > 0.01


@pytest.mark.parametrize("num_parts", [2, 3])
def test_a_mean_over_rows_has_the_whole_scale_in_a_backward_that_is_not_linear(num_parts):
    """The way out that the advice names."""
    model, batch = ClampedGradient().double(), cast(tokens_with_padding(), torch.float64)
    assert check_split(model, batch, mean_over_rows).exact is True
    whole = gradient_of(mean_over_tokens(model, batch).mean, model, flat=True)
    assert relative_error(gradient_of_parts(model, batch, mean_over_rows, num_parts), whole) < 1e-14


def gradient_of_parts(model, batch, loss_fn, num_parts=3):
    found = []
    trainer = mk.MemoryEfficientTrainingWrapper(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        accumulation_steps=num_parts,
        probe="require",
        on_gradients=lambda model: found.append(flat_gradient(model)),
    )
    trainer.train_step(batch, loss_fn)
    return found[0]


@pytest.mark.parametrize(
    ("layer", "mixing"), [(AutoCorrelation(), ("1",)), (HandWrittenNorm(), ())], ids=["choice", "normalization"]
)
def test_a_module_that_is_no_normalization_is_not_to_be_replaced_by_one(layer, mixing):
    verdict = check_split(nn.Sequential(nn.Linear(6, 8), layer), torch.randn(ROWS, 6), mean_square)
    assert (verdict.exact, verdict.modules, verdict.mixing) == (False, ("1",), mixing)
    assert ("GroupNorm" in verdict.advice) == (not mixing)
    assert ("call .eval() on them" in verdict.advice) == bool(mixing)


def test_a_compiled_model_is_checked_without_compiling():
    model = torch.compile(net(nn.BatchNorm1d(8)), backend=lambda graph, inputs: pytest.fail("compiled"))
    assert check_split(model, torch.randn(8, 6), mean_square).modules == ("_orig_mod.1",)


# ---------------------------------------------------------------------------------------------- where it cannot be told


class NoiseByRow(nn.Module):
    """Draws one number of NumPy's for each row."""

    def forward(self, x):
        return x * torch.tensor([[np.random.rand()] for _ in x], dtype=x.dtype)


class NoiseByBatch(nn.Module):
    """Draws one number of Python's for all rows."""

    def forward(self, x):
        return x * random.random()


class Unrepeatable(nn.Module):
    """Draws for each row, twice."""

    def forward(self, x):
        return NoiseByRow()(NoiseByRow()(x))


@pytest.mark.parametrize("noise", [NoiseByRow, NoiseByBatch])
def test_repeats_numpy_and_python_draws_if_possible(noise):
    assert check_split(net(noise()), torch.randn(ROWS, 6), mean_square).exact is True
    assert check_split(net(noise(), AlwaysCentred()), torch.randn(ROWS, 6), mean_square).exact is not True


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "reason"),
    [
        (net(), torch.randn(1, 6), mean_square, "the batch has a single row"),
        (net(), [object()], mean_square, "splitting a batch: got a object in it"),
        (net().requires_grad_(False), torch.randn(4, 6), mean_square, "no parameter requires a gradient"),
        (net(Unrepeatable()), torch.randn(4, 6), mean_square, "random numbers that cannot be repeated"),
        (net(), torch.randn(4, 6), lambda model, x: x.mean(), "a loss without a graph"),
        (net(), torch.full((4, 6), torch.nan), mean_square, "is not finite"),
        (net(), torch.randn(4, 6), lambda model, x: 0 * model(x).mean(), "is zero"),
        (net(), torch.randn(4, 6), lambda model, x: model(x[:1]).mean() + x.view(4, 2, 3).mean(), "RuntimeError"),
        (net(), torch.randn(4, 6), lambda model, x: (model(x).mean(), 4), "InputError: loss_fn: got a tuple"),
    ],
)
def test_obstacles_are_reported_without_error(model, batch, loss_fn, reason):
    verdict = check_split(model, batch, loss_fn)
    assert verdict.exact is None
    assert reason in verdict.reason


@pytest.mark.parametrize("exchange", [dist.all_reduce, lambda x: dist.all_gather([torch.empty_like(x)], x)])
def test_exchanges_no_data_between_processes(exchange):
    """The others may not be there: the check stops before, and says so."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def loss_fn(model, x):
        out = model(x)
        exchange(out.detach().clone())
        return out.pow(2).mean()

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        verdict = check_split(net(nn.BatchNorm1d(8)), torch.randn(8, 6), loss_fn)
        alone = check_split(net(), torch.randn(8, 6), mean_square)
    finally:
        dist.destroy_process_group()
    assert verdict.exact is None
    assert "RanksError: c10d" in verdict.reason
    assert alone.exact is True


@pytest.mark.parametrize(("capacity", "exact"), [(8, True), (5, True), (2, True), (1, None)])
def test_out_of_memory_means_fewer_rows(capacity, exact):
    def loss_fn(model, x):
        if len(x) > capacity:
            raise MemoryError
        return mean_square(model, x)

    verdict = check_split(net(), torch.randn(16, 6), loss_fn)
    assert verdict.exact is exact
    assert exact or "MemoryError" in verdict.reason


@pytest.mark.parametrize("num_parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_smaller_one_of_two_means_is_found(num_parts):
    """A few other rows may all take the same side. Here the loss for sources in any order is not one for each row."""
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False).double()

    def loss_fn(model, batch):
        sources, targets = (each.view(-1, 2, 4) for each in (model(batch[0]), batch[1]))
        return torch.minimum((sources - targets).square().mean(), (sources - targets.flip(1)).square().mean())

    num_different = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        batch = [torch.randn(16, width, generator=generator, dtype=torch.float64) for width in (16, 8)]
        whole = gradient_of(loss_fn(model, batch), model, flat=True)
        parts = zip(*(each.chunk(num_parts) for each in batch), strict=True)
        split = gradient_of(sum(loss_fn(model, part) for part in parts) / num_parts, model, flat=True)
        is_same = relative_error(split, whole) < 1e-9
        num_different += not is_same
        verdict = check_split(model, tuple(batch), loss_fn, num_parts=num_parts)
        assert is_same or verdict.exact is not True, seed
    assert num_different > 5


def test_takes_few_small_runs_if_equal():
    seen = Seen()
    assert check_split(net(), torch.randn(100, 6), seen).exact is True
    assert seen.lengths == [8, 6, 2, 8, 6, 2]  # rows as they come, then in another order
    assert seen.lengths_without_graph == [100, 50, 50]


@pytest.mark.parametrize("num_rows", [2, 3, 4, 8, 9, 16, 31, 64, 500])
@pytest.mark.parametrize("num_parts", [2, 3, 16])
def test_takes_two_plain_steps_at_most_if_equal(num_rows, num_parts):
    """Counted in rows that go forward and backward; besides, two parts go forward alone, together and one by one."""
    seen = Seen()
    labels = torch.arange(num_rows) % 2
    for is_first in (True, False):
        batch = torch.randn(num_rows, 6), labels
        ways = ways_to_cut(batch, num_parts=num_parts, is_first=is_first)
        model = net()
        examination = Examination(model, Computation(model.parameters), [seen], ways)
        seen.forget()
        for attempt in examination.attempts():
            with attempt as micro:
                attempt.backward(read_loss(seen(model, micro[0]), call="loss_fn"))
        assert examination.verdict.exact is True
        assert 0 < sum(seen.lengths) <= 2 * num_rows
        assert len(seen.lengths_without_graph) in ((0, 3) if is_first else (0,))
        assert sum(seen.lengths_without_graph[1:]) <= 2 * -(-num_rows // min(num_parts, num_rows))


class Seen:
    """Counts where the check cannot put the count back."""

    def __init__(self):
        self._noted = (ctypes.c_longlong * 100)()  # not one of the containers that are looked into

    def forget(self):
        self._noted[0] = 0

    @property
    def lengths(self):
        """Rows of the calls with a graph."""
        return [each for each in self._noted[1 : 1 + self._noted[0]] if each > 0]

    @property
    def lengths_without_graph(self):
        return [-each for each in self._noted[1 : 1 + self._noted[0]] if each < 0]

    def __call__(self, model, x):
        self._noted[0] += 1
        self._noted[self._noted[0]] = len(x) if torch.is_grad_enabled() else -len(x)
        return mean_square(model, x)


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("num_rows", [8, 16])
@pytest.mark.parametrize("parts", ["rows", "halves"])
def test_the_first_split_step_takes_no_more_than_the_whole_batch(num_rows, parts):
    def peak(**settings):
        torch.manual_seed(0)
        wide = [nn.Conv2d(1, 64, 5, 1, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU()]
        model = nn.Sequential(*wide, nn.Conv2d(64, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 9, 3, 1, 1))
        batch = torch.rand(num_rows, 1, 32, 32), torch.rand(num_rows, 9, 32, 32)
        trainer = MemoryEfficientTrainingWrapper(model, torch.optim.Adam(model.parameters()), **settings)
        return trace_allocations(lambda: trainer.train_step(batch, lambda m, b: F.mse_loss(m(b[0]), b[1]))).peak

    assert peak(accumulation_steps=num_rows if parts == "rows" else 2) <= peak(probe=False)


@pytest.mark.slow
def test_large_parameters_are_compared_in_a_few_numbers_each():
    """The check of a model of 16 MiB takes no second set of gradients."""
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Tanh(), nn.Linear(2048, 1024))
    batch = torch.randn(16, 1024)
    plain = trace_allocations(lambda: mean_square(model, batch).backward()).peak
    model.zero_grad()
    assert trace_allocations(lambda: check_split(model, batch, mean_square)).peak < 0.75 * plain
    with_mixing = check_split(nn.Sequential(model, AlwaysCentred()), batch, lambda m, x: (m(x) - 0.1).pow(2).mean())
    assert (with_mixing.exact, with_mixing.loss) == (False, "rows")


@pytest.mark.parametrize("shape", [(2047,), (2049,), (64, 33), (300, 400), (7, 513, 3)])
def test_a_sketch_is_linear_and_has_about_the_norm(shape):
    one, other = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(sketches._sketch(one - 3 * other), sketches._sketch(one) - 3 * sketches._sketch(other))
    assert 0.8 < float(sketches._sketch(one).norm() / one.norm()) < 1.2
    single = torch.zeros(shape, dtype=torch.float64)
    single.view(-1)[-1] = 2.0
    assert float(sketches._sketch(single).norm()) == 2.0


def test_a_large_sparse_gradient_is_folded():
    embedding = nn.Embedding(5000, 16, sparse=True)
    words = torch.randint(0, 5000, (32, 4))
    assert check_split(embedding, words, mean_square).exact is True
    assert check_split(embedding, words, lambda m, x: (m(x) - m(x).mean(0)).pow(2).mean()).loss == "rows"


def joined(model, batch):
    """Labeled rows and three times as many others in one forward, as FixMatch joins them."""
    x, others = batch
    out = model(torch.cat((x, others.flatten(0, 1))))
    return out[: len(x)].square().mean() + out[len(x) :].abs().mean()


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_dropout_of_rows_in_another_order_is_no_difference(rate):
    batch = torch.randn(8, 6), torch.randn(8, 3, 6)
    assert check_split(net(nn.Dropout(rate)), batch, joined).exact is True


def test_batch_normalization_of_joined_rows_is_named_despite_dropout():
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.3))
    verdict = check_split(model, (torch.randn(8, 6), torch.randn(8, 3, 6)), joined)
    assert (verdict.exact, verdict.modules) == (False, ("1",))


def in_chunks(model, x):
    """Draws noise for a few rows at a time, as a renderer for chunks of rays."""
    parts = [model(part + torch.rand_like(part)) for part in x.split(10)]
    return torch.cat([each + torch.randn_like(each) for each in parts]).square().mean()


def noisy_and_mixing(model, x):
    noisy = torch.cat([part + torch.rand_like(part) for part in x.split(10)])
    y = model(noisy)
    return (y - y.mean(0)).square().mean()


def test_noise_drawn_for_chunks_of_rows_is_not_taken_for_a_comparison_of_rows():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1).double(), torch.randn(24, 4).double()
    verdicts = [check_split(model, x, in_chunks) for _ in range(4)]
    assert {each.loss for each in verdicts} == {None}
    assert check_split(model, x, noisy_and_mixing).exact is not True


def relations(model, x):
    """Distances over their sum, which are constant for two rows (relational distillation)."""
    y = model(x)
    distances = (y[:, None] - y[None]).square().sum(-1)
    return (distances / distances.sum().clamp(min=1e-9)).pow(2).mean() * 10 + y.pow(2).mean() * 0.1


class TwoKinds:
    """The first rows of a batch are labeled; the others are to have confident predictions (UA-MT)."""

    def __init__(self, num_labeled, *, reduction="sum"):
        self.num_labeled, self.reduction = num_labeled, reduction

    def __call__(self, model, batch):
        x, y = batch
        out, k = model(x), self.num_labeled
        confidence = out[k:].softmax(1).square().sum(1)
        confidence = confidence.mean() if self.reduction == "mean" else confidence.sum() / k
        return F.cross_entropy(out[:k], y[:k]) + confidence


class Hardest:
    """The hardest rows of a batch, so many at most (OHEM)."""

    def __init__(self, most):
        self.most = most

    def __call__(self, model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses.topk(min(self.most, len(losses))).values.mean()


def refusing(loss_fn, most):
    """Return the loss function with a planted out-of-memory error for more rows."""

    def fitting(model, batch):
        if len(batch[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
        return loss_fn(model, batch)

    return fitting


def classes(num_rows):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), (
        torch.randn(num_rows, 5),
        torch.randint(3, (num_rows,)),
    )


@pytest.mark.parametrize(
    ("num_rows", "num_parts", "loss_fn", "cause"),
    [
        (48, 2, TwoKinds(24), "the loss of 48 rows is not the mean of their parts' losses, though the gradients of 24"),
        (96, 4, TwoKinds(48), "the step takes rows from place 48 of the batch on, and the 48 rows that were compared"),
        (96, 4, TwoKinds(24), "the loss of 48 rows is not the mean"),
        (48, 2, Hardest(24), "the loss of 48 rows is not the mean"),
        (96, 4, Hardest(48), "a fixed number of them or all if there are fewer, and of the 48 rows"),
        (96, 4, TwoKinds(48, reduction="mean"), "the loss of the rows that were compared is not finite"),
    ],
)
def test_a_limit_that_few_rows_do_not_reach_is_warned_of(num_rows, num_parts, loss_fn, cause):
    model, batch = classes(num_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=num_parts)
    with pytest.warns(mk.MemkitWarning, match=f"could not check that splitting.*{cause}"):
        trainer.train_step(batch, loss_fn)
    verdict = check_split(model, batch, loss_fn, num_parts=num_parts)
    assert not verdict
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=num_parts)

    def loop():
        for attempt in trainer.microbatches(batch):
            with attempt as micro:
                trainer.backward(loss_fn(model, micro))

    with pytest.warns(mk.MemkitWarning, match="could not check that splitting"):
        loop()


@pytest.mark.parametrize("loss_fn", [TwoKinds(5), TwoKinds(5, reduction="mean"), Hardest(4)])
def test_a_limit_that_the_rows_that_fit_do_not_reach_is_refused(loss_fn):
    model, batch = classes(8)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(mk.MemkitOutOfMemoryError, match="splitting the batch could not be checked"):
        trainer.train_step(batch, refusing(loss_fn, 4 if isinstance(loss_fn, TwoKinds) else 3))


@pytest.mark.parametrize("is_held", [True, False])
def test_batch_norm_of_a_network_that_the_loss_runs_is_named(is_held):
    """The generator's, in the discriminator's step."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    place = weakref.ref(generator)

    def loss_fn(critic, batch):
        real, noise = batch
        with torch.no_grad():
            fake = (generator if is_held else place())(noise)
        return F.softplus(critic(fake)).mean() + F.softplus(-critic(real)).mean()

    before = copy.deepcopy(generator.state_dict())
    verdict = check_split(critic, (torch.randn(16, 16), torch.randn(16, 8)), loss_fn)
    assert (verdict.exact, verdict.loss, verdict.modules) == (False, None, ("1 of Sequential",))
    assert_same(dict(generator.state_dict()), dict(before))
    assert generator[1].training
    generator.eval()
    assert check_split(critic, (torch.randn(16, 16), torch.randn(16, 8)), loss_fn)


def in_blocks(model, batch):
    """Losses block by block, of more rows than a batch may have."""
    x, y = batch
    blocks = [F.cross_entropy(model(x[i : i + 64]), y[i : i + 64], reduction="sum") for i in range(0, len(x), 64)]
    return torch.stack(blocks).sum() / len(x)


def of_the_first_anchors(model, batch):
    """The best anchors of each image, all of them if there are few (a region proposal network)."""
    found = [F.logsigmoid(each.topk(min(3, len(each))).values).mean() for each in model(batch[0])]
    return torch.stack(found).mean()


def of_at_most_200(model, batch):
    return F.cross_entropy(model(batch[0])[:200], batch[1][:200])


@pytest.mark.parametrize("loss_fn", [in_blocks, of_the_first_anchors, of_at_most_200])
@pytest.mark.parametrize("num_parts", [2, 4, 32])
def test_limits_that_no_batch_reaches_are_not_warned_of(loss_fn, num_parts):
    model, batch = classes(96)
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=num_parts, probe="require"
    )
    for _ in range(3):
        trainer.train_step(batch, loss_fn)


class OfSortedSequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)  # in decreasing order, or it raises
        return self.head(self.lstm(packed)[1][0][-1])


@pytest.mark.parametrize(
    ("num_rows", "most", "is_right"), [(8, 4, True), (8, 4, False), (96, 48, True), (96, 6, True), (4, 2, True)]
)
def test_rows_that_a_model_needs_in_order_are_checked_in_order(num_rows, most, is_right):
    """After an out-of-memory too, when a few rows stand for the batch."""
    torch.manual_seed(0)
    lengths = torch.randint(3, 20, (num_rows,)).sort(descending=True).values
    batch = torch.randn(num_rows, 20, 4), lengths, torch.randint(5, (num_rows,))

    def loss_fn(model, batch):
        losses = F.cross_entropy(model(*batch[:2]), batch[2], reduction="none")
        return losses.mean() if is_right else losses.square().mean().sqrt()

    model = OfSortedSequences()
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), probe="require")
    if is_right:
        with pytest.warns(mk.MemkitWarning, match="the batch is cut into micro-batches"):
            assert max(trainer.train_step(batch, fits(most, loss_fn)).sizes) == most
        return
    with pytest.raises(mk.errors.MemkitOutOfMemoryError, match="splitting the batch changes its gradient"):
        trainer.train_step(batch, fits(most, loss_fn))


def test_a_part_that_reaches_more_parameters_than_the_whole_is_refused():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 3)

    def loss_fn(model, batch):
        x, y, z = batch
        hidden = model.body(x).tanh()
        loss = F.cross_entropy(model.a(hidden), y)
        return loss + F.cross_entropy(model.b(hidden), z) if (z >= 0).all() else loss  # only where all have a label

    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randint(5, (8,)), torch.tensor([-1, -1, 1, 1, 0, 2, 2, -1])
    assert not check_split(TwoHeads(), batch, loss_fn)
    model = TwoHeads()
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters()), accumulation_steps=4)
    with pytest.raises(mk.errors.ConfigError, match="compares or mixes the rows"):
        trainer.train_step(batch, loss_fn)


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_a_comparison_of_rows_is_seen_in_losses_where_only_two_rows_fit_with_their_gradient(precision):
    torch.manual_seed(0)
    model, x = nn.Linear(16, 64).double(), torch.randn(8, 16).double()
    if precision:
        model, x = model.float(), x.float()

    def of_two_rows(loss_fn):
        def fitting(model, x):
            if torch.is_grad_enabled() and len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
            return loss_fn(model, x)

        return fitting

    def train(loss_fn, **settings):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            mk.MemoryEfficientTrainingWrapper(model, optimizer, precision=precision, **settings) as trainer,
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", ".*out of memory")
            return trainer.train_step(x, of_two_rows(loss_fn)).sizes

    assert max(train(lambda model, x: model(x).square().mean())) == 2  # the other losses of rows are equal
    with pytest.raises(mk.MemkitOutOfMemoryError, match="the loss of 8 rows is not the mean of their parts' losses"):
        train(relations)
    with pytest.warns(mk.MemkitWarning, match="the loss of 4 rows is not the mean of their parts' losses"):
        assert train(relations, accumulation_steps=4) == (2, 2, 2, 2)


def test_losses_are_looked_at_in_a_loop_of_ones_own_too():
    torch.manual_seed(0)
    model, x = nn.Linear(16, 64).double(), torch.randn(8, 16).double()

    def run(loss_fn):
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for attempt in trainer.microbatches(x):
            with attempt as micro:
                if torch.is_grad_enabled() and len(micro) > 2:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
                trainer.backward(loss_fn(model, micro))
        return trainer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*out of memory")
        assert run(lambda model, x: model(x).square().mean())
        with pytest.raises(mk.MemkitOutOfMemoryError, match="the loss of 4 rows is not the mean"):
            run(relations)


def test_a_part_whose_loss_is_not_finite_is_told():
    def over_pairs(model, x):
        square = model(x).square().mean()
        others = square.detach() * torch.arange(len(x), dtype=x.dtype)
        return square + others[others > 0].mean() * 0

    model, x = nn.Linear(4, 4).double(), torch.randn(2, 4).double()
    verdict = check_split(model, x, over_pairs)
    assert verdict.exact is None
    assert "the loss of a part is not finite" in verdict.reason


@pytest.mark.parametrize("start", [None, 0.25])
def test_gradients_that_a_loss_gives_another_network_are_told_of(start):
    """A critic whose own loss goes backward inside loss_fn: its gradient is added once for each part."""
    torch.manual_seed(0)
    actor, critic = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
    for parameter in critic.parameters():
        parameter.grad = None if start is None else torch.full_like(parameter, start)

    def loss_fn(actor, x):
        (critic(x) - 1).square().mean().backward()
        return (actor(x) - critic(x).detach()).square().mean()

    def step(num_parts):
        trainer = mk.MemoryEfficientTrainingWrapper(
            actor, torch.optim.SGD(actor.parameters(), lr=0.0), accumulation_steps=num_parts, on_oom="raise"
        )
        trainer.train_step(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double(), loss_fn)

    before = [None if each.grad is None else each.grad.clone() for each in critic.parameters()]
    assert check_split(actor, torch.randn(8, 4).double(), loss_fn).buffers == (
        "the gradient of Linear.bias",
        "the gradient of Linear.weight",
    )
    torch.testing.assert_close([each.grad for each in critic.parameters()], before, rtol=0, atol=0)
    with pytest.warns(mk.MemkitWarning, match=r"not what forward writes to the gradient of Linear.bias"):
        step(2)
    step(1)  # a whole batch is as in a plain loop


def test_an_interrupt_while_the_batch_is_noted_leaves_no_mode_behind(monkeypatch):
    """A mode that nobody leaves breaks every later call of torch, if it ends after one around the step."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    trainer = mk.MemoryEfficientTrainingWrapper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2
    )
    with monkeypatch.context() as patched:
        patched.setattr("memkit.train.check_attempt.Attributes", interrupt)
        with mk.Tracker(device="cpu"):
            with pytest.raises(KeyboardInterrupt) as caught:  # which holds the step's frames
                trainer.train_step(x, mean_square)
            assert num_modes() == 1
            assert caught.traceback
    assert num_modes() == 0
    trainer.train_step(x, mean_square)


def verdict_of(loss_fn, rows=6, seed=0, model=None):
    torch.manual_seed(seed)
    random.seed(seed)
    model = model or nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    batch = torch.randn(rows, 5, 6, dtype=torch.float64), torch.randint(3, (rows, 5))
    return mk.train.check_split(model, batch, loss_fn)


def loop_over_rows(model, batch):
    losses = [nn.functional.cross_entropy(model(x), y) for x, y in zip(*batch, strict=True)]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("mixes", [False, True])
def test_a_loop_over_rows_may_draw_for_each(mixes):
    """A part's first row draws what the batch's first has drawn, unless the parts go on where the last one ended."""

    def loss_fn(model, batch):
        loss = loop_over_rows(model, batch)
        return loss.square() if mixes else loss

    net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)).double()
    verdict = verdict_of(loss_fn, model=net)
    assert verdict.exact is not mixes
    assert verdict.modules == ()


@pytest.mark.parametrize("seed", range(8))
def test_choices_by_python_for_each_row_are_repeated(seed):
    """A choice discards numbers: after one more draw the same ones may follow, as if it drew nothing."""

    def loss_fn(model, batch):
        ops = [torch.neg, torch.abs, lambda x: x.flip(0), lambda x: 2 * x]
        rows = torch.stack([random.sample(ops, 1)[0](each) for each in batch[0]])
        return nn.functional.cross_entropy(model(rows).flatten(0, 1), batch[1].flatten())

    assert verdict_of(loss_fn, seed=seed).exact


@pytest.mark.parametrize(
    ("how", "rows", "seed"), one_in_product(5, ["topk", "sort", "kthvalue", "mask"], [4, 8], range(6))
)
def test_the_hardest_half_of_the_rows_is_never_that_of_the_parts(how, rows, seed):
    """By accident, two equal parts have each half of the hardest half in one check of three."""

    def loss_fn(model, batch):
        losses = nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none").mean(1)
        number = len(losses) // 2
        if how == "topk":
            kept = losses.topk(number).values
        elif how == "sort":
            kept = losses.sort(descending=True).values[:number]
        else:
            limit = losses.kthvalue(len(losses) - number).values
            kept = losses[losses > limit] if how == "mask" else losses * (losses > limit)
        return kept.sum() / len(losses)

    assert not verdict_of(loss_fn, rows, seed).exact


def test_rows_that_are_sorted_without_effect_may_be_split():
    def loss_fn(model, batch):
        losses = nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
        return losses.flatten().sort().values.mean()

    assert verdict_of(loss_fn, 8).exact


def mask(parameter):
    parameter.grad[::2] = 0


def center(parameter):
    parameter.grad -= parameter.grad.mean(0, keepdim=True)


def halve_sum(parameter):
    parameter.grad.mul_(0.5)


def add_to_sum(parameter):
    parameter.grad.add_(0.01)


def clip_sum(parameter):
    parameter.grad.div_(parameter.grad.norm())


def free_sum(parameter):
    parameter.grad = None


@pytest.mark.parametrize("hook", [id, mask, center, halve_sum, add_to_sum, clip_sum, free_sum])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_hooks_on_accumulated_gradients_see_the_sum_so_far(hook, is_sparse):
    """A look, a mask and a projection leave of the parts what they leave of the sum."""
    is_kept = hook in (id, mask, center)
    if is_sparse:
        if hook in (mask, center, add_to_sum):  # torch has no such operators for sparse gradients
            return
        model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1)).double()
        batch = torch.randint(6, (ROWS, 2))
    else:
        model, batch = net().double(), torch.randn(ROWS, 6).double()
    model[0].weight.register_post_accumulate_grad_hook(hook)
    verdict = check_split(model, batch, mean_square)
    assert (verdict.exact, verdict.loss) == ((True, None) if is_kept else (False, "hooks"))
    assert model[0].weight.grad is None


@pytest.mark.parametrize(("hook", "settings"), [(mask, {}), (add_to_sum, {}), (add_to_sum, {"probe": False})])
@pytest.mark.filterwarnings("ignore:.*(register_post_accumulate_grad_hook run after|Training continues)")
def test_hooks_that_change_the_sum_so_far_are_refused_where_memory_forces_the_split(hook, settings):
    def train(most, **settings):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 2).double(), torch.randn(16, 4).double()
        model.weight.register_post_accumulate_grad_hook(hook)
        trainer_of(model, **settings).train_step(x, fits(most, mean_square))
        return model.weight

    if hook is add_to_sum and not settings:
        assert_refused(lambda: train(8), mk.MemkitOutOfMemoryError, "splitting the batch changes its gradient")
    else:
        error = (train(8, **settings) - train(16)).abs().max()
        assert (error > 1e-4) == (hook is add_to_sum)  # probe=False vouches for the split
