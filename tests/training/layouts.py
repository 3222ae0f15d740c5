"""The matrix of models and layouts that test_layouts.py trains, and the part of it that the default tier trains.

Plain decoders stand in tools/audit/family_cases.py. tools/numerics covers more layouts, with one kind of batch for each objective. The
batches here are those that a layout can get wrong: documents and masks, padding, targets at few positions, pairs of sequences, experts
with uneven load.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pipeline.layers.loss import IGNORE
from tests.training.expected import Batch
from tests.world import causal
from tools.audit.family_cases import FAMILIES


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


def packed_masked(config: Any, step: int) -> Batch:
    """Packed documents, with targets at few positions."""
    tokens, batch = some_targets(config, step)
    generator = torch.Generator().manual_seed(100 + step)
    documents = (torch.rand(tokens.shape, generator=generator) < 0.15).int().cumsum(1, dtype=torch.int32)
    return tokens, {**batch, "documents": torch.where(batch["documents"] < 0, -1, documents)}


def diffusion(config: Any, step: int) -> Batch:
    """Padding, and another masking rate in each sequence, whose inverse is the weight of its positions."""
    tokens, batch = some_targets(config, step)
    rates = torch.linspace(0.1, 0.9, len(tokens))[:, None]
    return tokens, {**batch, "loss_weights": torch.where(batch["documents"] >= 0, 1 / rates, 0.0)}


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
        compared: what must equal the plain loop at the end, beside losses, gradient norms and statistics.
    """

    overrides: tuple[str, ...]
    batch: Callable[[Any, int], Batch] = text
    compared: tuple[str, ...] = ("weights", "moments")


STEPS = 3


AVERAGED = "training.ema=0.6"
EPS = "optimizer.eps=1e-5"  # Adam turns the rounding error of a gradient near zero into a step of full size
CLIPPED = ("optimizer.gradient_clipping=0.5", EPS)
LONG = ("training.sequence_length=32", "model.max_positions=32", "training.global_batch_size=8", "training.document_mask=true")
DECODER = (*CLIPPED, *LONG, AVERAGED, "training.steps=3", "model.layers=4", "optimizer.lr=0.001", "optimizer.warmup_steps=1")
Z_LOSS = "training.head_z_loss=0.05"
FEW = "training.micro_batch_size=4"  # fewer micro-batches, since every collective of a test costs milliseconds
FOUR = (EPS, FEW, "model.layers=4", "model.ffn_hidden=64")
PAIRS = (FEW, "model.ffn_hidden=64", "training.sequence_length=12")
HALF = "training.global_batch_size=8"
EXPERTS = (*CLIPPED, AVERAGED, "model.ffn_hidden=24", "training.steps=3")
LATENT = ("model.q_lora_rank=12", "model.kv_lora_rank=12", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4", "model.v_head_dim=8")
MIXTRAL = (
    *("model=mixtral-tiny", "model.layers=2", "model.kv_heads=2", "training.z_loss=0.05", "training.balance_loss=0.1"),
    *("training.balance_loss_schedule=[{until_step:1,value:0.3}]", HALF, *EXPERTS),
)
# Linear and full attention, and a shared expert with a gate.
QWEN3_NEXT = (
    *("model=qwen3-next-tiny", "model.layers=2", "model.kv_heads=2", "model.head_width=8", "model.expert_ffn_hidden=24"),
    *("model.shared_ffn_hidden=20", "model.full_attention_interval=2", "model.linear_key_heads=2", "model.linear_value_heads=4"),
    *("model.linear_key_dim=6", "model.linear_value_dim=10", "training.balance_loss=0.1", HALF, *EXPERTS),
)

MODELS = {
    "gpt": Model(("model=gpt-tiny", "model.ffn_hidden=48", *DECODER), packed),
    "llama": Model(("model=llama-tiny", "model.kv_heads=4", "model.ffn_hidden=48", *DECODER), packed),
    # Norms and biases that SmolLM3 has not: no stock class computes this.
    "llama-nope": Model(
        (
            *("model=qwen3-tiny", "model.kv_heads=4", "model.head_width=8", "model.no_rope_layer_interval=2", "model.ffn_hidden=48"),
            *DECODER,
        ),
        packed,
    ),
    "bloom": Model(("model=bloom-tiny", *DECODER), packed),
    "qwen2.5": Model(("model=qwen2.5-tiny", "model.kv_heads=4", "model.ffn_hidden=48", Z_LOSS, *DECODER), packed),
    "bert": Model(("model=bert-tiny", *FOUR), some_targets, compared=("moments",)),
    "roberta": Model(("model=roberta-tiny", *FOUR), some_targets, compared=("moments",)),
    "bert-diffusion": Model(
        ("model=bert-tiny", "model.next_sentence=false", "training.objective=masked_diffusion", *FOUR), diffusion, compared=("moments",)
    ),
    # Windows on both sides, within packed documents, and two rotary bases.
    "modernbert": Model(
        (
            *("model=modernbert-tiny", "model.local_attention=6", "model.rope_local_theta=100", "training.document_mask=true"),
            *("model.global_attn_every_n_layers=2", *FOUR),
        ),
        packed_masked,
        compared=("moments",),
    ),
    "modernbert-diffusion": Model(
        ("model=modernbert-tiny", "model.local_attention=6", "training.objective=masked_diffusion", *FOUR), diffusion, compared=("moments",)
    ),
    # Best-fit packing pads; padding is not a target of a causal model either.
    "llama-padded": Model(("model=llama-tiny", "data.packing=best_fit", Z_LOSS, *FOUR), some_targets, compared=("moments",)),
    "t5": Model(("model=t5-tiny", "model.head_width=16", *PAIRS), pairs, compared=()),
    "t5-1.1": Model(("model=t5-tiny", "model.head_width=8", "model.gated=true", "model.tie_embeddings=false", *PAIRS), pairs, compared=()),
    # Three encoder blocks and two decoder blocks.
    "transformer": Model(
        ("model=transformer-tiny", "model.layers=5", "model.encoder_layers=3", "data.pairs.train=[unread.tsv]", Z_LOSS, *PAIRS),
        pairs,
        compared=(),
    ),
    "mixtral": Model(MIXTRAL, compared=("weights",)),
    "mixtral-4": Model((*MIXTRAL, "model.layers=4", "training.global_batch_size=16"), compared=("weights",)),
    "mixtral-documents": Model((*MIXTRAL, "data.packing=best_fit"), some_targets, compared=("weights",)),
    # No token is dropped: every expert has rows for all tokens.
    "mixtral-roomy": Model((*MIXTRAL, "model.capacity_factor=2.0"), compared=("weights",)),
    # Some tokens are dropped: those that one process drops.
    "mixtral-padded": Model((*MIXTRAL, "model.capacity_factor=1.0"), compared=("weights",)),
    # Norms of queries and keys over the heads of all tensor ranks, and weights of experts that do not sum to one.
    "olmoe": Model(
        ("model=olmoe-tiny", "model.layers=2", "model.kv_heads=2", "training.balance_loss=0.1", HALF, *EXPERTS), compared=("weights",)
    ),
    # Blocks with experts and without.
    "qwen3-moe": Model(
        (
            *("model=qwen3-moe-tiny", "model.layers=4", "model.kv_heads=2", "model.head_width=8", "model.expert_ffn_hidden=24"),
            *("training.balance_loss=0.1", HALF, *EXPERTS),
        ),
        compared=("weights",),
    ),
    # Rotary positions in half of the dims of a head, biases, norms of queries and keys, a shared expert, and a further token.
    "glm4-moe": Model(
        (
            *("model=glm4-moe-tiny", "model.layers=4", "model.kv_heads=2", "model.head_width=8", "model.expert_ffn_hidden=12"),
            *("training.balance_loss=0.1", "training.bias_update_speed=0.01", HALF, *EXPERTS),
        ),
        compared=("weights",),
    ),
    "qwen3-next": Model(QWEN3_NEXT, compared=("weights",)),
    "qwen3-next-documents": Model((*QWEN3_NEXT, "model.kv_heads=4", "training.document_mask=true"), packed, compared=("weights",)),
    # Sinks and windows, and experts with biases, whose inputs are bounded.
    "gpt-oss": Model(
        (
            *("model=gpt-oss-tiny", "model.layers=2", "model.kv_heads=2", "model.head_width=8", "model.ffn_hidden=24", "model.window=5"),
            *("model.swiglu_limit=0.05", "training.balance_loss=0.1", HALF, *EXPERTS),
        ),
        compared=("weights",),
    ),
    # The norm is that of the sinks, which are one in ten thousand weights, alone.
    "gpt-oss-sinks": Model(
        (
            *("model=gpt-oss-tiny", "model.layers=2", "model.kv_heads=4", "model.head_width=8", "model.window=5", "model.init_std=0.2"),
            *("training.frozen=['*.weight','*.bias','*.mlp.*']", HALF, *EXPERTS),
        ),
        compared=("weights",),
    ),
    "deepseek": Model(
        (
            *("model=deepseek-tiny", "model.layers=2", "model.expert_ffn_hidden=12", "training.balance_loss=0.1"),
            *("training.bias_update_speed=0.01", "training.bias_update_speed_schedule=[{until_step:1,value:0.02}]", *LATENT, *EXPERTS),
        ),
        compared=("weights",),
    ),
    # Dense layers first, groups of experts, and two further tokens.
    "deepseek-grouped": Model(
        (
            *("model=deepseek-tiny", "model.layers=4", "model.dense_layers=1", "model.ffn_hidden=48", "model.experts=4", "model.top_k=2"),
            *("model.expert_ffn_hidden=16", "model.groups=2", "model.topk_group=1", "model.mtp_depth=2", "model.init_std=0.1"),
            *("training.balance_loss=0.05", "model.q_lora_rank=12", "model.kv_lora_rank=8", "model.qk_nope_head_dim=8", EPS),
            *("model.qk_rope_head_dim=4", "model.v_head_dim=6", "training.global_batch_size=8"),
            *("training.mtp_loss=0.1", "training.mtp_loss_schedule=[{until_step:1,value:0.5}]", Z_LOSS),
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
        "context=4 context_kind=ulysses zero_stage=3 training.activation_checkpointing=selective",
        "context=2 context_kind=ring tensor=2 zero_stage=1",
        "context=2 context_kind=ulysses tensor=2 zero_stage=0 sequence_parallel=false",
        "context=2 context_kind=ring pipeline=2 zero_stage=2 training.activation_checkpointing=offload",
        "context=2 context_kind=ulysses pipeline=2 zero_stage=0 schedule=zbv",
        "context=2 context_kind=ring zero_stage=3",
        "context=2 context_kind=ring tensor=2 zero_stage=2 training.activation_checkpointing=full",
        "context=4 context_kind=ring zero_stage=1 training.activation_checkpointing=selective",
    ],
    # Rotary positions, ALiBi and sliding windows with context parallelism and sharded heads.
    "llama": [
        "context=4 context_kind=ring zero_stage=0",
        "context=2 context_kind=ring tensor=2 zero_stage=2 training.activation_checkpointing=full",
        # Groups of two data ranks, and of the context ranks.
        "zero_stage=1 zero_group=2",
        "zero_stage=2 zero_group=2",
        "zero_stage=3 zero_group=2",
        "context=2 context_kind=ring zero_stage=3 zero_group=2",
    ],
    "llama-nope": ["tensor=2 pipeline=2 zero_stage=1", "context=2 context_kind=ring zero_stage=3"],
    "bloom": ["context=2 context_kind=ring tensor=2 zero_stage=1"],
    "qwen2.5": ["tensor=2 pipeline=2 zero_stage=1"],
    "bert": [
        "zero_stage=0",
        "zero_stage=1 tensor=2 pipeline=2",
        "zero_stage=0 tensor=4",
        "zero_stage=2 tensor=2 sequence_parallel=false",
        "zero_stage=0 pipeline=2 schedule=zbv training.micro_batch_size=2",
    ],
    "roberta": ["zero_stage=1 tensor=2 pipeline=2", "zero_stage=3"],
    "bert-diffusion": ["zero_stage=1 tensor=2 pipeline=2"],
    "modernbert": [
        "zero_stage=1 tensor=2 pipeline=2",
        "zero_stage=3",
        "zero_stage=2 tensor=2 sequence_parallel=false",
        "zero_stage=0 pipeline=2 schedule=zbv training.micro_batch_size=2",
    ],
    "modernbert-diffusion": ["zero_stage=2 tensor=2 pipeline=2"],
    "llama-padded": [
        "zero_stage=1 tensor=2 pipeline=2",
        "zero_stage=2 tensor=2 context=2",
        "zero_stage=0 pipeline=2 schedule=zbv training.micro_batch_size=2",
    ],
    "t5": [
        "zero_stage=0",
        "tensor=2 pipeline=2",
        "pipeline=4 zero_stage=0 training.activation_checkpointing=offload",
        "tensor=2 sequence_parallel=false training.activation_checkpointing=selective",
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
        # Experts are not sharded, as a group has one rank with them; or the group has half of the expert ranks.
        "expert=2 zero_stage=3 zero_group=2 expert_padding=true expert_buffer=1",
        "expert=4 zero_stage=1 zero_group=2",
        # Whole experts on tensor x expert ranks.
        "expert=2 tensor=2 expert_tensor=1 zero_stage=0",
        # In buffers, which are large enough, or which every step exceeds.
        "expert=2 tensor=2 zero_stage=1 expert_padding=true expert_buffer=1.5 expert_parts=2 training.activation_checkpointing=selective",
        "expert=4 zero_stage=2 expert_padding=true expert_buffer=1",
        "tensor=2 expert_tensor=1 zero_stage=3 training.activation_checkpointing=offload",
        "context=2 context_kind=ring tensor=2 expert_tensor=1 zero_stage=0",
        "tensor=2 pipeline=2 expert_tensor=1 zero_stage=2",
    ],
    # Padding is more of one tensor rank's tokens than of another one's.
    "mixtral-documents": [
        "expert=2 tensor=2 expert_tensor=1 zero_stage=1",
        "expert=2 tensor=2 expert_tensor=1 zero_stage=1 expert_padding=true expert_buffer=1.5 expert_parts=2",
    ],
    "mixtral-roomy": [
        "expert=2 tensor=2 expert_tensor=1 zero_stage=1 expert_padding=true expert_parts=2 training.activation_checkpointing=selective"
    ],
    "mixtral-padded": [
        "zero_stage=0 expert_padding=true",
        "expert=4 zero_stage=3 expert_padding=true expert_parts=2",
        "expert=2 tensor=2 zero_stage=1 expert_padding=true expert_parts=2 training.activation_checkpointing=selective",
        "expert=2 pipeline=2 zero_stage=2 expert_padding=true",
    ],
    "mixtral-4": ["expert=2 pipeline=2 zero_stage=2 schedule=zbv"],
    "olmoe": ["expert=2 tensor=2 zero_stage=1"],
    "qwen3-moe": ["expert=2 tensor=2 zero_stage=1", "expert=2 pipeline=2 zero_stage=3"],
    "glm4-moe": ["expert=2 tensor=2 zero_stage=1", "tensor=2 pipeline=2 zero_stage=0"],
    "gpt-oss": [
        "expert=2 tensor=2 zero_stage=1",
        "tensor=2 pipeline=2 zero_stage=0 training.activation_checkpointing=selective",
        "expert=2 tensor=2 expert_tensor=1 zero_stage=3",
        "context=2 context_kind=ring tensor=2 zero_stage=2",
        "context=2 context_kind=ulysses expert=2 zero_stage=1",
    ],
    "gpt-oss-sinks": [
        "tensor=2 context=2 context_kind=ring zero_stage=1",
        "tensor=2 context=2 context_kind=ulysses zero_stage=3",
        "tensor=2 pipeline=2 zero_stage=0 sequence_parallel=false",
    ],
    "qwen3-next": [
        "expert=2 tensor=2 zero_stage=1",
        "pipeline=2 tensor=2 zero_stage=2 training.activation_checkpointing=selective",
        "zero_stage=3",
        "context=4 context_kind=ring zero_stage=1",
        "context=2 context_kind=ulysses pipeline=2 zero_stage=0",
        "context=2 context_kind=ring expert=2 zero_stage=3 training.activation_checkpointing=selective",
    ],
    # States, convolutions and documents continue on other ranks.
    "qwen3-next-documents": [
        "context=2 context_kind=ring tensor=2 zero_stage=1",
        "context=4 context_kind=ulysses zero_stage=3 training.activation_checkpointing=full",
    ],
    "deepseek": [
        "expert=2 tensor=2 zero_stage=1",
        "expert=2 pipeline=2 zero_stage=3",
        "expert=2 tensor=2 zero_stage=0 training.activation_checkpointing=full",
        "expert=2 tensor=2 expert_tensor=1 zero_stage=1",
    ],
    "deepseek-grouped": [
        "zero_stage=1 tensor=2 pipeline=2",
        "zero_stage=0 tensor=2 expert=2",
        "zero_stage=0 tensor=2 pipeline=2 sequence_parallel=false",
        "zero_stage=2 pipeline=2 expert=2",
        "zero_stage=3 expert=2",
    ],
}


for cases in FAMILIES.values():
    if cases.layouts:
        name = cases.tiny.removesuffix("-tiny")
        MODELS[name] = Model((f"model={cases.tiny}", *cases.trained, "model.ffn_hidden=48", *DECODER), packed)
        LAYOUTS[name] = list(cases.layouts)

#: Models other than decoders with dense layers -> what their training does differently.
KINDS = {
    **dict.fromkeys(("bert", "roberta", "bert-diffusion", "modernbert", "modernbert-diffusion"), "masked"),
    **dict.fromkeys(("t5", "t5-1.1", "transformer"), "encoder-decoder"),
    **dict.fromkeys(("mixtral", "mixtral-padded", "mixtral-roomy", "mixtral-documents", "mixtral-4"), "experts"),
    **dict.fromkeys(
        (
            *("olmoe", "qwen3-moe", "qwen3-next", "qwen3-next-documents", "glm4-moe", "gpt-oss", "gpt-oss-sinks"),
            *("deepseek", "deepseek-grouped"),
        ),
        "experts",
    ),
}
#: Models of which others have all layers and losses, and which only tools/test --all trains in a layout of their own.
VARIANTS = {
    *("llama-nope", "roberta", "modernbert-diffusion", "t5-1.1", "mixtral-4", "mixtral-roomy", "mixtral-documents", "bert-diffusion"),
    *("qwen2.5", "qwen3.5", "granite", "nemotron", "exaone4", "smollm3", "apertus", "gpt-neox", "gemma3", "olmo2", "olmo-hybrid"),
    *("mistral", "olmoe", "qwen3-moe", "granite-hybrid", "glm4-moe", "deepseek-grouped", "gpt-oss-sinks", "qwen3-next-documents"),
}


def in_two(name: str, layout: str) -> str:
    """A layout of a dense model that has all of the batch on each rank: two micro-batches, in place of four."""
    given = dict(word.split("=") for word in layout.split())
    ranks = int(given.get("tensor", 1)) * int(given.get("context", 1)) * int(given.get("pipeline", 1))
    several = "schedule" in given or given.get("pipeline") == "4"  # which need four
    return layout if name in KINDS or several or ranks < 4 else f"{layout} {FEW}"


CASES = [(name, in_two(name, layout)) for name, layouts in LAYOUTS.items() for layout in layouts]


def combinations(name: str, layout: str) -> set[tuple[str, ...]]:
    """What a layout is an example of.

    These are the model unless it is a variant; its kind, with each axis, ring or Ulysses, ZeRO stage, schedule, recomputation and other
    setting; and every pair of axes, stages, schedules and whole experts.
    """
    given = dict(word.split("=") for word in layout.split())
    size = {axis: int(given.pop(axis, 1)) for axis in ("tensor", "pipeline", "context", "expert")}
    uses = {axis for axis, ranks in size.items() if ranks > 1 and axis != "context"} | {f"zero_stage={given.pop('zero_stage', 1)}"}
    if size["context"] > 1:
        uses.add(given.pop("context_kind", "ring"))
    if size["tensor"] * size["pipeline"] * size["context"] < 4:
        uses.add("data")
    given.pop("training.micro_batch_size", None)
    uses |= {f"{key}={value}" for key, value in given.items()}
    kind, own = KINDS.get(name, "dense"), set() if name in VARIANTS else {(name,)}
    paired = sorted(use for use in uses if "=" not in use or use.startswith(("zero_stage", "schedule", "expert_tensor")))
    return {*own, *((kind, use) for use in uses), *itertools.combinations(paired, 2)}


def cover(cases: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Few of these layouts that have all combinations of all of them: always one with most of those that are missing.

    Of several such layouts, that of a model which is in the default tier in any case: its plain loop is computed once.
    """
    missing, chosen = set().union(*(combinations(*case) for case in cases)), set()
    while missing:
        chosen.add(best := max(cases, key=lambda case: (len(combinations(*case) & missing), case[0] not in VARIANTS)))
        missing -= combinations(*best)
    for case in cases:  # those that became superfluous
        if set().union(*(combinations(*other) for other in chosen)) == set().union(*(combinations(*other) for other in chosen - {case})):
            chosen.discard(case)
    return chosen


COVER = cover(CASES)
TIERS = [pytest.param(*case, marks=() if case in COVER else pytest.mark.long) for case in CASES]
