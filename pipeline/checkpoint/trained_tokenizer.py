"""The tokenizer that a run was trained with, found by the configuration that its checkpoints have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.common.artifact import MANIFEST
from pipeline.common.atomic_files import digest


def fingerprint_of(config: Mapping[str, Any]) -> str | None:
    """Return the checksum of tokenizer.json, as manifests of token shards record it; None if nothing that tells is there any more.

    Args:
        config: the resolved configuration as nested dictionaries.
    """
    data = config.get("data", {})
    reads_text = config.get("stage", {}).get("name") != "pretrain" or data.get("pairs", {}).get("train")
    for folder in () if reads_text else (data.get("tokens"), *(corpus.get("tokens") for corpus in data.get("blend", {}).values())):
        manifest = None if folder is None else Path(folder) / MANIFEST
        if manifest is not None and manifest.is_file():
            recorded = json.loads(manifest.read_text(encoding="utf-8")).get("totals", {}).get("tokenizer")
            if recorded is not None:
                return str(recorded)
    path = Path(config.get("tokenizer", {}).get("path", "")) / "tokenizer.json"
    return digest(path) if path.is_file() else None
