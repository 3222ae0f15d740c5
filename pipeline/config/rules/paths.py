"""Rules of paths: names that the file system accepts, and outputs that can be written where they are to be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from pipeline.common.errors import Violation
from pipeline.common.remote import is_remote
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES, Convert, ConvertTokens, Generate, Plan

#: Limits of Linux, in bytes: of a file name, and of a path.
NAME, PATH = 255, 4095
#: Room for what is added to the name of an output while it is written (common/atomic_files.py), and for the files in it.
ADDED_TO_NAME, ADDED_TO_PATH = 32, 256
#: Keys with the path of a file or a folder that is read, besides those of the stage.
INPUTS = (
    "data.shards",
    "data.tokens",
    "data.input",
    "data.pairs.train",
    "data.pairs.validation",
    "data.instructions.train",
    "data.instructions.validation",
    "data.instructions.tokens",
    "data.instructions.reference",
    "dedup.against",
    "tokenizer.path",
    "tokenizer.source",
    "tokenizer.compare",
    "lora.adapter",
    "parallel.deepspeed",
    "checkpoint.fork",
    "checkpoint.initialize_from",
    "evaluation.task_folder",
)
#: The same for the keys of a stage.
STAGE_INPUTS = (
    "checkpoint",
    "adapter",
    "prompts",
    "template",
    "examples",
    "draft",
    "draft_tokenizer",
    "input",
    "calibration",
    "held_out",
    "run",
    "task_folder",
)


def length_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the paths that no file system accepts, which nothing can look up."""
    outputs = {key: value for key, value in _output_folders(config).items() if value is not None} | _output_files(config)
    for key, value in [*outputs.items(), *((key, value) for key, value in _inputs(config) if key not in outputs)]:
        room = (ADDED_TO_NAME, ADDED_TO_PATH) if key in outputs else (0, 0)
        if rule := _too_long(value, *room):
            yield Violation(key, value if len(value) <= 100 else f"{value[:48]}...{value[-48:]}", rule, f"set {key} to a shorter path")


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violated rules of paths, as far as this machine can tell without creating anything."""
    if not config.run_dir.strip():
        yield Violation("run_dir", repr(config.run_dir), "must name a folder", "set run_dir, or remove an unset variable from it")
        return
    outputs = {key: value for key, value in _output_folders(config).items() if value is not None}
    files = _output_files(config)
    if not outputs and Path(config.run_dir).is_file():  # what only reads it, such as a dry run
        yield Violation("run_dir", config.run_dir, "is a file, not a folder", "set run_dir to another path")
    for key, value in (outputs | files).items():
        yield from _output(key, value, is_file=key in files)
    removed = config.data.remove if config.stage.name in TRAINING_STAGES else None
    if removed is not None and not Path(removed).is_file():
        yield Violation("data.remove", removed, "is no file", "name a file that stage=ledger wrote to stage.out")


def _output_folders(config: RunConfig) -> dict[str, str | None]:
    """The folders that the stage writes: key -> path, None for its default."""
    stage = config.stage
    if config.dry_run.enabled or isinstance(stage, Plan):
        return {}
    if isinstance(stage, ConvertTokens):
        return {"data.tokens": config.data.tokens} if stage.to == "shards" else {"stage.output": stage.output}
    if isinstance(stage, Generate):
        return {"stage.output": stage.output, "stage.export": stage.export, "run_dir": config.run_dir}
    if isinstance(stage, Convert) and stage.input is None:
        return {"stage.output": stage.output, "run_dir": config.run_dir}
    if stage.name == "shard":
        return {"data.shards": config.data.shards}
    if stage.name == "tokenize":
        examples = config.data.instructions.tokens
        return {"data.tokens": config.data.tokens} if examples is None else {"data.instructions.tokens": examples}
    if stage.name == "train_tokenizer":
        return {"tokenizer.path": config.tokenizer.path}
    return {"run_dir": config.run_dir}


def _output_files(config: RunConfig) -> dict[str, str]:
    """The files that the stage writes: key -> path."""
    stage = config.stage
    files = {"stage.out": stage.out, "stage.plot": stage.plot} if isinstance(stage, Plan) else {}
    return {key: value for key, value in files.items() if value is not None}


def _inputs(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of what may be read."""
    keyed = [(key, attrgetter(key)(config)) for key in INPUTS]
    keyed += [(f"stage.{key}", getattr(config.stage, key, None)) for key in STAGE_INPUTS]
    keyed += [(f"data.corpora.{name}", paths) for name, paths in config.data.corpora.items()]
    for key, value in keyed:
        for path in value if isinstance(value, list) else [value]:
            if path is not None and "://" not in path:
                yield key, path


def _output(key: str, value: str, *, is_file: bool) -> Iterator[Violation]:
    """An output can be created: it has a legal name, and where it is to be, there is nothing else."""
    kind = "file" if is_file else "folder"
    if not value.strip():
        yield Violation(key, repr(value), f"must name a {kind}", f"set {key}, or remove an unset variable from it")
    elif value.startswith("~"):
        yield Violation(key, value, "would create a folder named ~, which is not replaced by your home", f"write {key}=$HOME/...")
    elif is_remote(value):
        if not key.startswith("data."):  # they have rules of their own
            yield Violation(
                key, value, f"is a URL, and must be a {kind}", "name one on a file system, and copy it by rclone or `aws s3 sync`"
            )
    elif rule := _blocked(Path(value), is_file=is_file):
        yield Violation(key, value, rule, f"set {key} to another path")
    if key == "stage.plot" and not value.endswith(".png"):
        yield Violation(key, value, "must end in .png", "choose the name of a PNG file")


def _too_long(value: str, room_of_name: int = 0, room_of_path: int = 0) -> str:
    """Return why a path is longer than a file system allows, empty if it is not."""
    path = os.fsencode(Path(value).absolute())
    longest = max(map(len, path.split(b"/")))
    if longest > NAME - room_of_name:
        room = f", less {room_of_name} for temporary files" if room_of_name else ""
        return f"has a name of {longest} bytes; a file system allows {NAME}{room}"
    if len(path) > PATH - room_of_path:
        room = f", less {room_of_path} for the files in it" if room_of_path else ""
        return f"is a path of {len(path):,} bytes; Linux allows {PATH:,}{room}"
    return ""


def _blocked(path: Path, *, is_file: bool) -> str:
    """Return what prevents an output from being created, empty if nothing is known that does."""
    try:
        if path.is_symlink() and not path.exists():
            return "is a symbolic link to nothing"
        if is_file and path.is_dir():
            return "is a folder, not a file"
        if not is_file and path.exists() and not path.is_dir():
            return "is a file, not a folder"
        above = next(parent for parent in path.absolute().parents if parent.exists())
        if not above.is_dir():
            return f"is inside of {above}, which is a file"
        if not path.exists() and not os.access(above, os.W_OK | os.X_OK):
            return f"cannot be created: {above} is not writable"
    except PermissionError as error:
        return f"cannot be created: {error.strerror}"
    return ""
