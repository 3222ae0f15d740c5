"""Applies the cleaning steps in the configured order, and records counts and examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from itertools import compress
from typing import Any, NamedTuple

import xxhash

from pipeline.config.cleaning import CleanConfig
from pipeline.data.clean import language, origin, pii_masking, quality, repetition, text_repair
from pipeline.data.clean.document_batch import DocumentBatch, Step
from pipeline.data.read.documents import Document, add_count, add_counts, utf8_length

_STEP_FACTORIES: dict[str, Callable[[Any], Step]] = {
    "allow": origin.allow,
    "repair": text_repair.repair,
    "normalise": text_repair.normalise,
    "boilerplate": text_repair.boilerplate,
    "personal": pii_masking.personal,
    "length": quality.length,
    "language": quality.language,
    "gopher": quality.gopher,
    "c4": quality.c4,
    "fineweb": quality.fineweb,
    "repetition": repetition.repetition,
    "score": quality.Score,
    "fields": origin.fields,
    "contamination": origin.Contamination,
}


class Change(NamedTuple):
    """What a step does to a document, for a reason: the text before and after it; None if it drops the document."""

    reason: str
    identity: str
    before: str
    after: str | None


Dropped = Callable[[Document, str, str, str, str], None]
"""Receives a dropped document: (document, step, reason, its text before that step, its language)."""

EXAMPLES = 5
"""Examples per reason: the documents whose identity has the lowest hash, independent of the number of ranks."""

_EXCERPT = 300


@dataclass
class StepCounts:
    """The counts of one step.

    Attributes:
        documents, bytes: input of the step.
        dropped: reason -> [documents, bytes].
        tagged: reason -> [documents, bytes] that would have been dropped without `clean.mode=tag`.
        changed: reason -> documents.
        removed: reason -> bytes by which the changes have made the documents shorter; negative if longer.
        examples: reason -> [[hash, identity, excerpt before, excerpt after or None], ...], lowest hash first.
    """

    documents: int = 0
    bytes: int = 0
    dropped: dict[str, list[int]] = field(default_factory=dict)
    tagged: dict[str, list[int]] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[list[Any]]] = field(default_factory=dict)

    def add(self, other: StepCounts) -> None:
        """Add the counts of another part; the order of the parts does not matter."""
        self.documents += other.documents
        self.bytes += other.bytes
        add_counts(self.dropped, other.dropped)
        add_counts(self.tagged, other.tagged)
        for reason, documents in other.changed.items():
            self.changed[reason] = self.changed.get(reason, 0) + documents
        for reason, size in other.removed.items():
            self.removed[reason] = self.removed.get(reason, 0) + size
        for reason, examples in other.examples.items():
            self.examples[reason] = sorted([*self.examples.get(reason, []), *examples])[:EXAMPLES]

    def add_examples(self, changes: Iterable[Change], shown_as: Callable[[Sequence[str]], Sequence[str]]) -> None:
        """Keep the documents whose hashes are among the lowest as examples.

        Args:
            shown_as: what examples show of texts. It takes long, so that it is called once, with the texts that may be shown.
        """
        ranked = [(xxhash.xxh3_64_intdigest(change.identity.encode("utf-8", "surrogatepass")), change) for change in changes]
        limits: dict[str, int] = {}  # reason -> a hash above which no document can become an example
        for reason in {change.reason for _, change in ranked}:
            shown = [example[0] for example in self.examples.setdefault(reason, [])]
            lowest = nsmallest(EXAMPLES, [*shown, *(rank for rank, change in ranked if change.reason == reason)])
            limits[reason] = lowest[-1]
        ranked = [(rank, change) for rank, change in ranked if rank <= limits[change.reason]]
        texts = iter(shown_as([text for _, change in ranked for text in (change.before, change.after) if text is not None]))
        for rank, change in ranked:
            before, after = next(texts), None if change.after is None else next(texts)
            shown = self.examples[change.reason]
            if len(shown) == EXAMPLES and rank >= shown[-1][0]:
                continue
            shown.append([rank, change.identity, *_excerpts(before, after)])
            shown.sort()
            del shown[EXAMPLES:]


class Cleaner:
    """Applies the steps of a configuration to batches and counts their effects.

    If personal data is masked in the text, it is also masked in the examples of all steps.

    Attributes:
        notes: step -> what the report tells of its inputs -> number.

    Raises:
        UserError: a file that a step requires is missing, or the classifier of languages does not know one of them.
    """

    def __init__(self, config: CleanConfig) -> None:
        self._detector = language.detector(config) if config.language.model else None
        self._steps = [(name, _STEP_FACTORIES[name](getattr(config, name))) for name in config.steps]
        self._tag, self._identify = config.mode == "tag", not language.IDENTIFYING.isdisjoint(config.steps)
        self.notes: dict[str, dict[str, int]] = {name: step.notes for name, step in self._steps if hasattr(step, "notes")}
        kinds = config.personal.kinds if "personal" in config.steps else []
        self._shown_as = partial(pii_masking.mask, kinds=kinds)

    def clean(self, batch: DocumentBatch, counts: dict[str, StepCounts], dropped: Dropped = lambda *_: None) -> DocumentBatch:
        """Apply all steps to a batch; their counts are added to `counts` (step -> counts), and dropped documents are given to `dropped`."""
        if self._detector:
            batch.detector = self._detector
        sizes = list(map(utf8_length, batch.texts))
        for name, step in self._steps:
            step_counts = counts.setdefault(name, StepCounts())
            step_counts.documents += int(batch.alive.sum())
            step_counts.bytes += sum(compress(sizes, batch.alive.tolist()))
            verdicts = list(step(batch)) if batch.alive.any() else []
            step_counts.add_examples(
                (Change(reason, batch.documents[index].id, batch.texts[index], text) for index, reason, text in verdicts), self._shown_as
            )
            for verdict in verdicts:
                document = batch.documents[verdict.document]
                if verdict.text is None:
                    if not self._tag:
                        label = batch.label(verdict.document, identify=self._identify)
                        dropped(document, name, verdict.reason, batch.texts[verdict.document], label)
                    add_count(step_counts.tagged if self._tag else step_counts.dropped, verdict.reason, 1, sizes[verdict.document])
                else:
                    step_counts.changed[verdict.reason] = step_counts.changed.get(verdict.reason, 0) + 1
                    before, sizes[verdict.document] = sizes[verdict.document], utf8_length(verdict.text)
                    removed = before - sizes[verdict.document]
                    step_counts.removed[verdict.reason] = step_counts.removed.get(verdict.reason, 0) + removed
            if self._tag:
                for verdict in verdicts:
                    if verdict.text is None:
                        batch.tags[verdict.document].append(f"{name}: {verdict.reason}")
                verdicts = [verdict for verdict in verdicts if verdict.text is not None]
            batch = batch.apply(verdicts)
        return batch


def _excerpts(before: str, after: str | None) -> tuple[str, str | None]:
    """What is shown of a text before and after a change, around the first difference; the beginning of a dropped text."""
    if after is None:
        return before[:_EXCERPT], None
    start = max(0, _first_difference(before, after) - _EXCERPT // 4)
    return before[start : start + _EXCERPT], after[start : start + _EXCERPT]


def _first_difference(first: str, second: str) -> int:
    """The index of the first difference, by binary search: comparing slices is faster than comparing characters."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low
