"""Invariants of the decoder families, independent of their sizes."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from pipeline.certification.reference import initialize
from pipeline.layers.attention import Attention, AttentionContext
from pipeline.layers.init import initial_tensor
from pipeline.layers.mlp import XIELU
from pipeline.layers.norm import OffsetRMSNorm
from pipeline.layers.rotary import Rotary, rotate
from pipeline.layers.stack import Stack
from pipeline.models import registry, tensor_parallel_roles
from pipeline.models.families.apertus import ApertusConfig
from pipeline.models.families.bloom import BloomConfig
from pipeline.models.families.gemma3 import Gemma3Config
from pipeline.models.families.gpt import GPTConfig
from pipeline.models.families.gpt1 import GPT1Config
from pipeline.models.families.llama import LlamaConfig
from pipeline.models.families.mistral import MistralConfig
from pipeline.models.families.olmo2 import Olmo2Config
from pipeline.models.families.opt import OPTConfig
from pipeline.models.families.smollm3 import SmolLM3Config
from tools.audit.family_cases import FAMILIES as CASES
from tools.audit.small_models import configuration

GPT = GPTConfig(layers=3, hidden=32, heads=4, ffn_hidden=64, vocab_size=96, max_positions=24)
LLAMA = LlamaConfig(layers=3, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, vocab_size=96, max_positions=24)
SMALL = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 48, "vocab_size": 96, "max_positions": 24}
CONFIGS = {
    "apertus": ApertusConfig(**SMALL, rope_original_positions=12),
    "gemma3": Gemma3Config(**SMALL, head_width=12, window=9, sliding_window_pattern=2),
    "olmo2": Olmo2Config(**SMALL),
    "smollm3": SmolLM3Config(**SMALL, no_rope_layer_interval=2),
    "bloom": BloomConfig(layers=3, hidden=32, heads=4, vocab_size=96, max_positions=24),
    "gpt": GPT,
    "gpt-banded": GPTConfig(layers=3, hidden=32, heads=4, ffn_hidden=64, vocab_size=96, max_positions=24, banded_window=5),
    "gpt1": GPT1Config(layers=3, hidden=32, heads=4, vocab_size=96, max_positions=24),
    "llama": LLAMA,
    "mistral": MistralConfig(
        layers=3, hidden=32, heads=4, kv_heads=2, head_width=12, ffn_hidden=48, vocab_size=96, max_positions=24, window=9
    ),
    "opt": OPTConfig(layers=3, hidden=32, heads=4, ffn_hidden=64, vocab_size=96, max_positions=24),
    "opt-projected": OPTConfig(
        layers=3, hidden=32, heads=4, ffn_hidden=64, vocab_size=96, max_positions=24, embed_width=24, pre_norm=False
    ),
}
FAMILIES = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def model_of(config) -> Stack:
    model = registry.build(config)
    initialize(model, config, seed=1)
    return model


def tokens_of(config, *shape: int) -> torch.Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(5))


@FAMILIES
def test_documents_do_not_attend_to_each_other(config):
    model, tokens = model_of(config), tokens_of(config, 1, 24)
    documents = (torch.arange(24) >= 9).int()[None]
    other = tokens.clone()
    other[:, :9] = (other[:, :9] + 1) % config.vocab_size
    torch.testing.assert_close(model(tokens, documents=documents)[:, 9:], model(other, documents=documents)[:, 9:])
    assert not torch.allclose(model(tokens)[:, 9:], model(other)[:, 9:])
    one = torch.zeros(1, 24, dtype=torch.int32)
    torch.testing.assert_close(model(tokens, documents=one), model(tokens))


def test_a_packed_document_equals_the_single_document():
    """Rotary position embeddings are relative, so under a document mask the start of a document does not matter."""
    model, tokens = model_of(LLAMA), tokens_of(LLAMA, 1, 24)
    packed = model(tokens, documents=(torch.arange(24) >= 9).int()[None])
    torch.testing.assert_close(packed[:, 9:], model(tokens[:, 9:]))


@FAMILIES
def test_stages_in_a_row_are_the_whole_model(config):
    whole, tokens = model_of(config), tokens_of(config, 2, 24)
    documents = (torch.arange(24) >= 9).int().expand(2, 24)
    targets = tokens.roll(-1, 1)
    x: torch.Tensor = tokens
    for stage, keep in enumerate([("0",), ("1",), ("2",)]):
        part = model_of(config)
        for key in set(part.blocks) - set(keep):
            del part.blocks[key]
        if stage > 0:
            part.embed = None
        if stage < 2:
            part.norm = part.head = None
        x = part(x, targets=targets, documents=documents)
    assert torch.equal(x, whole(tokens, targets=targets, documents=documents))


@FAMILIES
def test_loss_is_the_cross_entropy_of_the_logits(config):
    model, tokens = model_of(config), tokens_of(config, 2, 24)
    targets = tokens.roll(-1, 1)
    expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets=targets), expected)


def test_banded_layers_are_those_of_gpt_neo():
    """GPT-Neo's Hugging Face class alternates dense and banded layers; it has no query, key and value biases and does not scale scores."""
    window, config = 6, GPTConfig(layers=4, hidden=32, heads=4, ffn_hidden=64, vocab_size=96, max_positions=24, banded_window=6)
    model = model_of(config)
    stock = GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=96,
            max_position_embeddings=24,
            hidden_size=32,
            num_layers=4,
            attention_types=[[["global", "local"], 2]],
            num_heads=4,
            intermediate_size=64,
            window_size=window,
            layer_norm_epsilon=config.norm_eps,
        )
    ).eval()
    names = {
        "attn.attention.q_proj": "attention.query",
        "attn.attention.k_proj": "attention.key",
        "attn.attention.v_proj": "attention.value",
    }
    names |= {"attn.attention.out_proj": "attention.output", "ln_1": "attention_norm", "ln_2": "mlp_norm", "mlp.c_fc": "mlp.up"}
    names |= {"mlp.c_proj": "mlp.down", "wte": "embed.tokens", "wpe": "embed.positions", "ln_f": "norm", "h": "blocks"}
    ours = model.state_dict()
    with torch.no_grad():
        for theirs, parameter in stock.transformer.named_parameters():
            name = re.sub("|".join(rf"\b{re.escape(key)}\b" for key in names), lambda found: names[found[0]], theirs)
            value = ours[name] + 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(theirs)))
            ours[name].copy_(value)
            parameter.copy_(value / math.sqrt(config.head_dim) if name.endswith("query.weight") else value)
        tokens = tokens_of(config, 2, 24)
        dense = registry.build(replace(config, banded_window=None))
        dense.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(tokens), stock(tokens).logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(tokens)[:, :window], dense(tokens)[:, :window])
        assert not torch.allclose(model(tokens)[:, window:], dense(tokens)[:, window:], atol=1e-3)


@given(ranks=st.sampled_from([1, 2, 4]), groups=st.integers(1, 3), head_dim=st.sampled_from([2, 8]), bias=st.booleans())
@settings(deadline=None, max_examples=20)
def test_slices_of_the_plan_add_up_to_the_attention(ranks, groups, head_dim, bias):
    """Column slices of q, k and v with the row slice of the output are attention over fewer heads; their sum is the full attention."""
    kv_heads, hidden = 4, 16
    torch.manual_seed(0)
    whole = Attention(hidden, kv_heads * groups, kv_heads, head_dim, bias=bias)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, hidden)
    total = torch.zeros_like(x)
    for rank in range(ranks):
        part = Attention(hidden, kv_heads * groups, kv_heads, head_dim, bias=bias)
        for name, parameter in whole.named_parameters():
            dim = tensor_parallel_roles.splits(registry.family_of(GPT).tensor_parallel, f"blocks.0.attention.{name}").get("tensor")
            piece = parameter if dim is None else parameter.chunk(ranks, dim)[rank]
            module, leaf = name.split(".")
            setattr(part.get_submodule(module), leaf, torch.nn.Parameter(piece.detach().clone()))
        total += part(x)
        if bias and rank:
            total -= whole.output.bias
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-5)


@given(shift=st.integers(0, 50), first=st.integers(0, 30), second=st.integers(0, 30), half=st.integers(1, 16))
@settings(deadline=None, max_examples=50)
def test_rotary_products_depend_on_the_distance_only(shift, first, second, half):
    tables = Rotary(2 * half, 100, theta=10000.0)()
    torch.manual_seed(half)
    x = torch.randn(2, 1, 1, 2 * half).double().expand(2, 1, 100, 2 * half)
    q, k = rotate(x, tables)[:, 0]
    torch.testing.assert_close(q[first] @ k[second], q[first + shift] @ k[second + shift], rtol=1e-4, atol=1e-4)
    assert torch.equal(q[0], x[0, 0, 0])


def test_rotary_tables_stay_exact_in_a_bf16_model_and_come_back_from_meta():
    exact = model_of(LLAMA)
    bf16 = model_of(LLAMA).bfloat16()
    with torch.device("meta"):
        empty = registry.build(LLAMA)
    empty.to_empty(device="cpu")
    assigned = registry.build(LLAMA)
    assigned.rotary.to("meta")
    assigned.reset_buffers()
    for model in (bf16, empty, assigned):
        assert model.rotary.cos.dtype == torch.float32
        assert torch.equal(model.rotary.cos, exact.rotary.cos)
        assert torch.equal(model.rotary.sin, exact.rotary.sin)
    assert not [name for name in exact.state_dict() if "rotary" in name]


@FAMILIES
def test_bf16_model_is_near_the_fp32_model(config):
    tokens = tokens_of(config, 2, 24)
    exact, bf16 = model_of(config)(tokens), model_of(config).bfloat16()(tokens)
    assert bf16.dtype == torch.bfloat16
    torch.testing.assert_close(bf16.float(), exact, rtol=0.05, atol=0.01)


def test_initial_scores_of_gemma_4_are_those_of_other_families():
    """The class does not divide its scores by sqrt(head_dim): the norms of queries and keys do it."""
    config = configuration("gemma4", CASES["gemma4"].variants["shared"])
    model = registry.build(config)
    initialize(model, config, seed=1)
    for layer in range(3):
        attention = model.blocks[str(layer)].attention
        factor = (attention.query_norm.weight[0] * attention.key_norm.weight[0]).item()
        assert factor == pytest.approx(attention.head_dim**-0.5), layer
    assert torch.equal(model.blocks["5"].attention.query_norm.weight, model.blocks["1"].attention.query_norm.weight)
    assert all(block.layer_scalar.item() == 1 and not block.layer_scalar.requires_grad for block in model.blocks.values())


@FAMILIES
def test_initial_weights_follow_the_recipe(config):
    model = registry.build(config)
    state = torch.get_rng_state()
    initialize(model, config, seed=1)
    assert torch.equal(state, torch.get_rng_state()), "a separate generator is used"
    residual = config.init_std / math.sqrt(2 * config.layers)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            zero = name.endswith("bias") or config.family == "gemma3"  # whose norms multiply by 1 + weight
            assert (parameter == (0 if zero else 1)).all()
            continue
        if "activation" in name:
            curvature = torch.nn.functional.softplus(parameter) + (0.5 if name.endswith("alpha_n") else 0)
            assert curvature.tolist() == pytest.approx([0.8])
            continue
        scaled = config.family not in ("gpt1", "olmo2") and name.endswith(("attention.output.weight", "mlp.down.weight"))
        expected = residual if scaled else config.init_std
        if config.family == "gpt" and "positions" in name:
            expected = config.init_std / 2
        assert parameter.std().item() == pytest.approx(expected, rel=0.1), name
        assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel()), name


def test_a_norm_with_an_offset_is_the_norm_with_that_weight():
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    norm = OffsetRMSNorm(8, eps=1e-6)
    norm.load_state_dict({"weight": weight - 1})
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
    norm.bfloat16()
    with torch.no_grad():
        norm.weight.mul_(0.01)
    x = torch.randn(64, 8).bfloat16()
    expected = torch.nn.functional.rms_norm(x.float(), (8,), 1 + norm.weight.float(), 1e-6).bfloat16()
    assert torch.equal(norm(x), expected), "rounded once; in bf16, 1 + weight would be rounded too"
    rounded = torch.nn.functional.rms_norm(x, (8,), 1 + norm.weight, 1e-6)
    assert not torch.equal(rounded, expected), "the difference would show"


def test_xielu_is_the_integral_of_its_slope():
    """The slope is linear for x > 0 and exponential below; between EPS and 0 it is undefined, as in the authors' code."""
    activation = XIELU()
    with torch.no_grad():
        activation.alpha_p.fill_(0.3)
        activation.alpha_n.fill_(-0.7)
    x = torch.linspace(-4, 4, 4000, dtype=torch.float64).requires_grad_()
    curvature = torch.nn.functional.softplus(torch.tensor([0.3, -0.7], dtype=torch.float64)) + torch.tensor([0.0, 0.5])
    slope = torch.where(x > 0, 2 * curvature[0] * x, curvature[1] * torch.expm1(x)) + 0.5
    (found,) = torch.autograd.grad(activation.double()(x).sum(), x)
    torch.testing.assert_close(found, slope, rtol=1e-5, atol=2e-6)
    assert activation(torch.zeros(1, dtype=torch.float64)).item() == pytest.approx(0, abs=1e-5)


def test_each_layer_uses_the_rotary_tables_of_its_kind():
    """Scores of a layer without positions, and of local layers, do not depend on the tables of the global layers."""
    torch.manual_seed(0)
    x, shift = torch.randn(1, 6, 16), torch.arange(6)[None] * 3
    tables, local = Rotary(4, 32, 100.0), Rotary(4, 32, 10.0)
    for rope, reads in (("global", {"rotary"}), ("local", {"local_rotary"}), ("none", set())):
        layer = Attention(16, 4, 4, 4, bias=False, rope=rope)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        outputs = {
            changed: layer(x, context=AttentionContext(rotary=first, local_rotary=second))
            for changed, first, second in (
                ("nothing", tables(), local()),
                ("rotary", tables(shift), local()),
                ("local_rotary", tables(), local(shift)),
            )
        }
        assert {name for name in ("rotary", "local_rotary") if not torch.equal(outputs[name], outputs["nothing"])} == reads


def test_an_initial_weight_depends_on_seed_and_name_only():
    one = initial_tensor("blocks.0.mlp.up.weight", (8, 4), 0.02, seed=3)
    assert torch.equal(one, initial_tensor("blocks.0.mlp.up.weight", (8, 4), 0.02, seed=3))
    assert not torch.equal(one, initial_tensor("blocks.1.mlp.up.weight", (8, 4), 0.02, seed=3))
    assert not torch.equal(one, initial_tensor("blocks.0.mlp.up.weight", (8, 4), 0.02, seed=4))
    with torch.device("meta"):
        assert torch.equal(one, initial_tensor("blocks.0.mlp.up.weight", (8, 4), 0.02, seed=3))


@FAMILIES
def test_a_tied_head_is_the_embedding(config):
    for tied in (False, True):
        config = type(config)(**{**vars(config), "tie_embeddings": tied})
        model = model_of(config)
        assert (model.head.weight is model.embed.tokens.weight) == tied
        assert ("head.weight" in dict(model.named_parameters())) == (not tied)
