"""GGUF of models with several kinds of layers: llama.cpp computes their logits, from tokens that it reads at once and one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.stages import Convert
from pipeline.quantization import gguf_architectures, gguf_export, gguf_file
from tests.conversion.test_huggingface_export import InMemory, tokenizer_folder  # noqa: F401 - a fixture
from tests.helpers import one_in
from tests.models.small_decoders import small
from tests.quantization.built import build
from tests.quantization.llama_cpp import LlamaCpp
from tests.quantization.test_gguf_file import MODELS, write

#: llama.cpp has one width for the keys and values of linear attention, and Mamba-2 layers of Granite that are twice as wide as the model.
LINEAR = {"linear_key_dim": 12, "linear_value_dim": 12}
GRANITE = {"mamba_head_dim": 24}
KIMI = {"norm_eps": 1e-6}
HYBRIDS: dict[str, Any] = {
    "granite": small("granite_hybrid", "dense", **GRANITE),
    "granite, experts and rotary positions": small("granite_hybrid", "experts", **GRANITE),
    "nemotron": small("nemotron_h", "dense", mamba_smallest_step=0.0),
    "nemotron, another epsilon": small("nemotron_h", "in a row", mamba_smallest_step=0.0),
    "nemotron, groups of experts": small("nemotron_h", "experts", mamba_smallest_step=0.0),
    "nemotron, weights of experts as they are": small(
        "nemotron_h", "experts", mamba_smallest_step=0.0, groups=1, topk_group=1, norm_topk_prob=False
    ),
    "qwen3-next": small("qwen3_next", "every block", **LINEAR),
    "qwen3-next, tied": small("qwen3_next", "some blocks", norm_topk_prob=True, expert_interval=1, dense_blocks=[], **LINEAR),
    "qwen3.5": small("qwen3_5", "plain", **LINEAR),
    "qwen3.5, three values of a key": small("qwen3_5", "last", **LINEAR),
    "qwen3.5, experts": small("qwen3_5_moe", "plain", **LINEAR),
    "kimi, groups of experts": small("kimi_linear", "plain", **KIMI),
    "kimi, all groups": small("kimi_linear", "plain", **KIMI, layer_pattern="*K", dense_layers=0, topk_group=4, linear_kernel=3),
    "kimi, feed-forwards": small("kimi_linear", "dense", **KIMI),
}
GEMMA4: dict[str, Any] = {
    "keys as values": small("gemma4", "keys as values"),
    "keys as values, shared": small("gemma4", "both"),
    "shared, wide feed-forwards": small("gemma4", "shared", kv_shared_layers=2),
}


def compare(config: Any, folder: Path, tokenizer: Path, kind: str, gap: float, **further: Any) -> None:
    """Compare the logits of llama.cpp, of more tokens than its chunks have, with those of the file's weights, and these with ours."""
    config = replace(config, max_positions=128)
    gguf_file.check(config, "none")
    model = write(folder, config, tokenizer, kind, **further)
    weights = gguf_file.FileWeights(folder / gguf_file.FILE, InMemory(model), config)
    tokens = torch.randint(config.vocab_size, (100,), generator=torch.Generator().manual_seed(7))
    found = LlamaCpp(folder / gguf_file.FILE).logits(tokens.tolist(), config.vocab_size, at_once=80)
    with torch.no_grad():
        expected = build(weights, config)(tokens[None])[0, 79:]
    assert (found - expected).abs().max() < gap
    if kind == "fp32":  # a sum with 1, and an exponential, are rounded
        torch.testing.assert_close({name: weights.tensor(name) for name in weights.names()}, InMemory(model).weights)


@pytest.mark.parametrize("name", one_in(4, HYBRIDS))
def test_llama_cpp_computes_our_logits(name, tmp_path, tokenizer_folder):  # noqa: F811 - the fixture
    compare(HYBRIDS[name], tmp_path, tokenizer_folder, "fp32", 1e-4)


@pytest.mark.parametrize("name", one_in(2, GEMMA4))
def test_llama_cpp_computes_our_logits_of_gemma4(name, tmp_path, tokenizer_folder):  # noqa: F811 - the fixture
    # llama.cpp computes GELU from a table in fp16: without what follows it, the logits are the same
    compare(GEMMA4[name], tmp_path, tokenizer_folder, "fp32", 2e-5, zeros=("mlp.down", "layer_input.project"))
    compare(GEMMA4[name], tmp_path, tokenizer_folder, "fp32", 5e-3)


@pytest.mark.parametrize("name", ["llama-grouped", "qwen2.5", "qwen3", "mistral", "mixtral", "olmo2", "smollm3"])
def test_llama_cpp_computes_our_logits_of_other_models(name, tmp_path, tokenizer_folder):  # noqa: F811 - the fixture
    changed = {"mixtral": {"window": None}, "smollm3": {"no_rope_layer_interval": 4}}.get(name, {})
    compare(replace(MODELS[name], **changed), tmp_path, tokenizer_folder, "fp32", 1e-4)


@pytest.mark.parametrize("name", ["granite, experts and rotary positions", "qwen3.5"])
def test_what_quantized_files_hold_in_fp32(name, tmp_path, tokenizer_folder):  # noqa: F811 - the fixture
    sizes = {"hidden": 64, "mamba_head_dim": 32} if "granite" in name else {"hidden": 64, "linear_key_dim": 16, "linear_value_dim": 16}
    write(tmp_path, replace(HYBRIDS[name], **sizes), tokenizer_folder, "q8_0")
    LlamaCpp(tmp_path / gguf_file.FILE)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / gguf_file.FILE).tensors}
    plain = ("ssm_a", "ssm_conv1d.weight", "ssm_dt.bias", "ssm_norm.weight", "attn_norm.weight", *(["ssm_d"] if "granite" in name else []))
    assert {types[f"blk.0.{kind}"] for kind in plain} == {"F32"}
    assert {types[f"blk.0.{kind}.weight"] for kind in ("ssm_out", "ssm_in" if "granite" in name else "attn_qkv")} == {"Q8_0"}


def test_quantized_latent_attention(tmp_path, tokenizer_folder):  # noqa: F811 - the fixture
    sizes = {"hidden": 64, "linear_head_dim": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "ffn_hidden": 64}
    compare(replace(HYBRIDS["kimi, feed-forwards"], **sizes), tmp_path, tokenizer_folder, "bf16", 0.1)  # activations are rounded, too
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / gguf_file.FILE).tensors}
    assert {types[name] for name in ("blk.0.ssm_conv1d_q.weight", "blk.0.ssm_a", "blk.0.ssm_norm.weight")} == {"F32"}
    assert {types[f"blk.1.{kind}.weight"] for kind in ("attn_k_b", "attn_v_b", "attn_kv_a_mqa")} == {"BF16"}


def test_perplexities_of_models_whose_blocks_read_more_than_hidden_states_are_refused():
    nothing: Any = None
    with pytest.raises(UserError, match=r"stage.held_out=.*: is not supported with inputs of each layer \(model.layer_input_width=12\)"):
        gguf_export.check(Convert(held_out=["texts.jsonl"]), nothing, nothing, GEMMA4["keys as values, shared"], nothing, nothing)


def test_hybrids_that_llama_cpp_does_not_compute_are_refused():
    for config, said in (
        (replace(HYBRIDS["granite"], mamba_head_dim=12), "with model.mamba_head_dim=12, only with 24"),
        (replace(HYBRIDS["granite"], layer_pattern="M"), r"with model.layer_pattern=M, only with both M and \*, and not with both - and E"),
        (replace(HYBRIDS["nemotron, groups of experts"], layer_pattern="ME*-"), r"with model.layer_pattern=ME\*-, only with both M and \*"),
        (replace(HYBRIDS["nemotron"], mamba_smallest_step=0.001), "with model.mamba_smallest_step=0.001, only with 0"),
        (replace(HYBRIDS["qwen3-next"], linear_value_dim=10), "with model.linear_value_dim=10, only with 12"),
        (replace(HYBRIDS["qwen3-next"], dense_blocks=[1]), r"with model.dense_blocks=\[1\], only with \[\]"),
        (replace(HYBRIDS["qwen3.5"], full_attention_interval=1), "with model.full_attention_interval=1, only with both linear and full"),
        (replace(HYBRIDS["kimi, feed-forwards"], norm_eps=1e-5), "with model.norm_eps=1e-05, only with 1e-06"),
        (replace(HYBRIDS["kimi, feed-forwards"], linear_heads=2), "with model.linear_heads=2, only with 4"),
        (replace(HYBRIDS["kimi, feed-forwards"], q_lora_rank=16), "with model.q_lora_rank=16, only with None"),
        (replace(HYBRIDS["kimi, groups of experts"], norm_topk_prob=False), "with model.norm_topk_prob=False, only with True"),
        (replace(HYBRIDS["kimi, feed-forwards"], layer_pattern="K"), r"with model.layer_pattern=K, only with both K and \*"),
        (
            replace(GEMMA4["keys as values"], sliding_window_pattern=1),
            "with model.sliding_window_pattern=1, only with both local and global",
        ),
        (small("gemma4", "shared"), "with model.kv_shared_layers=3, only after a local layer that a global one follows"),
    ):
        assert config.violations() == []
        with pytest.raises(UserError, match=said):
            gguf_architectures.check(config)
