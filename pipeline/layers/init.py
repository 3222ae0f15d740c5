"""Initial weights as a pure function of (seed, name), so that every layout slices the same full tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def initial_tensor(name: str, shape: Sequence[int], std: float | None, seed: int) -> Tensor:
    """The full initial value of a weight.

    Args:
        name: its name in the whole model; also says which constant, where std is None.
        shape: its full shape. The matrices of a stack (three dims) are weights of their own, NAME.0, NAME.1, ..., so that who needs a few
            of them draws no more.
        std: standard deviation of the normal distribution it is drawn from; None for a constant: zeros for a bias, ones else (norms).
        seed: of the run.

    Returns:
        fp32 on the CPU, the same on every rank.
    """
    if std is None:
        return torch.full(tuple(shape), 0.0 if name.endswith(".bias") else 1.0, device="cpu")
    if len(shape) == 3:
        return torch.stack([initial_tensor(f"{name}.{index}", shape[1:], std, seed) for index in range(shape[0])])
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(key, "little", signed=True))
    return torch.empty(tuple(shape), device="cpu").normal_(0.0, std, generator=generator)
