"""Steps that repair texts: broken encodings, invisible characters, remains of web pages."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

import ftfy
import numpy as np

from pipeline.config.cleaning import BoilerplateStep, NormaliseStep, RepairStep
from pipeline.data.clean import code_detection, markup
from pipeline.data.clean.document_batch import DocumentBatch, Step, Verdict, alive_indices, is_large, line_slices
from pipeline.data.words import HIDDEN, LEAD, Words, is_sentence_end

# UTF-8 decoded as Latin-1 or Windows-1252 is a LEAD followed by the characters that encode 80..BF there.
_CONTINUATIONS = np.array(sorted({*range(0x80, 0xC0), *(ord(bytes([b]).decode("cp1252", "ignore") or "\x80") for b in range(0x80, 0xA0))}))
_ENTITY = re.compile(r"&#?[0-9A-Za-z]{2,24};")
_TYPOGRAPHY = "\u00a0§–—€„“”‚‘’…"
_ABOUT = re.compile(r"\b(?:entit(?:y|ies|ät|äten|és?|à|dad|dades)|entidad\w*|character references?|zeichenreferenz\w*)\b", re.IGNORECASE)
_FTFY = ftfy.TextFixerConfig(
    unescape_html=False,
    remove_terminal_escapes=False,
    fix_latin_ligatures=False,
    fix_character_width=False,
    uncurl_quotes=False,
    fix_line_breaks=False,
    remove_control_chars=False,
    normalization=None,
    explain=False,
)


def repair(_: RepairStep) -> Step:
    """Repair text decoded with a wrong encoding, and decode HTML entities outside code once, with ftfy (Speer, doi:10.5281/zenodo.2591652).

    ftfy takes a second for 3 MB. It runs only on documents with C1 control characters, or with adjacent characters that look like UTF-8
    decoded as Latin-1 or Windows-1252.
    """

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        (garbled,) = batch.mark(_garbled)
        for index in alive_indices(batch, garbled | np.array(["&" in text for text in batch.texts])):
            text = repaired = batch.texts[index]
            if garbled[index]:
                repaired = ""
                for start, end in line_slices(text):
                    repaired += ftfy.fix_text(text[start:end], _FTFY)
            left: list[str] = []
            if "&" in repaired and _ENTITY.search(repaired):
                repaired = _decoded(repaired, left)
            if repaired != text:
                yield Verdict(index, "encoding or entities repaired" + (", some entities left" if left else ""), repaired)
            elif left:
                yield Verdict(index, "entities left", text)

    return step


def _decoded(text: str, left: list[str]) -> str:
    """Decode HTML entities once, and add those that stay to `left`.

    They stay in fenced and inline code and in source files. In indented lines, which are code or lists, letters and typography are decoded.
    A text with a literal < was not escaped as a whole: entities that stand for markup there, or that a sentence names, are its subject.
    """
    spans, is_literal = code_detection.protected(text), "<" in text
    code = spans if spans == [(0, len(text))] else code_detection.marked(text)

    def decoded(match: re.Match[str]) -> str:
        character, (start, end) = str(ftfy.fixes.unescape_html(match[0])), match.span()
        if character == match[0]:
            return character
        quotes = text[start - 1 : start] + text[end : end + 1]
        is_escape = character in ("<", ">") or (character == "&" and _ENTITY.match("&" + text[end : end + 12]))
        is_named = (quotes in markup.ENCLOSED and quotes != "()") or _ABOUT.search(text, max(0, start - 40), end + 40)
        is_indented = code_detection.contains(spans, start) and not (character.isalpha() or character in _TYPOGRAPHY)
        if is_indented or code_detection.contains(code, start) or (is_literal and (is_escape or is_named)):
            left.append(match[0])
            return match[0]
        return character

    return _ENTITY.sub(decoded, text)


def _garbled(words: Words) -> np.ndarray:
    """Which texts contain adjacent characters that look like UTF-8 decoded with another encoding: (texts,) bool."""
    codes = words.codes
    lead = np.flatnonzero(words.kinds & LEAD)
    # As in UTF-8, the first byte determines the number of continuation bytes: 1, 2 from E0 on, 3 from F0 on.
    for number, first in enumerate((0xC2, 0xE0, 0xF0), start=1):
        following = codes[np.minimum(lead + number, len(codes) - 1)]
        lead = lead[np.isin(following, _CONTINUATIONS) | (codes[lead] < first)]
    control = np.flatnonzero((words.kinds & HIDDEN != 0) & (codes >= 0x80) & (codes < 0xA0) & (codes != 0x85))
    return (words.sum_texts(lead) > 0) | (words.sum_texts(control) > 0)


# Bold and underline as overstrikes, and escape sequences of terminals.
_TERMINAL = re.compile("[^\n]\x08|\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b\n]*(?:\x07|\x1b\\\\))")
_LINE_BREAK = re.compile("\r\n|[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
# Thai, Lao, Tibetan, Burmese, Khmer and the other alphabets without spaces (words.py): the zero-width space separates words.
_NO_SPACES = "[\u0e00-\u109f\u1780-\u17ff\u1950-\u19df\u1a00-\u1aaf\u1b00-\u1b7f\u1bc0-\u1bff\ua980-\uaadf]"
_HIDDEN = re.compile(f"[\x00-\x08\x0e-\x1f\x7f-\x9f\u00ad\u2060\ufeff]|(?<!{_NO_SPACES})\u200b|\u200b(?!{_NO_SPACES})")
_BLANK_LINES = re.compile(r"\n{4,}")


def normalise(_: NormaliseStep) -> Step:
    """Normalize to NFC and plain newlines; remove invisible characters, trailing whitespace, and more than two blank lines in a row."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        hidden, trailing_space, blank = batch.mark(_hidden, _trailing_space, _blank_lines)
        decomposed = np.array([not all(unicodedata.is_normalized("NFC", piece) for piece in _pieces(text)) for text in batch.texts])
        for index in alive_indices(batch, hidden | trailing_space | blank | decomposed):
            before, text, newlines = batch.texts[index], "", ""
            for piece in _pieces(before):
                part = newlines + _normalised(piece, hidden=bool(hidden[index]), trailing_space=bool(trailing_space[index]))
                if "\n\n\n\n" in part:
                    part = _BLANK_LINES.sub("\n\n\n", part)
                rest = part.rstrip("\n")
                newlines = part[len(rest) :]  # more may follow
                text += rest  # in place
            text += newlines
            if text != before:
                yield Verdict(index, "characters and whitespace normalized", text)

    return step


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of whole lines; a small one is a single piece."""
    if not is_large(text):
        yield text
        return
    for start, end in line_slices(text):
        yield text[start:end]


def _normalised(text: str, *, hidden: bool, trailing_space: bool) -> str:
    """Normalize whole lines, except for blank lines."""
    if hidden:
        text = _HIDDEN.sub("", _LINE_BREAK.sub("\n", _TERMINAL.sub("", text)))
    text = unicodedata.normalize("NFC", text)
    if hidden or trailing_space:
        text = "\n".join([line.rstrip(" \t\u00a0") for line in text.split("\n")])
    return text


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


_WRAPPED = 50
"""Minimum characters of a line whose sentence may continue on the next one."""


def boilerplate(knobs: BoilerplateStep) -> Step:
    """Remove HTML tags and YAML front matter (see markup.py), and lines that are notices with a phrase of `clean.boilerplate.phrases`.

    The phrase rule is C4's (Raffel et al. 2020, section 2.2), restricted to short lines that stand for themselves and are not code.
    """
    phrases = [phrase.lower() for phrase in knobs.phrases]

    def has_phrase(text: str) -> bool:
        lower = text.lower()
        return any(map(lower.__contains__, phrases))

    def without_phrases(text: str) -> str:
        pieces = list(line_slices(text))
        flagged = [has_phrase(text[start:end]) for start, end in pieces]
        if not any(flagged):
            return text
        spans, kept = code_detection.protected(text), ""
        for (start, end), searched in zip(pieces, flagged, strict=True):
            if not searched:
                kept += text[start:end]
                continue
            stop = end - 1 if text[end - 1] == "\n" else end
            lines = [_line_before(text, start), *text[start:stop].split("\n"), _line_after(text, end)]
            for number, line in enumerate(lines[1:-1], start=1):
                notice = (
                    len(line) <= knobs.longest_line
                    and has_phrase(line)
                    and not code_detection.contains(spans, start + len(line) - len(line.lstrip()))
                )
                if not (notice and _stands_alone(lines, number)):
                    kept += f"{line}\n"
                start += len(line) + 1
        return kept if text.endswith("\n") else kept.removesuffix("\n")

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        for index in alive_indices(batch, np.ones(len(batch.texts), dtype=bool)):
            text = batch.texts[index]
            changed = without_phrases(markup.without(text))
            if changed != text:
                yield Verdict(index, "markup or boilerplate removed", changed)

    return step


def _line_before(text: str, start: int) -> str:
    """The line before the one that begins at a position; empty if it is the first."""
    return text[text.rfind("\n", 0, start - 1) + 1 : start - 1] if start else ""


def _line_after(text: str, start: int) -> str:
    """The line that begins at a position; empty at the end."""
    end = text.find("\n", start)
    return text[start : None if end < 0 else end]


def _stands_alone(lines: list[str], number: int) -> bool:
    """Whether a line is not a part of a paragraph that is wrapped into several lines."""
    line = lines[number].strip()
    before = lines[number - 1].strip() if number else ""
    after = lines[number + 1].strip() if number + 1 < len(lines) else ""
    if before and (line[0].islower() or _continues(before)):
        return False
    return not (after and (after[0].islower() or _continues(line)))


def _continues(line: str) -> bool:
    """Whether a line is long and does not end a sentence."""
    return len(line) >= _WRAPPED and not is_sentence_end(line[-1])
