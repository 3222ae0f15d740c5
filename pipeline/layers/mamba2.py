"""Mamba-2, a state space layer (Dao and Gu 2024, https://arxiv.org/abs/2405.21060), in the form of Nemotron-H, Granite 4 and Bamba."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.linear import Linear, Projection, project
from pipeline.layers.norm import GroupRMSNorm
from pipeline.layers.recurrent import Mixing, RecurrentLayer, causal_convolution, mask_of, mix
from pipeline.layers.state_space import chunked_state_space, state_space_of_part


class Mamba2(RecurrentLayer):
    """A short causal convolution, and a state for each head that tokens decay and add to (layers/state_space.py).

    Queries, keys and values are the paper's C, B and x. `heads / groups` successive heads share queries and keys. Their numbers are taken
    from the shape of the projections' output, so a slice of their rows, of whole groups with their heads, is a correct layer, and so are
    some heads of a single group; the norm of its outputs is then that of all heads.

    Args:
        hidden: width of the residual stream.
        heads: heads, a multiple of the groups.
        groups: groups of heads.
        head_dim: width of the values of a head.
        state: width of the queries and keys, the paper's state dimension.
        kernel: tokens that the convolution reads, with the present one.
        smallest_step: lower bound of the steps.
        eps: added to the mean square in the norm of the output.
    """

    state_products = 2
    rule = staticmethod(chunked_state_space)
    rule_of_part = staticmethod(state_space_of_part)

    def __init__(
        self,
        hidden: int,
        heads: int,
        groups: int,
        *,
        head_dim: int,
        state: int,
        kernel: int,
        smallest_step: float = 0.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.key_dim, self.value_dim, self.kernel, self.smallest_step = state, head_dim, kernel, smallest_step
        width = heads * head_dim
        self.mix: Mixing = mix
        self.project: Projection = project
        self.group_query = Linear(hidden, groups * state, bias=False)
        self.group_key = Linear(hidden, groups * state, bias=False)
        self.value = Linear(hidden, width, bias=False)
        self.gate = Linear(hidden, width, bias=False)
        self.decay = Linear(hidden, heads, bias=False)
        self.group_query_conv = nn.Parameter(torch.empty(groups * state, 1, kernel))
        self.group_key_conv = nn.Parameter(torch.empty(groups * state, 1, kernel))
        self.value_conv = nn.Parameter(torch.empty(width, 1, kernel))
        self.group_query_conv_bias = nn.Parameter(torch.empty(groups * state))
        self.group_key_conv_bias = nn.Parameter(torch.empty(groups * state))
        self.value_conv_bias = nn.Parameter(torch.empty(width))
        self.decay_rate_log = nn.Parameter(torch.empty(heads))
        self.decay_bias = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.group_norm: nn.Module = nn.RMSNorm(width, eps=eps) if groups == 1 else GroupRMSNorm(width, groups, eps=eps)
        self.output = Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, context: AttentionContext | None = None) -> Tensor:
        """Mix the tokens: (batch, sequence, hidden) -> (batch, sequence, hidden); memory must be None."""
        mask = mask_of(memory, context)
        q, k, v, gate, decay = self.project(x, *self.projections())
        wide = torch.promote_types(x.dtype, torch.float32)
        step = F.softplus(decay.to(wide) + self.decay_bias.to(wide)).clamp(min=self.smallest_step)
        outputs = self.mix(self, torch.cat([q, k, v], dim=2), step, mask=mask)
        gated = outputs.flatten(2).to(wide) * F.silu(gate.to(wide))
        return self.output(self.group_norm(gated).to(x.dtype))

    def projections(self) -> tuple[Linear, ...]:
        """See RecurrentLayer."""
        return self.group_query, self.group_key, self.value, self.gate, self.decay

    def convolutions(self) -> list[Tensor]:
        """See RecurrentLayer."""
        return [self.group_query_conv, self.group_key_conv, self.value_conv]

    def heads(self, inputs: Tensor, *gates: Tensor, segments: Tensor | None) -> tuple[Tensor, ...]:
        """See RecurrentLayer; the gate is the step of each head."""
        step = gates[0].transpose(1, 2)
        bias = torch.cat([self.group_query_conv_bias, self.group_key_conv_bias, self.value_conv_bias])
        mixed = F.silu(causal_convolution(inputs, torch.cat(self.convolutions()), segments, bias))
        q, k, v = mixed.to(step.dtype).split([len(weight) for weight in self.convolutions()], dim=2)
        q, k, v = (x.unflatten(2, (-1, width)).transpose(1, 2) for x, width in ((q, self.key_dim), (k, self.key_dim), (v, self.value_dim)))
        log_decay = -self.decay_rate_log.to(step.dtype).exp()[:, None] * step
        return q, k, v * step.unsqueeze(3), log_decay, v * self.skip.to(step.dtype)[:, None, None]

    @staticmethod
    def carry(transition: Tensor, state: Tensor) -> Tensor:
        """See RecurrentLayer; the transition is a number for each row of the state."""
        return transition * state
