"""Which token shards are made of Megatron indexed datasets (stage=convert_tokens stage.to=shards)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.common.atomic_files import digest
from pipeline.common.errors import UserError, collect_errors
from pipeline.config.data import TokenizerConfig
from pipeline.data.tokenize.megatron import IndexedDataset
from pipeline.data.tokenize.token_shards import SPLITS
from pipeline.data.tokenize.tokenizer import TextEncoder

ShardDocuments = tuple[IndexedDataset, int, int, dict[str, Any]]
"""The documents of a shard: dataset, index of the first document, index after the last one, and {"split", "corpus"} of the shard."""


def plan_shards(
    datasets: Sequence[str], tokenizer: TokenizerConfig, shard_megabytes: float
) -> tuple[dict[str, ShardDocuments], TextEncoder]:
    """Return shard name -> documents of the shard, and the tokenizer.

    Args:
        datasets: paths without .bin and .idx; the prefix train- or validation- selects the split, the remainder is the corpus.
        tokenizer: the tokenizer that the datasets were made with.
        shard_megabytes: size of a shard, 10**6 bytes.

    Raises:
        UserError: a dataset or the tokenizer is invalid.
    """
    if not datasets:
        raise UserError.of(
            "stage.input", "[]", "contains no dataset", "set it to datasets without .bin and .idx: 'stage.input=[data/train-text]'"
        )
    *indexed, encoder = collect_errors(
        *(lambda name=name: IndexedDataset(Path(name)) for name in datasets),
        lambda: TextEncoder(Path(tokenizer.path), tokenizer.end_of_document, "none" if tokenizer.bos == "auto" else tokenizer.bos),
    )
    plan: dict[str, ShardDocuments] = {}
    for dataset in indexed:
        split, _, corpus = dataset.prefix.name.partition("-")
        if split not in SPLITS or not corpus:
            split, corpus = "train", dataset.prefix.name
        stem = split if corpus == "default" else f"{split}-{corpus}"
        if f"{stem}-00000.tar" in plan:
            rule = f"maps to the {split} split of the corpus {corpus}, as another dataset does"
            raise UserError.of("stage.input", dataset.prefix, rule, "rename one of the datasets, or merge them")
        ranges = dataset.partition(max(1, round(shard_megabytes * 1e6 / encoder.dtype.itemsize)))
        for number, (first, stop) in enumerate(ranges):
            plan[f"{stem}-{number:05d}.tar"] = dataset, first, stop, {"split": split, "corpus": corpus}
    if not any(metadata["split"] == "train" for *_, metadata in plan.values()):
        raise UserError.of("stage.input", datasets, "contains no training documents", "add a dataset of the train split")
    return plan, encoder


def fingerprint(prefix: Path) -> list[str]:
    """Return the checksums of both files of an indexed dataset."""
    return [digest(prefix.with_name(f"{prefix.name}{suffix}")) for suffix in (".bin", ".idx")]
