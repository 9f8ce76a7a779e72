"""Fit a law to measured peaks when there is no step to trace."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Literal

from memkit._core.errors import InputError, InputTypeError
from memkit._core.settings import Checker
from memkit.predict.scaling.deterministic import DeterministicLaw
from memkit.predict.scaling.law import Law
from memkit.predict.scaling.noisy import noisy_law


def fit_points(
    sizes: Sequence[int], peaks: Sequence[int], *, tier: Literal["deterministic", "noisy"] = "deterministic"
) -> Law:
    """Fit a law to measured peaks when there is no step to trace.

    Args:
        sizes: Distinct sizes of 1 or more, in any order; lists or NumPy arrays.
        peaks: Peak bytes at each, 1 or more.
        tier: ``"deterministic"`` for an allocator's counts, which are the same in every run. ``"noisy"`` for figures
            that scatter: resident memory, the driver's figures, an allocator's reserved bytes.

    Returns:
        The law; the `reason` of a noisy one may say that it is not valid.

    Raises:
        InputError: No sizes, repeated sizes, a size or a peak below 1, or a different number of peaks than sizes.
        InputTypeError: A size or a peak is not an integer.
        ConfigError: ``tier`` is unknown.

    Source:
        Variable projection: Golub and Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares
        problems whose variables separate", SIAM J. Numer. Anal. 10 (1973). Weights: Huber, "Robust estimation of a
        location parameter", Ann. Math. Statist. 35 (1964).

    Example:
        >>> import memkit as mk
        >>> law = mk.predict.fit_points([1000, 2000, 4000], [5_000_000, 8_000_000, 14_000_000])
        >>> law.tier, law.predict(8000), law.max_n("20MB")
        ('deterministic', 26000000, 6000)
    """
    call = f"fit_points(sizes, peaks, tier={tier!r})"
    Checker(call).choice("tier", tier, ("deterministic", "noisy"), fix="omit tier.")
    try:
        sizes, peaks = ([index(each) for each in numbers] for numbers in (sizes, peaks))  # NumPy's would overflow
    except TypeError as error:
        raise InputTypeError(
            call, got=str(error), expected="whole numbers", fix="convert them with int(...)."
        ) from error
    if not sizes or len(set(sizes)) < len(sizes) or min(sizes) < 1 or len(peaks) != len(sizes) or min(peaks) < 1:
        raise InputError(
            call,
            got=f"sizes {sizes} and peaks {peaks}",
            expected="distinct sizes of at least 1, and a peak of at least 1 byte for each",
            fix="pass one (size, peak) pair per measured size.",
        )
    ordered = sorted(zip(sizes, peaks, strict=True))
    ascending, heights = tuple(size for size, _ in ordered), tuple(peak for _, peak in ordered)
    if tier == "noisy":
        return noisy_law(ascending, heights)
    return DeterministicLaw(ascending, heights, ("",) * len(ascending))
