"""Layers without positions in a llama: which ones, and which Hugging Face class an export has."""

import pytest
import torch

from pipeline.certification.reference import initialize
from pipeline.common.errors import UserError
from pipeline.models import config_json, registry
from pipeline.models.families.llama import LlamaConfig

SIZES = {"layers": 4, "hidden": 48, "heads": 4, "kv_heads": 2, "ffn_hidden": 96, "vocab_size": 300, "max_positions": 40}


def built(**options):
    config = LlamaConfig(**SIZES, **options)
    model = registry.build(config)
    initialize(model, config, seed=0)
    return model


def test_the_last_layer_of_each_interval_has_no_positions():
    for interval, expected in ((None, ["global"] * 4), (2, ["global", "none"] * 2), (3, ["global", "global", "none", "global"])):
        assert [block.attention.rope for block in built(no_rope_layer_interval=interval).blocks.values()] == expected
    # With no layer that has positions, only the order that the causal mask sees is left: the last token sees a set.
    first, second = torch.tensor([[3, 5, 7, 9]]), torch.tensor([[7, 3, 5, 9]])
    with torch.no_grad():
        model = built(no_rope_layer_interval=1, query_key_norm=True)
        model.causal = False
        without = (model(first) - model(second))[0, -1].abs().max()
        model = built(query_key_norm=True)
        model.causal = False
        positions = (model(first) - model(second))[0, -1].abs().max()
    assert without < 1e-5 < positions


def test_an_export_is_a_smollm3_or_refused():
    config = LlamaConfig(**SIZES, no_rope_layer_interval=2)
    mapping = registry.mapping_of(config)
    assert mapping.architecture == "SmolLM3ForCausalLM"
    content = mapping.config_json(config)
    assert content["no_rope_layers"] == [1, 0, 1, 0]
    family, found = registry.find_mapping(content)
    assert config_json.read(found, family.config, content).family == "smollm3", "the family that has the class imports it"
    assert registry.mapping_of(LlamaConfig(**SIZES)).architecture == "LlamaForCausalLM"
    for option in ("qkv_bias", "attention_bias", "query_key_norm"):
        with pytest.raises(UserError) as caught:
            registry.mapping_of(LlamaConfig(**SIZES, no_rope_layer_interval=2, **{option: True}))
        assert "model.no_rope_layer_interval=2: is not supported by LlamaForCausalLM; only None is supported" in str(caught.value)
        assert f"model.{option}=True: is not supported by SmolLM3ForCausalLM; only False is supported" in str(caught.value)
