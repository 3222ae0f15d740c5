"""Published parameter counts, completeness of the tensor-parallel tables, and rules between sizes; all on the meta device."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pipeline.config.compose import register
from pipeline.config.paths import CONF_DIR
from pipeline.layers.attention import Attention
from pipeline.models import config_classes, registry, tensor_parallel_roles
from pipeline.models.families.bert import BertConfig
from pipeline.models.families.bloom import BloomConfig
from pipeline.models.families.deepseek_v3 import DeepseekV3Config
from pipeline.models.families.gemma2 import Gemma2Config
from pipeline.models.families.gemma3 import Gemma3Config
from pipeline.models.families.glm4_moe import Glm4MoeConfig
from pipeline.models.families.gpt import GPTConfig
from pipeline.models.families.gpt1 import GPT1Config
from pipeline.models.families.gpt_neox import GPTNeoXConfig
from pipeline.models.families.llama import LlamaConfig
from pipeline.models.families.mistral import MistralConfig
from pipeline.models.families.nemotron import NemotronConfig
from pipeline.models.families.opt import OPTConfig
from pipeline.models.families.t5 import T5Config
from pipeline.models.families.transformer import TransformerConfig
from pipeline.planner.flops import flops_per_token
from tools.audit.family_cases import FAMILIES

RELEASED = {name: count for cases in FAMILIES.values() for name, count in cases.released.items()}
SMALL = {*(cases.tiny for cases in FAMILIES.values()), "gpt-demo", "llama-demo", "qwen2.5-tiny", "qwen3-tiny"}
NAMES = sorted(file.stem for file in (CONF_DIR / "model").glob("*.yaml"))


@pytest.fixture
def model_config():
    register()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield lambda name: OmegaConf.to_object(compose(f"model/{name}").model)


def build_on_meta(config):
    with torch.device("meta"):
        return registry.build(config)


def test_every_shipped_model_is_counted():
    assert set(NAMES) == RELEASED.keys() | SMALL


#: The first released size of each family; the others are in the long tier.
FIRST = {next(iter(cases.released)) for cases in list(FAMILIES.values())[::4] if cases.released}


@pytest.mark.parametrize("name", [name if name in SMALL | FIRST else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_parameter_count(name, model_config):
    config = model_config(name)
    assert config.violations() == []
    count = sum(parameter.numel() for parameter in build_on_meta(config).parameters())
    if name in SMALL:
        assert 3e6 < count < 8e6
    else:
        rounded = isinstance(RELEASED[name], float)  # in the paper
        assert count == (pytest.approx(RELEASED[name], rel=0.02) if rounded else RELEASED[name])


def test_the_released_deepseek(model_config):
    """The model has 671 B parameters; the released files also contain one MTP module with copies of embedding and head."""
    config = model_config("deepseek-v3")
    main = sum(p.numel() for p in build_on_meta(replace(config, mtp_depth=0)).parameters())
    every = sum(p.numel() for p in build_on_meta(config).parameters())
    assert main == 671_026_419_200
    assert every + 2 * config.vocab_size * config.hidden == 684_489_845_504


def test_both_tables_cover_every_weight_and_a_configuration_says_whether_queries_and_keys_have_norms():
    used: set[str] = set()
    for family, tied in itertools.product(config_classes.CONFIG_CLASSES, [False, True]):
        for choice in FAMILIES[family].options:
            config = config_classes.from_dict({"family": family, "layers": 4, "tie_embeddings": tied, **choice})
            model = build_on_meta(config)
            norms = [module.query_norm is not None for module in model.modules() if isinstance(module, Attention)]
            assert getattr(config, "query_key_norm", False) == any(norms), config
            shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
            table = registry.family_of(config).tensor_parallel
            for name, shape in shapes.items():
                assert all(dim < len(shape) for dim in tensor_parallel_roles.splits(table, name).values()), name
                parts = [part for part in name.split(".") if not part.isdigit()]
                used.add(next(end for end in (".".join(parts[-3:]), ".".join(parts[-2:])) if end in table))
            exported, _ = registry.stock_tensors(config)
            named = Counter((part, row.expert) for row in exported for part in row.names)
            assert {part for (part, _), rows in named.items() if rows > 1} <= {"head.output.bias"}, "an untied BERT has two names of it"
            assert {part for part, _ in named} == shapes.keys()
            assert len({row.hf_name for row in exported}) == len(exported)
    assert tensor_parallel_roles.ROLES.keys() == used, "no family has such a weight"
    with pytest.raises(KeyError, match=r"blocks\.0\.mlp\.new has no role: .* does not list mlp.new"):
        tensor_parallel_roles.role(tensor_parallel_roles.ROLES, "blocks.0.mlp.new")


def test_flops_count_matrices_and_attended_positions():
    projected = OPTConfig(layers=2, hidden=32, heads=4, ffn_hidden=64, vocab_size=96, embed_width=16)
    matrices = [
        parameter.numel()
        for name, parameter in build_on_meta(projected).named_parameters()
        if name.endswith("weight") and parameter.dim() == 2
    ]
    positions = (projected.max_positions + 2) * 32
    assert flops_per_token(projected, 100) == 6 * (sum(matrices) - positions) + 12 * 2 * 32 * 100
    sizes = {"layers": 3, "hidden": 32, "heads": 4, "ffn_hidden": 64, "vocab_size": 96}
    banded, dense = (flops_per_token(GPTConfig(**sizes, banded_window=window), 100) for window in (30, None))
    assert dense - banded == 12 * 32 * (100 - 30), "one of three layers is banded"
    assert flops_per_token(GPTConfig(**sizes, banded_window=200), 100) == dense
    gemma = Gemma3Config(**sizes, kv_heads=4, head_width=8, window=30, sliding_window_pattern=3)
    every = replace(gemma, sliding_window_pattern=1)
    assert flops_per_token(every, 100) - flops_per_token(gemma, 100) == 2 * 12 * 32 * (100 - 30), "two of three layers are local"
    weights = sum(p.numel() for p in build_on_meta(every).parameters() if p.dim() == 2)  # the embedding is also the head
    assert flops_per_token(every, 100) == 6 * weights + 12 * 3 * 32 * 100


def test_flops_of_latent_attention_and_of_what_is_done_once_per_sequence():
    """Of published sizes: values of 128 dims beside queries and keys of 192; BERT's pooler sees one token of a sequence."""
    deepseek = DeepseekV3Config(mtp_depth=0)
    scores = flops_per_token(deepseek, 4096) - flops_per_token(deepseek, 1)
    assert scores == 6 * 61 * 128 * (192 + 128) * (4096 - 1)
    deeper = flops_per_token(replace(deepseek, mtp_depth=1), 4096) - flops_per_token(deepseek, 4096)
    assert deeper > 6 * (deepseek.vocab_size * deepseek.hidden + 128 * (192 + 128) * 4096), "the head and the attention of the MTP module"
    bert = BertConfig()
    pooled = flops_per_token(bert, 512) - flops_per_token(replace(bert, next_sentence=False), 512)
    assert pooled == pytest.approx(6 * (768 * 768 + 2 * 768) / 512)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (BloomConfig(hidden=100, heads=3), ["model.heads"]),
        (GPTConfig(hidden=100, heads=3), ["model.heads"]),
        (GPTConfig(banded_window=1025), ["model.banded_window"]),  # longer than the longest sequence
        (GPT1Config(hidden=100, heads=3), ["model.heads"]),
        (GPTNeoXConfig(hidden=100, heads=3), ["model.heads"]),
        (GPTNeoXConfig(hidden=96, heads=8), ["model.partial_rotary_factor"]),  # 3 of 12 dims
        (LlamaConfig(hidden=100, heads=3, kv_heads=2), ["model.heads", "model.kv_heads"]),
        (LlamaConfig(hidden=36, heads=4, kv_heads=4), ["model.heads"]),  # rotary embeddings need an even head_dim
        (LlamaConfig(hidden=64, heads=4, kv_heads=3), ["model.kv_heads"]),
        (LlamaConfig(attention_bias=True, qkv_bias=True), ["model.qkv_bias"]),
        (MistralConfig(max_positions=4095), ["model.window"]),
        (NemotronConfig(hidden=96, heads=8, partial_rotary_factor=0.1), ["model.partial_rotary_factor"]),  # 1 of 12 dims
        (Gemma2Config(hidden=2300, heads=7, kv_heads=7, max_positions=500), ["model.window", "model.heads"]),
        (Glm4MoeConfig(partial_rotary_factor=0.25, head_width=12, topk_group=2), ["model.partial_rotary_factor", "model.topk_group"]),
        (Gemma3Config(hidden=1150, max_positions=500), ["model.window", "model.heads"]),
        (MistralConfig(max_positions=4095, window=None), []),
        (MistralConfig(heads=8, kv_heads=3, head_width=7), ["model.head_width", "model.kv_heads"]),
        (OPTConfig(hidden=100, heads=3), ["model.heads"]),
        (T5Config(layers=4, encoder_layers=4, buckets=30), ["model.encoder_layers", "model.buckets"]),
        (T5Config(max_distance=16), ["model.max_distance"]),
        (TransformerConfig(hidden=51, heads=4), ["model.heads", "model.hidden"]),
    ],
)
def test_sizes_that_contradict_each_other(config, keys):
    assert [violation.key for violation in config.violations()] == keys
