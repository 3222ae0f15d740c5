"""Import of config.json for every family: supported keys are read, others are reported by name."""

import copy
import dataclasses
import json
from collections.abc import Iterator

import pytest
import torch
import transformers
from transformers import KimiLinearConfig, OlmoHybridConfig, OlmoHybridForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from pipeline.common.errors import UserError
from pipeline.conversion import import_model
from pipeline.models import config_json, registry
from pipeline.models.config_classes import CONFIG_CLASSES
from pipeline.models.huggingface_mapping import HuggingFaceMapping
from pipeline.models.unsupported import NEAREST
from tests.helpers import one_in

MAPPINGS = [(name, mapping) for name, family in registry.FAMILIES.items() for mapping in family.huggingface if not mapping.export_only]
NAMES = [mapping.architecture for _, mapping in MAPPINGS]


#: Keys without which the default sizes of a class make no model: hidden / heads is no integer.
REQUIRED = {"Glm4MoeForCausalLM": {"head_dim": 128}}


def settings_of(mapping: HuggingFaceMapping) -> dict:
    """Return the keys that the default configuration of a class needs to be supported."""
    constants = {key: value for key, value in mapping.constants.items() if not config_json.is_dropout(key)}
    return constants | REQUIRED.get(mapping.architecture, {})


def stock(mapping: HuggingFaceMapping) -> dict:
    """Return the config.json that transformers writes for the default configuration of the class."""
    settings = settings_of(mapping)
    written = getattr(transformers, mapping.architecture).config_class(**settings)
    return {**json.loads(written.to_json_string(use_diff=False)), "architectures": [mapping.architecture]}


def read(content: dict):
    family, mapping = registry.find_mapping(content)
    return config_json.read(mapping, family.config, content)


def refused(content: dict) -> str:
    with pytest.raises(UserError) as caught:
        read(content)
    return str(caught.value)


@pytest.mark.parametrize("family, mapping", MAPPINGS, ids=NAMES)
def test_what_transformers_writes_is_read(family, mapping):
    """Every key, including dropout rates and token ids, is known, and the export writes the same values."""
    content = stock(mapping)
    config = read(content)
    assert config.family == family
    assert read(mapping.config_json(config)) == config
    again = mapping.config_json(config)
    compared = [key for key in mapping.keys if key in content and content[key] is not None]
    assert len(compared) > 3
    assert {key: again[key] for key in compared} == {key: content[key] for key in compared}


@pytest.mark.parametrize("mapping", [mapping for _, mapping in MAPPINGS], ids=NAMES)
def test_missing_keys_have_the_stock_class_values(mapping):
    """A config.json that contains only the class is read as the default configuration of the class."""
    bare = {"architectures": [mapping.architecture], "model_type": mapping.model_type, **settings_of(mapping)}
    assert read(bare) == read(stock(mapping))


def unlike(value: object) -> object:
    """Return another value of the same type; a number for a feature that is off when null."""
    if value is None:
        return 30.0
    return (not value) if isinstance(value, bool) else f"other-{value}" if isinstance(value, str) else value + 1


def constants() -> Iterator:
    for _, mapping in MAPPINGS:
        for key, value in mapping.constants.items():
            if not config_json.is_dropout(key):
                yield pytest.param(mapping, key, value, id=f"{mapping.architecture}-{key}")


@pytest.mark.parametrize("mapping, key, value", constants())
def test_an_unsupported_feature_is_reported(mapping, key, value):
    text = refused({**stock(mapping), key: unlike(value)})
    assert f"config.json {key}={unlike(value)}: is not supported by this family; only {value} is supported" in text
    assert "fix: " in text


def test_a_default_of_the_class_that_is_not_supported_is_reported():
    (mapping,) = (mapping for _, mapping in MAPPINGS if mapping.architecture == "MarianMTModel")
    assert "config.json scale_embedding=False: is not supported by this family (the default of MarianMTModel, since the key" in refused(
        {key: value for key, value in stock(mapping).items() if key != "scale_embedding"}
    )


@pytest.mark.parametrize("mapping", [mapping for _, mapping in MAPPINGS], ids=NAMES)
def test_unsupported_keys_and_values_of_a_wrong_type_are_refused_together(mapping):
    key = next(iter(mapping.keys))
    text = refused({**stock(mapping), key: "many", "fusion_config": {"0": {}}, "layer_types": None, "unread_key": 8})
    assert f"config.json {key}=many: must be of type int" in text
    assert "config.json fusion_config={'0': {}}: is read by" in text
    assert "layer_types" not in text
    assert "unread_key" not in text


@pytest.mark.parametrize("mapping", [mapping for _, mapping in MAPPINGS], ids=NAMES)
def test_quantised_models_are_refused(mapping):
    assert "config.json quantization_config=" in refused({**stock(mapping), "quantization_config": {"quant_method": "fp8"}})


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
ROPE = [
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters.rope_type=longrope"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type=dynamic"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}}, "rope_scaling.beta_fast=3.0"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor=None: is missing"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters"),
    ({"num_attention_heads": 5}, "model.heads=5: must divide model.hidden=4096"),
    ({"num_key_value_heads": 7}, "model.kv_heads=7: must divide model.heads=32"),
    ({"num_hidden_layers": 0}, "config.json num_hidden_layers=0: must be at least 1"),
]


@pytest.mark.parametrize("changes, message", ROPE)
def test_unsupported_rope_keys_and_sizes(changes, message):
    assert message in refused({**LLAMA, **changes})


def test_current_and_legacy_rope_keys():
    legacy = read({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert legacy == read({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    assert (legacy.rope_theta, legacy.rope_scaling, legacy.rope_factor) == (5e5, "linear", 2.0)


GEMMA = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 4}
OLMO3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 4}
SMOL = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 4}
SMALL_HYBRID = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
SMALL_HYBRID |= {"pad_token_id": None, "eos_token_id": None}
HYBRID = {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "num_hidden_layers": 4}
QWEN35 = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4}
LOCAL, GLOBAL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


@pytest.mark.parametrize(
    "content, interval",
    [
        (GEMMA, 6),
        ({**GEMMA, "sliding_window_pattern": 3}, 3),
        ({**GEMMA, "layer_types": [LOCAL, GLOBAL] * 2}, 2),  # the list takes precedence over the default of 6
        ({**GEMMA, "layer_types": [GLOBAL] * 4}, 1),
        ({**GEMMA, "layer_types": [LOCAL] * 4, "sliding_window_pattern": 9}, 9),
        ({**GEMMA, "layer_types": [LOCAL] * 4, "sliding_window_pattern": 2}, 5),
        (OLMO3, 4),
        ({**OLMO3, "layer_types": [LOCAL, GLOBAL] * 2}, 2),
        (SMOL, 4),
        ({**SMOL, "no_rope_layer_interval": 3}, 3),
        ({**SMOL, "no_rope_layers": [1, 0, 1, 0]}, 2),
        ({**SMOL, "no_rope_layers": [1, 1, 1, 1]}, 5),
    ],
)
def test_layers_at_an_interval(content, interval):
    config = read(content)
    assert (config.no_rope_layer_interval if config.family == "smollm3" else config.sliding_window_pattern) == interval
    assert read(registry.mapping_of(config).config_json(config)) == config


@pytest.mark.parametrize(
    "content, message",
    [
        ({**GEMMA, "layer_types": [GLOBAL, LOCAL, LOCAL, LOCAL]}, "does not have full_attention at a fixed interval"),
        ({**GEMMA, "layer_types": [LOCAL] * 3}, "has 3 entries for num_hidden_layers="),
        ({**GEMMA, "layer_types": ["chunked_attention"] * 4}, "must be a list of sliding_attention and full_attention"),
        ({**GEMMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "the kind of layer"),
        ({**GEMMA, "rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 2.0}}}, "only default is"),
        ({**OLMO3, "rope_parameters": {LOCAL: {"rope_type": "yarn", "factor": 2.0}}}, "only default is"),
        ({**OLMO3, "rope_theta": 1e4}, "rope_theta=10000.0: is the base of all layers in transformers 4"),
        ({**OLMO3, "sliding_window": None}, "sliding_window=None: must be a positive integer"),
        ({**SMOL, "no_rope_layers": [0, 1, 1, 0]}, "does not have 0 at a fixed interval"),
        ({**SMOL, "no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 0}, "must be an integer of at least 1"),
        ({**SMOL, "use_sliding_window": True}, "use_sliding_window=True"),
    ],
)
def test_other_layouts_of_layers_are_refused(content, message):
    assert message in refused(content)


NO_THETA = {"rope_type": "default", "rope_theta": None}


@pytest.mark.parametrize(
    "keys, theta",
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5, "rope_parameters": None}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_theta": None}, None),
        ({"rope_theta": None, "rope_parameters": None}, None),
        ({"rope_parameters": NO_THETA}, None),
        ({"rope_parameters": NO_THETA, "rope_theta": 5e5}, None),
    ],
)
def test_a_hybrid_without_a_base_has_no_positions(keys, theta):
    """As in OlmoHybridForCausalLM."""
    stock = OlmoHybridConfig(**SMALL_HYBRID, **copy.deepcopy(keys))
    assert (OlmoHybridForCausalLM(stock).model.rotary_emb is None) == (theta is None)
    config = read({**HYBRID, **keys})
    assert config.rotary == (theta is not None)
    assert theta is None or stock.rope_parameters["rope_theta"] == config.rope_theta == theta
    assert read(registry.mapping_of(config).config_json(config)) == config


@pytest.mark.parametrize(
    "content, message",
    [
        ({**HYBRID, "rope_parameters": None}, "rope_parameters=None: means no positions in OLMo-core"),
        ({**HYBRID, "rope_theta": None, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_theta=null means that there are none"),
        ({**HYBRID, "rope_parameters": {GLOBAL: NO_THETA}}, "rope_parameters.full_attention"),
        ({**HYBRID, "layer_types": [LINEAR] * 4}, "model.full_attention_interval=5: must be from 2 to model.layers=4"),
        ({**HYBRID, "layer_types": [GLOBAL] * 4}, "model.full_attention_interval=1: must be from 2 to model.layers=4"),
        ({**HYBRID, "layer_types": [GLOBAL, LINEAR] * 2}, "does not have full_attention at a fixed interval"),
        ({**HYBRID, "linear_num_value_heads": 40}, "model.linear_value_heads=40: must be a multiple of model.linear_key_heads=30"),
        ({**QWEN35, "rope_scaling": {"type": "mrope", "mrope_section": [11, 11, 10]}}, "rope_scaling.rope_type=mrope"),
        ({**QWEN35, "layer_types": ["sliding_attention"] * 4}, "must be a list of linear_attention and full_attention"),
    ],
)
def test_what_hybrids_cannot_honor_is_refused(content, message):
    assert message in refused(content)


@pytest.mark.parametrize("layers, interval", [(2, 2), (3, 3), (4, 4), (7, 4)])
def test_the_default_kinds_of_layers_of_a_hybrid(layers, interval):
    config = read({**HYBRID, "num_hidden_layers": layers})
    assert config.full_attention_interval == interval
    kinds = registry.mapping_of(config).config_json(config)["layer_types"]
    assert kinds == OlmoHybridConfig(**{**SMALL_HYBRID, "num_hidden_layers": layers}).layer_types


KIMI = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "num_hidden_layers": 4}


@pytest.mark.parametrize(
    "keys, pattern, dense",
    [
        ({}, "K", 1),
        ({"num_hidden_layers": 6}, "KKKK*", 1),  # the default of the class
        ({"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}}, "KKK*", 1),
        ({"linear_attn_config": {"full_attn_layers": [2, 4], "kda_layers": [3, 1]}, "first_k_dense_replace": 9}, "K*", 4),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3], "head_dim": 8}, "first_k_dense_replace": 0}, "K", 0),
        (
            {
                "layer_types": [LINEAR, GLOBAL, GLOBAL, LINEAR],
                "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 3},
            },
            "K**",
            1,
        ),
        ({"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "first_k_dense_replace": 1}, "K", 2),
    ],
)
def test_the_kinds_of_layers_of_kimi_linear(keys, pattern, dense):
    """As in KimiLinearConfig."""
    stock, config = KimiLinearConfig(**copy.deepcopy({**KIMI, **keys})), read({**KIMI, **keys})
    assert (config.layer_pattern, config.dense_layers) == (pattern, dense)
    assert [config.is_full(layer) for layer in range(config.layers)] == [kind == GLOBAL for kind in stock.layer_types]
    assert [layer < dense for layer in range(config.layers)] == [kind == "dense" for kind in stock.mlp_layer_types]
    assert (config.linear_heads, config.linear_head_dim) == (stock.linear_num_heads, stock.linear_head_dim)
    assert read(registry.mapping_of(config).config_json(config)) == config


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"linear_attn_config": None}, "linear_attn_config=None: must be an object"),
        ({"linear_attn_config": {"gate_lower_bound": -5.0}}, "linear_attn_config.gate_lower_bound=-5.0: is not supported by this family"),
        ({"linear_attn_config": {"head_dim": None}}, "linear_attn_config.head_dim=None: must be a positive integer"),
        ({"linear_num_heads": 0}, "linear_num_heads=0: must be a positive integer"),
        *(
            ({"linear_attn_config": dict(zip(("full_attn_layers", "kda_layers"), places, strict=True))}, "must have each number from 1 to")
            for places in (([4], [1, 2]), ([4], [1, 2, 3, 4]), ([0], [1, 2, 3]), ([4], None), (["4"], [1, 2, 3]))
        ),
        ({"layer_types": [LINEAR, GLOBAL]}, "must be a list of num_hidden_layers=4 entries, linear_attention or full_attention"),
        ({"layer_types": [LINEAR] * 3 + ["sliding_attention"]}, "must be a list of num_hidden_layers=4 entries"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "dense ones followed by sparse ones"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace=None: must be an integer"),
        ({"mla_use_nope": False}, "mla_use_nope=False: is not supported by this family"),
        ({"num_experts": 8, "num_local_experts": 6}, "num_local_experts=6: is another name of num_experts=8, and they differ"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8: must be 32 in this family"),
        ({"hidden_act": "situ"}, "hidden_act=situ"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ],
)
def test_what_kimi_linear_cannot_honor_is_refused(keys, message):
    assert message in refused({**KIMI, **keys})


def test_a_granite_without_experts_states_none_for_a_token():
    """And the weight of their losses, which a model without experts does not have."""
    family, mapping = registry.find_mapping({"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"})
    content = {
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["mamba", "attention"] * 16,
    }
    found = config_json.read(mapping, family.config, content)
    assert (found.experts, found.layer_pattern, found.mamba_head_dim, found.loss_weights) == (0, "M*", 64, {})
    assert mapping.config_json(found)["num_experts_per_tok"] == 0
    with pytest.raises(UserError, match="num_experts_per_tok=0: must be a positive integer"):
        config_json.read(mapping, family.config, content | {"num_local_experts": 8})


def test_sections_of_rotary_positions_have_no_effect_on_text():
    """The rotation of Qwen 3.5 is that of its frequencies alone, whatever the sections are."""
    parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    plain = read({**QWEN35, "rope_parameters": parameters})
    positions, x = torch.arange(9)[None, None].expand(3, 1, 9), torch.zeros(1)
    for sections in ([11, 11, 10], [2, 1, 1], [0, 5, 3]):
        parameters |= {"mrope_section": sections, "mrope_interleaved": True}
        assert read({**QWEN35, "rope_parameters": dict(parameters)}) == plain
        rotary = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(head_dim=16, rope_parameters=dict(parameters)))
        cos, _ = rotary(x, positions)
        angles = torch.arange(9)[:, None] * 100.0 ** -(torch.arange(0, 8, 2) / 8)
        torch.testing.assert_close(cos[0], torch.cat([angles, angles], dim=1).cos())


def test_rotary_bases_of_olmo_3():
    """Without the base of the local layers, a file that gives one for all layers is not read as transformers 5 does."""
    of_both = {LOCAL: {"rope_type": "default", "rope_theta": 2e4}, GLOBAL: {"rope_type": "yarn", "rope_theta": 3e6, "factor": 8.0}}
    config = read({**OLMO3, "rope_parameters": of_both})
    assert (config.rope_local_theta, config.rope_theta, config.rope_scaling) == (2e4, 3e6, "yarn")
    assert read(registry.mapping_of(config).config_json(config)) == config


def test_rotary_bases_of_gemma_in_current_and_legacy_keys():
    current = {LOCAL: {"rope_type": "default", "rope_theta": 2e4}, GLOBAL: {"rope_type": "linear", "rope_theta": 3e6, "factor": 8.0}}
    legacy = {"rope_theta": 3e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert read({**GEMMA, "rope_parameters": current}) == read({**GEMMA, **legacy})
    assert (read({**GEMMA, **legacy}).rope_theta, read({**GEMMA, **legacy}).rope_local_theta) == (3e6, 2e4)


def test_null_and_missing_kv_heads_differ_where_the_class_does():
    """Qwen's classes have 32 without the key, and the number of heads if it is null."""
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 64}
    assert (read(qwen).kv_heads, read({**qwen, "num_key_value_heads": None}).kv_heads) == (32, 64)


def test_a_class_is_found_by_its_legacy_name():
    assert registry.find_mapping({"model_type": "t5", "architectures": ["T5WithLMHeadModel"]})[0] is registry.FAMILIES["t5"]


@pytest.mark.parametrize("content", [{"model_type": "llama"}, {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, {}])
def test_an_unsupported_class_is_reported(content):
    with pytest.raises(UserError, match=r"is not a class that can be imported"):
        registry.find_mapping(content)


NEAR = [
    ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM: Qwen2MoeForCausalLM has a shared expert"),
    ("LlamaForSequenceClassification", "LlamaForCausalLM: LlamaForSequenceClassification is the same model with another head"),
    ("Mistral3ForConditionalGeneration", "MistralForCausalLM: Mistral3ForConditionalGeneration also reads images"),
]


@pytest.mark.parametrize("name, message", NEAR)
def test_the_nearest_class_is_named(name, message):
    with pytest.raises(UserError, match=f"is not a class that can be imported; the nearest is {message}"):
        registry.find_mapping({"architectures": [name], "model_type": "any"})
    with pytest.raises(UserError, match="model_type=any: is not that of LlamaForCausalLM"):
        registry.find_mapping({"architectures": ["LlamaForCausalLM"], "model_type": "any"})


def test_classes_that_are_near_are_supported_and_the_others_are_not():
    supported = {mapping.architecture for family in registry.FAMILIES.values() for mapping in family.huggingface}
    assert {near for near, _ in NEAREST.values()} <= supported
    assert not supported & NEAREST.keys()
    code_of_its_repository = {"KimiK25ForConditionalGeneration"}
    assert {name for name in NEAREST if not hasattr(transformers, name)} == code_of_its_repository


@pytest.mark.parametrize("family", one_in(4, CONFIG_CLASSES))
def test_the_overrides_for_pretrain_compose_the_model(family):
    """The overrides are the nearest shipped model and the fields that differ from it."""
    config = (
        dataclasses.replace(CONFIG_CLASSES[family](), vocab_size=777, norm_eps=1e-7)
        if family != "opt"
        else CONFIG_CLASSES[family](vocab_size=777)
    )
    overrides = import_model.model_overrides(config)
    assert overrides[0].startswith("model=")
    assert "model.vocab_size=777" in overrides
    from tests.world import configured

    assert configured(*overrides).model == config
