"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, https://arxiv.org/abs/2502.16982).

The update of a hidden matrix is its momentum with all singular values moved close to 1, by Newton-Schulz iterations. The other weights are
updated by AdamW. training/matrix_rule.py says which are which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pipeline.config.optimizer import OPTIMIZERS, OptimizerConfig
from pipeline.training.elementwise_optimizers import EagerAdamW, Groups, Scales, create_state, lerp_
from pipeline.training.matrix_homes import Round, rounds_of
from pipeline.training.matrix_layout import Space
from pipeline.training.matrix_rule import MatrixRule

#: Of the polynomial a x + b x^3 + c x^5, by Jordan, as in torch.optim.Muon: its slope at zero is large, and it ends near 1, not at it.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: Smallest norm by which a matrix is divided, as in torch.optim.Muon.
EPS = 1e-7
#: Most elements of the matrices that a GPU orthogonalizes at once, unless a single one has more: bounds the memory.
_AT_ONCE = 1 << 26


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Return matrices with the same singular vectors and singular values between about 0.7 and 1.2.

    Args:
        matrices: (rows, columns) or (matrices, rows, columns), of rank rows or columns.
        steps: number of iterations.
    """
    a, b, c = COEFFICIENTS
    multiply_add = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if tall else x  # a view would be copied for each rank that holds a part


def orthogonalized(matrices: Sequence[Tensor], steps: int) -> list[Tensor]:
    """As newton_schulz, of matrices of one shape: many at once on a GPU, with fewer launches, one after another in the cache of a CPU."""
    if matrices[0].device.type == "cpu":
        return [newton_schulz(matrix, steps) for matrix in matrices]
    most = at_once(*matrices[0].shape)
    parts = (torch.stack(list(matrices[first : first + most])) for first in range(0, len(matrices), most))
    return [matrix for part in parts for matrix in newton_schulz(part, steps)]


def at_once(rows: int, columns: int) -> int:
    """Return how many matrices of a shape a GPU orthogonalizes at once."""
    return max(_AT_ONCE // (rows * columns), 1)


def adjustment(kind: str, rows: int, columns: int) -> float:
    """Return the factor of the update of a matrix, as torch.optim.Muon with this adjust_lr_fn.

    Args:
        kind: match_rms_adamw: the root mean square of an update is 0.2, about that of AdamW (Liu et al. 2025, section 2.2); original: that
            of Jordan.
        rows, columns: of the full matrix.
    """
    return 0.2 * math.sqrt(max(rows, columns)) if kind == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


class Muon(EagerAdamW):
    """Muon for the groups with `muon`, AdamW for the others."""

    def __init__(self, groups: Groups, config: OptimizerConfig, lr: float | Tensor, steps: int = 0) -> None:
        super().__init__(groups, config, lr, steps)
        self._config = config
        self._rounds: list[Round] = []

    def begin(self, spaces: Iterable[Space], rule: MatrixRule, tensor: ProcessGroup, dtype: str) -> None:
        """Adopt the matrices of this rank.

        Args:
            spaces: of the master weights of the groups with `muon`.
            tensor: the tensor ranks.
            dtype: precision.dtype. Newton-Schulz computes in bf16, for fp32 in fp32.
        """
        orthogonalize = partial(orthogonalized, steps=self._config.muon_steps)
        adjust = partial(adjustment, self._config.muon_adjust_lr)
        self._rounds = rounds_of(spaces, rule, tensor, orthogonalize, adjust)
        self._dtype = torch.float32 if dtype == "fp32" else torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights. Collective; `closure` is not supported."""
        assert closure is None
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step()
        self.param_groups = groups
        self._step_matrices([group for group in groups if group["muon"]])

    def _step_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Update the matrices."""
        if not groups:
            return
        assert self._rounds, "begin has adopted the matrices"
        scales_of: dict[Tensor, tuple[Scales, Tensor]] = {}
        for group in groups:
            create_state(self, OPTIMIZERS["muon"].state_of(muon=True), group["params"])
            scales = Scales.of(self, group["lr"] * self._config.muon_lr_factor, group["params"][0].device)
            scales_of |= dict.fromkeys(group["params"], (scales, 1 - scales.lr * group["weight_decay"]))
        for homes in self._rounds:
            self._step_round(homes, scales_of)

    def _step_round(self, homes: Round, scales_of: Mapping[Tensor, tuple[Scales, Tensor]]) -> None:
        """Update the matrices of a round, whose tensors are free before the next one.

        Args:
            scales_of: master weight -> its scales, and the factor of its decay.
        """
        updates = homes.updates({weight: self._direction(weight, scales_of[weight][0]) for weight in homes.masters})
        for weight in homes.masters:
            weight.mul_(scales_of[weight][1])
        kinds = {(update.master, update.factor) for update in updates}
        rates = {(weight, factor): scales_of[weight][0].lr * factor for weight, factor in kinds}
        for update in updates:
            elements = update.master.view(-1)[update.start : update.start + update.values.numel()]
            elements.addcmul_(update.values, rates[update.master, update.factor], value=-1)

    def _direction(self, weight: Tensor, scales: Scales) -> Tensor:
        """Update the momentum of a weight, and return what is orthogonalized."""
        momentum, state, gradient = self._config.muon_momentum, self.state[weight], scales.gradient(weight)
        state["step"].add_(scales.applied)
        average = lerp_(state["exp_avg"], gradient, 1 - momentum, scales.applied)
        return (gradient.lerp_(average, momentum) if self._config.muon_nesterov else average).to(self._dtype)
