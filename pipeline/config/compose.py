"""Composition of the configuration with Hydra, and error messages for command lines that do not compose."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, dictconfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped] # PyYAML has no types

from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.config import planned, run_tokenizer
from pipeline.config.command_line import FILE, GROUPS, Command, key_of, nearest, parse, quoted, sweep_values
from pipeline.config.paths import CONF_DIR
from pipeline.config.renamed import REMOVED, new_name
from pipeline.config.rules import paths
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
    OmegaConf.register_new_resolver("python_stdlib", lambda: sysconfig.get_paths()["stdlib"], replace=True)


def _finetune_lr(rank: int, adapter: str | None, objective: str) -> float:
    """The default learning rate of stage=finetune: TRL's for full weights, ten times as much for adapters, and less for preferences."""
    return 1e-5 if objective == "dpo" else 2e-4 if rank or adapter else 2e-5


def _if_finetune(tuned: int, trained: int, *, _root_: DictConfig) -> int:
    """A default of stage=plan: the first value if the planned job is stage=finetune, the second if it is pretrain."""
    return tuned if planned.job_stage(_root_) == "finetune" else trained


#: Name -> dataclass of the items of lists and dictionaries.
ITEMS: dict[str, Any] = {knob.item.__name__: knob.item for _, knob, _ in knobs.walk(RunConfig()) if knob.item}
#: What Hydra raises for an illegal command line: YAMLError for a file, the last two for a group whose value is a number or a list.
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError)


def to_run_config(config: DictConfig) -> RunConfig:
    """Convert a composed configuration to dataclasses, resolve interpolations, and take from the run directory what is left to it.

    Values are validated by rules.check.

    Raises:
        UserError: a value is missing or cannot be resolved, or a key was added (+key=value) that no stage reads.
    """
    if unknown := dict(_unknown(config)):
        known = sorted(key for key in _keys(config) if not any(f"{added}.".startswith(f"{key}.") for added in unknown))
        raise UserError([_unknown_key(key, value, known) for key, value in unknown.items()])
    if not OmegaConf.is_missing(config, "model") and OmegaConf.get_type(config, "model") not in CONFIG_CLASSES.values():
        fix = f"begin its file with defaults: [/schema/model/FAMILY@_here_, _self_], FAMILY being one of {', '.join(CONFIG_CLASSES)}"
        raise UserError.of("model", "?", "has no family", fix)
    try:
        run = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise UserError.of(key, "?", str(error).splitlines()[0], f"set {key} on the command line") from error
    assert isinstance(run, RunConfig)
    if too_long := list(paths.length_violations(run)):
        raise UserError(too_long)
    return run_tokenizer.resolved(run)


def _unknown(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) for every key that the dataclasses do not have; a dictionary of user-defined names has any key."""
    schema = OmegaConf.get_type(node)
    fields = {item.name for item in dataclasses.fields(schema)} if dataclasses.is_dataclass(schema) else None
    for name in node:
        key, value = f"{prefix}{name}", node._get_node(name)
        if fields is not None and name not in fields:
            if key != "hydra":
                yield from _leaves(key, value)
        elif isinstance(value, DictConfig | ListConfig) and not (value._is_none() or value._is_missing()):
            yield from _unknown_items(key, value)


def _unknown_items(key: str, value: DictConfig | ListConfig) -> Iterator[tuple[str, object]]:
    """Yield the unknown keys below a key, and their values."""
    if isinstance(value, DictConfig):
        yield from _unknown(value, f"{key}.")
        return
    for number in range(len(value)):
        if isinstance(item := value._get_node(number), DictConfig | ListConfig):
            yield from _unknown_items(f"{key}.{number}", item)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) of every value below a key."""
    if isinstance(value, DictConfig) and len(value) > 0:
        for name in value:
            yield from _leaves(f"{key}.{name}", value._get_node(name))
    else:
        yield key, value


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
    own = [word for word in arguments if not re.match(r"[+~]*(stage|dry_run)[.=]", word)]
    values = {key: functools.reduce(getattr, key.split("."), job) for key in keys}
    composed = recompose([*own, f"stage={job.stage.name}"])
    changed = {key: value for key, value in values.items() if functools.reduce(getattr, key.split("."), composed) != value}
    return [*(word for word in own if key_of(word) not in changed), *(f"{key}={_written(value)}" for key, value in changed.items())]


def recompose(arguments: Sequence[str]) -> RunConfig:
    """Compose another command line, beside the configuration of this run."""
    overrides, running = parse(arguments).overrides, GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            return to_run_config(compose("config", overrides))
    finally:
        GlobalHydra.instance().hydra = running


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
                violations.append(_violation(override, error, composed))

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        add(first)
        add(groups)
        keys = sorted(_keys(composed))
        others = [override for override in overrides if override not in (*first, *groups)]
        unknown = [o for o in others if not o.startswith(("+", "~", "hydra")) and key_of(o) not in keys]
        violations += [_violation(override, None, composed) for override in unknown]
        add([override for override in others if override not in unknown])
    return violations, composed


def _violation(override: str, error: Exception | None, composed: DictConfig) -> Violation:
    """Convert the error of an override to a violation, with the closest legal names as fix; without an error, its key is unknown."""
    key, _, value = override.lstrip("+~").partition("=")
    keys = sorted(_keys(composed))
    reason = re.sub(r"\s+", " ", str((error and error.__cause__) or error).partition("\n")[0])
    if key in GROUPS:
        return _file_violation(key, value, error, keys)
    if not re.fullmatch(r"\w[\w./@:-]*", key) or ".." in key:
        return Violation(key, value, "is not a key", nearest("", key, keys))
    if re.match(r"hydra[./]", key):
        return Violation(key, value, f"is refused by Hydra: {reason}", "remove it; --cfg=hydra prints Hydra's own keys")
    if re.search("no viable alternative|NoViableAlt|mismatched input|token recognition|extraneous input|Error parsing override", reason):
        if re.search(r"^,|,\s*,|,$", value) and not re.search(r"""[][(){}'"]""", value):
            values = ",".join(part.strip() for part in value.split(",") if part.strip())
            return Violation(key, value, "has an empty value", f"remove the comma that has no value beside it: {key}={values}")
        return Violation(key, value, "contains characters with a special meaning in Hydra", _quotes(key, value))
    if "Ambiguous value" in reason:
        return Violation(key, value, "contains several values", f"add -m to sweep over them, or quote a single value: {key}='...'")
    if key not in keys and (error is None or not override.startswith("++")):
        return _unknown_key(key, value, keys)
    if part := re.match(r"Key '(.*)' not in '(.*)'", reason):
        names = [item.name for item in dataclasses.fields(ITEMS[part[2]])] if part[2] in ITEMS else keys
        return Violation(key, value, f"sets {part[1]}: no such key", nearest("", part[1], names))
    if "ListConfig" in reason and value.startswith("["):
        return Violation(key, value, "must be a dictionary", f"write {key}={{NAME: {value}}}")
    if "ListConfig" in reason:
        return Violation(key, value, "must be a list", f"write {key}=[{value}]")
    return Violation(key, value, reason, f"set {key} to a value of its type")


def _quotes(key: str, value: str) -> str:
    """Advice for a value that Hydra's grammar does not accept as it is."""
    if re.search(r"\s[+~]*\w[\w./]*=", value):
        return f"write separate arguments: {key}={value}"
    if value.startswith("~/"):
        return f"write {key}=$HOME{value[1:]}"
    if value.startswith(("[", "{")):
        example = '["a, b","c"]' if value.startswith("[") else '{name:"a, b"}'
        return f"close all brackets, quote the items for Hydra and the argument for the shell, such as '{key}={example}'"
    if value.startswith("="):
        return f"write {key}={value[1:]}"
    argument = f"{key}={quoted(value)}"
    return "quote the value for Hydra and for the shell: " + (shlex.quote(argument) if re.search(r'["$`\\!]', value) else f'"{argument}"')


def _file_violation(group: str, option: str, error: Exception | None, keys: list[str]) -> Violation:
    """The violation of a group whose file does not compose, such as an experiment with an unknown key."""
    text = str(error)
    if "Ambiguous value" in text:
        return Violation(group, option, "contains several values", "add -m to sweep over them")
    if unknown := re.search(r"Key '(.*)' not in", text):
        path = re.search(r"full_key: (.*)", text)
        key = path[1] if path else unknown[1]
        return Violation(group, option, f"its file sets {key}: no such key", nearest("", key, keys))
    reason = " ".join(line.strip() for line in text.splitlines()[:2])
    if wrong := re.search(r"(Value .*?)\s+full_key: (\S+)", text, re.DOTALL):
        reason = f"{wrong[2]}: {wrong[1]}"
    return Violation(group, option, f"its file does not compose: {reason}", "correct the file, or choose another one")


def _unknown_key(key: str, value: object, known: list[str]) -> Violation:
    """The violation of a key that no stage reads."""
    if key in REMOVED:
        return Violation(key, value, "is no longer a key", REMOVED[key])
    if renamed := new_name(key):
        return Violation(key, value, f"was renamed to {renamed}", f"write {renamed}={value}")
    return Violation(key, value, "no such key", nearest("", key, known))


def _keys(node: Any, prefix: str = "") -> list[str]:
    """Return all dotted keys below a node, including groups."""
    keys = []
    for name in node:
        key = f"{prefix}{name}"
        keys.append(key)
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
            keys.extend(_keys(child, f"{key}."))
    return keys


def exit_with_error(error: UserError, *, after: float | None = 0) -> None:
    """Print an error and exit with code 2.

    Args:
        error: the error to print.
        after: delay in seconds, so that only one rank prints the error; None prints nothing (common.ranks.error_report_delay).
    """
    if after is not None:
        time.sleep(after)
        print(error, file=sys.stderr, flush=True)
    sys.exit(2)
