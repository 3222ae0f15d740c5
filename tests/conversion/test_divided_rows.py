"""The convolutions of OLMo Hybrid in files: one for queries, keys and values each, in equal parts, and as one parameter."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

from pipeline.common.errors import UserError
from tests.conversion.test_deepspeed_import import imported, logits
from tools.audit.small_models import randomize

KEYS, VALUES = 24, 40
NAMES = [f"model.layers.0.linear_attn.{name}_conv1d.weight" for name in "qkv"]
PARAMETER = "model.layers.0.linear_attn.conv1d.weight"


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> tuple[OlmoHybridForCausalLM, Path]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 100}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 10}
    config = OlmoHybridConfig(**sizes, **linear, pad_token_id=None, eos_token_id=None, max_position_embeddings=64)
    model, folder = randomize(OlmoHybridForCausalLM(config)), tmp_path_factory.mktemp("stock")
    model.save_pretrained(folder)
    return model, folder


def of_the_release(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    whole = torch.cat([tensors.pop(name) for name in NAMES])
    return {**tensors, **dict(zip(NAMES, whole.clone().split([KEYS, KEYS, VALUES]), strict=True))}


def of_the_class(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**{name: value for name, value in tensors.items() if name not in NAMES}, PARAMETER: torch.cat([tensors[n] for n in NAMES])}


@pytest.mark.parametrize("form", [dict, of_the_release, of_the_class])
def test_it_has_the_logits_of_the_model(stock, form, tmp_path):
    model, folder = stock
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = form(load_file(folder / "model.safetensors"))
    assert form is not dict or len(tensors[NAMES[0]]) == -(-(2 * KEYS + VALUES) // 3), "transformers saves equal parts"
    save_file({name: value.clone() for name, value in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = imported(tmp_path, tmp_path / "run", "model=gpt-tiny")
    tokens = torch.randint(5, 100, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(logits(checkpoint, tokens=tokens), model(input_ids=tokens).logits, rtol=1e-5, atol=1e-4)


def test_rows_that_are_missing_are_named(stock, tmp_path):
    tensors = of_the_release(load_file(stock[1] / "model.safetensors"))
    tensors[NAMES[2]] = tensors[NAMES[2]][1:].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((stock[1] / "config.json").read_text())
    with pytest.raises(UserError, match=r"v_conv1d\.weight is \[39, 1, 4\], not \[40, 1, 4\]"):
        imported(tmp_path, tmp_path / "run", "model=gpt-tiny")
