"""Random batches for the objective of a model, which need no data files."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from pipeline.config import phases, warmup
from pipeline.config.schema import RunConfig
from pipeline.layers.batch import Batch
from pipeline.layers.loss import IGNORE

#: Tokens int64 (sequences, sequence) and the other model inputs of a global batch.
RandomBatch = tuple[Tensor, Batch]
#: Name of a model input -> its rows: a Batch whose fields are chosen by name.
Rows = dict[str, Tensor]


def random_batches(config: RunConfig, steps: int | None = None) -> list[RandomBatch]:
    """Return the global batches of the first steps of a run (all when None), with the sizes of its warm-ups and phases."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for step in range(config.training.steps if steps is None else steps):
        now = phases.at(config, step)
        tokens, batch = _batch(now, warmup.value_at(now.training.batch_rampup, step, now.training.global_batch_size), generator)
        length = warmup.sequence_length(now.training, step)
        if length < tokens.shape[1]:  # a sequence warm-up splits every sample
            tokens = tokens.reshape(-1, length)
            batch = cast(Batch, {name: cast(Tensor, value).reshape(-1, length) for name, value in batch.items()})
        batches.append((tokens, batch))
    return batches


def with_loss_scale(batch: Batch) -> Batch:
    """Add loss_scale, the factor from a mean over all positions to a mean over the counted targets of the global batch."""
    targets = batch["targets"]
    if "loss_weights" in batch:
        weights = batch["loss_weights"]
        batch = batch.copy()
        del batch["loss_weights"]
        return {**batch, "loss_scale": weights * targets.numel() / int((weights > 0).sum())}
    return {**batch, "loss_scale": torch.full((len(targets),), targets.numel() / int((targets != IGNORE).sum()))}


def split(tokens: Tensor, batch: Batch, parts: int) -> list[RandomBatch]:
    """Split a batch into equal parts along the sequences, in order."""
    chunks = {name: cast(Tensor, value).chunk(parts) for name, value in batch.items()}
    return [(part, cast(Batch, {name: values[index] for name, values in chunks.items()})) for index, part in enumerate(tokens.chunk(parts))]


def permuted(tokens: Tensor, batch: Batch, parts: int, generator: torch.Generator, *, within: bool) -> RandomBatch:
    """Return a batch whose parts, as `split` returns them, come in another order: the sums over them, and their rounding, are others.

    Args:
        tokens, batch: of a global batch.
        parts: number of micro-batches.
        generator: of the order.
        within: permute also the sequences of each part.
    """
    rows = torch.arange(len(tokens)).view(parts, -1)[torch.randperm(parts, generator=generator)]
    if within:
        rows = rows[:, torch.randperm(rows.shape[1], generator=generator)]
    order = rows.flatten()
    return tokens[order], cast(Batch, {name: cast(Tensor, values)[order] for name, values in batch.items()})


def to_device(tokens: Tensor, batch: Batch, device: torch.device) -> RandomBatch:
    """Return a batch on a device."""
    return tokens.to(device), cast(Batch, {name: cast(Tensor, values).to(device) for name, values in batch.items()})


def random_split(config: RunConfig, rows: int) -> RandomBatch:
    """Return sequences to validate on: a part of the targets, another one in each sequence, is IGNORE."""
    generator = torch.Generator().manual_seed(2)
    tokens, batch = _batch(config, rows, generator)
    return tokens, {**batch, "targets": _some_targets(batch["targets"], torch.linspace(0.3, 1.0, rows)[:, None], generator)}


def _batch(config: RunConfig, rows: int, generator: torch.Generator) -> RandomBatch:
    """Return a batch of `rows` samples of training.sequence_length tokens."""
    model, length = config.model, config.training.sequence_length

    def tokens(*shape: int) -> Tensor:
        return torch.randint(model.vocab_size, shape, generator=generator)

    if model.objective == "causal":
        text = tokens(rows, length + 1)
        batch: Batch = {"targets": text[:, 1:]}
        if config.data.packing == "best_fit":  # the padding at the end has no targets
            padding = _documents(rows, length, generator, packed=False) < 0
            batch["targets"] = batch["targets"].masked_fill(padding, IGNORE)
        if every := config.training.goldfish_k:
            batch["targets"] = _some_targets(batch["targets"], 1 - 1 / every, generator)
        if config.training.document_mask:
            documents = _documents(rows, length, generator, packed=True)
            batch["documents"] = documents.masked_fill(documents < 0, length)  # one more document: each is contiguous
        return text[:, :-1], batch
    if model.objective == "masked":
        batch = {
            "targets": _some_targets(tokens(rows, length), 0.3, generator),
            "documents": _documents(rows, length, generator, packed=config.training.document_mask),
        }
        if config.objective == "masked_diffusion":  # another rate in each sequence
            rates = torch.rand((rows, 1), generator=generator).clamp(min=config.training.diffusion_eps)
            batch["targets"] = _some_targets(tokens(rows, length), rates, generator)
            batch["loss_weights"] = torch.where(batch["documents"] >= 0, 1 / rates, 0.0)
            batch["targets"] = batch["targets"].masked_fill(batch["documents"] < 0, IGNORE)
        if getattr(model, "next_sentence", False):
            batch["segments"] = (torch.arange(length) >= length // 2).long().expand(rows, length).contiguous()
            batch["next_sentence"] = torch.randint(2, (rows,), generator=generator)
        return tokens(rows, length), batch
    decoded = tokens(rows, length + 1)
    batch = {"targets": _some_targets(decoded[:, 1:], 0.8, generator), "decoder_tokens": decoded[:, :-1].contiguous()}
    return tokens(rows, length), {**batch, "documents": _documents(rows, length, generator, packed=False)}


def _some_targets(targets: Tensor, fraction: float | Tensor, generator: torch.Generator) -> Tensor:
    """Keep a random fraction of the targets and set the others to IGNORE. Their number varies by sequence; the first one always counts."""
    counted = torch.rand(targets.shape, generator=generator) < fraction
    counted[:, 0] = True
    return targets.masked_fill(~counted, IGNORE)


def _documents(rows: int, length: int, generator: torch.Generator, *, packed: bool) -> Tensor:
    """Return document numbers (rows, length) of sequences of random length: -1 in the padding at the end; one document unless packed."""
    lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
    starts = torch.rand((rows, length), generator=generator) < 0.2 if packed else torch.zeros(rows, length, dtype=torch.bool)
    return torch.where(torch.arange(length) < lengths, starts.int().cumsum(1), -1).int()
