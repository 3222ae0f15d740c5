"""Attention with interchangeable cores: MHA (Vaswani et al. 2017), MQA (Shazeer 2019), GQA (Ainslie et al. 2023), cross-attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.linear import Linear, Projection, project
from pipeline.layers.mask import Mask
from pipeline.layers.rotary import RotaryTables, rotate

#: Which rotary tables a layer uses: those of the model, those of its local layers (Gemma 3), or none (NoPE).
Rope = Literal["global", "local", "none"]
#: Keys (batch, kv_heads, keys, head_dim) and values (batch, kv_heads, keys, value_dim).
KeysValues = tuple[Tensor, Tensor]


class CoreOptions(TypedDict, total=False):
    """The keyword arguments of a Core, for one that passes them on."""

    window: int | None
    scale: float | None
    sinks: Tensor | None


class Core(Protocol):
    """Interface of the softmax attention of all heads, between the query, key and value projections and the output projection.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim); heads / kv_heads query heads share a key head.
        v: (batch, kv_heads, keys, value_dim).
        mask: the attention mask and score biases.
        window: as in Mask.visible.
        scale: factor of the scores, 1 / sqrt(head_dim) when None.
        sinks: (heads,), the score of a further key of each query head, which every query attends to and whose value is zero; None for none.

    Returns:
        (batch, heads, queries, value_dim). Zeros for a query whose keys are all masked.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See above."""
        ...


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """PyTorch's kernels (flash, memory-efficient, cuDNN); any mask other than causal needs a (queries, keys) tensor.

    None of them has a soft cap of the scores, or attention sinks: with one of these, this is `plain`.
    """
    if mask.softcap is not None or sinks is not None:
        return plain(q, k, v, mask, window=window, scale=scale, sinks=sinks)
    dense = mask.attn_mask(q.shape[2], k.shape[2], q.device, q.dtype, window)
    causal = mask.causal and dense is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Unfused reference implementation, which tests compare the other cores with."""
    k, v = repeat_kv(q, k, v)
    scores = mask.changed(q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[3]) if scale is None else scale))
    allowed = mask.visible(q.shape[2], k.shape[2], q.device, window)
    if allowed is None and mask.causal:
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if allowed is None:
        return _softmax(scores, sinks).to(v.dtype) @ v
    # Not -inf: with all keys masked, the softmax and its gradient stay finite, and the second masked_fill zeroes them.
    weights = _softmax(scores.masked_fill(~allowed, torch.finfo(scores.dtype).min), sinks).masked_fill(~allowed, 0.0)
    return weights.to(v.dtype) @ v


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the keys and the sink of each head, without the column of the sinks."""
    if sinks is None:
        return scores.softmax(dim=3)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], -1)
    return torch.cat((scores, column), dim=3).softmax(dim=3)[..., :-1]


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return attention with sinks from attention without them.

    With L' = log(exp(L) + exp(sink)), the output is exp(L - L') O = sigmoid(L - sink) O.

    Args:
        out: the output without sinks, (batch, heads, queries, value_dim).
        lse: L, log sum exp of the scores, (batch, heads, queries); -inf for a query whose keys are all masked.
        sinks: (heads,).
    """
    return (out * torch.sigmoid(lse - sinks[:, None]).unsqueeze(3)).to(out.dtype)


def repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for each query head."""
    repeats = q.shape[1] // k.shape[1]
    return (k, v) if repeats == 1 else (k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1))


@dataclass(frozen=True)
class AttentionContext:
    """Inputs of a block other than its activations; the first four are the same for all blocks of a forward pass.

    Attributes:
        mask: mask of self-attention.
        rotary: cosine and sine tables of rotary position embeddings, None for families without them.
        local_rotary: the same for layers with rope="local", None for families without such layers.
        cross: mask of cross-attention.
        layer_input: (batch, sequence, width), see layers/layer_inputs.py; None for a block without it.
        keys_values: of the layer whose keys and values a block uses (layers/shared_keys.py), None for a block with its own.
    """

    mask: Mask = field(default_factory=Mask)
    rotary: RotaryTables | None = None
    local_rotary: RotaryTables | None = None
    cross: Mask = field(default_factory=lambda: Mask(causal=False))
    layer_input: Tensor | None = None
    keys_values: KeysValues | None = None


class Attention(nn.Module):
    """Multi-head attention; `heads / kv_heads` query heads share a key and value head.

    The number of heads is taken from the shape of the projections' output, so a slice of their rows is correct attention over fewer heads.

    Args:
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        bias: whether the query, key and value projections have a bias.
        output_bias: whether the output projection has a bias; as `bias` when None.
        window: as in Mask.visible.
        scale: as in Core.
        rope: the rotary tables of this layer.
        head_norm: factory of the norms over the head_dim of queries and keys (Qwen 3), None for none.
        width_norm: factory of the norms over all heads of the queries and of the keys together (OLMo 2), given that width; None for none.
        sinks: each query head has an attention sink, a learned score of a further key whose value is zero (Xiao et al. 2023,
            https://arxiv.org/abs/2309.17453; gpt-oss).
        gated: multiply the output of each head by the sigmoid of a further projection of the input, elementwise (Qiu et al. 2025,
            https://arxiv.org/abs/2505.06708; Qwen3-Next).
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        output_bias: bool | None = None,
        window: int | None = None,
        scale: float | None = None,
        rope: Rope = "global",
        head_norm: Callable[[], nn.Module] | None = None,
        width_norm: Callable[[int], nn.Module] | None = None,
        gated: bool = False,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        assert head_norm is None or width_norm is None, "queries and keys have one norm"
        self.head_dim, self.window, self.scale, self.rope = head_dim, window, scale, rope
        self.core: Core = sdpa
        self.project: Projection = project
        self.query = Linear(hidden, heads * head_dim, bias=bias)
        self.key = Linear(hidden, kv_heads * head_dim, bias=bias)
        self.value = Linear(hidden, kv_heads * head_dim, bias=bias)
        self.gate = Linear(hidden, heads * head_dim, bias=bias) if gated else None
        self.output = Linear(heads * head_dim, hidden, bias=bias if output_bias is None else output_bias)
        self.register_parameter("sinks", nn.Parameter(torch.empty(heads)) if sinks else None)
        self.norm_before_split = width_norm is not None
        self.query_norm = width_norm(heads * head_dim) if width_norm else head_norm() if head_norm else None
        self.key_norm = width_norm(kv_heads * head_dim) if width_norm else head_norm() if head_norm else None

    def forward(self, x: Tensor, memory: Tensor | None = None, context: AttentionContext | None = None) -> Tensor:
        """Compute self-attention, or cross-attention to a memory.

        Args:
            x: (batch, sequence, hidden), input of the query projection.
            memory: (batch, keys, hidden), input of the key and value projections; x when None.
            context: masks and rotary tables; a causal mask when None.

        Returns:
            (batch, sequence, hidden).
        """
        context = context or AttentionContext()
        gate = None
        if memory is None:
            q, k, v, *gates = self.project(x, self.query, self.key, self.value, *([] if self.gate is None else [self.gate]))
            gate = gates[0] if gates else None
        else:
            assert self.gate is None, "only self-attention is gated"
            q, k, v = *self.project(x, self.query), *self.project(memory, self.key, self.value)
        if self.norm_before_split:
            q, k = self._norm(q, k)
        q, k, v = self._split_heads(q), self._split_heads(k), self._split_heads(v)
        if not self.norm_before_split:
            q, k = self._norm(q, k)
        tables = {"global": context.rotary, "local": context.local_rotary, "none": None}[self.rope]
        if tables is not None and memory is None:
            q, k = rotate(q, tables), rotate(k, tables)
        mask = context.mask if memory is None else context.cross
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        attn_output = self.core(q, k, v, mask, window=self.window, scale=self.scale, **sinks).transpose(1, 2).flatten(2)
        return self.output(attn_output if gate is None else attn_output * gate.sigmoid())

    def _norm(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the norms of queries and keys, if there are any."""
        return (q, k) if self.query_norm is None or self.key_norm is None else (self.query_norm(q), self.key_norm(k))

    def _split_heads(self, x: Tensor) -> Tensor:
        """(batch, sequence, heads * head_dim) -> (batch, heads, sequence, head_dim)."""
        batch, sequence, _ = x.shape
        return x.view(batch, sequence, -1, self.head_dim).transpose(1, 2)
