"""The optimizers as plain loops over full weights, which training in a layout is compared with. AdamW is PyTorch's.

Nothing here is shared with pipeline/training: each is written from its paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeline.config.optimizer import OPTIMIZERS, OptimizerConfig
from pipeline.config.schema import RunConfig
from pipeline.config.training import TrainingConfig
from pipeline.models import mup, registry
from pipeline.models.vectors import is_matrix


class PlainOptimizer(Protocol):
    """What the plain loop uses of an optimizer, as of torch.optim.

    Attributes:
        param_groups: each with its learning rate `lr`.
    """

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Any:
        """Weight -> its tensors, with OptimizerKind.moment."""
        ...

    def step(self) -> Any:
        """Update the weights by their gradients."""
        ...

    def zero_grad(self) -> None:
        """Clear the gradients."""
        ...


def trained(optimizer: PlainOptimizer, master: nn.Parameter) -> Tensor:
    """The result of the training of a master weight: of schedule-free AdamW the average."""
    weight: Tensor = optimizer.state[master].get("x", master)
    return weight.detach()


def build(config: RunConfig, masters: dict[str, nn.Parameter], *, tied: bool = False) -> PlainOptimizer:
    """Return the optimizer of a run; only matrices and embeddings decay.

    Args:
        masters: name of a weight -> its master weight.
        tied: Lion takes one other sign of every weight in the first update, as rounding errors may: of the number that is closest to 0.
    """
    return PLAIN[config.optimizer.name](config, masters, tied)


def change(optimizer: PlainOptimizer, config: RunConfig, masters: dict[str, nn.Parameter]) -> None:
    """Go on with the settings of another phase of the run. The state stays."""
    other = build(config, masters)
    for group, changed in zip(optimizer.param_groups, other.param_groups, strict=True):
        group.update({name: value for name, value in changed.items() if name != "params"})
    for name in {"_optimizer", "_rates", "_rule"} & vars(other).keys():
        setattr(optimizer, name, getattr(other, name))


def _plain_adamw(config: RunConfig, masters: dict[str, nn.Parameter], _: bool) -> PlainOptimizer:
    return _adamw(config.optimizer, masters, partial(registry.family_of(config.model).rate, config.model))


def _adamw(optimizer: OptimizerConfig, weights: dict[str, nn.Parameter], rate_of: Callable[[str], float]) -> torch.optim.AdamW:
    """AdamW, by which a weight decays by the same share whatever its learning rate."""
    members: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, weight in weights.items():
        members.setdefault((is_matrix(name, weight.shape), rate_of(name)), []).append(weight)
    groups = [
        {"params": some, "weight_decay": decays * optimizer.weight_decay / rate, "rate": rate} for (decays, rate), some in members.items()
    ]
    kind = torch.optim.AdamW if optimizer.state_dtype == "fp32" else _RoundedAdamW
    return kind(groups, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)


class _RoundedAdamW(torch.optim.AdamW):
    """Adam whose moments are rounded to bf16 after every update."""

    def step(self, closure: Any = None) -> Any:
        """Update the weights."""
        result = super().step(closure)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())
        return result


#: (configuration, number of the update from 1, state of a weight, gradient) -> what is subtracted, without the learning rate.
Rule = Callable[[OptimizerConfig, int, dict[str, Tensor], Tensor], Tensor]


class _Elementwise:
    """An optimizer whose rule reads the gradient and the state of a weight, which begins at zero."""

    def __init__(self, config: RunConfig, masters: dict[str, nn.Parameter], rule: Rule) -> None:
        self._optimizer, self._masters, self._rule, self._updates = config.optimizer, masters, rule, 0
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]
        names = OPTIMIZERS[config.optimizer.name].state
        self.state = {weight: {name: torch.zeros_like(weight) for name in names} for weight in masters.values()}

    @torch.no_grad()
    def step(self) -> None:
        """See PlainOptimizer."""
        self._updates += 1
        for name, weight in self._masters.items():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            decay = self._optimizer.weight_decay if is_matrix(name, weight.shape) else 0.0
            direction = self._rule(self._optimizer, self._updates, self.state[weight], gradient)
            weight.sub_(self.param_groups[0]["lr"] * (direction + decay * weight))

    def zero_grad(self) -> None:
        """See PlainOptimizer."""
        for weight in self._masters.values():
            weight.grad = None


def _lion(config: RunConfig, masters: dict[str, nn.Parameter], tied: bool) -> PlainOptimizer:
    """Chen et al. 2023, algorithm 2."""

    def rule(optimizer: OptimizerConfig, update: int, state: dict[str, Tensor], gradient: Tensor) -> Tensor:
        average = optimizer.beta1 * state["exp_avg"] + (1 - optimizer.beta1) * gradient
        direction = average.sign()
        if tied and update == 1:
            closest = torch.where(average == 0, math.inf, average.abs()).argmin()
            direction.view(-1)[closest] *= -1
        state["exp_avg"] = optimizer.beta2 * state["exp_avg"] + (1 - optimizer.beta2) * gradient
        return direction

    return _Elementwise(config, masters, rule)


def _ademamix(config: RunConfig, masters: dict[str, nn.Parameter], _: bool) -> PlainOptimizer:
    """Pagliardini et al. 2024, section 3."""
    warmup = config.optimizer.slow_warmup_steps or max(config.training.steps, 1)

    def rule(optimizer: OptimizerConfig, update: int, state: dict[str, Tensor], gradient: Tensor) -> Tensor:
        begin, end = math.log(optimizer.beta1), math.log(optimizer.beta3)
        passed = update / warmup
        slow = min(math.exp(begin * end / ((1 - passed) * end + passed * begin)), optimizer.beta3) if passed < 1 else optimizer.beta3
        for name, rate, value in (
            ("exp_avg", optimizer.beta1, gradient),
            ("exp_avg_slow", slow, gradient),
            ("exp_avg_sq", optimizer.beta2, gradient**2),
        ):
            state[name] = rate * state[name] + (1 - rate) * value
        first = state["exp_avg"] / (1 - optimizer.beta1**update)
        second = state["exp_avg_sq"] / (1 - optimizer.beta2**update)
        return (first + min(passed, 1.0) * optimizer.alpha * state["exp_avg_slow"]) / (second.sqrt() + optimizer.eps)

    return _Elementwise(config, masters, rule)


class _ScheduleFree:
    """Defazio et al. 2024, algorithm 1; the weights are y, and the state has x and z."""

    def __init__(self, config: RunConfig, masters: dict[str, nn.Parameter], _: bool) -> None:
        weights = list(masters.values())
        self._optimizer, self._weights, self._updates, self._total = config.optimizer, weights, 0, 0.0
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]
        self.state = {w: {"x": w.detach().clone(), "z": w.detach().clone(), "exp_avg_sq": torch.zeros_like(w)} for w in weights}

    @torch.no_grad()
    def step(self) -> None:
        """See PlainOptimizer; the learning rate has the factor of the warm-up."""
        optimizer = self._optimizer
        self._updates += 1
        gamma = self.param_groups[0]["lr"] * math.sqrt(1 - optimizer.beta2**self._updates)
        self._total += gamma**2
        share = gamma**2 / self._total
        for y in self._weights:
            gradient = torch.zeros_like(y) if y.grad is None else y.grad
            state, decay = self.state[y], optimizer.weight_decay if y.dim() >= 2 else 0.0
            state["exp_avg_sq"] = optimizer.beta2 * state["exp_avg_sq"] + (1 - optimizer.beta2) * gradient**2
            state["z"] = state["z"] - gamma * gradient / (state["exp_avg_sq"].sqrt() + optimizer.eps) - gamma * decay * y
            state["x"] = (1 - share) * state["x"] + share * state["z"]
            y.copy_((1 - optimizer.beta1) * state["z"] + optimizer.beta1 * state["x"])

    def zero_grad(self) -> None:
        """See PlainOptimizer."""
        for weight in self._weights:
            weight.grad = None


#: Ends of the names of weights of blocks that AdamW updates: gates of one number for each token or head, and convolutions.
_NO_MATRICES = ("router.weight", "shared_gate.weight", "beta.weight", "decay.weight", "_conv")


class _Muon:
    """Muon (Jordan et al. 2024, Liu et al. 2025) of one matrix after the other, and AdamW of the other weights.

    Newton-Schulz computes in bf16 if the run does, and in the dtype of the weights else. With muon_per_head, heads are matrices.
    """

    def __init__(self, config: RunConfig, masters: dict[str, nn.Parameter], _: bool) -> None:
        optimizer, model = config.optimizer, config.model
        low = masters and config.precision.dtype != "fp32" and next(iter(masters.values())).dtype == torch.float32
        self._optimizer, self._dtype = optimizer, torch.bfloat16 if low else None
        heads = {"query": model.heads, "key": model.kv_heads, "value": model.kv_heads} if optimizer.muon_per_head else {}
        rate_of = partial(registry.family_of(model).rate, model)
        self._rates = {weight: rate_of(name) * mup.muon_rate(model, optimizer.muon_adjust_lr) for name, weight in masters.items()}
        #: Weight -> number of matrices below one another.
        self._stacks: dict[nn.Parameter, int] = {}
        for name, weight in masters.items():
            hidden = name.startswith("blocks.") or (name.startswith("head.depths.") and "norm" not in name)
            if hidden and is_matrix(name, weight.shape) and not name.endswith(_NO_MATRICES):
                self._stacks[weight] = weight.shape[0] if weight.dim() == 3 else heads.get(name.split(".")[-2], 1)
        self._others = _adamw(optimizer, {name: weight for name, weight in masters.items() if weight not in self._stacks}, rate_of)
        self._moments = {weight: {"exp_avg": torch.zeros_like(weight)} for weight in self._stacks}
        self.param_groups = self._others.param_groups

    @property
    def state(self) -> dict[Any, dict[str, Tensor]]:
        """See PlainOptimizer."""
        return {**self._others.state, **self._moments}

    @torch.no_grad()
    def step(self) -> None:
        """See PlainOptimizer."""
        self._others.step()
        optimizer, others = self._optimizer, self.param_groups[0]
        lr = others["lr"] / others["rate"] * optimizer.muon_lr_factor
        for weight, count in self._stacks.items():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            moment = self._moments[weight]["exp_avg"]
            moment.mul_(optimizer.muon_momentum).add_(gradient, alpha=1 - optimizer.muon_momentum)
            looked_ahead = optimizer.muon_momentum * moment + (1 - optimizer.muon_momentum) * gradient
            direction = looked_ahead if optimizer.muon_nesterov else moment
            for part, matrix in zip(_matrices(weight, count), _matrices(direction, count), strict=True):
                rows, columns = matrix.shape
                factor = (
                    0.2 * math.sqrt(max(rows, columns)) if optimizer.muon_adjust_lr != "original" else math.sqrt(max(1, rows / columns))
                )
                update = _orthogonal(matrix.to(self._dtype or matrix.dtype), optimizer.muon_steps).to(weight.dtype)
                part.mul_(1 - lr * optimizer.weight_decay).sub_(lr * self._rates[weight] * factor * update)

    def zero_grad(self) -> None:
        """See PlainOptimizer."""
        self._others.zero_grad()
        for weight in self._stacks:
            weight.grad = None


def _matrices(weight: Tensor, count: int) -> list[Tensor]:
    """The matrices of a weight, as views."""
    return list(weight.view(count, -1, weight.shape[-1]))


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iterations with Jordan's coefficients."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


#: optimizer.name -> (configuration, name of a weight -> master weight, `tied` of build) -> optimizer
PLAIN: dict[str, Callable[[RunConfig, dict[str, nn.Parameter], bool], PlainOptimizer]] = {
    "adamw": _plain_adamw,
    "ademamix": _ademamix,
    "lion": _lion,
    "muon": _Muon,
    "schedule_free": _ScheduleFree,
}


def plain_rate(step: int, optimizer: OptimizerConfig, training: TrainingConfig) -> float:
    """Return the learning rate of a step, from 0: linear warm-up to optimizer.lr, then the schedule down to its product with min_lr_ratio.

    cosine: half a cosine to the last step (Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983); linear: to the last step; wsd:
    constant, then decay_shape in the last decay_steps, a tenth of the steps if it is 0 (Hu et al. 2024, https://arxiv.org/abs/2404.06395).
    With decay_ends, that up to the first of them and then, from the peak, up to the next (Wen et al. 2024, https://arxiv.org/abs/2410.05192).
    """
    steps, warmup = training.steps, optimizer.warmup_steps or math.ceil(optimizer.warmup_ratio * training.steps)
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    if optimizer.schedule == "wsd":
        steps = min(end for end in (*optimizer.decay_ends, steps) if end > step)
    constant = {"constant": steps, "wsd": steps - (optimizer.decay_steps or max(steps // 10, 1))}.get(optimizer.schedule, 0)
    begin = max(warmup, constant)
    left = 1 - (step + 1 - begin) / (steps - begin) if step >= begin else 1.0
    shape = {"wsd": optimizer.decay_shape, "cosine": "cosine"}.get(optimizer.schedule)
    if shape == "cosine":
        left = math.sin(math.pi / 2 * left) ** 2
    elif shape == "sqrt":
        left = 1 - (1 - left) ** 0.5
    return optimizer.lr * (optimizer.min_lr_ratio + (1 - optimizer.min_lr_ratio) * left)
