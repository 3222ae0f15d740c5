"""Encoder-decoders: equal to the Hugging Face classes, as a full model and in pipeline stages; padding changes nothing."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM
from transformers.models.t5.modeling_t5 import T5Attention

from pipeline.layers.attention import Attention, plain
from pipeline.layers.loss import IGNORE
from pipeline.layers.position_bias import RelativeBias
from pipeline.models import registry
from pipeline.models.families.t5 import T5Config
from pipeline.models.families.transformer import TransformerConfig
from pipeline.planner.flops import flops_per_token
from tests.conversion.test_huggingface_export import export, random_model, tokenizer_folder  # noqa: F401 - a fixture

SIZES = {"hidden": 48, "heads": 4, "ffn_hidden": 96, "vocab_size": 300, "max_positions": 200}
CONFIGS = {
    "t5": T5Config(**SIZES, layers=4, head_width=8),
    "t5-1.1": T5Config(**SIZES, layers=5, encoder_layers=3, head_width=16, gated=True, tie_embeddings=False, buckets=16, max_distance=40),
    "transformer": TransformerConfig(**SIZES, layers=5),
}
EVERY = pytest.mark.parametrize("name", CONFIGS)


def tokens_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], longest: int) -> torch.Tensor:
    """Return the documents of sequences with padding at the end."""
    return torch.where(torch.arange(longest) < torch.tensor(lengths)[:, None], 0, -1).int()


@EVERY
def test_logits_are_those_of_the_stock_class(name, tmp_path: Path, tokenizer_folder: Path):  # noqa: F811 - the fixture
    config = CONFIGS[name]
    model = random_model(config)
    stock, report = AutoModelForSeq2SeqLM.from_pretrained(export(tmp_path, model, config, tokenizer_folder), output_loading_info=True)
    assert not any(report.values())
    model, stock = model.double(), stock.double().eval()
    tokens, decoder_tokens, documents = tokens_of(1, 3, 150), tokens_of(2, 3, 90), padded([150, 1, 77], 150)
    with torch.no_grad():
        for seen in (None, documents):
            given = {} if seen is None else {"documents": seen}
            ours = model(tokens, decoder_tokens=decoder_tokens, **given)
            mask = None if seen is None else (seen >= 0).long()
            theirs = stock(input_ids=tokens, attention_mask=mask, decoder_input_ids=decoder_tokens).logits
            assert ours.std() > 0.1, "differences would not show"
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@EVERY
def test_stages_in_a_row_are_the_whole_model(name):
    config = CONFIGS[name]
    whole, tokens, decoder_tokens = random_model(config), tokens_of(1, 2, 12), tokens_of(2, 2, 8)
    batch = {"decoder_tokens": decoder_tokens, "targets": tokens_of(3, 2, 8), "documents": padded([12, 5], 12)}
    state = (tokens,)
    for stage in range(config.layers):
        part = random_model(config)
        for index in range(config.layers):
            if index != stage:
                del part.blocks[str(index)]
        if stage > 0:
            part.embed = None
        if stage < config.layers - 1:
            part.norm = part.head = None
        given = state
        state = part(*state, **batch)
        if isinstance(state, tuple):
            assert not {id(x) for x in state} & {id(x) for x in given}, "schedules detach a stage's outputs in place"
    assert torch.equal(state, whole(tokens, **batch))


@EVERY
def test_padding_affects_neither_states_nor_loss(name):
    config = CONFIGS[name]
    model, tokens, decoder_tokens, targets = random_model(config), tokens_of(1, 1, 9), tokens_of(2, 1, 7), tokens_of(3, 1, 7)
    alone = model(tokens, decoder_tokens=decoder_tokens, targets=targets)
    longer = model(
        torch.nn.functional.pad(tokens, (0, 5), value=7),
        decoder_tokens=torch.nn.functional.pad(decoder_tokens, (0, 3), value=7),
        targets=torch.nn.functional.pad(targets, (0, 3), value=IGNORE),
        documents=padded([9], 14),
    )
    torch.testing.assert_close(longer, alone)


@EVERY
def test_the_decoder_is_causal_and_attends_to_the_full_source(name):
    model, tokens, decoder_tokens = random_model(CONFIGS[name]), tokens_of(1, 1, 9), tokens_of(2, 1, 7)
    before = model(tokens, decoder_tokens=decoder_tokens)
    decoder_tokens[0, 4] += 1
    after = model(tokens, decoder_tokens=decoder_tokens)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])
    tokens[0, 8] += 1
    assert not torch.allclose(after[:, 0], model(tokens, decoder_tokens=decoder_tokens)[:, 0])


@given(buckets=st.sampled_from([8, 16, 32]), distance=st.integers(20, 300), causal=st.booleans())
@settings(deadline=None, max_examples=30)
def test_buckets_are_those_of_the_stock_class(buckets, distance, causal):
    offsets = torch.arange(-400, 401)
    ours = RelativeBias(1, buckets, distance, causal=causal).buckets(offsets)
    theirs = T5Attention._relative_position_bucket(offsets, bidirectional=not causal, num_buckets=buckets, max_distance=distance)
    assert torch.equal(ours, theirs)


@EVERY
def test_operations_are_those_that_torch_counts(name):
    model = random_model(CONFIGS[name])
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = plain  # FlopCounterMode does not count flash attention on a CPU
    with FlopCounterMode(display=False) as counter:
        model(tokens_of(1, 1, 40), decoder_tokens=tokens_of(2, 1, 10))
    assert flops_per_token(CONFIGS[name], 40, 10) == pytest.approx(3 * counter.get_total_flops() / 40)


def test_initial_weights_follow_the_recipes():
    """Standard deviations of t5-small and transformer-base as published, as numbers instead of formulas."""
    published = {
        "t5": {
            "embed.tokens": 1.0,
            "blocks.0.attention.query": 0.00552,  # 1 / sqrt(512 * 64)
            "blocks.0.attention.output": 0.0442,  # 1 / sqrt(8 * 64)
            "blocks.7.cross.key": 0.0442,
            "blocks.0.mlp.up": 0.0442,
            "blocks.0.mlp.down": 0.0221,  # 1 / sqrt(2048)
            "decoder_bias": 0.0442,
        },
        "transformer": {"embed.tokens": 0.0442, "blocks.7.cross.value": 0.0442, "blocks.0.mlp.up": 0.02795},
    }
    for config in (T5Config(), TransformerConfig()):
        for name, std in published[config.family].items():
            assert registry.family_of(config).initial_std(config, f"{name}.weight") == pytest.approx(std, rel=2e-3), name
