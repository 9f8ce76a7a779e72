"""Random bits for draws: counter-based Philox4x64-10, identical on every device; and a faster generator for the CPU.

A block is a function of its number and a key (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
NumPy generates blocks sequentially, in C; `blocks` generates any of them, on the device of a tensor of block numbers.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray
from torch import Tensor

FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B  # key increments per round
ROUNDS = 10
_LOW = 0xFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's step from one number to the next
MIXING = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)  # its shifts and factors
LAST_SHIFT = 31
AGAIN_BITS = 55  # with the 8 bits of a count they fit a signed word
Numbers = TypeVar("Numbers", NDArray[np.int64], Tensor)


class Stream(IntEnum):
    """Purposes of random bits. Streams of one key do not overlap."""

    CELLS = 0  # how many points each cell keeps
    POINTS = 1  # 16 bits for each slot of a layout


class Key(NamedTuple):
    """128 bits that identify a draw: Philox's key, and the third word of its counter; the fourth is the stream.

    The second word also seeds the numbers drawn `again`.
    """

    key: int
    tag: int


class _Given(ISeedSequence):
    """Passes a generator its key. With ``key=``, NumPy would also read system entropy, which is slower."""

    def __init__(self, *words: int) -> None:
        self._words = np.array(words, np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:  # noqa: ARG002 # these, of 64 bits
        return self._words


def draw_key(numbers: tuple[int, ...]) -> Key:
    """Return the key of a draw identified by numbers in [0, 2^64)."""
    name = b"".join(number.to_bytes(8, "little") for number in numbers)
    digest = hashlib.blake2b(name, digest_size=16).digest()
    return Key(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


def random_bits(key: Key, stream: Stream) -> np.random.Philox:
    """Return a generator of blocks 0, 1, ... of a stream. NumPy keeps them stable across versions."""
    counter = np.array([0, 0, key.tag, stream], np.uint64)  # NumPy adds 1 before each block
    return np.random.Philox(_Given(key.key, 0), counter=counter)  # type: ignore[arg-type] # its stub lacks the protocol


def fast_bits(key: Key, stream: Stream) -> np.random.SFC64:
    """Return NumPy's fastest generator, whose words follow from the words before: no device can begin in the middle."""
    return np.random.SFC64(_Given(*key, stream))  # type: ignore[arg-type] # as above


def again(numbers: Numbers, seed: int) -> Numbers:
    """Return 55 random bits for each number of a slot: SplitMix64 (Steele et al., 2014), any of whose words is direct."""
    word = (numbers + 1) * signed(GOLDEN) + signed(seed)
    for shift, factor in MIXING:
        word = (word ^ _shifted(word, shift)) * signed(factor)
    return _shifted(word ^ _shifted(word, LAST_SHIFT), 64 - AGAIN_BITS)


def _shifted(words: Numbers, shift: int) -> Numbers:
    return words >> shift & (1 << 64 - shift) - 1  # the sign moves in with the shift


def blocks(numbers: Tensor, key: Key, stream: Stream) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return blocks of a stream by number: four 64-bit words each, as int64."""
    zeros = numbers & 0
    first, second, third, fourth = numbers + 1, zeros, zeros + signed(key.tag), zeros + int(stream)
    round_keys = [key.key, 0]
    for _ in range(ROUNDS):
        high_a, low_a = _product(first, FACTORS[0])
        high_b, low_b = _product(third, FACTORS[1])
        first, second = high_b ^ second ^ signed(round_keys[0]), low_b
        third, fourth = high_a ^ fourth ^ signed(round_keys[1]), low_a
        round_keys = [(each + step) % 2**64 for each, step in zip(round_keys, STEPS, strict=True)]
    return first, second, third, fourth


def signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit word."""
    return word - 2**64 if word >= 2**63 else word


def _product(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 64 bits of words times a factor, computed by halves: torch has no 128-bit integers."""
    low, high = words & _LOW, (words >> 32) & _LOW
    factor_low, factor_high = factor & _LOW, factor >> 32
    bottom = low * factor_low
    middle = high * factor_low + ((bottom >> 32) & _LOW)
    other = low * factor_high + (middle & _LOW)
    return high * factor_high + ((middle >> 32) & _LOW) + ((other >> 32) & _LOW), words * signed(factor)
