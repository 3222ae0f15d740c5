"""Schedule-free AdamW of Defazio et al. 2024 (https://arxiv.org/abs/2405.15682): an average of the weights in place of a decay of the rate.

The paper has three sequences: z is updated by the gradients, x is an average of z, and the gradients are those at
y = (1 - beta1) z + beta1 x. The weight of the optimizer, of checkpoints and of all that reads them is x. Its state keeps z - x, so that it
begins at zero like every state. y follows from both (`gradient_point`), and only the forward pass of training reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.config.optimizer import OptimizerConfig, schedule_free_shares
from pipeline.training.elementwise_optimizers import ElementwiseOptimizer, Groups, Scales, lerp_

#: Key of z - x in the state of a weight.
OFFSET = "offset"


class ScheduleFree(ElementwiseOptimizer):
    """Schedule-free AdamW, algorithm 1 of the paper, whose weights are x. The learning rate is constant after its warm-up."""

    def __init__(self, groups: Groups, config: OptimizerConfig, lr: float | Tensor, steps: int) -> None:
        super().__init__(groups, config, lr, steps)
        self._shares = torch.tensor(schedule_free_shares(config, steps), dtype=torch.float64)

    def gradient_point(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return y, at which the next gradient is computed, as a new tensor.

        By a product and a sum, each rounded, so that an element has the same bits wherever it is in a tensor: a fused one depends on that.

        Args:
            tensors: `weight` (x) and, after `create_state`, its state by key; all of one shape.
        """
        offset = tensors.get(OFFSET)
        return tensors["weight"].clone() if offset is None else offset.mul(1 - self.config.beta1).add_(tensors["weight"])

    def begin(self, step: Tensor) -> None:
        """See ElementwiseOptimizer. In fp64: 1 - beta2 loses four digits in fp32."""
        self._shares = self._shares.to(step.device)
        index = (step.long() - 1).clamp(min=0, max=len(self._shares) - 1)
        self._share = self._shares.take(index)  # indexing by a tensor would synchronize
        self._root = (1 - self.config.beta2 ** step.double()).sqrt().to(step.dtype)

    def update(self, weight: Tensor, state: dict[str, Tensor], scales: Scales, weight_decay: float) -> None:
        """See ElementwiseOptimizer."""
        gradient, offset = scales.gradient(weight), state[OFFSET]
        square = lerp_(state["exp_avg_sq"], gradient.square(), 1 - self.config.beta2, scales.applied)
        direction = gradient.div_(square.sqrt().add_(self.config.eps))
        if weight_decay:
            direction.add_(self.gradient_point({"weight": weight, **state}).mul_(weight_decay))
        share = scales.applied * self._share
        # The new z, minus the old x: the average moves by a share of it, and the rest remains between them.
        offset.sub_(direction.mul_(scales.lr * self._root))
        weight.add_(offset * share.to(weight.dtype))
        offset.mul_((1 - share).to(offset.dtype))
