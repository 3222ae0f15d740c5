"""Initial values that several families share."""

from __future__ import annotations

import math


def scaled_residual(name: str, std: float, layers: int) -> float | None:
    """GPT-2's recipe (Radford et al. 2019, section 2.3), which Megatron-LM made common.

    What is added to the residual stream is scaled by 1 / sqrt(number of such layers), of which a block has two.

    Returns:
        The standard deviation of weight `name`; None for constants: ones for norms, zeros for biases.
    """
    if "norm" in name or name.endswith(".bias"):
        return None
    residual = name.endswith(("attention.output.weight", "mlp.down.weight", "experts.down"))
    return std / math.sqrt(2 * layers) if residual else std
