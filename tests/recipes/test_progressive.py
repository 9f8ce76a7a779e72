"""Stages of growing resolution: each row once an epoch, checked before the first step, own batch statistics."""

from collections import UserDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit.recipes.progressive import ProgressiveTrainer, Stage, _regroup, estimate_batch_norm
from tests.helpers import assert_refused, assert_same
from tests.recipes.loop_parts import digits, loader_of
from tests.toys import out_of_memory


def resize(batch, side):
    images = batch[0].unflatten(1, (1, 8, 8)) if batch[0].dim() == 2 else batch[0]
    return F.interpolate(images, side, mode="bilinear"), batch[1]


class Seen:
    def __init__(self):
        self.steps = []

    def __call__(self, batch, rows):
        self.steps.append((len(batch[0]), batch[0].shape[-1], rows))


def test_each_stage_has_its_own_resolution_batch_and_micro_batch():
    seen = Seen()
    stages = [Stage(4, batch_size=100, epochs=2), Stage(8, batch_size=64)]
    trainer = ProgressiveTrainer(seen, stages, resize=resize, plan=lambda stage: 64 // stage.resolution)
    assert trainer.run(loader_of()) == 8  # 2 + 2 + 4
    assert seen.steps == [(100, 4, 16)] * 4 + [(64, 8, 8)] * 3 + [(8, 8, 8)]


@pytest.mark.parametrize("batch_size", [1, 3, 16, 50, 64])
def test_regrouping_keeps_every_row_in_order(batch_size):
    images, classes = digits(50)
    loader = [{"x": images[i : i + 7], "y": classes[i : i + 7].numpy(), "name": "digits"} for i in range(0, 50, 7)]
    batches = list(_regroup(loader, batch_size))
    assert {len(batch["x"]) for batch in batches[:-1]} <= {batch_size}
    assert torch.equal(torch.cat([batch["x"] for batch in batches]), images)
    np.testing.assert_array_equal(np.concatenate([batch["y"] for batch in batches]), classes.numpy())
    assert {batch["name"] for batch in batches} == {"digits"}


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_regrouping_keeps_texts_and_the_kind_of_batch(kind):
    """As a DataLoader collates texts, and as a tokenizer gives its batches."""
    loader = [kind(x=torch.arange(i, i + 3), names=tuple("abcdefghi"[i : i + 3])) for i in (0, 3, 6)]
    batches = list(_regroup(loader, 4))
    assert [type(batch) for batch in batches] == [kind] * 3
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert ["".join(batch["names"]) for batch in batches] == ["abcd", "efgh", "i"]


def test_rejects_oversized_last_stage_before_first_step():
    seen = Seen()
    stages = [Stage(4, batch_size=16), Stage(8, batch_size=16), Stage(16, batch_size=16)]
    trainer = ProgressiveTrainer(seen, stages, resize=resize, fits=lambda stage, rows: stage.resolution * rows < 200)
    with pytest.raises(
        mk.errors.ConfigError, match=r"stage 2, Stage\(resolution=16.*16 rows at a time, which do not fit"
    ):
        trainer.run(loader_of())
    assert seen.steps == []
    trainer = ProgressiveTrainer(seen, stages, resize=resize, plan=lambda stage: 16 if stage.resolution < 16 else 0)
    assert_refused(lambda: trainer.run(loader_of()), mk.errors.ConfigError, r"stage 2.*a plan of 0 rows")


def test_batch_statistics_are_estimated_anew_at_each_later_stage():
    """What the running mean is at the first step of a stage: that of the resized data, not of the stage before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    means = []
    sharpen = lambda batch, side: (resize(batch, side)[0] * side, batch[1])  # noqa: E731 - statistics differ by stage
    stages = [Stage(4, batch_size=200), Stage(8, batch_size=200)]

    def step(batch, rows):
        means.append(model[1].running_mean.clone())
        model(batch[0])

    ProgressiveTrainer(step, stages, resize=sharpen, model=model).run(loader_of())
    with torch.no_grad():
        expected = model[0](sharpen(digits(), 8)[0]).mean((0, 2, 3))
    assert torch.equal(means[0], torch.zeros(4))
    torch.testing.assert_close(means[1], expected)
    assert model.training
    assert model[1].momentum == 0.1


class MergesItself(nn.Linear):
    """Fails to enter training mode, as LoRA's layers may, whose `train` needs memory."""

    def train(self, mode=True):
        return out_of_memory() if mode else super().train(mode)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("fails_in", ["the first batch", "the second batch", "train"])
def test_an_estimate_that_fails_leaves_batch_statistics_and_modes(fails_in, is_training):
    norm = nn.BatchNorm1d(2)
    norm(torch.randn(8, 2) * 3 + 5)
    model = nn.Sequential(norm, MergesItself(2, 2) if fails_in == "train" else nn.Linear(2, 2)).train(False)
    norm.training = model.training = is_training
    before = {name: value.clone() for name, value in norm.state_dict().items()}

    def batches():
        if fails_in != "the first batch":
            yield torch.randn(8, 2)
        out_of_memory()

    with pytest.raises(torch.OutOfMemoryError):
        estimate_batch_norm(batches(), model)
    assert_same(dict(norm.state_dict()), before)
    assert [each.training for each in model.modules()] == [is_training, is_training, False]
    assert norm.momentum == 0.1


def test_resumes_after_last_finished_epoch():
    stages = [Stage(4, batch_size=100, epochs=2), Stage(8, batch_size=100, epochs=2)]
    seen = Seen()

    def fails_late(batch, rows):
        seen(batch, rows)
        if len(seen.steps) == 6:
            raise RuntimeError("the machine went away")

    first = ProgressiveTrainer(fails_late, stages, resize=resize)
    with pytest.raises(RuntimeError, match="went away"):
        first.run(loader_of())
    again = ProgressiveTrainer(Seen(), stages, resize=resize)
    again.load_state_dict(first.state_dict())
    assert again.run(loader_of()) == 4  # the third epoch anew, and the fourth
    assert {side for _, side, _ in again._step_fn.steps} == {8}
    with pytest.raises(mk.errors.FileFormatError, match="version 9; expected version 1"):
        again.load_state_dict({"version": 9})


def test_rejects_exhausted_iterator():
    trainer = ProgressiveTrainer(Seen(), [Stage(4, batch_size=100, epochs=2)], resize=resize)
    with pytest.raises(mk.errors.InputError, match=r"stage 0, epoch 1.*iterated once for every epoch"):
        trainer.run(iter(loader_of()))
    assert_refused(lambda: Stage(4, batch_size=0), mk.errors.ConfigError, "batch_size=0")
    assert_refused(lambda: ProgressiveTrainer(Seen(), [], resize=resize), mk.errors.ConfigError, "no stage")


def test_trains_wrapper_choosing_its_own_size():
    """The second stage's batch does not fit at once: the wrapper cuts it, and all steps happen."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
            self.head = nn.Linear(32, 10)

        def forward(self, images):
            if images.numel() > 2000:
                out_of_memory()
            return self.head(self.layers(images))

    model = Model()
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    results = []

    def step(batch, rows):
        loss = lambda model, micro: F.cross_entropy(model(micro[0]), micro[1])  # noqa: E731
        results.append(trainer.train_step(batch, loss))

    ProgressiveTrainer(step, [Stage(4, 50, epochs=10), Stage(8, 50, epochs=5)], resize=resize).run(loader_of())
    assert trainer.num_steps == 4 * 15
    assert {max(result.sizes) for result in results[:40]} == {50}
    assert max(results[-1].sizes) == 25
    assert results[-1].loss < 0.75 * results[0].loss
