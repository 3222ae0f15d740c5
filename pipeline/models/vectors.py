"""Which weights are matrices and which are vectors: also by name, since the biases of all experts of a layer are one array of two dims."""

from __future__ import annotations

from collections.abc import Sequence

#: End of the name of a bias that is no `bias` of a module: those of experts are (experts, output), a vector for each.
STACKED_BIAS = "_bias"


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a weight is a matrix or a stack of them. Norms and biases are vectors: they do not decay, and Muon does not update them.

    Args:
        name: of the weight.
        shape: its full shape.
    """
    return len(shape) >= 2 and not name.endswith(STACKED_BIAS)
