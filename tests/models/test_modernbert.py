"""ModernBERT: its config.json, gradients, what is refused, windows on both sides, FLOPs. Logits: test_encoders.py."""

import json
from dataclasses import replace

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.rules import objectives
from pipeline.layers.loss import IGNORE
from pipeline.models import config_json, registry
from pipeline.models.families.modernbert import ModernBertConfig
from tests.models.test_encoders import CONFIGS, assert_equal_gradients, drawn, pair
from tests.world import configured

#: config.json of the released base model, without its ids of tokens.
RELEASED = """{"architectures": ["ModernBertForMaskedLM"], "attention_bias": false, "attention_dropout": 0.0,
    "classifier_activation": "gelu", "classifier_bias": false, "classifier_dropout": 0.0, "classifier_pooling": "mean",
    "decoder_bias": true, "deterministic_flash_attn": false, "embedding_dropout": 0.0, "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0, "gradient_checkpointing": false, "hidden_activation": "gelu", "hidden_size": 768,
    "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05,
    "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": false, "mlp_dropout": 0.0,
    "model_type": "modernbert", "norm_bias": false, "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22,
    "pad_token_id": 50283, "position_embedding_type": "absolute", "tie_word_embeddings": true, "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0", "vocab_size": 50368}"""
BASE = json.loads(RELEASED)
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def read(content):
    family, mapping = registry.find_mapping(content)
    return config_json.read(mapping, family.config, content)


def test_the_released_configuration():
    """In the keys of transformers 4, and in those that an export writes; also with other values."""
    other = {"global_attn_every_n_layers": 2, "global_rope_theta": 5.0, "local_rope_theta": 7.0, "local_attention": 9}
    changed = ModernBertConfig(global_attn_every_n_layers=2, rope_theta=5.0, rope_local_theta=7.0, local_attention=9)
    for content, config in ((BASE, ModernBertConfig()), ({**BASE, **other}, changed)):
        assert read(content) == config
        assert read(registry.mapping_of(config).config_json(config)) == config


@pytest.mark.parametrize(
    "changes, message",
    [
        *(({key: True}, f"{key}=True") for key in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")),
        ({"decoder_bias": False}, "decoder_bias=False"),
        ({"hidden_activation": "silu"}, "hidden_activation=silu"),
        ({"classifier_activation": "relu"}, "classifier_activation=relu"),
        ({"sliding_window": 4}, "sliding_window=4: is read by ModernBertForMaskedLM"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {GLOBAL: {"rope_type": "yarn", "factor": 2.0}}}, "rope_parameters.full_attention.rope_type=yarn"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta=10000.0: must be sliding_attention or full_attention"),
        ({"num_hidden_layers": 3, "layer_types": [LOCAL, LOCAL, GLOBAL]}, "does not begin with full_attention"),
        ({"num_hidden_layers": 5, "layer_types": [GLOBAL, LOCAL, GLOBAL, GLOBAL, LOCAL]}, "at a fixed interval of layers"),
        ({"layer_types": [GLOBAL]}, "has 1 entries for num_hidden_layers=22"),
    ],
)
def test_other_values_are_refused_by_name(changes, message):
    with pytest.raises(UserError) as caught:
        read({**BASE, **changes})
    assert message in str(caught.value)


def test_gradients_are_those_of_the_stock_class():
    config = CONFIGS["modernbert"]
    ours, theirs = pair(config)
    tokens = drawn(config)
    targets = torch.where(torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < 0.2, tokens, IGNORE)
    theirs(tokens, labels=targets).loss.backward()
    ours(tokens, targets=targets).backward()
    assert_equal_gradients(config, ours, theirs)


def test_a_local_layer_sees_half_of_the_window_on_each_side():
    """With local layers only after the first, a change reaches exactly local_attention / 2 tokens of the second layer's input."""
    config = replace(CONFIGS["modernbert"], layers=2, local_attention=8)
    model, _ = pair(config)
    x = torch.randn(1, 40, config.hidden, generator=torch.Generator().manual_seed(2))
    changed = x.clone()
    changed[0, 20] += 1.0
    context = model.attention_context({})
    with torch.no_grad():
        moved = (model.blocks["1"](x, context) - model.blocks["1"](changed, context)).abs().amax(dim=2)[0] > 0
        everywhere = (model.blocks["0"](x, context) - model.blocks["0"](changed, context)).abs().amax(dim=2)[0] > 0
    assert moved.nonzero().flatten().tolist() == list(range(16, 25))
    assert everywhere.all()


def test_flops_count_both_sides_of_a_window():
    config = ModernBertConfig()
    every = replace(config, global_attn_every_n_layers=1)

    def flops(of, length):
        return registry.family_of(of).costs_per_token(of, length).total

    assert flops(every, 1024) - flops(config, 1024) == 12 * 14 * 768 * (1024 - 129), "14 of 22 layers see 129 tokens"
    assert flops(every, 100) == flops(config, 100)


def test_classification_is_refused():
    config = configured("stage=finetune", "model=modernbert-tiny", "training.objective=classification")
    found = [str(violation) for violation in objectives.violations(config)]
    assert any("training.objective=classification: is not supported with model.family=modernbert" in text for text in found), found
