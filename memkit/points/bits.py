"""Random bits for draws, identical on every device.

They come from SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014): a word is a function
of its number and a seed, computed with nine operations that NumPy, numba, torch and Triton all have. In NumPy this is
faster than any of its generators written in C. NumPy's own distributions draw from its Philox4x64-10.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # increment from one word's state to the next; odd
MIXING = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)  # shifts and factors
LAST_SHIFT = 31
HALFWAY = 2**63  # number of the first word in the second half of the sequence
REDRAW_BITS = 55  # times a count of 8 bits, they still fit a signed word
Numbers = TypeVar("Numbers", NDArray[np.int64], Tensor)


class Key(NamedTuple):
    """128 bits that identify a draw.

    Attributes:
        key: Seed of the cells' bits, and of `redraw_bits`; Philox's key.
        tag: Seed of the points' bits; the third word of Philox's counter.
    """

    key: int
    tag: int


class _Given(ISeedSequence):
    """Passes a generator its key. With ``key=``, NumPy would also read system entropy, which is slower."""

    def __init__(self, key: int) -> None:
        self._words = np.array([key, 0], np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:  # noqa: ARG002 # two of 64 bits
        return self._words


def draw_key(numbers: tuple[int, ...]) -> Key:
    """Return the key of a draw identified by numbers in [0, 2^64)."""
    name = b"".join(number.to_bytes(8, "little") for number in numbers)
    digest = hashlib.blake2b(name, digest_size=16).digest()
    return Key(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


def random_bits(key: Key) -> np.random.Philox:
    """Return a NumPy generator whose stream NumPy keeps stable across versions."""
    counter = np.array([0, 0, key.tag, 0], np.uint64)
    return np.random.Philox(_Given(key.key), counter=counter)  # type: ignore[arg-type] # its stub lacks the protocol


def words_at(numbers: Numbers, seed: int) -> Numbers:
    """Return SplitMix64's words with these numbers, counted from 0: int64, as an array or a tensor."""
    word = (numbers + 1) * signed(GOLDEN) + signed(seed)
    for shift, factor in MIXING:
        word = (word ^ _shifted(word, shift)) * signed(factor)
    return word ^ _shifted(word, LAST_SHIFT)


def redraw_bits(numbers: Numbers, key: Key) -> Numbers:
    """Return 55 bits for each slot, or cell, whose first bits were rejected.

    They come from the second half of the sequence of words, which is used for nothing else.
    """
    return _shifted(words_at(numbers + signed(HALFWAY), key.key), 64 - REDRAW_BITS)


def _shifted(words: Numbers, shift: int) -> Numbers:
    return words >> shift & (1 << 64 - shift) - 1  # the mask clears the copies of the sign bit


def signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit word."""
    return word - 2**64 if word >= 2**63 else word


class WordBlocks:
    """Memory for the words of one block after another, in NumPy."""

    SIZE = 1 << 14  # words per block: it fits the CPU cache, and the overhead of calls is small

    def __init__(self) -> None:
        self._numbers, self._words, self._shifted = np.empty((3, self.SIZE), np.uint64)

    def numbers(self, num: int, seed: int) -> NDArray[np.uint32]:
        """Return numbers of 32 bits."""
        drawn = np.empty(-(-num // 2), np.uint64)
        self.start(len(drawn), seed)
        for start in range(0, len(drawn), self.SIZE):
            block = drawn[start : start + self.SIZE]
            block[:] = self.next(len(block))
        return drawn.view(np.uint32)[:num]

    def start(self, num: int, seed: int) -> None:
        """Begin with the first word of a seed; a block has at most `num` words."""
        numbers = self._numbers[:num]
        np.multiply(np.arange(1, len(numbers) + 1, dtype=np.uint64), GOLDEN, out=numbers)
        numbers += seed

    def next(self, num: int) -> NDArray[np.uint64]:
        """Return the first words of the next block, which the call after it overwrites."""
        numbers, words, shifted = self._numbers[:num], self._words[:num], self._shifted[:num]
        np.right_shift(numbers, MIXING[0][0], shifted)
        np.bitwise_xor(numbers, shifted, words)
        np.multiply(words, MIXING[0][1], words)
        np.right_shift(words, MIXING[1][0], shifted)
        np.bitwise_xor(words, shifted, words)
        np.multiply(words, MIXING[1][1], words)
        np.right_shift(words, LAST_SHIFT, shifted)
        np.bitwise_xor(words, shifted, words)
        numbers += self.SIZE * GOLDEN % 2**64
        return words
