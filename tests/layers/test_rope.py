"""RoPE scaling compared with the functions of transformers, and the import of its config.json keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig as StockConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.common.errors import UserError
from pipeline.layers.rope_scaling import RopeScaling, frequencies
from pipeline.layers.rotary import Rotary
from pipeline.models import rope
from pipeline.models.config_json_keys import ROPE, UNSCALED
from pipeline.models.families.llama import LlamaConfig

SCALED = {
    "linear": st.fixed_dictionaries({"rope_factor": st.floats(1, 64)}),
    "llama3": st.fixed_dictionaries(
        {
            "rope_factor": st.floats(1, 64),
            "rope_original_positions": st.sampled_from([64, 1024, 8192]),
            "rope_low_frequency": st.floats(0.5, 2),
            "rope_high_frequency": st.floats(2.5, 16),
        }
    ),
    "yarn": st.fixed_dictionaries(
        {
            "rope_factor": st.floats(1, 64),
            "rope_original_positions": st.sampled_from([64, 1024, 8192]),
            "rope_beta_slow": st.floats(0.5, 2),
            "rope_beta_fast": st.floats(4, 64),
            "rope_mscale": st.sampled_from([0.0, 0.7, 1.0]),
            "rope_mscale_all": st.sampled_from([0.0, 0.5, 1.0]),
            "rope_attention_factor": st.sampled_from([None, None, 0.8]),
            "rope_truncate": st.booleans(),
        }
    ),
}


def config_of(kind, **knobs):
    return LlamaConfig(hidden=256, heads=4, kv_heads=4, rope_scaling=kind, **knobs)


@pytest.mark.parametrize("kind", SCALED)
@given(data=st.data(), half=st.integers(1, 64), theta=st.sampled_from([100.0, 10000.0, 5e5]))
@settings(deadline=None, max_examples=40)
def test_frequencies_are_those_of_transformers(kind, data, half, theta):
    config = config_of(kind, rope_theta=theta, head_width=2 * half, **data.draw(SCALED[kind]))
    parameters = ROPE.write(config)["rope_parameters"]
    stock = StockConfig(hidden_size=256, num_attention_heads=4, head_dim=2 * half, rope_parameters=parameters)
    expected, attention_scaling = ROPE_INIT_FUNCTIONS[kind](stock)
    ours = RopeScaling(**rope.scaling(config))
    torch.testing.assert_close(frequencies(2 * half, theta, ours), expected, rtol=1e-5, atol=0)
    assert ours.attention_scaling == pytest.approx(attention_scaling, rel=1e-12)


@pytest.mark.parametrize("kind", ["none", *SCALED])
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_written_keys_are_read_back(kind, data):
    config = config_of(kind, rope_theta=5e5, **(data.draw(SCALED[kind]) if kind in SCALED else {}))
    content = ROPE.write(config)
    for variant in (content, {key: content[key] for key in content if key != "rope_parameters"}):
        assert LlamaConfig(hidden=256, heads=4, kv_heads=4, **ROPE.read(variant)) == config


def test_attention_scaling_is_in_the_tables():
    scaling = RopeScaling("yarn", factor=8.0, original_positions=64)
    tables = Rotary(8, 32, 10000.0, scaling)()
    torch.testing.assert_close(tables[0][0], torch.full((8,), scaling.attention_scaling))
    assert scaling.attention_scaling > 1.2


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters.rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "rope_scaling.beta_fast"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "truncate": False}}, "rope_parameters.truncate"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": None}}, "rope_parameters.truncate"),  # false in the class
    ],
)
def test_unsupported_keys_are_reported_by_name(content, key):
    with pytest.raises(UserError) as caught:
        ROPE.read(content)
    assert [violation.key for violation in caught.value.violations] == [f"config.json {key}"]


def test_a_family_without_scaling_refuses_it():
    scaled = ROPE.write(config_of("linear", rope_factor=2.0))
    with pytest.raises(UserError, match="rope_type"):
        UNSCALED.read(scaled)
    assert UNSCALED.read(ROPE.write(config_of("none", rope_theta=7e5))) == {"rope_theta": 7e5}


@pytest.mark.parametrize(
    ("knobs", "key"),
    [
        ({"rope_scaling": "llama3", "rope_low_frequency": 4.0}, "model.rope_low_frequency"),
        ({"rope_scaling": "yarn", "rope_beta_slow": 40.0}, "model.rope_beta_slow"),
        ({"head_width": 17}, "model.head_width"),
    ],
)
def test_contradicting_fields_are_reported(knobs, key):
    assert [violation.key for violation in LlamaConfig(**knobs).violations()] == [key]
