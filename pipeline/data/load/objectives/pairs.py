"""Pairs of texts: the encoder reads one, the decoder writes the other (Sutskever et al. 2014; translation in Vaswani et al. 2017)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.data.load.corpus import Corpus
from pipeline.data.load.loader import Source
from pipeline.data.load.objectives.objective import IGNORE, Objective
from pipeline.data.load.objectives.special import SpecialTokens, decoder_start
from pipeline.data.load.pair_files import PairFiles
from pipeline.data.load.permutation import permute
from pipeline.data.tokenize.tokenizer import TextEncoder

log = logging.getLogger("pipeline")


class TokenizedPairs(Source):
    """Pairs in the order of a run, tokenized when their turn comes.

    Training visits the pairs of an epoch in the order of a permutation that (seed, epoch) names; validation goes straight through.
    """

    def __init__(self, files: PairFiles, encoder: TextEncoder, seed: int | None) -> None:
        """Put the parts together; a seed of None goes straight through."""
        self._files, self._encoder, self._seed = files, encoder, seed
        totals = {"tokenizer": encoder.fingerprint, "end_of_document": encoder.end_of_document, "vocab_size": encoder.vocab_size}
        self.corpora = [Corpus("", [], totals, files.fingerprint)]
        self.counts = np.array([files.pairs], dtype=np.int64)
        self.schedule = None
        self.vocab_size, self.end_of_document = encoder.vocab_size, encoder.end_of_document

    def pairs(self, indices: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids of source and target by their number; numbers beyond an epoch go on with the next."""
        epochs, places = np.divmod(np.asarray(indices, dtype=np.int64), self._files.pairs)
        if self._seed is not None:
            places = permute(places, self._files.pairs, self._seed, epochs)
        texts = [text for place in places.tolist() for text in self._files.pair(place)]
        ids, lengths = self._encoder.encode(texts)
        parts = np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1])
        return list(zip(parts[::2], parts[1::2], strict=True))


class Pairs(Objective):
    """Sources and targets, each closed by the end token and padded to training.sequence_length. What is longer is cut."""

    samples: TokenizedPairs

    def __init__(self, samples: TokenizedPairs, length: int, start: int) -> None:
        """Take pairs.

        Args:
            samples: the pairs.
            length: tokens of a source and of a target, with what closes them.
            start: what the decoder reads first.
        """
        self.samples = samples
        self._length = self.decoder_length = length
        self._start = start
        self._cut = 0

    @staticmethod
    def text_length(config: RunConfig) -> int:
        """See Objective."""
        return config.training.sequence_length

    @classmethod
    def of(cls, config: RunConfig, samples: Source) -> Self:
        """See Objective."""
        assert isinstance(samples, TokenizedPairs)
        return cls(samples, config.training.sequence_length, decoder_start(config, SpecialTokens(config, samples)))

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: tokens with their documents, decoder_tokens and targets."""
        shape, end = (len(indices), self._length), self.samples.end_of_document
        tokens, read = np.full(shape, self._start, dtype=np.int64), np.full(shape, self._start, dtype=np.int64)
        documents, targets = np.full(shape, -1, dtype=np.int32), np.full(shape, IGNORE, dtype=np.int64)
        for row, (source, target) in enumerate(self.samples.pairs(indices)):
            self._note(max(len(source), len(target)))
            source, target = (np.append(text, end)[: self._length] for text in (source, target))
            tokens[row, : len(source)], documents[row, : len(source)] = source, 0
            targets[row, : len(target)], read[row, 1 : len(target)] = target, target[:-1]
        return {"tokens": tokens, "documents": documents, "decoder_tokens": read, "targets": targets}

    def _note(self, longest: int) -> None:
        """Tell of the first pair that is cut, so that nobody trains on halves without knowing."""
        self._cut += longest >= self._length
        if self._cut == 1 and longest >= self._length:
            log.warning("a pair has %d tokens and an end; pairs are cut at training.sequence_length=%d", longest, self._length)


def open_training(config: RunConfig, share: tuple[int, int]) -> Pairs:
    """The pairs of data.pairs.train, in the order of the run.

    Raises:
        UserError: there is no tokenizer, it lacks a token, or the files are no pairs.
    """
    return Pairs.of(config, _opened(config, config.data.pairs.train, "data.pairs.train", share, config.training.seed))


def open_validation(config: RunConfig, share: tuple[int, int]) -> Pairs | None:
    """Those of data.pairs.validation, as they come; None where it names no file."""
    paths = config.data.pairs.validation
    return Pairs.of(config, _opened(config, paths, "data.pairs.validation", share, None)) if paths else None


def _opened(config: RunConfig, paths: list[str], key: str, share: tuple[int, int], seed: int | None) -> TokenizedPairs:
    """Some files with the run's tokenizer."""
    encoder = TextEncoder(Path(config.tokenizer.path), config.tokenizer.end_of_document)
    return TokenizedPairs(PairFiles(paths, (config.data.pairs.source, config.data.pairs.target), key, share), encoder, seed)
