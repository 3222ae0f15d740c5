"""Rules of parallel.engine=deepspeed and its configuration: the run has the settings of the file, and what the engine can."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from pipeline.common.errors import UserError, Violation
from pipeline.config import deepspeed_json
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Rehearse, plans_other_layouts

#: Key -> the value that DeepSpeed's engine requires, and why.
REQUIRED = {
    "parallel.pipeline": (1, "is not a layout of parallel.engine=deepspeed, which has data and tensor ranks"),
    "parallel.context": (1, "is not a layout of parallel.engine=deepspeed, which has data and tensor ranks"),
    "parallel.expert": (1, "is not a layout of parallel.engine=deepspeed, which has data and tensor ranks"),
    "parallel.zero_group": ("job", "is not supported with parallel.engine=deepspeed, whose file has zero_hpz_partition_size"),
    "optimizer.name": ("adamw", "is not an optimizer of parallel.engine=deepspeed"),
    "optimizer.state_dtype": ("fp32", "is not supported with parallel.engine=deepspeed"),
    "optimizer.qk_clip": (None, "is not supported with parallel.engine=deepspeed"),
    "precision.fp8": ("none", "is not supported with parallel.engine=deepspeed"),
    "training.noise_scale_every": (0, "is not measured by parallel.engine=deepspeed"),
    "training.frozen": ([], "is not supported with parallel.engine=deepspeed"),
    "training.batch_rampup": ([], "is not supported with parallel.engine=deepspeed, whose number of micro-batches is fixed"),
    "lora.rank": (0, "is not supported with parallel.engine=deepspeed"),
}


def violations(config: RunConfig, world_size: int) -> Iterator[Violation]:
    """Yield what differs between the file and the configuration, and what DeepSpeed's engine does not have."""
    path = config.parallel.deepspeed
    if path is not None and config.parallel.engine == "native":
        rule = "reads no configuration of DeepSpeed"
        yield Violation("parallel.engine", "native", rule, f"set parallel.engine=deepspeed, or remove {deepspeed_json.KEY}")
        return
    if config.parallel.engine == "native":
        return
    if plans_other_layouts(config.stage) or isinstance(config.stage, Rehearse):
        rule = "is not rehearsed, and has one layout, where a search plans others"
        yield Violation("parallel.engine", "deepspeed", rule, f"set parallel.engine=native, without {deepspeed_json.KEY}")
        return
    for key, (value, rule) in REQUIRED.items():
        if (actual := attrgetter(key)(config)) != value:
            yield Violation(key, actual, rule, f"set it to {'null' if value is None else value}, or parallel.engine=native")
    if getattr(config.model, "parametrization", "standard") == "mup":  # not all families have it
        rule = "has learning rates of its own, which parallel.engine=deepspeed does not set"
        yield Violation("model.parametrization", "mup", rule, "set it to standard, or parallel.engine=native")
    if config.precision.dtype != "fp32" and config.parallel.zero_stage == 0:
        rule = "requires ZeRO with parallel.engine=deepspeed: without it, DeepSpeed gives no access to the fp32 weights"
        fix = "set parallel.zero_stage=1" if path is None else f'set "zero_optimization": {{"stage": 1}} in {path}'
        yield Violation("precision.dtype", config.precision.dtype, rule, fix)
    if config.training.ema is not None and config.parallel.zero_stage == 3 and config.parallel.offload != "none":
        rule = "averages weights that ZeRO 3 of parallel.engine=deepspeed keeps in host memory"
        yield Violation("training.ema", config.training.ema, rule, "set it to null, or ZeRO's stage to 2, or parallel.engine=native")
    if path is not None:
        yield from _file(config, path, world_size)


def _file(config: RunConfig, path: str, world_size: int) -> Iterator[Violation]:
    """The configuration, whose values the command line or an experiment has set, is that of the file."""
    try:
        settings = deepspeed_json.read(path)
    except UserError as error:
        yield from error.violations
        return
    if settings.violations:  # the command line has named them
        return
    for key, (value, source) in settings.values.items():
        if (actual := attrgetter(key)(config)) != value:
            rule = f"contradicts {source} of {deepspeed_json.KEY}={path}, which sets {key}={value}"
            fix = f'write {deepspeed_json.KEY} on the command line, without {key}, or set {source} to "auto" in the file'
            yield Violation(key, actual, rule, fix)
    if not isinstance(steps := settings.get("gradient_accumulation_steps"), int) or world_size % config.parallel.model_ranks:
        return
    ranks, micro = world_size // config.parallel.model_ranks, config.training.micro_batch_size
    if config.training.global_batch_size != micro * steps * ranks:
        product = f"{micro} x {steps} (gradient_accumulation_steps of {deepspeed_json.KEY}={path}) x {ranks} data ranks"
        rule = f"is not training.micro_batch_size={product}"
        fix = f"set training.global_batch_size={micro * steps * ranks}"
        if "training.micro_batch_size" not in settings.values and config.training.global_batch_size % (steps * ranks) == 0:
            fix = f"set training.micro_batch_size={config.training.global_batch_size // (steps * ranks)}"
        elif "training.global_batch_size" in settings.values:
            fix = 'correct the three numbers in the file, or set gradient_accumulation_steps to "auto"'
        yield Violation("training.global_batch_size", config.training.global_batch_size, rule, fix)
