"""The noisy law on points that scatter around a known curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import memkit as mk
from memkit.predict.scaling.fit import fit_points
from memkit.predict.scaling.noisy import NoisyLaw, fit_curves
from tests.helpers import assert_refused

FAR = 4_000_000


@dataclass(frozen=True)
class Truth:
    """``constant + n ** power``, the constant as a share of the growing part at the smallest size."""

    share: float = 30.0
    power: float = 1.0
    scatter: float = 0.01
    outlier: float = 1.0
    plateau: float = 0.0  # as a share of the top

    def at(self, n):
        unit = 1e9 / 1e6**self.power
        curve = self.share * unit * 5e3**self.power + unit * n**self.power
        top = self.share * unit * 5e3**self.power + unit * 1e6**self.power
        return np.maximum(self.plateau * top, curve)

    def draw(self, seed, num_points=8):
        generator = np.random.default_rng(seed)
        sizes = np.geomspace(5e3, 1e6, num_points).round()
        peaks = self.at(sizes) * (1 + self.scatter * generator.standard_normal(num_points))
        peaks[generator.integers(num_points)] *= self.outlier
        return sizes.astype(int).tolist(), peaks.round().astype(int).tolist()


def test_the_power_without_the_constant_part():
    sizes, peaks = Truth().draw(seed=1)
    law = fit_points(sizes, peaks, tier="noisy")
    assert (law.tier, law.reason) == ("noisy", "")
    low, high = law.order_interval
    assert low <= 1 <= high
    assert high - low < 0.2
    assert law.constant_bytes == pytest.approx(30 * 5e6, rel=0.1)
    truth = float(Truth().at(FAR))
    assert law.predict(FAR) == pytest.approx(truth, rel=0.05)
    lower, upper = law.interval(FAR)
    assert lower <= truth <= upper
    # The naive slope of the logarithms says 0.37: it would be off by more than half.
    slope = np.polyfit(np.log(sizes), np.log(peaks), 1)[0]
    assert slope < 0.6


def test_without_scatter_it_is_exact():
    sizes, _ = Truth().draw(seed=0)
    law = fit_points(sizes, [1000 + 3 * n for n in sizes], tier="noisy")
    assert law.order == 1
    assert law.predict(FAR) == pytest.approx(1000 + 3 * FAR, rel=1e-9)
    assert law.max_n(law.predict(2_000_000)) == 2_000_000
    assert law.max_n(0) == 0


def test_one_outlier_does_not_carry_the_law_away():
    sizes, peaks = Truth(scatter=0.005).draw(seed=3, num_points=12)
    peaks[4] = round(peaks[4] * 1.25)
    law = fit_points(sizes, peaks, tier="noisy")
    assert law.reason == ""
    assert law.predict(FAR) == pytest.approx(float(Truth().at(FAR)), rel=0.04)


def test_a_plateau_is_no_part_of_the_power():
    truth = Truth(share=3.0, plateau=0.1)
    sizes, peaks = truth.draw(seed=0, num_points=12)
    law = fit_points(sizes, peaks, tier="noisy")
    assert law.curves.plateau == pytest.approx(float(truth.at(1)), rel=0.03)
    assert law.order == pytest.approx(1, abs=0.1)
    assert law.predict(5000) == pytest.approx(float(truth.at(5000)), rel=0.03)


@pytest.mark.parametrize(
    ("sizes", "peaks", "reason"),
    [
        ([1, 2, 4, 8, 64], [10, 20, 40, 80, 640], "5 sizes from 1 to 64; it takes 6 that span a factor of 30"),
        ([10, 20, 40, 80, 160, 290], [1, 2, 4, 8, 16, 29], "6 sizes from 10 to 290"),
        ([1, 2, 4, 8, 16, 64], [10, 20, 40, 80, 160, 1280], "the largest size, held out, is missed by 50.0%"),
        ([1, 3, 9, 27, 81, 243], [1000, 1002, 1003, 1011, 1018, 1045], "the power of n is known only to lie between"),
    ],
)
def test_no_law_says_why_and_refuses(sizes, peaks, reason):
    law = fit_points(sizes, peaks, tier="noisy")
    assert isinstance(law, NoisyLaw)
    assert law.reason.startswith(reason)
    assert (law.order, law.order_interval, law.constant_bytes) == (None, None, None)
    for ask in (law.predict, law.interval, law.max_n, law.peak_where):
        with pytest.raises(mk.errors.InputError, match=r"law\.\w+\(3\): got no law: .*Way out: measure more sizes"):
            ask(3)


def test_never_beyond_four_times_the_largest():
    law = fit_points(*Truth().draw(seed=1), tier="noisy")
    assert_refused(lambda: law.predict(FAR + 1), mk.errors.InputError, "up to 4 times the largest known one, 1000000")
    assert_refused(lambda: law.max_n("1TiB"), mk.errors.InputError, "up to 4 times")


@pytest.mark.slow
@pytest.mark.parametrize("num_points", [8, 12])
@pytest.mark.parametrize(
    "truth",
    [
        Truth(share=0.0),
        Truth(share=3.0),
        Truth(),
        Truth(power=0.7),
        Truth(power=2.0),
        Truth(share=0.0, power=1.5),
        Truth(scatter=0.03),
        Truth(share=3.0, plateau=0.1),
    ],
)
def test_bias_and_coverage(truth, num_points):
    """The interval of the power holds the truth as often as it should; the naive slope is never near."""
    num_draws, powers, num_covered = 60, [], 0
    for seed in range(num_draws):
        curves = fit_curves(*truth.draw(seed, num_points))
        admitted = curves.powers[curves.admitted()]
        powers.append(curves.powers[curves.best])
        num_covered += admitted[0] - 1e-3 <= truth.power <= admitted[-1] + 1e-3
    assert abs(np.mean(powers) - truth.power) < 0.03
    assert num_covered >= 0.85 * num_draws
