"""What this process holds on a card beside the planned step; tests/test_on_a_card.py has a real card."""

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._core.records import DeviceMemory
from memkit._core.units import GIB, MIB
from memkit._simulation.simulation import Host
from memkit.predict.gpus import find_gpu
from memkit.recipes import planned

CARD = find_gpu("RTX 3060 12GB")


def chain():
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())))


def mean_square(model, x):
    return model(x).square().mean()


@pytest.fixture
def plan_with(monkeypatch):
    """Plans as for a model on this machine's card, whose allocator holds so many bytes."""

    def plan(held_bytes, budget_bytes=CARD.total_bytes, **settings):
        own = torch.device("cuda", 0)
        monkeypatch.setattr(planned, "_find_place", lambda *_: (CARD, CARD, budget_bytes, True, own))
        monkeypatch.setattr(planned, "allocator_counters", lambda _: DeviceMemory(allocated_bytes=held_bytes))
        return mk.plan_training(chain(), torch.zeros(2**16, 256), mean_square, micro_batch_size=2**16, **settings)

    return plan


def test_what_is_beside_the_step_counts(plan_with):
    alone, beside = plan_with(0), plan_with(3 * GIB)
    assert beside.required_bytes == alone.required_bytes + 3 * GIB
    assert beside.predicted_peak_bytes == alone.predicted_peak_bytes
    assert not any("of this process" in note for note in alone.notes)
    assert any(note.startswith("3.00 GiB of what it needs are tensors of this process") for note in beside.notes)


def test_a_plan_leaves_room_for_what_is_beside_it(plan_with):
    budget_bytes = plan_with(0).required_bytes + MIB
    alone, beside = plan_with(0, budget_bytes), plan_with(256 * MIB, budget_bytes)
    assert alone.saved_tensors is None
    assert beside.saved_tensors is not None
    assert beside.predicted_peak_bytes <= alone.predicted_peak_bytes - 200 * MIB
    assert beside.required_bytes <= budget_bytes


def test_a_refusal_says_what_is_beside_the_step(plan_with):
    with pytest.raises(mk.errors.ConfigError, match=r"11\.50 GiB of what it needs are tensors of this process"):
        plan_with(int(11.5 * GIB))


def test_a_part_of_a_card_is_said_to_be_one(plan_with):
    notes = plan_with(0, CARD.total_bytes - GIB).notes
    assert any("this process can have" in note and "now" in note for note in notes)


def test_tensors_of_the_step_are_not_beside_it():
    first, shared = torch.zeros(100), torch.zeros(300)
    given = [first, shared[:10], shared[20:]]
    tensors = Host().make_tensors(None)
    with tensors.standing_in(given):
        found = tensors.block_bytes(torch.device("cpu"))
        elsewhere = tensors.block_bytes(torch.device("cuda", 0))
    assert found == 512 + 1536
    assert elsewhere == 0
