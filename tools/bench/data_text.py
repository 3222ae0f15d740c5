"""The text of tools/bench_data: read from files or made up, cut into documents, and grown to any size without saying a thing twice."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DOCUMENT_BYTES = 4000
"""A document ends with the paragraph in which it reaches this size: about the length of a web page."""

FILES = 8
"""Files of equal size that the text is written to, so that two workers of any peer have as much to do as each other."""

REPLACED, MISSPELT = 0.2, 0.02
"""Shares of the words that another word of the document replaces in a further copy of it, and that become a new word.

Measured on 28 MB of English and German books and laws grown to 400 MB: runs of five words have a Jaccard similarity of 0.17 to those of the
original (0.34 at most of 300 copies), so there are no near duplicates, and there are 3.6 times as many different words, about as in that
much more text (Heaps' law), so that caches of words gain nothing. Without the second share the words would stay the same.
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
    """Documents in `files` of JSON lines, each {"id", "text"}; `size` is UTF-8 bytes of their texts."""

    files: list[Path]
    size: int
    documents: int

    @property
    def folder(self) -> Path:
        """Where the files are, and nothing else."""
        return self.files[0].parent


def source(files: Sequence[Path]) -> list[str]:
    """The documents to begin with, in a random order: of files of JSON lines, or without any the standard library's sources and prose."""
    whole = (json.loads(line)["text"] for file in files for line in file.open(encoding="utf-8")) if files else _made_up()
    documents = [document for text in whole for document in _cut(text) if document.strip()]
    np.random.default_rng(0).shuffle(documents)
    return documents


def write(documents: Sequence[str], size: int, folder: Path) -> Text:
    """Write about `size` bytes of text to a new folder: the documents, or as many of them as needed, or changed copies of them too."""
    folder.mkdir(parents=True)
    files = [folder / f"part-{number}.jsonl" for number in range(FILES)]
    handles = [file.open("w", encoding="utf-8") for file in files]
    written = count = 0
    for text in _endless(documents):
        handles[count % FILES].write(json.dumps({"id": str(count), "text": text}, ensure_ascii=False) + "\n")
        written += len(text.encode("utf-8"))
        count += 1
        if written >= size:
            break
    for handle in handles:
        handle.close()
    return Text(files, written, count)


def _endless(documents: Sequence[str]) -> Iterator[str]:
    """The documents, then copies that are changed more than near duplicates are."""
    yield from documents
    random = np.random.default_rng(0)
    while True:
        for text in documents:
            yield _changed(text, random)


def _changed(text: str, random: np.random.Generator) -> str:
    """A copy with other words here and there."""
    pieces = re.split(r"(\s+)", text)  # words at even places, the space between them at odd ones
    chance = random.random((len(pieces) + 1) // 2)
    replaced = np.flatnonzero(chance < REPLACED)
    for place, other in zip(replaced.tolist(), random.integers(len(chance), size=len(replaced)).tolist(), strict=True):
        pieces[2 * place] = pieces[2 * other]
    misspelt = np.flatnonzero(chance > 1 - MISSPELT)
    for place, letters in zip(misspelt.tolist(), random.integers(ord("a"), ord("z") + 1, (len(misspelt), 2)).tolist(), strict=True):
        word = pieces[2 * place]
        pieces[2 * place] = word[: len(word) // 2] + "".join(map(chr, letters)) + word[len(word) // 2 :]
    return "".join(pieces)


def _cut(text: str) -> Iterator[str]:
    """Documents of about DOCUMENT_BYTES, whole paragraphs each."""
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


def _made_up() -> Iterator[str]:
    """English and German prose of invented words, and the sources of Python's standard library."""
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
    """Words, the most frequent first: those that hold sentences together, then invented ones."""
    syllables = _SYLLABLES[language].split()
    invented = {"".join(random.choice(syllables, count)) for count in random.integers(2, 5, 60_000).tolist()}
    nouns = (word.capitalize() if language == "de" and len(word) % 2 else word for word in sorted(invented))
    rare = np.array(list(nouns), dtype=object)
    random.shuffle(rare)
    return np.concatenate([np.array(_COMMON[language].split(), dtype=object), rare])


def _paragraphs(words: list[str], random: np.random.Generator) -> Iterator[str]:
    """The words as sentences, and these as paragraphs."""
    start = 0
    while start < len(words):
        sentences = []
        for length in random.integers(6, 25, random.integers(3, 9)).tolist():
            if sentence := " ".join(words[start : start + length]):
                sentences.append(f"{sentence[0].upper()}{sentence[1:]}.")
            start += length
        yield " ".join(sentences)
