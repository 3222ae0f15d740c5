"""Everything about a configuration that is refused before work starts: ranges, and the rules between keys. Loads no torch."""

from __future__ import annotations

from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.config.planned import planned_job
from pipeline.config.rules import (
    checkpoint,
    clean,
    cluster,
    data,
    dedup,
    deepspeed,
    dry_run,
    evaluation,
    lora,
    model,
    objectives,
    optimizer,
    parallel,
    paths,
    precision,
    stage,
    submit,
    tokenizer,
    training,
    unread,
)
from pipeline.config.schema import RunConfig
from pipeline.config.stages import PARALLEL_STAGES, TRAINING_STAGES, Plan, Rehearse, plans_other_layouts

#: Groups whose keys occur in rules between keys, which assume that every value is in its range.
_RELATED = ("clean", "cluster", "data", "dedup", "dry_run", "model", "tokenizer", "parallel", "training")


def check(config: RunConfig, world_size: int) -> None:
    """Refuse an illegal configuration.

    Args:
        config: the composed configuration.
        world_size: ranks of the job.

    Raises:
        UserError: with every violation.
    """
    if found := violations(config, world_size):
        raise UserError(found)


def violations(config: RunConfig, world_size: int) -> list[Violation]:
    """Return every rule that the configuration violates. Rules between keys are checked once every value is in its range."""
    if config.stage.name == "submit":  # the settings are those of its jobs, which differ in the stage
        return list(submit.violations(config))
    found = knobs.range_violations(config)
    if any(violation.key.partition(".")[0] in _RELATED for violation in found):
        return found
    found += [
        *model.violations(config.model),
        *cluster.violations(config.cluster),
        *paths.violations(config),
        *dry_run.violations(config, world_size),
    ]
    found += [*stage.violations(config, world_size), *evaluation.violations(config), *data.violations(config)]
    name, job = config.stage.name, planned_job(config) if isinstance(config.stage, Plan | Rehearse) else config
    found += cluster.layout_violations(config)
    found += [*lora.stage_violations(config.lora, name), *training.stage_violations(config, job.stage.name)]
    if name in ("shard", "generate"):
        found += unread.violations(config)
    if name == "shard":
        found += [*clean.violations(config.clean), *dedup.violations(config.dedup)]
    if name == "train_tokenizer":
        found += tokenizer.violations(config.tokenizer)
    if name in (*PARALLEL_STAGES, *TRAINING_STAGES) and name != "evaluate":
        found += deepspeed.violations(config, world_size)
    if name in PARALLEL_STAGES and name != "evaluate":  # its model is that of the checkpoint: evaluation_violations
        found += training.warmup_violations(config.training)
        if name in ("plan", "rehearse") and job.stage.name == "finetune":
            return found  # its other rules are checked once its model is complete
        if not plans_other_layouts(config.stage):
            found += [*_settings_violations(job), *unread.unread(job, unread.LAYOUT_ROWS), *size_violations(job, world_size)]
        found += objectives.violations(job)
    return found


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
        *lora.violations(config),
        *checkpoint.violations(config.checkpoint),
        *unread.violations(config),
    ]
