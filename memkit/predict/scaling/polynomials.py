"""Exact integer polynomials: interpolation, the maximum of several, and where one overtakes another.

A polynomial is the tuple of its coefficients, lowest power first, without leading zeros. Python's integers are
unbounded, so nothing here is rounded, however far from the given points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

Polynomial: TypeAlias = tuple[int, ...]


def value(polynomial: Polynomial, n: int) -> int:
    """Return the value at ``n``."""
    total = 0
    for coefficient in reversed(polynomial):
        total = total * n + coefficient
    return total


def trimmed(coefficients: Iterable[int]) -> Polynomial:
    """Drop leading zeros."""
    result = list(coefficients)
    while result and result[-1] == 0:
        result.pop()
    return tuple(result)


def minus(a: Polynomial, b: Polynomial) -> Polynomial:
    """Return ``a - b``."""
    length = max(len(a), len(b))
    return trimmed(x - y for x, y in zip(_padded(a, length), _padded(b, length), strict=True))


def interpolation(sizes: Sequence[int]) -> tuple[list[Polynomial], int]:
    """Return the basis for interpolating values at distinct sizes.

    Returns:
        The Lagrange polynomials, not trimmed, times ``scale``; and ``scale``, the smallest factor that makes them
        integers. The interpolating polynomial times ``scale`` is the sum of each value times its basis polynomial.
    """
    products, divisors = [], []
    for i, x in enumerate(sizes):
        product, divisor = [1], 1
        for other in (*sizes[:i], *sizes[i + 1 :]):
            product = [low - other * high for low, high in zip([0, *product], [*product, 0], strict=True)]
            divisor *= x - other
        products.append(product)
        divisors.append(divisor)
    scale = math.lcm(*divisors)
    return [
        tuple(each * (scale // divisor) for each in product)
        for product, divisor in zip(products, divisors, strict=True)
    ], scale


def switches(polynomial: Polynomial, low: int, high: int) -> list[int]:
    """Return the ``n`` in ``(low, high]`` at which "positive" differs from ``n - 1``, ascending.

    Between consecutive switches of the differences ``p(n + 1) - p(n)``, these keep their sign, so the polynomial is
    monotone there and bisection finds its switch. The differences are a polynomial of one degree less.
    """
    if len(polynomial) < 2 or low >= high:
        return []
    found = []
    for start, end in pairwise([low, *switches(_differences(polynomial), low, high), high]):
        at_start = value(polynomial, start) > 0
        if (value(polynomial, end) > 0) != at_start:
            before, after = start, end
            while after - before > 1:
                middle = (before + after) // 2
                if (value(polynomial, middle) > 0) == at_start:
                    before = middle
                else:
                    after = middle
            found.append(after)
    return found


def beyond_roots(polynomial: Polynomial) -> int:
    """Return a positive ``n`` above every root (Cauchy's bound), from which on the leading term gives the sign."""
    *rest, lead = polynomial or (1,)
    return 2 + max((abs(each) for each in rest), default=0) // abs(lead)


def envelope(polynomials: Sequence[Polynomial]) -> list[tuple[int, int]]:
    """Find the highest polynomial at each ``n`` from 1 on; ties go to the first.

    Returns:
        ``(first n, index of the polynomial)`` of each stretch, ascending.
    """
    stretches = []
    n: int | None = 1
    while n is not None:
        heights = [value(each, n) for each in polynomials]
        highest = heights.index(max(heights))
        stretches.append((n, highest))
        overtaken = []
        for each in polynomials:
            lead = minus(each, polynomials[highest])
            overtaken += switches(lead, n, max(n, beyond_roots(lead)))[:1]
        n = min(overtaken, default=None)
    return stretches


def undominated(polynomials: Sequence[Polynomial]) -> list[int]:
    """Return indices of the polynomials not below another one in every coefficient; ties go to the first."""
    length = max(map(len, polynomials))
    padded = [_padded(each, length) for each in polynomials]
    kept: list[int] = []
    for i in sorted(range(len(padded)), key=lambda i: (*(-each for each in reversed(padded[i])), i)):
        if not any(all(a <= b for a, b in zip(padded[i], padded[j], strict=True)) for j in kept):
            kept.append(i)
    return sorted(kept)


def _differences(polynomial: Polynomial) -> Polynomial:
    return tuple(
        sum(math.comb(k, power) * polynomial[k] for k in range(power + 1, len(polynomial)))
        for power in range(len(polynomial) - 1)
    )


def _padded(polynomial: Polynomial, length: int) -> Polynomial:
    return polynomial + (0,) * (length - len(polynomial))
