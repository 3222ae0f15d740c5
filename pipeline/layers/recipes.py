"""The distributions of initial weights, and recipes that model families share. Does not import torch; layers/init.py draws the values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Constant:
    """The initial value of all elements of a weight."""

    value: float


@dataclass(frozen=True)
class LogOfUniform:
    """Logarithms of values that are distributed uniformly from `low` to `high` (Mamba's decay rates)."""

    low: float
    high: float


@dataclass(frozen=True)
class InverseSoftplus:
    """Values whose softplus has a logarithm that is distributed uniformly between those of `low` and `high` (Mamba's steps)."""

    low: float
    high: float


#: The standard deviation of a normal distribution, another distribution, a Constant, or None: zeros for a bias, else ones (norms).
Init = float | Constant | LogOfUniform | InverseSoftplus | None


def scaled_residual(config: Any, name: str) -> float | None:
    """Return the standard deviation of weight `name` by GPT-2's recipe (Radford et al. 2019, section 2.3), also used by Megatron-LM.

    Layers whose output is added to the residual stream are scaled by 1 / sqrt(number of such layers); a block has two.

    Args:
        config: a model configuration with init_std and layers.
        name: parameter name in the full model.

    Returns:
        The standard deviation; None for constants: ones for norms, zeros for biases.
    """
    if "norm" in name or name.endswith(".bias"):
        return None
    residual = name.endswith(("attention.output.weight", "mlp.down.weight", "experts.down"))
    return config.init_std / math.sqrt(2 * config.layers) if residual else config.init_std


def offset_norms(config: Any, name: str) -> Init:
    """Return the same of a model whose norms multiply by one plus their weight, which is zero at first."""
    return Constant(0.0) if "norm" in name else scaled_residual(config, name)


def single_std(config: Any, name: str) -> float | None:
    """Return the same standard deviation, init_std of the configuration, for all weights; None for constants, as in scaled_residual."""
    return None if "norm" in name or name.endswith(".bias") else config.init_std
