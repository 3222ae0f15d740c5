"""Everything about a configuration that is refused before work starts: ranges, and the rules between keys. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace

from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.config import layouts, phases
from pipeline.config.data import DedupConfig, TokenizerConfig
from pipeline.config.lora import LoraConfig
from pipeline.config.planned import planned_job
from pipeline.config.rules import (
    clean,
    cluster,
    data,
    deepspeed,
    evaluation,
    objectives,
    optimizer,
    parallel,
    paths,
    precision,
    stage,
    training,
    unread,
)
from pipeline.config.schema import CheckpointConfig, RunConfig
from pipeline.config.stages import PARALLEL_STAGES, TRAINING_STAGES, Plan, Rehearse, plans_other_layouts
from pipeline.models.config import ModelConfig

#: Groups whose keys occur in rules between keys, which assume that every value is in its range.
_RELATED = ("clean", "cluster", "data", "dedup", "dry_run", "model", "tokenizer", "parallel", "training")


def check(config: RunConfig, world_size: int) -> None:
    """Refuse an illegal configuration.

    Raises:
        UserError: with every violation.
    """
    UserError.raise_for(violations(config, world_size))


def violations(config: RunConfig, world_size: int) -> list[Violation]:
    """Return every rule that the configuration violates, in any phase. Rules between keys are checked once every value is in its range.

    The ranks of phases that name their nodes are those of these nodes, whatever the job has.
    """
    wrong = _violations(config, layouts.ranks_at(config, 0, world_size))
    for number, step in enumerate(phases.starts(config)[1:], 1):
        later = _violations(phases.at(config, step), layouts.ranks_at(config, step, world_size))
        wrong += [replace(violation, rule=f"{violation.rule} (training.phases.{number})") for violation in later if violation not in wrong]
    if config.stage.name in TRAINING_STAGES and config.checkpoint.fork is None:
        wrong += phases.end_violations(config)
    return wrong


def _violations(config: RunConfig, world_size: int) -> list[Violation]:
    """The rules that the configuration of one phase violates."""
    if config.stage.name == "submit":  # the settings are those of its jobs, which differ in the stage
        return list(cluster.submit_violations(config))
    wrong = knobs.range_violations(config)
    if any(violation.key.partition(".")[0] in _RELATED for violation in wrong):
        return wrong
    wrong += [
        *model_violations(config.model),
        *cluster.violations(config.cluster),
        *paths.violations(config),
        *dry_run_violations(config, world_size),
    ]
    wrong += [*stage.violations(config, world_size), *evaluation.violations(config), *data.violations(config)]
    name, job = config.stage.name, planned_job(config) if isinstance(config.stage, Plan | Rehearse) else config
    wrong += cluster.layout_violations(config)
    wrong += [*stage_violations(config.lora, name), *training.stage_violations(config, job.stage.name)]
    if name in ("shard", "generate"):
        wrong += unread.violations(config)
    if name == "shard":
        wrong += [*clean.violations(config.clean), *dedup_violations(config.dedup)]
    if name == "train_tokenizer":
        wrong += tokenizer_violations(config.tokenizer)
    if name in (*PARALLEL_STAGES, *TRAINING_STAGES) and name != "evaluate":
        wrong += deepspeed.violations(config, world_size)
    if name in PARALLEL_STAGES and name != "evaluate":  # its model is that of the checkpoint: evaluation_violations
        wrong += training.warmup_violations(config.training)
        if name in ("plan", "rehearse") and job.stage.name == "finetune":
            return wrong  # its other rules are checked once its model is complete
        if not plans_other_layouts(config.stage):
            wrong += [*_settings_violations(job), *unread.unread(job, unread.LAYOUT_ROWS), *size_violations(job, world_size)]
        wrong += objectives.violations(job)
    return wrong


def training_violations(config: RunConfig, world_size: int) -> list[Violation]:
    """Return the rules of training that a configuration violates whose model is read from a checkpoint."""
    return [*settings_violations(config), *size_violations(config, world_size)]


def settings_violations(config: RunConfig) -> list[Violation]:
    """Return the rules of training that hold on any number of ranks, and that a configuration violates whose model is known."""
    return [*_settings_violations(config), *objectives.violations(config)]


def size_violations(config: RunConfig, world_size: int, step: int | None = None) -> list[Violation]:
    """Return the rules between the layout, the batches and the number of ranks that a configuration violates; `step` as of batches."""
    return [
        *parallel.ranks(config.parallel, world_size),
        *parallel.zero_groups(config, world_size),
        *training.batches(config, world_size, step),
        *training.profiled_ranks(config.training, world_size),
        *training.noise_scale(config, world_size),
    ]


def evaluation_violations(config: RunConfig, world_size: int) -> list[Violation]:
    """Return the rules of an evaluation of the validation split that a configuration violates whose model is read from a checkpoint."""
    return [*training_violations(config, world_size), *stage.evaluated_model_violations(config)]


def layout_violations(config: RunConfig) -> list[Violation]:
    """Return the rules between layout and model that a configuration violates whose model is read from a checkpoint."""
    return [*parallel.tensor(config), *parallel.expert(config), *parallel.pipeline(config)]


def _settings_violations(config: RunConfig) -> list[Violation]:
    """The rules between model, layout and training length."""
    return [
        *parallel.violations(config),
        *training.violations(config),
        *optimizer.violations(config),
        *precision.violations(config),
        *lora_violations(config),
        *checkpoint_violations(config.checkpoint),
        *keep_violations(config),
        *unread.violations(config),
    ]


def dedup_violations(dedup: DedupConfig) -> Iterator[Violation]:
    """Yield the violated rules: bands find most pairs at the threshold; signatures of other corpora need exact and near deduplication."""
    share = 1 - (1 - dedup.threshold**dedup.rows) ** dedup.bands
    if dedup.near and share < 0.5:
        why = f"with dedup.bands={dedup.bands} finds {share:.0%} of the pairs at dedup.threshold={dedup.threshold}"
        yield Violation("dedup.rows", dedup.rows, why, "use fewer rows, more bands or a higher threshold, to find at least half")
    for key, value in (("dedup.against", dedup.against), ("dedup.save_signatures", dedup.save_signatures)):
        if value and not (dedup.exact and dedup.near):
            yield Violation(key, value, "needs dedup.exact and dedup.near", f"set both to true, or leave {key} out")


def keep_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if a run is longer than checkpoint.keep_every, and writes no checkpoint at a multiple of it, except by chance."""
    keep, steps, every = config.checkpoint.keep_every, config.training.steps, config.checkpoint.every
    regular = [interval for interval in (every, config.evaluation.every) if interval]
    if 0 < keep < steps and steps % keep and all(math.lcm(interval, keep) > steps for interval in regular):
        rule = f"keeps no checkpoint: none is written at a multiple of it in {steps:,} steps with checkpoint.every={every}"
        yield Violation("checkpoint.keep_every", keep, rule, "set it to a multiple of checkpoint.every")


def checkpoint_violations(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """Yield a violation if a run would start in two ways, or in one that has another name."""
    start, fork, resume = checkpoint.initialize_from, checkpoint.fork, checkpoint.resume
    if start is not None and fork is not None:
        rule = f"starts the run, and so does checkpoint.fork={fork}"
        fix = "keep fork for weights, optimizer state, step and samples, or initialize_from for weights alone"
        yield Violation("checkpoint.initialize_from", start, rule, fix)
    if resume not in ("auto", "none"):
        rule = "must be auto or none: it says whether run_dir is continued"
        yield Violation("checkpoint.resume", resume, rule, f"set checkpoint.fork={resume} to start a new run from that checkpoint")


def dry_run_violations(config: RunConfig, world_size: int) -> Iterator[Violation]:
    """Yield the violated rules; world_size is that of the simulated job."""
    settings = config.dry_run
    if not settings.enabled:
        fix = f"add dry_run=true, or remove it to run stage={config.stage.name}"
        yield from unread.unlike(config, {"dry_run.rank": 0, "dry_run.world_size": None}, "has no effect without dry_run=true", fix)
    elif config.stage.name in TRAINING_STAGES and settings.rank >= world_size:
        rule = f"must be less than the world size {world_size}"
        yield Violation("dry_run.rank", settings.rank, rule, f"choose a rank from 0 to {world_size - 1}")


#: Elements of the largest weight. PyTorch counts bytes in 63 bits.
LARGEST = 2**60


def model_violations(model: ModelConfig) -> Iterator[Violation]:
    """Yield the violated rules of the sizes: those of a family, and that PyTorch can count the bytes of a weight."""
    yield from model.violations()
    sizes = {item.name: getattr(model, item.name) for item in fields(model)}
    largest = sorted(((size, name) for name, size in sizes.items() if type(size) is int), reverse=True)[
        :3
    ]  # a weight has three dims at most
    if math.prod(size for size, _ in largest) > LARGEST:
        size, name = largest[0]
        yield Violation(f"model.{name}", size, "makes weights of more bytes than PyTorch can count", f"reduce model.{name}")


def lora_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violated rules of adapters."""
    lora, rounding = config.lora, config.training.fake_quantize
    if lora.quantize != "none" and not lora.rank:
        rule = "requires adapters: weights in 4 bits are not trained"
        yield Violation("lora.quantize", lora.quantize, rule, "set lora.rank, for example 16")
    if lora.modules_to_save and not lora.rank:
        rule = "are trained beside adapters, and there are none"
        fix = "set lora.rank, for example 16; training.frozen selects weights without adapters"
        yield Violation("lora.modules_to_save", ", ".join(lora.modules_to_save), rule, fix)
    if lora.rank and rounding != "none":
        fix = f"remove it, or set training.fake_quantize=none instead of {rounding}"
        yield Violation("lora.rank", lora.rank, "is not supported with training.fake_quantize", fix)


def stage_violations(lora: LoraConfig, stage: str) -> Iterator[Violation]:
    """Yield a violation if the stage does not read the group."""
    if lora.rank and stage == "certify":
        yield Violation("lora.rank", lora.rank, f"is not supported by stage={stage}", "remove it, for the job that trains all weights")


def tokenizer_violations(wanted: TokenizerConfig) -> Iterator[Violation]:
    """Yield the violated limits of each kind of tokenizer."""
    for name, tokens in (("end_of_document", [wanted.end_of_document]), ("special_tokens", wanted.special_tokens)):
        if "" in tokens:
            yield Violation(f"tokenizer.{name}", tokens, "contains an empty token", "name it, for example <|endoftext|>, or leave it out")
    key = "tokenizer.vocab_sizes" if wanted.vocab_sizes else "tokenizer.vocab_size"
    runs = 45 if wanted.whitespace == "runs" else 0
    least = {"bpe": 257, "unigram": 512, "wordpiece": 512}[wanted.kind] + len(wanted.special_tokens) + runs
    for size in wanted.vocab_sizes or [wanted.vocab_size]:
        if size < least:
            yield Violation(
                key, size, f"leaves nothing to learn: {wanted.kind} with these settings needs at least {least}", f"choose {least} or more"
            )
    if len(set(wanted.vocab_sizes)) < len(wanted.vocab_sizes):
        yield Violation(key, wanted.vocab_sizes, "contains a size twice", "list each size once")
    if wanted.parity and (wanted.kind != "bpe" or len(wanted.parity) == 1):
        rule = "balances several languages, not one" if wanted.kind == "bpe" else f"applies to bpe only, not to {wanted.kind}"
        yield Violation("tokenizer.parity", wanted.parity, rule, "leave it out, or train bpe with two or more")
    if wanted.split != "gpt2" and wanted.kind != "bpe":
        yield Violation(
            "tokenizer.split",
            wanted.split,
            f"applies to bpe only; {wanted.kind} has its own pre-tokenization",
            "leave it out, or train bpe",
        )
    if wanted.digits == "groups_of_three" and wanted.kind == "unigram":
        yield Violation("tokenizer.digits", wanted.digits, "is not supported by SentencePiece's Unigram", "use single, or train bpe")
    if wanted.whitespace == "runs" and wanted.kind == "wordpiece":
        yield Violation(
            "tokenizer.whitespace", "runs", "is not supported by wordpiece, which drops whitespace", "leave it out, or train bpe or unigram"
        )
