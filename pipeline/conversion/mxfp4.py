"""Matrices of experts in MXFP4, as the files of gpt-oss have them: `NAME_blocks` and `NAME_scales` in place of `NAME`.

A row of a matrix is in groups of 32 numbers that share a scale (OCP Microscaling Formats 1.0, section 5.3). Each number has 4 bits (E2M1),
two of them a byte, the first one in the lower bits. A scale is a power of two whose exponent, plus 127, is a byte (E8M0). The files hold
the rows of our matrices, (output, input); transformers' parameters are transposed.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
#: The numbers of 4 bits; the highest bit is the sign.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)])
_BIAS = 127
_BYTES = 16


def packed_names(names: Collection[str]) -> list[str]:
    """Return the tensors that files hold in MXFP4, by their names without BLOCKS and SCALES."""
    stems = (name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS))
    return [stem for stem in stems if f"{stem}{SCALES}" in names]


def shape_of(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor, (experts, input, output), from those of its parts; that of the blocks if both do not match.

    Args:
        blocks: (experts, output, groups, 16).
        scales: (experts, output, groups).
    """
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != _BYTES:
        return blocks
    experts, outputs, groups, _ = blocks
    return experts, groups * _BYTES * 2, outputs


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the tensor, fp32 (experts, input, output), which holds every number of the format exactly; arguments as in shape_of, uint8."""
    numbers = torch.empty(*blocks.shape, 2)
    # An expert after the other: indices take eight bytes.
    for number, block, scale in zip(numbers, blocks, scales, strict=True):
        factor = torch.ldexp(torch.ones(scale.shape), scale.int() - _BIAS).unsqueeze(2)
        for place, bits in enumerate((block & 0x0F, block >> 4)):
            number[..., place] = _NUMBERS[bits.long()] * factor
    return numbers.flatten(2).transpose(1, 2)
