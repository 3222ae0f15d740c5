"""The tokenizer that a run was trained with, found by the configuration that its checkpoints have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.common.artifact import MANIFEST
from pipeline.common.atomic_files import digest
from pipeline.config.run_tokenizer import IMPORTED
from pipeline.data.tokenize.tokenizer import check_same


def fingerprint_of(config: Mapping[str, Any], checkpoint: Path | None = None) -> str | None:
    """Return the checksum of tokenizer.json, as manifests of token shards record it; None if nothing that tells is there any more.

    Args:
        config: the resolved configuration as nested dictionaries.
        checkpoint: with this configuration; None for a run without one.
    """
    data = config.get("data", {})
    reads_text = config.get("stage", {}).get("name") != "pretrain" or data.get("pairs", {}).get("train")
    for folder in () if reads_text else (data.get("tokens"), *(corpus.get("tokens") for corpus in data.get("blend", {}).values())):
        manifest = None if folder is None else Path(folder) / MANIFEST
        if manifest is not None and manifest.is_file():
            recorded = json.loads(manifest.read_text(encoding="utf-8")).get("totals", {}).get("tokenizer")
            if recorded is not None:
                return str(recorded)
    path = _folder_of(config, checkpoint) / "tokenizer.json"
    return digest(path) if path.is_file() else None


def check(checkpoint: Path, config: Mapping[str, Any], folder: Path) -> None:
    """Refuse to use a checkpoint with this configuration and another tokenizer than it was trained with, as far as that is known.

    Raises:
        UserError: tokenizer.path (folder) is another one.
    """
    trained, theirs = _folder_of(config, checkpoint), fingerprint_of(config, checkpoint)
    known = trained if (trained / "tokenizer.json").is_file() and digest(trained / "tokenizer.json") == theirs else None
    fix = f"set tokenizer.path={known}" if known else "set tokenizer.path to the folder of the tokenizer of that run"
    check_same(folder, theirs, f"{checkpoint}", fix, known)


def _folder_of(config: Mapping[str, Any], checkpoint: Path | None) -> Path:
    """Return the folder of the tokenizer; an imported model has its own in the run directory."""
    if checkpoint is not None and config.get("stage", {}).get("name") == "convert":
        return checkpoint.resolve().parent.parent / IMPORTED
    return Path(config.get("tokenizer", {}).get("path", ""))
