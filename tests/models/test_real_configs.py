"""config.json of published models, and random changes of stock models: accepted with the logits of the stock class, or refused."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pipeline.common.errors import UserError
from pipeline.layers.positions import SinusoidalPositions
from pipeline.models import config_json, registry, stock_keys
from pipeline.models.config_classes import CONFIG_CLASSES
from tests.helpers import one_in
from tests.models.real_configs import BASE_KEYS_OF_RELEASE_4, CONFIGS, shrunk
from tools.audit import fuzz_import
from tools.audit import stock_keys as stock_keys_tool
from tools.audit.family_cases import FAMILIES


@pytest.fixture(scope="module", autouse=True)
def quiet():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)


def read(content: dict):
    family, mapping = registry.find_mapping(content)
    return config_json.read(mapping, family.config, content)


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models_are_read(name):
    config = read(CONFIGS[name])
    assert config.layers > 1
    assert read({**BASE_KEYS_OF_RELEASE_4, **CONFIGS[name]}) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_their_logits_are_those_of_the_stock_class(name, tmp_path):
    outcome = fuzz_import.compare(shrunk(CONFIGS[name]), tmp_path, harmless=True)
    assert outcome.kind == "equal", outcome.note


def add(name: str, value: torch.Tensor):
    """Return a function that adds a tensor to the file of a folder."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({**load_file(file), name: value.contiguous()}, file, {"format": "pt"})

    return change


POSITIONS = SinusoidalPositions(64, 48).table
ADDED = [
    ("final_logits_bias", torch.linspace(-2, 2, 128)[None], "equal"),
    ("model.encoder.embed_positions.weight", POSITIONS, "equal"),
    ("model.decoder.embed_positions.weight", POSITIONS, "equal"),
    ("model.decoder.embed_positions.weight", POSITIONS + 0.1, "refused"),
    ("model.encoder.embed_positions.weight", POSITIONS[:40], "stock refuses"),
]


@pytest.mark.parametrize("name, value, kind", ADDED)
def test_biases_and_positions_of_translation_models(name, value, kind, tmp_path):
    outcome = fuzz_import.compare(shrunk(CONFIGS["opus-mt-en-de"]), tmp_path, harmless=True, tensors=add(name, value))
    assert outcome.kind == kind, outcome.note


@pytest.mark.parametrize("family", one_in(4, FAMILIES))
def test_random_changes_of_a_model(family):
    """A part of tools/parity --fuzz; the first variant is the plainest."""
    fields = next(iter(FAMILIES[family].variants.values()))
    outcomes = [fuzz_import.case(family, fields, f"tests {family} {number}") for number in range(3)]
    assert not [outcome.note for outcome in outcomes if outcome.failed]


def test_the_keys_that_stock_classes_read_are_those_of_the_table():
    """Fails after a change of the pinned transformers, or a new family: run python -m tools.audit.stock_keys."""
    source = stock_keys_tool.installed_source()
    found = stock_keys_tool.table()
    for name, entry in found["classes"].items():
        keys = stock_keys.keys_of(name)
        assert keys is not None, f"{name} is not in the table"
        if keys.release == source.release:
            assert keys.reads == {*found["common"], *entry["reads"]}, name
            assert keys.aliases == entry["aliases"]


@pytest.mark.parametrize("family", CONFIG_CLASSES)
def test_only_keys_that_a_class_reads_need_an_exception(family):
    for mapping in registry.FAMILIES[family].huggingface:
        keys = stock_keys.keys_of(mapping.architecture)
        assert keys is not None
        assert keys.reads >= {*mapping.ignored_keys}, mapping.architecture


def test_the_source_of_a_class_is_searched_where_it_leads(tmp_path):
    """Base classes, functions of other modules, getattr with a computed name; not what only another class reads."""
    models = tmp_path / "models" / "small"
    models.mkdir(parents=True)
    (tmp_path / "masking_utils.py").write_text("def mask(config):\n    return getattr(config, 'is_causal', True)\n")
    (models / "configuration_small.py").write_text(
        'class SmallConfig:\n    model_type = "small"\n    attribute_map = {"width": "hidden"}\n'
        "    def __post_init__(self, **kwargs):\n        self.x = kwargs.pop('legacy', None)\n"
    )
    (models / "modeling_small.py").write_text(
        "from ...masking_utils import mask\n"
        "class Base:\n    def __init__(self, config):\n        self.a = config.depth\n"
        "class Other:\n    def __init__(self, config):\n        self.b = config.unused\n"
        "class SmallForCausalLM(Base):\n    def forward(self):\n        for name in ('first', 'second'):\n"
        "            getattr(self.config, name)\n        return mask(self.config)\n"
    )
    keys = stock_keys_tool.TransformersSource(tmp_path, "5.0").keys("SmallForCausalLM", "small")
    assert keys is not None
    assert keys.reads >= {"depth", "is_causal", "first", "second", "legacy"}
    assert "unused" not in keys.reads
    assert keys.defaulted == {"is_causal"}
    assert keys.aliases == {"width": "hidden"}
    assert stock_keys_tool.TransformersSource(tmp_path, "5.0").keys("LargeForCausalLM", "small") is None


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def test_files_of_a_newer_release(monkeypatch):
    """What its code reads is not known, so keys that the import does not know are refused."""
    newer = {**LLAMA, "transformers_version": "99.1.0", "novelty": 3}
    with pytest.raises(UserError, match=r"novelty=3: may be read by LlamaForCausalLM of transformers 99\.1\.0"):
        read(newer)
    assert read({**newer, "novelty": None, "transformers_version": "4.0"}) == read(LLAMA)
    monkeypatch.setattr(stock_keys, "keys_of", lambda *_: None)
    with pytest.raises(UserError, match=r"novelty=3"):
        read({**LLAMA, "novelty": 3})


REFUSED = [
    ({"is_causal": None}, "is_causal=None: is read by LlamaForCausalLM"),
    ({"is_causal": False}, "is_causal=False"),
    ({"num_attention_heads": 0}, "num_attention_heads=0: must be at least 1"),
    ({"hidden_size": "4096"}, "hidden_size=4096: must be of type int"),
    ({"head_dim": [3]}, "head_dim=[3]: must be a positive integer"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be finite"),
    ({"vocab_size": 2**40}, "vocab_size=1099511627776: must be at most"),
    ({"vocab_size": None}, "vocab_size=None: is null"),
    ({"rope_theta": "10000"}, "rope_theta=10000: must be a finite number"),
    ({"rope_scaling": [1]}, "rope_scaling=[1]: must be an object"),
    ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_scaling.rope_type=['linear']"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor=2: must be a finite number"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 1.5}}, "must be a positive integer"),
    ({"architectures": {"0": "LlamaForCausalLM"}}, "architectures={'0': 'LlamaForCausalLM'}: must be a list"),
    ({"architectures": [3]}, "architectures=[3]: must be a list"),
    (CONFIGS["gpt2-medium"] | {"hidden_size": 768}, "hidden_size=768: is another name of n_embd=1024"),
    (CONFIGS["t5-small"] | {"dense_act_fn": "gelu_new"}, "dense_act_fn=gelu_new: contradicts feed_forward_proj=relu"),
    (CONFIGS["flan-t5-base"] | {"is_gated_act": False}, "is_gated_act=False: contradicts feed_forward_proj=gated-gelu"),
    (CONFIGS["t5-small"] | {"scale_decoder_outputs": None}, "scale_decoder_outputs=None: must be of type bool"),
    (CONFIGS["t5-small"] | {"num_layers": "6"}, "num_layers=6: must be a positive integer"),
    (CONFIGS["bloom-1b1"] | {"slow_but_exact": True}, "slow_but_exact=True: is not supported with a pretraining_tp other than 1"),
    (CONFIGS["bloom-1b1"] | {"n_embed": 768}, "contradicts"),
    (CONFIGS["opus-mt-en-de"] | {"num_hidden_layers": 3}, "num_hidden_layers=3: is another name of encoder_layers=6"),
    (CONFIGS["deepseek-v3-bf16"] | {"head_dim": 128}, "head_dim=128: must be 64"),
    (CONFIGS["deepseek-v3-bf16"] | {"norm_topk_prob": None}, "norm_topk_prob=None: is null"),
    (CONFIGS["qwen3-0.6b"] | {"layer_types": ["sliding_attention"] * 28}, "only full_attention is supported"),
    (CONFIGS["qwen3-30b-a3b"] | {"mlp_only_layers": [48]}, "model.dense_blocks=[48]: must be indices of model.layers=48 blocks"),
    (CONFIGS["qwen3-30b-a3b"] | {"mlp_only_layers": "1"}, "mlp_only_layers=1: must be a list of integers"),
    (CONFIGS["qwen3-30b-a3b"] | {"use_sliding_window": True}, "use_sliding_window=True: is not supported by this family"),
    (CONFIGS["qwen3-30b-a3b"] | {"num_local_experts": 64}, "num_local_experts=64: is another name of num_experts=128"),
    (CONFIGS["olmoe-1b-7b"] | {"clip_qkv": 8.0}, "clip_qkv=8.0: is not supported by this family; only None is supported"),
    (CONFIGS["granite3-8b"] | {"mlp_bias": True}, "mlp_bias=True: is not supported by this family; only False is supported"),
    (CONFIGS["granite3-8b"] | {"logits_scaling": 0.0}, "logits_scaling=0.0: must be above 0"),
    (CONFIGS["phi4-14b"] | {"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75: is not supported by this family; only 1.0 is"),
    (
        CONFIGS["phi4-14b"] | {"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
        "=longrope: is not supported",
    ),
    (CONFIGS["pythia-6.9b"] | {"hidden_act": "relu"}, "hidden_act=relu: is not supported by this family; supported are gelu, gelu_fast"),
    (CONFIGS["pythia-6.9b"] | {"rotary_pct": 0.2}, "model.partial_rotary_factor=0.2: rotates 25 of the 128 dims of a head"),
    (CONFIGS["pythia-6.9b"] | {"rotary_pct": None}, "rotary_pct=None: must be a finite number"),
    (CONFIGS["gemma2-9b"] | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True: is not supported by this family"),
    (CONFIGS["gemma2-9b"] | {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0: must be above 0"),
    (CONFIGS["gemma2-9b"] | {"final_logit_softcapping": "30"}, "final_logit_softcapping=30: must be of type float"),
    (CONFIGS["minitron-4b"] | {"hidden_act": "silu"}, "hidden_act=silu: is not supported by this family; only relu2 is supported"),
    (CONFIGS["minitron-4b"] | {"mlp_bias": True}, "mlp_bias=True: is not supported by this family; only False is supported"),
    (CONFIGS["glm4.5-air"] | {"partial_rotary_factor": 0.04}, "model.partial_rotary_factor=0.04: rotates 5 of the 128 dims"),
    (CONFIGS["bert-base-uncased"] | {"add_cross_attention": True}, "add_cross_attention=True"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[message for _, message in REFUSED])
def test_values_that_change_the_logits_or_make_no_sense(changes, message):
    with pytest.raises(UserError) as caught:
        read({**LLAMA, **changes})
    assert message in str(caught.value)


def test_nulls_with_a_meaning():
    assert read(CONFIGS["t5-small"] | {"tie_word_embeddings": None}).tie_embeddings
    assert not read(CONFIGS["t5-small"] | {"tie_word_embeddings": False}).tie_embeddings
    assert read(CONFIGS["mistral-7b"] | {"num_key_value_heads": None}).kv_heads == 32


def test_a_window_that_no_sequence_exceeds_is_full_attention():
    assert read(CONFIGS["mistral-7b"] | {"sliding_window": 32768}).window == 32768
    assert read(CONFIGS["mistral-7b"] | {"sliding_window": 32769}).window is None
