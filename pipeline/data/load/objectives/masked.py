"""Masked language modeling: predict masked tokens from all others (BERT, Devlin et al. 2019, section 3.1; RoBERTa, Liu et al. 2019).

BERT's segment pairs for next-sentence prediction are taken from samples of a stream of documents. Pseudo-log-likelihoods mask each token
alone (Salazar et al. 2020, https://arxiv.org/abs/1910.14659).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import numpy as np

from pipeline.common.errors import UserError
from pipeline.config.data import MaskingConfig
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import IGNORE, TokenShardObjective, special_tokens
from pipeline.data.load.packing import document_ids
from pipeline.data.load.permutation import random_words
from pipeline.data.load.samples import Samples
from pipeline.data.load.special_tokens import MASK, enclosing_tokens
from pipeline.data.load.validation_split import choose
from pipeline.models.config import MaskedModelConfig

#: The counter of a sample's own random words; masking uses the position, which is smaller.
_SAMPLE_COUNTER = 1 << 40


@dataclass(frozen=True)
class Vocabulary:
    """Token ids that masking uses.

    Attributes:
        first: the token before a sequence ([CLS]).
        between: the token after each segment ([SEP]).
        mask: the replacement of a token to be predicted ([MASK]).
        ordinary: (tokens,) ids of text tokens, which may be masked and drawn as random replacements, ascending.
    """

    first: int
    between: int
    mask: int
    ordinary: np.ndarray


class Masked(TokenShardObjective):
    """Sequences [CLS] text [SEP] whose text may cross document boundaries, or [CLS] a [SEP] b [SEP] with two segments of one document.

    A fixed share of the text positions is selected, the same number in every unpadded sequence. Most selected tokens become [MASK], some a
    random token, and some are kept. The selection of a sample differs between epochs. Special tokens are neither selected nor drawn.
    """

    settings: ClassVar[tuple[str, ...]] = (*TokenShardObjective.settings, "data.masking", "model.next_sentence", "training.objective")

    def __init__(self, samples: Samples, vocabulary: Vocabulary, config: RunConfig) -> None:
        """Use samples of text_length + 1 tokens; the last one is not used."""
        self.samples, self._count = samples, int(samples.counts.sum())
        self._vocabulary, self._rates, self._seed = vocabulary, config.data.masking, config.training.seed
        self._length, self._packed = config.training.sequence_length, config.data.packing == "best_fit"
        self._document_mask, self._next_sentence = config.training.document_mask, _model(config).next_sentence
        self._is_ordinary = np.zeros(samples.vocab_size, dtype=bool)
        self._is_ordinary[vocabulary.ordinary] = True

    @staticmethod
    def sample_settings(config: RunConfig) -> dict[str, Any]:
        """See TokenShardObjective."""
        return {"masking": vars(config.data.masking) | {"next_sentence": _model(config).next_sentence}}

    @staticmethod
    def text_length(config: RunConfig) -> int:
        """See TokenShardObjective: the sequence without its special tokens."""
        return config.training.sequence_length - (3 if _model(config).next_sentence else 2)

    @classmethod
    def of(cls, config: RunConfig, samples: Samples) -> Self:
        """See TokenShardObjective."""
        masking, special = config.data.masking, special_tokens(config, samples)
        named = {"data.masking.mask": (masking.mask, MASK), **enclosing_tokens(masking)}
        mask, first, between = special.find(named)
        ordinary = np.setdiff1d(np.arange(samples.vocab_size), list(special.ids.values()))
        padding = _model(config).padding_token
        if padding is not None and padding in ordinary:
            rule = f"has a text token with id {padding}, which the stock {config.model.family} class treats as padding"
            fix = "train one with tokenizer=roberta"
            raise UserError.of("tokenizer.path", config.tokenizer.path, rule, fix)
        if _model(config).next_sentence and samples.counts.sum() < 2:
            rule = "leaves one sample, and a second sentence must come from another"
            raise UserError.of("training.sequence_length", config.training.sequence_length, rule, "shorten it, or tokenize more text")
        return cls(samples, Vocabulary(first, between, mask, ordinary), config)

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: tokens and targets; segments and next_sentence with two segments; documents with padding or a document mask."""
        indices = np.asarray(indices, dtype=np.int64)
        arrays = self.unmasked(indices)
        arrays["tokens"], arrays["targets"] = mask(arrays["tokens"], indices, self._is_ordinary, self._vocabulary, self._rates, self._seed)
        return arrays

    def unmasked(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of samples with the original tokens, without targets."""
        return self._pairs(indices) if self._next_sentence else self._single(indices)

    def _single(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """[CLS] text [SEP], followed by end-of-document tokens as padding if documents are packed."""
        text = self.samples.samples(indices)[:, :-1]
        rows, width = text.shape
        tokens = np.full((rows, self._length), self.samples.end_of_document, dtype=text.dtype)
        tokens[:, 0], tokens[:, 1:-1] = self._vocabulary.first, text
        ends = text_ends(text, self.samples.end_of_document) if self._packed else np.full(rows, width)
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
        """[CLS] a [SEP] b [SEP], padded if the document is short; in half of the pairs b comes from another text.

        The document of a pair is the one at a random position of the text, so that documents are drawn in proportion to their length. A
        segment from another text has the length of the segment that it replaces, or of its document if that is shorter.
        """
        vocabulary, end = self._vocabulary, self.samples.end_of_document
        others = other_samples(indices, self._count, self._seed)
        texts, foreign_texts = np.split(self.samples.samples(np.concatenate([indices, others]))[:, :-1], 2)
        chances = np.stack(random_words(self._seed, indices, _SAMPLE_COUNTER + 1, count=5), axis=1).astype(np.float64) / 2.0**64
        follows = chances[:, 2] < 0.5
        shape = (len(indices), self._length)
        tokens = np.full(shape, end, dtype=texts.dtype)
        segments, documents = np.zeros(shape, dtype=np.int8), np.full(shape, -1, dtype=np.int32)
        for row, (where, cut, _, place, start) in enumerate(chances.tolist()):
            document = _document(texts[row], end, where)
            middle = 1 + int(cut * (len(document) - 1))
            left, right = document[:middle], document[middle:]
            if not follows[row]:
                foreign = _document(foreign_texts[row], end, place)
                first = int(start * (max(len(foreign) - len(right), 0) + 1))
                right = foreign[first : first + len(right)]
            whole = np.concatenate([[vocabulary.first], left, [vocabulary.between], right, [vocabulary.between]])
            tokens[row, : len(whole)] = whole
            segments[row, len(left) + 2 : len(whole)] = 1
            documents[row, : len(whole)] = 0
        return {"tokens": tokens, "segments": segments, "documents": documents, "next_sentence": (~follows).astype(np.int8)}


def _model(config: RunConfig) -> MaskedModelConfig:
    """The model's configuration; only models with the members that masking needs name this objective."""
    return cast(MaskedModelConfig, config.model)


def mask(
    tokens: np.ndarray, samples: np.ndarray, is_ordinary: np.ndarray, vocabulary: Vocabulary, rates: MaskingConfig, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Select positions and replace their tokens.

    Args:
        tokens: (n, sequence).
        samples: (n,) sample numbers, which seed the selection together with `seed`.
        is_ordinary: (vocabulary,) whether a token is a text token.
        vocabulary: the mask token, and the tokens to draw random replacements from.
        rates: share of positions to select, and of random and kept tokens among them.

    Returns:
        The tokens with replacements, and the targets: int32 (n, sequence), the original token at a selected position, IGNORE elsewhere.
    """
    rows, length = tokens.shape
    words = random_words(seed, np.repeat(samples, length), np.tile(np.arange(length), rows), count=3)
    order, change, which = (word.reshape(rows, length) for word in words)
    candidates = is_ordinary[tokens]
    counts = np.clip(np.rint(rates.rate * candidates.sum(axis=1)).astype(np.int64), 1, None)
    # Select the positions with the smallest random numbers of a row; positions that may not be selected get the largest possible number.
    order = np.where(candidates, order >> np.uint64(1), np.iinfo(np.uint64).max)
    ranks = order.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    chosen = (ranks < counts[:, None]) & candidates
    chance = change.astype(np.float64) / 2.0**64
    random = vocabulary.ordinary[(which % np.uint64(len(vocabulary.ordinary))).astype(np.int64)].astype(tokens.dtype)
    stays = chance < rates.keep
    drawn = ~stays & (chance < rates.keep + rates.random)
    changed = np.where(chosen & ~stays, np.where(drawn, random, tokens.dtype.type(vocabulary.mask)), tokens)
    return changed, np.where(chosen, tokens.astype(np.int32), np.int32(IGNORE))


def other_samples(samples: np.ndarray, epoch: int, seed: int) -> np.ndarray:
    """For each sample another sample of the same epoch, (n,) int64; `epoch` is the samples per epoch, at least 2."""
    (word,) = random_words(seed, samples, _SAMPLE_COUNTER, count=1)
    begin, place = samples - samples % epoch, samples % epoch
    return begin + (place + 1 + (word % np.uint64(epoch - 1)).astype(np.int64)) % epoch


def text_ends(texts: np.ndarray, end_of_document: int) -> np.ndarray:
    """Tokens of each packed text without its padding, (n,); padding are the end-of-document tokens after the last document's own."""
    is_text = texts != end_of_document
    last = texts.shape[1] - is_text[:, ::-1].argmax(axis=1)
    return np.minimum(np.where(is_text.any(axis=1), last, 0) + 1, texts.shape[1])


def _document(text: np.ndarray, end_of_document: int, where: float) -> np.ndarray:
    """The part of a document at a random position of the text, without its end token; only parts of at least two tokens are considered.

    A text without such a part is returned unchanged.
    """
    ends = np.flatnonzero(text == end_of_document)
    starts, stops = np.append(0, ends + 1), np.append(ends, len(text))
    lengths = np.where(stops - starts >= 2, stops - starts, 0)
    total = np.cumsum(lengths)
    if total[-1] == 0:
        return text
    part = int(np.searchsorted(total, int(where * total[-1]), side="right"))
    return text[starts[part] : stops[part]]


class PseudoLikelihood(Masked):
    """The sequences of Masked, each once for every position, with that position masked; for evaluation.

    Sample i is position i % sequence_length of sequence i // sequence_length. At a special token, it has no target.
    """

    def __init__(self, samples: Samples, vocabulary: Vocabulary, config: RunConfig) -> None:
        """See Masked."""
        super().__init__(samples, vocabulary, config)
        self.samples = copy.copy(samples)
        self.samples.counts = samples.counts * self._length

    @property
    def parts(self) -> list[tuple[str, int]]:
        """See Objective."""
        return [(name, count * self._length) for name, count in super().parts]

    def validation_sample(self, size: int | None) -> np.ndarray:
        """See Objective: all positions of the sequences that Masked would read."""
        sequences = choose([count for _, count in super().parts], None if size is None else size // self._length)
        return (sequences[:, None] * self._length + np.arange(self._length)).ravel()

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: as Masked, with one target in each row at most."""
        sequences, positions = np.divmod(np.asarray(indices, dtype=np.int64), self._length)
        distinct, where = np.unique(sequences, return_inverse=True)
        arrays = {name: array[where] for name, array in self.unmasked(distinct).items()}
        rows, targets = np.arange(len(positions)), np.full(arrays["tokens"].shape, IGNORE, dtype=np.int32)
        original = arrays["tokens"][rows, positions]
        counted = self._is_ordinary[original]
        if "documents" in arrays:
            counted &= arrays["documents"][rows, positions] >= 0
        targets[rows[counted], positions[counted]] = original[counted]
        arrays["tokens"][rows[counted], positions[counted]] = self._vocabulary.mask
        return {**arrays, "targets": targets}
