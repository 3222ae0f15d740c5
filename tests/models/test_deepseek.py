"""DeepSeek-V3: latent attention and multi-token prediction. Its layouts: tests/training/test_layouts.py."""

from dataclasses import replace

import pytest
import torch

from pipeline.certification.reference import initialize
from pipeline.layers.attention import AttentionContext, plain
from pipeline.layers.loss import IGNORE
from pipeline.layers.mla import LatentAttention, deinterleave
from pipeline.layers.multi_token import shift_labels
from pipeline.layers.rotary import Rotary
from pipeline.models import registry
from pipeline.models.families.deepseek_v3 import DeepseekV3Config
from tests.world import configured

SIZES = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "dense_layers": 1,
    "ffn_hidden": 48,
    "experts": 4,
    "expert_ffn_hidden": 16,
    "top_k": 2,
    "groups": 2,
    "topk_group": 1,
    "mtp_depth": 2,
    "vocab_size": 67,
    "max_positions": 16,
    "init_std": 0.1,
}
CONFIG = DeepseekV3Config(**SIZES)


def model_of(config):
    model = registry.build(config)
    model.set_loss_weights({**config.loss_weights, "balance_loss": 0.05})
    initialize(model, config, seed=1)
    return model


def tokens_of(*shape):
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(5))


def test_interleaved_pairs_become_half_split():
    assert deinterleave(torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]


def test_latent_attention_depends_on_relative_positions_only():
    torch.manual_seed(0)
    layer = LatentAttention(32, 4, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
    layer.core = plain
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, rotary = torch.randn(2, 7, 32), Rotary(4, 32, 100.0)
    positions = torch.arange(7).expand(2, 7)
    here, there = (layer(x, context=AttentionContext(rotary=rotary(positions + shift))) for shift in (0, 9))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(here, layer(x), atol=1e-2), "positions do matter"


def test_shifted_labels():
    labels = torch.tensor([[1, 2, 3, 4], [5, IGNORE, 7, 8]])
    assert shift_labels(labels).tolist() == [[2, 3, 4, IGNORE], [IGNORE, IGNORE, 8, IGNORE]]
    assert shift_labels(shift_labels(labels)).tolist() == [[3, 4, IGNORE, IGNORE], [IGNORE, IGNORE, IGNORE, IGNORE]]


def test_the_loss_is_that_of_the_next_token_plus_the_mean_mtp_loss():
    """Equations 21 to 25, with unfused cross-entropies."""
    model, text = model_of(CONFIG), tokens_of(2, 12)
    tokens, targets = text[:, :-1], text[:, 1:]
    found: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda *call: found.append(call[2]))
    logits = model(tokens)
    hidden = found[0]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    context = model.attention_context({})
    losses = []
    for number, depth in enumerate(model.head.depths, 1):
        embedded = model.embed(torch.cat([text[:, number:-1], torch.zeros(2, number, dtype=torch.int64)], dim=1))
        joined = torch.cat([depth.token_norm(embedded), depth.hidden_norm(hidden)], dim=2) @ depth.project.weight.T
        hidden = depth.final_norm(depth.block(joined, context))
        mtp_logits = (hidden @ model.head.output.weight.T)[:, : 11 - number]
        losses.append(torch.nn.functional.cross_entropy(mtp_logits.flatten(0, 1), text[:, number + 1 :].flatten()))
    expected = expected + CONFIG.loss_weights["mtp_loss"] * sum(losses) / 2
    torch.testing.assert_close(model(tokens, targets=targets), expected)
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens, targets=targets), torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )


def test_mtp_modules_share_embedding_and_head():
    model = model_of(CONFIG)
    model(tokens_of(2, 8), targets=tokens_of(2, 8)).backward()
    names = dict(model.named_parameters())
    assert not [name for name in names if name.startswith("head.embed")]
    assert model.head.embed.tokens.weight is model.embed.tokens.weight
    assert all(parameter.grad is not None for parameter in names.values() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"qk_rope_head_dim": 3}, ["model.qk_rope_head_dim"]),
        ({"dense_layers": 5}, ["model.dense_layers"]),
        ({"groups": 3, "topk_group": 3}, ["model.groups"]),
        ({"groups": 4, "topk_group": 2}, ["model.groups"]),
        ({"topk_group": 3}, ["model.topk_group"]),
        ({"top_k": 3}, ["model.top_k"]),
    ],
)
def test_sizes_that_contradict_each_other(changes, keys):
    assert [violation.key for violation in replace(CONFIG, **changes).violations()] == keys


TINY = ("stage=pretrain", "model=deepseek-tiny", *(f"model.{key}={value}" for key, value in SIZES.items()), "training.sequence_length=8")


def test_cut_sequences_and_further_tokens_exclude_each_other():
    from pipeline.config.rules import check

    config = configured(*TINY, "parallel.context=2")
    assert "parallel.context" in [violation.key for violation in check.violations(config, 2)]
    config = configured(*TINY, "parallel.context=2", "model.mtp_depth=0")
    assert "model.mtp_depth" not in str(check.violations(config, 2))
