"""Which token shards form a corpus? The shards of one split in the manifest of a token folder, in the order of their names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from pipeline.common import artifact
from pipeline.common.artifact import Manifest
from pipeline.common.errors import UserError
from pipeline.data.load.shard_checksums import Shard


@dataclass(frozen=True)
class Corpus:
    """The token shards of one split of a corpus.

    Attributes:
        name: of the corpus in the run; empty for all corpora of a folder, whose order depends only on the seed.
        shards: in order.
        totals: of the manifest that lists the shards.
        fingerprint: of the content of the shards.
    """

    name: str
    shards: list[Shard]
    totals: dict[str, Any]
    fingerprint: str

    @classmethod
    def of(cls, folder: Path, manifest: Manifest, split: str, *, name: str = "", corpus: str | None = None) -> Corpus:
        """Select the shards of a split in a folder that stage=tokenize wrote.

        Args:
            folder: of the token shards.
            manifest: of the folder.
            split: train or validation.
            name: of the corpus in the run.
            corpus: name of the corpus in the manifest; None selects all corpora.

        Raises:
            UserError: the manifest does not mark which files are shards.
        """
        if not any("split" in entry for entry in manifest.files.values()):
            rule, fix = "was written by an earlier version: its manifest names no splits", "remove it and run stage=tokenize again"
            raise UserError.of("data.tokens", folder, rule, fix)
        files = {
            file: entry
            for file, entry in sorted(manifest.files.items())
            if entry.get("split") == split and (corpus is None or entry["corpus"] == corpus)
        }
        content = manifest if corpus is None else replace(manifest, files=files)
        return cls(name, [Shard(folder / file, entry) for file, entry in files.items()], manifest.totals, artifact.fingerprint(content))

    def total(self, count: str) -> int:
        """The sum of a count ("tokens", "text_bytes", "documents") over the shards."""
        return sum(shard.entry[count] for shard in self.shards)

    def permutation_seed(self, seed: int) -> int:
        """The seed of the permutations of this corpus, from the seed of the run."""
        return xxhash.xxh3_64_intdigest(f"{seed} {self.name}".encode()) if self.name else seed
