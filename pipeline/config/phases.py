"""training.phases: settings that change during a run, such as a longer context with another RoPE base, and other corpora.

Every phase is trained with a configuration of its own, which `at` returns; between two of them the run continues from a checkpoint. All
phases read one order of samples. A sample is a window of the sequence length of the first phase, and a longer sequence has several samples
in a row. Of a corpus that no earlier phase reads they are one text; the windows of the others were in the order before, and keep their
places in it. Thus no sample is read twice, and none is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.config import layouts, warmup
from pipeline.config.command_line import key_of, quoted
from pipeline.config.data import PhaseConfig, TrainingPhaseConfig
from pipeline.config.optimizer import OptimizerConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.schema import PrecisionConfig, RunConfig
from pipeline.config.training import TrainingConfig
from pipeline.models.rope import RopeConfig

#: What the overrides of a phase may set: groups, and keys.
GROUPS = ("optimizer", "parallel", "precision")
KEYS = (
    *(f"training.{name}" for name in ("micro_batch_size", "document_mask", "attention", "activation_checkpointing", "activation_budget")),
    *(f"training.{name}" for name in ("balance_loss", "z_loss", "head_z_loss", "bias_update_speed", "mtp_loss", "validate_every")),
    "model.max_positions",
    *(f"model.{item.name}" for item in dataclasses.fields(RopeConfig) if item.name.startswith("rope_")),
)
_SCHEMAS: dict[str, Any] = {
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
}
#: What has to be one setting for the whole run, among GROUPS: the state of an optimizer, and the engine.
FIXED = ("optimizer.name", "optimizer.state_dtype", "parallel.engine", "parallel.deepspeed")
#: What the weights of the average of schedule-free AdamW are computed from.
SCHEDULE_FREE_FIXED = ("optimizer.lr", "optimizer.beta2", "optimizer.warmup_steps", "optimizer.warmup_ratio")
#: Changes of the first steps, which end within the first phase.
RAMPS = ("batch_rampup", "sequence_warmup")
#: Keys of a phase, and those that it sets.
SIZES = {"sequence_length": "training.sequence_length", "global_batch_size": "training.global_batch_size"}


def resolved(config: RunConfig) -> RunConfig:
    """Return the configuration of the first phase, in which every phase has its end in steps and tokens, and all settings that change.

    data.phases get the weights of the corpora. A configuration without phases, or that is resolved, is returned as it is.

    Raises:
        UserError: the phases have no order, or set what a phase cannot.
    """
    training = config.training
    if not training.phases:
        return config
    changes = [dict(_settings(config, number, phase)) for number, phase in enumerate(training.phases)]
    UserError.raise_for(_violations(config))
    current: dict[str, Any] = {
        key: attrgetter(key)(config) for key in sorted({*SIZES.values(), *(key for items in changes for key in items)})
    }
    first = dataclasses.replace(config, training=dataclasses.replace(training, phases=[]))
    weights: Mapping[str, float] = {name: 1.0 if corpus.weight is None else corpus.weight for name, corpus in config.data.blend.items()}
    phases: list[TrainingPhaseConfig] = []
    shares: list[PhaseConfig] = []
    steps = tokens = 0
    nodes: int | None = None
    for phase, change in zip(training.phases, changes, strict=True):
        current |= change
        weights = phase.weights or weights
        nodes = phase.nodes or nodes
        if not phases:
            first = knobs.changed(first, current)
        length, batch = (current[key] for key in SIZES.values())
        end, end_tokens = phase.until_step, phase.until_tokens
        if end is None and end_tokens is not None:
            more = math.ceil((end_tokens - tokens) / (batch * length))
            end, end_tokens = steps + more if phases else warmup.steps_for_tokens(first.training, end_tokens), None
        if end is not None and end_tokens is None:  # of whole batches, so that no sequence is of two phases
            end_tokens = tokens + (end - steps) * batch * length if phases else warmup.samples(first.training, end) * length
        overrides = [f"{key}={_text(value)}" for key, value in current.items() if key not in SIZES.values()]
        phases.append(TrainingPhaseConfig(end, end_tokens, length, batch, nodes, dict(weights), overrides))
        shares.append(PhaseConfig(end_tokens, dict(weights), run=length // (phases[0].sequence_length or length)))
        steps, tokens = end or 0, end_tokens or 0
    data = config.data
    if data.blend:
        if data.phases and data.phases != shares:
            rule, fix = "conflicts with training.phases, which has weights, too", "set the weights in training.phases"
            raise UserError.of("data.phases", f"{len(data.phases)} phases", rule, fix)
        blend = {name: dataclasses.replace(corpus, weight=None) for name, corpus in data.blend.items()}
        data = dataclasses.replace(data, phases=shares, blend=blend)
    return dataclasses.replace(first, data=data, training=dataclasses.replace(first.training, phases=phases))


def at(config: RunConfig, step: int) -> RunConfig:
    """Return the configuration of a step; `step` of them precede it."""
    phases = config.training.phases
    if not phases:
        return config
    phase = phases[number_at(config, step)]
    sizes = {key: getattr(phase, name) for name, key in SIZES.items()}
    return knobs.changed(config, {**sizes, **_read(type(config.model), tuple(phase.overrides))})


def number_at(config: RunConfig, step: int) -> int:
    """Return the number of the phase of a step; `step` of them precede it. 0 for a run without phases."""
    return sum(phase.until_step is not None and phase.until_step <= step for phase in config.training.phases)


def starts(config: RunConfig) -> list[int]:
    """Return the number of steps before each phase; 0 for a run without phases."""
    return [0, *(phase.until_step or 0 for phase in config.training.phases[:-1])]


def alone(config: RunConfig, world_size: int) -> list[tuple[RunConfig, int]]:
    """Return every phase that the run reaches as a run of its own, for a plan, and its ranks; the run itself without phases.

    Args:
        world_size: ranks of a phase that does not name its nodes.
    """
    steps, begins = config.training.steps, starts(config)
    jobs = []
    for begin, following in zip(begins, [*begins[1:], steps], strict=True):
        if config.training.phases and (begin < steps or not begin):
            job = at(config, begin)
            ramps = ([], []) if begin else (job.training.batch_rampup, job.training.sequence_warmup)
            settings = {"phases": [], "steps": min(following, steps) - begin, "batch_rampup": ramps[0], "sequence_warmup": ramps[1]}
            job = knobs.changed(job, {f"training.{name}": value for name, value in settings.items()})
            jobs.append((job, layouts.ranks_at(config, begin, world_size)))
    return jobs or [(config, world_size)]


def joined(first: RunConfig, second: RunConfig, step: int) -> RunConfig:
    """Return the run that changes at a step from one configuration to another, which differs in what a phase may set."""
    values = [{key: value for key, _, value in knobs.walk(config)} for config in (first, second)]
    keys = [key for key in values[0] if _may_change(key) and values[0][key] != values[1][key]]
    parts = []
    for config, settings in zip((first, second), values, strict=True):
        training, overrides = config.training, [f"{key}={_text(settings[key])}" for key in keys]
        parts.append(TrainingPhaseConfig(None, None, training.sequence_length, training.global_batch_size, None, {}, overrides))
    tokens = warmup.samples(first.training, step) * first.training.sample_length
    parts[0] = dataclasses.replace(parts[0], until_step=step, until_tokens=tokens)
    return knobs.changed(first, {"training.phases": parts})


def _may_change(key: str) -> bool:
    """Whether the overrides of a phase may set a key."""
    return key in KEYS or (key.partition(".")[0] in GROUPS and key not in FIXED)


def begin_violations(config: RunConfig, step: int, samples: int) -> Iterator[Violation]:
    """Yield why a fork cannot begin a phase: its trunk has read another number of samples than the phases before say."""
    for number, phase in enumerate(config.training.phases):
        if phase.until_step == step and phase.until_tokens != (tokens := samples * config.training.sample_length):
            rule = f"are not the {tokens:,} tokens that the run of checkpoint.fork has read up to step {step}"
            yield Violation(f"training.phases.{number}.until_tokens", phase.until_tokens, rule, f"set it to {tokens}, beside until_step")


def end_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield ends in tokens that are not those in steps. Those of a fork may differ, whose trunk had other batches: begin_violations."""
    steps = tokens = 0
    for number, phase in enumerate(config.training.phases[:-1]):
        length, batch, last = phase.sequence_length or 0, phase.global_batch_size or 0, phase.until_step or 0
        tokens += (last - steps) * batch * length if number else warmup.samples(config.training, last) * length
        steps = last
        if phase.until_tokens != tokens:
            rule = f"contradicts until_step={last}, which are {tokens:,} tokens"
            yield Violation(f"training.phases.{number}.until_tokens", phase.until_tokens, rule, "remove one of the two")
            return


def end(config: RunConfig, step: int) -> int | None:
    """Return the number of steps at the end of a step's phase; None in the last one."""
    return config.training.phases[number_at(config, step)].until_step if config.training.phases else None


@functools.lru_cache(maxsize=64)
def _read(model: type, overrides: tuple[str, ...]) -> Mapping[str, Any]:
    """The settings of a phase: key -> value."""
    return dict(_setting("training.phases", model, override) for override in overrides)


def _setting(name: str, model: type, override: str) -> tuple[str, Any]:
    """A setting of a phase: key and value."""
    key = key_of(override)
    group, _, field = key.partition(".")
    if key in SIZES.values():
        raise UserError.of(name, override, "is a key of a phase", f"set {field} of the phase")
    if not _may_change(key):
        fix = f"set {key} for the whole run; a phase may set {', '.join(f'{group}.*' for group in GROUPS)}, {', '.join(KEYS)}"
        raise UserError.of(name, override, "cannot change during a run", fix)
    schema = _SCHEMAS.get(group, model)
    if field not in {item.name for item in dataclasses.fields(schema)} or (group == "model" and not issubclass(schema, RopeConfig)):
        rule = f"is no setting of rotary positions of {model.__name__}" if group == "model" else "is no key"
        raise UserError.of(name, override, rule, f"python -m pipeline --help {group} lists the keys")
    return key, layouts.parsed(name, override, schema, field)


def _settings(config: RunConfig, number: int, phase: TrainingPhaseConfig) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of everything that a phase sets."""
    yield from ((key, value) for name, key in SIZES.items() if (value := getattr(phase, name)) is not None)
    yield from (_setting(f"training.phases.{number}.overrides", type(config.model), override) for override in phase.overrides)


def _text(value: Any) -> str:
    """A value in Hydra's override grammar."""
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def text(values: Mapping[str, Any]) -> str:
    """Return the phase that sets these values as it is written on the command line; empty if there is none, or a phase cannot set one."""
    if not values.keys() <= {*KEYS, "training.sequence_length"}:
        return ""
    overrides = ", ".join(f'"{key}={_text(value)}"' for key, value in values.items() if key in KEYS)
    parts = [f"sequence_length: {value}" for key, value in values.items() if key not in KEYS]
    parts += [f"overrides: [{overrides}]"] if overrides else []
    return f"{{{', '.join(parts)}}}" if parts else ""


def _violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violated rules of the phases: they have an order, and read one order of samples."""
    training, name = config.training, "training.phases"
    phases, last = training.phases, len(training.phases) - 1
    if (stage := config.stage.name) in ("finetune", "rehearse"):
        fix = "remove it" if stage == "finetune" else "remove it, and set what one of the phases sets"
        yield Violation(name, f"{len(phases)} phases", f"are not supported by stage={stage}", fix)
    steps = tokens = 0
    length = phases[0].sequence_length or training.sequence_length
    longest = lengths = length
    for number, phase in enumerate(phases):
        key, ends = f"{name}.{number}", [value for value in (phase.until_step, phase.until_tokens) if value is not None]
        if number == last and ends:
            yield Violation(f"{key}.until_step", ends[0], "the last phase has no end", "remove it, or add a phase")
        if number < last and (not ends or (phase.until_step or math.inf) <= steps or (phase.until_tokens or math.inf) <= tokens):
            rule = f"must be after the start of the phase at step {steps}"
            yield Violation(f"{key}.until_step", phase.until_step, rule, "list the phases in order, each with its end")
        steps, tokens = phase.until_step or steps, phase.until_tokens or tokens
        lengths = phase.sequence_length or lengths
        longest = max(longest, lengths)
        if lengths % length:
            rule = f"must be a multiple of {length}, the sequence length of the first phase: a sequence has whole samples"
            yield Violation(f"{key}.sequence_length", lengths, rule, f"set it to {max(1, round(lengths / length)) * length}")
        if config.optimizer.name == "schedule_free":
            for override in phase.overrides:
                if key_of(override) in SCHEDULE_FREE_FIXED:
                    rule = "cannot change with optimizer=schedule_free, which weights its average by all rates of the run"
                    yield Violation(f"{key}.overrides", override, rule, f"set {key_of(override)} for the whole run")
        for corpus, weight in phase.weights.items():
            if corpus not in config.data.blend:
                fix = f"choose among {', '.join(sorted(config.data.blend)) or 'none'}, or add it to data.blend"
                yield Violation(f"{key}.weights.{corpus}", weight, "is not a corpus of data.blend", fix)
        if phase.weights and not any(weight > 0 for weight in phase.weights.values()):
            yield Violation(f"{key}.weights", phase.weights, "gives no corpus a weight above 0", "give at least one a weight above 0")
    for ramp in RAMPS:
        entries = getattr(training, ramp)
        if entries and phases[0].until_step is not None and entries[-1].until_step > phases[0].until_step:
            rule = f"must end within the first phase, at step {phases[0].until_step}"
            yield Violation(f"training.{ramp}", entries[-1].until_step, rule, f"end it earlier, or raise {name}.0.until_step")
    if (config.parallel.engine == "deepspeed" or config.parallel.deepspeed) and config.parallel.zero_stage == 3:
        rule = "is not supported with training.phases by DeepSpeed's engine, which keeps the weights of earlier phases in memory"
        yield Violation("parallel.zero_stage", 3, rule, "set it to 2, or parallel.engine=native")
    if longest > length:
        if config.data.packing != "windows":
            rule = "is not supported with phases of other sequence lengths: longer sequences consist of windows"
            yield Violation("data.packing", config.data.packing, rule, "set it to windows")
        if config.objective != "causal":
            rule = f"is supported by decoders only, not by the objective {config.objective}"
            yield Violation(f"{name}.{last}.sequence_length", longest, rule, "keep one sequence length")
