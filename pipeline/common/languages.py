"""Codes of languages: every spelling of ISO 639 and BCP 47 becomes the label that the detector's result has in reports and shards."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from pipeline.common.language_codes import SCRIPTS, TABLE

T = TypeVar("T")

UNKNOWN = "und"
"""The label of texts whose language is not known (BCP 47: undetermined)."""

_ROWS = [[part.strip() for part in f"{line} |".split("|")] for line in TABLE.strip().splitlines()]
_NAMES = {name: label for name, label, *_ in _ROWS}
_SCRIPTS = {label: set(scripts.split()) for _, label, scripts, *_ in _ROWS}
_LABELS = {code: label for _, label, _, others, *_ in _ROWS for code in (label, *others.split())}

_MACROLANGUAGES = {**dict.fromkeys(("no", "nor"), ("no", "nn")), **dict.fromkeys(("sh", "hbs"), ("bs", "hr", "sr"))}
_CHINESE = ("zh", "zh-Hant")
_TRADITIONAL = ("TW", "HK", "MO")
_CODE = re.compile(r"([a-z]{2,3})(?:[-_]([a-z]{4}))?(?:[-_]([a-z]{2}|[0-9]{3}))?", re.IGNORECASE)
#: Codes of countries that are often written for a language, and languages for which the detector knows a near one only.
_MEANT = {"cn": "zh", "jp": "ja", "kr": "ko", "gr": "el", "cz": "cs", "dk": "da", "ua": "uk", "se": "sv", "vn": "vi", "ir": "fa"}
_MEANT |= {"il": "he", "yue": "zh-Hant", "wuu": "zh", "kmr": "ku", "cnr": "sr", "false": "no"}  # YAML reads an unquoted no as false


@cache
def label(code: str) -> str | None:
    """The label of one language: its ISO 639-1 code, else its ISO 639-3 code, with the script where the detector separates scripts.

    Args:
        code: ISO 639-1, -2 or -3, with BCP 47's script and region if any, or a code of the detector. Case does not matter. The region
            distinguishes Traditional Chinese only.

    Returns:
        None if the detector does not know the language, or not in that script.
    """
    parsed = _CODE.fullmatch(code)
    if not parsed:
        return None
    language, script, region = parsed[1].lower(), (parsed[2] or "").capitalize(), (parsed[3] or "").upper()
    if language in ("un", "und", "xx"):
        return _undetermined(script)
    found = _LABELS.get(language)
    if found == "zh" and (script == "Hant" or (not script and region in _TRADITIONAL)):
        return "zh-Hant"
    if found is None or (script and script not in _SCRIPTS[found] and (found, script) != ("zh", "Hani")):
        return None
    return found


def _undetermined(script: str) -> str | None:
    """The label of a text in a script: that of the only language in this script, or that of the script."""
    if not script:
        return UNKNOWN
    written = [found for found, scripts in _SCRIPTS.items() if script in scripts]
    if len(written) == 1:
        return written[0]
    return f"{UNKNOWN}-{script}" if script in SCRIPTS.split() else None


def normalized(code: str) -> str:
    """The label of a code; a code that the detector does not know is returned as it is."""
    return label(code) or code


@cache
def covered(code: str) -> tuple[str, ...]:
    """The labels of all texts that a code names: zh those of both scripts, no those of Bokmål and Nynorsk.

    Returns:
        Nothing if the detector does not know the code, or cannot distinguish what it names: it labels every script of Serbian sr.
    """
    found, parsed = label(code), _CODE.fullmatch(code)
    if code.lower() in _MACROLANGUAGES:
        return _MACROLANGUAGES[code.lower()]
    if found is None or parsed is None:
        return ()
    script, region = (parsed[2] or "").capitalize(), parsed[3]
    if found == "zh" and (script == "Hani" or not (script or region)):
        return _CHINESE
    return () if script and len(_SCRIPTS.get(found, ())) > 1 and found not in ("ja", "ko") else (found,)


def by_label(values: Mapping[str, T]) -> dict[str, T]:
    """Values by code -> values by label. The value of a code that covers fewer labels takes precedence: zh-Hant over zh."""
    broad_first = sorted(values, key=lambda code: -len(covered(code)))
    return {found: values[code] for code in broad_first for found in covered(code) or (code,)}


def nearest(code: str) -> str:
    """The known code that is meant most likely, with its name."""
    wanted = code.strip().lower()
    language = re.split(r"[-_.@ ]", wanted)[0]
    names = {name.lower(): known for name, known in _NAMES.items()}
    close = difflib.get_close_matches(wanted, [*names, *_LABELS], n=1, cutoff=0.5)
    found = _MEANT.get(wanted) or _LABELS.get(language) or _MEANT.get(language) or ""
    found = found or names.get(close[0] if close else "") or _LABELS.get(close[0] if close else "", "en")
    return f"{found} ({next(name for name, known in _NAMES.items() if known == found)})"
