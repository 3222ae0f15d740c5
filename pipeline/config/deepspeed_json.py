"""A DeepSpeed configuration (parallel.deepspeed) as settings of a run. Imports neither DeepSpeed nor torch."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped] # PyYAML has no types

from pipeline.common.errors import UserError, Violation
from pipeline.config.deepspeed_keys import MICS, OFF, ONLY, SECTIONS, SETS, VALUES, WITHOUT_EFFECT, Only
from pipeline.config.deepspeed_sections import AUTO, READERS, dtype

KEY = "parallel.deepspeed"


@dataclass
class Settings:
    """What a file says.

    Attributes:
        path: of the file.
        values: our key -> (value, key of the file).
        without_effect: keys of the file -> why.
        batch: micro-batch size and number of micro-batches of a step, None where the file leaves it to us.
        violations: of what is refused.
    """

    path: str
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    without_effect: dict[str, str] = field(default_factory=dict)
    batch: tuple[int | None, int | None] = (None, None)
    violations: list[Violation] = field(default_factory=list)

    def refuse(self, key: str, value: Any, rule: str, fix: str) -> None:
        """Add a violation of a key of the file."""
        self.violations.append(Violation(f"{self.path}: {key}", json.dumps(value), rule, fix))

    def set(self, key: str, ours: str, value: Any) -> None:
        """Set a key of ours, unless the value is "auto"."""
        if value is None or value == AUTO:
            return
        if (named := VALUES.get(ours)) is not None:
            if value not in named:
                self.refuse(key, value, "is not supported", f"set it to {' or '.join(named)}")
                return
            value = named[value]
        if isinstance(value, bool) or not isinstance(value, str if ours in _TEXTS else (int, float)):
            self.refuse(
                key, value, f"is not a {'text' if ours in _TEXTS else 'number'}", f'correct it, or set it to "auto" and {ours} here'
            )
            return
        if ours in _INTEGERS and not float(value).is_integer():
            self.refuse(key, value, "is not an integer", f'correct it, or set it to "auto" and {ours} here')
            return
        value = int(value) if ours in _INTEGERS else value if ours in _TEXTS else float(value)
        other, source = self.values.setdefault(ours, (value, key))
        if other != value:
            self.refuse(key, value, f"contradicts {source}={json.dumps(other)}: both set {ours}", "set both to one value")


_TEXTS = (
    *("tracking.project", "optimizer.name", "optimizer.schedule", "precision.dtype", "precision.reduce_dtype"),
    *("parallel.offload", "parallel.zero_group"),
)
_INTEGERS = (
    *("training.global_batch_size", "training.micro_batch_size", "training.steps", "optimizer.warmup_steps", "tracking.log_every"),
    *("parallel.zero_stage", "parallel.tensor", "precision.loss_scale_window"),
)


@functools.cache
def read(path: str) -> Settings:
    """Read a file.

    Raises:
        UserError: it is missing, or is not a JSON object.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise UserError.of(KEY, path, f"cannot be read: {error.strerror}", "name a JSON file with a DeepSpeed configuration") from error
    except ValueError as error:
        raise UserError.of(KEY, path, f"is not JSON: {error}", "correct the file") from error
    if not isinstance(document, dict):
        raise UserError.of(KEY, path, "is not a JSON object", "name a JSON file with a DeepSpeed configuration")
    settings = Settings(path)
    if broken := list(_not_sections(document)):
        for name, value in broken:
            settings.refuse(name, value, "is not a section", "correct it to {...}")
        return settings
    _read_all(document, settings)
    return settings


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As DeepSpeed, refuse a key that occurs twice."""
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} occurs twice")
    return dict(pairs)


def _not_sections(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of sections that are not dictionaries, as also `params` must be."""
    for name in (*SECTIONS, "optimizer.params", "scheduler.params"):
        outer, _, inner = name.partition(".")
        parent = document if not inner else document.get(outer)
        key = inner or outer
        if isinstance(parent, dict) and not isinstance(value := parent.get(key, {}), dict) and not (value is None and inner):
            yield name, value


def _read_all(document: dict[str, Any], settings: Settings) -> None:
    """Read every key."""
    for key, value in _leaves(document):
        if key == MICS:
            _set_group(document["zero_optimization"], value, settings)
        elif key in SETS:
            settings.set(key, SETS[key], value)
        elif key in ONLY:
            if value not in (*ONLY[key].values, AUTO):
                settings.refuse(key, value, ONLY[key].rule, ONLY[key].fix)
        elif key in OFF:
            if not _is_off(value):
                settings.refuse(key, value, *OFF[key])
        elif reason := next((WITHOUT_EFFECT[name] for name in _prefixes(key) if name in WITHOUT_EFFECT), None):
            settings.without_effect[key] = reason
        elif key != "gradient_accumulation_steps" and not key.startswith(tuple(f"{name}." for name in READERS)):
            settings.refuse(key, value, "is not a key that is known here", _nearest(key))
    for name in (name for name in READERS if name in document):
        for key, value, meaning in READERS[name](document):
            if isinstance(meaning, Only):
                settings.refuse(key, value, meaning.rule, meaning.fix)
            elif meaning is None:
                settings.without_effect[key] = "describes what is done here, or does not change it"
            else:
                settings.set(key, *meaning)
    if chosen := dtype(document):
        settings.set(chosen[0], "precision.dtype", chosen[1])
    settings.batch = _batch(document)


def _set_group(zero: dict[str, Any], value: Any, settings: Settings) -> None:
    """Read MiCS: a number of ranks above 0, with ZeRO 3."""
    if value in (-1, 0, AUTO):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        settings.refuse(MICS, value, "is not a number of ranks", "correct it, or set it to -1")
    elif zero.get("stage") != 3:
        settings.refuse(
            MICS, value, "shards weights, which DeepSpeed does with ZeRO 3 only", f"set stage to 3, or {SETS[MICS]} in place of it"
        )
    else:
        settings.set(MICS, SETS[MICS], str(value))


def _leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value), down to the keys of sections that are listed."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key in SECTIONS and isinstance(value, dict):
            yield from _leaves(value, f"{key}.")
        elif not (key in SECTIONS and value is None):
            yield key, value


def _prefixes(key: str) -> Iterator[str]:
    """Yield a dotted key and the sections that it is in."""
    parts = key.split(".")
    yield from (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def _is_off(value: Any) -> bool:
    """Whether a section is absent, empty, or disabled."""
    return value in (None, False, {}, AUTO) or (isinstance(value, dict) and value.get("enabled") is False)


def _nearest(key: str) -> str:
    """Advice for an unknown key."""
    known = [*SETS, *ONLY, *OFF, *WITHOUT_EFFECT, "gradient_accumulation_steps"]
    close = difflib.get_close_matches(key, known, n=2)
    return f"did you mean {' or '.join(close)}?" if close else "remove it"


def _batch(document: dict[str, Any]) -> tuple[int | None, int | None]:
    """Micro-batch size and micro-batches of a step. As in DeepSpeed, a step without a number of them and a batch size has one."""
    micro, steps = (_count(document.get(name)) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    if micro and not {"gradient_accumulation_steps", "train_batch_size"} & document.keys():
        steps = 1
    return micro, steps


def _count(value: Any) -> int | None:
    """A number of a file; None for "auto"."""
    return value if isinstance(value, int) else None


def expanded(overrides: Sequence[str], folders: Sequence[Path]) -> tuple[list[str], list[Violation]]:
    """Add the settings of the file to a command line, before those that it has; what it sets itself is left out.

    The rules compare both (config/rules/deepspeed.py).

    Args:
        overrides: in Hydra's grammar.
        folders: with configuration groups.

    Returns:
        The overrides, and the violations of the file.
    """
    named = [override.partition("=")[2].strip("'\"") for override in overrides if override.lstrip("+~").startswith(f"{KEY}=")]
    if not named or named[-1] in ("", "null"):
        return list(overrides), []
    try:
        settings = read(named[-1])
    except UserError as error:
        return list(overrides), list(error.violations)
    written = set(_written(overrides, folders))
    added = [f"{key}={_text(value)}" for key, (value, _) in settings.values.items() if key not in written]
    return [*added, *overrides], settings.violations


def _text(value: Any) -> str:
    """A value in Hydra's grammar."""
    return f"'{value}'" if isinstance(value, str) else repr(value)


def _written(overrides: Sequence[str], folders: Sequence[Path]) -> Iterator[str]:
    """Yield the keys that a command line sets, itself or by the files of groups and experiments that it names."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        yield key
        if re.fullmatch(r"\w+", key):
            for option in re.findall(r"[\w.-]+", value):
                yield from _keys_of_file(key, option, folders)


def _keys_of_file(group: str, option: str, folders: Sequence[Path]) -> Iterator[str]:
    """Yield the keys that a file of a group sets, with those of the files that an experiment chooses."""
    for path in (folder / group / f"{option}.yaml" for folder in folders):
        if not path.is_file() or not isinstance(content := yaml.safe_load(path.read_text(encoding="utf-8")), dict):
            continue
        for entry in content.pop("defaults", []):
            for name, chosen in entry.items() if isinstance(entry, dict) else ():
                yield from _keys_of_file(name.removeprefix("override ").strip("/ "), str(chosen), folders)
        yield from (key for key, _ in _flat(content, "" if group == "experiment" else f"{group}."))


def _flat(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested dictionaries."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def lines(path: str) -> Iterator[str]:
    """Yield what the log says of a file: what it sets, and what has no effect."""
    settings = read(path)
    values = ", ".join(f"{key}={value} ({source})" for key, (value, source) in settings.values.items())
    yield f"{KEY}={path} sets {values or 'nothing'}"
    if settings.without_effect:
        reasons: dict[str, list[str]] = {}
        for key, reason in settings.without_effect.items():
            reasons.setdefault(reason, []).append(key)
        yield f"{KEY}={path}, without effect: " + "; ".join(f"{', '.join(keys)} ({reason})" for reason, keys in reasons.items())
