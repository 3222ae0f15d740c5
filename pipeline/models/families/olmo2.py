"""OLMo 2 (Team OLMo 2025, https://arxiv.org/abs/2501.00656): the output of each layer is normalized, not its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.layers.recipes import single_std
from pipeline.models.decoder_mapping import NO_PADDING, OUTPUT_NORM_TABLE, decoder_mapping
from pipeline.models.family import Family, Model
from pipeline.models.shared_sizes import RotaryDecoderConfig
from pipeline.models.tensor_parallel_roles import WITH_WIDTH_NORMS


@dataclass(frozen=True)
class Olmo2Config(RotaryDecoderConfig, family="olmo2", vocab_size=100352, norm_eps=1e-6, rope_theta=500000.0):
    """Llama's layers with norms of their outputs instead of their inputs, and RMSNorm over the full width of queries and keys."""

    query_key_norm: ClassVar[bool] = True


def _build(config: Olmo2Config) -> Model:
    from pipeline.models.decoder import decoder

    return decoder(config, norms="after", query_key_norm="width")


#: Arguments of the mappings of OLMo 2 and 3.
SHARED: dict[str, Any] = {
    "constants": {"attention_bias": False},
    "defaults": {"vocab_size": 50304, "rms_norm_eps": 1e-5},
    "table": OUTPUT_NORM_TABLE,
}
MAPPING = decoder_mapping("Olmo2ForCausalLM", "olmo2", nested=(NO_PADDING,), **SHARED)

# Initial weights: Section 3.2 of the paper.
FAMILY = Family(config=Olmo2Config, build=_build, initial_std=single_std, tensor_parallel=WITH_WIDTH_NORMS, huggingface=(MAPPING,))
