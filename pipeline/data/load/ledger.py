"""Which documents do samples consist of, and in which samples is a document? Computed from the order of samples; nothing is stored.

The tokens of a document are counted where they are inputs. Its first token may also be the last label of the sequence before.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common import artifact
from pipeline.common.errors import UserError
from pipeline.data.load.corpus import expanded
from pipeline.data.load.samples import Samples
from pipeline.data.load.shard_checksums import Shard
from pipeline.data.shard import text_shards
from pipeline.data.tokenize import token_shards


class DocumentLedger:
    """The documents of the samples of a run.

    Args:
        texts: folders of text shards, which have the metadata of the documents.

    Attributes:
        shards: the token shards in the order of the stream; arrays of this class give their places in it.
    """

    def __init__(self, samples: Samples, texts: Sequence[Path]) -> None:
        opened = [(folder, artifact.read(folder, key="stage.shards", stage="shard")) for folder in texts]
        self._samples, self._texts = samples, {artifact.fingerprint(manifest): (folder, manifest) for folder, manifest in opened}
        self.shards: Sequence[Shard] = samples.stream.shards
        self._starts = np.cumsum([0, *(shard.entry["tokens"] for shard in self.shards)], dtype=np.int64)
        self._corpora = np.repeat(np.arange(len(samples.corpora)), [len(corpus.shards) for corpus in samples.corpora])
        self._ends_of = lru_cache(maxsize=64)(lambda number: token_shards.ends(self.shards[number].path, self.shards[number].entry))

    def documents(self, numbers: np.ndarray) -> np.ndarray:
        """The documents of samples: int64 (4, parts), in the order of the tokens, of (n,) int64 sample numbers.

        The rows are the row in `numbers`, the shard, the document in it, and its tokens in the sample.
        """
        rows, starts, lengths = self._samples.ranges(numbers)
        ends = starts + lengths
        first = np.searchsorted(self._starts, starts, side="right") - 1
        parts, places = expanded(np.searchsorted(self._starts, ends) - first)  # a range may go on in the next shard
        shards = first[parts] + places
        per_shard = []
        for shard in np.unique(shards).tolist():
            in_shard = np.flatnonzero(shards == shard)
            begin = np.maximum(starts[parts[in_shard]], self._starts[shard]) - self._starts[shard]
            end = np.minimum(ends[parts[in_shard]], self._starts[shard + 1]) - self._starts[shard]
            bounds = self._ends_of(shard)
            document = np.searchsorted(bounds, begin, side="right")
            which, steps = expanded(np.searchsorted(bounds, end) + 1 - document)
            documents = document[which] + steps
            before = np.concatenate([[0], bounds])[documents]
            tokens = np.minimum(bounds[documents], end[which]) - np.maximum(before, begin[which])
            per_shard.append(np.stack([rows[parts[in_shard[which]]], np.full(len(which), shard), documents, tokens, in_shard[which]]))
        joined = np.concatenate(per_shard, axis=1)
        return joined[:4, np.argsort(joined[4], kind="stable")]

    def samples_of(self, shard: int, documents: np.ndarray, limit: int) -> np.ndarray:
        """The samples below `limit` that have tokens of documents of a shard, (n,) int64: the inverse of `documents`.

        int64 (3, parts): the row in `documents`, the sample, and the tokens of the document in it.
        """
        bounds, corpus = self._ends_of(shard), int(self._corpora[shard])
        ends = bounds[documents] + self._starts[shard]
        starts = np.concatenate([[0], bounds])[documents] + self._starts[shard]
        rows, sequences, tokens = self._samples.holding(corpus, starts, ends)
        chosen, numbers = self._samples.reading(corpus, sequences, limit)
        return np.stack([rows[chosen], numbers, tokens[chosen]])

    def place(self, shard: int, document: int) -> dict[str, Any]:
        """Return where a document is: corpus, shard and its checksum, number, first token in the shard, and tokens."""
        of_shard, ends = self.shards[shard], self._ends_of(shard)
        start = int(ends[document - 1]) if document else 0
        return {
            "corpus": of_shard.entry["corpus"],
            "shard": str(of_shard.path),
            "content": of_shard.entry["xxh3"],
            "document": document,
            "start": start,
            "tokens": int(ends[document]) - start,
        }

    def readable(self, shard: int, document: int) -> int:
        """Return the tokens of a document that the run would read now, which are none of one that it leaves out."""
        place = self.place(shard, document)
        stream, position = self._samples.stream, np.array([self._starts[shard] + place["start"]])
        tokens = np.frombuffer(stream.read_ranges(position, np.array([place["tokens"]]))[0], stream.dtype)
        return int((tokens != self._samples.end_of_document).sum())

    def tokens(self, shard: int) -> np.ndarray:
        """Return the tokens of every document of a shard, (documents,) int64."""
        return np.diff(self._ends_of(shard), prepend=0)

    def metadata(self, shard: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield text and fields of every document of a shard: id, corpus, lang, source, and those of its metadata, which come first.

        The corpus is that of the shard. Where the metadata has another id, `shard_id` is that of the shard.

        Raises:
            UserError: its text shard is not there, or is damaged.
        """
        path = self.shards[shard].path
        manifest = artifact.read(path.parent, key="data.tokens", stage="tokenize")
        if (origin := self._texts.get(str(manifest.settings.get("data.shards")))) is None:
            folders = ", ".join(str(folder) for folder, _ in self._texts.values()) or "none"
            rule = f"has no folder from which {path.parent} was tokenized; given: {folders}"
            raise UserError.of("stage.shards", folders, rule, "add the folder of these text shards, which name the documents")
        for text, fields in text_shards.tokenized(text_shards.readable(*origin, path.name), manifest.settings, origin[1]):
            meta = fields.pop("meta", None) or {}
            yield text, {**fields, **meta, "corpus": fields.get("corpus"), **({"shard_id": fields.get("id")} if "id" in meta else {})}


class DocumentQuery:
    """Which documents a question is about: those that match all of its parts.

    Args:
        where: field -> glob pattern of its value, such as {"url": "*.example.org/*"}. None has no match.
        ids: ids or URLs of documents; all when None.
        contains: text that is part of the document; any when empty.

    Attributes:
        missing_fields: fields of `where` that no document had so far.
        missing_ids: ids that no document had so far.
    """

    def __init__(self, where: Mapping[str, str], ids: frozenset[str] | None = None, contains: str = "") -> None:
        self._patterns = {field: re.compile(fnmatch.translate(pattern)).match for field, pattern in where.items()}
        self._ids, self._contains = ids, contains.encode()
        self.missing_fields, self.missing_ids = set(where), set(ids or ())

    def matches(self, text: bytes, fields: Mapping[str, Any]) -> bool:
        """Whether a document is one of them."""
        self.missing_fields -= fields.keys()
        if self._ids is not None:
            ids = {str(fields[name]) for name in ("id", "shard_id", "url") if name in fields} & self._ids
            self.missing_ids -= ids
            if not ids:
                return False
        if self._contains not in text:
            return False
        return all((value := fields.get(field)) is not None and match(str(value)) for field, match in self._patterns.items())
