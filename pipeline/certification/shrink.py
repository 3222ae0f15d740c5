"""A small version of a planned job's configuration: smaller sizes, the same options, schedule and parallel axes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.certification.shrink_model import shrink_model
from pipeline.common import knobs
from pipeline.config import loss_weights, zero_group
from pipeline.config.data import RampupConfig, ScheduledWeight, WarmupConfig
from pipeline.config.layout import Layout, stages_per_rank
from pipeline.config.schema import RunConfig, StageConfig
from pipeline.parallel.parallelize import build_model

#: The small sizes. A planned size that is smaller is kept.
SEQUENCE = 16
BLOCKS = 2
"""Blocks of every kind that a pipeline stage keeps."""
MOST_RANKS = 16
"""Ranks of the small job. Rings and expert groups that need more have two ranks."""
LOSS_SCALE = 1024.0
"""With fp16: a step whose gradients overflow is skipped in the layout, and the plain loop skips none."""
LARGEST_WARMUP = 2
"""Number of entries of a warm-up that are kept."""


@dataclass(frozen=True)
class ChangedKey:
    """A key whose value differs from the planned job."""

    key: str
    planned: object
    small: object


@dataclass(frozen=True)
class Shrunk:
    """A small configuration, its number of ranks, and every key that differs from the planned one."""

    config: RunConfig
    world_size: int
    changes: list[ChangedKey]


def shrink(planned: RunConfig, world_size: int, steps: int) -> Shrunk:
    """Return the small version of a job.

    Every parallel axis in use keeps its smallest factor (2 for even sizes), a ring and an expert group one above 2, and 1F1B three pipeline
    ranks if it has them, so that one holds neither the embedding nor the head. Whatever divides planned sizes then divides small ones: a
    legal job stays legal.

    Args:
        planned: a legal configuration of pretraining for this world size.
        world_size: ranks of the planned job.
        steps: optimizer steps of the small run.
    """
    before = Layout.of(planned, world_size)
    data = min(before.data, 4 if before.zero_block and before.zero_block[0] > 1 else 2)
    small = dataclasses.replace(planned, stage=StageConfig(name="pretrain"))
    small = _shrink_zero_groups(_shrink_axes(small, data), before, data)
    small = _shrink_schedule(small, steps)
    small = _shrink_sequence(small)
    small = _shrink_layers(small, planned, before)
    small = shrink_model(small, planned)
    small = _shrink_batch(small, planned, before, data)
    small = _use_cpu_kernels(small)
    size = small.parallel.model_ranks * data
    small = shrink_frozen(small, planned, before, Layout.of(small, size))
    return Shrunk(small, size, changes(planned, small))


def changes(planned: RunConfig, small: RunConfig) -> list[ChangedKey]:
    """Return every key that differs, except those of the stage. A list is compared as a whole."""
    old, new = ({key: value for key, _, value in knobs.walk(config)} for config in (planned, small))
    lists = tuple(f"{key}." for key, value in old.items() if isinstance(value, list | dict))
    keys = (key for key in old if not key.startswith(("stage.", *lists)))
    return [ChangedKey(key, _plain(old[key]), _plain(new[key])) for key in keys if old[key] != new[key]]


def _plain(value: Any) -> object:
    """Return a value that JSON can represent."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _factor(size: int, above: int = 1) -> int:
    """Return the smallest divisor of an axis larger than `above`; the smallest above 1 if there is none, 1 of an axis not in use."""
    divisors = [divisor for divisor in range(2, size + 1) if size % divisor == 0]
    return next((divisor for divisor in divisors if divisor > above), min(divisors, default=1))


def _shrink_axes(small: RunConfig, data: int) -> RunConfig:
    """Keep the smallest factor of each axis; of rings and expert groups one above 2, as far as MOST_RANKS allow."""
    parallel = small.parallel
    sizes: dict[str, Any] = {f"parallel.{axis}": _factor(getattr(parallel, axis)) for axis in ("tensor", "context", "expert")}
    sizes["parallel.pipeline"] = min(parallel.pipeline, 3 if parallel.schedule == "1f1b" else 2)
    for axis in ("context", "expert"):
        larger = {**sizes, f"parallel.{axis}": _factor(getattr(parallel, axis), above=2)}
        if math.prod(larger.values()) * data <= MOST_RANKS:
            sizes = larger
    if parallel.expert_tensor == parallel.tensor:
        sizes["parallel.expert_tensor"] = sizes["parallel.tensor"]
    if parallel.stages_per_rank is not None:
        sizes["parallel.stages_per_rank"] = min(parallel.stages_per_rank, 2)
    return knobs.changed(small, {**sizes, "parallel.deepspeed": None})  # a file has the batch of the job


def _shrink_zero_groups(small: RunConfig, before: Layout, data: int) -> RunConfig:
    """Keep groups of ZeRO that divide the same axis, or another one if its small size has no divisor."""
    parallel, value = small.parallel, zero_group.JOB
    if before.zero_block is not None and (sizes := zero_group.legal(parallel, data)):
        _, expert, context = before.zero_block
        whole = parallel.context * (parallel.expert if context == before.context else 1)
        divided = [size for size in sizes if size < whole or (expert, context) == (before.expert, before.context)]
        value = str(max(divided or sizes))
    return knobs.changed(small, {"parallel.zero_group": value})


def _shrink_schedule(small: RunConfig, steps: int) -> RunConfig:
    """Scale the phases of the learning rate to the small number of steps; each phase in use keeps at least one step."""
    training, optimizer = small.training, small.optimizer
    ratio = steps / training.steps
    values: dict[str, Any] = {"training.steps": steps}
    for name in ("decay_steps", "warmup_steps", "slow_warmup_steps"):
        planned = getattr(optimizer, name)
        values[f"optimizer.{name}"] = min(max(1, round(planned * ratio)), max(1, steps // 3)) if planned else 0
    if optimizer.decay_ends:  # one of them, where a decay of the small run fits
        warm = values["optimizer.warmup_steps"] or math.ceil(optimizer.warmup_ratio * steps)
        decay = values["optimizer.decay_steps"] or max(1, steps // 10)
        end = min(max(round(optimizer.decay_ends[0] * ratio), warm + decay), steps - decay)
        values["optimizer.decay_ends"] = [end] if end >= warm + decay else []
    for name, kind in (("sequence_warmup", WarmupConfig), ("batch_rampup", RampupConfig)):
        entries: list[WarmupConfig] = getattr(training, name)
        ends = entries if len(entries) <= LARGEST_WARMUP else [entries[0], entries[-1]]
        values[f"training.{name}"] = [kind(number, entry.value) for number, entry in enumerate(ends, 1)]
    for name in loss_weights.NAMES:
        weights: list[ScheduledWeight] = getattr(training, f"{name}_schedule")
        chosen = weights if len(weights) <= LARGEST_WARMUP else [weights[0], weights[-1]]
        values[f"training.{name}_schedule"] = [ScheduledWeight(number, entry.value) for number, entry in enumerate(chosen, 1)]
    return knobs.changed(small, values)


def _shrink_sequence(small: RunConfig) -> RunConfig:
    """Shorten sequences. The k-th longest sequence of a warm-up is 2**k times shorter than the full length."""
    training, parallel = small.training, small.parallel
    model: Any = small.model
    planned, entries = training.sequence_length, training.sequence_warmup
    lengths = sorted({planned, *(entry.value for entry in entries)}, reverse=True)
    unit = (2 * parallel.context if parallel.context > 1 else 1) * (parallel.tensor if parallel.sequence_parallel else 1)
    unit *= 2 ** (len(lengths) - 1)
    least = max(SEQUENCE, 4 * (1 + getattr(model, "mtp_depth", 0)), 2 * unit if entries else unit)
    length = -(-least // unit) * unit
    if length >= planned:
        return small
    values: dict[str, Any] = {
        "training.sequence_length": length,
        "training.sequence_warmup": [WarmupConfig(entry.until_step, length >> lengths.index(entry.value)) for entry in entries],
        "training.goldfish_context": min(training.goldfish_context, length - 1),
        "model.max_positions": length if model.max_positions == planned else min(model.max_positions, 2 * length),
    }
    for name in ("window", "banded_window", "local_attention"):
        if window := getattr(model, name, None):
            values[f"model.{name}"] = max(1, min(window, 3 * length // 8)) if window < planned else length
    if hasattr(model, "buckets") and model.buckets > 8:
        values |= {"model.buckets": 8, "model.max_distance": min(model.max_distance, 12)}
    return knobs.changed(small, values)


def _shrink_layers(small: RunConfig, planned: RunConfig, before: Layout) -> RunConfig:
    """Keep BLOCKS of every kind per stage, as far as the planned stages have them; one more if the planned stages differ in size."""
    model: Any = small.model
    wanted = planned.model.layers
    sizes: dict[str, Any] = {}
    kinds = 1
    for name in (
        *("sliding_window_pattern", "no_rope_layer_interval", "expert_interval", "full_attention_interval"),
        "global_attn_every_n_layers",
    ):
        if 1 < (getattr(model, name, 0) or 0) <= wanted:
            sizes[f"model.{name}"] = kinds = 2
    if pattern := getattr(model, "layer_pattern", ""):
        letters = "".join(dict.fromkeys(model.kind(block) for block in range(wanted)))
        if len(letters) < len(pattern):
            sizes["model.layer_pattern"] = letters
        kinds = len(letters)
    if shared := getattr(model, "kv_shared_layers", 0):
        kinds *= 2
    stages = small.parallel.pipeline * stages_per_rank(small.parallel)
    per_stage = max(1, min(BLOCKS * kinds, wanted // before.stage_count))
    if planned.precision.fp8 != "none":  # at least two blocks between those whose products stay bf16
        sizes["precision.fp8_exclude_layers"] = excluded = min(planned.precision.fp8_exclude_layers, 1)
        per_stage = max(per_stage, -(-(2 * excluded + 2) // stages))
    layers = max(2, stages * per_stage + (1 if wanted % before.stage_count else 0))
    if planned.parallel.layers_per_stage:
        uneven = _few_of_stages(planned.parallel.layers_per_stage, stages)
        sizes["parallel.layers_per_stage"], layers = uneven, sum(uneven)
    layers = sizes["model.layers"] = min(wanted, layers)
    if shared:
        sizes["model.kv_shared_layers"] = min(shared, layers // 2)
    if dense := getattr(model, "dense_layers", 0):
        sizes["model.dense_layers"] = layers if dense == wanted else min(dense, BLOCKS, layers - 1)
    if blocks := getattr(model, "dense_blocks", []):
        sizes["model.dense_blocks"] = [block for block in blocks if block < layers]
    if encoder := getattr(model, "encoder_layers", None):
        sizes["model.encoder_layers"] = min(max(1, round(encoder / wanted * layers)), layers - 1)
    return knobs.changed(small, sizes)


def _few_of_stages(blocks: list[int], stages: int) -> list[int]:
    """Return the number of blocks of few stages, the first and the last one among them; larger stages stay larger."""
    chosen = [blocks[round(index * (len(blocks) - 1) / max(1, stages - 1))] for index in range(stages)]
    return [min(count, BLOCKS) + (1 if count > min(blocks) and count > BLOCKS else 0) for count in chosen]


def _shrink_batch(small: RunConfig, planned: RunConfig, before: Layout, data: int) -> RunConfig:
    """Keep gradient accumulation: as many micro-batches as the schedule needs, and in the full batch one or, interleaved, a round more."""
    parallel, training = small.parallel, small.training
    fewest = 1 if parallel.pipeline == 1 else parallel.pipeline * (2 if parallel.schedule == "zbv" else 1)
    most = 2 * fewest if parallel.schedule == "interleaved" else fewest + 1
    micro_batch = min(training.micro_batch_size, 2)
    full = training.global_batch_size

    def size(value: int, limit: int) -> int:
        micro_batches = value // (before.batch_shards * planned.training.micro_batch_size)
        return min(micro_batches, limit) * data * parallel.expert * micro_batch

    rampup = [RampupConfig(entry.until_step, size(entry.value, fewest if entry.value < full else most)) for entry in training.batch_rampup]
    batch = {"training.micro_batch_size": micro_batch, "training.global_batch_size": size(full, most)}
    return knobs.changed(small, {**batch, "training.batch_rampup": rampup})


def _use_cpu_kernels(small: RunConfig) -> RunConfig:
    """Select what a CPU supports: flex attention has no backward pass there, and compilation takes minutes. Lower the loss scale."""
    attention = "auto" if small.training.attention == "flex" else small.training.attention
    compiled = "off" if small.training.compile == "on" else small.training.compile
    values: dict[str, Any] = {"training.attention": attention, "training.compile": compiled, "training.delta_rule": "auto"}
    if small.precision.dtype == "fp16":
        values["precision.initial_loss_scale"] = min(small.precision.initial_loss_scale, LOSS_SCALE)
    return knobs.changed(small, values)


def shrink_frozen(small: RunConfig, planned: RunConfig, before: Layout, after: Layout) -> RunConfig:
    """Return the small version with patterns of training.frozen for its own blocks.

    Every small block stands for a planned one of its stage. Planned blocks that freeze different weights are represented first, as far as
    the small stage has blocks.

    Args:
        small: with the small sizes.
        planned: a legal configuration.
        before, after: the layouts of both.
    """
    if not planned.training.frozen:
        return small
    with torch.device("meta"):
        names = [name for name, _ in build_model(small).named_parameters()]
    inside = {name.split(".", 2)[2] for name in names if name.startswith("blocks.")}
    represented: dict[int, int] = {}
    for stage in range(after.stage_count):
        planned_stage = round(stage * (before.stage_count - 1) / max(1, after.stage_count - 1))
        blocks = list(after.layers(stage, small.model.layers))
        chosen = _represented(planned, list(before.layers(planned_stage, planned.model.layers)), sorted(inside), len(blocks))
        represented |= zip(blocks, chosen, strict=True)
    frozen = [name for name in names if planned.is_frozen(_planned_name(name, represented))]
    if frozen == [name for name in names if small.is_frozen(name)]:
        return small
    return knobs.changed(small, {"training.frozen": frozen})


def _represented(planned: RunConfig, blocks: list[int], inside: list[str], count: int) -> list[int]:
    """Return `count` blocks of a planned stage: the first one of each kind of frozen weights, then others; in their order."""
    kinds: dict[tuple[bool, ...], int] = {}
    for block in blocks:
        kinds.setdefault(tuple(planned.is_frozen(f"blocks.{block}.{name}") for name in inside), block)
    first = list(kinds.values())
    others = [block for block in blocks if block not in first]
    chosen = sorted([*first, *others][:count])
    return [*chosen, *chosen[-1:] * (count - len(chosen))]


def _planned_name(name: str, represented: dict[int, int]) -> str:
    """Return the name of a weight of the small model in the planned one."""
    first, *rest = name.split(".", 2)
    return name if first != "blocks" else f"blocks.{represented[int(rest[0])]}.{rest[1]}"
