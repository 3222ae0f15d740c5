"""The matrix of families and layouts: training on four ranks equals a plain loop in a single process.

tools/numerics covers more layouts, with one kind of batch for each objective. The batches here are those that a layout can get
wrong: documents and masks, padding, targets at few positions, pairs of sequences, experts with uneven load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pipeline.layers.loss import IGNORE
from tests.training.plain_loop import STATISTICS, Trained, plain_loop
from tests.world import causal, configured, share, tiny, trainer, unsharded

Batch = tuple[torch.Tensor, dict[str, torch.Tensor]]


def packed(config: Any, step: int) -> Batch:
    """Packed documents: one ends after about every ninth token."""
    chance = torch.Generator().manual_seed(step)
    shape = (config.training.global_batch_size, config.training.sequence_length)
    tokens = torch.randint(config.model.vocab_size, (shape[0], shape[1] + 1), generator=chance)
    return causal(tokens, (torch.rand(shape, generator=chance) < 0.11).int().cumsum(1, dtype=torch.int32))


def some_targets(config: Any, step: int) -> Batch:
    """Padding and uneven numbers of targets, so that the mean of the micro-batches' means would differ."""
    generator = torch.Generator().manual_seed(step)
    shape = (config.training.global_batch_size, config.training.sequence_length)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    lengths = torch.arange(shape[0]) * 7 % 6 + 3
    padding = torch.arange(shape[1]) >= lengths[:, None]
    chosen = torch.rand(shape, generator=generator) < torch.linspace(0.1, 0.9, shape[0])[:, None]
    batch = {"targets": torch.where(chosen & ~padding, tokens, IGNORE), "documents": torch.where(padding, -1, 0).int()}
    if getattr(config.model, "next_sentence", False):
        batch["segments"] = (torch.arange(shape[1]) >= lengths[:, None] // 2).long()
        batch["next_sentence"] = torch.randint(2, shape[:1], generator=generator)
    return tokens, batch


def pairs(config: Any, step: int) -> Batch:
    """Pairs of up to 12 and 8 tokens, padded."""
    generator = torch.Generator().manual_seed(step)
    rows = config.training.global_batch_size
    tokens, text = torch.randint(67, (rows, 12), generator=generator), torch.randint(67, (rows, 9), generator=generator)
    lengths = torch.randint(3, 13, (rows, 1), generator=generator), torch.randint(1, 9, (rows, 1), generator=generator)
    documents = torch.where(torch.arange(12) < lengths[0], 0, -1).int()
    targets = torch.where(torch.arange(8) < lengths[1], text[:, 1:], IGNORE)
    return tokens, {"decoder_tokens": text[:, :-1].contiguous(), "targets": targets, "documents": documents}


def text(config: Any, step: int) -> Batch:
    """Random tokens without documents."""
    shape = (config.training.global_batch_size, config.training.sequence_length + 1)
    return causal(torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(step)))


@dataclass(frozen=True)
class Model:
    """A tiny model and its training.

    Attributes:
        overrides: its settings.
        batch: (configuration, step) -> the global batch.
        own_loss: its loss is not only the cross-entropy of its logits.
        compared: what must equal the plain loop at the end, beside losses, gradient norms and statistics.
    """

    overrides: tuple[str, ...]
    batch: Callable[[Any, int], Batch] = text
    own_loss: bool = True
    compared: tuple[str, ...] = ("weights", "moments")


STEPS = 3


EPS = "optimizer.eps=1e-5"  # Adam turns the rounding error of a gradient near zero into a step of full size
CLIPPED = ("optimizer.gradient_clipping=0.5", EPS)
LONG = ("training.sequence_length=32", "model.max_positions=32", "training.global_batch_size=8", "training.document_mask=true")
DECODER = (*CLIPPED, *LONG, "training.steps=3", "model.layers=4", "optimizer.lr=0.001", "optimizer.warmup_steps=1")
FEW = "training.micro_batch_size=4"  # fewer micro-batches, since every collective of a test costs milliseconds
FOUR = (EPS, FEW, "model.layers=4", "model.ffn_hidden=64")
PAIRS = (FEW, "model.ffn_hidden=64", "training.sequence_length=12")
EXPERTS = (*CLIPPED, "model.ffn_hidden=24", "training.steps=3")
LATENT = ("model.q_lora_rank=12", "model.kv_lora_rank=12", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4", "model.v_head_dim=8")
MIXTRAL = ("model=mixtral-tiny", "model.layers=2", "model.kv_heads=2", "model.z_loss=0.05", "model.balance_loss=0.1", *EXPERTS)

MODELS = {
    "gpt": Model(("model=gpt-tiny", "model.ffn_hidden=48", *DECODER), packed, own_loss=False),
    "llama": Model(("model=llama-tiny", "model.kv_heads=4", "model.ffn_hidden=48", *DECODER), packed, own_loss=False),
    "bloom": Model(("model=bloom-tiny", *DECODER), packed, own_loss=False),
    "mistral": Model(
        ("model=mistral-tiny", "model.kv_heads=2", "model.window=11", "model.ffn_hidden=48", *DECODER), packed, own_loss=False
    ),
    "apertus": Model(("model=apertus-tiny", "model.kv_heads=4", "model.ffn_hidden=48", *DECODER), packed, own_loss=False),
    "gemma3": Model(
        (
            *("model=gemma3-tiny", "model.kv_heads=4", "model.head_width=8", "model.window=11", "model.rope_local_theta=100"),
            *("model.ffn_hidden=48", *DECODER),
        ),
        packed,
        own_loss=False,
    ),
    "olmo2": Model(("model=olmo2-tiny", "model.kv_heads=4", "model.ffn_hidden=48", *DECODER), packed, own_loss=False),
    "qwen2.5": Model(("model=qwen2.5-tiny", "model.kv_heads=4", "model.ffn_hidden=48", *DECODER), packed, own_loss=False),
    "smollm3": Model(("model=smollm3-tiny", "model.kv_heads=4", "model.ffn_hidden=48", *DECODER), packed, own_loss=False),
    "bert": Model(("model=bert-tiny", *FOUR), some_targets, compared=("moments",)),
    "roberta": Model(("model=roberta-tiny", *FOUR), some_targets, compared=("moments",)),
    # Best-fit packing pads; padding is not a target of a causal model either.
    "llama-padded": Model(("model=llama-tiny", "data.packing=best_fit", *FOUR), some_targets, compared=("moments",)),
    "t5": Model(("model=t5-tiny", "model.head_width=16", *PAIRS), pairs, compared=()),
    "t5-1.1": Model(("model=t5-tiny", "model.head_width=8", "model.gated=true", "model.tie_embeddings=false", *PAIRS), pairs, compared=()),
    # Three encoder blocks and two decoder blocks.
    "transformer": Model(
        ("model=transformer-tiny", "model.layers=5", "model.encoder_layers=3", "data.pairs.train=[unread.tsv]", *PAIRS), pairs, compared=()
    ),
    "mixtral": Model(MIXTRAL, compared=("weights",)),
    "mixtral-4": Model((*MIXTRAL, "model.layers=4"), compared=("weights",)),
    "deepseek": Model(
        (
            *("model=deepseek-tiny", "model.layers=2", "model.expert_ffn_hidden=12", "model.balance_loss=0.1"),
            *("model.bias_update_speed=0.01", *LATENT, *EXPERTS),
        ),
        compared=("weights",),
    ),
    # Dense layers first, groups of experts, and two further tokens.
    "deepseek-grouped": Model(
        (
            *("model=deepseek-tiny", "model.layers=4", "model.dense_layers=1", "model.ffn_hidden=48", "model.experts=4", "model.top_k=2"),
            *("model.expert_ffn_hidden=16", "model.groups=2", "model.topk_group=1", "model.mtp_depth=2", "model.init_std=0.1"),
            *("model.balance_loss=0.05", "model.q_lora_rank=12", "model.kv_lora_rank=8", "model.qk_nope_head_dim=8", EPS),
            *("model.qk_rope_head_dim=4", "model.v_head_dim=6", "training.global_batch_size=8"),
        ),
        compared=(),
    ),
}

#: Model -> its layouts, as settings of parallel, or of training where they name it.
LAYOUTS = {
    # Both kinds of context parallelism with every other axis and every ZeRO stage.
    "gpt": [
        # The document mask reaches every stage.
        "zero_stage=1 tensor=2 pipeline=2",
        "zero_stage=0 pipeline=4",
        "context=4 context_kind=ring zero_stage=0",
        "context=4 context_kind=ulysses zero_stage=3",
        "context=2 context_kind=ring tensor=2 zero_stage=1",
        "context=2 context_kind=ulysses tensor=2 zero_stage=0 sequence_parallel=false",
        "context=2 context_kind=ring pipeline=2 zero_stage=2",
        "context=2 context_kind=ulysses pipeline=2 zero_stage=0 schedule=zbv",
        "context=2 context_kind=ring zero_stage=3",
        "context=2 context_kind=ring tensor=2 zero_stage=2 training.activation_checkpointing=full",
        "context=4 context_kind=ring zero_stage=1 training.activation_checkpointing=selective",
    ],
    # Rotary positions, ALiBi and sliding windows with context parallelism and sharded heads.
    "llama": [
        "context=4 context_kind=ring zero_stage=0",
        "context=2 context_kind=ring tensor=2 zero_stage=2 training.activation_checkpointing=full",
    ],
    "bloom": ["context=2 context_kind=ring tensor=2 zero_stage=1"],
    "mistral": ["context=2 context_kind=ring tensor=2 zero_stage=1"],
    # Weights that are used on each rank's own heads or hidden units.
    "apertus": ["tensor=2 pipeline=2 zero_stage=1"],
    # Two rotary bases on every stage, and norms after the layers; with the ring, windows in some layers only.
    "gemma3": ["tensor=2 pipeline=2 zero_stage=1", "context=2 context_kind=ring zero_stage=3"],
    # The norm over the heads of all tensor ranks, with a split backward pass, and recomputed with weights that ZeRO 3 gathers.
    "olmo2": ["tensor=2 pipeline=2 zero_stage=0 schedule=zbv", "tensor=2 zero_stage=3 training.activation_checkpointing=selective"],
    "qwen2.5": ["tensor=2 pipeline=2 zero_stage=1"],
    "smollm3": ["context=2 context_kind=ulysses pipeline=2 zero_stage=1"],
    "bert": [
        "zero_stage=0",
        "zero_stage=1 tensor=2 pipeline=2",
        "zero_stage=0 tensor=4",
        "zero_stage=2 tensor=2 sequence_parallel=false",
        "zero_stage=0 pipeline=2 schedule=zbv training.micro_batch_size=2",
    ],
    "roberta": ["zero_stage=1 tensor=2 pipeline=2", "zero_stage=3"],
    "llama-padded": [
        "zero_stage=1 tensor=2 pipeline=2",
        "zero_stage=2 tensor=2 context=2",
        "zero_stage=0 pipeline=2 schedule=zbv training.micro_batch_size=2",
    ],
    "t5": [
        "zero_stage=0",
        "tensor=2 pipeline=2",
        "pipeline=4 zero_stage=0 training.activation_checkpointing=full",
        "tensor=4 sequence_parallel=false training.activation_checkpointing=selective",
        "pipeline=2 schedule=interleaved zero_stage=2",
        "pipeline=2 schedule=zbv tensor=2",
        "zero_stage=3 pipeline=2",
    ],
    "t5-1.1": ["zero_stage=0", "zero_stage=3 tensor=2"],
    "transformer": ["zero_stage=0", "tensor=2 pipeline=2", "pipeline=2 schedule=zbv zero_stage=3 training.micro_batch_size=2"],
    "mixtral": [
        "expert=2 zero_stage=0",
        "expert=2 zero_stage=2 training.activation_checkpointing=selective",
        "expert=2 zero_stage=3",
        "expert=4 zero_stage=1 training.activation_checkpointing=full",
        "expert=2 tensor=2 zero_stage=1",
        "expert=2 tensor=2 zero_stage=0 sequence_parallel=false",
        "expert=2 pipeline=2 zero_stage=3",
    ],
    "mixtral-4": ["expert=2 pipeline=2 zero_stage=2 schedule=zbv"],
    "deepseek": [
        "expert=2 tensor=2 zero_stage=1",
        "expert=2 pipeline=2 zero_stage=3",
        "expert=4 zero_stage=0 training.activation_checkpointing=full",
    ],
    "deepseek-grouped": [
        "zero_stage=1 tensor=2 pipeline=2",
        "zero_stage=0 tensor=2 expert=2",
        "zero_stage=0 tensor=2 pipeline=2 sequence_parallel=false",
        "zero_stage=2 pipeline=2 expert=2",
        "zero_stage=3 expert=2",
    ],
}


def train(name: str, layout: str) -> Trained:
    """Train a model in a layout of the world. Rank 0 returns all weights and moments, the others the biases of their routers."""
    model = MODELS[name]
    words = [word if word.startswith("training.") else f"parallel.{word}" for word in layout.split()]
    config, mine = trainer(*tiny(*model.overrides, *words))
    numbers, validated = [], []
    for step in range(STEPS):
        tokens, batch = model.batch(config, step)
        tokens, *values = share(mine, tokens, *batch.values())
        batch = dict(zip(batch, values, strict=True))
        if not hasattr(config.model, "experts"):  # in training their loss has more terms
            validated.append(float(mine.evaluate(tokens, batch)[0]))
        loss, result = mine.train(tokens, batch)
        numbers.append((float(loss), float(result.gradient_norm), *(float(result.more[key]) for key in STATISTICS if key in result.more)))
    weights, moments = unsharded(mine), unsharded(mine, "exp_avg")
    if mine.mesh.rank == 0:
        return Trained(numbers, validated, weights, moments)
    return Trained(numbers, validated, {piece.name: value for value, piece in mine.model.fixed.items()}, {})


@functools.cache
def reference(name: str) -> Trained:
    """The same in a plain loop."""
    model = MODELS[name]
    config = configured(*tiny(*model.overrides))
    return plain_loop(config, [model.batch(config, step) for step in range(STEPS)], own_loss=model.own_loss)


@pytest.mark.parametrize("name, layout", [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts])
def test_four_ranks_equal_a_plain_loop(world, name, layout):
    model, expected = MODELS[name], reference(name)
    ranks = world.run(train, name, layout)
    for found in ranks:
        ours, theirs = torch.tensor(found.numbers), torch.tensor(expected.numbers)
        torch.testing.assert_close(ours[:, :2], theirs[:, :2], rtol=1e-5, atol=0)
        torch.testing.assert_close(ours[:, 2:], theirs[:, 2:], rtol=1e-5, atol=1e-6)
        assert found.validated == pytest.approx(expected.validated, rel=1e-5)
        for weight, value in found.weights.items():
            if weight.endswith("router.bias"):  # on every rank
                torch.testing.assert_close(value, expected.weights[weight], rtol=0, atol=1e-7)
    assert ranks[0].weights.keys() == expected.weights.keys()
    # Softmax is invariant to the biases of keys, so their gradients are rounding errors.
    names = [name for name in expected.weights if not name.endswith("attention.key.bias")]
    for weight in names if "weights" in model.compared else ():
        gap = (ranks[0].weights[weight] - expected.weights[weight]).norm() / expected.weights[weight].norm()
        assert gap < 1e-5, f"{weight}: {gap}"
    found = ranks[0].moments
    for weight in names if "moments" in model.compared else ():
        if weight in expected.moments:  # a wrongly scaled gradient changes them, but not the steps of Adam
            sums = [
                torch.stack([m.double().sum(), m.double().square().sum()]) for m in (ranks[0].moments[weight], expected.moments[weight])
            ]
            torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-7, msg=lambda m, weight=weight: f"{weight}: {m}")


def test_the_references_exercise_what_they_should():
    """Document masks change the loss, gradients are clipped, losses of the routers count, and their biases move."""
    config, gpt = configured(*tiny(*MODELS["gpt"].overrides)), reference("gpt")
    unmasked = [(tokens, {"targets": batch["targets"]}) for tokens, batch in (packed(config, step) for step in range(3))]
    assert plain_loop(config, unmasked, own_loss=False).numbers[0][0] != pytest.approx(gpt.numbers[0][0], rel=1e-5), (
        "the mask changes the loss"
    )
    mixtral, deepseek, grouped = reference("mixtral"), reference("deepseek"), reference("deepseek-grouped")
    assert max(norm for _, norm, *_ in mixtral.numbers) > 0.5, "clipping is active"
    assert all(aux > 0.2 for *_, aux in mixtral.numbers), "two layers, each at least 0.1"
    biases = [weight for name, weight in deepseek.weights.items() if name.endswith("router.bias")]
    assert len(biases) == 2, "of a block and of the prediction of a second token"
    assert all(0.01 - 1e-6 <= bias.abs().max() <= 0.03 + 1e-6 for bias in biases), "three steps of 0.01"
    assert any(weight.any() for name, weight in grouped.weights.items() if name.endswith("router.bias"))
