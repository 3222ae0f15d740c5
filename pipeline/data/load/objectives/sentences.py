"""Pairs of segments for next-sentence prediction (Devlin et al. 2019, section 3.1), cut from samples of a stream of documents."""

from __future__ import annotations

import numpy as np

from pipeline.data.load.permutation import random_words

#: The number that stands in a sample's random words where masking has a place.
_OF_SAMPLE = 1 << 40

#: A segment, the one after it, and whether it followed it in its document.
Pair = tuple[np.ndarray, np.ndarray, bool]


def elsewhere(samples: np.ndarray, epoch: int, seed: int) -> np.ndarray:
    """For each sample another one of its epoch, (n,) int64; `epoch` is the number of samples, at least 2."""
    (word,) = random_words(seed, samples, _OF_SAMPLE, count=1)
    begin, place = samples - samples % epoch, samples % epoch
    return begin + (place + 1 + (word % np.uint64(epoch - 1)).astype(np.int64)) % epoch


def pairs(texts: np.ndarray, others: np.ndarray, samples: np.ndarray, end_of_document: int, seed: int) -> list[Pair]:
    """Two segments of each text, in half of them with the second one from another text.

    A pair comes from one document, found by a random place of the text, so that long documents have more of them. The second segment
    from elsewhere is as long as the one it replaces, or as its document is.

    Args:
        texts: (n, text) tokens.
        others: (n, text) of other samples.
        samples: (n,) numbers of the texts, which decide the choices.
        end_of_document: id of the token that closes every document.
        seed: of the choices.
    """
    words = random_words(seed, samples, _OF_SAMPLE + 1, count=5)
    chances = np.stack(words, axis=1).astype(np.float64) / 2.0**64
    made: list[Pair] = []
    for text, other, (where, cut, whether, place, start) in zip(texts, others, chances.tolist(), strict=True):
        document = _document(text, end_of_document, where)
        middle = 1 + int(cut * (len(document) - 1))
        one, two = document[:middle], document[middle:]
        follows = whether < 0.5
        if not follows:
            foreign = _document(other, end_of_document, place)
            first = int(start * (max(len(foreign) - len(two), 0) + 1))
            two = foreign[first : first + len(two)]
        made.append((one, two, follows))
    return made


def text_ends(texts: np.ndarray, end_of_document: int) -> np.ndarray:
    """How many tokens of each packed text are text, (n,); the rest is padding, end-of-document tokens after a document's own."""
    is_text = texts != end_of_document
    last = texts.shape[1] - is_text[:, ::-1].argmax(axis=1)
    return np.minimum(np.where(is_text.any(axis=1), last, 0) + 1, texts.shape[1])


def _document(text: np.ndarray, end_of_document: int, where: float) -> np.ndarray:
    """The part of a document that a random place of the text lies in, without its end token; of those with two tokens and more.

    A text without such a part is taken as it is.
    """
    ends = np.flatnonzero(text == end_of_document)
    starts, stops = np.append(0, ends + 1), np.append(ends, len(text))
    lengths = np.where(stops - starts >= 2, stops - starts, 0)
    total = np.cumsum(lengths)
    if total[-1] == 0:
        return text
    part = int(np.searchsorted(total, int(where * total[-1]), side="right"))
    return text[starts[part] : stops[part]]
