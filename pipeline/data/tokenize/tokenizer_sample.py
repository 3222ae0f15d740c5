"""What a tokenizer learns from: an even sample of the training text, languages weighted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipeline.artifact import Manifest
from pipeline.data.shard import text_shards

WINDOW = 4
"""Times the sample's size that is looked at when languages are to be balanced."""


class Sample:
    """Texts out of the leading part of every training shard. Shards are shuffled, so this is an even sample of the corpus.

    With `balance` a (Conneau et al. 2020, XLM-R, section 3), a language that has the share p of the text gets a share in proportion to p**a
    of the sample: 1 leaves the shares as they are, 0 makes them equal. Text is looked for in WINDOW times the sample's size; a
    language that has less than its share there gives all of it.

    Attributes:
        bytes: text in the sample, about.
        languages: language (else corpus) -> bytes of its text in the sample, known after a pass.
    """

    def __init__(self, shards: Path, text: Manifest, megabytes: float, balance: float) -> None:
        """Choose; with a balance other than 1 this reads the leading parts once.

        Raises:
            UserError: a shard is missing or corrupt.
        """
        self._shards, self._text = shards, text
        self._train = {name: entry["text_bytes"] for name, entry in text.files.items() if entry.get("split") == "train"}
        total = sum(self._train.values())
        self.bytes = round(min(megabytes * 1e6, total))
        self._window = min(1.0, (1 if balance == 1 else WINDOW) * self.bytes / total)
        self._kept: dict[str, float] = {}
        self.languages: Counter[str] = Counter()
        if balance != 1:
            seen: Counter[str] = Counter()
            for language, document in self._leading():
                seen[language] += len(document)
            weights = {language: (size / seen.total()) ** balance for language, size in seen.items()}
            wanted = {language: self.bytes * weight / sum(weights.values()) for language, weight in weights.items()}
            self._kept = {language: wanted[language] / size for language, size in seen.items()}

    def __iter__(self) -> Iterator[str]:
        """The texts, the same with every pass.

        Raises:
            UserError: a shard is missing or corrupt.
        """
        self.languages = Counter()
        seen: Counter[str] = Counter()
        for language, document in self._leading():
            seen[language] += len(document)
            if self.languages[language] < self._kept.get(language, 1.0) * seen[language]:
                self.languages[language] += len(document)
                yield document.decode("utf-8", errors="ignore")  # the last of a shard may be cut within a character

    def _leading(self) -> Iterator[tuple[str, bytes]]:
        """(language, text) of the leading documents of every training shard."""
        for name, size in self._train.items():
            left = round(self._window * size)
            for document, about in text_shards.readable(self._shards, self._text, name):
                yield text_shards.language(about), document[:left]
                left -= len(document)
                if left <= 0:
                    break


def held_out(shards: Path, text: Manifest, megabytes: float) -> dict[str, list[str]]:
    """Language (else corpus) -> documents of the validation split, of each language about as much as asked for, at most.

    Raises:
        UserError: a shard is missing or corrupt.
    """
    found: dict[str, list[str]] = {}
    sizes: Counter[str] = Counter()
    for name, entry in text.files.items():
        if entry.get("split") == "validation":
            for document, about in text_shards.readable(shards, text, name):
                language = text_shards.language(about)
                if sizes[language] < megabytes * 1e6:
                    sizes[language] += len(document)
                    found.setdefault(language, []).append(document.decode("utf-8", errors="replace"))
    return dict(sorted(found.items()))
