"""Documents that a run leaves out: data.remove names them, and RUN/removed.jsonl keeps them for all later starts and for forks.

The tokens of such a document are read as end-of-document tokens, none of which predicts another. Every other token keeps its place
in its sample, and every sample its step. A line of the file is one of stage=ledger stage.out: `content` is the checksum of the token shard,
`start` and `tokens` are the place of the document in it. The file only grows: metrics.jsonl has for every step how many lines applied.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common import json_lines
from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.data.load.shard_checksums import Shard

FILE = "removed.jsonl"

#: Checksum of a token shard, and the document in it.
Identity = tuple[str, int]


@dataclass(frozen=True)
class Removal:
    """The ranges of a stream that are not read.

    Attributes:
        starts: (n,) int64, ascending, first token of each range in the stream.
        ends: (n,) int64, one more than its last token.
        filler: the bytes of the token that is read in place of each.
    """

    starts: np.ndarray
    ends: np.ndarray
    filler: bytes

    @classmethod
    def of(cls, lines: Iterable[dict[str, Any]], shards: Sequence[Shard], filler: bytes) -> Removal:
        """Find documents in all shards of a stream with their content, if any; `filler` is the bytes of the end-of-document token."""
        firsts: dict[str, list[int]] = {}
        position = 0
        for shard in shards:
            firsts.setdefault(shard.entry["xxh3"], []).append(position)
            position += shard.entry["tokens"]
        spans = sorted({(first + line["start"], line["tokens"]) for line in lines for first in firsts.get(line["content"], ())})
        starts, lengths = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        return cls(starts, starts + lengths, filler)

    @property
    def tokens(self) -> int:
        """Tokens of an epoch that are not read."""
        return int((self.ends - self.starts).sum())

    def apply(self, ranges: list[bytes], positions: np.ndarray, lengths: np.ndarray) -> None:
        """Replace the tokens of ranges.

        Args:
            ranges: the bytes of each range, changed in place.
            positions: (n,) int64, the first token of each range in the stream.
            lengths: (n,) int64, its tokens.
        """
        first = np.searchsorted(self.ends, positions, side="right")
        stop = np.searchsorted(self.starts, positions + lengths)
        size = len(self.filler)
        for row in np.flatnonzero(stop > first).tolist():
            content, position, length = bytearray(ranges[row]), int(positions[row]), int(lengths[row])
            for start, end in zip(self.starts[first[row] : stop[row]].tolist(), self.ends[first[row] : stop[row]].tolist(), strict=True):
                begin, end = max(start - position, 0), min(end - position, length)
                content[begin * size : end * size] = self.filler * (end - begin)
            ranges[row] = bytes(content)


def read(path: Path) -> list[dict[str, Any]]:
    """Read the documents of a file.

    Raises:
        UserError: it cannot be read, or a line is not one of stage=ledger.
    """
    lines = []
    try:
        content = path.read_bytes()
    except OSError as error:
        fix = "name a file that stage=ledger wrote to stage.out"
        raise UserError.of("data.remove", path, f"cannot be read ({error.strerror})", fix) from error
    for number, text in enumerate(content.splitlines(), start=1):
        try:
            line = json_lines.parse(text)
            if not (isinstance(line["content"], str) and all(isinstance(line[name], int) for name in ("document", "start", "tokens"))):
                raise TypeError
        except (json_lines.BadLine, KeyError, TypeError) as error:
            rule = f"line {number} is no document: it needs content, document, start and tokens"
            fix = "choose the documents with stage=ledger, and name its stage.out"
            raise UserError.of("data.remove", path, rule, fix) from error
        lines.append(line)
    return lines


def identity(line: dict[str, Any]) -> Identity:
    """Return what tells a document from others."""
    return line["content"], line["document"]


def of_run(run_dir: Path) -> list[dict[str, Any]]:
    """Return the documents that a run leaves out, in the order in which they were named."""
    return read(run_dir / FILE) if (run_dir / FILE).is_file() else []


def keep(run_dir: Path, named: str | None, origins: Iterable[Path], shards: Iterable[Shard]) -> int:
    """Add documents to those that a run leaves out.

    Args:
        origins: run directories that it began with, whose documents it leaves out, too.

    Raises:
        UserError: a named document is not in the shards.
    """
    from pipeline.data.tokenize import token_shards  # loads tokenizers, which not every reader of tokens needs

    current = of_run(run_dir)
    older = [] if (run_dir / FILE).is_file() else [line for origin in origins for line in of_run(origin)]
    new = [] if named is None else read(Path(named))
    if named is not None and not new:
        raise UserError.of(
            "data.remove", named, "has no documents", "choose them with stage=ledger, and name its stage.out, or remove the key"
        )
    named_shards = {line["content"] for line in new}
    ends = {shard.entry["xxh3"]: token_shards.ends(shard.path, shard.entry) for shard in shards if shard.entry["xxh3"] in named_shards}
    if unknown := [line for line in new if line not in current and not _is_at(line, ends.get(line["content"], np.empty(0)))]:
        rule = f"{len(unknown)} of {len(new)} documents are in no token shard of this run, such as {unknown[0].get('shard', '')}"
        fix = "choose them with stage=ledger and the run_dir of a run that reads these shards"
        raise UserError.of("data.remove", named, rule, fix)
    kept: dict[Identity, dict[str, Any]] = {}
    for line in (*current, *older, *new):
        kept.setdefault(identity(line), line)
    if len(kept) > len(current):
        with atomic_file(run_dir / FILE, "w") as handle:
            handle.writelines(json.dumps(line) + "\n" for line in kept.values())
    return len(kept)


def _is_at(line: dict[str, Any], ends: np.ndarray) -> bool:
    """Whether a line has the place of its document in a shard with these ends of documents."""
    start, number = line["start"], line["document"]
    return 0 <= number < len(ends) and start + line["tokens"] == ends[number] and start == (ends[number - 1] if number else 0)
