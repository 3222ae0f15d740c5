"""Text pairs from .tsv (source, tab, target) or .jsonl files, one pair per line. Opening indexes the lines; a line is read on demand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from pipeline.common.errors import UserError

_CHUNK_BYTES = 1 << 24


class PairFiles:
    """Random access to the text pairs of several files.

    Attributes:
        pairs: number of pairs.
        fingerprint: checksum of the content of all files.
    """

    def __init__(self, paths: Sequence[str], fields: tuple[str, str], key: str, share: tuple[int, int] = (0, 1)) -> None:
        """Index the lines and validate this rank's share of them.

        Args:
            paths: the files, in order.
            fields: names of the source and target fields of a JSON record.
            key: configuration key that lists the files, for messages.
            share: (rank, ranks) of the job.

        Raises:
            UserError: a file is missing, empty or of an unsupported format, or a line is not a pair; the message names it.
        """
        self._paths, self._fields, self._key = [Path(path) for path in paths], fields, key
        state = xxhash.xxh3_128()
        self._bounds = [self._line_offsets(path, state) for path in self._paths]
        self._firsts = np.cumsum([0, *(len(bounds) - 1 for bounds in self._bounds)])
        self._handles = [os.open(path, os.O_RDONLY) for path in self._paths]
        self.pairs, self.fingerprint = int(self._firsts[-1]), state.hexdigest()
        rank, ranks = share
        for number in range(self.pairs * rank // ranks, self.pairs * (rank + 1) // ranks):
            self.pair(number)

    def pair(self, number: int) -> tuple[str, str]:
        """Read a pair.

        Args:
            number: of the pair, from 0.

        Returns:
            Source and target.

        Raises:
            UserError: the line is not a pair.
        """
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        line = number - int(self._firsts[file])
        first, stop = self._bounds[file][line : line + 2].tolist()
        text = os.pread(self._handles[file], stop - first, first)
        try:
            source, target = self._parse(self._paths[file], text.decode().rstrip("\r\n"))
        except (ValueError, KeyError, TypeError) as error:
            rule = f"line {line + 1} is not a pair of texts ({error!r})"
            fix = "fix the line; data.pairs.source and data.pairs.target are the field names of a JSON record"
            raise UserError.of(self._key, self._paths[file], rule, fix) from error
        return source, target

    def _parse(self, path: Path, line: str) -> Iterator[str]:
        """The two texts of a line."""
        if path.suffix == ".tsv":
            texts = line.split("\t")[:2]
        else:
            record = json.loads(line)
            texts = [record[name] for name in self._fields]
        if len(texts) != 2 or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError("two non-empty texts are required")
        return iter(texts)

    def _line_offsets(self, path: Path, state: xxhash.xxh3_128) -> np.ndarray:
        """The byte offset of each line of a file, and the end of the last line: int64 (lines + 1,). Adds the content to `state`."""
        if path.suffix not in (".tsv", ".jsonl") or not path.is_file():
            rule = "is not a file" if path.suffix in (".tsv", ".jsonl") else "is neither .tsv nor .jsonl"
            raise UserError.of(self._key, path, rule, "list .tsv or .jsonl files with one pair per line")
        ends, size = [np.zeros(1, dtype=np.int64)], 0
        with path.open("rb") as handle:
            while chunk := handle.read(_CHUNK_BYTES):
                state.update(chunk)
                ends.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + size + 1)
                size += len(chunk)
        bounds = np.concatenate(ends)
        bounds = bounds if bounds[-1] == size else np.append(bounds, size)
        if len(bounds) < 2:
            raise UserError.of(self._key, path, "is empty", "remove it from the list")
        return bounds
