"""Attributes in dicts and in slots are read and restored alike."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._core.attributes import attributes_of, has_attributes, set_attributes


@dataclass(frozen=True, slots=True)
class InSlots:
    center: object
    __private: int = 3


@dataclass(frozen=True)
class Frozen(InSlots):  # slots from its base, and a dict of its own
    name: str = "a"


class Raising:
    __slots__ = ("empty",)

    def __getattr__(self, name):
        raise RuntimeError(name)


def test_slots_and_dicts_of_all_classes_are_read():
    assert attributes_of(InSlots(1)) == {"center": 1, "_InSlots__private": 3}
    assert attributes_of(Frozen(1)) == {"center": 1, "_InSlots__private": 3, "name": "a"}
    assert [has_attributes(each) for each in (InSlots(1), Frozen(1), nn.Linear(1, 1), 3, "text", [1])] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_class_that_raises_has_what_is_in_its_slots():
    value = Raising()
    assert attributes_of(value) == {}
    set_attributes(value, {"empty": 1})
    assert attributes_of(value) == {"empty": 1}


def test_setting_gives_these_attributes_and_no_others():
    value = Frozen(1)
    before = attributes_of(value)
    object.__setattr__(value, "center", 2)
    object.__delattr__(value, "_InSlots__private")
    vars(value)["more"] = 5
    set_attributes(value, before)
    assert attributes_of(value) == before
    set_attributes(value, {})
    assert attributes_of(value) == {}


class Centered:
    """DINO's center, in a slot."""

    __slots__ = ("center", "num_calls")

    def __init__(self):
        self.center, self.num_calls = torch.full((8,), 0.5), 0

    def loss(self, model, batch):
        out = model(batch) - self.center
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        self.num_calls += 1
        return out.square().mean()


def plan(model, batch, loss_fn):
    return mk.plan_training(model, batch, loss_fn, "sgd", budget="1GiB")


def prepare(model, batch, loss_fn):
    return mk.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss_fn, budget="1GiB", target="cpu")


@pytest.mark.parametrize("call", [mk.estimate_memory_usage, plan, prepare, mk.advise], ids=lambda call: call.__name__)
def test_predictions_leave_no_trace_in_slots(call):
    criterion, center = Centered(), torch.full((8,), 0.5)
    model = nn.Linear(4, 8)
    call(model, torch.randn(16, 4), criterion.loss)
    assert criterion.num_calls == 0
    torch.testing.assert_close(criterion.center, center, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*splitting the batch changes the gradient:memkit.errors.MemkitWarning")
def test_a_split_check_leaves_no_trace_in_slots():
    """Four micro-batches call the loss four times; the runs that compare them with the whole batch do not count."""
    criterion, model = Centered(), nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=4) as trainer:
        trainer.train_step(torch.randn(16, 4), criterion.loss)
    assert criterion.num_calls == 4


def test_a_tensor_in_a_slot_is_counted():
    """A center of 4 MiB that the loss holds in a slot is live at the peak."""
    model, batch = nn.Linear(4, 8), torch.randn(16, 4)

    class Big:
        __slots__ = ("center",)

        def __init__(self):
            self.center = torch.ones(2**20)

        def loss(self, model, batch):
            return model(batch).square().mean() + self.center.sum()

    plain = mk.estimate_memory_usage(model, batch, lambda model, batch: model(batch).square().mean())
    held = mk.estimate_memory_usage(model, batch, Big().loss)
    assert 2**22 <= held.peak_bytes - plain.peak_bytes <= 2**22 + 64
