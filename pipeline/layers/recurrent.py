"""What layers with a recurrent state share: linear attention and state space models.

Such a layer convolves some inputs along the sequence, and reads and changes a matrix for each head with every token. Instead of keys and
values it keeps the last inputs of the convolutions and these matrices, however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.linear import Linear
from pipeline.layers.mask import Mask

#: (transition, state after a part that begins with zeros) -> the state before the part
StateBefore = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RecurrentState:
    """What a layer keeps of the tokens of some sequences, instead of keys and values.

    Attributes:
        inputs: (batch, kernel - 1, channels), the last inputs of the convolutions, side by side.
        memory: (batch, heads, key_dim, value_dim), the matrices of the heads.
    """

    inputs: Tensor
    memory: Tensor


class Mixing(Protocol):
    """Interface of what mixes the tokens of a sequence, between the projections of the input and those of the output.

    Args:
        layer: the layer, whose convolutions are applied.
        inputs: (batch, sequence, channels), the inputs of all convolutions side by side.
        gates: the other inputs, each (batch, sequence, width).
        mask: whose documents are independent of each other.

    Returns:
        (batch, sequence, heads, value_dim).
    """

    def __call__(self, layer: RecurrentLayer, inputs: Tensor, *gates: Tensor, mask: Mask) -> Tensor:
        """See above."""
        ...


class RecurrentLayer(nn.Module):
    """A layer with a recurrent state. A subclass has the attributes below, and calls `mix` in its forward pass.

    Attributes:
        kernel: tokens that a convolution reads, with the present one.
        key_dim, value_dim: rows and columns of the matrix of a head.
        state_products: products of a head's matrix with a vector, or of two vectors as such a matrix, of a token.
        decay_rate_log: (heads,), logarithms of factors of the decays.
        rule: `heads` -> outputs (batch, heads, sequence, value_dim) and the state after the last token; it also takes `segments` and
            `state`, as chunked_delta_rule does.
        rule_of_part: `heads` and a StateBefore -> outputs; it also takes `segments` and `segment_before`, as delta_rule_of_part does.
        mix: mixes the tokens; generation replaces it by one that keeps the state, context parallelism by one that exchanges it.
    """

    kernel: int
    key_dim: int
    value_dim: int
    state_products: int
    decay_rate_log: nn.Parameter
    rule: Callable[..., tuple[Tensor, Tensor]]
    rule_of_part: Callable[..., Tensor]
    mix: Mixing

    def projections(self) -> tuple[Linear, ...]:
        """Return the linear layers of the input, which may be computed as one."""
        raise NotImplementedError

    def convolutions(self) -> list[Tensor]:
        """Return the weights of the convolutions, each (channels, 1, kernel)."""
        raise NotImplementedError

    def heads(self, inputs: Tensor, *gates: Tensor, segments: Tensor | None) -> tuple[Tensor, ...]:
        """Convolve, and return the first arguments of `rule`.

        Args:
            inputs: (batch, kernel - 1 + sequence, channels), as in Mixing after the tokens before it.
            gates: as in Mixing.
            segments: of the inputs, as in causal_convolution.
        """
        raise NotImplementedError

    @staticmethod
    def carry(transition: Tensor, state: Tensor) -> Tensor:
        """Return what becomes of the state before a part by its transition, as `rule_of_part` gives it to its StateBefore."""
        return transition @ state

    def advance(
        self, inputs: Tensor, *gates: Tensor, segments: Tensor | None = None, state: RecurrentState | None = None
    ) -> tuple[Tensor, RecurrentState]:
        """Mix tokens that follow a state.

        Args:
            inputs, gates: as in Mixing.
            segments: int (batch, sequence), not decreasing: the state is reset where it changes. None for no reset.
            state: of the tokens before these; None if there are none.

        Returns:
            (batch, sequence, heads, value_dim), and the state after these tokens.
        """
        past = inputs.new_zeros(len(inputs), self.kernel - 1, inputs.shape[2]) if state is None else state.inputs
        joined = torch.cat([past, inputs], dim=1)
        # Tokens before the sequence are of no segment.
        convolved = None if segments is None else F.pad(segments + 1, (self.kernel - 1, 0))
        arguments = self.heads(joined, *gates, segments=convolved)
        outputs, memory = self.rule(*arguments, segments=segments, state=None if state is None else state.memory)
        # A copy: a view would keep the inputs of all tokens.
        last = joined[:, joined.shape[1] - self.kernel + 1 :].clone()
        return outputs.transpose(1, 2).to(inputs.dtype), RecurrentState(last, memory)


def mix(layer: RecurrentLayer, inputs: Tensor, *gates: Tensor, mask: Mask) -> Tensor:
    """Mix the tokens of full sequences; see Mixing."""
    return layer.advance(inputs, *gates, segments=segments_of(mask))[0]


def mask_of(memory: Tensor | None, context: AttentionContext | None) -> Mask:
    """Return the mask of the tokens, which is that of causal self-attention; arguments as in the forward pass of an attention layer."""
    assert memory is None, "a layer with a recurrent state supports self-attention only"
    mask = (context or AttentionContext()).mask
    assert mask.causal, "a layer with a recurrent state is causal"
    assert mask.prefix is None, "a layer with a recurrent state is causal"
    return mask


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


def causal_convolution(inputs: Tensor, weight: Tensor, segments: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Convolve each channel along the sequence.

    Args:
        inputs: (batch, kernel - 1 + sequence, channels), with the tokens before the sequence.
        weight: (channels, 1, kernel).
        segments: int (batch, kernel - 1 + sequence): a token reads those of its own segment only. None for all.
        bias: (channels,); None for none.

    Returns:
        (batch, sequence, channels).
    """
    kernel = weight.shape[2]
    if segments is None:
        return F.conv1d(inputs.transpose(1, 2), weight, bias, groups=len(weight)).transpose(1, 2)
    length, wide = segments.shape[1] - kernel + 1, torch.promote_types(inputs.dtype, torch.float32)
    total: Tensor | None = None if bias is None else bias.to(wide)
    for place in range(kernel):
        same = segments[:, place : place + length] == segments[:, kernel - 1 :]
        term = inputs[:, place : place + length].to(wide) * weight[:, 0, place].to(wide) * same.unsqueeze(2)
        total = term if total is None else total + term
    assert total is not None
    return total.to(inputs.dtype)


def chunks_of(x: Tensor, chunk: int) -> Tensor:
    """(batch, heads, sequence, ...) -> (batch, heads, chunks, chunk, ...), with zeros at the end: tokens that change nothing."""
    missing = -x.shape[2] % chunk
    # A padding by nothing would be a copy.
    return (F.pad(x, [0, 0] * (x.dim() - 3) + [0, missing]) if missing else x).unflatten(2, (-1, chunk))


def segment_chunks(segments: Tensor, chunk: int, segment_before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the segments of the tokens of each chunk, (batch, 1, chunks, chunk), and that of the state before it, (batch, 1, chunks).

    Args:
        segments: (batch, sequence); the tokens at the end of the last chunk are of the last segment.
        chunk: tokens of a chunk.
        segment_before: (batch,), of the state before the sequence; that of the first token when None.
    """
    missing = -segments.shape[1] % chunk
    parts = torch.cat([segments, segments[:, -1:].expand(-1, missing)], dim=1).unflatten(1, (-1, chunk)).unsqueeze(1)
    earliest = parts[:, :, :1, 0] if segment_before is None else segment_before[:, None, None]
    return parts, torch.cat([earliest, parts[:, :, :-1, -1]], dim=2)


def decays_between(log_decay: Tensor, apart: Tensor) -> Tensor:
    """Return the decay after element j up to element i, (..., i, j), of (..., elements); 0 where `apart`.

    Each pair has a sum of its own: differences of sums from the start round by the largest.
    """
    pairs = log_decay.unsqueeze(-1).expand(*log_decay.shape, log_decay.shape[-1])
    return pairs.tril(-1).cumsum(dim=-2).masked_fill(apart, -torch.inf).exp()
