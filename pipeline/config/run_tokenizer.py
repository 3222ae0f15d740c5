"""The tokenizer settings of a run directory, for those that the command line leaves to it (auto)."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped] # PyYAML has no types

from pipeline.common.artifact import MANIFEST
from pipeline.config import paths
from pipeline.config.data import DECODER_STARTS, TokenizerConfig
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Convert

log = logging.getLogger("pipeline")

#: The value of tokenizer.path and tokenizer.end_of_document that is replaced here.
AUTO = "auto"
#: Folder in a run directory with the files of an imported model.
IMPORTED = "imported"
#: Stages that use no tokenizer, or make one.
_WITHOUT = ("shard", "train_tokenizer")
#: Stages of a job of pretraining, whose token shards decide whether documents begin with a token.
_OF_PRETRAINING = ("pretrain", "certify", "rehearse")


def resolved(config: RunConfig) -> RunConfig:
    """Replace what is left to the run directory (auto).

    The tokenizer is the one that the run was trained with, or that of its imported model; a run that begins takes that of the run it starts
    from. The end-of-document token is the one that belongs to the tokenizer, and so is data.decoder_start.
    """
    tokenizer, defaults = config.tokenizer, TokenizerConfig()
    needed = config.stage.name not in _WITHOUT and not (isinstance(config.stage, Convert) and config.stage.input)
    folder, end, bos = None if tokenizer.path == AUTO else tokenizer.path, None, bos_of_tokens(config)
    if needed and AUTO in (tokenizer.path, tokenizer.end_of_document, tokenizer.bos) and (recorded := next(_recorded(config), None)):
        if folder is None:
            log.info("tokenizer.path=%s, that of the run", recorded[0])
        folder, end = recorded[:2] if folder in (None, recorded[0]) else (folder, None)
        bos = bos or (recorded[2] if folder == recorded[0] else AUTO)
    folder = folder or defaults.path
    if tokenizer.end_of_document != AUTO:
        end = tokenizer.end_of_document
    elif needed:
        end = end or end_of_document(Path(folder))
    start = config.data.decoder_start or (decoder_start(Path(folder)) if needed else None)
    bos = tokenizer.bos if tokenizer.bos != AUTO else bos or AUTO
    tokenizer = replace(tokenizer, path=folder, end_of_document=end or defaults.end_of_document, bos=bos)
    return replace(config, tokenizer=tokenizer, data=replace(config.data, decoder_start=start))


def bos_of_tokens(config: RunConfig) -> str | None:
    """Return tokenizer.bos of the token shards of a pretraining job; None without shards in a folder, or for a job that reads none."""
    if config.stage.name not in _OF_PRETRAINING or config.data.pairs.train:
        return None
    folder = next((chosen.tokens for chosen in config.data.blend.values() if chosen.tokens), config.data.tokens)
    totals = _object(Path(folder) / MANIFEST).get("totals")
    return None if totals is None else "none" if totals.get("bos") is None else "document"


def _recorded(config: RunConfig) -> Iterator[tuple[str, str | None, str]]:
    """Yield tokenizer.path, tokenizer.end_of_document if it is known, and tokenizer.bos of this run and of those that it starts from."""
    for run_dir in _runs(config):
        settings = _settings(run_dir / "config.yaml")
        path, end = settings.get("path"), settings.get("end_of_document")
        if isinstance(path, str) and (Path(path) / "tokenizer.json").is_file():
            yield path, end if isinstance(end, str) else None, settings["bos"]
        if (run_dir / IMPORTED / "tokenizer.json").is_file():
            yield str(run_dir / IMPORTED), None, settings.get("bos", AUTO)


def _runs(config: RunConfig) -> Iterator[Path]:
    """Yield the run directories that the command names, the one whose checkpoint is read first."""
    named = getattr(config.stage, "checkpoint", None)
    if isinstance(named, str) and Path(named).name.startswith("step-"):
        yield paths.split(named)[0]
    yield Path(config.run_dir)
    for start in (config.checkpoint.fork, config.checkpoint.initialize_from):
        if start is not None:
            yield paths.split(start)[0]


def _settings(path: Path) -> dict[str, Any]:
    """Return the group tokenizer of a run's config.yaml; empty without one. Before there was a choice, documents had no BOS token."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException):  # the stages that need this file report it
        return {}
    if not isinstance(content, dict) or not isinstance(group := content.get("tokenizer"), dict):
        return {}
    stage = content.get("stage")
    before = "none" if isinstance(stage, dict) and stage.get("name") == "pretrain" else AUTO
    return {"bos": before, **group}


def end_of_document(folder: Path) -> str | None:
    """Return the special token that ends a text, from the files beside a tokenizer; None if they name none.

    It is eos_token of the tokenizer's settings, eos_token_id of the model's, or sep_token, with which an encoder ends a text.
    """
    special: dict[int, str] | None = None
    for name in _ending_tokens(folder):
        if name is not None:
            special = _special_tokens(folder) if special is None else special
            text = special.get(name) if isinstance(name, int) else name.get("content") if isinstance(name, dict) else name
            if isinstance(text, str) and text in special.values():
                return text
    return None


def _ending_tokens(folder: Path) -> Iterator[Any]:
    """Yield the names, ids or entries of tokens that end a text, in order; every rank opens only the files that it needs."""
    settings = []
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        settings.append(_object(folder / file))
        yield settings[-1].get("eos_token")
    for file in ("config.json", "generation_config.json"):
        yield from _as_list(_object(folder / file).get("eos_token_id"))
    for content in settings:
        yield content.get("sep_token")


def decoder_start(folder: Path) -> str | None:
    """Return the token that the decoder of an imported model reads first, from the files beside a tokenizer; None for the usual one."""
    model = _object(folder / "config.json")
    if not model.get("is_encoder_decoder"):
        return None
    token = {**model, **_object(folder / "generation_config.json")}.get("decoder_start_token_id")
    text = _special_tokens(folder).get(token) if isinstance(token, int) else None
    return None if text in DECODER_STARTS else text


def overrides(folder: Path) -> list[str]:
    """Return the settings of a tokenizer folder for a command line, quoted for the shell; empty if it has no tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        return []
    values = {
        "tokenizer.path": str(folder),
        "tokenizer.end_of_document": end_of_document(folder),
        "data.decoder_start": decoder_start(folder),
    }
    return [override(key, value) for key, value in values.items() if value is not None]


def override(key: str, value: str) -> str:
    """Return KEY=VALUE, quoted for Hydra and the shell if the value has characters with a meaning in either."""
    if re.fullmatch(r"[\w./@:-]+", value):
        return f"{key}={value}"
    text = value.replace("\\", "\\\\").replace('"', '\\"')
    return shlex.quote(f'{key}="{text}"')


def _special_tokens(folder: Path) -> dict[int, str]:
    """Return id -> text of the special tokens of a tokenizer."""
    added = _object(folder / "tokenizer.json").get("added_tokens") or []
    return {token["id"]: token["content"] for token in added if token.get("special")}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none, which those who need the file report."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
