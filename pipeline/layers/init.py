"""Initial weights as a pure function of (seed, name, element): every parallel layout draws the elements that it holds, where it holds them.

The generator is counter-based: element e of a weight is a hash of e under a key of (seed, name), so any part can be drawn alone. The hash
is the mixing function of SplitMix64 (Steele, Lea & Flood 2014, https://doi.org/10.1145/2660193.2660195). A hash of 64 bits gives two
neighboring elements of a row. Each is the sum of two quantiles of a normal distribution, which are looked up by 16 bits each. Integer
operations, lookups, one addition and one multiplication give the same bits on every device, whatever part is drawn; the logarithm and the
cosine of the Box-Muller method would not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from pipeline.layers.recipes import Constant, Init, InverseSoftplus, LogOfUniform

#: The constants of SplitMix64 as signed 64-bit integers: increment of the counter, and the two multipliers.
_INCREMENT, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
#: Hashes that are computed at once: on a CPU they stay in its cache, a GPU needs few, large kernels.
_CHUNK = {"cpu": 1 << 15}
_CHUNK_OF_GPU = 1 << 22


def initial_tensor(
    name: str,
    shape: Sequence[int],
    std: Init,
    seed: int,
    *,
    part: Sequence[tuple[int, int]] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the initial value of a weight, or of a part of it.

    Args:
        name: parameter name in the full model; with std=None, it also selects the constant.
        shape: full shape.
        std: see Init of layers/recipes.py.
        seed: seed of the run.
        part: (first index, size) along each dim of the part; None for the full weight.
        dtype: of the result; the values are computed in fp32.
        device: of the result, and of the computation.
    """
    part = [(0, size) for size in shape] if part is None else list(part)
    result = torch.empty([size for _, size in part], dtype=dtype, device=device)
    if std is None:
        std = Constant(0.0 if name.endswith(".bias") else 1.0)
    if isinstance(std, Constant):
        return result.fill_(std.value)
    if result.numel():
        _fill(result, shape, part, std, hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest())
    return result


def _fill(
    result: Tensor, shape: Sequence[int], part: Sequence[tuple[int, int]], init: float | LogOfUniform | InverseSoftplus, key: bytes
) -> None:
    """Fill a part of a weight, whose rows are its last dim, with values of a distribution; a normal one has mean 0."""
    offset, mask = (int.from_bytes(half, "little", signed=True) for half in (key[:8], key[8:]))
    device, (first, width) = result.device, part[-1]
    row = torch.zeros(1, dtype=torch.int64, device=device)  # index of each row of the part in the full weight
    for (start, size), full in zip(part[:-1], shape[:-1], strict=True):
        row = (row.unsqueeze(1) * full + torch.arange(start, start + size, device=device)).flatten()
    # The hashes that hold the columns of the part: a row of the weight has one for every two of its elements.
    hashes = range(first // 2, (first + width + 1) // 2)
    rows = row * ((shape[-1] + 1) // 2) * _INCREMENT + offset
    columns = torch.arange(hashes.start, hashes.stop, device=device) * _INCREMENT
    flat = result.view(len(rows), width)
    table = _quantiles(device) if isinstance(init, int | float) else _quantiles_of(init, device)
    chunk = max(1, _CHUNK.get(device.type, _CHUNK_OF_GPU) // len(hashes))
    for begin in range(0, len(rows), chunk):
        mixed = _mix(rows[begin : begin + chunk, None] + columns, mask)
        quarters = mixed.view(torch.int16).int().bitwise_and_(0xFFFF)  # four numbers of 16 bits for each hash
        summands = table.index_select(0, quarters.flatten()).view(len(mixed), -1, 2)
        # One lookup is enough for the weights that have an element for each head.
        values = (summands[..., 0] + summands[..., 1]).mul_(init) if isinstance(init, int | float) else summands[..., 0]
        flat[begin : begin + chunk] = values[:, first % 2 : first % 2 + width]


def _mix(state: Tensor, mask: int) -> Tensor:
    """The mixing function of SplitMix64, in place. Between its halves the mask of the name is added, so that names share no sequence."""
    shifted = torch.empty_like(state)

    def xor_shift(bits: int) -> None:
        torch.bitwise_right_shift(state, bits, out=shifted)
        shifted.bitwise_and_((1 << (64 - bits)) - 1)  # the shift of a signed number copies its sign
        state.bitwise_xor_(shifted)

    xor_shift(30)
    state.mul_(_FIRST).add_(mask)
    xor_shift(27)
    state.mul_(_SECOND)
    xor_shift(31)
    return state


@cache
def _quantiles(device: torch.device) -> Tensor:
    """Quantiles of the normal distribution with variance 1/2 at 2^16 equidistant probabilities, fp32."""
    count = 1 << 16
    inverse = NormalDist().inv_cdf
    half = [inverse((index + 0.5) / count) for index in range(count // 2)]
    exact = torch.tensor([*half, *(-value for value in reversed(half))], dtype=torch.float64, device="cpu")
    return (exact / exact.square().mean().sqrt() / math.sqrt(2)).float().to(device)


@cache
def _quantiles_of(init: LogOfUniform | InverseSoftplus, device: torch.device) -> Tensor:
    """Quantiles of another distribution at 2^16 equidistant probabilities, fp32."""
    count = 1 << 16
    places = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    if isinstance(init, LogOfUniform):
        return (init.low + (init.high - init.low) * places).log().float().to(device)
    steps = init.low * (init.high / init.low) ** places
    return steps.expm1().log().float().to(device)
