"""Rules across keys. Every violation is collected, so that a user mends them all at once."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline import knobs
from pipeline.config import check_data, warmup
from pipeline.config.layout import stages_per_rank
from pipeline.config.schema import RunConfig
from pipeline.errors import UserError, Violation

#: Stages that start a process group and a layout.
PARALLEL_STAGES = ("pretrain", "evaluate")

#: Groups whose keys occur in rules across keys.
_CROSSED = ("clean", "data", "dedup", "model", "tokenizer", "parallel", "training")


def check(config: RunConfig, world_size: int) -> None:
    """Refuse an impossible combination before any work starts.

    Args:
        config: the composed configuration.
        world_size: ranks of this job.

    Raises:
        UserError: with every violation found.
    """
    if found := violations(config, world_size):
        raise UserError(found)


def violations(config: RunConfig, world_size: int) -> list[Violation]:
    """Every broken rule. Rules across sizes wait until each size is legal by itself."""
    found = knobs.range_violations(config)
    if any(violation.key.partition(".")[0] in _CROSSED for violation in found):
        return found
    found += [*config.model.violations(), *_corpora(config)]
    if config.stage.name in PARALLEL_STAGES:
        found += [*_tensor(config), *_expert(config), *_context(config), *_pipeline(config)]
        found += [*_batch(config, world_size), *_training(config)]
        if config.dry_run.enabled and config.dry_run.rank >= world_size:
            rule = f"must be below the world size {world_size}"
            found.append(Violation("dry_run.rank", config.dry_run.rank, rule, "choose a rank of the job"))
    return [*found, *check_data.violations(config)]


def _corpora(config: RunConfig) -> Iterator[Violation]:
    """The names of corpora become parts of file names and identities."""
    for name in config.data.corpora:
        if name == "default" or not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name):
            rule = "is what data.input is called" if name == "default" else "must consist of a-z, 0-9, '_', '.' and '-'"
            yield Violation("data.corpora", name, rule, "give the corpus another name")


def _tensor(config: RunConfig) -> Iterator[Violation]:
    """Tensor parallelism cuts heads, feed-forward and sequence into equal pieces."""
    tensor, model = config.parallel.tensor, config.model
    for name in ("heads", "kv_heads", "ffn_hidden"):
        size = getattr(model, name)
        if size % tensor:
            why = f"must divide model.{name}={size}"
            yield Violation("parallel.tensor", tensor, why, f"choose a common divisor of heads, kv_heads and ffn_hidden, not {tensor}")
    if tensor > model.vocab_size:
        yield Violation("parallel.tensor", tensor, f"is more than model.vocab_size={model.vocab_size}", "use fewer tensor ranks")
    lengths = warmup.keyed_values(config.training.sequence_warmup, "sequence_length", config.training.sequence_length)
    for key, length in lengths if config.parallel.sequence_parallel else ():
        if length % tensor:
            why = f"must be divisible by parallel.tensor={tensor} when parallel.sequence_parallel is on"
            yield Violation(key, length, why, f"choose a multiple of {tensor}, or parallel.sequence_parallel=false")


def _expert(config: RunConfig) -> Iterator[Violation]:
    """Expert parallelism shares out whole experts, and tensor parallelism cuts each."""
    ranks, experts = config.parallel.expert, getattr(config.model, "experts", 0)
    if ranks > 1 and not experts:
        rule = f"the model family {config.model.family} has no experts"
        yield Violation("parallel.expert", ranks, rule, "leave it at 1, or choose a mixture (model=mixtral-8x7b)")
    elif experts % ranks:
        yield Violation("parallel.expert", ranks, f"must divide model.experts={experts}", "choose a divisor of model.experts")
    tensor, width = config.parallel.tensor, getattr(config.model, "expert_ffn_hidden", 0)
    if width % tensor:
        why = f"must divide model.expert_ffn_hidden={width}"
        yield Violation("parallel.tensor", tensor, why, "choose a divisor of model.expert_ffn_hidden")


def _context(config: RunConfig) -> Iterator[Violation]:
    """Context parallelism cuts sequences into equal chunks, two a rank; ulysses gives each rank some heads."""
    parallel, model = config.parallel, config.model
    context = parallel.context
    if context == 1:
        return
    if model.objective != "causal":
        why = f"cuts the sequences of models that predict the next token; model.family={model.family} is trained otherwise"
        yield Violation("parallel.context", context, why, "use parallel.context=1, and more data, tensor or pipeline ranks")
    if depth := getattr(model, "mtp_depth", 0):  # labels further ahead are made of the next tokens' labels
        why = f"cuts sequences, and model.mtp_depth={depth} needs them whole"
        yield Violation("parallel.context", context, why, "use parallel.context=1, or model.mtp_depth=0")
    pieces = 2 * context * (parallel.tensor if parallel.sequence_parallel else 1)
    for key, length in warmup.keyed_values(config.training.sequence_warmup, "sequence_length", config.training.sequence_length):
        if length % pieces:
            tensor = f" x parallel.tensor={parallel.tensor}" if pieces != 2 * context else ""
            yield Violation(key, length, f"must be divisible by 2 x parallel.context={context}{tensor}", f"choose a multiple of {pieces}")
    if parallel.context_kind == "ulysses":
        for name in ("heads", "kv_heads"):
            heads = getattr(model, name)
            if heads % (parallel.tensor * context):
                why = f"must divide model.{name}={heads} / parallel.tensor={parallel.tensor}: ulysses swaps tokens for whole heads"
                yield Violation("parallel.context", context, why, "use fewer context ranks, or parallel.context_kind=ring")


def _pipeline(config: RunConfig) -> Iterator[Violation]:
    """Stages need layers, and schedules have their own conditions."""
    parallel = config.parallel
    if parallel.pipeline == 1:
        return
    per_rank, stages = stages_per_rank(config), parallel.pipeline * stages_per_rank(config)
    if config.model.layers < stages:
        why = f"is fewer than the {stages} stages ({parallel.pipeline} ranks x {per_rank})"
        yield Violation("model.layers", config.model.layers, why, "use fewer pipeline ranks or stages, or a deeper model")
    key = "parallel.stages_per_rank"
    if parallel.schedule == "1f1b" and per_rank != 1:
        yield Violation(key, per_rank, "1f1b holds one stage a rank", "leave it unset, or parallel.schedule=interleaved")
    if parallel.schedule == "interleaved" and per_rank < 2:
        yield Violation(key, per_rank, "interleaved holds at least 2 stages a rank", "set it to 2 or more, or parallel.schedule=1f1b")
    if parallel.schedule == "zbv":
        yield from _zbv(config, per_rank)


def _zbv(config: RunConfig, per_rank: int) -> Iterator[Violation]:
    """The zero-bubble schedule computes the gradients of inputs and of weights apart."""
    if per_rank != 2:
        yield Violation("parallel.stages_per_rank", per_rank, "zbv holds exactly 2 stages a rank", "leave it unset")
    if config.parallel.zero_stage == 3:
        why = "zbv splits the backward pass and needs whole weights in both halves"
        yield Violation("parallel.zero_stage", 3, why, "use zero_stage 0, 1 or 2, or another schedule")
    recompute = config.training.activation_checkpointing
    if recompute != "none":
        why = "zbv's split backward pass would recompute twice"
        yield Violation("training.activation_checkpointing", recompute, why, "use none, or another schedule")
    if config.training.compile == "on":
        yield Violation("training.compile", "on", "a compiled block has no split backward pass for zbv", "use auto or off")


def _batch(config: RunConfig, world_size: int) -> Iterator[Violation]:
    """World size and batch sizes must come out even."""
    parallel, training = config.parallel, config.training
    model_ranks = parallel.tensor * parallel.context * parallel.expert * parallel.pipeline
    if world_size % model_ranks:
        axes = ("tensor", "context", "expert", "pipeline")
        why = "does not divide into " + " x ".join(
            f"parallel.{axis}={getattr(parallel, axis)}" for axis in axes if getattr(parallel, axis) > 1 or axis in ("tensor", "pipeline")
        )
        yield Violation("world size", world_size, why, f"start a multiple of {model_ranks} ranks, or choose a smaller layout")
        return
    data = world_size // model_ranks * parallel.expert
    for key, size in warmup.keyed_values(training.batch_rampup, "global_batch_size", training.global_batch_size):
        yield from _global_batch(config, data, key, size)


def _global_batch(config: RunConfig, shares: int, key: str, size: int) -> Iterator[Violation]:
    """A global batch of `size` samples, as configuration key `key` sets it."""
    parallel, micro_batch = config.parallel, config.training.micro_batch_size
    if size % (shares * micro_batch):
        why = f"must be a multiple of {shares} data ranks x micro_batch_size {micro_batch}"
        yield Violation(key, size, why, f"choose a multiple of {shares * micro_batch}")
        return
    micro_batches = size // (shares * micro_batch)
    if parallel.pipeline == 1:
        return
    needed = 2 * parallel.pipeline if parallel.schedule == "zbv" else parallel.pipeline
    if micro_batches < needed:
        why = f"gives {micro_batches} micro-batches; {parallel.schedule} on {parallel.pipeline} pipeline ranks needs {needed}"
        yield Violation(key, size, why, f"use at least {needed * shares * micro_batch}, or smaller micro-batches")
    elif parallel.schedule == "interleaved" and micro_batches % parallel.pipeline:
        rounds = max(1, micro_batches // parallel.pipeline)
        if micro_batches % rounds:
            why = f"gives {micro_batches} micro-batches; interleaved needs a multiple of {rounds} rounds"
            yield Violation(key, size, why, f"make the micro-batches a multiple of parallel.pipeline={parallel.pipeline}")


def _training(config: RunConfig) -> Iterator[Violation]:
    """The run against the model and itself."""
    training, optimizer = config.training, config.optimizer
    if training.activation_checkpointing == "selective" and config.parallel.zero_stage == 3:
        why = "ZeRO 3 gathers weights within a block, other ones when it is computed again, and what was kept would not be found"
        yield Violation("training.activation_checkpointing", "selective", why, "use full or none, or another parallel.zero_stage")
    if training.sequence_length > config.model.max_positions:
        why = f"is longer than model.max_positions={config.model.max_positions}"
        yield Violation("training.sequence_length", training.sequence_length, why, "shorten the sequences, or raise model.max_positions")
    if optimizer.warmup_steps + optimizer.decay_steps > training.steps:
        why = f"and decay_steps={optimizer.decay_steps} are more than training.steps={training.steps}"
        yield Violation("optimizer.warmup_steps", optimizer.warmup_steps, why, "shorten them, or train longer")
