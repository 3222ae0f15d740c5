"""Which language a text is in, by CLD2 (https://github.com/CLD2Owners/cld2); its tables are part of the package."""

from __future__ import annotations

import re

import pycld2

SAMPLE_CHARACTERS = (600, 10_000)
"""What is looked at, from the middle of a text: its edges are headings and imprints. CLD2's time grows with the length; the larger sample
is for the few texts, such as tables, of whose smaller one less than CLEAR is in one language."""

CLEAR = 0.8
UNKNOWN = ("un", 0.0)
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")  # CLD2 refuses them


def identify(text: str) -> tuple[str, float]:
    """The language with the largest part of a text: its ISO 639 code, "un" when it cannot be told, and that part (0 to 1)."""
    found = UNKNOWN
    for size in SAMPLE_CHARACTERS:
        start = max(0, (len(text) - size) // 2)
        found = _largest(text[start : start + size])
        if found[1] >= CLEAR or len(text) <= size:
            break
    return found


def _largest(sample: str) -> tuple[str, float]:
    """CLD2's first answer."""
    try:
        _, _, found = pycld2.detect(sample)
    except pycld2.error:
        try:
            _, _, found = pycld2.detect(_UNPRINTABLE.sub(" ", sample))
        except pycld2.error:  # characters outside the planes that it knows
            return UNKNOWN
    _, code, percent, _ = found[0]
    return code, percent / 100
