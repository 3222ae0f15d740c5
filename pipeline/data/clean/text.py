"""Steps that mend texts: broken encodings, odd characters, remains of web pages."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

import ftfy
import numpy as np

from pipeline.config.cleaning import BoilerplateStep, NormaliseStep, RepairStep
from pipeline.data.clean.batch import Batch, Step, Verdict, where
from pipeline.data.words import HIDDEN, LEAD, Words

# UTF-8 that was read as Latin-1 or Windows-1252 is a LEAD followed by characters that stand for 80..BF there.
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
    """Text that went through the wrong encoding, and HTML's names of characters, by ftfy (Speer 2019, doi:10.5281/zenodo.2591652).

    ftfy takes a second for 3 MB. It sees only the documents in which two neighbouring characters look like UTF-8 read as
    Latin-1 or Windows-1252, or in which an entity stands.
    """

    def step(batch: Batch) -> Iterable[Verdict]:
        garbled = batch.mark(_garbled)
        for index in where(batch, garbled | np.array(["&" in text for text in batch.texts])):
            text = batch.texts[index]
            if garbled[index] or _ENTITY.search(text):
                mended = ftfy.fix_text(text, _FTFY)
                if mended != text:
                    yield Verdict(index, "encoding or entities mended", mended)

    return step


def _garbled(words: Words) -> np.ndarray:
    """Which texts hold neighbours that look like UTF-8 read as something else."""
    codes = words.codes
    lead = np.flatnonzero(words.kinds & LEAD)
    # As in UTF-8, the first byte tells how many follow: 1, 2 from E0 on, 3 from F0 on.
    for number, first in enumerate((0xC2, 0xE0, 0xF0), start=1):
        following = codes[np.minimum(lead + number, len(codes) - 1)]
        lead = lead[np.isin(following, _CONTINUATIONS) | (codes[lead] < first)]
    return words.sum_texts(lead) > 0


_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u200b\u2060\ufeff]")
_BLANK_LINES = re.compile(r"\n{4,}")


def normalise(_: NormaliseStep) -> Step:
    """Unicode's composed form (NFC), plain newlines, no invisible characters, no space at line ends, at most two blank lines in a row."""

    def step(batch: Batch) -> Iterable[Verdict]:
        hidden, open_ends, blank = batch.mark(_hidden), batch.mark(_open_ends), batch.mark(_blank_lines)
        decomposed = np.array([not unicodedata.is_normalized("NFC", text) for text in batch.texts])
        for index in where(batch, hidden | open_ends | blank | decomposed):
            before = text = batch.texts[index]
            if hidden[index]:
                text = _HIDDEN.sub("", text.replace("\r\n", "\n").replace("\r", "\n").replace("\u2028", "\n"))
            text = unicodedata.normalize("NFC", text)
            if hidden[index] or open_ends[index]:
                text = "\n".join([line.rstrip(" \t\u00a0") for line in text.split("\n")])
            if "\n\n\n\n" in text:
                text = _BLANK_LINES.sub("\n\n\n", text)
            if text != before:
                yield Verdict(index, "characters and space normalised", text)

    return step


def _hidden(words: Words) -> np.ndarray:
    """Which texts hold characters that go, or newlines other than the plain one."""
    return words.sum_texts(np.flatnonzero(words.kinds & HIDDEN)) > 0


def _open_ends(words: Words) -> np.ndarray:
    """Which texts have space before a newline."""
    ends = words.newlines[words.newlines > 0]
    before = words.codes[ends - 1]
    return words.sum_texts(ends[(before == ord(" ")) | (before == ord("\t")) | (before == 0xA0)]) > 0


def _blank_lines(words: Words) -> np.ndarray:
    """Which texts have three blank lines in a row."""
    newlines = words.newlines
    return words.sum_texts(newlines[:-3][newlines[3:] - newlines[:-3] == 3]) > 0


_TAG = re.compile(
    r"</?(?:a|abbr|b|blockquote|br|center|code|dd|div|dl|dt|em|font|form|h[1-6]|hr|i|iframe|img|input|li|link|meta|nobr|ol|option|p|pre|s|script"
    r"|section|small|span|strong|style|sub|sup|table|tbody|td|th|thead|tr|tt|u|ul)\b[^<>]{0,400}>",
    re.IGNORECASE,
)
_FRONT_MATTER = re.compile(r"\A---\n(?:[\w-]+:.*\n|[ \t].*\n|\n)+---\n")


def boilerplate(knobs: BoilerplateStep) -> Step:
    """Remains of web pages: HTML tags, YAML heads of Markdown, and lines with the phrases of `clean.boilerplate.phrases`.

    The last as C4 does: Raffel et al. 2020, section 2.2.
    """
    phrases = [phrase.lower() for phrase in knobs.phrases]

    def without_phrases(text: str) -> str:
        lower = text.lower()
        if not any(map(lower.__contains__, phrases)):
            return text
        return "\n".join(line for line in text.split("\n") if not any(phrase in line.lower() for phrase in phrases))

    def step(batch: Batch) -> Iterable[Verdict]:
        for index in where(batch, np.ones(len(batch.texts), dtype=bool)):
            before = text = batch.texts[index]
            if text.startswith("---\n"):
                text = _FRONT_MATTER.sub("", text)
            if "<" in text:
                text = _TAG.sub("", text)
            text = without_phrases(text)
            if text != before:
                yield Verdict(index, "markup or boilerplate removed", text)

    return step
