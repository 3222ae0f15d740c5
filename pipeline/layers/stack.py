"""A stack of transformer blocks between an embedding and a head: decoder-only and encoder-only models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.attention_kernel import prepare
from pipeline.layers.batch import Batch
from pipeline.layers.computed_buffers import ComputedBuffers
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.loss import position_weights
from pipeline.layers.mask import Mask
from pipeline.layers.moe import MoE, SharedExpertMoE, moe_layers
from pipeline.layers.position_bias import AlibiSlopes
from pipeline.layers.preference import PreferenceLoss, log_probabilities, preference_loss
from pipeline.layers.rotary import Rotary
from pipeline.layers.router import AuxLoss
from pipeline.layers.teacher import teacher_of, top_log_probabilities


class Block(nn.Module):
    """Transformer block: self-attention, in encoder-decoders cross-attention, and feed-forward, each with a residual connection.

    Args:
        attention_norm, mlp_norm: applied to the input of each layer, or with `post_norm` to its sum with the residual stream; may be None.
        attention: self-attention; None for a block of a feed-forward alone (Nemotron-H).
        mlp: feed-forward or MoE layer; None for a block of self-attention alone.
        post_norm: post-norm (Vaswani et al. 2017) instead of pre-norm.
        cross_norm, cross: cross-attention and its norm, None for a block without cross-attention.
        output_norm: norm of the block's output (the last block of a pre-norm encoder), None for none.
        post_attention_norm, post_mlp_norm: applied to the output of each layer before it is added to the residual stream (OLMo 2,
            Gemma 3), None for none.
        residual_factor: scales the output of each layer before it is added to the residual stream (Granite).
        parallel_residual: the feed-forward reads the input of the block, as attention does, and both outputs are added to it at once
            (GPT-J, GPT-NeoX); else it reads the sum with the output of attention.
    """

    attention_norm: nn.Module | None
    attention: nn.Module | None
    post_attention_norm: nn.Module | None
    cross_norm: nn.Module | None
    cross: nn.Module | None
    mlp_norm: nn.Module | None
    mlp: nn.Module | None
    post_mlp_norm: nn.Module | None
    output_norm: nn.Module | None

    def __init__(
        self,
        attention_norm: nn.Module | None,
        attention: nn.Module | None,
        mlp_norm: nn.Module | None,
        mlp: nn.Module | None,
        *,
        post_norm: bool = False,
        cross_norm: nn.Module | None = None,
        cross: nn.Module | None = None,
        output_norm: nn.Module | None = None,
        post_attention_norm: nn.Module | None = None,
        post_mlp_norm: nn.Module | None = None,
        residual_factor: float = 1.0,
        parallel_residual: bool = False,
    ) -> None:
        super().__init__()
        # In this order. torch.compile shares code between blocks and looks for a module that one of them has in all of them: so each block
        # registers the modules that it does not have, too.
        self.register_module("attention_norm", attention_norm)
        self.register_module("attention", attention)
        self.register_module("post_attention_norm", post_attention_norm)
        self.register_module("cross_norm", cross_norm)
        self.register_module("cross", cross)
        self.register_module("mlp_norm", mlp_norm)
        self.register_module("mlp", mlp)
        self.register_module("post_mlp_norm", post_mlp_norm)
        self.register_module("output_norm", output_norm)
        assert (attention is not None and mlp is not None) or not (post_norm or parallel_residual), "such blocks have both layers"
        assert residual_factor == 1.0 or not post_norm, "post-norm blocks have no residual factor"
        assert not parallel_residual or not (post_norm or cross), "post-norm blocks and those with cross-attention have one residual stream"
        self.post_norm, self.residual_factor, self.parallel_residual = post_norm, residual_factor, parallel_residual

    def forward(self, x: Tensor, context: AttentionContext, memory: Tensor | None = None) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden); memory is (batch, keys, hidden)."""
        if self.post_norm:
            assert self.attention is not None
            x = _apply(self.attention_norm, x + self.attention(x, None, context))
            if self.cross is not None and self.cross_norm is not None:
                x = self.cross_norm(x + self.cross(x, memory, context))
            x = _apply(self.mlp_norm, x + self._feed_forward(x, context))
        else:
            before = x
            if self.attention is not None:
                x = x + self._scaled(_apply(self.post_attention_norm, self.attention(_apply(self.attention_norm, x), None, context)))
            if self.cross is not None and self.cross_norm is not None:
                x = x + self._scaled(self.cross(self.cross_norm(x), memory, context))
            if self.mlp is not None:
                output = self._feed_forward(_apply(self.mlp_norm, before if self.parallel_residual else x), context)
                x = x + self._scaled(_apply(self.post_mlp_norm, output))
        return _apply(self.output_norm, x)

    def _scaled(self, output: Tensor) -> Tensor:
        """Scale the output of a layer."""
        return output if self.residual_factor == 1.0 else output * self.residual_factor

    def _feed_forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Run the feed-forward; MoE layers also take the context, since padding is not routed."""
        assert self.mlp is not None
        return self.mlp(x, context) if isinstance(self.mlp, MoE | SharedExpertMoE) else self.mlp(x)


def prepare_layer(attention: Any, mask: Mask, shape: tuple[int, int, int] | None, device: torch.device) -> None:
    """Compute what the blocks derive from a mask outside of them; mask, shape and device as in attention_kernel.prepare.

    Args:
        attention: the self-attention or cross-attention of a block, with a core, or with a recurrent state a `mix` that may have
            a method `prepare`, too; nothing is done for other layers and None.
    """
    if (core := getattr(attention, "core", getattr(attention, "mix", None))) is not None:
        sinks = getattr(attention, "sinks", None) is not None
        prepare(core, mask, getattr(attention, "window", None), shape, device, sinks=sinks)


def _apply(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Apply a norm, if there is one."""
    return x if norm is None else norm(x)


class Stack(nn.Module):
    """A full model, or a pipeline stage of it: then blocks are missing, and embed, norm or head may be None.

    The key of a block is its index in the full model, so weights have the same names in every stage.

    Args:
        embed: token and position embeddings.
        blocks: transformer blocks, in order.
        norm: final norm, None for post-norm blocks.
        head: output head: an OutputHead, or a module with an OutputHead as its `output`.
        rotary: tables of rotary position embeddings, None for none.
        slopes: ALiBi slopes, None for none.
        local_rotary: tables of the layers with rope="local", None for none.
        causal: whether self-attention is causal.
        softcap: bound of the attention scores, as in Mask; None for none.
        tie_embeddings: whether head and embedding share one weight.

    Attributes:
        measured: what the loss of preferences or of a classifier measures besides, for each batch since the caller cleared it.
        preference: the loss of preferences.
        top_k: tokens of each position that `result` returns with their log-probabilities, instead of the loss; 0 for the loss.
    """

    def __init__(
        self,
        embed: Embedding,
        blocks: Iterable[nn.Module],
        norm: nn.Module | None,
        head: nn.Module,
        rotary: Rotary | None = None,
        slopes: AlibiSlopes | None = None,
        *,
        local_rotary: Rotary | None = None,
        causal: bool = True,
        softcap: float | None = None,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.embed: nn.Module | None = embed
        self.rotary, self.local_rotary, self.slopes, self.causal, self.softcap = rotary, local_rotary, slopes, causal, softcap
        self.blocks = nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        self.norm = norm
        self.head: nn.Module | None = head
        self.measured: list[Tensor] = []
        self.preference = PreferenceLoss()
        self.top_k = 0
        if tie_embeddings:
            output = head if isinstance(head, OutputHead) else head.output
            output.weight = embed.tokens.weight  # type: ignore[union-attr] # a head's own output, a Parameter

    def forward(self, x: Tensor, **batch: Unpack[Batch]) -> Tensor:
        """Run the modules that this stage holds.

        Args:
            x: tokens, int64 (batch, sequence), or without an embedding the hidden states (batch, sequence, hidden).
            batch: targets, to return the loss instead of logits; optionally documents, positions, segments.

        Returns:
            Hidden states without a head, else logits, the loss, or with `per_sequence` the loss of each sequence.
        """
        x, context = self.hidden_states(x, batch)
        return x if self.head is None else self.result(x, context, batch)

    def hidden_states(self, x: Tensor, batch: Batch) -> tuple[Tensor, AttentionContext]:
        """Return the output of the last block, (batch, sequence, hidden), and the context of the blocks; arguments as in forward."""
        # Do not take the sequence length from x: under sequence parallelism, x is a slice along the sequence.
        context = self.attention_context(batch)
        # A stage without an embedding has the targets of all tokens: its input may be a slice along the sequence.
        tokens = x if self.embed is not None else batch.get("targets")
        shape = None if tokens is None else (*tokens.shape, tokens.shape[1])
        for block in self.blocks.values():
            prepare_layer(block.attention, context.mask, shape, x.device)
        if self.embed is not None:
            x = self.embed(x, batch.get("positions"), batch.get("segments"))
        return self.run_blocks(x, context), context

    def run_blocks(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Return the output of the last block."""
        for block in self.blocks.values():
            x = block(x, context)
        return x

    def attention_context(self, batch: Batch) -> AttentionContext:
        """Return the context of all blocks: mask and rotary tables."""
        positions = batch.get("positions")
        slopes = self.slopes() if self.slopes is not None else None
        mask = Mask(causal=self.causal, documents=batch.get("documents"), positions=positions, slopes=slopes, softcap=self.softcap)
        tables, local = (rotary(positions) if rotary is not None else None for rotary in (self.rotary, self.local_rotary))
        return AttentionContext(mask, tables, local)

    def result(self, x: Tensor, context: AttentionContext, batch: Batch) -> Tensor:
        """Return the result of the head, with `per_sequence` that of each sequence alone, with top_k (batch, sequence x (2 top_k + 1))."""
        if self.top_k:
            rows = (self.forward_head(row.unsqueeze(0), context, {}) for row in x)  # all logits of one sequence at a time
            return torch.cat([top_log_probabilities(logits, self.top_k).flatten(1) for logits in rows])
        if "per_sequence" not in batch:
            return self.forward_head(x, context, batch)
        targets = batch["targets"]
        # A mean over the positions of a row, times their number, is a sum; the loss of a pair of answers is one number.
        factor = x.new_full((1,), 1 if "choices" in batch else targets.shape[1], dtype=torch.float32)
        losses = []
        for row in range(len(targets)):
            alone = cast(Batch, {name: cast(Tensor, value)[row : row + 1] for name, value in batch.items()})
            weights = position_weights(alone.get("loss_scale"))
            scale = factor if weights is None else factor * weights
            losses.append(self.forward_head(x[row : row + 1], context, {**alone, "loss_scale": scale}))
        return torch.stack(losses).unsqueeze(1)

    def forward_head(self, x: Tensor, context: AttentionContext, batch: Batch) -> Tensor:  # noqa: ARG002 - for families whose head contains blocks
        """Apply the final norm and the head."""
        assert self.head is not None
        if self.norm is not None:
            x = self.norm(x)
        if "choices" in batch:
            return self._preferences(log_probabilities(self.head, x, batch), batch)
        return self.head(x, batch.get("targets"), batch.get("loss_scale"), teacher_of(batch))

    def _preferences(self, answers: Tensor, batch: Batch) -> Tensor:
        """Return the loss of preferences, and without a reference the log-probabilities of the answers, (batch, 2)."""
        if "reference" not in batch:
            return answers
        loss, rewards = preference_loss(answers, batch, self.preference)
        self.measured.append(rewards)
        return loss

    def set_loss_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights of further losses and the speed of routers' biases; for families that have some (ModelConfig.loss_weights).

        Args:
            weights: all of the family, by name.
        """

    def reset_buffers(self) -> None:
        """Recompute all ComputedBuffers on the device of the weights, after the model was materialized from the meta device."""
        device = next(self.parameters()).device
        for module in self.modules():
            if isinstance(module, ComputedBuffers):
                module.reset_buffers(device)


class BiasedMoEStack(Stack):
    """Stack with DeepSeek-V3's losses: that of each sequence, and the correction biases of routers, which loads move."""

    def set_loss_weights(self, weights: Mapping[str, float]) -> None:
        """See Stack."""
        for moe in moe_layers(self):
            moe.aux_loss = AuxLoss(sequence=weights["balance_loss"])
            moe.router.bias_update_speed = weights["bias_update_speed"]


class MoEStack(Stack):
    """Stack with auxiliary losses of the softmax routers of its MoE layers, which some blocks have."""

    def set_loss_weights(self, weights: Mapping[str, float]) -> None:
        """See Stack."""
        for moe in moe_layers(self):
            moe.aux_loss = AuxLoss(batch=weights["balance_loss"], z=weights["z_loss"])
