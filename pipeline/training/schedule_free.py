"""Schedule-free AdamW of Defazio et al. 2024 (https://arxiv.org/abs/2405.15682): an average of the weights in place of a decay of the rate.

The paper has three sequences: z is updated by the gradients, x is an average of z, and the gradients are those at
y = (1 - beta1) z + beta1 x. The weight of the optimizer, of checkpoints and of all that reads them is x. Its state keeps z - x, so that it
begins at zero like every state. y follows from both (`gradient_point`), and only the forward pass of training reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.config.optimizer import OptimizerConfig
from pipeline.training.elementwise_optimizers import ElementwiseOptimizer, Groups, Scales, lerp_

#: Key of z - x in the state of a weight.
OFFSET = "offset"


def gradient_point(tensors: Mapping[str, Tensor], config: OptimizerConfig) -> Tensor:
    """Return y, at which the next gradient is computed, as a new tensor.

    By a product and a sum, each rounded, so that an element has the same bits wherever it is in a tensor: a fused one depends on that.

    Args:
        tensors: `weight` (x) and, after `create_state`, its state by key; all of one shape.
        config: beta1.
    """
    offset = tensors.get(OFFSET)
    return tensors["weight"].clone() if offset is None else offset.mul(1 - config.beta1).add_(tensors["weight"])


def shares(config: OptimizerConfig, steps: int) -> list[float]:
    """Return c of every update: the share of z in the average after it, gamma^2 divided by the sum of gamma^2 so far (algorithm 1).

    gamma = lr sqrt(1 - beta2^t) min(1, t / warm-up) in the update t = 1, 2, ...; the shares do not depend on lr.

    Args:
        config: warm-up and beta2.
        steps: of the run; a run without a number of steps has the share of the first update.
    """
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * steps)
    found, total = [], 0.0
    for update in range(1, max(steps, 1) + 1):
        squared = (1 - config.beta2**update) * min(1.0, update / max(warmup, 1)) ** 2
        total += squared
        found.append(squared / total)
    return found


def moved(config: OptimizerConfig, steps: int, updates: int) -> float:
    """Return what update number `updates` added to x, divided by the offset after it: c / (1 - c), or 0 where all of it was added.

    Args:
        config, steps: as in `shares`.
        updates: 1 for the first one.
    """
    share = shares(config, steps)[max(min(updates, steps), 1) - 1]
    return share / (1 - share) if share < 1 else 0.0


class ScheduleFree(ElementwiseOptimizer):
    """Schedule-free AdamW, algorithm 1 of the paper, whose weights are x.

    Args:
        groups, lr: as of ElementwiseOptimizer; the learning rate is constant after its warm-up.
        config: decay rates, eps and warm-up.
        steps: of the run.
    """

    names = ("exp_avg_sq", OFFSET)

    def __init__(self, groups: Groups, lr: float | Tensor, config: OptimizerConfig, steps: int) -> None:
        super().__init__(groups, lr)
        self._config, self._shares = config, torch.tensor(shares(config, steps), dtype=torch.float64)

    def begin(self, step: Tensor) -> None:
        """See ElementwiseOptimizer. In fp64: 1 - beta2 loses four digits in fp32."""
        self._shares = self._shares.to(step.device)
        index = (step.long() - 1).clamp(min=0, max=len(self._shares) - 1)
        self._share = self._shares.take(index)  # indexing by a tensor would synchronize
        self._root = (1 - self._config.beta2 ** step.double()).sqrt().to(step.dtype)

    def update(self, weight: Tensor, state: dict[str, Tensor], scales: Scales, weight_decay: float) -> None:
        """See ElementwiseOptimizer."""
        gradient, offset = scales.gradient(weight), state[OFFSET]
        square = lerp_(state["exp_avg_sq"], gradient.square(), 1 - self._config.beta2, scales.applied)
        direction = gradient.div_(square.sqrt().add_(self._config.eps))
        if weight_decay:
            direction.add_(gradient_point({"weight": weight, **state}, self._config).mul_(weight_decay))
        share = scales.applied * self._share
        # The new z, minus the old x: the average moves by a share of it, and the rest remains between them.
        offset.sub_(direction.mul_(scales.lr * self._root))
        weight.add_(offset * share.to(weight.dtype))
        offset.mul_((1 - share).to(offset.dtype))
