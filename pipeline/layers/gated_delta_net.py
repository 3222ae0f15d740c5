"""Linear attention by the delta rule: GatedDeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464), in Qwen3-Next's form, and KDA.

Kimi Delta Attention (Kimi Team 2025, https://arxiv.org/abs/2510.26692, section 4) has a decay for each row of the state of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.delta_rule import chunked_delta_rule, delta_rule_of_part
from pipeline.layers.linear import Linear, Projection, project
from pipeline.layers.mask import Mask
from pipeline.layers.recurrent import Mixing, RecurrentLayer, causal_convolution, mask_of, mix

#: An activation, applied to each element.
Activation = Callable[[Tensor], Tensor]
#: Added to the squared length of queries and keys, as in the authors' kernels.
LENGTH_EPS = 1e-6


class DeltaRuleLayer(RecurrentLayer):
    """Linear attention: a short causal convolution, and a state for each head that tokens decay and correct (layers/delta_rule.py).

    `value_heads / key_heads` successive value heads share a query and key head. The number of heads is taken from the shape of the
    projections' output, so a slice of their rows, of whole key heads with their value heads, is a correct layer with fewer heads.

    A subclass names the projections of beta, decays and gates, and calls `_mixed` in its forward pass.

    Args:
        hidden: width of the residual stream.
        key_heads: query and key heads.
        value_heads: value heads, a multiple of the key heads.
        key_dim: width of the queries and keys of a head.
        value_dim: width of the values of a head.
        kernel: tokens that the convolution reads, with the present one.
        decays: inputs of the decays of a token.
        further: name -> width of the other projections of the input.
        eps: added to the mean square in the norm of the output.
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
        decays: int,
        further: Mapping[str, int],
        eps: float,
    ) -> None:
        super().__init__()
        self.key_dim, self.value_dim, self.kernel = key_dim, value_dim, kernel
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.mix: Mixing = mix
        self.project: Projection = project
        self.query = Linear(hidden, keys, bias=False)
        self.key = Linear(hidden, keys, bias=False)
        self.value = Linear(hidden, values, bias=False)
        for name, width in further.items():
            setattr(self, name, Linear(hidden, width, bias=False))
        self.query_conv = nn.Parameter(torch.empty(keys, 1, kernel))
        self.key_conv = nn.Parameter(torch.empty(keys, 1, kernel))
        self.value_conv = nn.Parameter(torch.empty(values, 1, kernel))
        self.decay_rate_log = nn.Parameter(torch.empty(value_heads))
        self.decay_bias = nn.Parameter(torch.empty(decays))
        self.output_norm = nn.RMSNorm(value_dim, eps=eps)
        self.output = Linear(values, hidden, bias=False)

    def _mixed(self, inputs: list[Tensor], decay: Tensor, beta: Tensor, gate: Tensor, mask: Mask, activation: Activation) -> Tensor:
        """Mix the tokens, and project the outputs, which the gates scale.

        Args:
            inputs: queries, keys and values before the convolutions, each (batch, sequence, channels).
            decay: (batch, sequence, decays), inputs of the decays.
            beta: (batch, sequence, value_heads).
            gate: (batch, sequence, value_heads * value_dim).
            mask: as in Mixing.
            activation: of the gates.
        """
        wide = torch.promote_types(gate.dtype, torch.float32)
        steps = F.softplus(decay.to(wide) + self.decay_bias.to(wide)).unflatten(2, (beta.shape[2], -1))
        log_decay = -self.decay_rate_log.to(wide).exp()[:, None] * steps
        outputs = self.mix(self, torch.cat(inputs, dim=2), log_decay.flatten(2), beta, mask=mask)
        gated = self.output_norm(outputs).to(wide) * activation(gate.to(wide)).view_as(outputs)
        return self.output(gated.to(gate.dtype).flatten(2))

    def convolutions(self) -> list[Tensor]:
        """See RecurrentLayer."""
        return [self.query_conv, self.key_conv, self.value_conv]

    def heads(self, inputs: Tensor, *gates: Tensor, segments: Tensor | None) -> tuple[Tensor, ...]:
        """See RecurrentLayer; the gates are the logarithms of the decays, side by side for each head, and the betas."""
        log_decay, beta = gates
        mixed = F.silu(causal_convolution(inputs, torch.cat(self.convolutions()), segments))
        q, k, v = mixed.to(log_decay.dtype).split([len(self.query_conv), len(self.key_conv), len(self.value_conv)], dim=2)
        heads = beta.shape[2] // (q.shape[2] // self.key_dim)

        def split(x: Tensor, width: int) -> Tensor:
            return x.unflatten(2, (-1, width)).transpose(1, 2)

        q, k = (_unit(split(x, self.key_dim)).repeat_interleave(heads, dim=1) for x in (q, k))
        values, betas = split(v, self.value_dim), beta.to(log_decay.dtype).transpose(1, 2)
        return q * self.key_dim**-0.5, k, values, split(log_decay, log_decay.shape[2] // beta.shape[2]), betas


class GatedDeltaNet(DeltaRuleLayer):
    """Linear attention with one decay for each head.

    Args:
        hidden, key_heads, value_heads, value_dim, eps, sizes: as in DeltaRuleLayer.
        negative_eigenvalues: beta is from 0 to 2 instead of 0 to 1: above 1, a token reverses the sign of what the state returns for its
            key (Grazzi et al. 2024, https://arxiv.org/abs/2411.12537).
    """

    gate: Linear
    beta: Linear
    decay: Linear

    def __init__(
        self,
        hidden: int,
        key_heads: int,
        value_heads: int,
        *,
        value_dim: int,
        eps: float = 1e-6,
        negative_eigenvalues: bool = False,
        **sizes: int,
    ) -> None:
        further = {"gate": value_heads * value_dim, "beta": value_heads, "decay": value_heads}
        super().__init__(hidden, key_heads, value_heads, value_dim=value_dim, decays=value_heads, further=further, eps=eps, **sizes)
        self.negative_eigenvalues = negative_eigenvalues

    def forward(self, x: Tensor, memory: Tensor | None = None, context: AttentionContext | None = None) -> Tensor:
        """Mix the tokens: (batch, sequence, hidden) -> (batch, sequence, hidden); memory must be None."""
        mask = mask_of(memory, context)
        *inputs, gate, beta, decay = self.project(x, *self.projections())
        beta = 2 * beta.sigmoid() if self.negative_eigenvalues else beta.sigmoid()
        return self._mixed(inputs, decay, beta, gate, mask, F.silu)

    def projections(self) -> tuple[Linear, ...]:
        """See RecurrentLayer."""
        return self.query, self.key, self.value, self.gate, self.beta, self.decay


class KimiDeltaAttention(DeltaRuleLayer):
    """Linear attention with a decay for each row of the state of a head. Decays and gates are projected by two matrices of low rank.

    Args:
        hidden: width of the residual stream.
        heads: heads, each with queries, keys and values.
        head_dim: width of a head, and the rank of these projections.
        kernel, eps: as in DeltaRuleLayer.
    """

    beta: Linear
    decay_down: Linear
    gate_down: Linear

    def __init__(self, hidden: int, heads: int, head_dim: int, *, kernel: int, eps: float = 1e-5) -> None:
        width, further = heads * head_dim, {"beta": heads, "decay_down": head_dim, "gate_down": head_dim}
        sizes = {"key_dim": head_dim, "value_dim": head_dim, "kernel": kernel, "decays": width}
        super().__init__(hidden, heads, heads, further=further, eps=eps, **sizes)
        self.decay_up = Linear(head_dim, width, bias=False)
        self.gate_up = Linear(head_dim, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, context: AttentionContext | None = None) -> Tensor:
        """Mix the tokens: (batch, sequence, hidden) -> (batch, sequence, hidden); memory must be None."""
        mask = mask_of(memory, context)
        *inputs, beta, decay, gate = self.project(x, *self.projections())
        return self._mixed(inputs, self.decay_up(decay), beta.sigmoid(), self.gate_up(gate), mask, torch.sigmoid)

    def projections(self) -> tuple[Linear, ...]:
        """See RecurrentLayer."""
        return self.query, self.key, self.value, self.beta, self.decay_down, self.gate_down


def _unit(x: Tensor) -> Tensor:
    """Divide queries or keys by their length, (..., width)."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + LENGTH_EPS)
