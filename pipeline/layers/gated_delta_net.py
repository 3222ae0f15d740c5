"""GatedDeltaNet, linear attention with a recurrent state (Yang et al. 2024, https://arxiv.org/abs/2412.06464), in Qwen3-Next's form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.delta_rule import chunked_delta_rule, delta_rule_of_part
from pipeline.layers.linear import Linear, Projection, project
from pipeline.layers.recurrent import Mixing, RecurrentLayer, causal_convolution, mask_of, mix

#: Added to the squared length of queries and keys, as in the authors' kernels.
LENGTH_EPS = 1e-6


class GatedDeltaNet(RecurrentLayer):
    """Linear attention: a short causal convolution, and a state for each head that tokens decay and correct (layers/delta_rule.py).

    `value_heads / key_heads` successive value heads share a query and key head. The number of heads is taken from the shape of the
    projections' output, so a slice of their rows, of whole key heads with their value heads, is a correct layer with fewer heads.

    Args:
        hidden: width of the residual stream.
        key_heads: query and key heads.
        value_heads: value heads, a multiple of the key heads.
        key_dim: width of the queries and keys of a head.
        value_dim: width of the values of a head.
        kernel: tokens that the convolution reads, with the present one.
        eps: added to the mean square in the norm of the output.
        negative_eigenvalues: beta is from 0 to 2 instead of 0 to 1: above 1, a token reverses the sign of what the state returns for its
            key (Grazzi et al. 2024, https://arxiv.org/abs/2411.12537).
    """

    state_products = 3
    rule = staticmethod(chunked_delta_rule)
    rule_of_part = staticmethod(delta_rule_of_part)

    def __init__(
        self,
        hidden: int,
        key_heads: int,
        value_heads: int,
        *,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float = 1e-6,
        negative_eigenvalues: bool = False,
    ) -> None:
        super().__init__()
        self.key_dim, self.value_dim, self.kernel = key_dim, value_dim, kernel
        self.negative_eigenvalues = negative_eigenvalues
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.mix: Mixing = mix
        self.project: Projection = project
        self.query = Linear(hidden, keys, bias=False)
        self.key = Linear(hidden, keys, bias=False)
        self.value = Linear(hidden, values, bias=False)
        self.gate = Linear(hidden, values, bias=False)
        self.beta = Linear(hidden, value_heads, bias=False)
        self.decay = Linear(hidden, value_heads, bias=False)
        self.query_conv = nn.Parameter(torch.empty(keys, 1, kernel))
        self.key_conv = nn.Parameter(torch.empty(keys, 1, kernel))
        self.value_conv = nn.Parameter(torch.empty(values, 1, kernel))
        self.decay_rate_log = nn.Parameter(torch.empty(value_heads))
        self.decay_bias = nn.Parameter(torch.empty(value_heads))
        self.output_norm = nn.RMSNorm(value_dim, eps=eps)
        self.output = Linear(values, hidden, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, context: AttentionContext | None = None) -> Tensor:
        """Mix the tokens: (batch, sequence, hidden) -> (batch, sequence, hidden); memory must be None."""
        mask = mask_of(memory, context)
        q, k, v, gate, beta, decay = self.project(x, self.query, self.key, self.value, self.gate, self.beta, self.decay)
        wide = torch.promote_types(x.dtype, torch.float32)
        log_decay = -self.decay_rate_log.to(wide).exp() * F.softplus(decay.to(wide) + self.decay_bias.to(wide))
        beta = 2 * beta.sigmoid() if self.negative_eigenvalues else beta.sigmoid()
        outputs = self.mix(self, torch.cat([q, k, v], dim=2), log_decay, beta, mask=mask)
        gated = self.output_norm(outputs).to(wide) * F.silu(gate.to(wide)).view_as(outputs)
        return self.output(gated.to(x.dtype).flatten(2))

    def convolutions(self) -> list[Tensor]:
        """See RecurrentLayer."""
        return [self.query_conv, self.key_conv, self.value_conv]

    def heads(self, inputs: Tensor, *gates: Tensor, segments: Tensor | None) -> tuple[Tensor, ...]:
        """See RecurrentLayer; the gates are the logarithms of the decays, and the betas."""
        log_decay, beta = gates
        mixed = F.silu(causal_convolution(inputs, torch.cat(self.convolutions()), segments))
        q, k, v = mixed.to(log_decay.dtype).split([len(self.query_conv), len(self.key_conv), len(self.value_conv)], dim=2)
        heads = beta.shape[2] // (q.shape[2] // self.key_dim)

        def split(x: Tensor, width: int) -> Tensor:
            return x.unflatten(2, (-1, width)).transpose(1, 2)

        q, k = (_unit(split(x, self.key_dim)).repeat_interleave(heads, dim=1) for x in (q, k))
        values, betas = split(v, self.value_dim), beta.to(log_decay.dtype).transpose(1, 2)
        return q * self.key_dim**-0.5, k, values, log_decay.transpose(1, 2), betas


def _unit(x: Tensor) -> Tensor:
    """Divide queries or keys by their length, (..., width)."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + LENGTH_EPS)
