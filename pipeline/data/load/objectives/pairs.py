"""Sequence to sequence: the encoder reads a source, the decoder predicts its target (Sutskever et al. 2014; Vaswani et al. 2017).

Pairs are lines of .tsv (source, tab, target) or .jsonl files. Opening indexes the lines; a line is read on demand.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import xxhash

from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.data.load.corpus import Corpus
from pipeline.data.load.objectives import objective
from pipeline.data.load.objectives.objective import IGNORE, Objective, special_tokens
from pipeline.data.load.permutation import permute
from pipeline.data.load.samples import Dataset
from pipeline.data.tokenize.tokenizer import TextEncoder

log = logging.getLogger("pipeline")

_CHUNK_BYTES = 1 << 24


class PairFiles:
    """Random access to the text pairs of several files, of whose content `fingerprint` is a checksum."""

    def __init__(self, paths: Sequence[str], fields: tuple[str, str], key: str, share: tuple[int, int] = (0, 1)) -> None:
        """Index the lines and validate this rank's share of them.

        Args:
            fields: names of the source and target fields of a JSON record.
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

        Raises:
            UserError: the line is not a pair.
        """
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        line = number - int(self._firsts[file])
        first, stop = self._bounds[file][line : line + 2].tolist()
        raw = os.pread(self._handles[file], stop - first, first)
        try:
            content = raw.decode().rstrip("\r\n")
            if self._paths[file].suffix == ".tsv":
                texts = content.split("\t")[:2]
            else:
                record = json.loads(content)
                texts = [record[name] for name in self._fields]
            if len(texts) != 2 or not all(isinstance(text, str) and text.strip() for text in texts):
                raise ValueError("two non-empty texts are required")
        except (ValueError, KeyError, TypeError) as error:
            rule = f"line {line + 1} is not a pair of texts ({error!r})"
            fix = "fix the line; data.pairs.source and data.pairs.target are the field names of a JSON record"
            raise UserError.of(self._key, self._paths[file], rule, fix) from error
        return texts[0], texts[1]

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


class TokenizedPairs(Dataset):
    """Pairs in the order of a run, tokenized when they are read.

    Training visits the pairs of an epoch in the order of a permutation that depends on (seed, epoch); validation reads them in file order.
    """

    def __init__(self, files: PairFiles, encoder: TextEncoder, seed: int | None) -> None:
        """Read pairs in file order if the seed is None."""
        self._files, self._encoder, self._seed = files, encoder, seed
        self.corpora = [Corpus("", [], encoder.totals, files.fingerprint)]
        self.counts = np.array([files.pairs], dtype=np.int64)
        self.schedule = None
        self.vocab_size, self.end_of_document = encoder.vocab_size, encoder.end_of_document

    def pairs(self, indices: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids of source and target by sample number; numbers beyond an epoch continue with the next epoch."""
        epochs, places = np.divmod(np.asarray(indices, dtype=np.int64), self._files.pairs)
        if self._seed is not None:
            places = permute(places, self._files.pairs, self._seed, epochs)
        texts = [text for place in places.tolist() for text in self._files.pair(place)]
        ids, lengths = self._encoder.encode(texts)
        parts = np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1])
        return list(zip(parts[::2], parts[1::2], strict=True))


class Pairs(Objective):
    """Sources and targets, each followed by the end token and padded to training.sequence_length. Longer texts are truncated."""

    settings: ClassVar[tuple[str, ...]] = ("data.pairs.source", "data.pairs.target", "data.decoder_start", "tokenizer.path")
    data_key: ClassVar[str] = "data.pairs.train"

    samples: TokenizedPairs

    def __init__(self, samples: TokenizedPairs, length: int, start: int) -> None:
        """Use tokenized pairs.

        Args:
            length: tokens of a source and of a target, with the end token.
            start: the token that the decoder reads first.
        """
        self.samples = samples
        self._length = self.decoder_length = length
        self._start = start
        self._truncated = False  # whether a pair was

    @classmethod
    def of(cls, config: RunConfig, samples: TokenizedPairs) -> Self:
        """The objective over these pairs; errors as in open_training."""
        start = objective.decoder_start(config.data.decoder_start, special_tokens(config, samples))
        return cls(samples, config.training.sequence_length, start)

    @classmethod
    def open_training(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self:
        """See Objective: data.pairs.train, shuffled."""
        return cls.of(config, _open(config, config.data.pairs.train, "data.pairs.train", share, config.training.seed))

    @classmethod
    def open_validation(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self | None:
        """See Objective: data.pairs.validation in file order; None if it names no file."""
        paths = config.data.pairs.validation
        return cls.of(config, _open(config, paths, "data.pairs.validation", share, None)) if paths else None

    def fingerprint(self, config: RunConfig, consumed: int) -> str:  # noqa: ARG002
        """See Objective: the files, the tokenizer, and the token that the decoder reads first."""
        corpus, pairs = self.samples.corpora[0], config.data.pairs
        tokens = (corpus.totals["tokenizer"], corpus.totals["end_of_document"], self._start)
        content = (corpus.fingerprint, *tokens, pairs.source, pairs.target)
        return xxhash.xxh3_64_hexdigest(repr(content).encode())

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: tokens with their documents, decoder_tokens and targets."""
        shape, end = (len(indices), self._length), self.samples.end_of_document
        tokens, read = np.full(shape, self._start, dtype=np.int64), np.full(shape, self._start, dtype=np.int64)
        documents, targets = np.full(shape, -1, dtype=np.int32), np.full(shape, IGNORE, dtype=np.int64)
        for row, (source, target) in enumerate(self.samples.pairs(indices)):
            longest = max(len(source), len(target))
            if longest >= self._length and not self._truncated:
                log.warning("a pair has %d tokens and an end; pairs are truncated to training.sequence_length=%d", longest, self._length)
            self._truncated |= longest >= self._length
            source, target = (np.append(text, end)[: self._length] for text in (source, target))
            tokens[row, : len(source)], documents[row, : len(source)] = source, 0
            targets[row, : len(target)], read[row, 1 : len(target)] = target, target[:-1]
        return {"tokens": tokens, "documents": documents, "decoder_tokens": read, "targets": targets}


def _open(config: RunConfig, paths: list[str], key: str, share: tuple[int, int], seed: int | None) -> TokenizedPairs:
    """The pairs of some files, with the run's tokenizer."""
    encoder = TextEncoder(Path(config.tokenizer.path), config.tokenizer.end_of_document)
    return TokenizedPairs(PairFiles(paths, (config.data.pairs.source, config.data.pairs.target), key, share), encoder, seed)
