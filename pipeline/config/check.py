"""Validation rules across keys. All violations are collected and reported in one message."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config import check_data, check_finetune, check_stages, warmup
from pipeline.config.layout import stages_per_rank
from pipeline.config.schema import RunConfig
from pipeline.config.stages import PARALLEL_STAGES, Evaluate, plans_other_layouts

_CORPUS_NAME_RULE = "must consist of a-z, 0-9, '_', '.' and '-', and begin with a letter or a digit"


def violations(config: RunConfig, world_size: int) -> list[Violation]:
    """Return all violated rules between keys. Every single value is in its range already."""
    found = [*config.model.violations(), *_corpora(config)]
    if not config.run_dir.strip():
        found.append(Violation("run_dir", repr(config.run_dir), "must name a folder", "set run_dir, or remove an unset variable from it"))
    has_tasks = isinstance(config.stage, Evaluate) and bool(config.stage.tasks)
    if config.stage.name in PARALLEL_STAGES and not plans_other_layouts(config.stage) and not has_tasks:
        found += training_violations(config, world_size)
        if config.dry_run.enabled and config.dry_run.rank >= world_size:
            rule = f"must be less than the world size {world_size}"
            found.append(Violation("dry_run.rank", config.dry_run.rank, rule, f"choose a rank from 0 to {world_size - 1}"))
    found += check_finetune.stage_violations(config)
    return [*found, *check_stages.violations(config, world_size), *check_data.violations(config)]


def training_violations(config: RunConfig, world_size: int) -> list[Violation]:
    """Return the rules between model, layout, batches and training length that a configuration violates."""
    found = [*_tensor(config), *_expert(config), *_context(config), *_pipeline(config)]
    found += [*_batch(config, world_size), *_training(config), *check_finetune.violations(config), *_start(config)]
    return found


def layout_violations(config: RunConfig) -> list[Violation]:
    """Return the rules between layout and model that a configuration violates, for a model that is read from a checkpoint."""
    return [*_tensor(config), *_pipeline(config)]


def _corpora(config: RunConfig) -> Iterator[Violation]:
    """Corpus names are used in file names and document ids."""
    for name in config.data.corpora:
        if name == "default" or not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name):
            rule = "is the reserved name of the corpus of data.input" if name == "default" else _CORPUS_NAME_RULE
            yield Violation("data.corpora", name, rule, "rename the corpus")


def _tensor(config: RunConfig) -> Iterator[Violation]:
    """Tensor parallelism splits heads, feed-forward layers and the sequence into equal pieces."""
    tensor, model = config.parallel.tensor, config.model
    for name in ("heads", "kv_heads", "ffn_hidden"):
        size = getattr(model, name)
        if size % tensor:
            rule = f"must divide model.{name}={size}"
            yield Violation("parallel.tensor", tensor, rule, "choose a common divisor of model.heads, model.kv_heads and model.ffn_hidden")
    if tensor > model.vocab_size:
        yield Violation("parallel.tensor", tensor, f"must not exceed model.vocab_size={model.vocab_size}", "use fewer tensor ranks")
    if config.parallel.async_tensor == "on" and (tensor == 1 or not config.parallel.sequence_parallel or not may_compile(config)):
        rule = "requires parallel.tensor above 1, parallel.sequence_parallel=true, and compiled blocks (not zbv)"
        yield Violation("parallel.async_tensor", "on", rule, "set parallel.async_tensor=auto")
    lengths = warmup.keyed_values(config.training.sequence_warmup, "sequence_length", config.training.sequence_length)
    for key, length in lengths if config.parallel.sequence_parallel else ():
        if length % tensor:
            rule = f"must be divisible by parallel.tensor={tensor} with parallel.sequence_parallel=true"
            yield Violation(key, length, rule, f"choose a multiple of {tensor}, or set parallel.sequence_parallel=false")


def may_compile(config: RunConfig) -> bool:
    """Whether blocks are compiled on a GPU. torch.compile does not support the split backward pass of zbv."""
    return config.training.compile != "off" and not (config.parallel.schedule == "zbv" and config.parallel.pipeline > 1)


def _expert(config: RunConfig) -> Iterator[Violation]:
    """Expert parallelism distributes complete experts over ranks; tensor parallelism shards each expert."""
    ranks, experts = config.parallel.expert, getattr(config.model, "experts", 0)
    if ranks > 1 and not experts:
        rule = f"requires an MoE model; model.family={config.model.family} has no experts"
        yield Violation("parallel.expert", ranks, rule, "set parallel.expert=1, or choose an MoE model (model=mixtral-8x7b)")
    elif experts % ranks:
        yield Violation("parallel.expert", ranks, f"must divide model.experts={experts}", "choose a divisor of model.experts")
    tensor, width = config.parallel.tensor, getattr(config.model, "expert_ffn_hidden", 0)
    if ranks > 1 and config.model.hidden % tensor:
        rule = f"must divide model.hidden={config.model.hidden} with parallel.expert={ranks}"
        yield Violation("parallel.tensor", tensor, rule, "choose a divisor of model.hidden")
    if width % tensor:
        rule = f"must divide model.expert_ffn_hidden={width}"
        yield Violation("parallel.tensor", tensor, rule, "choose a divisor of model.expert_ffn_hidden")


def _context(config: RunConfig) -> Iterator[Violation]:
    """Context parallelism splits sequences into equal chunks, two per rank; ulysses also splits the heads."""
    parallel, model = config.parallel, config.model
    context = parallel.context
    if context == 1:
        return
    if depth := getattr(model, "mtp_depth", 0):  # labels of depth k are the next-token labels shifted by k, across chunk boundaries
        rule = f"splits sequences, and model.mtp_depth={depth} requires full sequences"
        yield Violation("parallel.context", context, rule, "set parallel.context=1 or model.mtp_depth=0")
    divisor = 2 * context * (parallel.tensor if parallel.sequence_parallel else 1)
    for key, length in warmup.keyed_values(config.training.sequence_warmup, "sequence_length", config.training.sequence_length):
        if length % divisor:
            tensor = f" x parallel.tensor={parallel.tensor}" if divisor != 2 * context else ""
            yield Violation(key, length, f"must be divisible by 2 x parallel.context={context}{tensor}", f"choose a multiple of {divisor}")
    if parallel.context_kind == "ulysses":
        for name in ("heads", "kv_heads"):
            heads = getattr(model, name)
            if heads % (parallel.tensor * context):
                rule = f"must divide model.{name}={heads} / parallel.tensor={parallel.tensor} (ulysses splits the heads)"
                yield Violation("parallel.context", context, rule, "use fewer context ranks, or set parallel.context_kind=ring")


def _pipeline(config: RunConfig) -> Iterator[Violation]:
    """Each pipeline stage holds at least one layer, and each schedule has its own rules."""
    parallel = config.parallel
    yield from _layers_per_stage(config)
    if parallel.pipeline == 1:
        return
    per_rank, stages = stages_per_rank(config), parallel.pipeline * stages_per_rank(config)
    if config.model.layers < stages:
        rule = f"must be at least {stages}, the number of pipeline stages ({parallel.pipeline} ranks x {per_rank} per rank)"
        yield Violation("model.layers", config.model.layers, rule, "use fewer pipeline ranks or stages per rank, or more layers")
    key = "parallel.stages_per_rank"
    if parallel.schedule == "1f1b" and per_rank != 1:
        yield Violation(key, per_rank, "1f1b has exactly 1 stage per rank", "leave it unset, or set parallel.schedule=interleaved")
    if parallel.schedule == "interleaved" and per_rank < 2:
        yield Violation(
            key, per_rank, "interleaved requires at least 2 stages per rank", "set it to 2 or more, or set parallel.schedule=1f1b"
        )
    if parallel.schedule == "zbv":
        yield from _zbv(config, per_rank)


def _layers_per_stage(config: RunConfig) -> Iterator[Violation]:
    """The numbers of layers that are set for each stage are those of the model."""
    given, stages = config.parallel.layers_per_stage, config.parallel.pipeline * stages_per_rank(config)
    if not given:
        return
    key, shown = "parallel.layers_per_stage", "[" + ",".join(map(str, given)) + "]"
    if len(given) != stages:
        yield Violation(key, shown, f"has {len(given)} stages; the pipeline has {stages}", f"list {stages} numbers, or leave it empty")
    elif sum(given) != config.model.layers:
        rule = f"has {sum(given)} layers; the model has model.layers={config.model.layers}"
        yield Violation(key, shown, rule, f"choose numbers with the sum {config.model.layers}, or set parallel.balance=flops instead")


def _zbv(config: RunConfig, per_rank: int) -> Iterator[Violation]:
    """The zero-bubble V schedule computes the gradients of inputs and of weights in separate passes."""
    if per_rank != 2:
        yield Violation("parallel.stages_per_rank", per_rank, "zbv has exactly 2 stages per rank", "leave it unset")
    recompute = config.training.activation_checkpointing
    if recompute != "none":
        rule = "zbv splits the backward pass and would recompute the activations twice"
        yield Violation("training.activation_checkpointing", recompute, rule, "set it to none, or choose another schedule")
    if config.training.compile == "on":
        yield Violation(
            "training.compile", "on", "zbv splits the backward pass, which compiled blocks do not support", "set it to auto or off"
        )


def _batch(config: RunConfig, world_size: int) -> Iterator[Violation]:
    """World size and batch sizes are divisible by the layout."""
    parallel, training = config.parallel, config.training
    model_ranks = parallel.tensor * parallel.context * parallel.expert * parallel.pipeline
    if world_size % model_ranks:
        axes = ("tensor", "context", "expert", "pipeline")
        rule = "must be divisible by " + " x ".join(
            f"parallel.{axis}={getattr(parallel, axis)}" for axis in axes if getattr(parallel, axis) > 1 or axis in ("tensor", "pipeline")
        )
        yield Violation(
            "world size", world_size, rule, f"set the number of ranks to a multiple of {model_ranks}, or reduce the parallel sizes"
        )
        return
    data = world_size // model_ranks * parallel.expert
    for key, size in warmup.keyed_values(training.batch_rampup, "global_batch_size", training.global_batch_size):
        yield from _global_batch(config, data, key, size)


def _global_batch(config: RunConfig, batch_shards: int, key: str, size: int) -> Iterator[Violation]:
    """A global batch of `size` samples, set by configuration key `key`."""
    parallel, micro_batch = config.parallel, config.training.micro_batch_size
    if size % (batch_shards * micro_batch):
        rule = f"must be a multiple of {batch_shards} data ranks x micro_batch_size {micro_batch}"
        yield Violation(key, size, rule, f"choose a multiple of {batch_shards * micro_batch}")
        return
    micro_batches = size // (batch_shards * micro_batch)
    if parallel.pipeline == 1:
        return
    needed = 2 * parallel.pipeline if parallel.schedule == "zbv" else parallel.pipeline
    if micro_batches < needed:
        rule = f"yields {micro_batches} micro-batches per rank; {parallel.schedule} on {parallel.pipeline} pipeline ranks requires {needed}"
        yield Violation(key, size, rule, f"use at least {needed * batch_shards * micro_batch}, or reduce training.micro_batch_size")
    elif parallel.schedule == "interleaved" and micro_batches % parallel.pipeline:
        rounds = max(1, micro_batches // parallel.pipeline)
        if micro_batches % rounds:
            rule = f"yields {micro_batches} micro-batches per rank; interleaved requires a multiple of {rounds} rounds"
            yield Violation(key, size, rule, f"choose a number of micro-batches divisible by parallel.pipeline={parallel.pipeline}")


def _start(config: RunConfig) -> Iterator[Violation]:
    """A run starts in one way."""
    start, resume = config.checkpoint.initialize_from, config.checkpoint.resume
    if start is not None and resume not in ("auto", "none"):
        rule = f"starts the run, and so does checkpoint.resume={resume}"
        yield Violation("checkpoint.initialize_from", start, rule, "set one of them")


def _training(config: RunConfig) -> Iterator[Violation]:
    """Training length, sequence length and number formats."""
    training, optimizer = config.training, config.optimizer
    if config.precision.fp8 != "none" and config.precision.dtype != "bf16":
        rule = f"requires precision.dtype=bf16, not {config.precision.dtype}"
        yield Violation("precision.fp8", config.precision.fp8, rule, "set precision=fp8")
    if training.sequence_length > config.model.max_positions:
        rule = f"must not exceed model.max_positions={config.model.max_positions}"
        yield Violation(
            "training.sequence_length", training.sequence_length, rule, "reduce the sequence length, or increase model.max_positions"
        )
    if training.activation_budget is not None:
        if training.activation_checkpointing != "selective":
            rule = f"has no effect with training.activation_checkpointing={training.activation_checkpointing}"
            fix = "set training.activation_checkpointing=selective"
            yield Violation("training.activation_budget", training.activation_budget, rule, fix)
        unsupported = {"encoder_blocks": "encoder-decoders", "experts": "MoE models: the number of rows of an expert is not known before"}
        for rule in (f"is not supported by {models}" for attribute, models in unsupported.items() if hasattr(config.model, attribute)):
            yield Violation("training.activation_budget", training.activation_budget, rule, "remove it")
    if optimizer.warmup_steps + optimizer.decay_steps > training.steps:
        rule = f"plus optimizer.decay_steps={optimizer.decay_steps} must not exceed training.steps={training.steps}"
        yield Violation("optimizer.warmup_steps", optimizer.warmup_steps, rule, "reduce them, or increase training.steps")
