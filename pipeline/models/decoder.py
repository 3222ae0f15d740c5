"""The decoder that most families are: Llama's block, with what a family has in its place. Families import it when they build a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.experts import Experts
from pipeline.layers.gated_delta_net import GatedDeltaNet
from pipeline.layers.mlp import MLP, GatedMLP
from pipeline.layers.moe import MoE
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.router import Router
from pipeline.layers.stack import Block, Stack
from pipeline.models import rope
from pipeline.models.shared_sizes import rotated_dims

#: index of a layer, from 0 -> arguments of a module of that layer
Arguments = Callable[[int], Mapping[str, Any]]
#: what norms are applied to: the input of attention and feed-forward, their output, or both
Place = Literal["before", "after", "both"]


def decoder(
    config: Any,
    *,
    norm: Callable[..., nn.Module] = nn.RMSNorm,
    norms: Place | Callable[[int], Place] = "before",
    query_key_norm: Literal["head", "width"] | None = None,
    attention: Callable[[int], Mapping[str, Any] | nn.Module | None] = lambda _: {},
    mlp: Callable[[int], nn.Module | None] | None = None,
    block: Arguments = lambda _: {},
    block_class: type[Block] = Block,
    embed: Mapping[str, Any] | Embedding | None = None,
    head: Mapping[str, Any] | nn.Module | None = None,
    final_norm: bool = True,
    stack: type[Stack] = Stack,
    **further: Any,
) -> Stack:
    """Build a full model with uninitialized weights on torch's default device. Without arguments it is Llama's.

    Rotary positions are those of the fields rope_theta, with the scaling of a RopeConfig, partial_rotary_factor, and rope_local_theta for
    layers with rope="local"; a configuration without the first has none.

    Args:
        config: its sizes.
        norm: class of the norms; they have the width hidden.
        norms: what they are applied to, in all layers or in each.
        query_key_norm: norms of queries and keys, over each head or over the width of all heads; None for none.
        attention: layer -> arguments of its Attention, without biases by default; or another module; None for none.
        mlp: layer -> its feed-forward, None for none; the gated one with SiLU for all when None.
        block: layer -> further arguments of its Block.
        block_class: class of the blocks.
        embed, head: further arguments of Embedding and OutputHead; or other modules.
        final_norm: whether there is a norm before the head.
        stack: class of the model.
        further: arguments of the stack.
    """
    norm_of = partial(norm, eps=config.norm_eps)
    head_norm = {"head_norm": partial(norm_of, config.head_dim)} if query_key_norm == "head" else {}
    width_norm = {"width_norm": norm_of} if query_key_norm == "width" else {}

    def attention_of(layer: int) -> nn.Module | None:
        given = attention(layer)
        if given is None or isinstance(given, nn.Module):
            return given
        return Attention(
            config.hidden, config.heads, config.kv_heads, config.head_dim, **{"bias": False, **head_norm, **width_norm, **given}
        )

    def block_of(layer: int) -> Block:
        mixer = attention_of(layer)
        feed_forward = GatedMLP(config.hidden, config.ffn_hidden, bias=False) if mlp is None else mlp(layer)
        normalized = norms(layer) if callable(norms) else norms

        def norm_at(place: Place, module: nn.Module | None) -> nn.Module | None:
            return norm_of(config.hidden) if module is not None and normalized in (place, "both") else None

        modules = {
            "attention_norm": norm_at("before", mixer),
            "attention": mixer,
            "post_attention_norm": norm_at("after", mixer),
            "mlp_norm": norm_at("before", feed_forward),
            "mlp": feed_forward,
            "post_mlp_norm": norm_at("after", feed_forward),
        }
        return block_class(**{**modules, **block(layer)})

    if hasattr(config, "rope_theta") and "rotary" not in further:
        scaling = RopeScaling(**rope.scaling(config)) if isinstance(config, rope.RopeConfig) else None
        dims = rotated_dims(config.head_dim, getattr(config, "partial_rotary_factor", 1.0))
        further = {"rotary": Rotary(dims, config.max_positions, config.rope_theta, scaling), **further}
    if hasattr(config, "rope_local_theta"):
        further = {"local_rotary": Rotary(config.head_dim, config.max_positions, config.rope_local_theta), **further}
    model = stack(
        embed=embed if isinstance(embed, Embedding) else Embedding(config.vocab_size, config.hidden, **(embed or {})),
        blocks=[block_of(layer) for layer in range(config.layers)],
        norm=norm_of(config.hidden) if final_norm else None,
        head=head if isinstance(head, nn.Module) else OutputHead(config.vocab_size, config.hidden, **(head or {})),
        tie_embeddings=config.tie_embeddings,
        **further,
    )
    if hasattr(config, "loss_weights"):
        model.set_loss_weights(config.loss_weights)
    return model


def local_windows(config: Any) -> Callable[[int], dict[str, Any]]:
    """Return `attention` of a WindowConfig whose local layers have rotary positions of their own."""
    return lambda layer: {"window": config.local_window(layer), "rope": "global" if config.is_global(layer) else "local"}


def linear_attention(config: Any, **further: Any) -> GatedDeltaNet:
    """Build the linear attention of a LinearAttentionConfig; `further` are other arguments of GatedDeltaNet."""
    return GatedDeltaNet(
        config.hidden,
        config.linear_key_heads,
        config.linear_value_heads,
        key_dim=config.linear_key_dim,
        value_dim=config.linear_value_dim,
        kernel=config.linear_kernel,
        **{"eps": config.norm_eps, **further},
    )


def plain_mlp(config: Any, activation: str | Callable[[], nn.Module], *, bias: bool = False) -> Callable[[int], MLP]:
    """Return `mlp` of a family without gates.

    Args:
        config: its sizes.
        activation: a key of layers.mlp.ACTIVATIONS, or the class of a module, which each layer has one of.
        bias: whether the matrices have a bias.
    """
    return lambda _: MLP(
        config.hidden, config.ffn_hidden, bias=bias, activation=activation if isinstance(activation, str) else activation()
    )


def moe(config: Any, ffn_hidden: int, *, router: Mapping[str, Any] | None = None, experts: Mapping[str, Any] | None = None) -> MoE:
    """Build a MoE layer.

    Args:
        config: with the fields of ExpertsConfig.
        ffn_hidden: intermediate width of each expert.
        router, experts: further arguments of Router and Experts.
    """
    return MoE(
        Router(config.hidden, config.experts, config.top_k, **(router or {})),
        Experts(config.experts, config.hidden, ffn_hidden, **(experts or {})),
        capacity_factor=config.capacity_factor,
    )


def biased_router(config: Any) -> dict[str, Any]:
    """Return `router` of DeepSeek-V3's MoE layers, of a configuration with its fields of groups and factors."""
    return {
        "scoring": "sigmoid",
        "normalize": config.norm_topk_prob,
        "scaling_factor": config.routed_scaling_factor,
        "correction_bias": True,
        "groups": config.groups,
        "topk_group": config.topk_group,
    }
