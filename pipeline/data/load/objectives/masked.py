"""Masked tokens from all others (BERT, Devlin et al. 2019, section 3.1; RoBERTa, Liu et al. 2019, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from pipeline.config.data import MaskingConfig
from pipeline.config.schema import RunConfig
from pipeline.data.load.boundaries import document_ids
from pipeline.data.load.loader import Samples
from pipeline.data.load.objectives import sentences
from pipeline.data.load.objectives.objective import IGNORE, Objective
from pipeline.data.load.objectives.special import SpecialTokens
from pipeline.data.load.permutation import random_words
from pipeline.errors import UserError


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that masking tells apart.

    Attributes:
        first: stands before a sequence ([CLS]).
        between: closes each segment ([SEP]).
        mask: stands for a token that is to be guessed.
        ordinary: (tokens,) ids that stand for text, ascending.
    """

    first: int
    between: int
    mask: int
    ordinary: np.ndarray


class Masked(Objective):
    """Sequences [CLS] text [SEP] of text that goes on over the ends of documents, or [CLS] a [SEP] b [SEP] of two segments.

    A share of the places with text is chosen, as many in every sequence without padding; of these most become [MASK], some a random
    token, and some stay. A sample's choices change from epoch to epoch. Special tokens are neither chosen nor drawn.
    """

    samples: Samples

    def __init__(self, samples: Samples, vocabulary: Vocabulary, config: RunConfig) -> None:
        """Take samples of whole texts."""
        self.samples = samples
        self._vocabulary, self._rates, self._seed = vocabulary, config.data.masking, config.training.seed
        self._length, self._packed = config.training.sequence_length, config.data.packing == "best_fit"
        self._document_mask, self._next_sentence = config.training.document_mask, config.model.next_sentence
        self._is_ordinary = np.zeros(samples.vocab_size, dtype=bool)
        self._is_ordinary[vocabulary.ordinary] = True

    @staticmethod
    def text_length(config: RunConfig) -> int:
        """See Objective: what the special tokens leave."""
        return config.training.sequence_length - (3 if config.model.next_sentence else 2)

    @classmethod
    def of(cls, config: RunConfig, samples: Samples) -> Self:
        """See Objective."""
        masking, special = config.data.masking, SpecialTokens(config, samples)
        mask, first, between = special.find(
            {
                "data.masking.mask": (masking.mask, ("[MASK]", "<mask>")),
                "data.masking.first": (masking.first, ("[CLS]", "<s>")),
                "data.masking.between": (masking.between, ("[SEP]", "</s>")),
            }
        )
        ordinary = np.setdiff1d(np.arange(samples.vocab_size), list(special.ids.values()))
        padding = config.model.padding_token
        if padding is not None and padding in ordinary:
            rule = f"has text as token {padding}, which the stock {config.model.family} class takes for padding and skips"
            fix = "train one with tokenizer=roberta"
            raise UserError.of("tokenizer.path", config.tokenizer.path, rule, fix)
        if config.model.next_sentence and samples.counts.sum() < 2:
            rule = "leaves one sample, and a second sentence must come from another"
            raise UserError.of("training.sequence_length", config.training.sequence_length, rule, "shorten it, or tokenize more text")
        return cls(samples, Vocabulary(first, between, mask, ordinary), config)

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: tokens and targets; segments and next_sentence with two segments; documents where there is padding or a mask."""
        indices = np.asarray(indices, dtype=np.int64)
        found = self._pairs(indices) if self._next_sentence else self._single(indices)
        found["tokens"], found["targets"] = mask(found["tokens"], indices, self._is_ordinary, self._vocabulary, self._rates, self._seed)
        return found

    def _single(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """[CLS] text [SEP], and end-of-document tokens as padding where whole documents were packed."""
        text = self.samples.samples(indices)[:, :-1]
        rows, width = text.shape
        tokens = np.full((rows, self._length), self.samples.end_of_document, dtype=text.dtype)
        tokens[:, 0], tokens[:, 1:-1] = self._vocabulary.first, text
        ends = sentences.text_ends(text, self.samples.end_of_document) if self._packed else np.full(rows, width)
        tokens[np.arange(rows), ends + 1] = self._vocabulary.between
        if not (self._packed or self._document_mask):
            return {"tokens": tokens}
        documents = np.zeros(tokens.shape, dtype=np.int32)
        if self._document_mask:
            documents[:, 1:-1] = document_ids(text, self.samples.end_of_document)
            documents[:, -1] = documents[:, -2]
        documents[np.arange(self._length) > ends[:, None] + 1] = -1
        return {"tokens": tokens, "documents": documents}

    def _pairs(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """[CLS] a [SEP] b [SEP], padded where documents are short."""
        vocabulary, end = self._vocabulary, self.samples.end_of_document
        others = sentences.elsewhere(indices, int(self.samples.counts.sum()), self._seed)
        texts = self.samples.samples(np.concatenate([indices, others]))[:, :-1]
        pairs = sentences.pairs(texts[: len(indices)], texts[len(indices) :], indices, end, self._seed)
        shape = (len(indices), self._length)
        tokens = np.full(shape, end, dtype=texts.dtype)
        segments, documents = np.zeros(shape, dtype=np.int8), np.full(shape, -1, dtype=np.int32)
        for row, (one, two, _) in enumerate(pairs):
            whole = np.concatenate([[vocabulary.first], one, [vocabulary.between], two, [vocabulary.between]])
            tokens[row, : len(whole)] = whole
            segments[row, len(one) + 2 : len(whole)] = 1
            documents[row, : len(whole)] = 0
        next_sentence = np.array([not follows for _, _, follows in pairs], dtype=np.int8)
        return {"tokens": tokens, "segments": segments, "documents": documents, "next_sentence": next_sentence}


def mask(
    tokens: np.ndarray, samples: np.ndarray, is_ordinary: np.ndarray, vocabulary: Vocabulary, rates: MaskingConfig, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose places, and change their tokens.

    Args:
        tokens: (n, sequence).
        samples: (n,) their numbers, which decide the choices.
        is_ordinary: (vocabulary,) whether a token stands for text.
        vocabulary: the mask, and what random tokens are drawn from.
        rates: how many places; what becomes of them.
        seed: of the choices.

    Returns:
        The changed tokens, and the targets: int32 (n, sequence), the token that stood at a chosen place, IGNORE elsewhere.
    """
    rows, length = tokens.shape
    words = random_words(seed, np.repeat(samples, length), np.tile(np.arange(length), rows), count=3)
    order, change, which = (word.reshape(rows, length) for word in words)
    candidates = is_ordinary[tokens]
    counts = np.clip(np.rint(rates.rate * candidates.sum(axis=1)).astype(np.int64), 1, None)
    # The places whose random numbers are the smallest of their row; the largest of all for places that may not be chosen.
    order = np.where(candidates, order >> np.uint64(1), np.iinfo(np.uint64).max)
    ranks = order.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    chosen = (ranks < counts[:, None]) & candidates
    chance = change.astype(np.float64) / 2.0**64
    random = vocabulary.ordinary[(which % np.uint64(len(vocabulary.ordinary))).astype(np.int64)].astype(tokens.dtype)
    stays = chance < rates.keep
    drawn = ~stays & (chance < rates.keep + rates.random)
    changed = np.where(chosen & ~stays, np.where(drawn, random, tokens.dtype.type(vocabulary.mask)), tokens)
    return changed, np.where(chosen, tokens.astype(np.int32), np.int32(IGNORE))
