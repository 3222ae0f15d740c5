"""BERT (Devlin et al. 2019, https://arxiv.org/abs/1810.04805); also builds RoBERTa."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.layers.attention import Attention, AttentionContext
from pipeline.layers.batch import Batch
from pipeline.layers.embedding import Embedding
from pipeline.layers.init import single_std
from pipeline.layers.masked_head import ClassificationHead, MaskedHead
from pipeline.layers.mlp import MLP
from pipeline.layers.stack import Block, Stack
from pipeline.models.bert.config import BertConfig
from pipeline.models.bert.huggingface import MAPPINGS
from pipeline.models.family import Family


class Encoder(Stack):
    """Stack whose head also predicts the next sentence, or classifies the sequence."""

    def forward_head(self, x: Tensor, context: AttentionContext, batch: Batch) -> Tensor:  # noqa: ARG002 - as in Stack
        """See Stack."""
        assert self.head is not None
        if isinstance(self.head, ClassificationHead):
            measured = None if torch.is_grad_enabled() else self.measured
            return self.head(x, batch.get("targets"), batch.get("loss_scale"), measured)
        return self.head(x, batch.get("targets"), batch.get("loss_scale"), batch.get("next_sentence"))


def build(config: BertConfig) -> Encoder:
    """Build the full model with uninitialized weights on torch's default device."""

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(config.hidden, eps=config.norm_eps)

    def block() -> Block:
        return Block(
            attention_norm=norm(),
            attention=Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, bias=True),
            mlp_norm=norm(),
            mlp=MLP(config.hidden, config.ffn_hidden, bias=True, activation="gelu"),
            post_norm=True,
        )

    return Encoder(
        embed=Embedding(
            config.vocab_size,
            config.hidden,
            config.max_positions,
            position_offset=config.position_offset,
            segments=config.segments,
            norm=norm(),
        ),
        blocks=[block() for _ in range(config.layers)],
        norm=None,
        head=_head(config),
        causal=False,
        tie_embeddings=config.tie_embeddings,
    )


def _head(config: BertConfig) -> MaskedHead | ClassificationHead:
    """Build the head."""
    if config.labels:
        return ClassificationHead(config.hidden, len(config.labels))
    return MaskedHead(config.vocab_size, config.hidden, config.norm_eps, sentence=config.next_sentence)


BERT = Family(
    config=BertConfig,
    build=build,
    # Google's recipe (github.com/google-research/bert, modeling.py), here not truncated.
    initial_std=single_std,
    huggingface=MAPPINGS,
    tied_weights=lambda config: {"head.output.weight": "embed.tokens.weight"} if config.tie_embeddings else {},
)
