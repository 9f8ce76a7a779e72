"""Held growth is distinguished from noise, warm-up, caches, sawteeth and larger inputs, at any length of the log."""

import random
from itertools import accumulate

import pytest

from memkit._events.log import Event
from memkit.report.cycles import find_begins
from memkit.report.growth import LEAST_RATE, find_trend, growth_of, is_of_inputs
from memkit.report.observed import observe
from tests.report.pages import log_of

MIB = 2**20
LENGTHS = (5, 8, 12, 30, 100, 500)


def noise(chance, count, size=20 * MIB):
    return [100 * MIB + chance.randrange(size) for _ in range(count)]


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("rate", [16 * 2**10, 2 * MIB, 2**30])
def test_a_leak_has_its_rate_at_any_length(count, rate):
    growth = growth_of([50 * MIB, *(100 * MIB + rate * n for n in range(1, count))])  # the first step makes states
    assert (growth.rate, growth.every, growth.is_certain) == (rate, 1, True)


def test_a_leak_is_found_under_noise():
    found = [
        growth_of([value + 2 * MIB * n for n, value in enumerate(noise(random.Random(seed), 60))]) for seed in range(50)
    ]
    assert all(growth is not None and abs(growth.rate / MIB - 2) < 0.4 for growth in found)


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("is_record", [False, True])
def test_noise_is_not_growth(count, is_record):
    logs = [noise(random.Random(seed), count) for seed in range(300)]
    found = [growth_of(list(accumulate(log, max)) if is_record else log) for log in logs]
    assert sum(growth is not None for growth in found) <= 4  # of 300


@pytest.mark.parametrize("count", [12, 30, 100, 500])
def test_finished_growth_is_no_finding(count):
    for share in (0.1, 0.3, 0.5, 0.8):
        assert growth_of([100 * MIB + min(n, int(share * count)) * 5 * MIB for n in range(count)]) is None, share


@pytest.mark.parametrize(("count", "period"), [(30, 7), (30, 10), (100, 20), (100, 40), (500, 100)])
def test_released_memory_is_not_growth(count, period):
    assert growth_of([100 * MIB + n % period * MIB for n in range(count)]) is None


@pytest.mark.parametrize(("count", "period"), [(12, 3), (30, 5), (30, 10), (100, 20), (500, 100)])
@pytest.mark.parametrize("offset", [0, 1])
def test_equal_rises_at_equal_distances_are_growth(count, period, offset):
    growth = growth_of([100 * MIB + (n + offset) // period * 8 * MIB for n in range(count)])
    assert (growth.every, growth.rise_bytes) == (period, 8 * MIB)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_of_different_sizes_are_not_growth(stages):
    sizes = (64, 96, 128, 160)
    assert growth_of([100 * MIB + sizes[n * stages // 30] ** 2 * 1000 for n in range(30)]) is None


def test_growing_inputs_are_no_leak():
    held = [100 * MIB + n * MIB for n in range(30)]
    growth = growth_of(held)
    assert is_of_inputs(growth, [value + 10 * n * MIB for n, value in enumerate(held)])
    assert not is_of_inputs(growth, [value + 50 * MIB for value in held])
    assert not is_of_inputs(growth, [80 * MIB, *(value + 50 * MIB for value in held[1:4])])  # no state yet


def test_negligible_changes_are_not_growth():
    assert growth_of([100 * MIB + 512 * n for n in range(100)]) is None  # a loss each step, as CUDA rounds it
    assert growth_of([100 * MIB + round(1.1 * LEAST_RATE) * n for n in range(100)]) is not None


def test_few_values_need_even_growth():
    assert growth_of([10 * MIB, 20 * MIB]) is None
    assert not growth_of([10 * MIB, 20 * MIB, 30 * MIB]).is_certain
    assert growth_of([10 * MIB, 20 * MIB, 31 * MIB]) is None
    assert growth_of([0, 50 * MIB, 50 * MIB, 51 * MIB, 51 * MIB]) is None


def test_the_trend_holds_its_interval():
    chance = random.Random(0)
    trend = find_trend([(n, 3 * MIB * n + chance.randrange(4 * MIB)) for n in range(100)])
    assert trend.low <= 3 * MIB <= trend.high
    assert trend.deviations > 10
    assert find_trend([(n, n) for n in range(7)]) is None


def test_finds_previous_event_despite_clock_change():
    blocks = [(10, None), (30, 15), (40, 35), (20, 5), (60, 1), (70, 70)]  # end, duration
    events = [Event(f"e{n}", time_ns=end, duration_ns=duration) for n, (end, duration) in enumerate(blocks)]
    observed, _ = observe(log_of(*events))
    assert find_begins(observed) == [None, 0, None, 0, 3, None]
