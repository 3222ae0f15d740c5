"""Telephone numbers: candidates by regular expressions, numbering plans by phonenumbers, Google's libphonenumber."""

from __future__ import annotations

import re
from functools import lru_cache

import phonenumbers

from pipeline.data.clean.payment_numbers import numbers_a_thing
from pipeline.data.words import UNSPACED

_GAP = r"[ \u00a0\u202f./\u2010-\u2013-]"
_SEPARATOR = (
    r"(?:[ \u00a0\u202f]|[ \u00a0\u202f]?[./\u2010-\u2013-][ \u00a0\u202f]?)"  # columns of a table have several spaces between them
)
_END = rf"(?![^\W{UNSPACED}]|[%€$°]|[.,:/-]\d|-\w)"

# Runs of digits and separators; the patterns below are searched within them only.
_RUN = re.compile(r"[+(\d][\d \u00a0\u202f()./\u2010-\u2013-]{5,60}")
_SEVEN_DIGITS = re.compile(r"\d(?:\D*\d){6}")
_CANDIDATE = re.compile(
    # international, with + or 00
    rf"(?<![^\W{UNSPACED}])(?<![.,+#&=/\\-])(?<![\da-f]:)"
    rf"(?:(?:\+ ?|00)[1-9]\d{{0,2}}(?:{_GAP}{{0,2}}(?:\(0?\)|\(\d{{1,5}}\)|\d{{1,8}})){{1,7}}"
    # national, with the trunk prefix 0 and separators
    rf"|\(?0[1-9]\d{{0,4}}\)?(?:{_SEPARATOR}\d{{2,8}}){{1,5}}|\(0[1-9]\d{{0,4}}\)\d[\d -]{{4,10}}\d"
    # North America
    rf"|(?:1[ .-])?(?:\([2-9]\d{{2}}\) ?|[2-9]\d{{2}}[ .-])\d{{3}}[.-]\d{{4}}"
    # Spain
    rf"|[6-9]\d{{2}}(?:(?:[ .-]\d{{2}}){{3}}|(?:[ -]\d{{3}}){{2}})|[89]\d[ .-]\d{{3}}(?:[ .-]\d{{2}}){{2}}){_END}"
)
#: Before a Spanish number in three groups of three, as other numbers are written, too.
_CALL = re.compile(r"\b(?:al|ll[aá]m\w+|marc\w+|contact\w+|reserv\w+|consult\w+|cita)\b[^\d\n]{0,20}$", re.IGNORECASE)
_NUMBER = re.compile(rf"\+?\(?\d[\d \u00a0()./-]{{5,18}}\d{_END}")
_CUES = (
    "tel|telefon|telephone|telefono|teléfono|telefone|telefoon|téléphone|tél|phone|fon|mobile|mobil|handy|fax|whatsapp|тел|телефон"
    "|cell|celular|cel|móvil|tfno|tlf|puh|gsm|τηλ|τηλέφωνο"
)
_CUE_NOUNS = "no|nr|number|nummer"
_CUE = re.compile(
    rf"(?:\b(?:{_CUES})\b\.?"
    r"|[☎☏📞📱]|電話|电话|手机|携帯|전화|연락처|휴대폰|โทร|फ़ोन|फोन|هاتف)"
    rf"(?: ?(?:{_CUE_NOUNS})\b\.?|番号|号码?|號碼?|번호)?(?:は|是|为|為|는|은)?\s?[:：=]?[ \u00a0]?$",
    re.IGNORECASE,
)
_CUE_ENDS = frozenset(word[-2:] for word in f"{_CUES}|{_CUE_NOUNS}".split("|"))
_DATE_OR_DECIMAL = re.compile(r"\(?\d{1,2}([./-])\d{1,2}\1(?:19|20)?\d\d$|\+\d+\.\d+$")

# Regions whose national numbers begin with 0 and are written in groups. The first ones have the most lenient plans.
_REGIONS = tuple("FR GB BE NL CH IT SE FI DE AT IE AU NZ ZA JP KR TW TR".split())  # noqa: SIM905 - a literal takes a line each
_UNSPACED, _UNSPACED_REGIONS = re.compile(f"[{UNSPACED}]"), ("JP", "KR", "TW", "TH")
"""The regions of numbers beside which letters stand without a space."""


def spans(text: str) -> list[tuple[int, int]]:
    """The spans of telephone numbers, in order."""
    numbers: list[tuple[int, int]] = []
    for run in _RUN.finditer(text):
        start, end = run.start(), run.end() + 3  # what follows decides whether a number ends there
        if not _SEVEN_DIGITS.search(text, start, end):  # fewer are no number
            continue
        if _is_after_cue(text, start) and (number := _NUMBER.match(text, start)) and _is_cued(number[0]):
            numbers.append(number.span())
            start = number.end()
        for match in _CANDIDATE.finditer(text, start, end):
            if _is_number(text, match):
                numbers.append((match.start() + _unclosed(match[0]), match.end()))
    return numbers


def _is_after_cue(text: str, start: int) -> bool:
    """Whether a word such as "phone" is before a position. Few texts end as these words do: a test of that is fast."""
    end = text[max(0, start - 8) : start].rstrip().rstrip(".:：=").rstrip().rstrip(".")[-2:].lower()
    return not (end.isascii() and end not in _CUE_ENDS) and _CUE.search(text, max(0, start - 30), start) is not None


def _is_cued(number: str) -> bool:
    """Whether a number after a word such as "phone" is one: not a list of years, nor a version such as 2.23.20.76."""
    if re.fullmatch(r"\d(?:\.\d{1,3}){3}", number):
        return False
    return 7 <= _digits(number) <= 15 and not all(re.fullmatch(r"1[5-9]\d\d|20\d\d", group) for group in re.findall(r"\d+", number))


def _is_number(text: str, match: re.Match[str]) -> bool:
    number = match[0][_unclosed(match[0]) :]
    groups = re.findall(r"\d+", number)
    if len(groups) > 2 and all(group[0] == "0" and len(group) == len(groups[0]) > 2 for group in groups):  # a list such as 030 040 050
        return False
    if not 7 <= _digits(number) <= 15 or _DATE_OR_DECIMAL.match(number) or _in_a_row_of_numbers(text, *match.span()):
        return False
    if not number.startswith(("+", "00")) and numbers_a_thing(text, match.start()):
        return False
    if number.startswith("00"):
        number = "+" + number[2:]
    if number.startswith("+"):
        return _is_possible(number)
    beside = _UNSPACED.search(text[max(0, match.start() - 1) : match.start()] + text[match.end() : match.end() + 1])
    if not number.lstrip("(").startswith("0"):
        if _digits(number) == 9:  # in Spain
            in_threes = [len(group) for group in groups] == [3, 3, 3]
            return not beside and (not in_threes or _CALL.search(text, max(0, match.start() - 40), match.start()) is not None)
        return not beside
    return _is_national(number, _UNSPACED_REGIONS if beside else _REGIONS)


def _unclosed(number: str) -> int:
    """1 if a number begins with a parenthesis that encloses more than the number, else 0."""
    return int(number.startswith("(") and ")" not in number)


def _digits(text: str) -> int:
    return sum(map(str.isdigit, text))


def _in_a_row_of_numbers(text: str, start: int, end: int) -> bool:
    """Whether only spaces separate the span from another number, as in tables, coordinates and hexadecimal dumps."""
    before, after = text[max(0, start - 8) : start], text[end : end + 4]
    return bool(re.search(r"[\d)][ \t]+$|\b[0-9a-f]{2} [0-9a-f]{2} $", before) or re.match(r"[ \t]+[-+(.]?\d", after))


@lru_cache(maxsize=4096)
def _is_possible(number: str) -> bool:
    """Whether an international number has a country code and a length of that country."""
    try:
        return phonenumbers.is_possible_number(phonenumbers.parse(number))
    except phonenumbers.NumberParseException:
        return False


@lru_cache(maxsize=4096)
def _is_national(number: str, regions: tuple[str, ...]) -> bool:
    """Whether a number is valid in one of the regions and grouped as numbers are there; further separators are allowed."""
    groups = _boundaries(number)
    for region in regions:
        try:
            parsed = phonenumbers.parse(number, region)
        except phonenumbers.NumberParseException:
            continue
        if phonenumbers.is_valid_number(parsed):
            formatted = phonenumbers.format_number(parsed, phonenumbers.PhoneNumberFormat.NATIONAL)
            if _boundaries(formatted) <= groups and _digits(formatted) == _digits(number):
                return True
    return False


def _boundaries(number: str) -> set[int]:
    """The positions between the groups of a number, counted in digits."""
    codes, total = set(), 0
    for group in re.findall(r"\d+", number):
        total += len(group)
        codes.add(total)
    return codes
