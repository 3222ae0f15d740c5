"""OLMo 3 (Team OLMo 2025, https://arxiv.org/abs/2512.13961): OLMo 2 with mostly local attention; only the global layers are scaled."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob
from pipeline.layers.recipes import single_std
from pipeline.models.config_json_keys import layer_types, rope_by_kind
from pipeline.models.decoder_mapping import NO_PADDING, decoder_mapping, sliding_window
from pipeline.models.families import olmo2
from pipeline.models.family import Family, Model
from pipeline.models.shared_sizes import WindowConfig
from pipeline.models.tensor_parallel_roles import WITH_WIDTH_NORMS


@dataclass(frozen=True)
class Olmo3Config(
    olmo2.Olmo2Config, WindowConfig, family="olmo3", sliding_window_pattern=4, window=4096, vocab_size=100278, max_positions=8192
):
    """OLMo 2's layers; local ones with a sliding window and, at an interval, global ones."""

    rope_local_theta: float = knob(500000.0, "base of the rotary frequencies of the local layers, which are not scaled", above=1)


def _build(config: Olmo3Config) -> Model:
    from pipeline.models.decoder import decoder, local_windows

    return decoder(config, norms="after", query_key_norm="width", attention=local_windows(config))


MAPPING = decoder_mapping(
    "Olmo3ForCausalLM",
    "olmo3",
    rope=rope_by_kind(theta=500000.0, local_theta=500000.0, positions=2048),
    nested=(NO_PADDING, layer_types(default=4), sliding_window(default=4096, positions=2048)),
    **olmo2.SHARED,
)

# Initial weights: OLMo 2's recipe.
FAMILY = Family(config=Olmo3Config, build=_build, initial_std=single_std, tensor_parallel=WITH_WIDTH_NORMS, huggingface=(MAPPING,))
