"""A training script in Pointcept's style, and the same with memkit: one training, also where memory runs out."""

import functools
import inspect

import pytest
import torch
from torch import nn

import memkit as mk
from memkit.points.packed import split_packed
from tests.integrations.scripts import num_changed_lines
from tests.points.patches import collate, patches, scene_of
from tests.train.faults import FailingOperator

CONFIG = {"epoch": 1, "clip_grad": 0.3}
MEMKIT_CONFIG = {"epoch": 1, "memkit": {"max_grad_norm": 0.3}}


@functools.cache
def batches():
    """Eight scenes in each, of one condition, as Pointcept's loader for several data sets yields them."""
    scenes = [scene_of(patch, number) for number, patch in enumerate(patches()) if len(patch["coord"]) > 2]
    found = []
    for side in ("left", "right"):
        own = [scene for scene in scenes if scene["condition"] == side]
        found += [collate(own[start : start + 8]) for start in range(0, len(own), 8)]
    return found


def loader():
    return map(dict, batches())


class Segmentor(nn.Module):
    """As Pointcept's DefaultSegmentor, whose forward changes the dict that it is given; the backbone mixes a scene."""

    def __init__(self):
        super().__init__()
        self.seg_head = nn.Linear(32, 2)
        self.backbone = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.conditions = nn.ParameterDict({side: nn.Parameter(torch.zeros(16)) for side in ("left", "right")})
        self.criteria = nn.CrossEntropyLoss(ignore_index=-1)

    def forward(self, input_dict):
        input_dict["condition"] = input_dict["condition"][0]  # currently, only support one batch one condition
        feat = self.backbone(input_dict["feat"]) + self.conditions[input_dict["condition"]]
        counts = input_dict["offset"].diff(prepend=torch.zeros(1, dtype=torch.int64))
        scene = torch.arange(len(counts)).repeat_interleave(counts)
        mean = torch.zeros(len(counts), 16, dtype=feat.dtype).index_add(0, scene, feat) / counts[:, None]
        seg_logits = self.seg_head(torch.cat([feat, mean[scene]], dim=1))
        return {"loss": self.criteria(seg_logits, input_dict["segment"])}


def make():
    torch.manual_seed(0)
    model = Segmentor().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.model, self.optimizer = make()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=4)
        self.losses = []

    def train(self):
        for _ in range(self.cfg["epoch"]):
            self.model.train()
            for input_dict in loader():
                self.run_step(input_dict)

    def run_step(self, input_dict):
        self.optimizer.zero_grad()
        output_dict = self.model(input_dict)
        loss = output_dict["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg["clip_grad"])
        self.optimizer.step()
        self.scheduler.step()
        self.losses.append(loss.item())


# In full, as a user would change the class above: the two are compared line by line.
class MemkitTrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.model, self.optimizer = make()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=4)
        self.trainer = mk.MemoryEfficientTrainingWrapper(
            self.model, self.optimizer, scheduler=self.scheduler, split_fn=split_packed, **cfg["memkit"]
        )
        self.losses = []

    def train(self):
        for _ in range(self.cfg["epoch"]):
            self.model.train()
            for input_dict in loader():
                self.run_step(input_dict)

    def run_step(self, input_dict):
        loss = self.trainer.train_step(input_dict, self.loss_fn).loss
        self.losses.append(loss.item())

    def loss_fn(self, model, part):
        count = int((part["segment"] != -1).sum())
        return mk.Loss(mean=model(dict(part))["loss"], count=count)


def in_parts(num_parts):
    return MemkitTrainer({"epoch": 1, "memkit": {"max_grad_norm": 0.3, "accumulation_steps": num_parts}})


@functools.cache
def plain_run():
    run = Trainer(CONFIG)
    run.train()
    return run


def assert_same_run(run, plain):
    torch.testing.assert_close(run.losses, plain.losses, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        dict(run.model.named_parameters()), dict(plain.model.named_parameters()), rtol=1e-9, atol=1e-11
    )
    assert run.scheduler.state_dict() == plain.scheduler.state_dict()


def test_few_lines_are_changed():
    plain, ours = inspect.getsource(Trainer), inspect.getsource(MemkitTrainer).replace("MemkitTrainer", "Trainer")
    added, removed = num_changed_lines(plain, ours)
    assert added + 1 <= 10  # and one in the configuration
    assert removed <= added


@pytest.mark.parametrize("num_parts", [2, 5])
def test_a_training_in_parts_is_the_whole_training(num_parts):
    run = in_parts(num_parts)
    run.train()
    assert_same_run(run, plain_run())
    assert run.trainer.num_steps == len(run.losses) == len(plain_run().losses)


@functools.cache
def num_operators():
    with FailingOperator() as counter:
        MemkitTrainer(MEMKIT_CONFIG).train()
    return counter.num_operators


@pytest.mark.parametrize("share", [0.0, 0.11, 0.3, 0.6, 0.8])
def test_survives_an_out_of_memory_anywhere(share):
    place = 1 + int(share * num_operators())
    run = MemkitTrainer(MEMKIT_CONFIG)
    with FailingOperator(place, place + 40) as planted:
        run.train()
    assert planted.num_failures >= 1
    assert_same_run(run, plain_run())
    assert run.trainer.num_steps == len(plain_run().losses)


def test_the_mean_over_parts_is_another_training():
    run = Trainer(CONFIG)

    def unweighted(input_dict):
        parts = split_packed(input_dict, 4)
        run.optimizer.zero_grad()
        losses = [run.model(part)["loss"] / len(parts) for part in parts]
        sum(losses).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), CONFIG["clip_grad"])
        run.optimizer.step()
        run.scheduler.step()
        run.losses.append(sum(losses).item())

    run.run_step = unweighted
    run.train()
    with pytest.raises(AssertionError, match="not close"):
        assert_same_run(run, plain_run())


def test_a_part_without_a_valid_point_weighs_nothing():
    """Its mean is NaN."""
    batch = next(loader())
    batch["segment"] = batch["segment"].index_fill(0, torch.arange(batch["offset"][0]), -1)
    plain, run = Trainer(CONFIG), in_parts(8)
    plain.run_step(dict(batch))
    run.run_step(batch)
    assert_same_run(run, plain)
