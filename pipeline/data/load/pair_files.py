"""Files of pairs, a line each: .tsv (source, tab, target) or .jsonl. Lines are found once, at the start, and read when their turn comes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from pipeline.errors import UserError

_CHUNK_BYTES = 1 << 24


class PairFiles:
    """The lines of some files, as pairs of texts.

    Attributes:
        pairs: their number.
        fingerprint: of all that the files hold.
    """

    def __init__(self, paths: Sequence[str], fields: tuple[str, str], key: str, share: tuple[int, int] = (0, 1)) -> None:
        """Find the lines, and look at this rank's share of them.

        Args:
            paths: the files, in order.
            fields: of a JSON record: the source's and the target's.
            key: configuration key that names the files.
            share: (rank, ranks) of the job.

        Raises:
            UserError: a file is missing, empty or of another kind, or a line is no pair; it is named.
        """
        self._paths, self._fields, self._key = [Path(path) for path in paths], fields, key
        state = xxhash.xxh3_128()
        self._bounds = [self._lines(path, state) for path in self._paths]
        self._firsts = np.cumsum([0, *(len(bounds) - 1 for bounds in self._bounds)])
        self._handles = [os.open(path, os.O_RDONLY) for path in self._paths]
        self.pairs, self.fingerprint = int(self._firsts[-1]), state.hexdigest()
        rank, ranks = share
        for number in range(self.pairs * rank // ranks, self.pairs * (rank + 1) // ranks):
            self.pair(number)

    def pair(self, number: int) -> tuple[str, str]:
        """Source and target.

        Raises:
            UserError: the line is no pair.
        """
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        line = number - int(self._firsts[file])
        first, stop = self._bounds[file][line : line + 2].tolist()
        text = os.pread(self._handles[file], stop - first, first)
        try:
            source, target = self._parsed(self._paths[file], text.decode().rstrip("\r\n"))
        except (ValueError, KeyError, TypeError) as error:
            rule = f"line {line + 1} is no pair of two texts ({error!r})"
            fix = "mend the line; data.pairs.source and data.pairs.target name the fields of a JSON record"
            raise UserError.of(self._key, self._paths[file], rule, fix) from error
        return source, target

    def _parsed(self, path: Path, line: str) -> Iterator[str]:
        """The two texts of a line."""
        if path.suffix == ".tsv":
            found = line.split("\t")[:2]
        else:
            record = json.loads(line)
            found = [record[name] for name in self._fields]
        if len(found) != 2 or not all(isinstance(text, str) and text.strip() for text in found):
            raise ValueError("two texts that are not empty are needed")
        return iter(found)

    def _lines(self, path: Path, state: xxhash.xxh3_128) -> np.ndarray:
        """Where the lines of a file begin, and where the last one ends: int64 (lines + 1,). Their bytes go into the checksum."""
        if path.suffix not in (".tsv", ".jsonl") or not path.is_file():
            rule = "is no file" if path.suffix in (".tsv", ".jsonl") else "is neither .tsv nor .jsonl"
            raise UserError.of(self._key, path, rule, "name files of pairs, a line each")
        ends, size = [np.zeros(1, dtype=np.int64)], 0
        with path.open("rb") as handle:
            while chunk := handle.read(_CHUNK_BYTES):
                state.update(chunk)
                ends.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + size + 1)
                size += len(chunk)
        bounds = np.concatenate(ends)
        bounds = bounds if bounds[-1] == size else np.append(bounds, size)
        if len(bounds) < 2:
            raise UserError.of(self._key, path, "is empty", "leave it out")
        return bounds
