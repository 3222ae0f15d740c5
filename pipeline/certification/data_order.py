"""Part "data": the job's own samples, as the loaders of all its ranks read them, and as one process does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pipeline.certification.batches import Rows
from pipeline.certification.parts import PartReport
from pipeline.certification.state import state_after
from pipeline.common.errors import UserError
from pipeline.common.remote import is_remote
from pipeline.config import layouts, phases, warmup
from pipeline.config.layout import Coordinates, Layout
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.objective import IGNORE, Objective
from pipeline.data.load.samples import Samples
from pipeline.parallel.mesh import Mesh
from pipeline.training.batch_loader import BatchLoader

#: Up to as many tokens of a global batch, two batches are read at each place, else one.
LARGE_BATCH = 1 << 20
#: Most samples whose order is computed, the first ones of the run.
MOST_SAMPLES = 1 << 20

#: Most samples of a validation split that are read.
VALIDATED = 64

#: So few sequences may have the same order in two epochs by chance.
FEW = 8


def report(config: RunConfig, world_size: int) -> PartReport:
    """Read batches of the job through the loaders of its ranks, in this process."""
    result = PartReport("data")
    if missing := _missing(config):
        result.not_covered.append(f"no data was checked: {missing}")
        return result
    try:
        data, validation = _opened(config)
    except UserError as error:
        result.failures += [f"{violation}" for violation in error.violations]
        return result
    steps = checked_steps(config)
    for step in steps:
        now = phases.at(config, step)
        result.failures += [f"step {step + 1}: {failure}" for failure in _compare(now, _layout(config, world_size, step), data, step)]
    resumed = _resumed_at(config)
    last = max(0, resumed - 1)
    result.failures += _compare_resumed(phases.at(config, last), _layout(config, world_size, last), data, resumed)
    result.failures += [*_wrong_order(config, data), *_lost_tokens(data), *_wrong_shares(config, data)]
    result.failures += _left_out(config, validation)
    used = [_layout(config, world_size, step) for step in steps]
    texts = [f"{layout.batch_shards} data ranks" + (f" x {layout.context} context ranks" if layout.context > 1 else "") for layout in used]
    ranks = ", ".join(dict.fromkeys(texts))
    numbers = ", ".join(str(step + 1) for step in steps)
    result.covered.append(f"the batches of steps {numbers} of {config.training.steps}, read by {ranks} and by one process")
    result.covered.append(f"the batch after a resume at step {resumed}; every sequence once an epoch; token ids, targets and documents")
    return result


def _layout(config: RunConfig, world_size: int, step: int) -> Layout:
    """The layout of a step."""
    return Layout.of(phases.at(config, step), layouts.ranks_at(config, step, world_size))


def _opened(config: RunConfig) -> tuple[Objective, Objective | None]:
    """Open training and validation data as a process does that starts; raises UserError."""
    return registry.open_data(replace(config, data=replace(config.data, verify="off")), (0, 1))


def checked_steps(config: RunConfig) -> list[int]:
    """Return the steps, from 0, whose batches are read: the first ones, those around a resume and phases' ends, and the last ones."""
    total = config.training.steps
    width = 2 if config.training.global_batch_size * config.training.sequence_length <= LARGE_BATCH else 1
    resumed = _resumed_at(config)
    around = (step for end in (resumed, *phases.starts(config)[1:]) for step in (end - 1, end))
    steps = [*range(width), *around, *range(total - width, total)]
    return sorted({step for step in steps if 0 <= step < total})


def _resumed_at(config: RunConfig) -> int:
    """Return the number of steps of the first checkpoint."""
    every, steps = config.checkpoint.every, config.training.steps
    return every if 0 < every < steps else steps // 2


def _missing(config: RunConfig) -> str:
    """Return why there is no data; empty if there is."""
    key = registry.objective_of(config).data_key
    if key != "data.tokens":
        return "" if all(Path(path).exists() for path in config.data.pairs.train) else f"{key} is not there"
    blended = [corpus.tokens or config.data.tokens for corpus in config.data.blend.values()]
    folders = dict.fromkeys(blended or [config.data.tokens])
    absent = [folder for folder in folders if not Path(folder).is_dir()]
    return f"data.tokens={absent[0]} is {'a URL, which only training reads' if is_remote(absent[0]) else 'not there'}" if absent else ""


def _loader(config: RunConfig, layout: Layout, where: Coordinates, data: Objective) -> BatchLoader:
    """Return the loader of a rank, which needs no process groups."""
    mesh = SimpleNamespace(device=torch.device("cpu"), layout=layout, coordinates=where)
    return BatchLoader(data, config.training, cast(Mesh, mesh), config.data.prefetch)


def _read(config: RunConfig, layout: Layout, where: Coordinates, data: Objective, first: int, step: int) -> Rows:
    """Return what a rank reads of the batch of a step that starts at sample `first`."""
    tokens, batch = next(iter(_loader(config, layout, where, data).training(first, range(step, step + 1))))
    return {"tokens": tokens, **cast(Rows, batch)}


def _all_ranks(config: RunConfig, layout: Layout, data: Objective, first: int, step: int) -> Rows:
    """Return the union of what the data ranks read, in their order."""
    shards = [
        _read(config, layout, Coordinates(0, index // layout.expert, index % layout.expert, 0, 0), data, first, step)
        for index in range(layout.batch_shards)
    ]
    return {name: torch.cat([rows[name] for rows in shards]) for name in shards[0]}


def _compare(config: RunConfig, layout: Layout, data: Objective, step: int) -> Iterator[str]:
    """Yield what is wrong with the batch of a step."""
    first = state_after(config, step).samples
    alone = replace(layout, pipeline=1, data=1, tensor=1, expert=1, context=1, blocks=())
    expected = _read(config, alone, alone.coordinates(0), data, first, step)
    yield from _differences("the data ranks read", _all_ranks(config, layout, data, first, step), expected)
    yield from _wrong_values(config, data, expected)
    order = data.arrays(np.arange(first, first + warmup.batch_size(config.training, step)))["tokens"]
    if not np.array_equal(order.astype(np.int64).ravel(), expected["tokens"].numpy().ravel()):
        yield f"one process does not read samples {first} and following in their order"
    last = layout.coordinates(layout.world_size - 1)
    if step == 0 and layout.world_size > layout.batch_shards:  # ranks of the other axes read what the first one of them reads
        first_rank = replace(last, pipeline=0, context=0, tensor=0)
        of_first = _read(config, layout, first_rank, data, first, step)
        yield from _differences(
            "the last rank of the context, tensor and pipeline axes reads", _read(config, layout, last, data, first, step), of_first
        )


def _compare_resumed(config: RunConfig, layout: Layout, data: Objective, step: int) -> Iterator[str]:
    """Yield what differs between an uninterrupted run and one that is resumed before a step, from 0."""
    if not 0 < step < config.training.steps:
        return
    before = state_after(config, step - 1).samples
    where = layout.coordinates(0)
    tokens, batch = list(_loader(config, layout, where, data).training(before, range(step - 1, step + 1)))[-1]
    # A run is resumed by another process: what this one keeps of the batches that it has read must not matter.
    resumed_tokens, resumed = next(iter(_loader(config, layout, where, _opened(config)[0]).remaining(state_after(config, step))))
    rows = {"tokens": resumed_tokens, **cast(Rows, resumed)}
    for failure in _differences("a rank that resumes reads", rows, {"tokens": tokens, **cast(Rows, batch)}):
        yield f"step {step + 1}: {failure}"


def _differences(who: str, actual: Rows, expected: Rows) -> Iterator[str]:
    """Yield how rows differ from the expected ones."""
    for name, rows in expected.items():
        other = actual.get(name)
        if other is None or other.shape != rows.shape:
            yield f"{who} {name} of another shape than one process"
        elif not torch.equal(other, rows):
            wrong = (other != rows).flatten(1).any(dim=1)
            distinct = len(torch.unique(other.flatten(1), dim=0))
            yield f"{who} other {name} than one process in {int(wrong.sum())} of {len(rows)} sequences, {distinct} of which are distinct"


def _wrong_values(config: RunConfig, data: Objective, rows: Rows) -> Iterator[str]:
    """Yield rules that the values of a batch violate."""
    size = config.model.vocab_size
    if config.objective == "causal":  # a longer sequence of a later phase consists of samples
        rows = {name: values.reshape(-1, config.training.sample_length) for name, values in rows.items()}
    for name in ("tokens", "targets", "decoder_tokens"):
        if name in rows:
            ids = rows[name][rows[name] != IGNORE] if name == "targets" else rows[name]
            if len(ids.flatten()) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
                yield f"{name}: ids from {int(ids.min())} to {int(ids.max())}, model.vocab_size={size}"
    if config.objective == "masked":
        yield from _equal_masks(rows["targets"] != IGNORE)
    if config.objective == "masked_diffusion" and 1 == len(rows["loss_weights"].amax(dim=1).unique()) < len(rows["tokens"]):
        yield f"all {len(rows['tokens'])} sequences have the same masking rate"
    if config.objective != "causal":
        return
    tokens, targets = rows["tokens"], rows["targets"]
    counted = targets[:, :-1] != IGNORE
    if not torch.equal(targets[:, :-1][counted], tokens[:, 1:][counted]):
        yield "targets are not the next tokens"
    end = data.samples.end_of_document
    padding = (tokens[:, :-1] == end) & (tokens[:, 1:] == end) & (config.data.packing == "best_fit")
    if every := config.training.goldfish_k:
        if bool((counted | padding).all()):
            yield f"training.goldfish_k={every} drops no target"
        padding |= ~counted
    if not torch.equal(counted, ~padding):
        yield "other positions than padding have no target"
    if "documents" in rows:
        begins = rows["documents"].diff(dim=1) != 0
        ends = tokens[:, :-1] == end
        if not torch.equal(begins, ends):
            yield "documents do not begin after the end-of-document tokens"


def _left_out(config: RunConfig, validation: Objective | None) -> Iterator[str]:
    """Yield whether a validation leaves out tokens of text, as the training data may: its loss would be none of the text."""
    if config.objective != "causal" or validation is None:
        return
    rows = validation.arrays(validation.validation_sample(VALIDATED))
    ends = rows["tokens"] == validation.samples.end_of_document
    is_text = ~(ends[:, :-1] & ends[:, 1:]) if config.data.packing == "best_fit" else np.ones_like(ends[:, 1:])
    left = is_text & (rows["targets"][:, :-1] == IGNORE)
    if left.any():
        yield f"the validation has no loss of {left.sum() / is_text.sum():.0%} of its tokens"


def _equal_masks(masked: Tensor) -> Iterator[str]:
    """Yield whether sequences have their targets at the same positions; bool (sequences, positions)."""
    before, after = masked[:-1], masked[1:]
    share = float(masked.float().mean())
    repeated = int((before & after).sum()) / max(1, int(before.sum()))
    if repeated > (1 + share) / 2:  # by chance: `share`
        yield f"{repeated:.0%} of the masked positions of a sequence are masked in the next one; {share:.0%} of all positions are masked"


def _wrong_order(config: RunConfig, data: Objective) -> Iterator[str]:
    """Yield corpora of which an epoch repeats a sequence or the order of another, from the samples of the run's first epochs."""
    samples = data.samples
    if not isinstance(samples, Samples):
        return
    total = min(warmup.samples(config.training, config.training.steps), MOST_SAMPLES, 2 * int(samples.counts.sum()) + 1)
    batch = max(config.training.global_batch_size, 4096)
    parts = [_columns(samples, np.arange(first, min(first + batch, total))) for first in range(0, total, batch)]
    corpora, epochs, sequences = np.concatenate(parts, axis=1)
    keys = np.sort((corpora * (epochs.max() + 1) + epochs) * samples.counts.max() + sequences)
    if len(twice := keys[1:][keys[1:] == keys[:-1]]):
        rest, sequence = divmod(int(twice[0]), int(samples.counts.max()))
        corpus, epoch = divmod(rest, int(epochs.max()) + 1)
        yield f"epoch {epoch + 1} of corpus {corpus} repeats sequence {sequence}"
    for corpus in np.unique(corpora):
        of_corpus = corpora == corpus
        first, second = (sequences[of_corpus & (epochs == epoch)] for epoch in range(2))
        count = min(len(first), len(second))
        if count > FEW and np.array_equal(first[:count], second[:count]):
            yield f"epoch 2 of corpus {corpus} has the order of epoch 1"


def _lost_tokens(data: Objective) -> Iterator[str]:
    """Yield whether packed documents lack tokens of the corpora."""
    samples = data.samples
    packed = samples.packed_tokens if isinstance(samples, Samples) else None
    if packed is not None and packed != (total := sum(corpus.total("tokens") for corpus in samples.corpora)):
        yield f"packing keeps {packed:,} of {total:,} tokens"


def _wrong_shares(config: RunConfig, data: Objective) -> Iterator[str]:
    """Yield corpora of which the first phase of a blend reads more or fewer samples than its weight says."""
    samples, blend = data.samples, config.data.blend
    if not blend or not isinstance(samples, Samples):
        return
    first = config.data.phases[0] if config.data.phases else None
    total = min(warmup.samples(config.training, config.training.steps), MOST_SAMPLES)
    if first is not None and first.until_tokens:
        total = min(total, first.until_tokens // config.training.sample_length)
    weights = {name: 1.0 if corpus.weight is None else corpus.weight for name, corpus in blend.items()} if first is None else first.weights
    epoch = {corpus.name: int(count) for corpus, count in zip(samples.corpora, samples.counts, strict=True)}
    wanted = {name: weights.get(name, 0.0) * (epoch[name] if config.data.blend_weights == "epochs" else 1) for name in blend}
    counts = np.bincount(_columns(samples, np.arange(total))[0], minlength=len(epoch))
    for name, count in zip(epoch, counts.tolist(), strict=True):
        expected = total * wanted[name] / sum(wanted.values())
        if abs(count - expected) > len(epoch) + 1:
            yield f"of {total:,} samples, {count:,} are of corpus {name}, {expected:,.1f} by its weight"


def _columns(samples: Samples, indices: np.ndarray) -> np.ndarray:
    """Return corpus, epoch and sequence of samples, (3, n)."""
    return np.stack([np.broadcast_to(column, len(indices)) for column in samples.sequences(indices)])
