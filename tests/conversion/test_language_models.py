"""The language model of a stock model that also reads images is imported alone, with the logits of that model."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from pipeline.common.errors import UserError
from pipeline.conversion.imported import folder_of
from pipeline.conversion.original import read_original
from pipeline.models import config_classes, config_json, registry
from tests.conversion.test_deepspeed_import import imported, logits
from tests.helpers import one_in
from tools.audit.small_models import randomize

TEXT = {"model_type": "gemma3_text", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 64, "query_pre_attn_scalar": 24}
TEXT |= {"sliding_window": 8, "sliding_window_pattern": 2, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
VISION = {"model_type": "siglip_vision_model", "hidden_size": 32, "image_size": 28, "intermediate_size": 40, "num_attention_heads": 2}
VISION |= {"num_hidden_layers": 1, "patch_size": 14, "vision_use_head": False}
CONTENT = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": TEXT, "vision_config": VISION}
CONTENT |= {"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144, "eos_token_id": [1, 106]}
CONTENT |= {"initializer_range": 0.02, "mm_tokens_per_image": 4, "transformers_version": "4.50.0.dev0"}
#: As in the files of Qwen 3.5 27B, with small sizes.
QWEN_TEXT: dict[str, Any] = {"model_type": "qwen3_5_text", "dtype": "float32", "eos_token_id": 3, "vocab_size": 300, "hidden_size": 48}
QWEN_TEXT |= {"intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
QWEN_TEXT |= {"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "hidden_act": "silu", "mlp_only_layers": []}
QWEN_TEXT |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "full_attention_interval": 2}
QWEN_TEXT |= {"linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}
QWEN_TEXT |= {"linear_value_head_dim": 10, "mamba_ssm_dtype": "float32", "max_position_embeddings": 64, "mtp_num_hidden_layers": 1}
QWEN_ROPE = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25, "rope_theta": 1e7}
QWEN_TEXT |= {"tie_word_embeddings": False, "rope_parameters": {**QWEN_ROPE, "rope_type": "default"}}
QWEN_VISION = {"model_type": "qwen3_5", "depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48}
QWEN_VISION |= {"patch_size": 4, "spatial_merge_size": 2}
QWEN = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
QWEN |= {"text_config": QWEN_TEXT, "vision_config": QWEN_VISION, "eos_token_id": [2, 106], "tie_word_embeddings": False}
QWEN |= {"image_token_id": 256, "video_token_id": 257, "vision_start_token_id": 258, "vision_end_token_id": 259}
QWEN |= {"transformers_version": "4.57.0.dev0"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
QWEN_MOE: dict[str, Any] = {
    **QWEN,
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {**QWEN_TEXT, **EXPERTS, "model_type": "qwen3_5_moe_text"},
    "vision_config": {**QWEN_VISION, "model_type": "qwen3_5_moe"},
}
TIED = {**QWEN, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        content: its config.json.
        names: of tensors in its files, as (regular expression, replacement) from those that the class saves.
        parts: what is left out, as in the log.
        alone: class and model_type of the language model.
        ends: its end tokens, those beside text_config.
        parameters: whether the files hold the parameters of the class, with all experts of a block in one, as the released ones do.
    """

    content: dict[str, Any]
    names: tuple[tuple[str, str], ...]
    parts: str
    alone: tuple[str, str]
    ends: tuple[int, ...]
    parameters: bool = False


GEMMA_ALONE, GEMMA_ENDS = ("Gemma3ForCausalLM", "gemma3_text"), (1, 106)
MOE_ALONE = ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")
QWEN_ALONE, QWEN_ENDS = ("Qwen3_5ForCausalLM", "qwen3_5_text"), (2, 106)
CASES = {
    "published": Case(
        CONTENT,
        ((r"^model\.language_model\.", "language_model.model."), (r"^model\.(vision|multi)", r"\1")),
        r"\d+ of multi_modal_projector, \d+ of vision_tower",
        GEMMA_ALONE,
        GEMMA_ENDS,
    ),
    "module": Case(
        CONTENT,
        ((r"^language_model\.model\.", "model.language_model."), (r"^(vision|multi)", r"model.\1")),
        r"\d+ of model.multi_modal_projector, \d+ of model.vision_tower",
        GEMMA_ALONE,
        GEMMA_ENDS,
    ),
    "qwen3.5": Case(QWEN, (), r"\d+ of model.visual", QWEN_ALONE, QWEN_ENDS),
    "qwen3.5 tied": Case(TIED, (), r"\d+ of model.visual", QWEN_ALONE, QWEN_ENDS),
    "qwen3.5 experts": Case(QWEN_MOE, (), r"\d+ of model.visual", MOE_ALONE, QWEN_ENDS),
    "qwen3.5 fused experts": Case(QWEN_MOE, (), r"\d+ of model.visual", MOE_ALONE, QWEN_ENDS, parameters=True),
}


def stock_model(content: dict[str, Any], folder: Path) -> nn.Module:
    """Save a stock model with random weights; its config.json is `content`."""
    (folder / "config.json").write_text(json.dumps(content))
    stock_class = getattr(transformers, content["architectures"][0])
    torch.manual_seed(0)
    model = randomize(stock_class(stock_class.config_class.from_pretrained(folder)))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(content))
    return model


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict[str, Path]:
    """Folders of models with random weights."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("gemma", "qwen")}
    stock_model(CONTENT, folders["gemma"])
    stock_model(TIED, folders["qwen"])
    return folders


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_it_has_the_logits_of_the_model(name, tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    case, source = CASES[name], tmp_path / "source"
    source.mkdir()
    model = stock_model(case.content, source)
    tensors: dict[str, Tensor] = {}
    for name, value in (model.state_dict() if case.parameters else load_file(source / "model.safetensors")).items():
        for pattern, replacement in case.names:
            name = re.sub(pattern, replacement, name)
        tensors[name] = value
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    checkpoint = imported(source, tmp_path / "run", "model=gpt-tiny")
    tokens = torch.randint(5, 250, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(logits(checkpoint, tokens=tokens), model(input_ids=tokens).logits, rtol=1e-5, atol=1e-4)
    assert re.search(f"are left out: {case.parts}$", caplog.text, re.MULTILINE)
    original = read_original(folder_of(checkpoint.path))
    ours = config_classes.from_dict(checkpoint.config["model"])
    exported = original.config_json(registry.mapping_of(ours).config_json(ours))
    assert (exported["architectures"], exported["model_type"]) == ([case.alone[0]], case.alone[1])
    assert exported["tie_word_embeddings"] == case.content.get("tie_word_embeddings", True)
    assert "vision_config" not in exported
    assert original.ends == list(case.ends), "the tokens beside text_config"


def test_a_tensor_of_the_language_model_is_not_left_out(stock, tmp_path):
    tensors = load_file(stock["gemma"] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight") and "language_model" in name)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONTENT))
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight \[96, 48\] is missing"):
        imported(tmp_path, tmp_path / "run", "model=gpt-tiny")


OTHER_KIND = {**QWEN, "text_config": {**QWEN_TEXT, "model_type": "qwen3_5_moe_text"}}
TIED_BELOW = {**QWEN, "text_config": {**QWEN_TEXT, "tie_word_embeddings": True}}
del TIED_BELOW["tie_word_embeddings"]
REFUSED = [
    ("gemma", {**CONTENT, "tie_word_embeddings": False}, "tie_word_embeddings=False: is not supported; only True is supported"),
    ("gemma", {**CONTENT, "quantization_config": {"quant_method": "fp8"}}, "beside text_config of Gemma3ForConditionalGeneration"),
    ("gemma", {**CONTENT, "text_config": None}, "text_config=None: must be the configuration of the language model"),
    ("gemma", {**CONTENT, "text_config": {**TEXT, "model_type": "llama"}}, "text_config.model_type=llama: must be gemma3_text"),
    ("gemma", {**CONTENT, "text_config": {**TEXT, "final_logit_softcapping": 30.0}}, "final_logit_softcapping=30.0: is not supported"),
    ("qwen", {**QWEN, "hidden_size": 48}, "hidden_size=48: is not known beside text_config of Qwen3_5ForConditionalGeneration"),
    ("qwen", OTHER_KIND, "text_config.model_type=qwen3_5_moe_text: must be"),
    ("qwen", TIED_BELOW, "lm_head.weight"),
    ("qwen", {**QWEN, "text_config": {**QWEN_TEXT, "attention_bias": True}}, "attention_bias=True: is not supported"),
]


@pytest.mark.parametrize("name, content, message", REFUSED, ids=[message for *_, message in REFUSED])
def test_what_may_change_the_logits_is_refused(stock, name, content, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").symlink_to(stock[name] / "model.safetensors")
    with pytest.raises(UserError, match=re.escape(message)):
        imported(tmp_path, tmp_path / "run", "model=gpt-tiny")


GEMMA4_TEXT = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
GEMMA4_TEXT |= {"head_dim": 16, "global_head_dim": 24, "vocab_size": 300, "vocab_size_per_layer_input": 300, "sliding_window": 8}
GEMMA4_TEXT |= {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "max_position_embeddings": 64}
GEMMA4_TEXT |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 30.0}
GEMMA4_TEXT |= {"use_bidirectional_attention": "vision"}
GEMMA4_VISION = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
GEMMA4_VISION |= {"num_hidden_layers": 1, "position_embedding_size": 64}
GEMMA4_AUDIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [8, 4]}


def test_gemma_4_with_tensors_that_its_layers_do_not_use(tmp_path, caplog):
    """The released files have keys and values of the layers that use those of others, and factors of the blocks other than one."""
    caplog.set_level("INFO", "pipeline")
    torch.manual_seed(0)
    config = Gemma4Config(text_config=GEMMA4_TEXT, vision_config=GEMMA4_VISION, audio_config=GEMMA4_AUDIO)
    model = randomize(Gemma4ForConditionalGeneration(config))
    for number, block in enumerate(model.model.language_model.layers):
        block.layer_scalar.fill_(0.7 + number / 10)
    folder = tmp_path / "source"
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    layer = "model.language_model.layers.{}.self_attn.{}.weight"
    unused = {layer.format(number, name): torch.ones(3) for number in (2, 3) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(tensors | unused, folder / "model.safetensors", {"format": "pt"})
    checkpoint = imported(folder, tmp_path / "run", "model=gpt-tiny")
    assert re.search(
        r" \d+ of model\.audio_tower, \d+ of model\.embed_audio, \d+ of model\.embed_vision, \d+ of model\.vision_tower", caplog.text
    )
    tokens = torch.randint(5, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(logits(checkpoint, tokens=tokens), model(input_ids=tokens).logits, rtol=1e-5, atol=1e-5)
    save_file(tensors | {layer.format(1, "v_norm"): torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.v_norm\.weight \[3\] is not a weight of the model"):
        imported(folder, tmp_path / "other", "model=gpt-tiny")


GEMMA4_REFUSED = [
    ({"enable_moe_block": True}, "enable_moe_block=True: is not supported by this family; only False is supported"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention=all: is not supported by this family"),
    ({"vocab_size_per_layer_input": 200}, "vocab_size_per_layer_input=200: is not supported other than vocab_size=300"),
    ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "must have rope_type=default and rope_theta"),
    ({"per_layer_config": {"0": {"head_dim": 24}}}, "must have head_dim and num_key_value_heads of the layers with full_attention"),
    ({"per_layer_config": {"1": {"head_dim": 24}}}, "must have head_dim and num_key_value_heads of the layers with full_attention"),
    ({"per_layer_config": {"1": {"sliding_window": 2}, "3": {"sliding_window": 2}}}, "must have head_dim and num_key_value_heads"),
    ({"num_kv_shared_layers": 3}, "model.kv_shared_layers=3: leaves no layer with keys and values of its own"),
    ({"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}, "at a fixed interval"),
    ({"attention_bias": True}, "attention_bias=True: is not supported"),
]


@pytest.mark.parametrize("changes, message", GEMMA4_REFUSED, ids=[message for _, message in GEMMA4_REFUSED])
def test_what_gemma_4_cannot_have_is_refused(changes, message):
    content = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **GEMMA4_TEXT}
    family, mapping = registry.find_mapping(content)
    assert config_json.read(mapping, family.config, content).kv_shared_layers == 2
    with pytest.raises(UserError, match=re.escape(message)):
        config_json.read(mapping, family.config, {**content, **changes})
