"""Experts in MXFP4, as the released files of gpt-oss have them: the numbers and the logits are those of transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pipeline.common.errors import UserError
from pipeline.conversion import stock_weights
from tests.conversion.test_deepspeed_import import imported, logits, samples
from tools.audit.small_models import randomize

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2}
SIZES |= {"sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def packed(rows: int, columns: int, seed: int, scales: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of the matrices of three experts."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (3, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(*scales, blocks.shape[:3], generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_is_that_of_transformers(dtype):
    """All numbers of 4 bits, and all scales with finite products."""
    blocks, scales = packed(20, 1600, 0, (0, 252))
    assert len(blocks.unique()) == 256
    assert len(scales.unique()) == 252
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    found = stock_weights.dequantized(blocks, scales)
    assert found.isfinite().all()
    assert found.shape == stock_weights.shape_of(tuple(blocks.shape), tuple(scales.shape)) == (3, 1600, 20)
    assert torch.equal(found, expected.float())


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model whose experts are in MXFP4, as transformers loads it."""
    torch.manual_seed(0)
    folder = tmp_path / "stock"
    randomize(GptOssForCausalLM(GptOssConfig(**SIZES))).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for index, name in enumerate(sorted(name for name in tensors if name.endswith(("gate_up_proj", "down_proj")))):
        _, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(rows, columns, index, (122, 126))
    assert sum(name.endswith("_blocks") for name in tensors) == 4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    content["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": modules}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_an_import_has_the_logits_of_transformers(folder, tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    checkpoint = imported(folder, tmp_path / "run", "model=gpt-oss-tiny")
    stock = GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)).eval()
    with torch.no_grad():
        expected = stock(input_ids=samples()).logits
    torch.testing.assert_close(logits(checkpoint), expected, rtol=1e-5, atol=1e-5)
    assert "the logits of GptOssForCausalLM on 64 tokens differ by at most" in caplog.text
    gate_up = stock.model.layers[1].mlp.experts.gate_up_proj
    assert torch.equal(checkpoint.tensor("blocks.1.mlp.experts.up"), gate_up[..., 1::2].transpose(1, 2))


def changed(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{DOWN}_scales"), f"{DOWN} [3, 32, 64] is missing"),
        (lambda tensors: tensors.update({DOWN: torch.zeros(3, 32, 64)}), f"contains {DOWN} twice: also as {DOWN}_blocks and {DOWN}_scales"),
        (lambda tensors: tensors.update({f"{DOWN}_scales": torch.zeros(3, 64, 2, dtype=torch.uint8)}), f"{DOWN} is [3, 64, 1, 16], not"),
        (lambda tensors: tensors.update({f"{DOWN}_scales": torch.zeros(3, 64, 1)}), f"{DOWN} is MXFP4 in F32 instead of U8; supported are"),
    ],
)
def test_files_that_do_not_match_are_refused(folder, tmp_path, change, message):
    changed(folder, change)
    with pytest.raises(UserError) as caught:
        imported(folder, tmp_path / "run", "model=gpt-oss-tiny")
    assert message in str(caught.value)


def test_other_quantizations_are_refused(folder, tmp_path):
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"]["quant_method"] = "gptq"
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"quantization_config=.*gptq.*: is not supported; only quant_method=mxfp4 is"):
        imported(folder, tmp_path / "run", "model=gpt-oss-tiny")
