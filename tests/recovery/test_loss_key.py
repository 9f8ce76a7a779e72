"""A loss function is known again when it is made anew, and is another one if it is made from other things."""

import functools
import gc
import weakref

import pytest
from torch import nn

from memkit._recovery.loss_key import key_of_loss, parts_of_loss


def _compare(model, x, weight, *, couples=False):
    return model(x) * weight + couples


class _Criterion:
    def __init__(self, couples, weight=1.0):
        self.couples, self.weight = couples, weight

    def __call__(self, model, x):
        return model(x)

    def loss(self, model, x):
        return model(x)


class _Slotted:
    __slots__ = ("couples",)

    def __call__(self, model, x):
        return model(x)


WAYS = {
    "partial": lambda value: functools.partial(_compare, weight=1, couples=value),
    "position": lambda value: functools.partial(_compare, value),
    "closure": lambda value: lambda model, x: _compare(model, x, 1, couples=value),
    "default": lambda value: lambda model, x, couples=value: _compare(model, x, 1, couples=couples),
    "keyword": lambda value: lambda model, x, *, couples=value: _compare(model, x, 1, couples=couples),
    "inside": lambda value: functools.partial(lambda loss_fn: loss_fn, WAYS["closure"](value)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("one", "other"), [(False, True), (0, 1), (0.5, 0.25), ("mean", "sum"), (None, 1), (1, True)])
def test_another_value_makes_another_loss_function(way, one, other):
    make = WAYS[way]
    assert parts_of_loss(make(one)) == parts_of_loss(make(one))
    assert parts_of_loss(make(one)) != parts_of_loss(make(other))


@pytest.mark.parametrize("way", WAYS)
def test_another_type_makes_another_loss_function(way):
    make, kinds = WAYS[way], (nn.L1Loss, nn.MSELoss)
    assert parts_of_loss(make(kinds[0])) == parts_of_loss(make(kinds[0])) != parts_of_loss(make(kinds[1]))


@pytest.mark.parametrize("take", [lambda each: each, lambda each: each.loss])
def test_a_switch_of_an_object_makes_another_loss_function_and_a_count_does_not(take):
    criterion = _Criterion(couples=False)
    before = parts_of_loss(take(criterion))
    criterion.weight = 2.0
    assert parts_of_loss(take(criterion)) == before
    criterion.couples = True
    assert parts_of_loss(take(criterion)) != before
    assert key_of_loss(take(criterion)) == key_of_loss(take(criterion)) != key_of_loss(take(_Criterion(couples=True)))


def test_a_key_keeps_no_object_alive_and_no_other_object_in_its_place_has_it():
    keys = set()
    for _ in range(20):
        criterion = _Criterion(couples=False)
        gone = weakref.ref(criterion)
        keys.add(key_of_loss(functools.partial(_compare, criterion)))
        del criterion
        gc.collect()
        assert gone() is None
    assert len(keys) == 20


def test_an_object_that_cannot_be_referred_to_counts_by_its_type():
    assert key_of_loss(_Slotted()) == key_of_loss(_Slotted()) != key_of_loss(_Criterion(couples=False))


def test_variables_without_a_value_and_functions_that_hold_themselves_have_keys():
    def loss_fn(model, x):
        return loss_fn(model, x) + later

    before = parts_of_loss(loss_fn)
    later = 1
    assert parts_of_loss(loss_fn) != before
