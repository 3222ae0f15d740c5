"""The texts of `--help`, `--help TOPIC` and `stage=NAME --help`, and the page of all keys. Imports neither Hydra nor torch."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.common import knobs, page
from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.config import foreign_names
from pipeline.config.paths import CONF_DIR
from pipeline.config.schema import RunConfig
from pipeline.config.stages import READS, STAGES
from pipeline.models.config_classes import CONFIG_CLASSES

#: What asks for a help text.
FLAGS = ("-h", "--help")
_USAGE = "usage: python -m pipeline stage=NAME [group=option] [key=value] ..."
_MORE = """The command runs as a single process, as one rank of torchrun, srun or mpirun, or with -m as a Hydra sweep (--hydra-help).
--help TOPIC prints fewer keys: of a stage, a group, a model family, or those whose name contains TOPIC. stage=NAME --help prints those
that a stage reads. --help FILE.html writes a page of all keys to browse and search. --version prints the version and the commit."""


def print_help(arguments: Sequence[str]) -> None:
    """Print the help text that a command line asks for.

    Raises:
        UserError: there is no such topic.
    """
    words = [word for word in arguments if word not in FLAGS]
    stages = [word.removeprefix("stage=") for word in words if word.startswith("stage=")]
    topics = [*(f"stage={stage}" for stage in stages), *(word for word in words if re.fullmatch(r"[\w./ -]+", word))]
    if not topics:
        _print_all()
    for topic in topics:
        if topic.endswith(".html"):
            _write_page(Path(topic))
        else:
            _print_topic(topic)


def _print_all() -> None:
    """Print stages, groups and all keys."""
    print(f"{_USAGE}\n")
    print("stages:")
    for name, (_, summary) in STAGES.items():
        print(f"  stage={name:<16} {summary}")
    print("\ngroups (conf/GROUP/OPTION.yaml):")
    for group in sorted(p for p in CONF_DIR.iterdir() if p.is_dir() and p.name != "stage"):
        print(f"  {group.name}={'|'.join(_options(group.name))}")
    print("\nkeys:")
    _print_rows(_rows(RunConfig()))
    for family in CONFIG_CLASSES:
        _print_family(family)
    for stage in STAGES:
        _print_stage_keys(stage)
    print(f"\n{_MORE}")


def _print_topic(topic: str) -> None:
    """Print the keys of a stage, a group, a family, or those whose name contains the topic."""
    groups = {item.name for item in dataclasses.fields(RunConfig)} - {"stage", "run_dir"}
    name = topic.removeprefix("stage=")
    if name in STAGES:
        _print_stage(name)
    elif topic in groups:
        _print_group(topic)
    elif topic in CONFIG_CLASSES:
        _print_family(topic)
    elif (rows := [row for row in _all_rows() if topic.replace("-", "_") in row[0]]) or foreign_names.advice(topic, "VALUE"):
        _print_rows(rows)
        if advice := foreign_names.advice(topic, "VALUE"):
            print(f"{topic} of another framework or program: {advice}")
    elif rows := [row for row in _all_rows() if re.search(rf"\b{re.escape(topic)}\b", row[2].meaning, re.IGNORECASE)]:
        _print_rows(rows)
    else:
        known = [*STAGES, *sorted(groups), *CONFIG_CLASSES, *(row[0] for row in _all_rows())]
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        fix = f"did you mean {' or '.join(close)}?" if close else "--help alone lists all of them"
        raise UserError.of("--help", topic, "is not a stage, a group, a model family, or part of the name of a key", fix)


def _print_group(group: str) -> None:
    """Print the keys of a group."""
    options = _options(group)
    print(f"keys of group {group}" + (f" ({group}={'|'.join(options)})" if options else "") + ":")
    if group == "model":
        print(f"  --help FAMILY lists them: {', '.join(CONFIG_CLASSES)}")
    else:
        _print_rows(_rows(getattr(RunConfig(), group), f"{group}."))


def _print_stage(stage: str) -> None:
    """Print what a stage does, its own keys, and the groups that it reads."""
    print(f"python -m pipeline stage={stage}: {STAGES[stage][1]}")
    _print_stage_keys(stage)
    for group in READS[stage]:
        print()
        _print_group(group)
    print("\nkeys of no group:")
    _print_rows(row for row in _rows(RunConfig()) if row[0] == "run_dir")


def _print_stage_keys(stage: str) -> None:
    """Print the keys that only this stage has."""
    schema = STAGES[stage][0]
    if rows := list(_rows(schema(name=stage), "stage.")):
        print(f"\nkeys of stage={stage}:")
        _print_rows(rows)


def _print_family(family: str) -> None:
    """Print the keys of a model family."""
    print(f"\nkeys of model family {family}:")
    _print_rows(_rows(CONFIG_CLASSES[family](), "model."))


def _options(group: str) -> list[str]:
    """The files of a group."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def _parts() -> Iterator[tuple[str, Any, str]]:
    """Yield (who reads it alone, dataclass, prefix of its keys) of all groups, families and stages."""
    yield "", RunConfig(), ""
    yield from ((f"model family {name}", schema(), "model.") for name, schema in CONFIG_CLASSES.items())
    yield from ((f"stage={name}", schema(name=name), "stage.") for name, (schema, _) in STAGES.items())


def _all_rows() -> list[tuple[str, str, knobs.Knob, Any]]:
    """The keys of all groups, families and stages, each once."""
    rows: dict[str, tuple[str, str, knobs.Knob, Any]] = {}
    for row in (row for _, node, prefix in _parts() for row in _rows(node, prefix)):
        rows.setdefault(row[0], row)
    return list(rows.values())


def _rows(node: Any, prefix: str = "") -> Iterator[tuple[str, str, knobs.Knob, Any]]:
    """Yield (key, type, knob, default) of every key, those of the items of lists and dictionaries after them."""
    for item in dataclasses.fields(node):
        key, value = f"{prefix}{item.name}", getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from _rows(value, f"{key}.")
        elif knob := item.metadata.get("knob"):
            yield key, str(item.type), knob, value
            if knob.item:
                yield from _rows(knob.item(), f"{key}.{'NAME' if isinstance(value, dict) else 'NUMBER'}.")


def _print_rows(rows: Any) -> None:
    """Print one line per key: name, default, type, meaning, unit and range."""
    for key, kind, knob, default in rows:
        details = ", ".join(part for part in (knob.unit, knob.rule()) if part)
        shown = re.sub(r"\w+Config\b", "dict", kind)
        print(f"  {f'{key}={default}':<46} {shown:<12} {knob.meaning}{f' ({details})' if details else ''}")


def _write_page(path: Path) -> None:
    """Write the page of all keys: every key with its default, type, meaning, range, names elsewhere, readers, and the files that set it.

    Raises:
        UserError: the file cannot be written.
    """
    readers: dict[tuple[str, ...], list[str]] = {}
    for reader, node, prefix in _parts():
        for key, kind, knob, default in _rows(node, prefix):
            group = key.partition(".")[0]
            read_by = [reader] if reader else [f"stage={stage}" for stage, groups in READS.items() if group in groups]
            limits = ", ".join(part for part in (knob.unit, knob.rule()) if part)
            readers.setdefault((key, str(default), kind, knob.meaning, limits), []).extend(read_by)
    set_by = _set_by({key for key, *_ in readers})
    elsewhere = {key: foreign_names.of(key) for key, *_ in readers}
    rows = [(*row, elsewhere[row[0]], list(dict.fromkeys(names)), set_by.get(row[0], [])) for row, names in sorted(readers.items())]
    text = page.render("keys.html.jinja", "Keys of the configuration", rows=rows, stages={name: line for name, (_, line) in STAGES.items()})
    try:
        with atomic_file(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise UserError.of("--help", path, f"cannot be written: {error}", "name a file in a folder that exists") from error
    print(f"{path}: {len({row[0] for row in rows}):,} keys")


def _set_by(keys: set[str]) -> dict[str, list[str]]:
    """Key -> "GROUP=OPTION: VALUE" for every file of conf/ that sets it."""
    import yaml  # type: ignore[import-untyped] # PyYAML has no types

    files: dict[str, list[str]] = {}

    def walk(node: Any, prefix: str, file: str) -> None:
        for name, value in node.items():
            if (key := f"{prefix}{name}") in keys:
                files.setdefault(key, []).append(f"{file}: {value if isinstance(value, str) else json.dumps(value)}")
            elif isinstance(value, dict):
                walk(value, f"{key}.", file)

    for path in sorted(CONF_DIR.glob("*/*.yaml")):
        text, group = path.read_text(encoding="utf-8"), path.parent.name
        walk(yaml.safe_load(text) or {}, "" if "@package _global_" in text else f"{group}.", f"{group}={path.stem}")
    return files
