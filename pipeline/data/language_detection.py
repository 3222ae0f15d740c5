"""Language identification by CLD2 (https://github.com/CLD2Owners/cld2); its tables are part of the package."""

from __future__ import annotations

import re

import pycld2

from pipeline.common import languages

SAMPLE_CHARACTERS = (600, 10_000)
"""Sample sizes, taken from the middle of a text because its ends are often headings and imprints. CLD2's time grows with the length; the
larger sample is used only for the few texts, such as tables, where less than CLEAR of the smaller sample is in one language."""

CLEAR = 0.8
UNKNOWN = (languages.UNKNOWN, 0.0)
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")  # CLD2 refuses them


def identify(text: str) -> tuple[str, float]:
    """Identify the main language of a text.

    Returns:
        (label as in common/languages.py, "und" if unknown; the share of the text in that language, 0 to 1).
    """
    detected = UNKNOWN
    for size in SAMPLE_CHARACTERS:
        start = max(0, (len(text) - size) // 2)
        detected = _largest(text[start : start + size])
        if detected[1] >= CLEAR or len(text) <= size:
            break
    return detected


def _largest(sample: str) -> tuple[str, float]:
    """The first result of CLD2."""
    try:
        _, _, detected = pycld2.detect(sample)
    except pycld2.error:
        try:
            _, _, detected = pycld2.detect(_UNPRINTABLE.sub(" ", sample))
        except pycld2.error:  # characters outside the planes that CLD2 supports
            return UNKNOWN
    _, code, percent, _ = detected[0]
    return languages.normalized(code), percent / 100
