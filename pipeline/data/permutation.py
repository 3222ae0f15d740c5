"""A pseudo-random permutation of 0..size-1 that is computed, never stored: a Feistel network with cycle walking.

Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains". Every round is invertible whatever its function mixes, so the network
permutes 0..2**bits-1; an image outside the domain is sent through again until it falls inside, which keeps the mapping one-to-one.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6  # even, so that the halves have their widths back at the end
_MASK_64 = (1 << 64) - 1


def permute(values: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The images of `values` under the permutation of 0..size-1 that (seed, epoch) names.

    Args:
        values: (n,) integers in 0..size-1.

    Returns:
        (n,) int64.
    """
    assert 1 <= size < 1 << 62
    keys = _round_keys(seed, epoch)
    bits = max(2, (size - 1).bit_length())
    images = _encrypt(values.astype(np.uint64), bits, keys)
    while len(outside := np.flatnonzero(images >= size)):  # fewer than half of them, each time
        images[outside] = _encrypt(images[outside], bits, keys)
    return images.astype(np.int64)


def _encrypt(values: np.ndarray, bits: int, keys: list[np.uint64]) -> np.ndarray:
    """One pass of the network over `bits`-bit numbers. The halves differ by a bit when `bits` is odd, and swap widths every round."""
    right_bits = bits // 2
    left_bits = bits - right_bits
    left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & np.uint64((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number Generators"); wraps at 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    """SplitMix64's stream from a state that depends on seed and epoch, one number a round."""
    golden = 0x9E3779B97F4A7C15
    start = int(_mix(np.array([(int(seed) * golden + int(epoch)) & _MASK_64], dtype=np.uint64))[0])
    steps = np.array([(start + (i + 1) * golden) & _MASK_64 for i in range(ROUNDS)], dtype=np.uint64)
    return list(_mix(steps))
