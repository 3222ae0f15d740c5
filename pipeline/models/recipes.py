"""Initialization recipes that several families share."""

from __future__ import annotations

import math


def scaled_residual(name: str, std: float, layers: int) -> float | None:
    """Return the standard deviation of weight `name` by GPT-2's recipe (Radford et al. 2019, section 2.3), also used by Megatron-LM.

    Layers whose output is added to the residual stream are scaled by 1 / sqrt(number of such layers); a block has two.

    Returns:
        The standard deviation; None for constants: ones for norms, zeros for biases.
    """
    if "norm" in name or name.endswith(".bias"):
        return None
    residual = name.endswith(("attention.output.weight", "mlp.down.weight", "experts.down"))
    return std / math.sqrt(2 * layers) if residual else std
