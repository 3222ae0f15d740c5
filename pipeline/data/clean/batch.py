"""A batch of documents on its way through the cleaning steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeline.data import language
from pipeline.data.read.documents import Document
from pipeline.data.words import Words

BATCH_CHARACTERS = 1 << 18
"""Characters in a batch, about: enough that numpy's cost per call is small, few enough that its arrays stay in the processor's cache."""


class Verdict(NamedTuple):
    """What a step says of one document; of those that it keeps as they are it says nothing.

    Attributes:
        document: which of the batch.
        reason: a few words, the same for every document with this fault.
        text: the new text; None drops the document.
    """

    document: int
    reason: str
    text: str | None = None


class Batch:
    """Some documents with their texts as they are by now. Steps read it; only `after` makes a new one.

    Attributes:
        alive: (documents,) bool, which are still there. Verdicts on others do not count.
        changed: (documents,) bool, whose texts are no longer what they were when they came.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        self.texts = [document.text for document in documents]
        self.alive, self.changed = np.ones(len(documents), dtype=bool), np.zeros(len(documents), dtype=bool)

    @cached_property
    def words(self) -> Words:
        """The words of all texts."""
        return Words(self.texts) if self.changed.any() else self.first_words

    @cached_property
    def first_words(self) -> Words:
        """The words of all texts as they came."""
        return Words([document.text for document in self.documents])

    @cached_property
    def changed_words(self) -> Words:
        """The words of the changed texts alone."""
        return Words([self.texts[index] for index in np.flatnonzero(self.changed)])

    def mark(self, test: Callable[[Words], np.ndarray]) -> np.ndarray:
        """A test's (documents,) bool for the texts as they are, without splitting the unchanged ones again: for steps between changes."""
        mask = test(self.first_words)
        if self.changed.any():
            mask[self.changed] = test(self.changed_words)
        return mask

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
                self.alive[verdict.document] = False
            else:
                changed[verdict.document] = verdict.text
        if not changed:
            return self
        batch = Batch(self.documents)
        batch.alive, batch.changed = self.alive, self.changed.copy()
        batch.changed[list(changed)] = True
        batch.texts = [changed.get(index, text) for index, text in enumerate(self.texts)]
        for name in ("languages", "first_words"):
            if name in vars(self):
                setattr(batch, name, getattr(self, name))
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
