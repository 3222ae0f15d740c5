"""A pseudo-random permutation of 0..size-1 that is computed, never stored: a Feistel network with cycle walking.

Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains". Every round is invertible whatever its function mixes, so the network
permutes 0..2**bits-1; an image outside the domain is sent through again until it falls inside, which keeps the mapping one-to-one.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6  # even, so that the halves have their widths back at the end
_MASK_64 = (1 << 64) - 1
_ONE = np.uint64(1)
_POWERS = _ONE << np.arange(63, dtype=np.uint64)


def permute(values: np.ndarray, size: int | np.ndarray, seed: int | np.ndarray, epoch: int | np.ndarray) -> np.ndarray:
    """The images of `values` under the permutation of 0..size-1 that (seed, epoch) names.

    Args:
        values: (n,) integers in 0..size-1.
        size: of the permutation; one for all, or (n,) with one for each. Likewise seed and epoch.

    Returns:
        (n,) int64.
    """
    sizes, keys = _words(size), _round_keys(seed, epoch)
    assert sizes.min(initial=1) >= 1
    assert sizes.max(initial=1) < 1 << 62
    bits = np.maximum(2, np.searchsorted(_POWERS, sizes)).astype(np.uint64)
    images = _encrypt(values.astype(np.uint64), bits, keys)
    while len(outside := np.flatnonzero(images >= sizes)):  # fewer than half of them, each time
        images[outside] = _encrypt(images[outside], _at(bits, outside), [_at(key, outside) for key in keys])
    return images.astype(np.int64)


def _words(number: int | np.ndarray) -> np.ndarray:
    """One number, or one for each value, as an array of 64-bit words."""
    if isinstance(number, np.ndarray):
        return np.atleast_1d(number).astype(np.uint64)
    return np.array([int(number) & _MASK_64], dtype=np.uint64)


def _at(words: np.ndarray, where: np.ndarray) -> np.ndarray:
    """The words of some of the values."""
    return words if len(words) == 1 else words[where]


def _encrypt(values: np.ndarray, bits: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
    """One pass of the network over `bits`-bit numbers. The halves differ by a bit when `bits` is odd, and swap widths every round."""
    right_bits = bits // np.uint64(2)
    left_bits = bits - right_bits
    left_mask, right_mask = (_ONE << left_bits) - _ONE, (_ONE << right_bits) - _ONE
    left, right = values >> right_bits, values & right_mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & left_mask)
        left_mask, right_mask = right_mask, left_mask
    return (left << right_bits) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number Generators"); wraps at 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def random_words(*numbers: int | np.ndarray, count: int) -> list[np.ndarray]:
    """SplitMix64's stream from a state that depends on some numbers; each of them one for all, or (n,).

    Returns:
        `count` arrays of 64-bit words, each (n,) or (1,).
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = np.zeros(1, dtype=np.uint64)
    for number in numbers[:-1]:
        state = (state + _words(number)) * golden
    start = _mix(state + _words(numbers[-1]))
    return [_mix(start + np.uint64(step + 1) * np.atleast_1d(golden)) for step in range(count)]


def _round_keys(seed: int | np.ndarray, epoch: int | np.ndarray) -> list[np.ndarray]:
    """One word a round."""
    return random_words(seed, epoch, count=ROUNDS)
