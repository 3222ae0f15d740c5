"""The language model of a stock model that also reads images is imported alone, with the logits of that model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from pipeline.common.errors import UserError
from pipeline.conversion.imported import folder_of
from pipeline.conversion.original import read_original
from pipeline.models import config_classes, registry
from tests.conversion.test_deepspeed_import import imported
from tools.audit.small_models import randomize

TEXT = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 24,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "model_type": "gemma3_text",
}
VISION = {
    "hidden_size": 32,
    "image_size": 28,
    "intermediate_size": 40,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 14,
    "vision_use_head": False,
}
CONTENT = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 4,
    "model_type": "gemma3",
    "text_config": TEXT,
    "vision_config": VISION,
    "transformers_version": "4.50.0.dev0",
}
#: Names of tensors in files -> those of the release that the models were published with, and of the module.
NAMES = {
    "published": [(r"^model\.language_model\.", "language_model.model."), (r"^model\.(vision|multi)", r"\1")],
    "module": [(r"^language_model\.model\.", "model.language_model."), (r"^(vision|multi)", r"model.\1")],
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> tuple[Gemma3ForConditionalGeneration, Path]:
    folder = tmp_path_factory.mktemp("stock")
    (folder / "config.json").write_text(json.dumps(CONTENT))
    torch.manual_seed(0)
    model = randomize(Gemma3ForConditionalGeneration(Gemma3Config.from_pretrained(folder)))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONTENT))
    return model, folder


@pytest.mark.parametrize("names", NAMES)
def test_it_has_the_logits_of_the_model(stock, names, tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    model, folder = stock
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        for pattern, replacement in NAMES[names]:
            name = re.sub(pattern, replacement, name)
        tensors[name] = value
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(CONTENT))
    checkpoint = imported(source, tmp_path / "run", "model=gpt-tiny")
    ours = registry.build(config_classes.from_dict(checkpoint.config["model"]))
    tokens = torch.randint(5, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(checkpoint.tensor(name))
        torch.testing.assert_close(ours.eval()(tokens), model(input_ids=tokens).logits, rtol=1e-5, atol=1e-4)
    prefix = "model." if names == "module" else ""
    projection = sum("multi_modal_projector" in name for name in tensors)
    assert f"are left out: {projection} of {prefix}multi_modal_projector, " in caplog.text
    assert re.search(rf" \d+ of {prefix}vision_tower", caplog.text)
    original = read_original(folder_of(checkpoint.path))
    exported = original.config_json(registry.mapping_of(ours_config(checkpoint)).config_json(ours_config(checkpoint)))
    assert (exported["architectures"], exported["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    assert "vision_config" not in exported
    assert original.ends == [1, 106], "the tokens beside text_config"


def ours_config(checkpoint: Any) -> Any:
    return config_classes.from_dict(checkpoint.config["model"])


def test_a_tensor_of_the_language_model_is_not_left_out(stock, tmp_path):
    tensors = load_file(stock[1] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight") and "language_model" in name)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONTENT))
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight \[96, 48\] is missing"):
        imported(tmp_path, tmp_path / "run", "model=gpt-tiny")


REFUSED = [
    ({"tie_word_embeddings": False}, "tie_word_embeddings=False: is not supported; only True is supported"),
    ({"quantization_config": {"quant_method": "fp8"}}, "is not known beside text_config of Gemma3ForConditionalGeneration"),
    ({"text_config": None}, "text_config=None: must be the configuration of the language model"),
    ({"text_config": {**TEXT, "model_type": "llama"}}, "text_config.model_type=llama: must be gemma3_text"),
    ({"text_config": {**TEXT, "final_logit_softcapping": 30.0}}, "final_logit_softcapping=30.0: is not supported"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[message for _, message in REFUSED])
def test_what_may_change_the_logits_is_refused(stock, changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONTENT, **changes}))
    (tmp_path / "model.safetensors").symlink_to(stock[1] / "model.safetensors")
    with pytest.raises(UserError, match=re.escape(message)):
        imported(tmp_path, tmp_path / "run", "model=gpt-tiny")
