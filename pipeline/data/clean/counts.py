"""What the rules of Gopher and FineWeb count in texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from pipeline.data.clean.document_batch import DocumentBatch
from pipeline.data.clean.repetition import repeated
from pipeline.data.words import IDEOGRAPH, LETTER, SENTENCE_END, SPACE, Lookup, Spans, Words

STOP_WORDS: dict[str, str] = {
    "en": "the be to of and that have with is was for it in he his as on",
    "de": "der die das und in den von zu mit sich des auf für ist im dem nicht ein eine als auch es an",
    "fr": "le la les de des et un une du que qui dans pour pas est au en sur il ce",
    "es": "el la los las de que y en un una por con para se del es al lo no su",
    "it": "il la di che e un una in del per non si con le della è da i al dei",
    "pt": "o a os as de que e um uma em do da para com não se por no na dos",
    "nl": "de het een van en in is dat op te zijn met voor niet die aan er om ook als",
    "pl": "i w na z do się nie że to jest o jak po przez od dla są ale oraz za",
    "cs": "a v na se je že s z do o to i pro jako za ale by od po který",
    "sk": "a v na sa je že s z do o to aj pre ako za ale by od po ktorý",
    "sv": "och i att det som en på är av för med till den inte om ett de har var jag",
    "da": "og i at det er en på til af for med den der ikke de som et har var jeg",
    "no": "og i det er en på til av for med som at den ikke de et har var jeg om",
    "fi": "ja on ei että se oli hän mutta ovat joka kun niin myös tai kuin ole sen olla jos mitä",
    "et": "ja on ei et see oli ta aga kes mis ka kui või oma siis nagu ning seda pole mida",
    "hu": "a az és hogy nem is egy ez van de meg csak volt mint ha már még el azt ki",
    "ro": "și de la în a o un cu pe care nu este din să mai pentru se că ca ce ши де ла ын а ку каре ну есте дин сэ май пентру кэ че",
    "bg": "и на да се в за не от с че е са по но като до ще как това към",
    "hr": "i u je se na da su za od s ne što kao ili koji o iz ali bi po",
    "sl": "in je v na se da so za z ne ki pa kot ali tudi od po iz bi če",
    "lt": "ir kad į yra su iš o tai kaip bet buvo už jis apie ar nuo nes tik dar po",
    "lv": "un ir ka ar no par uz kas bet to arī kā tas vai tika nav lai pie pēc jau",
    "el": "και το να του η της με για που την τα στο από είναι δεν τον ο οι των θα",
    "ru": "и в не на что с он как это по но из у за от так же для то все",
    "uk": "і в не на що з та як це до у за від але для по так він його й",
    "tr": "ve bir bu için da de ile çok ne daha olarak gibi kadar olan var en ama her ki o",
    "ga": "an na a agus i ar ag is go le do sé ní bhí ach sin mé tá leis",
    "mt": "li ta u il l f għal ma minn din dan kien jew fuq hija bil kull dawn huwa biex",
    "ca": "el la els les de que i en un una per amb no es del al a és com més",
    "eu": "eta da ez du bat ere zen dira baina izan hori dute dela egin beste ditu edo zuen bere hau",
    "gl": "o a os as de que e un unha en do da para con non se por no na dos",
}
"""Label of a language (common/languages.py) -> words, separated by spaces; Romanian in both scripts."""


Counts = dict[str, np.ndarray]
"""Name -> (texts,)."""

BULLETS = np.array([ord(character) for character in "-*•‣▪●○–·・"])
_ELLIPSIS = ord("…")
_SPANS = 1 << 16
"""Spans whose intermediate results are in memory at once."""
_QUOTES = np.array([ord(character) for character in "…”’“」』"])


def _per_text(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sum the values of every text i, values[offsets[i]:offsets[i + 1]]: (texts,) int64."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return np.diff(sums[offsets])


def sentences(words: Words) -> np.ndarray:
    """The number of sentences of every text: (texts,) int64."""
    return words.sum_texts(_sentence_ends(words))


def fineweb(batch: DocumentBatch, short_line: np.ndarray) -> Counts:
    """What FineWeb's rules are about, for every text of a batch; `short_line` is the width of the widest short line, (texts,)."""
    words, lines = batch.words, batch.words.lines
    return {
        "words": np.diff(words.offsets),
        "newlines": words.sum_texts(words.newlines) - 1,
        "lines": np.diff(lines.offsets),
        "closed": _per_text(words.kinds[np.maximum(lines.ends - 1, 0)] & SENTENCE_END != 0, lines.offsets),
        "short": _per_text(_widths(words, lines) <= short_line[lines.texts], lines.offsets),
        "repeated_characters": repeated(words, lines)[1],
    }


def gopher(batch: DocumentBatch) -> Counts:
    """What Gopher's rules are about, for every text of a batch."""
    words, lines, spans = batch.words, batch.words.lines, batch.words.spans
    ends, count = ellipses(words), np.diff(words.offsets)
    spaced, characters, lettered = count, _per_text(spans.lengths, words.offsets), count
    if (words.kinds & IDEOGRAPH).any():
        separate = words.kinds[spans.starts] & IDEOGRAPH == 0
        spaced, characters = _per_text(separate, words.offsets), _per_text(spans.lengths * separate, words.offsets)
    if not (2 * spaced >= count).all():
        lettered = _per_text(with_letter(words, spans), words.offsets)
    stop_words, has_list = _stop_words(words, batch.languages)
    return {
        "words": count,
        "spaced": spaced,
        "spaced_characters": characters,
        "lettered_words": lettered,
        "hashes": words.sum_texts(_hash_signs(words)),
        "ellipses": words.sum_texts(ends),
        "stop_words": stop_words,
        "has_stop_words": has_list,
        "lines": np.diff(lines.offsets),
        "bullets": _per_text(np.isin(words.codes[lines.starts], BULLETS), lines.offsets),
        "open_lines": _per_text(np.isin(lines.ends - 1, ends), lines.offsets),
        "lettered_tokens": _per_text(with_letter(words, words.tokens), words.tokens.offsets),
        "tokens": np.diff(words.tokens.offsets),
    }


def _hash_signs(words: Words) -> np.ndarray:
    """Positions of # signs, except those that begin a line: headings, comments and directives."""
    signs = np.flatnonzero(words.codes == ord("#"))
    if not len(signs):
        return signs
    first = np.diff(signs, prepend=-2) > 1  # the first sign of each run
    begins = (signs == 0) | (words.codes[signs - 1] == ord("\n"))
    return signs[~begins[first][np.cumsum(first) - 1]]


def ellipses(words: Words) -> np.ndarray:
    """The last position of every ellipsis: a run of at least three dots, or of the single character."""
    dot, single = words.codes == ord("."), words.codes == _ELLIPSIS
    three = np.flatnonzero(dot[:-3] & dot[1:-2] & dot[2:-1] & ~dot[3:]) + 2  # the last character is a newline
    ends = np.flatnonzero(single[:-1] & ~single[1:])
    return np.sort(np.concatenate([three, ends])) if len(three) and len(ends) else (three if len(three) else ends)


def with_letter(words: Words, spans: Spans) -> np.ndarray:
    """Which spans have a letter: (spans,) bool."""
    matched = np.empty(len(spans), dtype=bool)
    for first in range(0, len(spans), _SPANS):
        starts, ends = spans.starts[first : first + _SPANS], spans.ends[first : first + _SPANS]
        base = starts[0]
        letters = np.zeros(ends[-1] - base + 1, dtype=np.uint32)
        np.cumsum(words.kinds[base : ends[-1]] & LETTER, out=letters[1:], dtype=np.uint32)  # LETTER is 1
        matched[first : first + _SPANS] = letters[ends - base] > letters[starts - base]
    return matched


def _widths(words: Words, spans: Spans) -> np.ndarray:
    """(spans,) widths in columns: ideographs, Kana and Hangul syllables are two columns wide."""
    wide = (words.codes >= 0x2E80) & (words.codes <= 0xFFE6)
    if not wide.any():
        return spans.lengths
    sums = np.concatenate([[0], np.cumsum(wide)])
    return spans.lengths + sums[spans.ends] - sums[spans.starts]


def _sentence_ends(words: Words) -> np.ndarray:
    """Positions of sentence ends: of . ! ? only where whitespace, a quotation mark or the end of the text follows."""
    codes, kinds = words.codes, words.kinds
    spaced = (codes == ord(".")) | (codes == ord("!")) | (codes == ord("?"))
    closing = np.flatnonzero(spaced[:-1] & ((kinds[1:] & (SPACE | SENTENCE_END)) != 0))
    others = np.flatnonzero((kinds & SENTENCE_END != 0) & (codes > 0x500))
    others = others[~np.isin(codes[others], _QUOTES)]
    return np.sort(np.concatenate([closing, others])) if len(others) else closing


def _stop_words(words: Words, of_language: Sequence[tuple[str, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return for every text (the number of its stop words, whether its language has a list)."""
    known, lists, languages = _stop_word_table()
    number = np.array([languages.get(code, -1) for code, _ in of_language])
    is_known, which = known.find(words.hashes)
    texts = words.spans.texts[is_known]
    is_stop_word = lists[which, number[texts]] & (number[texts] >= 0)
    return np.bincount(texts[is_stop_word], minlength=len(number)), number >= 0


@cache
def _stop_word_table() -> tuple[Lookup, np.ndarray, dict[str, int]]:
    """Return all stop words, a (words, languages) bool table of membership, and the index of every language."""
    split = {code: listed.split() for code, listed in STOP_WORDS.items()}
    every = sorted({word for listed in split.values() for word in listed})
    hashes = Words([" ".join(every)]).hashes
    assert len(hashes) == len(every), "each stop word must be a single word"
    belongs = np.array([[word in listed for listed in split.values()] for word in every])
    return Lookup(hashes, bits=16), belongs[np.argsort(hashes)], {code: number for number, code in enumerate(split)}
