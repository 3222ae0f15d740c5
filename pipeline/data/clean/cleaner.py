"""Applies the cleaning steps in the configured order, and records counts and examples."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
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


#: Step -> reason for which a rule drops, with n for a number in it -> what turns the rule off.
RULES_OFF = {
    "length": {"too short": "least=0", "too long": "most=1000000000"},
    "language": {"language unclear": "share=0"},
    "gopher": {
        "too few words": "least_words=0",
        "too many words": "most_words=1000000000",
        "mean word length": "least_word_length=0 clean.gopher.most_word_length=1000",
        "too many symbols": "symbols=1000",
        "mostly bullet points": "bullet_lines=1",
        "many lines end in an ellipsis": "ellipsis_lines=1",
        "too few words with letters": "alphabetic=0",
        "too few stop words": "stop_words=0",
    },
    "c4": {"too few sentences": "least_sentences=0", "curly brackets": "no_curly_brackets=false"},
    "fineweb": {
        "few lines end in punctuation": "closed_lines=0",
        "mostly short lines": "short_lines=1",
        "characters in duplicate lines": "duplicate_characters=1",
        "too many lines for its words": "newlines=1000",
    },
    "repetition": {
        "repeated lines": "lines=1",
        "characters in repeated lines": "line_characters=1",
        "repeated paragraphs": "paragraphs=1",
        "characters in repeated paragraphs": "paragraph_characters=1",
        "one frequent n-gram": "top_ngrams=[9,9,9]",
        "repeated n-grams": "long_ngrams=[9,9,9,9,9,9]",
    },
}


def turned_off(step: str, reason: str) -> str | None:
    """Return the setting that turns off the rule for quality that drops for a reason; None for other rules, which users ask for."""
    setting = RULES_OFF.get(step, {}).get(re.sub(r"\d+", "n", reason))
    return setting and f"clean.{step}.{setting}"


class Change(NamedTuple):
    """What a step does to a document, for a reason: the text before and after it; None if it drops the document."""

    reason: str
    identity: str
    before: str
    after: str | None
    corpus: str = ""
    language: str = ""


Dropped = Callable[[Document, str, str, str, str], None]
"""Receives a dropped document: (document, step, reason, its text before that step, its language)."""

EXAMPLES, DROPPED, OF_LANGUAGE = 5, 20, 3
"""Examples of a reason: changed, and dropped, documents of every corpus, and of every language. They are the documents whose identity has
the lowest hash, independent of the number of ranks."""

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
        examples: reason -> [[hash, identity, excerpt before, excerpt after or None, corpus, language], ...], lowest hash first.
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
            self.examples[reason] = _lowest([*self.examples.get(reason, []), *examples])

    def add_examples(self, changes: Iterable[Change], shown_as: Callable[[Sequence[str]], Sequence[str]]) -> None:
        """Keep the documents whose hashes are among the lowest of their corpus or language as examples.

        Args:
            shown_as: what examples show of texts. It takes long, so that it is called once, with the texts that may be shown.
        """
        new: dict[str, list[list[Any]]] = defaultdict(list)
        for reason, identity, *rest in changes:
            new[reason].append([xxhash.xxh3_64_intdigest(identity.encode("utf-8", "surrogatepass")), identity, *rest])
        kept: set[int] = set()
        for reason, of_reason in new.items():
            self.examples[reason] = _lowest([*self.examples.get(reason, []), *of_reason])
            kept |= set(map(id, self.examples[reason]))
        shown = [example for of_reason in new.values() for example in of_reason if id(example) in kept]
        texts = iter(shown_as([text for example in shown for text in example[2:4] if text is not None]))
        for example in shown:
            example[2:4] = _excerpts(next(texts), None if example[3] is None else next(texts))


def _lowest(examples: list[list[Any]]) -> list[list[Any]]:
    """The examples of a reason that are kept. What is left out is left out beside any others, so that parts can be added in any order."""
    kept, seen = [], Counter[tuple[str, str]]()
    for example in sorted(examples, key=lambda example: example[:3]):
        after, corpus, language = example[3:]
        places = ("corpus", corpus), ("language", language)
        if seen[places[0]] < (DROPPED if after is None else EXAMPLES) or seen[places[1]] < (OF_LANGUAGE if after is None else 0):
            kept.append(example)
        seen.update(places)
    return kept


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
            drops = [verdict.document for verdict in verdicts if verdict.text is None and self._identify and not self._tag]
            labels = batch.labels([verdict.document for verdict in verdicts], identify=drops)
            changes = (
                Change(reason, batch.documents[index].id, batch.texts[index], text, batch.documents[index].corpus, label)
                for (index, reason, text), label in zip(verdicts, labels, strict=True)
            )
            step_counts.add_examples(changes, self._shown_as)
            for verdict, label in zip(verdicts, labels, strict=True):
                document = batch.documents[verdict.document]
                if verdict.text is None:
                    if not self._tag:
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
