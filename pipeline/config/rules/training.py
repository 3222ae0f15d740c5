"""Rules of the group training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.common.errors import Violation
from pipeline.config import layouts, loss_weights, warmup
from pipeline.config.data import ScheduledWeight, WarmupConfig
from pipeline.config.rules.unread import unlike
from pipeline.config.schema import RunConfig
from pipeline.config.training import TrainingConfig


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violated rules between training and the model, the layout and the adapters."""
    yield from _sequence_length(config)
    yield from _activation_budget(config)
    yield from _attention_group(config)
    yield from _fused_attention(config)
    yield from _delta_rule(config)
    yield from _loss_weights(config)
    yield from _loss_spikes(config)
    late = [step for step in config.training.profile if config.training.epochs is None and step > config.training.steps]
    for step in late:
        yield Violation("training.profile", step, f"is after training.steps={config.training.steps}", "choose an earlier step")


def profiled_ranks(training: TrainingConfig, world_size: int) -> Iterator[Violation]:
    """Yield the ranks of training.profile_ranks that a job does not have."""
    for rank in training.profile_ranks:
        if training.profile and rank >= world_size:
            rule = f"must be less than the number of ranks, {world_size}"
            yield Violation("training.profile_ranks", rank, rule, f"choose ranks from 0 to {world_size - 1}")


def warmup_violations(training: TrainingConfig) -> Iterator[Violation]:
    """Yield the violated rules of warm-ups: entries are in order, and short sequences divide the full sequence length."""
    for name in ("sequence_warmup", "batch_rampup"):
        yield from _order(f"training.{name}", getattr(training, name))
    for number, entry in enumerate(training.sequence_warmup):
        if entry.value == training.sequence_length:
            why = "is training.sequence_length, so that the entry has no effect"
            yield Violation(f"training.sequence_warmup.{number}.value", entry.value, why, "choose a shorter length, or remove it")
        if training.sequence_length % entry.value or entry.value < 2:
            why = (
                f"must divide training.sequence_length={training.sequence_length} and be at least 2: each sample is split into equal parts"
            )
            yield Violation(f"training.sequence_warmup.{number}.value", entry.value, why, "choose such a length")


def _loss_weights(config: RunConfig) -> Iterator[Violation]:
    """Weights of losses that the model has, and that a schedule sets in order."""
    training, known = config.training, loss_weights.defaults(config.model)
    for name in loss_weights.NAMES:
        schedule = getattr(training, f"{name}_schedule")
        yield from _order(f"training.{name}_schedule", schedule)
        for key, value in ((name, getattr(training, name)), (f"{name}_schedule", f"{len(schedule)} entries" if schedule else None)):
            if value is not None and name not in known:
                without_mtp = name == "mtp_loss" and getattr(config.model, "mtp_depth", None) == 0
                why = "model.mtp_depth=0" if without_mtp else f"model.family={config.model.family}"
                yield Violation(f"training.{key}", value, f"has no effect with {why}", "remove it")


def _loss_spikes(config: RunConfig) -> Iterator[Violation]:
    """A run that returns to the checkpoint before a loss spike still has it when it knows of the spike, and has not ended before."""
    training, checkpoint = config.training, config.checkpoint
    if not training.spike_factor:
        return
    delay = training.spike_patience + 3  # steps until all ranks act on a spike (training/rewinds.py)
    if checkpoint.every == 0:
        rule = f"is required by training.spike_factor={training.spike_factor}, which returns to a checkpoint"
        yield Violation("checkpoint.every", 0, rule, "set it to a number of steps")
    elif (checkpoint.keep - 1) * checkpoint.every < delay:
        rule = f"with checkpoint.every={checkpoint.every} removes the checkpoint before a loss spike until it is known, {delay} steps later"
        yield Violation("checkpoint.keep", checkpoint.keep, rule, f"set it to at least {1 - -delay // checkpoint.every}")
    if training.max_skipped_steps < delay:
        rule = f"ends the run before it can return from a loss spike, which takes {delay} steps (training.spike_patience + 3)"
        yield Violation("training.max_skipped_steps", training.max_skipped_steps, rule, f"set it to at least {delay}")


def _order(key: str, entries: Sequence[WarmupConfig | ScheduledWeight]) -> Iterator[Violation]:
    """Entries of a warm-up have increasing ends."""
    before = 0
    for number, entry in enumerate(entries):
        if entry.until_step <= before:
            yield Violation(f"{key}.{number}.until_step", entry.until_step, f"must be after step {before}", "list the entries in order")
        before = entry.until_step


def stage_violations(config: RunConfig, planned: str) -> Iterator[Violation]:
    """Yield a violation for every setting that the stage does not read; `planned` is the stage of the job, which stage=plan plans."""
    training, stage = config.training, config.stage.name
    if stage in ("certify", "plan"):
        rule = f"is not supported by stage={stage}"
        yield from unlike(config, {"training.fake_quantize": "none"}, rule, "remove it, for the job without rounding")
        yield from unlike(config, {"training.attention_group": 0}, rule, "remove it, for full attention")
    if stage != "finetune":
        if training.epochs is not None:
            fix = "remove it, and set training.steps; data.blend.CORPUS.max_epochs limits the epochs of a corpus"
            yield Violation("training.epochs", training.epochs, f"is read by stage=finetune only, not by {stage}", fix)
        if training.steps == 0:
            yield Violation("training.steps", 0, "must be at least 1", "set it to a number of steps")
    elif training.steps and training.epochs is not None:
        rule = f"and training.steps={training.steps} both set the length of the run"
        yield Violation("training.epochs", training.epochs, rule, "remove one of them")
    if training.context_factor != 1 and planned != "finetune":
        rule = f"is read by stage=finetune only, not by {planned}"
        fix = "remove it; pretrain is told its context by model.max_positions and model.rope_scaling"
        yield Violation("training.context_factor", training.context_factor, rule, fix)
    if stage == "pretrain":
        yield from _unread_files(config)


def _unread_files(config: RunConfig) -> Iterator[Violation]:
    """Files to train on are those that the objective reads."""
    instructions, pairs = config.data.instructions.train, config.data.pairs.train
    if instructions and config.objective not in ("supervised", "dpo", "classification"):
        rule = f"is not read by stage=pretrain with the objective {config.objective}, which trains on data.tokens"
        yield Violation("data.instructions.train", ", ".join(instructions), rule, "use stage=finetune, or remove it")
    if pairs and config.objective != "pairs":
        rule = f"is not read by model.family={config.model.family} with the objective {config.objective}"
        yield Violation("data.pairs.train", ", ".join(pairs), rule, "choose a model that is trained on pairs (model=opus-mt), or remove it")


def batches(config: RunConfig, world_size: int, step: int | None = None) -> list[Violation]:
    """Return the rules that batch sizes violate: they are divisible by the layout.

    Args:
        step: steps before the job. If phases name their nodes, only the batches until the job needs other nodes must be divisible; if it
            is None, those of one of the phases of training.batch_rampup.
    """
    ranks = config.parallel.model_ranks
    if world_size % ranks:
        return []
    starts = [step or 0] if layouts.has_phases(config.training) else [0]
    while step is None and (end := layouts.phase_end(config, starts[-1])) is not None:
        starts.append(end)
    shards = world_size // ranks * config.parallel.expert
    violations = [[v for key, size in layouts.batches(config, start) for v in _global_batch(config, shards, key, size)] for start in starts]
    return violations[-1] if all(violations) else []


def noise_scale(config: RunConfig, world_size: int) -> Iterator[Violation]:
    """Yield the reasons why a job cannot measure the gradient noise scale: shares of the batch are independent, and there are several."""
    parallel, training, key = config.parallel, config.training, "training.noise_scale_every"
    every, ranks = training.noise_scale_every, parallel.model_ranks
    if not every or config.stage.name == "evaluate" or world_size % ranks:
        return
    reasons = {
        "context": "which share sequences: their gradients are not independent",
        "expert": "whose experts have gradients of the tokens of all of them",
    }
    for axis, reason in reasons.items():
        if (size := getattr(parallel, axis)) > 1:
            yield Violation(key, every, f"is not supported with parallel.{axis}={size} ranks, {reason}", "set it to 0")
    by_micro = parallel.zero_stage >= 2
    if by_micro and parallel.pipeline > 1:
        rule = f"is not supported with parallel.zero_stage={parallel.zero_stage} and parallel.pipeline={parallel.pipeline}"
        yield Violation(key, every, rule, "set parallel.zero_stage=1, or it to 0")
    sizes = [size for _, size in warmup.keyed_values(training.batch_rampup, "global_batch_size", training.global_batch_size)]
    if (min(sizes) // training.micro_batch_size if by_micro else world_size // ranks) < 2:
        shares = "micro-batches" if by_micro else f"data ranks (parallel.zero_stage={parallel.zero_stage})"
        rule = f"compares the gradients of {shares} with that of the batch, and there is one"
        fix = "reduce training.micro_batch_size" if by_micro else "use two data ranks, or parallel.zero_stage=2 with two micro-batches"
        yield Violation(key, every, rule, fix)


def _global_batch(config: RunConfig, batch_shards: int, key: str, size: int) -> Iterator[Violation]:
    """A global batch of `size` samples, set by configuration key `key`."""
    parallel, micro_batch = config.parallel, config.training.micro_batch_size
    if size % (batch_shards * micro_batch):
        rule = f"must be a multiple of {batch_shards} data ranks x micro_batch_size {micro_batch}"
        unit = batch_shards * micro_batch
        yield Violation(key, size, rule, f"set it to {max(1, round(size / unit)) * unit}, the nearest one, or another multiple of {unit}")
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


def _sequence_length(config: RunConfig) -> Iterator[Violation]:
    """The model has a position for every token."""
    length = config.training.sequence_length
    if length > config.model.max_positions:
        rule = f"must not exceed model.max_positions={config.model.max_positions}"
        yield Violation("training.sequence_length", length, rule, "reduce the sequence length, or increase model.max_positions")


def _activation_budget(config: RunConfig) -> Iterator[Violation]:
    """The budget chooses results of layers that know their number of rows."""
    training = config.training
    if training.activation_budget is None:
        return
    unsupported = {"encoder_blocks": "encoder-decoders", "experts": "MoE models: the number of rows of an expert is not known before"}
    for rule in (f"is not supported by {models}" for attribute, models in unsupported.items() if hasattr(config.model, attribute)):
        yield Violation("training.activation_budget", training.activation_budget, rule, "remove it")
    if read := getattr(config.model, "beside_hidden_states", ""):
        rule = f"is chosen for each block alone, and blocks of model.family={config.model.family} read {read}"
        yield Violation("training.activation_budget", training.activation_budget, rule, "remove it")


def _fused_attention(config: RunConfig) -> Iterator[Violation]:
    """PyTorch's fused attention has no soft cap, and returns no differentiable sum of the exponentials, which sinks are added to."""
    rules = []
    if (cap := getattr(config.model, "attn_logit_softcapping", None)) is not None:
        rules.append(f"has no kernel with a soft cap of the scores, model.attn_logit_softcapping={cap:g}")
    if getattr(config.model, "attention_sinks", False):
        rules.append(f"has no kernel with attention sinks, which model.family={config.model.family} has")
    for rule in rules if config.training.attention == "sdpa" else ():
        yield Violation("training.attention", "sdpa", rule, "set it to auto or flex, or to plain for the unfused formula")


def _delta_rule(config: RunConfig) -> Iterator[Violation]:
    """The kernels of flash-linear-attention compute whole sequences in 16 bits."""
    key, rules = "training.delta_rule", []
    if config.precision.dtype == "fp32":
        rules.append("computes in 16 bits, precision.dtype=fp32")
    if config.parallel.context > 1:
        rules.append(f"computes whole sequences, parallel.context={config.parallel.context} splits them")
    for rule in rules if config.training.delta_rule == "fla" else ():
        yield Violation(key, "fla", rule, f"set {key}=auto")


def _attention_group(config: RunConfig) -> Iterator[Violation]:
    """Shifted sparse attention splits every sequence into groups."""
    training, key = config.training, "training.attention_group"
    if not (group := training.attention_group):
        return
    if group % 2:
        yield Violation(key, group, "must be even: groups are shifted by half their size", f"set it to {group + 1}")
    for name, length in warmup.keyed_values(training.sequence_warmup, "sequence_length", training.sequence_length):
        if length > group and length % group:
            rule = f"must be a multiple of {key}={group}"
            yield Violation(name, length, rule, f"set it to {length - length % group}, or choose another group")
    if config.parallel.context > 1:
        rule = f"splits sequences over ranks, and {key}={group} splits them into groups"
        yield Violation("parallel.context", config.parallel.context, rule, f"set it to 1, or {key}=0")
    if config.model.objective != "causal":
        yield Violation(key, group, f"is supported by decoders only; model.family={config.model.family} is none", f"set {key}=0")
