"""Published parameter counts, completeness of the tensor-parallel tables, and rules between sizes; all on the meta device."""

import itertools
from dataclasses import replace
from typing import Any

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

#: Parameter counts of the released weights (from their model cards and files).
RELEASED = {
    "deepseek-v3": 682_636_487_424,  # see test_the_released_deepseek
    # without the buffers of xIELU
    "apertus-8b": 8_053_338_176,
    "apertus-70b": 70_599_864_480,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    # without the image encoder and its projection
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "smollm3-3b": 3_075_098_624,
    # with both heads, as transformers counts them
    "bert-base-uncased": 110_106_428,
    "bert-base-cased": 108_932_934,
    "bert-large-uncased": 336_226_108,
    "bert-large-cased": 334_661_958,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt1": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # with an MTP module, without its copies of embedding and head: 110,468,824,832 and 358,337,791,296 with them
    "glm4.5-air": 109_227_310_848,
    "glm4.5": 356_785_898_816,
    "granite3-2b": 2_533_531_648,
    "granite3-8b": 8_170_848_256,
    "phi4-14b": 14_659_507_200,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small3-24b": 23_572_403_200,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "olmoe-1b-7b": 6_919_161_856,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "modernbert-base": 149_655_232,
    "modernbert-large": 395_881_664,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "xlm-roberta-base": 278_295_186,
    "xlm-roberta-large": 560_142_482,
    "camembert-base": 110_655_493,
    "camembert-large": 336_695_557,
    "opt-30b": 29_974_540_288,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
    # Not released. Computed from section 3 for 37,000 tokens; table 3 has 65 and 213 million.
    "transformer-base": 37_000 * 512 + 6 * (3 * 4 * 512 * 513 + 2 * (2 * 512 * 2048 + 2048 + 512) + 5 * 2 * 512),
    "opus-mt": 58_101 * 513 + 6 * (3 * 4 * 512 * 513 + 2 * (2 * 512 * 2048 + 2048 + 512) + 5 * 2 * 512),
    "transformer-big": 37_000 * 1024 + 6 * (3 * 4 * 1024 * 1025 + 2 * (2 * 1024 * 4096 + 4096 + 1024) + 5 * 2 * 1024),
}
#: GPT-3 was not released, OPT-175B is not public, and OPT-66B has no exact count; rounded in the papers (GPT-3: table 2.1; OPT: table 1).
ROUNDED = {
    "kimi-k2": 1.04e12,  # released in fp8; the paper has 1.04 trillion
    # Of the papers: embeddings and other weights.
    "nemotron4-15b": 3.1e9 + 12.5e9,
    "nemotron4-340b": 9.4e9 + 331.6e9,
    "minitron-4b": 4.19e9,
    "minitron-8b": 8.27e9,
    "qwen3-next-80b-a3b": 79.7e9,  # released with an MTP module
    "gpt3-small": 125e6,
    "gpt3-medium": 350e6,
    "gpt3-large": 760e6,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13.0e9,
    "gpt3-175b": 175.0e9,
    "opt-66b": 66.0e9,
    "opt-175b": 175.0e9,
}
SMALL = {
    "apertus-tiny",
    "deepseek-tiny",
    "gemma2-tiny",
    "gemma3-tiny",
    "smollm3-tiny",
    "bert-tiny",
    "bloom-tiny",
    "gpt-demo",
    "gpt-oss-tiny",
    "gpt-neox-tiny",
    "gpt-tiny",
    "gpt1-tiny",
    "glm4-moe-tiny",
    "granite-tiny",
    "llama-demo",
    "llama-tiny",
    "mistral-tiny",
    "mixtral-tiny",
    "modernbert-tiny",
    "nemotron-tiny",
    "olmo2-tiny",
    "olmo3-tiny",
    "olmoe-tiny",
    "opt-tiny",
    "phi3-tiny",
    "qwen2.5-tiny",
    "qwen3-tiny",
    "qwen3-moe-tiny",
    "qwen3-next-tiny",
    "roberta-tiny",
    "t5-tiny",
    "transformer-tiny",
}
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
    assert set(NAMES) == RELEASED.keys() | ROUNDED.keys() | SMALL


@pytest.mark.parametrize("name", [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_parameter_count(name, model_config):
    config = model_config(name)
    assert config.violations() == []
    count = sum(parameter.numel() for parameter in build_on_meta(config).parameters())
    if name in RELEASED:
        assert count == RELEASED[name]
    elif name in ROUNDED:
        assert count == pytest.approx(ROUNDED[name], rel=0.02)
    else:
        assert 3e6 < count < 8e6


def test_the_released_deepseek(model_config):
    """The model has 671 B parameters; the released files also contain one MTP module with copies of embedding and head."""
    config = model_config("deepseek-v3")
    main = sum(p.numel() for p in build_on_meta(replace(config, mtp_depth=0)).parameters())
    every = sum(p.numel() for p in build_on_meta(config).parameters())
    assert main == 671_026_419_200
    assert every + 2 * config.vocab_size * config.hidden == 684_489_845_504


#: Options that add or remove weights, besides tied embeddings.
LABELS = {"labels": ["no", "yes"], "next_sentence": False, "tie_embeddings": False}
CHOICES: dict[str, list[dict[str, Any]]] = {
    "bert": [{}, LABELS],
    "transformer": [{}, {"output_bias": True}],
    "roberta": [{}, *({"model_type": name, **more} for name in ("roberta", "xlm-roberta", "camembert") for more in ({}, LABELS))],
    "deepseek_v3": [{"dense_layers": 1, "mtp_depth": 2}, {"q_lora_rank": None, "mtp_depth": 0}],
    "gpt_neox": [{}, {"attention_bias": False}],
    "gpt_oss": [{}, {"attention_bias": False}],
    "glm4_moe": [{"mtp_depth": 2, "query_key_norm": True}, {"qkv_bias": False, "mtp_depth": 0}],
    "llama": [{}, {"attention_bias": True}, {"qkv_bias": True}, {"query_key_norm": True, "attention_bias": True, "head_width": 256}],
    "qwen3_moe": [{}, {"expert_interval": 2}],
    "qwen3_next": [{}, {"expert_interval": 2, "full_attention_interval": 2}],
    "opt": [{}, {"embed_width": 512, "pre_norm": False}],
}


@pytest.mark.parametrize("family", config_classes.CONFIG_CLASSES)
def test_a_configuration_says_whether_queries_and_keys_have_norms(family):
    for choice in CHOICES.get(family, [{}]):
        config = config_classes.from_dict({"family": family, "layers": 4, **choice})
        attentions = [module for module in build_on_meta(config).modules() if isinstance(module, Attention)]
        assert getattr(config, "query_key_norm", False) == any(attention.query_norm is not None for attention in attentions)


def test_both_tables_cover_every_weight():
    used: set[str] = set()
    for family, tied in itertools.product(config_classes.CONFIG_CLASSES, [False, True]):
        for choice in CHOICES.get(family, [{}]):
            config = config_classes.from_dict({"family": family, "layers": 3, "tie_embeddings": tied, **choice})
            shapes = {name: parameter.shape for name, parameter in build_on_meta(config).named_parameters()}
            table = registry.family_of(config).tensor_parallel
            for name, shape in shapes.items():
                assert all(dim < len(shape) for dim in tensor_parallel_roles.splits(table, name).values()), name
                parts = [part for part in name.split(".") if not part.isdigit()]
                used.add(next(end for end in (".".join(parts[-3:]), ".".join(parts[-2:])) if end in table))
            exported, _ = registry.stock_tensors(config)
            assert {part for row in exported for part in row.names} == shapes.keys()
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
