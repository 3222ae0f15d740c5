"""A batch of documents that passes through the cleaning steps: its words, its languages, and the thresholds of a step for each document.

A large text is changed in slices, for steps that change a line at a time: only the strings of a slice are in memory besides the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pipeline.common import languages
from pipeline.data.clean import code_detection
from pipeline.data.clean.language import UNKNOWN, Detector, Language, built_in
from pipeline.data.read.documents import Document
from pipeline.data.words import Words

LARGE_TEXT = 1 << 19
"""Characters from which on a text is changed in slices."""

SLICE_CHARACTERS = 1 << 16
"""Characters of a slice."""


def is_large(text: str) -> bool:
    """Whether a text is changed in slices."""
    return len(text) >= LARGE_TEXT


def line_slices(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (first character, end) of slices of whole lines; a line is not cut, however long it is."""
    start = 0
    while start < len(text):
        cut = text.find("\n", start + SLICE_CHARACTERS) + 1
        yield start, cut or len(text)
        start = cut or len(text)


BATCH_CHARACTERS = 1 << 18
"""Approximate characters per batch: enough to amortize numpy's cost per call, few enough that the arrays fit into the CPU cache."""


class StepLimits:
    """The thresholds of a step for the documents of a batch; `by_language` of its keys holds the values of single languages."""

    def __init__(self, knobs: Any, batch: DocumentBatch) -> None:
        self._knobs, self._batch = knobs, batch

    def __getitem__(self, key: str) -> np.ndarray:
        """(texts,) values of a key; (texts, n) of a key that is a list of n numbers."""
        general = getattr(self._knobs, key)
        by_label = languages.by_label(
            {code: values[key] for code, values in self._knobs.by_language.items() if key in values},
            lambda code: self._batch.detector.covered(code),  # the detector is read when it is asked
        )
        if not by_label:
            return np.broadcast_to(np.array(general), (len(self._batch.texts), *np.shape(general)))
        return np.array([by_label.get(label, general) for label, _ in self._batch.languages])


class Verdict(NamedTuple):
    """The decision of a step on one document. A document that the step keeps unchanged has no verdict.

    Attributes:
        document: index of the document in the batch.
        reason: a short text, identical for every document with this fault.
        text: the new text; None drops the document.
    """

    document: int
    reason: str
    text: str | None = None


class DocumentBatch:
    """Documents with their current texts. Steps read a batch; `apply` returns the next one.

    Attributes:
        alive: (documents,) bool, documents that have not been dropped. Verdicts on other documents are ignored.
        changed: (documents,) bool, documents whose text differs from the original.
        tags: for every document, the reasons for which a step would have dropped it (`clean.mode=tag`).
        scores: (documents,) fp32, quality by the step score; NaN without it.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        self.texts = [document.text for document in documents]
        self.tags: list[list[str]] = [[] for _ in documents]
        self.scores = np.full(len(documents), np.nan, dtype=np.float32)
        self.alive, self.changed = np.ones(len(documents), dtype=bool), np.zeros(len(documents), dtype=bool)

    @cached_property
    def detector(self) -> Detector:
        """The built-in one, if none is assigned."""
        return built_in()

    @cached_property
    def words(self) -> Words:
        """The words of all current texts."""
        return Words(self.texts) if self.changed.any() else self.first_words

    @cached_property
    def first_words(self) -> Words:
        """The words of all original texts."""
        return Words([document.text for document in self.documents])

    @cached_property
    def changed_words(self) -> Words:
        """The words of the changed texts only."""
        return self.words if self.changed.all() else Words([self.texts[index] for index in np.flatnonzero(self.changed)])

    def mark(self, *tests: Callable[[Words], np.ndarray]) -> list[np.ndarray]:
        """Apply tests to the current texts: a (documents,) bool array of each. Words of unchanged texts are not computed again."""
        if self.changed.all():
            return [test(self.words) for test in tests]
        masks = [test(self.first_words) for test in tests]
        if self.changed.any():
            for mask, test in zip(masks, tests, strict=True):
                mask[self.changed] = test(self.changed_words)
        return masks

    @cached_property
    def characters(self) -> np.ndarray:
        """(documents,) length of every text in characters, at least 1."""
        return np.maximum(list(map(len, self.texts)), 1)

    @cached_property
    def languages(self) -> list[Language]:
        """The language of the prose of every text, and its share of it. Computed once: later changes do not affect it."""
        detected = [UNKNOWN] * len(self.texts)
        alive = np.flatnonzero(self.alive).tolist()
        for index, language in zip(alive, self._identified(alive), strict=True):
            detected[index] = language
        return detected

    def _identified(self, indices: Sequence[int]) -> list[Language]:
        return self.detector.identify([code_detection.prose(self.texts[index]) for index in indices])

    def labels(self, indices: Sequence[int], identify: Sequence[int] = ()) -> list[str]:
        """The languages as a step identified them, of `identify` as this call does, else as the metadata has them; "" if none is known."""
        found: dict[int, str] = {}
        if "languages" in vars(self):
            found = {index: self.languages[index][0] for index in indices}
        elif identify:
            found = {index: label for index, (label, _) in zip(identify, self._identified(identify), strict=True)}
        labels = []
        for index in indices:
            label, given = found.get(index, ""), self.documents[index].meta.get("lang")
            if label in ("", languages.UNKNOWN) and given and isinstance(given, str):
                label = languages.normalized(given)
            labels.append(label)
        return labels

    def apply(self, verdicts: Iterable[Verdict]) -> DocumentBatch:
        """Apply verdicts: return this batch if documents were only dropped, or a new one if texts changed."""
        changed = {}
        for verdict in verdicts:
            if verdict.text is None:
                self.alive[verdict.document] = False
            else:
                changed[verdict.document] = verdict.text
        if not changed:
            return self
        batch = DocumentBatch(self.documents)
        batch.alive, batch.tags, batch.changed, batch.scores = self.alive, self.tags, self.changed.copy(), self.scores
        batch.changed[list(changed)] = True
        batch.texts = [changed.get(index, text) for index, text in enumerate(self.texts)]
        for name in ("detector", "languages", "first_words"):
            if name in vars(self) and not (name == "first_words" and batch.changed.all()):
                setattr(batch, name, getattr(self, name))
        for name in ("words", "first_words", "changed_words"):  # large, and the caller may hold this batch
            vars(self).pop(name, None)
        return batch


Step = Callable[[DocumentBatch], Iterable[Verdict]]


def alive_indices(batch: DocumentBatch, mask: np.ndarray) -> list[int]:
    """The indices of the alive documents that a (documents,) mask selects."""
    return np.flatnonzero(mask & batch.alive).tolist()


def drop(batch: DocumentBatch, faults: Iterable[tuple[np.ndarray, str]]) -> Iterable[Verdict]:
    """Drop the documents that a (mask, reason) pair selects; a document with several faults is dropped for the first one."""
    dropped = np.zeros(len(batch.texts), dtype=bool)
    for mask, reason in faults:
        for index in alive_indices(batch, mask & ~dropped):
            yield Verdict(index, reason)
        dropped |= mask


def batches(documents: Iterable[Document]) -> Iterable[DocumentBatch]:
    """Group the documents into batches of about BATCH_CHARACTERS; a larger document is a batch of its own, to bound the memory."""
    collected: list[Document] = []
    size = 0
    for document in documents:
        if collected and len(document.text) >= BATCH_CHARACTERS:
            yield DocumentBatch(collected)
            collected, size = [], 0
        collected.append(document)
        size += len(document.text)
        del document  # not held while the next one is read
        if size >= BATCH_CHARACTERS:
            yield DocumentBatch(collected)
            collected, size = [], 0
    if collected:
        yield DocumentBatch(collected)
