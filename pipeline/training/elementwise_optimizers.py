"""Optimizers that PyTorch does not have and whose update of an element reads only its own state: exact for any partition of the weights.

As PyTorch's fused AdamW, they divide gradients by `grad_scale` and change nothing if `found_inf` is 1, without a wait for the device.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.config.optimizer import OPTIMIZERS, OptimizerConfig, schedule_free_shares

#: Parameter groups as torch.optim takes them.
Groups = list[dict[str, object]]


def create_state(optimizer: torch.optim.Optimizer, names: Iterable[str], weights: Iterable[Tensor]) -> None:
    """Create the optimizer's state of weights that have none: a step count, and tensors of zeros of the shape of the weight.

    They are fp32, or in the optimizer's `state_dtype`.
    """
    dtype = getattr(optimizer, "state_dtype", torch.float32)
    for weight in weights:
        if not optimizer.state[weight]:
            step = torch.zeros((), device=weight.device)
            optimizer.state[weight] = {"step": step, **{name: torch.zeros_like(weight, dtype=dtype) for name in names}}


@dataclass(frozen=True)
class Scales:
    """Factors of a step, 0-dim tensors on the device.

    Attributes:
        applied: 1.0, or 0.0 for a step that changes nothing.
        lr: learning rate times `applied`.
        divisor: of the gradients; None for 1.
    """

    applied: Tensor
    lr: Tensor
    divisor: Tensor | None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, lr: float | Tensor, device: torch.device) -> Scales:
        """Those of the next step of an optimizer, whose `found_inf` and `grad_scale` are set as for PyTorch's fused optimizers."""
        found_inf, divisor = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        applied = torch.ones((), device=device) if found_inf is None else 1 - found_inf
        return cls(applied, applied * lr, divisor)

    def gradient(self, weight: Tensor) -> Tensor:
        """Divide the gradient of a weight in place, and return it; zeros if the step changes nothing. Nothing reads it after the step."""
        assert weight.grad is not None
        gradient = weight.grad if self.divisor is None else weight.grad.div_(self.divisor)
        return gradient.masked_fill_(self.applied == 0, 0.0)


class ElementwiseOptimizer(torch.optim.Optimizer):
    """Base of the optimizers. Without what PyTorch adds to its methods for torch.compile, which imports the compiler.

    Args:
        groups: parameter groups with a `weight_decay`.
        steps: of the run; 0 if they are not known.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def __init__(self, groups: Groups, config: OptimizerConfig, lr: float | Tensor, steps: int) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.config, self.steps = config, steps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            create_state(self, OPTIMIZERS[self.config.name].state, weights)
            scales = Scales.of(self, group["lr"], weights[0].device)
            torch._foreach_add_([self.state[weight]["step"] for weight in weights], scales.applied)
            self.begin(self.state[weights[0]]["step"])
            for weight in weights:
                self.update(weight, self.state[weight], scales, group["weight_decay"])

    def begin(self, step: Tensor) -> None:
        """Called before the updates of a group with the number of its updates, including this one; 0-dim."""

    def update(self, weight: Tensor, state: dict[str, Tensor], scales: Scales, weight_decay: float) -> None:
        """Update a weight and its state by its gradient: with weight decay, and the learning rate times `direction`."""
        direction = self.direction(state, scales.gradient(weight), scales.applied)
        weight.mul_(1 - scales.lr * weight_decay).sub_(direction.mul_(scales.lr))

    def direction(self, state: dict[str, Tensor], gradient: Tensor, applied: Tensor) -> Tensor:
        """Change the state of a weight by its gradient, and return what is subtracted from it, without the learning rate.

        An optimizer has this or an `update` of its own.
        """
        raise NotImplementedError


class EagerAdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), with moments in fp32 or bf16.

    PyTorch's kernel for GPUs takes moments in bf16 beside fp32 weights; that for CPUs does not, and gets them in fp32.

    Without what PyTorch adds to its methods for torch.compile, which imports the compiler: nothing compiles an optimizer here.
    """

    state_dtype = torch.float32

    def __init__(self, groups: Groups, config: OptimizerConfig, lr: float | Tensor, _steps: int = 0) -> None:
        super().__init__(groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
        if config.state_dtype == "bf16":
            self.state_dtype = torch.bfloat16

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    _update = inspect.unwrap(torch.optim.AdamW.step)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # returns no loss
        """Update the weights that have a gradient; `closure` is not supported."""
        assert closure is None
        if self.state_dtype == torch.float32:
            self._update()
            return
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        create_state(self, OPTIMIZERS["adamw"].state, weights)
        kept = {weight: dict(self.state[weight]) for weight in weights if not weight.is_cuda}
        for weight, moments in kept.items():
            self.state[weight].update({name: values.float() for name, values in moments.items()})
        self._update()
        for weight, moments in kept.items():
            for name, values in moments.items():
                values.copy_(self.state[weight][name])
            self.state[weight].update(moments)


def lerp_(moment: Tensor, gradient: Tensor, weight: float | Tensor, applied: Tensor) -> Tensor:
    """Moment += weight * (gradient - moment), or nothing for a step that changes nothing; in place."""
    return moment.lerp_(gradient, (applied * weight).to(moment.dtype))


class Lion(ElementwiseOptimizer):
    """Lion, algorithm 2 of Chen et al. 2023 (https://arxiv.org/abs/2302.06675): the sign of an average of gradients."""

    def direction(self, state: dict[str, Tensor], gradient: Tensor, applied: Tensor) -> Tensor:
        """See ElementwiseOptimizer."""
        direction = state["exp_avg"].lerp(gradient, 1 - self.config.beta1).sign_()
        lerp_(state["exp_avg"], gradient, 1 - self.config.beta2, applied)
        return direction


class AdEMAMix(ElementwiseOptimizer):
    """AdEMAMix of Pagliardini et al. 2024 (https://arxiv.org/abs/2409.03137): AdamW with a second, slow average of gradients.

    alpha rises linearly from 0 over the warm-up, which has the length of the run unless optimizer.slow_warmup_steps is set, and the
    half-life of the slow average rises linearly from that of the fast one (section 3). The slow average has no correction of its bias.
    """

    def begin(self, step: Tensor) -> None:
        """See ElementwiseOptimizer. In fp64: 1 - beta2 loses four digits in fp32."""
        config = self.config
        passed = (step.double() / (config.slow_warmup_steps or max(self.steps, 1))).clamp(max=1.0)
        # The half-life of a decay rate b is ln(1/2) / ln(b).
        rising = torch.exp(1 / ((1 - passed) / _log(config.beta1) + passed / _log(config.beta3)))
        self._slow = 1 - torch.where(passed < 1, rising, config.beta3)
        self._weight = passed * config.alpha
        self._correction = 1 - config.beta1 ** step.double()
        self._root = (1 - config.beta2 ** step.double()).sqrt()

    def direction(self, state: dict[str, Tensor], gradient: Tensor, applied: Tensor) -> Tensor:
        """See ElementwiseOptimizer."""
        fast = lerp_(state["exp_avg"], gradient, 1 - self.config.beta1, applied)
        slow = lerp_(state["exp_avg_slow"], gradient, self._slow, applied)
        square = lerp_(state["exp_avg_sq"], gradient.square_(), 1 - self.config.beta2, applied)
        # Before the first update, which a skipped step is not, all moments are zero.
        denominator = (square.sqrt() / self._root.clamp(min=1e-20)).add_(self.config.eps)
        return (fast / self._correction.clamp(min=1e-20)).add_(slow * self._weight).div_(denominator)


def _log(rate: float) -> float:
    """The logarithm of a decay rate, finite for a rate of 0 and negative for every one."""
    return math.log(min(max(rate, 1e-8), 1 - 1e-12))


class ScheduleFree(ElementwiseOptimizer):
    """Schedule-free AdamW (Defazio et al. 2024, https://arxiv.org/abs/2405.15682, algorithm 1): an average in place of a decay of the rate.

    The paper has three sequences: z is updated by the gradients, x is an average of z, and the gradients are those at
    y = (1 - beta1) z + beta1 x. The weight of the optimizer, of checkpoints and of all that reads them is x. Its state keeps z - x
    ("offset"), so that it begins at zero like every state. y follows from both (`gradient_point`), and only the forward pass of training
    reads it. The learning rate is constant after its warm-up.
    """

    def __init__(self, groups: Groups, config: OptimizerConfig, lr: float | Tensor, steps: int) -> None:
        super().__init__(groups, config, lr, steps)
        self._shares = torch.tensor(schedule_free_shares(config, steps), dtype=torch.float64)

    def gradient_point(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return y, at which the next gradient is computed, as a new tensor.

        By a product and a sum, each rounded, so that an element has the same bits wherever it is in a tensor: a fused one depends on that.

        Args:
            tensors: `weight` (x) and, after `create_state`, its state by key; all of one shape.
        """
        offset = tensors.get("offset")
        return tensors["weight"].clone() if offset is None else offset.mul(1 - self.config.beta1).add_(tensors["weight"])

    def begin(self, step: Tensor) -> None:
        """See ElementwiseOptimizer. In fp64: 1 - beta2 loses four digits in fp32."""
        self._shares = self._shares.to(step.device)
        index = (step.long() - 1).clamp(min=0, max=len(self._shares) - 1)
        self._share = self._shares.take(index)  # indexing by a tensor would synchronize
        self._root = (1 - self.config.beta2 ** step.double()).sqrt().to(step.dtype)

    def update(self, weight: Tensor, state: dict[str, Tensor], scales: Scales, weight_decay: float) -> None:
        """See ElementwiseOptimizer."""
        gradient, offset = scales.gradient(weight), state["offset"]
        square = lerp_(state["exp_avg_sq"], gradient.square(), 1 - self.config.beta2, scales.applied)
        direction = gradient.div_(square.sqrt().add_(self.config.eps))
        if weight_decay:
            direction.add_(self.gradient_point({"weight": weight, **state}).mul_(weight_decay))
        share = scales.applied * self._share
        # The new z, minus the old x: the average moves by a share of it, and the rest remains between them.
        offset.sub_(direction.mul_(scales.lr * self._root))
        weight.add_(offset * share.to(weight.dtype))
        offset.mul_((1 - share).to(offset.dtype))
