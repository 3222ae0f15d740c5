"""A batch of documents on its way through the cleaning steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeline.data.clean import language
from pipeline.data.documents import Document
from pipeline.data.words import Words

BATCH_CHARACTERS = 1 << 18
"""Characters in a batch, about: enough that numpy's cost per call is small, few enough that its arrays stay in the processor's cache."""


class Verdict(NamedTuple):
    """What a step says of one document; of those that it keeps as they are it says nothing.

    Attributes:
        index: which of the batch.
        reason: a few words, the same for every document with this fault.
        text: the new text; None drops the document.
    """

    index: int
    reason: str
    text: str | None = None


class Batch:
    """Some documents with their texts as they are by now. Steps read it; only `after` makes a new one.

    Attributes:
        alive: (documents,) bool, which are still there. Verdicts on others do not count.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        self.texts = [document.text for document in documents]
        self.alive = np.ones(len(documents), dtype=bool)

    @cached_property
    def words(self) -> Words:
        """The words of all texts."""
        return Words(self.texts)

    @cached_property
    def characters(self) -> np.ndarray:
        """(documents,) length of every text, at least 1."""
        return np.maximum(np.diff(self.words.text_starts) - 1, 1)

    @cached_property
    def languages(self) -> list[tuple[str, float]]:
        """The language of every text, and the share of the text that is in it. Found once: what later steps mend does not change it."""
        return [language.identify(text) if alive else language.UNKNOWN for text, alive in zip(self.texts, self.alive, strict=True)]

    def after(self, verdicts: Iterable[Verdict]) -> Batch:
        """The batch that the verdicts leave: itself without what is dropped, or a new one when texts changed."""
        changed = {}
        for verdict in verdicts:
            if verdict.text is None:
                self.alive[verdict.index] = False
            else:
                changed[verdict.index] = verdict.text
        if not changed:
            return self
        batch = Batch(self.documents)
        batch.alive = self.alive
        batch.texts = [changed.get(index, text) for index, text in enumerate(self.texts)]
        if "languages" in vars(self):
            batch.languages = self.languages
        return batch


Step = Callable[[Batch], Iterable[Verdict]]


def where(batch: Batch, mask: np.ndarray) -> list[int]:
    """The living documents that a (documents,) mask marks."""
    return np.flatnonzero(mask & batch.alive).tolist()


def drop(batch: Batch, faults: Iterable[tuple[np.ndarray, str]]) -> Iterable[Verdict]:
    """Drop what a mask marks, for the reason beside it; a document with several faults goes for the first."""
    gone = np.zeros(len(batch.texts), dtype=bool)
    for mask, reason in faults:
        for index in where(batch, mask & ~gone):
            yield Verdict(index, reason)
        gone |= mask


def batches(documents: Iterable[Document]) -> Iterable[Batch]:
    """The documents, about BATCH_CHARACTERS at a time."""
    collected: list[Document] = []
    size = 0
    for document in documents:
        collected.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield Batch(collected)
            collected, size = [], 0
    if collected:
        yield Batch(collected)
