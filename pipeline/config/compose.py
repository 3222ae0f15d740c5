"""Composition of the configuration with Hydra, and error messages for command lines that do not compose."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import sys
import sysconfig
import time
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, dictconfig
from omegaconf.errors import OmegaConfBaseException

from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.config.paths import CONF_DIR
from pipeline.config.renamed import REMOVED, new_name
from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES
from pipeline.models.config_classes import CONFIG_CLASSES


@functools.cache
def register() -> None:
    """Register the dataclasses as schemas of the files in conf/, and the resolver `${python_stdlib:}`, a path."""
    # OmegaConf makes nodes of frozen dataclasses read-only: overrides could not change them. The composed objects are frozen all the same.
    dictconfig.is_structured_config_frozen = lambda _: False
    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=RunConfig, package="_global_")
    for stage, (schema, _) in STAGES.items():
        store.store(group="schema/stage", name=stage, node=schema)
    for family, schema in CONFIG_CLASSES.items():
        store.store(group="schema/model", name=family, node=schema)
    OmegaConf.register_new_resolver("python_stdlib", lambda: sysconfig.get_paths()["stdlib"], replace=True)


#: What Hydra raises for an illegal command line; the last two for a group whose value is a number or a list.
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError)


def normalize_overrides(arguments: list[str]) -> list[str]:
    """Convert a command line to Hydra syntax: dry_run=true to its full key, and keys of user-defined names below a dict to ++key.

    Raises:
        UserError: an argument is not of the form key=value.
    """
    plain = [argument for argument in arguments if not argument.startswith(("-", "~")) and not re.match(r"[^=]+=", argument)]
    if plain and not any(argument.startswith("-") for argument in arguments):  # options of Hydra may have values of their own
        fix = "write key=value; an unset shell variable or a space inside a value can be the cause"
        raise UserError([Violation("argument", repr(argument), "is not of the form key=value", fix) for argument in plain])
    dict_keys = tuple(f"{key}{mark}" for key, _, value in knobs.walk(RunConfig()) if isinstance(value, dict) for mark in "=.")
    arguments = [re.sub("^dry_run=", "dry_run.enabled=", argument) for argument in arguments]
    return [f"++{argument}" if argument.startswith(dict_keys) else argument for argument in arguments]


def to_run_config(config: DictConfig) -> RunConfig:
    """Convert a composed configuration to dataclasses and resolve interpolations. Values are validated by check.check().

    Raises:
        UserError: a value is missing or cannot be resolved, or a key was added (+key=value) that no stage reads.
    """
    if added := sorted(set(map(str, config)) - {item.name for item in dataclasses.fields(RunConfig)} - {"hydra"}):
        keys = sorted(_keys(config))
        raise UserError(
            [
                Violation(key, config[key], "no such key", _nearest("", key, [k for k in keys if k.partition(".")[0] not in added]))
                for key in added
            ]
        )
    try:
        run = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise UserError.of(key, "?", str(error).splitlines()[0], f"set {key} on the command line") from error
    assert isinstance(run, RunConfig)
    return run


def diagnose(overrides: list[str], *, sweep: bool = False) -> tuple[list[Violation], DictConfig]:
    """Find the overrides that cannot be composed, after a composition has failed.

    Unknown keys and options of groups are found without composing; otherwise, composes once per override, each time with the valid
    overrides before it.

    Args:
        overrides: `key=value` arguments of the command line.
        sweep: try every value of a sweep separately.

    Returns:
        One violation per invalid override, and the configuration composed from the valid ones.
    """
    if sweep:
        overrides = [value for override in overrides for value in _sweep_values(override)]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        groups, others = _split(overrides)
        violations = [_group_violation(override) for override in groups if not _is_option(override)]
        valid = [override for override in groups if _is_option(override)]
        composed = compose("config", valid)
        keys = set(_keys(composed))
        unknown = [o for o in others if not o.startswith(("+", "~", "hydra")) and _key_of(o) not in keys]
        violations += [_violation(override, None, composed) for override in unknown]
        known = [override for override in others if override not in unknown]
        try:
            return violations, compose("config", [*valid, *known])
        except COMPOSITION_ERRORS:
            pass
        for override in known:
            try:
                composed = compose("config", [*valid, override])
                valid.append(override)
            except COMPOSITION_ERRORS as error:
                violations.append(_violation(override, error, composed))
        return violations, compose("config", valid)


def _key_of(override: str) -> str:
    """The key of an override."""
    return override.lstrip("+~").partition("=")[0]


def _split(overrides: list[str]) -> tuple[list[str], list[str]]:
    """Split overrides into those of config groups, which are folders of conf/, and the others."""
    groups = [o for o in overrides if re.fullmatch(r"[a-z/_]+", _key_of(o)) and (CONF_DIR / _key_of(o)).is_dir()]
    return groups, [override for override in overrides if override not in groups]


def _is_option(override: str) -> bool:
    """Whether the override of a group names one of its files."""
    key, _, value = override.lstrip("+").partition("=")
    return not override.startswith("~") and value in _options(key)


def _options(group: str) -> list[str]:
    """The options of a config group."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def _group_violation(override: str) -> Violation:
    """The violation of a group whose value is not one of its options."""
    key, _, value = override.lstrip("+~").partition("=")
    options = _options(key)
    return Violation(override.partition("=")[0], value, f"must be one of {', '.join(options)}", _nearest(f"{key}=", value, options))


def _sweep_values(override: str) -> list[str]:
    """Expand the override of a sweep: `a=1,2` -> a=1, a=2."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return [override]
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()] if parsed.is_discrete_sweep() else [override]


def _violation(override: str, error: Exception | None, composed: DictConfig) -> Violation:
    """Convert the error of an override to a violation, with the closest legal names as fix; without an error, its key is unknown."""
    key, _, value = override.lstrip("+~").partition("=")
    keys = sorted(_keys(composed))
    if not re.fullmatch(r"\w[\w./@:-]*", key) or ".." in key:
        return Violation(key, value, "is not a key", _nearest("", key, keys))
    reason = re.sub(r"\s+", " ", str((error and error.__cause__) or error).partition("\n")[0])
    if "no viable alternative" in reason or "NoViableAlt" in reason:
        fix = f"quote the value for Hydra and for the shell: '{key}=\"{value}\"'"
        return Violation(key, value, "contains characters with a special meaning in Hydra", fix)
    if "Ambiguous value" in reason:
        return Violation(key, value, "contains several values", f"add -m to sweep over them, or quote a single value: {key}='...'")
    if key in REMOVED:
        return Violation(key, value, "is no longer a key", REMOVED[key])
    if renamed := new_name(key):
        return Violation(key, value, f"was renamed to {renamed}", f"write {renamed}={value}")
    if key not in keys and (error is None or not override.startswith("++")):
        return Violation(key, value, "no such key", _nearest("", key, keys))
    if "ListConfig" in reason and value.startswith("["):
        return Violation(key, value, "must be a dictionary", f"write {key}={{NAME: {value}}}")
    if "ListConfig" in reason:
        return Violation(key, value, "must be a list", f"write {key}=[{value}]")
    return Violation(key, value, reason, f"set {key} to a value of its type")


def _keys(node: Any, prefix: str = "") -> list[str]:
    """Return all dotted keys below a node, including groups."""
    found = []
    for name in node:
        key = f"{prefix}{name}"
        found.append(key)
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
            found.extend(_keys(child, f"{key}."))
    return found


def _nearest(prefix: str, name: str, known: list[str]) -> str:
    """Return advice with the closest legal names, or where to find all of them."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    leaf = name.rpartition(".")[2]
    close += [key for key in known if key.rpartition(".")[2] == leaf and key not in close][:3]
    if close:
        return "did you mean " + " or ".join(f"{prefix}{c}" for c in close) + "?"
    return "python -m pipeline --help lists every key" if not prefix else f"choose one of {', '.join(known)}"


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
