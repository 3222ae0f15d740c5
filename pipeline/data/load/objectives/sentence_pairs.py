"""Segment pairs for next-sentence prediction (Devlin et al. 2019, section 3.1), taken from samples of a stream of documents."""

from __future__ import annotations

import numpy as np

from pipeline.data.load.permutation import random_words

#: The counter of a sample's own random words; masking uses the position, which is smaller.
_SAMPLE_COUNTER = 1 << 40

#: A segment, a second one, and whether the second follows the first in its document.
SegmentPair = tuple[np.ndarray, np.ndarray, bool]


def other_samples(samples: np.ndarray, epoch: int, seed: int) -> np.ndarray:
    """For each sample another sample of the same epoch, (n,) int64; `epoch` is the samples per epoch, at least 2."""
    (word,) = random_words(seed, samples, _SAMPLE_COUNTER, count=1)
    begin, place = samples - samples % epoch, samples % epoch
    return begin + (place + 1 + (word % np.uint64(epoch - 1)).astype(np.int64)) % epoch


def segment_pairs(texts: np.ndarray, others: np.ndarray, samples: np.ndarray, end_of_document: int, seed: int) -> list[SegmentPair]:
    """Two segments of each text; in half of the pairs the second segment comes from another text.

    The document of a pair is the one at a random position of the text, so that documents are drawn in proportion to their length. A second
    segment from another text has the length of the segment that it replaces, or of its document if that is shorter.

    Args:
        texts: (n, text) tokens.
        others: (n, text) of other samples.
        samples: (n,) sample numbers, which seed the choices together with `seed`.
        end_of_document: id of the token at the end of every document.
        seed: of the choices.
    """
    words = random_words(seed, samples, _SAMPLE_COUNTER + 1, count=5)
    chances = np.stack(words, axis=1).astype(np.float64) / 2.0**64
    made: list[SegmentPair] = []
    for text, other, (where, cut, whether, place, start) in zip(texts, others, chances.tolist(), strict=True):
        document = _document(text, end_of_document, where)
        middle = 1 + int(cut * (len(document) - 1))
        former, latter = document[:middle], document[middle:]
        follows = whether < 0.5
        if not follows:
            foreign = _document(other, end_of_document, place)
            first = int(start * (max(len(foreign) - len(latter), 0) + 1))
            latter = foreign[first : first + len(latter)]
        made.append((former, latter, follows))
    return made


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
