"""GGUF: the file as gguf's reader and stock transformers read it."""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.common.errors import UserError
from pipeline.conversion.original import TokenIds
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.models.families.gpt import GPTConfig
from pipeline.quantization import gguf_architectures, gguf_file
from pipeline.quantization.gguf_tokens import read_tokens
from tests.conversion.test_huggingface_export import TEXT, InMemory, random_model, tokenizer_folder  # noqa: F401 - a fixture
from tests.models.small_decoders import CONFIGS
from tests.quantization.built import build


def write(folder: Path, config, tokenizer: Path, kind: str, *, zeros: tuple[str, ...] = ()) -> torch.nn.Module:
    """Write a file of a random model; weights whose names contain one of `zeros` are zero."""
    model = random_model(config).eval()
    for name, parameter in model.named_parameters():
        if any(part in name for part in zeros):
            torch.nn.init.zeros_(parameter)
    encoder = TextEncoder(tokenizer, "<|endoftext|>")
    tokens = read_tokens(encoder, config.vocab_size, TokenIds(encoder.end_of_document, [encoder.end_of_document], None))
    gguf_file.write(folder, InMemory(model), config, tokens, kind=kind, name="test")
    return model


#: Sizes that transformers takes for granted.
GEMMA3 = replace(
    CONFIGS["gemma3"],
    head_width=256,
    query_pre_attn_scalar=256,
    sliding_window_pattern=6,
    rope_local_theta=1e4,
    rope_scaling="none",
    rope_factor=1.0,
    layers=6,
)
GPT2 = GPTConfig(layers=2, hidden=32, heads=4, ffn_hidden=128, vocab_size=50257, max_positions=1024)
MODELS = {
    **CONFIGS,
    "gemma3": GEMMA3,
    "gpt": GPT2,
    "mistral": replace(CONFIGS["mistral"], window=None),
    "olmo2": replace(CONFIGS["olmo2"], head_width=None),
}


@pytest.mark.parametrize(
    "name, kind, gap",
    [
        *[("llama-grouped", "fp32", 1e-4), ("llama-tied", "q8_0", 0.05), ("qwen3", "q4_0", 0.6), ("mistral", "bf16", 0.05)],
        *[("bloom", "fp32", 1e-4), ("gemma3", "fp32", 1e-4)],
        *[pytest.param(*case, marks=pytest.mark.long) for case in (("qwen2.5", "q8_0", 0.05), ("gpt", "fp16", 0.02))],
    ],
)
def test_stock_transformers_computes_our_logits(name, kind, gap, tmp_path, tokenizer_folder):  # noqa: F811 - the fixture
    # stock transformers does not read the width of Qwen 3's heads, which is 128 in all sizes
    config = replace(CONFIGS[name], head_width=128) if name == "qwen3" else MODELS[name]
    gguf_file.check(config, "none")
    assert gguf_architectures.is_read_by_transformers(config)
    model = write(tmp_path, config, tokenizer_folder, kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / gguf_file.FILE).tensors}
    assert ("output.weight" in stored) == (not config.tie_embeddings)
    down = stored["blk.1.ffn_down.weight"]
    plain = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
    assert down.tensor_type.name == plain.get(kind, kind.upper() if config.ffn_hidden % 32 == 0 else "F16")
    ours = model.blocks["1"].mlp.down.weight.detach()
    difference = torch.from_numpy(gguf.dequantize(down.data, down.tensor_type).copy()) - ours
    assert difference.norm() < {"fp32": 1e-6, "bf16": 0.01, "fp16": 0.01, "q8_0": 0.01, "q4_0": 0.15}[kind] * ours.norm()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=gguf_file.FILE, dtype=torch.float32).eval()
    tokens = torch.randint(config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected, found = model(tokens), stock(tokens).logits
    assert (found - expected).abs().max() < gap
    stored_weights = gguf_file.FileWeights(tmp_path / gguf_file.FILE, InMemory(model), config)
    torch.testing.assert_close(build(stored_weights, config)(tokens), found, rtol=1e-4, atol=1e-4)


def test_the_tokenizer_is_stored(tmp_path, tokenizer_folder):  # noqa: F811 - the fixture
    write(tmp_path, CONFIGS["llama"], tokenizer_folder, "q8_0")
    stock = AutoTokenizer.from_pretrained(tmp_path, gguf_file=gguf_file.FILE)
    expected = TextEncoder(tokenizer_folder, "<|endoftext|>").encode([TEXT])[0].tolist()
    assert stock(TEXT, add_special_tokens=False)["input_ids"] == expected


def test_what_cannot_be_written_is_refused():
    for name, kind, said in (
        ("llama", "q4_k", r"stage.quantize=q4_k: cannot be written: the package gguf decodes this type, and does not encode it"),
        ("opt", "q8_0", r"is supported for model.family=llama, .*gemma3, gemma4, granite_hybrid, nemotron_h, .*kimi_linear; this is opt"),
        ("llama-yarn", "q8_0", "is not supported with model.rope_scaling=yarn, only with none"),
    ):
        with pytest.raises(UserError, match=said):
            gguf_file.check(CONFIGS[name], kind)
    with pytest.raises(NotImplementedError):  # when this fails, q4_k can be offered
        gguf.quantize(torch.zeros(1, 256).numpy(), gguf.GGMLQuantizationType.Q4_K)
