"""E-mail addresses written so that programs do not find them: `jane.doe [at] example (dot) org`."""

from __future__ import annotations

import re

_LETTERS = r"a-zA-Z0-9\u00c0-\u024f\u0370-\u052f"
_OPEN, _CLOSE = r"(?:\[ ?|\( ?|\{ ?|< ?)", r"(?: ?\]| ?\)| ?\}| ?>)"
# A class of characters first, so that the search can skip to it.
_AT = re.compile(r"[\[({<] ?(?:at|@|ät|arobase|arroba|chiocciola|собака) ?[\])}>][ \u00a0]?|(?-i: AT )", re.IGNORECASE)
_DOT = rf"(?:\.|[ \u00a0]?{_OPEN}(?:dot|punkt|point|punto|ponto|точка|\.){_CLOSE}[ \u00a0]?|(?-i: DOT ))"
_DOTS = re.compile(_DOT, re.IGNORECASE)
_LOCAL = re.compile(rf"(?<![{_LETTERS}.+%_=/-])[{_LETTERS}+%_=-]+(?:{_DOT}[{_LETTERS}+%_=-]+){{0,4}}[ \u00a0]?$", re.IGNORECASE)
_DOMAIN = re.compile(
    rf"[{_LETTERS}](?:[{_LETTERS}-]{{0,61}}[{_LETTERS}])?(?:{_DOT}[{_LETTERS}](?:[{_LETTERS}-]{{0,61}}[{_LETTERS}])?)+", re.IGNORECASE
)


def candidates(text: str) -> list[tuple[int, int, str]]:
    """What may be an address: (first character, end, its domain with plain dots)."""
    found = []
    for at in _AT.finditer(text):
        local, domain = _LOCAL.search(text, max(0, at.start() - 65), at.start()), _DOMAIN.match(text, at.end())
        if not (local and domain) or (
            at[0] == " AT " and not set("._") & set(local[0]) and (" DOT " not in domain[0] or local[0].isupper())
        ):
            continue  # "LOOK AT example.com" and "LOOK AT ALL DOT COM" are sentences
        if any(map(str.isalpha, local[0])):
            found.append((local.start(), domain.end(), _DOTS.sub(".", domain[0])))
    return found
