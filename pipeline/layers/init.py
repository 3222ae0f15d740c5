"""Initial weights as a pure function of (seed, name), so that every parallel layout slices the same full tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Constant:
    """The initial value of all elements of a weight."""

    value: float


#: The standard deviation of a normal distribution, a Constant, or None: zeros for a bias, else ones (norms).
Init = float | Constant | None


def initial_tensor(name: str, shape: Sequence[int], std: Init, seed: int) -> Tensor:
    """Return the full (unsharded) initial value of a weight.

    Args:
        name: parameter name in the full model; with std=None, it also selects the constant.
        shape: full shape. The matrices of a stack (three dims, e.g. experts) are drawn separately as NAME.0, NAME.1, ..., so that an
            expert-parallel rank draws only its own.
        std: see Init.
        seed: seed of the run.

    Returns:
        fp32 on the CPU, the same on every rank.
    """
    if std is None:
        std = Constant(0.0 if name.endswith(".bias") else 1.0)
    if isinstance(std, Constant):
        return torch.full(tuple(shape), std.value, device="cpu")
    if len(shape) == 3:
        return torch.stack([initial_tensor(f"{name}.{index}", shape[1:], std, seed) for index in range(shape[0])])
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(key, "little", signed=True))
    return torch.empty(tuple(shape), device="cpu").normal_(0.0, std, generator=generator)
