"""The search itself: cases are the same each time, the grammar's labels are true, and silence is found."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.helpers import one_in
from tests.search import judging
from tests.search.batches import Data, make_fields
from tests.search.judging import judge
from tests.search.losses import LOSSES
from tests.search.oracle import EXACT_FLOOR, FLOORS, Twin, build, errors, worst
from tests.search.searching import NUM_CASES, SEED
from tests.search.specs import Spec, Step, generate
from tests.search.traits import TRAITS
from tests.search.worlds import World

PADDED = Step(Data(rows=9, padded=True, classes="skewed"))


def off(spec, sizes=(5, 4), seed=3):
    """How far parts are off, in float64, in tolerances."""
    twin, start = Twin(spec, exact=True), build(spec, World(exact=False)).train()
    data = replace(spec.steps[0].data, rows=sum(sizes))
    fields = make_fields(data, spec.needs, spec.dtype, seed)
    whole = twin.whole(start, spec.steps[0], fields)
    return worst(twin.parts(start, spec.steps[0], fields, sizes), whole, {}, EXACT_FLOOR)[0]


@pytest.mark.parametrize("name", LOSSES)
def test_only_declared_losses_mix_rows(name):
    if not LOSSES[name].refused:
        assert (off(Spec(0, 0, loss=name, steps=(PADDED,))) > judging.GRAY) == LOSSES[name].mixes


@pytest.mark.parametrize("name", one_in(3, TRAITS))
def test_only_declared_traits_mix_rows(name):
    spec = Spec(0, 0, traits=(name,), steps=(PADDED,))
    found = [off(spec, sizes, seed) for sizes in ((5, 4), (2, 2)) for seed in range(4)]
    assert (max(found) > judging.GRAY) == TRAITS[name].mixes


def rounds_little(spec):
    return "b" not in spec.setting and not {"HalfCast", "AutocastRegion"} & set(spec.traits)


@pytest.mark.parametrize("index", [each for each in range(40) if rounds_little(generate(1, each))])
def test_a_plain_step_is_the_float64_one_but_for_rounding(index):
    spec = generate(1, index)
    start = build(spec, World(exact=False))
    fields = make_fields(spec.steps[0].data, spec.needs, spec.dtype, 3)
    plain = Twin(spec, exact=False).whole(start, spec.steps[0], fields)
    found = errors(plain, Twin(spec, exact=True).whole(start, spec.steps[0], fields))
    assert sorted(found.values())[len(found) // 2] < 50 * FLOORS[torch.float32]


def test_finds_silence_without_check():
    unchecked = {"mode": "wrapper, unchecked"}
    for spec in (
        Spec(0, 1, loss="class_weights", **unchecked),
        Spec(0, 1, loss="info_nce", **unchecked),
        Spec(0, 1, traits=("BatchNorm",), **unchecked),
        Spec(0, 1, traits=("BatchNormTiny",), **unchecked),
        Spec(0, 1, traits=("Dropout", "BatchMean"), **unchecked),
        Spec(0, 1, traits=("Queue",), setting="bfloat16", **unchecked),
    ):
        assert [each.kind for each in judge(spec)] == [judging.SILENT]


def test_additive_steps_are_equal():
    for loss in ("mse", "told_tokens", "told_class_weights", "teacher"):
        for traits in ((), ("Dropout",), ("Spectrum", "FloatCast"), ("TinyBesideHuge",)):
            spec = Spec(0, 1, loss=loss, traits=traits, mode="wrapper, unchecked", steps=(PADDED, PADDED))
            assert [each.kind for each in judge(spec)] == [judging.EQUAL] * 2


def test_a_case_is_its_seed_and_its_index():
    assert generate(SEED, 7) == generate(SEED, 7)
    assert len({repr(generate(SEED, index)) for index in range(200)}) == 200


@pytest.mark.slow
def test_each_production_occurs_at_least_fifty_times():
    counts = Counter()
    for index in range(NUM_CASES):
        spec = generate(SEED, index)
        for step in spec.steps:
            counts.update(spec.productions(step))
    expected = {*(f"loss {each}" for each in LOSSES), *(f"trait {each}" for each in TRAITS)}
    assert expected <= counts.keys()
    assert {name: count for name, count in counts.items() if count < 50} == {}
