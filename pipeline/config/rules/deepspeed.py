"""Rules of parallel.deepspeed: the run has the settings of the file."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from pipeline.common.errors import UserError, Violation
from pipeline.config import deepspeed_json
from pipeline.config.schema import RunConfig
from pipeline.config.stages import plans_other_layouts


def violations(config: RunConfig, world_size: int) -> Iterator[Violation]:
    """Yield what differs between the file and the configuration, whose values the command line or an experiment has set."""
    if (path := config.parallel.deepspeed) is None:
        return
    if plans_other_layouts(config.stage):
        rule = "has the settings of one layout, and this stage plans others"
        yield Violation(deepspeed_json.KEY, path, rule, "remove it, and set the keys that it sets here, which the log of pretrain names")
        return
    try:
        settings = deepspeed_json.read(path)
    except UserError as error:
        yield from error.violations
        return
    if settings.violations:  # the command line has named them
        return
    for key, (value, source) in settings.values.items():
        if attrgetter(key)(config) != value:
            rule = f"contradicts {source} of {deepspeed_json.KEY}={path}, which sets {key}={value}"
            yield Violation(
                key,
                attrgetter(key)(config),
                rule,
                f'write {deepspeed_json.KEY} on the command line, without {key}, or set {source} to "auto" in the file',
            )
    yield from _batches(config, settings, world_size)


def _batches(config: RunConfig, settings: deepspeed_json.Settings, world_size: int) -> Iterator[Violation]:
    """The batch is the micro-batch times the micro-batches of a step times the ranks that process different samples."""
    micro, steps = settings.batch
    parallel, training = config.parallel, config.training
    if steps is None or world_size % parallel.model_ranks:  # the latter is refused with its own rule
        return
    ranks = world_size // parallel.model_ranks * parallel.expert
    micro = micro or training.micro_batch_size
    if training.global_batch_size != micro * steps * ranks:
        rule = (
            f"is not training.micro_batch_size={micro} x {steps} (gradient_accumulation_steps of "
            f"{deepspeed_json.KEY}={settings.path}) x {ranks} data ranks"
        )
        fix = f"set training.global_batch_size={micro * steps * ranks}"
        if "training.global_batch_size" in settings.values:
            fix = 'correct the three numbers in the file, or set gradient_accumulation_steps to "auto"'
        yield Violation("training.global_batch_size", training.global_batch_size, rule, fix)
