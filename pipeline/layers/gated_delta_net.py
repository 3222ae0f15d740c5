"""GatedDeltaNet, linear attention with a recurrent state (Yang et al. 2024, https://arxiv.org/abs/2412.06464), in Qwen3-Next's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.delta_rule import chunked_delta_rule
from pipeline.layers.linear import Linear, Projection, project
from pipeline.layers.mask import Mask

#: Added to the squared length of queries and keys, as in the authors' kernels.
LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class RecurrentState:
    """What a layer keeps of the tokens of some sequences, instead of keys and values.

    Attributes:
        inputs: (batch, kernel - 1, channels), the last inputs of the convolutions of queries, keys and values, side by side.
        memory: (batch, value_heads, key_dim, value_dim), the state of the delta rule.
    """

    inputs: Tensor
    memory: Tensor


class Mixing(Protocol):
    """Interface of what mixes the tokens of a sequence, between the projections of the input and the norm of the output.

    Args:
        layer: the layer, whose convolutions are applied.
        qkv: (batch, sequence, channels), queries, keys and values of all heads side by side, before their convolutions.
        log_decay: (batch, sequence, value_heads).
        beta: (batch, sequence, value_heads).
        mask: whose documents are independent of each other.

    Returns:
        (batch, sequence, value_heads, value_dim).
    """

    def __call__(self, layer: GatedDeltaNet, qkv: Tensor, log_decay: Tensor, beta: Tensor, mask: Mask) -> Tensor:
        """See above."""
        ...


class GatedDeltaNet(nn.Module):
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

    Attributes:
        mix: mixes the tokens; generation replaces it by one that keeps the state, context parallelism by one that exchanges it.
    """

    def __init__(
        self, hidden: int, key_heads: int, value_heads: int, *, key_dim: int, value_dim: int, kernel: int, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.key_dim, self.value_dim, self.kernel = key_dim, value_dim, kernel
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
        assert memory is None, "linear attention supports self-attention only"
        mask = (context or AttentionContext()).mask
        assert mask.causal, "linear attention is causal"
        assert mask.prefix is None, "linear attention is causal"
        q, k, v, gate, beta, decay = self.project(x, self.query, self.key, self.value, self.gate, self.beta, self.decay)
        wide = torch.promote_types(x.dtype, torch.float32)
        log_decay = -self.decay_rate_log.to(wide).exp() * F.softplus(decay.to(wide) + self.decay_bias.to(wide))
        outputs = self.mix(self, torch.cat([q, k, v], dim=2), log_decay, beta.sigmoid(), mask)
        gated = self.output_norm(outputs).to(wide) * F.silu(gate.to(wide)).view_as(outputs)
        return self.output(gated.to(x.dtype).flatten(2))

    def advance(
        self, qkv: Tensor, log_decay: Tensor, beta: Tensor, *, segments: Tensor | None = None, state: RecurrentState | None = None
    ) -> tuple[Tensor, RecurrentState]:
        """Mix tokens that follow a state.

        Args:
            qkv, log_decay, beta: as in Mixing.
            segments: as in chunked_delta_rule.
            state: of the tokens before these; None if there are none.

        Returns:
            (batch, sequence, value_heads, value_dim), and the state after these tokens.
        """
        past = qkv.new_zeros(len(qkv), self.kernel - 1, qkv.shape[2]) if state is None else state.inputs
        inputs = torch.cat([past, qkv], dim=1)
        # Tokens before the sequence are of no segment.
        convolved = None if segments is None else F.pad(segments + 1, (self.kernel - 1, 0))
        outputs, memory = chunked_delta_rule(
            *self.heads(inputs, log_decay, beta, convolved), segments=segments, state=None if state is None else state.memory
        )
        # A copy: a view would keep the inputs of all tokens.
        return outputs.transpose(1, 2).to(qkv.dtype), RecurrentState(inputs[:, inputs.shape[1] - self.kernel + 1 :].clone(), memory)

    def heads(
        self, inputs: Tensor, log_decay: Tensor, beta: Tensor, segments: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Convolve, and return the first arguments of chunked_delta_rule.

        Args:
            inputs: (batch, kernel - 1 + sequence, channels), qkv as in Mixing after the tokens before it.
            log_decay, beta: as in Mixing.
            segments: of the inputs, as in causal_convolution.
        """
        mixed = F.silu(causal_convolution(inputs, torch.cat([self.query_conv, self.key_conv, self.value_conv]), segments))
        q, k, v = mixed.to(log_decay.dtype).split([len(self.query_conv), len(self.key_conv), len(self.value_conv)], dim=2)
        heads = beta.shape[2] // (q.shape[2] // self.key_dim)

        def split(x: Tensor, width: int) -> Tensor:
            return x.unflatten(2, (-1, width)).transpose(1, 2)

        q, k = (_unit(split(x, self.key_dim)).repeat_interleave(heads, dim=1) for x in (q, k))
        values, betas = split(v, self.value_dim), beta.to(log_decay.dtype).transpose(1, 2)
        return q * self.key_dim**-0.5, k, values, log_decay.transpose(1, 2), betas


def mix(layer: GatedDeltaNet, qkv: Tensor, log_decay: Tensor, beta: Tensor, mask: Mask) -> Tensor:
    """Mix the tokens of full sequences; see Mixing."""
    return layer.advance(qkv, log_decay, beta, segments=segments_of(mask))[0]


def segments_of(mask: Mask) -> Tensor | None:
    """Return the number of the document of each token within its row, int64 (batch, sequence); None without documents.

    The tokens of a document follow one another, as the pipeline packs them; padding (-1) is a document of its own.
    """
    documents = mask.documents
    if documents is None:
        return None
    segments: Tensor = mask.cached("segments", lambda: number_segments(documents))
    return segments


def number_segments(documents: Tensor) -> Tensor:
    """Number the documents of a row in their order, int64 (batch, tokens): a document ends where the next token has another number."""
    return F.pad((documents.diff(dim=1) != 0).cumsum(dim=1), (1, 0))


def causal_convolution(inputs: Tensor, weight: Tensor, segments: Tensor | None) -> Tensor:
    """Convolve each channel along the sequence.

    Args:
        inputs: (batch, kernel - 1 + sequence, channels), with the tokens before the sequence.
        weight: (channels, 1, kernel).
        segments: int (batch, kernel - 1 + sequence): a token reads those of its own segment only. None for all.

    Returns:
        (batch, sequence, channels).
    """
    kernel = weight.shape[2]
    if segments is None:
        return F.conv1d(inputs.transpose(1, 2), weight, groups=len(weight)).transpose(1, 2)
    length, wide = segments.shape[1] - kernel + 1, torch.promote_types(inputs.dtype, torch.float32)
    total = None
    for place in range(kernel):
        same = segments[:, place : place + length] == segments[:, kernel - 1 :]
        term = inputs[:, place : place + length].to(wide) * weight[:, 0, place].to(wide) * same.unsqueeze(2)
        total = term if total is None else total + term
    assert total is not None
    return total.to(inputs.dtype)


def _unit(x: Tensor) -> Tensor:
    """Divide queries or keys by their length, (..., width)."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + LENGTH_EPS)
