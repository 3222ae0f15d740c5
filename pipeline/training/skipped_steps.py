"""Steps that are skipped because the gradient is not finite: the rule, and how many of them in a row end the run.

PyTorch's optimizers apply the rule by `found_inf`, without a wait for the device (weight_update.py).
"""

from __future__ import annotations

from torch import Tensor

from pipeline.common.errors import UserError


def is_skipped(gradient_norm: Tensor) -> Tensor:
    """Return 1.0 if a step with this global gradient norm changes nothing, else 0.0; 0-dim, on the device of the norm."""
    return (~gradient_norm.isfinite()).float()


class SkippedSteps:
    """Counts the steps in a row that were skipped.

    Args:
        most: training.max_skipped_steps.
    """

    def __init__(self, most: int) -> None:
        self._most, self._in_a_row = most, 0

    def count(self, *, skipped: bool) -> None:
        """Count a step.

        Raises:
            UserError: too many steps in a row were skipped.
        """
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row >= self._most:
            rule = f"{self._in_a_row} steps in a row were skipped: their gradients are not finite"
            fix = "reduce optimizer.lr, or continue from an older checkpoint; metrics.jsonl shows where the loss diverges"
            raise UserError.of("training.max_skipped_steps", self._most, rule, fix)
