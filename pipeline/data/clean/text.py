"""Steps that repair texts: broken encodings, invisible characters, remains of web pages."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

import ftfy
import numpy as np

from pipeline.config.cleaning import BoilerplateStep, NormaliseStep, RepairStep
from pipeline.data.clean.batch import Batch, Step, Verdict, alive_indices
from pipeline.data.words import HIDDEN, LEAD, Words

# UTF-8 decoded as Latin-1 or Windows-1252 is a LEAD followed by the characters that encode 80..BF there.
_CONTINUATIONS = np.array(sorted({*range(0x80, 0xC0), *(ord(bytes([b]).decode("cp1252", "ignore") or "\x80") for b in range(0x80, 0xA0))}))
_ENTITY = re.compile(r"&(?:#[0-9]{2,6}|#x[0-9a-fA-F]{2,5}|[a-zA-Z]{2,8}[0-9]{0,2});")
_FTFY = ftfy.TextFixerConfig(
    unescape_html=True,
    fix_latin_ligatures=False,
    fix_character_width=False,
    uncurl_quotes=False,
    fix_line_breaks=False,
    remove_control_chars=False,
    normalization=None,
    explain=False,
)


def repair(_: RepairStep) -> Step:
    """Repair text decoded with a wrong encoding, and decode HTML entities, with ftfy (Speer 2019, doi:10.5281/zenodo.2591652).

    ftfy takes a second for 3 MB. It runs only on documents with adjacent characters that look like UTF-8 decoded as Latin-1 or
    Windows-1252, or with an HTML entity.
    """

    def step(batch: Batch) -> Iterable[Verdict]:
        garbled = batch.mark(_garbled)
        for index in alive_indices(batch, garbled | np.array(["&" in text for text in batch.texts])):
            text = batch.texts[index]
            if garbled[index] or _ENTITY.search(text):
                repaired = ftfy.fix_text(text, _FTFY)
                if repaired != text:
                    yield Verdict(index, "encoding or entities repaired", repaired)

    return step


def _garbled(words: Words) -> np.ndarray:
    """Which texts contain adjacent characters that look like UTF-8 decoded with another encoding: (texts,) bool."""
    codes = words.codes
    lead = np.flatnonzero(words.kinds & LEAD)
    # As in UTF-8, the first byte determines the number of continuation bytes: 1, 2 from E0 on, 3 from F0 on.
    for number, first in enumerate((0xC2, 0xE0, 0xF0), start=1):
        following = codes[np.minimum(lead + number, len(codes) - 1)]
        lead = lead[np.isin(following, _CONTINUATIONS) | (codes[lead] < first)]
    return words.sum_texts(lead) > 0


_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u200b\u2060\ufeff]")
_BLANK_LINES = re.compile(r"\n{4,}")


def normalise(_: NormaliseStep) -> Step:
    """Normalize to NFC and plain newlines; remove invisible characters, trailing whitespace, and more than two blank lines in a row."""

    def step(batch: Batch) -> Iterable[Verdict]:
        hidden, trailing_space, blank = batch.mark(_hidden), batch.mark(_trailing_space), batch.mark(_blank_lines)
        decomposed = np.array([not unicodedata.is_normalized("NFC", text) for text in batch.texts])
        for index in alive_indices(batch, hidden | trailing_space | blank | decomposed):
            before = text = batch.texts[index]
            if hidden[index]:
                text = _HIDDEN.sub("", text.replace("\r\n", "\n").replace("\r", "\n").replace("\u2028", "\n"))
            text = unicodedata.normalize("NFC", text)
            if hidden[index] or trailing_space[index]:
                text = "\n".join([line.rstrip(" \t\u00a0") for line in text.split("\n")])
            if "\n\n\n\n" in text:
                text = _BLANK_LINES.sub("\n\n\n", text)
            if text != before:
                yield Verdict(index, "characters and whitespace normalized", text)

    return step


def _hidden(words: Words) -> np.ndarray:
    """Which texts contain characters to remove, or line separators other than a plain newline: (texts,) bool."""
    return words.sum_texts(np.flatnonzero(words.kinds & HIDDEN)) > 0


def _trailing_space(words: Words) -> np.ndarray:
    """Which texts have whitespace before a newline: (texts,) bool."""
    ends = words.newlines[words.newlines > 0]
    before = words.codes[ends - 1]
    return words.sum_texts(ends[(before == ord(" ")) | (before == ord("\t")) | (before == 0xA0)]) > 0


def _blank_lines(words: Words) -> np.ndarray:
    """Which texts have three blank lines in a row: (texts,) bool."""
    newlines = words.newlines
    return words.sum_texts(newlines[:-3][newlines[3:] - newlines[:-3] == 3]) > 0


_TAG = re.compile(
    r"</?(?:a|abbr|b|blockquote|br|center|code|dd|div|dl|dt|em|font|form|h[1-6]|hr|i|iframe|img|input|li|link|meta|nobr|ol|option|p|pre|s|script"
    r"|section|small|span|strong|style|sub|sup|table|tbody|td|th|thead|tr|tt|u|ul)\b[^<>]{0,400}>",
    re.IGNORECASE,
)
_FRONT_MATTER = re.compile(r"\A---\n(?:[\w-]+:.*\n|[ \t].*\n|\n)+---\n")


def boilerplate(knobs: BoilerplateStep) -> Step:
    """Remove HTML tags, YAML front matter of Markdown, and lines with a phrase of `clean.boilerplate.phrases`.

    The phrase rule is C4's: Raffel et al. 2020, section 2.2.
    """
    phrases = [phrase.lower() for phrase in knobs.phrases]

    def without_phrases(text: str) -> str:
        lower = text.lower()
        if not any(map(lower.__contains__, phrases)):
            return text
        return "\n".join(line for line in text.split("\n") if not any(phrase in line.lower() for phrase in phrases))

    def step(batch: Batch) -> Iterable[Verdict]:
        for index in alive_indices(batch, np.ones(len(batch.texts), dtype=bool)):
            before = text = batch.texts[index]
            if text.startswith("---\n"):
                text = _FRONT_MATTER.sub("", text)
            if "<" in text:
                text = _TAG.sub("", text)
            text = without_phrases(text)
            if text != before:
                yield Verdict(index, "markup or boilerplate removed", text)

    return step
