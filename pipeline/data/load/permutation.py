"""Which sequence does a shuffled epoch read at index i? The image of i under a pseudorandom permutation of 0..size-1, computed in O(1).

The permutation is a Feistel network with cycle walking (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). A Feistel round is
invertible for any round function, so the network permutes 0..2**bits-1. An image outside 0..size-1 is encrypted again until it is inside,
which keeps the mapping one-to-one. Nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeline.data.words import mix

_Step = Callable[[np.ndarray, np.ndarray, list[np.ndarray]], np.ndarray]

ROUNDS = 6  # even, so that the two halves end with their original widths
_MASK_64 = (1 << 64) - 1
_ONE = np.uint64(1)
_POWERS = _ONE << np.arange(63, dtype=np.uint64)


def permute(values: np.ndarray, size: int | np.ndarray, seed: int | np.ndarray, epoch: int | np.ndarray) -> np.ndarray:
    """The images, (n,) int64, of integers, (n,), under the permutation of 0..size-1 that is keyed by (seed, epoch).

    Size, seed and epoch are scalars, or (n,) with one per value.
    """
    return _walked(_encrypt, values, size, seed, epoch)


def unpermute(values: np.ndarray, size: int | np.ndarray, seed: int | np.ndarray, epoch: int | np.ndarray) -> np.ndarray:
    """The inverse of permute: the index whose image each of `values` is; arguments and result as in permute."""
    return _walked(_decrypt, values, size, seed, epoch)


def _walked(step: _Step, values: np.ndarray, size: int | np.ndarray, seed: int | np.ndarray, epoch: int | np.ndarray) -> np.ndarray:
    """Apply a pass of the network to `values`, again where the image is outside 0..size-1."""
    sizes, keys = _as_uint64(size), random_words(seed, epoch, count=ROUNDS)
    assert sizes.min(initial=1) >= 1
    assert sizes.max(initial=1) < 1 << 62
    bits = np.maximum(2, np.searchsorted(_POWERS, sizes)).astype(np.uint64)
    images = step(values.astype(np.uint64), bits, keys)
    while len(outside := np.flatnonzero(images >= sizes)):  # less than half of them per iteration, on average
        images[outside] = step(images[outside], _select(bits, outside), [_select(key, outside) for key in keys])
    return images.astype(np.int64)


def _as_uint64(number: int | np.ndarray) -> np.ndarray:
    """A scalar as uint64 (1,), modulo 2**64; an array as uint64 (n,)."""
    if isinstance(number, np.ndarray):
        return np.atleast_1d(number).astype(np.uint64)
    return np.array([int(number) & _MASK_64], dtype=np.uint64)


def _select(words: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The words at some indices; a single word is broadcast."""
    return words if len(words) == 1 else words[indices]


def _encrypt(values: np.ndarray, bits: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
    """One pass of the network over `bits`-bit numbers. If `bits` is odd, the halves differ by one bit and swap widths every round."""
    right_bits = bits // np.uint64(2)
    left_bits = bits - right_bits
    left_mask, right_mask = (_ONE << left_bits) - _ONE, (_ONE << right_bits) - _ONE
    left, right = values >> right_bits, values & right_mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & left_mask)
        left_mask, right_mask = right_mask, left_mask
    return (left << right_bits) | right


def _decrypt(values: np.ndarray, bits: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
    """The inverse of _encrypt: its rounds in reverse order."""
    right_bits = bits // np.uint64(2)
    left_bits = bits - right_bits
    left_mask, right_mask = (_ONE << left_bits) - _ONE, (_ONE << right_bits) - _ONE
    left, right = values >> right_bits, values & right_mask
    for key in reversed(keys):  # their number is even: the last round had the masks in the other order
        left_mask, right_mask = right_mask, left_mask
        left, right = right ^ (mix(left + key) & left_mask), left
    return (left << right_bits) | right


def random_words(*numbers: int | np.ndarray, count: int) -> list[np.ndarray]:
    """Counter-based random numbers: `count` words of the SplitMix64 stream of each state that is hashed from scalars or arrays (n,).

    `count` arrays of uint64, each (n,), or (1,) if all numbers are scalars.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = np.zeros(1, dtype=np.uint64)
    for number in numbers[:-1]:
        state = (state + _as_uint64(number)) * golden
    start = mix(state + _as_uint64(numbers[-1]))
    return [mix(start + np.uint64(step + 1) * np.atleast_1d(golden)) for step in range(count)]
