"""Random numbers that belong to a place: the same for a voxel, whatever the form of the volume, order or device.

The word of 64 bits of a place is SplitMix64's (Steele et al., "Fast splittable pseudorandom number generators", 2014)
at that place. No logarithm or cosine makes the normal numbers of it, because vectorised ones may differ in their last
bit between an element in a full vector and one behind it; 16 bits choose from a table of 65,536 normal numbers instead.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

LANES = 4  # normal numbers in a word
_LEVELS = 2**16
_MULTIPLIERS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHIFTS = 30, 27, 31


def words(places: Tensor, seed: int) -> Tensor:
    """One word of 64 bits for each place: (N,) int64 to (N,) int64."""
    step, *multipliers = (each - 2**64 if each >= 2**63 else each for each in _MULTIPLIERS)
    mixed = (places * step).add_(seed)  # int64 wraps around
    for shift, multiplier in zip(_SHIFTS, (*multipliers, 1), strict=True):
        mixed = (mixed ^ (mixed >> shift & 2 ** (64 - shift) - 1)).mul_(multiplier)
    return mixed


def normal(word: Tensor, lane: int) -> Tensor:
    """Standard normal numbers from 16 bits of words: (N,) int64 to (N,) float32; none is beyond 4.4."""
    return _table(word.device)[(word >> 16 * lane) & _LEVELS - 1]


def is_below(word: Tensor, probability: float) -> Tensor:
    """True with a probability: (N,) int64 to (N,) bool."""
    return (word & 2**32 - 1) < round(probability * 2**32)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Middles of 65,536 equally probable parts of the normal distribution, 256 KiB, scaled to a variance of 1."""
    levels = torch.arange(_LEVELS, dtype=torch.float64).add_(0.5).div_(_LEVELS)
    values: Tensor = torch.special.ndtri(levels)
    return (values / values.std(correction=0)).float().to(device)
