"""The blocks of Gemma 4, of which the last may attend to keys and values of earlier ones (Brandon et al. 2024, arXiv:2405.12981).

Layers with the same window share: the last of them that computes keys and values is followed by layers that only compute queries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.attention import Attention, AttentionContext, KeysValues
from pipeline.layers.layer_inputs import LayerInput
from pipeline.layers.rotary import rotate
from pipeline.layers.stack import Block, Stack


class SharedKeyAttention(Attention):
    """Attention with norms of queries, keys and values, whose scores are not scaled. Further arguments as in Attention.

    Args:
        hidden, heads, kv_heads, head_dim: as in Attention.
        value_eps: added to the mean square in the norm of the values, an RMSNorm without weights over head_dim.
        keys_are_values: values are the output of the key projection, before its norm and rotation.
        reuses_keys: the layer has no keys and values; it uses those of its context.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_eps: float,
        keys_are_values: bool = False,
        reuses_keys: bool = False,
        **further: Any,
    ) -> None:
        super().__init__(hidden, heads, kv_heads, head_dim, bias=False, scale=1.0, **further)
        self.value_eps, self.reuses_keys = value_eps, reuses_keys
        if reuses_keys:
            self.key, self.key_norm = None, None  # type: ignore[assignment] # the layer has neither
        if reuses_keys or keys_are_values:
            self.value = None  # type: ignore[assignment] # as above

    def forward(  # type: ignore[override] # with keys and values
        self, x: Tensor, memory: Tensor | None = None, context: AttentionContext | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Compute self-attention. Returns (batch, sequence, hidden), and the keys and values that were used; see Core for their shapes."""
        assert memory is None
        assert context is not None
        assert self.query_norm is not None
        tables = context.local_rotary if self.rope == "local" else context.rotary
        assert tables is not None
        projections = [layer for layer in (self.query, self.key, self.value) if layer is not None]
        q, *keys_values = (self._split_heads(part) for part in self.project(x, *projections))
        if self.key_norm is not None:
            k = rotate(self.key_norm(keys_values[0]), tables)
            v = F.rms_norm(keys_values[-1], (self.head_dim,), eps=self.value_eps)
        else:
            assert context.keys_values is not None, "no layer before this one has keys and values for it"
            k, v = context.keys_values
        attended = self.core(rotate(self.query_norm(q), tables), k, v, context.mask, window=self.window, scale=self.scale)
        return self.output(attended.transpose(1, 2).flatten(2)), (k, v)


class SharedKeyBlock(Block):
    """Pre-norm block with such attention, and norms of the outputs of its layers; its output is scaled. Further arguments as in Block.

    Args:
        layer_input: module of the input of the layer, None for none.
        keeps_keys: the block returns its keys and values, too.
    """

    layer_input: LayerInput | None

    def __init__(self, *, layer_input: LayerInput | None = None, keeps_keys: bool = False, **modules: Any) -> None:
        super().__init__(**modules)
        self.register_module("layer_input", layer_input)
        # A buffer of the Hugging Face class, which does not train it.
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self.keeps_keys = keeps_keys

    def forward(  # type: ignore[override] # with keys and values
        self, x: Tensor, context: AttentionContext, memory: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """(batch, sequence, hidden) -> (batch, sequence, hidden), with keys and values if the block keeps them."""
        assert memory is None
        assert self.attention_norm is not None
        assert self.post_attention_norm is not None
        assert self.mlp_norm is not None
        assert self.post_mlp_norm is not None
        assert self.attention is not None
        assert self.mlp is not None
        attended, keys_values = self.attention(self.attention_norm(x), None, context)
        x = x + self.post_attention_norm(attended)
        x = x + self.post_mlp_norm(self.mlp(self.mlp_norm(x)))
        if self.layer_input is not None:
            assert context.layer_input is not None
            x = x + self.layer_input(x, context.layer_input)
        x = x * self.layer_scalar.to(x.dtype)
        return (x, *keys_values) if self.keeps_keys else x


class SharedKeyStack(Stack):
    """Stack of such blocks, whose embedding may return inputs of the layers, too. It is no stage of a pipeline with others."""

    def run_blocks(self, x: Any, context: AttentionContext) -> Tensor:
        """See Stack; x is the output of the embedding."""
        x, inputs = x if isinstance(x, tuple) else (x, None)
        shared: dict[int | None, KeysValues] = {}
        for index, block in self.blocks.items():
            attention: Any = block.attention
            extra = None if inputs is None else inputs[:, :, int(index)]
            output = block(x, replace(context, layer_input=extra, keys_values=shared[attention.window] if attention.reuses_keys else None))
            if block.keeps_keys:
                x, *(keys, values) = output
                shared[attention.window] = keys, values
            else:
                x = output
        return x
