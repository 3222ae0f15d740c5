"""What an override that does not compose violates, in the words of its user."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped] # PyYAML has no types

from pipeline.common import knobs
from pipeline.common.errors import Violation
from pipeline.config import foreign_names
from pipeline.config.command_line import GROUPS, nearest, quoted
from pipeline.config.renamed import REMOVED, new_name
from pipeline.config.schema import RunConfig
from pipeline.models.config_classes import CONFIG_CLASSES

#: Name -> dataclass of the items of lists and dictionaries.
ITEMS: dict[str, Any] = {knob.item.__name__: knob.item for _, knob, _ in knobs.walk(RunConfig()) if knob.item}
#: What Hydra raises for an illegal command line: YAMLError for a file, the last two for a group whose value is a number or a list.
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError)


def violation_of(override: str, error: Exception | None, composed: DictConfig) -> Violation:
    """Convert the error of an override to a violation, with the closest legal names as fix; without an error, its key is unknown."""
    key, _, value = override.lstrip("+~").partition("=")
    keys = sorted(keys_of(composed))
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
        return unknown_key(key, value, keys)
    if part := re.match(r"Key '(.*)' not in '(.*)'", reason):
        names = [item.name for item in dataclasses.fields(ITEMS[part[2]])] if part[2] in ITEMS else keys
        return Violation(key, value, f"sets {part[1]}: no such key", nearest("", part[1], names))
    if "ListConfig" in reason and value.startswith("[") and isinstance(OmegaConf.select(composed, key), ListConfig):
        return Violation(key, value, "has an item with a value that must be a list", "write [VALUE] for it")
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


def unknown_key(key: str, value: object, known: list[str]) -> Violation:
    """The violation of a key that no stage reads."""
    if key in REMOVED:
        return Violation(key, value, "is no longer a key", REMOVED[key])
    if renamed := new_name(key):
        return Violation(key, value, f"was renamed to {renamed}", f"write {renamed}={value}")
    families = [name for name, schema in CONFIG_CLASSES.items() if key in {f"model.{item.name}" for item in dataclasses.fields(schema)}]
    where = f" in this model; the families {', '.join(families)} have it" if families else ""
    return Violation(key, value, f"no such key{where}", foreign_names.advice(key, value) or nearest("", key, known))


def keys_of(node: Any, prefix: str = "") -> list[str]:
    """Return all dotted keys below a node, including groups."""
    keys = []
    for name in node:
        key = f"{prefix}{name}"
        keys.append(key)
        if is_set(node, name) and isinstance(child := node[name], DictConfig):
            keys.extend(keys_of(child, f"{key}."))
    return keys


def is_set(node: Any, name: Any) -> bool:
    """Whether an item of a node has a value of its own: it is neither `???` nor an interpolation, which may not resolve."""
    return not (OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name))
