"""The settings of a training job that depend on its nodes: cluster.layouts, and the nodes of its phases.

Another layout keeps the numerics of a run: global batches, samples, precision and schedules are those of the configuration, and a
checkpoint loads into any layout. Sums over ranks and micro-batches are added in another order, so that results differ by rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.config import warmup
from pipeline.config.command_line import key_of, nearest
from pipeline.config.data import RampupConfig, TrainingPhaseConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.schema import RunConfig
from pipeline.config.training import TrainingConfig

#: What a layout may set: how the work is distributed, and what is computed twice. None of it changes the samples of a step.
KEYS = (
    *(f"parallel.{item.name}" for item in dataclasses.fields(ParallelConfig)),
    "training.micro_batch_size",
    "training.activation_checkpointing",
    "training.activation_budget",
)
#: What changes the balance losses and dropped tokens of an MoE model: they are computed for a micro-batch on a rank.
MOE_KEYS = ("training.micro_batch_size", "parallel.context")
_GROUPS: dict[str, Any] = {"parallel": ParallelConfig, "training": TrainingConfig}


def overrides_of(config: RunConfig, nodes: int) -> tuple[str, ...]:
    """Return the settings of cluster.layouts for a number of nodes: those of the largest number that is not above it; empty if none is."""
    numbers = [number for number in config.cluster.layouts if number <= nodes]
    return tuple(config.cluster.layouts[max(numbers)]) if numbers else ()


def with_overrides(config: RunConfig, overrides: tuple[str, ...]) -> RunConfig:
    """Return the configuration with the settings of a layout.

    Raises:
        UserError: a setting is illegal; see `read`.
    """
    return knobs.changed(config, read(overrides)) if overrides else config


@functools.lru_cache(maxsize=256)
def read(overrides: tuple[str, ...]) -> Mapping[str, Any]:
    """Read the settings of a layout: key -> value.

    Raises:
        UserError: a setting is not of the form key=value, its key is none of KEYS, or its value has another type or is out of range.
    """
    values: dict[str, Any] = {}
    violations: list[Violation] = []
    for override in overrides:
        key = key_of(override)
        try:
            values[key] = _value(override, key)
        except UserError as error:
            violations += error.violations
    UserError.raise_for(violations)
    return values


def _value(override: str, key: str) -> Any:
    """The value of a setting, in its type."""
    name = "cluster.layouts"
    if key not in KEYS:
        fix = nearest("", key, list(KEYS)) if key.partition(".")[0] in _GROUPS else f"set {key} for all layouts"
        raise UserError.of(name, override, "sets what is no part of a layout: parallel.*, and micro-batches and recomputation", fix)
    group, _, field = key.partition(".")
    return parsed(name, override, _GROUPS[group], field)


def parsed(name: str, override: str, group: type, field: str) -> Any:
    """Read a setting of a list.

    Args:
        name: key of the list.
        override: key=value.
        group: dataclass of the key's group.

    Returns:
        The value, in its type.

    Raises:
        UserError: it is not of this form, or its value has another type or is out of range.
    """
    key = key_of(override)
    if "=" not in override:
        raise UserError.of(name, override, "is not of the form key=value", "write for example parallel.tensor=2")
    try:
        schema = OmegaConf.structured(group)
        OmegaConf.set_readonly(schema, False)
        schema[field] = OverridesParser.create().parse_override(override.lstrip("+")).value()
        value = getattr(OmegaConf.to_object(schema), field)
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).partition("\n")[0].split())
        raise UserError.of(name, override, reason, f"set {key} to a value of its type") from error
    knob = next(item for item in dataclasses.fields(group) if item.name == field).metadata["knob"]
    if rule := knob.violated(value):
        raise UserError.of(name, override, rule, f"set {key} ({knob.meaning}) to a legal value")
    return value


def unchanged(config: RunConfig, values: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield the settings of a layout that would change the losses of an MoE model."""
    if not getattr(config.model, "experts", 0):
        return
    for key in MOE_KEYS:
        current = attrgetter(key)(config)
        if values.get(key, current) != current:
            rule = f"changes the balance loss and dropped tokens of an MoE model, which has {key}={current} otherwise"
            yield Violation("cluster.layouts", f"{key}={values[key]}", rule, f"leave {key} out of the layout")


def has_phases(training: TrainingConfig) -> bool:
    """Whether an entry of training.batch_rampup or training.phases names its nodes."""
    return any(entry.nodes is not None for entry in _phases(training))


def _phases(training: TrainingConfig) -> list[RampupConfig | TrainingPhaseConfig]:
    """What has an end and may name its nodes, in order: a ramp-up is over before the first one of training.phases ends."""
    return [*training.batch_rampup, *training.phases]


def nodes_of_phase(config: RunConfig, step: int) -> int | None:
    """Return the number of nodes of a job that makes the step after `step` steps, cluster.nodes by default; None if no phase names some."""
    if not has_phases(config.training):
        return None
    entry = next((entry for entry in _phases(config.training) if entry.until_step is None or step < entry.until_step), None)
    return config.cluster.nodes if entry is None or entry.nodes is None else entry.nodes


def ranks_at(config: RunConfig, step: int, world_size: int) -> int:
    """Return the ranks of a job that makes the step after `step` steps: world_size if no phase of training.phases names its nodes."""
    named = any(phase.nodes is not None for phase in config.training.phases)
    return (nodes_of_phase(config, step) or 0) * config.cluster.tasks_per_node if named else world_size


def phase_end(config: RunConfig, step: int) -> int | None:
    """Return the first step after `step` from which on a job has another number of nodes; None if there is none."""
    nodes = nodes_of_phase(config, step)
    ends = (entry.until_step for entry in _phases(config.training))
    return next((end for end in ends if end is not None and end > step and nodes_of_phase(config, end) != nodes), None)


def batches(config: RunConfig, step: int) -> Iterator[tuple[str, int]]:
    """Yield (key, global batch size) for every batch size of a job that starts after `step` steps, until it needs other nodes.

    The full batch is among them: validation reads it in every phase.
    """
    begin, end = 0, phase_end(config, step)
    ramp = config.training.batch_rampup
    keyed = list(warmup.keyed_values(ramp, "global_batch_size", config.training.global_batch_size))
    for entry, named in zip(ramp, keyed, strict=False):
        if entry.until_step > step and (end is None or begin < end):
            yield named
        begin = entry.until_step
    yield keyed[-1]
