"""Whatever a plan says of saved tensors, the training is that of the plain step, to the bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from memkit._tape.plan import SavedTensorPlan
from memkit._tape.tape import counts
from memkit._torch.dispatch import TorchDispatchMode
from memkit.train.saved_tensors import treat_saved_tensors
from tests.zoo import CASES

MakePlan = Callable[[int], SavedTensorPlan]


class Names(TorchDispatchMode):
    """Operators of a forward, as a plan counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if counts(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operators_of(forward: Callable[[], object]) -> tuple[str, ...]:
    with Names() as seen:
        forward()
    return tuple(seen.names)


def everything(names: tuple[str, ...]) -> SavedTensorPlan:
    return SavedTensorPlan(operators=names, recomputed=frozenset(range(len(names))))


def elsewhere(names: tuple[str, ...]) -> SavedTensorPlan:
    return SavedTensorPlan(operators=names, offloaded=frozenset(range(len(names))))


def mixed(names: tuple[str, ...], seed: int) -> SavedTensorPlan:
    draw = random.Random(seed)
    fates = [draw.choice("krro") for _ in names]
    numbers = {fate: frozenset(k for k, each in enumerate(fates) if each == fate) for fate in "ro"}
    return SavedTensorPlan(operators=names, recomputed=numbers["r"], offloaded=numbers["o"])


def trained(name: str, make_plan: Callable[[tuple[str, ...]], SavedTensorPlan] | None) -> list[Tensor]:
    """Parameters, buffers and the next random number after two steps, each forward under a plan of its own."""
    torch.manual_seed(0)
    case = CASES[name]()
    forwards: list[tuple[str, ...]] = []

    @contextmanager
    def observed(phase: str) -> Iterator[None]:
        if phase != "forward":
            yield
            return
        with Names() as seen:
            yield
        forwards.append(tuple(seen.names))

    before = copy.deepcopy(case.model.state_dict())
    case.step(observed)
    case.model.load_state_dict(before)
    torch.manual_seed(1)
    for _ in range(2):
        plans = iter([] if make_plan is None else map(make_plan, forwards))
        case.step(lambda phase, plans=plans: treat_saved_tensors(next(plans, None) if phase == "forward" else None))
    return [each.clone() for each in (*case.model.parameters(), *case.model.buffers())] + [torch.rand(2)]


@pytest.mark.parametrize("name", CASES)
def test_trains_as_the_plain_step_does_whatever_the_plan(name):
    plain = trained(name, None)
    plans = [everything, elsewhere, lambda names: mixed(names, 1), lambda names: mixed(names, 2)]
    for make_plan in plans:
        treated = trained(name, make_plan)
        assert all(torch.equal(a, b) for a, b in zip(treated, plain, strict=True)), make_plan
