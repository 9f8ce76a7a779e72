"""Modules that mix rows are named, and frozen or silenced for a block."""

import torch
from torch import nn

from memkit.train.row_mixers import freezing, is_norm, scan_modules, silence
from tests.helpers import assert_same


class RunningNormalizer(nn.Module):
    """Looks like a normalization by its buffers only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_scale", torch.ones(()))


def test_batch_norms_that_take_their_statistics_from_the_batch_are_named():
    model = nn.Sequential(
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4).eval(),
        nn.BatchNorm1d(4, track_running_stats=False).eval(),
        nn.LayerNorm(4),
    )
    assert scan_modules(model) == ("0", "2")


def test_what_looks_like_a_normalization():
    class Mixing(nn.Module):
        pass

    assert [is_norm(each) for each in (nn.LayerNorm(4), RunningNormalizer(), Mixing(), nn.Linear(4, 4))] == [
        *(True, True),
        *(False, False),
    ]


def test_frozen_batch_norms_treat_each_row_by_itself():
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)]
    model, x, calls = nn.Sequential(*norms), torch.randn(8, 4), []
    assert not torch.allclose(model(x)[:2], model(x[:2]))
    freezing(norms, lambda: calls.append(1))()
    assert_same(model(x)[:2], model(x[:2]), 1e-6)
    assert calls == [1]


def test_silenced_models_draw_nothing():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    model, x = nn.Sequential(nn.Dropout(0.5), layer, nn.GRU(8, 8, 2, dropout=0.5)), torch.randn(2, 3, 8)
    assert not torch.equal(model(x)[0], model(x)[0])
    silence(model)
    assert_same(model(x)[0], model(x)[0])
