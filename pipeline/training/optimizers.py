"""The optimizers: how each is built, and the state that it keeps for every weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.config.schema import OptimizerConfig

#: Parameter groups as torch.optim takes them.
Groups = list[dict[str, object]]


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer.

    Attributes:
        build: (parameter groups, configuration, learning rate) -> optimizer.
        state: keys of the fp32 tensors in optimizer.state[weight], each of the shape of the weight: ZeRO shards them by element like the
            weight, checkpoints store them beside it, and the planner counts their bytes.
    """

    build: Callable[[Groups, OptimizerConfig, float | Tensor], torch.optim.Optimizer]
    state: tuple[str, ...]


class EagerAdamW(torch.optim.AdamW):
    """AdamW without what PyTorch adds to its methods for torch.compile, which imports the compiler: nothing compiles an optimizer here."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def adamw(groups: Groups, config: OptimizerConfig, lr: float | Tensor) -> torch.optim.AdamW:
    """PyTorch's fused AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101)."""
    return EagerAdamW(groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


#: optimizer.name -> optimizer
OPTIMIZERS = {"adamw": OptimizerKind(adamw, state=("exp_avg", "exp_avg_sq"))}


def create_state(optimizer: torch.optim.Optimizer, kind: OptimizerKind, weights: Iterable[Tensor]) -> None:
    """Create the optimizer's state before its first step, so that a checkpoint can be loaded into it."""
    for weight in weights:
        if not optimizer.state[weight]:
            step = torch.zeros((), device=weight.device)
            optimizer.state[weight] = {"step": step, **{name: torch.zeros_like(weight) for name in kind.state}}
