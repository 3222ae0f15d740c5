"""The input files of stage=shard, and all settings that determine its shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.common import artifact, knobs
from pipeline.common.atomic_files import digest
from pipeline.config.cleaning import CleanConfig
from pipeline.config.data import DataConfig, DedupConfig
from pipeline.data.read import input_files
from pipeline.data.read.documents import DEFAULT_CORPUS, ReadOptions
from pipeline.data.read.input_files import Listing


def list_input(data: DataConfig, clean: CleanConfig, dedup: DedupConfig) -> tuple[Listing, dict[str, Any]]:
    """Return what was found in the input, and all settings that determine the shards, except the content of the files."""
    listing = input_files.find({DEFAULT_CORPUS: data.input, **data.corpora}, data.suffixes, data.exclude)
    against = [artifact.fingerprint(artifact.read(Path(folder), key="dedup.against", stage="shard")) for folder in dedup.against]
    fields = ("seed", "shard_megabytes", "validation_fraction", "documents_per_member", "save_dropped")
    return (
        listing,
        {
            **{f"data.{name}": value for name, value in vars(ReadOptions.of(data)).items()},
            **{f"data.{name}": getattr(data, name) for name in fields},
            "clean.steps": list(clean.steps),
            **{key: value for step in clean.steps for key, _, value in knobs.walk(getattr(clean, step), f"clean.{step}.")},
            **{key: value for key, _, value in knobs.walk(dedup, "dedup.")},
            "dedup.against": against,
            **({"clean.contamination.files": _digests(clean.contamination.files)} if "contamination" in clean.steps else {}),
        },
    )


def _digests(names: list[str]) -> list[str]:
    """Name and checksum of files; without a checksum for one that is missing, which the cleaner refuses."""
    paths = [Path(name).expanduser() for name in names]
    return [f"{path.name} {digest(path) if path.is_file() else ''}" for path in paths]
