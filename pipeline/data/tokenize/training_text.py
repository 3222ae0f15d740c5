"""The training text of a tokenizer: a uniform sample of the training split, with optional balancing of languages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipeline.common.artifact import Manifest
from pipeline.data.shard import text_shards

SCAN_FACTOR = 4
"""Text that is scanned to balance languages, as a multiple of the sample's size."""


class TrainingText:
    """Texts of as few training shards of each corpus as contain its share of the sample. Shards are shuffled, so this is a uniform sample.

    The shards that are read are read in full, to verify their checksums.

    With `balance` a (Conneau et al. 2020, XLM-R, section 3), a language with the share p of the text has a share proportional to p**a in
    the sample: 1 keeps the shares, 0 makes them equal. SCAN_FACTOR times the sample's size is scanned; a language with less text than its
    share in it contributes all of this text.

    Attributes:
        bytes: approximate size of the sample.
        languages: language (or corpus, if unknown) -> bytes of its text in the sample; available after one iteration.
    """

    def __init__(self, shards: Path, text: Manifest, megabytes: float, balance: float) -> None:
        """Compute the sampling rates. If `balance` is not 1, this reads the scanned text once.

        Args:
            megabytes: size of the sample, in 10**6 bytes.
            balance: exponent of the language shares, from 0 to 1.

        Raises:
            UserError: a shard is missing or corrupt.
        """
        self._shards, self._text = shards, text
        self._train: dict[str, dict[str, int]] = {}  # corpus -> shard -> bytes of text
        for name, entry in sorted(text.files.items()):
            if entry.get("split") == "train":
                self._train.setdefault(entry["corpus"], {})[name] = entry["text_bytes"]
        total = sum(sum(sizes.values()) for sizes in self._train.values())
        self.bytes = round(min(megabytes * 1e6, total))
        self._scanned = min(1.0, (1 if balance == 1 else SCAN_FACTOR) * self.bytes / total)
        self._kept: dict[str, float] = {}
        self.languages: Counter[str] = Counter()
        if balance != 1:
            seen: Counter[str] = Counter()
            for language, document in self._leading():
                seen[language] += len(document)
            weights = {language: (size / seen.total()) ** balance for language, size in seen.items()}
            wanted = {language: self.bytes * weight / sum(weights.values()) for language, weight in weights.items()}
            self._kept = {language: wanted[language] / size for language, size in seen.items()}

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield (language, text); every iteration yields the same ones.

        Raises:
            UserError: a shard is missing or corrupt.
        """
        self.languages = Counter()
        seen: Counter[str] = Counter()
        for language, document in self._leading():
            seen[language] += len(document)
            if self.languages[language] < self._kept.get(language, 1.0) * seen[language]:
                self.languages[language] += len(document)
                yield language, document.decode("utf-8", errors="ignore")  # the last text of a shard may be truncated within a character

    def _leading(self) -> Iterator[tuple[str, bytes]]:
        """Yield (language, text) of the first documents of every corpus."""
        for sizes in self._train.values():
            remaining = round(self._scanned * sum(sizes.values()))
            for name in sizes:
                if remaining <= 0:
                    break
                for document, about in text_shards.verified(self._shards, self._text, name):
                    if remaining > 0:
                        yield text_shards.language(about), document[:remaining]
                    remaining -= len(document)


def held_out(shards: Path, text: Manifest, megabytes: float) -> dict[str, list[str]]:
    """Read documents of the validation split, at most about `megabytes` of each language.

    Args:
        megabytes: maximum per language, in 10**6 bytes.

    Returns:
        Language (or corpus, if unknown) -> documents.

    Raises:
        UserError: a shard is missing or corrupt.
    """
    texts: dict[str, list[str]] = {}
    sizes: Counter[str] = Counter()
    for name, entry in text.files.items():
        if entry.get("split") == "validation":
            for document, about in text_shards.verified(shards, text, name):
                language = text_shards.language(about)
                if sizes[language] < megabytes * 1e6:
                    sizes[language] += len(document)
                    texts.setdefault(language, []).append(document.decode("utf-8", errors="replace"))
    return dict(sorted(texts.items()))
