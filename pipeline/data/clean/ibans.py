"""Numbers of bank accounts: IBANs, with the length of their country and valid check digits."""

from __future__ import annotations

import re

from stdnum import iban

_IBAN = re.compile(r"[A-Z](?<![A-Za-z0-9].)[A-Z]\d{2}(?:[ \u00a0-]?[A-Z0-9]){11,30}")
_SMALL_IBAN = re.compile(r"(?i:\biban\b\W{0,4})(?P<number>[a-z]{2}\d{2}(?:[ \u00a0-]?[a-z0-9]){11,30})")


def spans(text: str) -> list[tuple[int, int]]:
    """Numbers with the length of their country and valid check digits; what follows may look like a part of the number."""
    found = []
    match = _IBAN.search(text)
    while match:
        start = match.start()
        ends = [start + index for index, character in enumerate(match[0], start=1) if character.isalnum()]
        end = next((end for end in reversed(ends[14:]) if iban.is_valid(text[start:end].replace("\u00a0", ""), check_country=False)), None)
        if end:
            found.append((start, end))
        match = _IBAN.search(text, end or start + 4)
    for match in _SMALL_IBAN.finditer(text) if "iban" in text.lower() else ():
        if any(map(str.islower, match["number"])):
            found += [(match.start("number") + first, match.start("number") + end) for first, end in spans(match["number"].upper())]
    return sorted(found)
