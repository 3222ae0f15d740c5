"""Composition of the configuration with Hydra."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf, dictconfig
from omegaconf.errors import OmegaConfBaseException

from pipeline.common import ends, knobs
from pipeline.common.errors import UserError, Violation
from pipeline.config import ladder, phases, planned, run_tokenizer
from pipeline.config.command_line import FILE, GROUPS, Command, key_of, parse, quoted, sweep_values
from pipeline.config.composition_errors import COMPOSITION_ERRORS, keys_of, unknown_key, violation_of
from pipeline.config.paths import CONF_DIR
from pipeline.config.rules import check, paths
from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES
from pipeline.models.config_classes import CONFIG_CLASSES


@functools.cache
def register() -> None:
    """Register the dataclasses as schemas of the files in conf/, and the resolvers that these files use."""
    # OmegaConf makes nodes of frozen dataclasses read-only: overrides could not change them. The composed objects are frozen all the same.
    dictconfig.is_structured_config_frozen = lambda _: False
    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=RunConfig, package="_global_")
    for stage, (schema, _) in STAGES.items():
        store.store(group="schema/stage", name=stage, node=schema)
    for family, schema in CONFIG_CLASSES.items():
        store.store(group="schema/model", name=family, node=schema)
    OmegaConf.register_new_resolver("finetune_lr", _finetune_lr, replace=True)
    OmegaConf.register_new_resolver("if_finetune", _if_finetune, replace=True)
    OmegaConf.register_new_resolver("add", lambda *terms: sum(map(int, terms)), replace=True)  # of text, too: ${add:300,-${x}}
    OmegaConf.register_new_resolver("ladder", ladder.resolve, replace=True)
    OmegaConf.register_new_resolver("python_stdlib", lambda: sysconfig.get_paths()["stdlib"], replace=True)


def _finetune_lr(rank: int, adapter: str | None, objective: str) -> float:
    """The default learning rate of stage=finetune: TRL's for full weights, ten times as much for adapters, and less for preferences."""
    return 1e-5 if objective == "dpo" else 2e-4 if rank or adapter else 2e-5


def _if_finetune(tuned: int, trained: int, *, _root_: DictConfig) -> int:
    """A default of stage=plan: the first value if the planned job is stage=finetune, the second if it is pretrain."""
    return tuned if planned.job_stage(_root_) == "finetune" else trained


def to_run_config(config: DictConfig) -> RunConfig:
    """Convert a composed configuration to dataclasses, resolve interpolations, and take from the run directory what is left to it.

    Values are validated by rules.check.

    Raises:
        UserError: a value is missing or cannot be resolved, or a key was added (+key=value) that no stage reads.
    """
    if unknown := dict(_unknown(config, OmegaConf.to_container(config, resolve=False))):
        known = sorted(key for key in keys_of(config) if not any(f"{added}.".startswith(f"{key}.") for added in unknown))
        raise UserError([unknown_key(key, value, known) for key, value in unknown.items()])
    if not OmegaConf.is_missing(config, "model") and OmegaConf.get_type(config, "model") not in CONFIG_CLASSES.values():
        fix = f"begin its file with defaults: [/schema/model/FAMILY@_here_, _self_], FAMILY being one of {', '.join(CONFIG_CLASSES)}"
        raise UserError.of("model", "?", "has no family", fix)
    try:
        run = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:  # of a resolver
            raise cause from None
        key = getattr(error, "full_key", None) or "configuration"
        raise UserError.of(key, "?", str(error).splitlines()[0], f"set {key} on the command line") from error
    assert isinstance(run, RunConfig)
    UserError.raise_for(paths.length_violations(run))
    return phases.resolved(run_tokenizer.resolved(run))


def _unknown(node: DictConfig | ListConfig, content: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) for every key that the dataclasses do not have; a dictionary of user-defined names has any key.

    Args:
        content: of the node, without OmegaConf's types, whose access takes longer.
    """
    schema = OmegaConf.get_type(node)
    fields = {item.name for item in dataclasses.fields(schema)} if dataclasses.is_dataclass(schema) else None
    for name, value in enumerate(content) if isinstance(content, list) else content.items():
        key = f"{prefix}{name}"
        if fields is not None and name not in fields:
            if key != "hydra":
                yield from knobs.leaves(key, value)
        elif isinstance(value, dict | list):
            yield from _unknown(node[name], value, f"{key}.")


def own_folders(hydra: DictConfig) -> list[Path]:
    """Return the folders with a user's own configuration files (--config-dir)."""
    return [Path(folder.removeprefix(FILE)) for folder in hydra.searchpath or []]


def folder_options(folders: Iterable[Path | str]) -> list[str]:
    """Return the arguments that name folders with a user's own configuration files."""
    return [f"--config-dir={folder}" for folder in folders]


def task_arguments() -> list[str]:
    """Return the command line of this run without the overrides of Hydra, for a job that composes the same files."""
    return arguments_of(HydraConfig.get())


def arguments_of(hydra: DictConfig) -> list[str]:
    """Return the command line without the overrides of Hydra, from Hydra's own node of a composed configuration."""
    return [*folder_options(own_folders(hydra)), *hydra.overrides.task]


def job_arguments(arguments: Sequence[str], job: RunConfig, keys: Iterable[str]) -> list[str]:
    """Return the command line of another stage that composes the same job, without its stage.

    Args:
        arguments: of this run, as task_arguments returns them; those of its stage and of the dry run are left out.
        job: the configuration that the command line must compose.
        keys: what may differ between the job and the arguments, such as the layout that a search chose.
    """
    words = [word for word in arguments if not re.match(r"[+~]*(stage|dry_run)[.=]", word)]
    composed = recompose([*words, f"stage={job.stage.name}"])
    changed = {key: value for key in keys if (value := attrgetter(key)(job)) != attrgetter(key)(composed)}
    return [*(word for word in words if key_of(word) not in changed), *(f"{key}={_written(value)}" for key, value in changed.items())]


def recompose(arguments: Sequence[str]) -> RunConfig:
    """Compose another command line, beside the configuration of this run."""
    with _beside_this_run():
        return composed(parse(arguments).overrides)


def composed(overrides: list[str]) -> RunConfig:
    """Compose a configuration in a process that has no other one."""
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_run_config(compose("config", overrides))


@contextmanager
def _beside_this_run() -> Iterator[None]:
    """Keep the configuration of this run while others are composed."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running


def checked(arguments: Sequence[str], sized: Callable[[RunConfig], tuple[RunConfig, int]]) -> RunConfig:
    """Compose and validate a command line, beside the configuration of this run.

    Args:
        sized: gives the configuration with the layout of its job, and its number of ranks.

    Raises:
        UserError: with every problem of the command line.
    """
    with _beside_this_run():
        command, config = parse(arguments), None
        if not command.violations:
            try:
                config = composed(command.overrides)
            except COMPOSITION_ERRORS:
                GlobalHydra.instance().clear()
        if config is None:
            violations, valid = diagnose(command)
            try:
                config = to_run_config(valid)
                violations += check.violations(*sized(config))
            except UserError as more:
                violations += more.violations
            UserError.raise_for(violations)
            config = composed(command.overrides)  # no argument explains it
    check.check(*sized(config))
    return config


def _written(value: object) -> str:
    """Return a value as it is written on the command line."""
    if value is None:
        return "null"
    return quoted(value) if isinstance(value, str) else str(value).replace(" ", "")


def diagnose(command: Command) -> tuple[list[Violation], DictConfig]:
    """Find the overrides that are illegal, after a composition has failed.

    Unknown keys are found without composing. If the others do not compose, composes once per override, each time with the valid overrides
    before it. Every value of a sweep is tried separately.

    Returns:
        One violation per invalid override, and the configuration composed from the valid ones.
    """
    overrides = [value for override in command.overrides for value in sweep_values(override)] if command.is_sweep else command.overrides
    first = [override for override in overrides if override.startswith("hydra.searchpath=")]
    groups = [override for override in overrides if key_of(override) in GROUPS]
    violations = list(command.violations)
    valid: list[str] = []
    composed = DictConfig({})

    def add(candidates: list[str]) -> None:
        """Compose with the candidates, one by one if they do not compose together."""
        nonlocal composed
        try:
            composed = compose("config", [*valid, *candidates])
            valid.extend(candidates)
            return
        except COMPOSITION_ERRORS:
            pass
        for override in candidates:
            try:
                composed = compose("config", [*valid, override])
                valid.append(override)
            except COMPOSITION_ERRORS as error:
                violations.append(violation_of(override, error, composed))

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        add(first)
        add(groups)
        keys = sorted(keys_of(composed))
        others = [override for override in overrides if override not in (*first, *groups)]
        unknown = [o for o in others if not o.startswith(("+", "~", "hydra")) and key_of(o) not in keys]
        violations += [violation_of(override, None, composed) for override in unknown]
        add([override for override in others if override not in unknown])
    return violations, composed


def exit_with_error(error: UserError, *, after: float | None = 0) -> None:
    """Print an error and exit with code 2.

    Args:
        after: delay in seconds, so that only one rank prints the error; None prints nothing (common.ranks.error_report_delay).
    """
    if after is not None:
        time.sleep(after)
        ends.tell_torchrun(str(error))
        print(error, file=sys.stderr, flush=True)
    sys.exit(2)
