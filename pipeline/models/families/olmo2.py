"""OLMo 2 (Team OLMo 2025, https://arxiv.org/abs/2501.00656): the output of each layer is normalized, not its input. Olmo2ForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.layers.recipes import single_std
from pipeline.models.decoder_mapping import LAYER, MLP, NO_PADDING, NORMS, decoder_mapping, decoder_table, projections
from pipeline.models.family import Family
from pipeline.models.huggingface_mapping import tensors
from pipeline.models.shared_sizes import RotaryDecoderConfig
from pipeline.models.tensor_parallel_roles import WITH_WIDTH_NORMS

if TYPE_CHECKING:
    from pipeline.layers.stack import Stack


@dataclass(frozen=True)
class Olmo2Config(RotaryDecoderConfig, family="olmo2", vocab_size=100352, norm_eps=1e-6, rope_theta=500000.0):
    """Llama's layers with norms of their outputs instead of their inputs, and RMSNorm over the full width of queries and keys."""

    #: Queries and keys have norms.
    query_key_norm: ClassVar[bool] = True


def build(config: Olmo2Config) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    from pipeline.models.decoder import decoder

    return decoder(config, norms="after", query_key_norm="width")


#: Arguments of the mappings of OLMo 2 and 3.
SHARED: dict[str, Any] = {
    "constants": {"attention_bias": False},
    "defaults": {"vocab_size": 50304, "rms_norm_eps": 1e-5},
    "table": decoder_table(
        *projections(),
        *NORMS,
        *tensors(f"{LAYER}.post_attention_layernorm", "blocks.{i}.post_attention_norm"),
        *MLP,
        *tensors(f"{LAYER}.post_feedforward_layernorm", "blocks.{i}.post_mlp_norm"),
    ),
}
MAPPING = decoder_mapping("Olmo2ForCausalLM", "olmo2", nested=(NO_PADDING,), **SHARED)

FAMILY = Family(
    config=Olmo2Config,
    build=build,
    # Section 3.2 of the paper.
    initial_std=single_std,
    tensor_parallel=WITH_WIDTH_NORMS,
    huggingface=(MAPPING,),
)
