"""The text of tools/bench_data: read from files or generated, split into documents, and extended to any size without near duplicates."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DOCUMENT_BYTES = 4000
"""A document ends with the paragraph in which it reaches this size: about the size of a web page."""

FILES = 8
"""Number of files, all of equal size, so that the two workers of any peer have equal work."""

REPLACED, MISSPELT = 0.2, 0.02
"""Fractions of the words of a further copy that are replaced by another word of the document, and that become a new word.

Measured on 28 MB of English and German books and laws, extended to 400 MB: the 5-grams of words have a Jaccard similarity of 0.17 to those
of the original (at most 0.34 in 300 copies), so there are no near duplicates. The number of distinct words grows by a factor of 3.6, about
as in that much more text (Heaps' law), so that caches of words have no advantage. Without misspelt words it would not grow.
"""

PROSE_BYTES = 20_000_000

_COMMON = {
    "en": """the of and to in a is that for it was on are as with his they be at this have from or had by but some what there we can out
    were all your when use how said each she which do their time if will way about many then them would like so these her make see him two
    has look more day could go come did my no most who over know than first people may down been now find any new work part""",
    "de": """der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er hat dass sie nach
    wird bei einer um am sind noch wie einem über einen so zum war haben nur oder aber vor zur bis mehr durch man sein wurde sei ich du wir
    ihr kann hatte kein schon wenn doch jetzt immer unter wieder dieser diese gegen vom können was hier""",
}
_SYLLABLES = {
    "en": "ba con de ex fi gra ho in ju lo men no or pre qua re sta tion un ver wa ty zen ing er ble ment ous ful ly ish al ic th sh ck",
    "de": "ab be ge ver zer schl ung heit keit lich isch mann haus berg feld wald bach tür über ent stein hof markt licht krei zeu öff mög",
}


@dataclass(frozen=True)
class Text:
    """Documents in JSON lines `files`, each {"id", "text"}; `size` is the UTF-8 bytes of their texts."""

    files: list[Path]
    size: int
    documents: int

    @property
    def folder(self) -> Path:
        """The folder, which holds only the files."""
        return self.files[0].parent


def source(files: Sequence[Path]) -> list[str]:
    """Return the original documents in random order: those of JSON lines files, or, without files, generated prose and library code."""
    texts = (json.loads(line)["text"] for file in files for line in file.open(encoding="utf-8")) if files else _generated()
    documents = [document for text in texts for document in _split(text) if document.strip()]
    np.random.default_rng(0).shuffle(documents)
    return documents


def write(documents: Sequence[str], size: int, folder: Path) -> Text:
    """Write about `size` bytes of text to a new folder: as many of the documents as needed, then changed copies of them."""
    folder.mkdir(parents=True)
    files = [folder / f"part-{number}.jsonl" for number in range(FILES)]
    handles = [file.open("w", encoding="utf-8") for file in files]
    written = count = 0
    for text in _with_copies(documents):
        handles[count % FILES].write(json.dumps({"id": str(count), "text": text}, ensure_ascii=False) + "\n")
        written += len(text.encode("utf-8"))
        count += 1
        if written >= size:
            break
    for handle in handles:
        handle.close()
    return Text(files, written, count)


def _with_copies(documents: Sequence[str]) -> Iterator[str]:
    """Yield the documents, then endless copies that differ by more than near duplicates do.

    A copy of very few words can lose all of them. Such a copy is left out: implementations differ in whether they keep it.
    """
    yield from documents
    random = np.random.default_rng(0)
    while True:
        for text in documents:
            changed = _changed(text, random)
            if changed.strip():
                yield changed


def _changed(text: str, random: np.random.Generator) -> str:
    """Return a copy with some words replaced and some misspelt."""
    parts = re.split(r"(\s+)", text)  # words at even indices, whitespace at odd ones
    uniform = random.random((len(parts) + 1) // 2)
    replaced = np.flatnonzero(uniform < REPLACED)
    for index, other in zip(replaced.tolist(), random.integers(len(uniform), size=len(replaced)).tolist(), strict=True):
        parts[2 * index] = parts[2 * other]
    misspelt = np.flatnonzero(uniform > 1 - MISSPELT)
    for index, letters in zip(misspelt.tolist(), random.integers(ord("a"), ord("z") + 1, (len(misspelt), 2)).tolist(), strict=True):
        word = parts[2 * index]
        parts[2 * index] = word[: len(word) // 2] + "".join(map(chr, letters)) + word[len(word) // 2 :]
    return "".join(parts)


def _split(text: str) -> Iterator[str]:
    """Yield documents of about DOCUMENT_BYTES that consist of complete paragraphs."""
    part: list[str] = []
    size = 0
    for paragraph in re.split(r"(?<=\n)(?=\n)", text):
        part.append(paragraph)
        size += len(paragraph.encode("utf-8"))
        if size >= DOCUMENT_BYTES:
            yield "".join(part).strip("\n")
            part, size = [], 0
    if part:
        yield "".join(part).strip("\n")


def _generated() -> Iterator[str]:
    """Yield English and German prose of invented words, then the source code of Python's standard library."""
    random = np.random.default_rng(0)
    for language in _COMMON:
        lexicon = _lexicon(language, random)
        weights = 1 / np.arange(1, len(lexicon) + 1)  # Zipf's law
        size = 0
        while size < PROSE_BYTES // 2:
            drawn = random.choice(lexicon, 100_000, p=weights / weights.sum()).tolist()
            text = "\n\n".join(_paragraphs(drawn, random))
            yield text
            size += len(text.encode("utf-8"))
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.glob("*.py")):
        yield file.read_text(encoding="utf-8", errors="ignore")


def _lexicon(language: str, random: np.random.Generator) -> np.ndarray:
    """Return words, the most frequent first: function words, then invented words."""
    syllables = _SYLLABLES[language].split()
    invented = {"".join(random.choice(syllables, count)) for count in random.integers(2, 5, 60_000).tolist()}
    nouns = (word.capitalize() if language == "de" and len(word) % 2 else word for word in sorted(invented))
    rare = np.array(list(nouns), dtype=object)
    random.shuffle(rare)
    return np.concatenate([np.array(_COMMON[language].split(), dtype=object), rare])


def _paragraphs(words: list[str], random: np.random.Generator) -> Iterator[str]:
    """Yield paragraphs of sentences of the words."""
    start = 0
    while start < len(words):
        sentences = []
        for length in random.integers(6, 25, random.integers(3, 9)).tolist():
            if sentence := " ".join(words[start : start + length]):
                sentences.append(f"{sentence[0].upper()}{sentence[1:]}.")
            start += length
        yield " ".join(sentences)
