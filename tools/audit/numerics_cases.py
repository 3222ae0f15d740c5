"""The test cases of tools/numerics: a tiny model of every family, its layouts, and random batches for its objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.layers.batch import Batch
from pipeline.layers.loss import IGNORE

WORLD = 8
STEPS = 10

COMMON = (
    "precision=fp32",
    "model.vocab_size=101",  # odd: the tensor ranks have vocabulary pieces of different sizes
    "training.sequence_length=16",
    f"training.steps={STEPS}",
    "training.global_batch_size=32",
    "training.micro_batch_size=2",
    "optimizer.lr=0.001",
    "optimizer.warmup_steps=2",
    "optimizer.gradient_clipping=0.5",
    "optimizer.eps=1e-6",
)
SIZES = ("model.hidden=64", "model.heads=8", "model.ffn_hidden=96", "model.max_positions=32")
NARROW = tuple(size for size in SIZES if "ffn_hidden" not in size)  # for families whose feed-forward width is always 4 x hidden


@dataclass(frozen=True)
class Row:
    """A layout: the sizes of the mesh axes and further settings."""

    tensor: int
    pipeline: int
    zero: int
    schedule: str = "1f1b"
    more: tuple[str, ...] = ()
    context: int = 1
    expert: int = 1

    @property
    def data(self) -> int:
        """The size of the data axis: the remaining factor of the world size."""
        return WORLD // (self.tensor * self.pipeline * self.context * self.expert)

    def overrides(self) -> list[str]:
        """Return the settings of the layout as a command line."""
        axes = ("tensor", "pipeline", "context", "expert")
        return [
            *(f"parallel.{axis}={getattr(self, axis)}" for axis in axes),
            f"parallel.zero_stage={self.zero}",
            f"parallel.schedule={self.schedule}",
            *self.more,
        ]

    def __str__(self) -> str:
        more = [f"{axis} {getattr(self, axis)}" for axis in ("context", "expert") if getattr(self, axis) > 1]
        more += [m.rpartition(".")[2] for m in self.more]
        return " ".join([f"tensor {self.tensor} pipeline {self.pipeline} data {self.data} zero {self.zero} {self.schedule}", *more])


NO_SEQUENCE = ("parallel.sequence_parallel=false",)
ULYSSES = ("parallel.context_kind=ulysses",)

#: Layouts of every family.
SOME = (
    Row(1, 1, 3),
    Row(2, 1, 1),
    Row(4, 1, 2, more=NO_SEQUENCE),
    Row(1, 2, 0, "zbv"),
    Row(1, 2, 2, "interleaved"),
    Row(2, 2, 1),
    Row(2, 2, 3, more=("training.activation_checkpointing=full",)),
)
#: Layouts of gpt and llama.
ALL = (
    *(Row(1, 1, zero) for zero in (0, 1, 2, 3)),
    *(Row(2, 1, zero) for zero in (0, 1, 3)),
    Row(4, 1, 2),
    Row(2, 1, 1, more=NO_SEQUENCE),
    Row(4, 1, 2, more=NO_SEQUENCE),
    *(Row(1, 2, zero) for zero in (0, 1, 3)),
    Row(1, 4, 2),
    Row(1, 8, 1),
    *(Row(1, 2, zero, "interleaved") for zero in (0, 2, 3)),
    *(Row(1, 4, zero, "zbv") for zero in (0, 1)),
    *(Row(2, 2, zero) for zero in (0, 1, 2, 3)),
    Row(2, 2, 2, more=NO_SEQUENCE),
    *(Row(2, 2, zero, "interleaved") for zero in (0, 1)),
    *(Row(2, 2, zero, "zbv") for zero in (0, 2)),
    Row(4, 2, 1, "zbv", NO_SEQUENCE),
    Row(2, 2, 1, more=("training.activation_checkpointing=full",)),
    Row(2, 2, 2, more=("training.activation_checkpointing=selective",)),
)
#: Layouts of decoders with context parallelism.
CONTEXT = (
    Row(1, 1, 1, context=2),
    Row(2, 2, 0, context=2),
    Row(1, 1, 3, context=4),
    Row(1, 2, 1, more=ULYSSES, context=2),
    Row(2, 1, 2, more=ULYSSES, context=2),
)
#: Layouts of MoE models with expert parallelism.
EXPERT = (
    Row(1, 1, 0, expert=4),
    Row(2, 1, 1, expert=2),
    Row(2, 1, 2, more=NO_SEQUENCE, expert=2),
    Row(1, 2, 3, expert=2),
    Row(2, 2, 1, expert=2),
)


@dataclass(frozen=True)
class Model:
    """The tiny model of a family.

    Attributes:
        overrides: its settings as a command line.
        rows: its layouts.
        own_loss: its loss is not only the cross-entropy of its logits; the reference uses the loss that the model returns.
    """

    overrides: tuple[str, ...]
    rows: tuple[Row, ...]
    own_loss: bool = False


def _model(
    name: str, *more: str, sizes: tuple[str, ...] = SIZES, layers: int = 4, rows: tuple[Row, ...] = SOME, own_loss: bool = False
) -> Model:
    """Return the model conf/model/NAME.yaml with tiny sizes. Four layers suffice for two pipeline ranks with two stages each."""
    return Model((f"model={name}", *COMMON, f"model.layers={layers}", *sizes, *more), rows, own_loss)


CLIP_LOW = "optimizer.gradient_clipping=0.1"  # for models with small gradients
LOWER_STD = "model.init_std=0.5"  # with 1 attention is so peaked that gradients of queries differ by 3e-6 between fp32 and fp64
HIGHER_STD = "model.init_std=0.02"  # with 0.006 gradients of queries are so small that they differ by 8e-6 between fp32 and fp64
SMOOTH = "model.activation=gelu"  # with ReLU, rounding can change the sign of an input, which changes the gradient by more than rounding


FAMILIES: dict[str, Model] = {
    "gpt": _model("gpt-tiny", layers=8, rows=ALL + CONTEXT),
    "llama": _model("llama-tiny", "model.kv_heads=4", layers=8, rows=ALL + CONTEXT),
    "qwen2.5": _model("qwen2.5-tiny", "model.kv_heads=4"),
    "gpt-banded": _model("gpt-tiny", "model.banded_window=6", rows=SOME + CONTEXT[:2]),
    "gemma3": _model(
        "gemma3-tiny",
        "model.kv_heads=4",
        "model.window=6",
        "model.sliding_window_pattern=2",
        "model.rope_local_theta=100",
        rows=SOME + CONTEXT,
    ),
    "gpt1": _model("gpt1-tiny", CLIP_LOW, sizes=NARROW, rows=SOME + CONTEXT[:2]),
    "olmo2": _model("olmo2-tiny", "model.kv_heads=4", rows=SOME + CONTEXT),
    "smollm3": _model("smollm3-tiny", "model.kv_heads=4", "model.no_rope_layer_interval=2", rows=SOME + CONTEXT[:2]),
    "apertus": _model("apertus-tiny", "model.kv_heads=4"),
    "opt": _model("opt-tiny", SMOOTH, rows=SOME + CONTEXT[:2]),
    "opt-350m": _model("opt-tiny", "model.embed_width=48", "model.pre_norm=false", SMOOTH, HIGHER_STD, "optimizer.gradient_clipping=0.02"),
    "bloom": _model("bloom-tiny", CLIP_LOW, sizes=NARROW, rows=SOME + CONTEXT),
    "mistral": _model("mistral-tiny", "model.kv_heads=4", "model.window=6", rows=SOME + CONTEXT),
    "mixtral": _model("mixtral-tiny", "model.kv_heads=4", rows=SOME + CONTEXT[:3] + EXPERT),
    "deepseek_v3": _model("deepseek-tiny", rows=SOME + EXPERT, own_loss=True),
    "deepseek-context": _model("deepseek-tiny", "model.mtp_depth=0", rows=CONTEXT[:3]),
    "bert": _model("bert-tiny", own_loss=True),
    "roberta": _model("roberta-tiny", own_loss=True),
    "t5": _model("t5-tiny", "model.gated=true", own_loss=True),
    "transformer": _model("transformer-tiny", SMOOTH, LOWER_STD, "data.pairs.train=[none.tsv]", own_loss=True),
}


def batches(config: Any) -> list[tuple[Tensor, Batch]]:
    """Return random batches for the objective of the model, one per step: tokens (global batch, sequence) and the other fields."""
    generator = torch.Generator().manual_seed(1)
    training, vocabulary = config.training, config.model.vocab_size
    rows, length = training.global_batch_size, training.sequence_length

    def tokens(*shape: int) -> Tensor:
        return torch.randint(vocabulary, shape, generator=generator)

    def batch() -> tuple[Tensor, Batch]:
        if config.model.objective == "causal":
            text = tokens(rows, length + 1)
            return text[:, :-1], {"targets": text[:, 1:]}
        if config.model.objective == "masked":
            fields: Batch = {
                "targets": _some_targets(tokens(rows, length), 0.3, generator),
                "documents": _documents(rows, length, generator),
            }
            if getattr(config.model, "next_sentence", False):
                fields["segments"] = (torch.arange(length) >= length // 2).long().expand(rows, length).contiguous()
                fields["next_sentence"] = torch.randint(2, (rows,), generator=generator)
            return tokens(rows, length), fields
        decoded = tokens(rows, length + 1)
        labels: Batch = {"targets": _some_targets(decoded[:, 1:], 0.8, generator), "decoder_tokens": decoded[:, :-1].contiguous()}
        return tokens(rows, length), {**labels, "documents": _documents(rows, length, generator)}

    return [batch() for _ in range(training.steps)]


def _some_targets(targets: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Keep a random fraction of the targets and set the others to IGNORE. Their number varies by sequence; the first one always counts."""
    counted = torch.rand(targets.shape, generator=generator) < fraction
    counted[:, 0] = True
    return targets.masked_fill(~counted, IGNORE)


def _documents(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Return document numbers (rows, length) of sequences of random length: 0 in the text, -1 in the padding at the end."""
    lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
    return torch.where(torch.arange(length) < lengths, 0, -1).int()


def with_scale(batch: Batch) -> Batch:
    """Add loss_scale, the factor from a mean over all positions to a mean over the counted targets of the global batch."""
    targets = batch["targets"]
    return {**batch, "loss_scale": torch.full((len(targets),), targets.numel() / int((targets != IGNORE).sum()))}


def split(tokens: Tensor, batch: Batch, parts: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Split a batch into equal parts along the sequences, in order."""
    chunks = {name: value.chunk(parts) for name, value in batch.items()}  # type: ignore[attr-defined] # a Batch holds tensors
    return [(part, {name: values[index] for name, values in chunks.items()}) for index, part in enumerate(tokens.chunk(parts))]
