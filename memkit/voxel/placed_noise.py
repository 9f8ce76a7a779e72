"""Position-based random numbers: the same for a voxel in any volume format, order or device.

The 64-bit word of a position is that of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators",
2014) at that position. Normal numbers do not use a logarithm or cosine, because vectorized versions may differ in the
last bit between elements in a full vector and in its remainder; 16 bits index a table of 65,536 normal numbers instead.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

LANES = 4  # random numbers per word
_LEVELS = 2**16
_MULTIPLIERS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHIFTS = 30, 27, 31


class PlacedNoise:
    """The random numbers of some voxels of one sample: each voxel has its own for each channel.

    The first word of a voxel is that of its dropout; the words of its channels follow.

    Args:
        numbers: (N,) int64, the numbers of the voxels.
        seed: Seed of the sample's draw.
        num_channels: Channels of the volume.
    """

    def __init__(self, numbers: Tensor, seed: int, num_channels: int) -> None:
        self._first = numbers * (1 + -(-num_channels // LANES))
        self._seed = seed
        self._words: dict[int, Tensor] = {}

    def is_kept(self, dropout_prob: float) -> Tensor:
        """Return which voxels survive dropout: (N,) bool."""
        return ~is_below(words(self._first, self._seed), dropout_prob)

    def normal(self, channel: int) -> Tensor:
        """Return standard normal numbers for a channel: (N,) float32, within +-4.4."""
        return normal(self._word(channel), channel % LANES)

    def uniform(self, channel: int) -> Tensor:
        """Return uniform numbers for a channel: (N,) float32, between 0 and 1, from the same bits as `normal`."""
        return ((self._word(channel) >> 16 * (channel % LANES) & _LEVELS - 1).float() + 0.5) / _LEVELS

    def _word(self, channel: int) -> Tensor:
        number = 1 + channel // LANES
        if number not in self._words:
            self._words = {number: words(self._first + number, self._seed)}  # one is enough: channels come in order
        return self._words[number]


def words(places: Tensor, seed: int) -> Tensor:
    """Return one 64-bit word per position: (N,) int64 to (N,) int64."""
    step, *multipliers = (each - 2**64 if each >= 2**63 else each for each in _MULTIPLIERS)
    mixed = (places * step).add_(seed)  # int64 wraps around
    for shift, multiplier in zip(_SHIFTS, (*multipliers, 1), strict=True):
        mixed = (mixed ^ (mixed >> shift & 2 ** (64 - shift) - 1)).mul_(multiplier)
    return mixed


def normal(word: Tensor, lane: int) -> Tensor:
    """Return standard normal numbers from 16 bits of each word: (N,) int64 to (N,) float32, within +-4.4."""
    return _table(word.device)[(word >> 16 * lane) & _LEVELS - 1]


def is_below(word: Tensor, probability: float) -> Tensor:
    """Return True with the given probability: (N,) int64 to (N,) bool."""
    return (word & 2**32 - 1) < round(probability * 2**32)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Return the midpoints of 65,536 equiprobable bins of the normal distribution, scaled to unit variance; 256 KiB."""
    levels = torch.arange(_LEVELS, dtype=torch.float64).add_(0.5).div_(_LEVELS)
    values: Tensor = torch.special.ndtri(levels)
    return (values / values.std(correction=0)).float().to(device)
