"""Numbers that states give to persons: social security, tax, identity cards. They are found by the word before them and by their form."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from stdnum.ca import sin
from stdnum.nl import bsn
from stdnum.us import itin, ssn
from stdnum.za import idnr

Check = Callable[[str], bool]

#: Words before the number, in lower case | the forms of the number, as a regular expression. A space in a form stands for any separator.
_TABLE = r"""
nino, ni, national insurance | [A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?\d\d ?\d\d ?\d\d ?[A-D]
nhs | \d{3} ?\d{3} ?\d{4}
pps, ppsn | \d{7}[A-W][A-I]?
steuer-id, steuerid, steuer-idnr, steueridnr, identifikations, steueridentifikations, idnr | \d\d ?\d{3} ?\d{3} ?\d{3}
sozialversicherungs, rentenversicherungs, versicherungs, sv, svnr, sv-nr | \d\d ?\d{6} ?[A-Z] ?\d{3}|\d{4} ?\d{6}
steuer, steuernummer, steuer-nr, st.-nr, stnr | \d{2,3} ?\d{3} ?\d{4,5}|\d{13}
personalausweis, ausweis, personalausweis-nr, perso | [CFGHJK-NPRTV-Z][0-9CFGHJK-NPRTV-Z]{8}\d?
reisepass, passport, passeport, pasaporte, passaporto, passaporte, paspoort, paszport | [A-Z]{0,3}\d{6,9}[A-Z]?|C[0-9CFGHJK-NPRTV-Z]{8}
sécurité sociale, securite sociale, sécu, secu, nir, insee | [1-478] ?\d\d ?\d\d ?(?:\d\d|2[AB]) ?\d{3} ?\d{3}(?: ?\d\d)?
ahv, avs, ahv-nr, ahvn13, navs | 756 ?\d{4} ?\d{4} ?\d\d
dni, nif, d.n.i., n.i.f. | \d{8} ?[A-Z]|\d\d ?\d{3} ?\d{3}|\d{3} ?\d{3} ?\d{3}
nie, n.i.e. | [XYZ] ?\d{7} ?[A-Z]
cuit, cuil | \d\d ?\d{8} ?\d
contribuinte | \d{3} ?\d{3} ?\d{3}
codice fiscale, cod. fisc., cod. fiscale, c.f., cf | [A-Z]{6}\d\d[A-EHLMPRST]\d\d[A-Z]\d{3}[A-Z]
rijksregister, registre national, insz, niss | \d\d ?\d\d ?\d\d ?\d{3} ?\d\d
cpf | \d{3} ?\d{3} ?\d{3} ?\d\d
rg | \d{1,2} ?\d{3} ?\d{3} ?[\dX]
aadhaar, aadhar, uidai, uid, आधार | \d{4} ?\d{4} ?\d{4}
pan, पैन | [A-Z]{3}[ABCFGHJLPT][A-Z]\d{4}[A-Z]
身份证, 身份證, 居民身份, 公民身份 | \d{17}[\dXx]|[A-Z][12]\d{8}
マイナンバー, 個人番号, 個人, my number | \d{4} ?\d{4} ?\d{4}
주민등록, 주민, 외국인등록 | \d{6} ?[1-8]\d{6}
pesel | \d{11}
personnummer, personnr, person-nr, samordningsnummer, fødselsnummer, cpr, cpr-nr | (?:\d\d)?\d{6}[-+ ]?\d{4}|\d{6} ?\d{5}
henkilötunnus, hetu, personbeteckning | \d{6}[-+A-FU-Y]\d{3}[0-9A-Y]
kennitala | \d{6} ?\d{4}
kimlik, tckn, tc kimlik | [1-9]\d{10}
curp | [A-Z]{4}\d{6}[HMX][A-Z]{5}[A-Z0-9]\d
rfc | [A-ZÑ&]{4}\d{6}[A-Z0-9]{3}
rut, run | \d{1,2} ?\d{3} ?\d{3} ?[\dkK]
cédula, cedula, c.c. | \d{1,3} ?\d{3} ?\d{3}(?: ?\d{3})?|\d{3} ?\d{7} ?\d
снилс | \d{3} ?\d{3} ?\d{3} ?\d\d
инн | \d{12}
паспорт, паспорта | \d\d ?\d\d ?\d{6}
рнокпп, іпн | \d{10}
tfn, tax file | \d{3} ?\d{3} ?\d{2,3}
medicare | \d{4} ?\d{5} ?\d
ird | \d{2,3} ?\d{3} ?\d{3}
rodné číslo, rodné č, r.č., r. č. | \d{6} ?\d{3,4}
cnp, emšo, jmbg, матични број, јмбг | \d{13}
егн | \d{10}
oib, αμκα, isikukood, asmens kodas | \d{11}
personas kods | \d{6} ?\d{5}
αφμ | \d{9}
taj, taj-szám, adóazonosító, adóazonosító jel | \d{3} ?\d{3} ?\d{3}|\d{10}
ת.ז, ת.ז., תעודת זהות | \d{9}
emirates id | 784 ?\d{4} ?\d{7} ?\d
iqama, رقم الهوية, الهوية, الرقم القومي | [12]\d{9}|[23]\d{13}
cnic, شناختی کارڈ | \d{5} ?\d{7} ?\d
nik, ktp | \d{16}
nric, mykad, no. kp | \d{6} ?\d\d ?\d{4}|[STFGM]\d{7}[A-Z]
บัตรประชาชน, ประจำตัวประชาชน | \d ?\d{4} ?\d{5} ?\d\d ?\d
cccd, cmnd, căn cước công dân | \d{12}|\d{9}
nin, bvn | \d{11}
"""
_SEPARATOR = r"[ \u00a0\u202f./-]"
#: The same, for words that also stand before other numbers: the check digits, or the ranges in use, decide.
_CHECKED: tuple[tuple[str, str, Check], ...] = (
    ("ssn, social security, soc. sec., social security no, seguro social", r"\d{3} ?\d\d ?\d{4}", ssn.is_valid),
    ("itin, taxpayer identification, tin", r"9\d\d ?\d\d ?\d{4}", itin.is_valid),
    ("sin, social insurance, nas", r"\d{3} ?\d{3} ?\d{3}", sin.is_valid),
    ("bsn, burgerservice, sofi", r"\d{9}|\d{4} ?\d\d ?\d{3}|\d{3} ?\d{3} ?\d{3}", bsn.is_valid),
    ("id, identity, rsa id, sa id", r"\d{13}|\d{6} ?\d{4} ?\d\d ?\d", idnr.is_valid),
)

_PLAIN = re.compile(_SEPARATOR)
_END = r"(?![A-Za-z0-9_\u00c0-\u024f]|[.,/:-]\w)"


_TRIM = " \u00a0.:：=#(-–\t\"'“„"


def _trimmed(before: str) -> str:
    return before.rstrip(_TRIM)


_Forms = list[tuple[re.Pattern[str], Check | None]]


def _by_word() -> dict[str, _Forms]:
    """The forms of the numbers that may follow a word."""
    forms: dict[str, _Forms] = {}
    table = [line.split("|", 1) for line in _TABLE.strip().splitlines()]
    rows: list[tuple[str, str, Check | None]] = [*((words, form, None) for words, form in table), *_CHECKED]
    for words, form, check in rows:
        pattern = re.compile(f"(?:{form.strip().replace(' ?', f'{_SEPARATOR}?')}){_END}")
        for word in words.split(","):
            forms.setdefault(_trimmed(word.strip()), []).append((pattern, check))
    return forms


_FORMS = _by_word()
_WORDS = tuple(_FORMS)
# Digits that may be such a number, or its part after the first letters. The lookbehinds follow the first digit, so that the search can
# skip to it.
_DIGITS = re.compile(
    rf"\d(?<![\d_/#@&?+.,-].)(?<!\d[ \u00a0].)(?=(?:{_SEPARATOR}?\d){{5}}|\d[A-Z]\d\d[A-Z]\d{{3}}|\d{{3}}[A-Z]|[\dA-Z]{{6,8}})"
)
_PREFIX = re.compile(r"(?<![A-Za-z0-9_\u00c0-\u024f/#@&?+.,-])[A-ZÑ&]{1,6}[ \u00a0-]?$")
_IN_A_WORD = re.compile(r"[A-Za-z\u00c0-\u024f]$")
_LATIN_VERBS, _OTHER_VERBS = "is|was|are|lautet|ist|est|es|é|jest|är|er|on", "は|是|为|為"
_LATIN_NOUNS = "numbers?|nummer|numret|numero|numéro|número|numer|num|nr|no|n°|nº|№|id|code|kodu|card|karte|carte|#"
_OTHER_NOUNS = "号码|號碼|号|番号|번호"
_VERBS = re.compile(rf"(?:\b(?:{_LATIN_VERBS})|{_OTHER_VERBS})$")
_NOUNS = re.compile(rf"(?:[ -]?(?:{_LATIN_NOUNS})\.?|{_OTHER_NOUNS})$")
# The last two characters of all these words, most of which are rare before other numbers: a test for them is fast.
_FILLERS = f"{_LATIN_VERBS}|{_OTHER_VERBS}|{_LATIN_NOUNS.replace('numbers?', 'number|numbers')}|{_OTHER_NOUNS}".split("|")
_TAILS = frozenset(word[-2:] for word in (*_WORDS, *_FILLERS))
_TAIL_CODES = np.array([ord(tail[0]) << 7 | ord(tail[1]) for tail in _TAILS if len(tail) == 2 and tail.isascii()])
_TRIMMED = np.array([chr(code) in _TRIM for code in range(127)] + [False])
"""Of the ASCII characters; the last entry stands for all others."""


def named(codes: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Whether the characters before numbers can end a word that names them: a fast test, which is true of all that is not ASCII.

    Args:
        codes: (characters,) code points of texts, with a newline after each.
        starts: (numbers,) positions of first digits.
    """
    last = starts - 1
    while (trimmed := _TRIMMED[np.minimum(codes[last], 127)]).any():
        last = last - trimmed
    tails = [np.minimum(codes[last - back], 127).astype(np.int64) for back in (1, 0)]
    first, second = (np.where((tail >= ord("A")) & (tail <= ord("Z")), tail | 0x20, tail) for tail in tails)
    return np.isin(first << 7 | second, _TAIL_CODES) | (first == 127) | (second == 127)


def spans(text: str) -> list[tuple[int, int]]:
    """The spans of numbers of persons, in order."""
    numbers: list[tuple[int, int]] = []
    for digits in _DIGITS.finditer(text):
        start = digits.start()
        if numbers and start < numbers[-1][1]:
            continue
        prefix = _PREFIX.search(text, max(0, start - 8), start)
        starts = [prefix.start()] if prefix else []
        if not _IN_A_WORD.search(text, max(0, start - 1), start):
            starts.append(start)
        span = next((span for first in starts if (span := _span(text, first))), None)
        if span:
            numbers.append(span)
    return numbers


def _span(text: str, start: int) -> tuple[int, int] | None:
    """The longest number of a person that begins at a position."""
    matches = [(form.match(text, start), check) for form, check in _forms(text, start)]
    ends = [match.end() for match, check in matches if match and (not check or check(_PLAIN.sub("", match[0])))]
    return (start, max(ends)) if ends else None


def _forms(text: str, start: int) -> _Forms:
    """The forms of the numbers that the words before a position name."""
    before = _trimmed(text[max(0, start - 60) : start].lower())
    if before[-2:] not in _TAILS and before[-1:] not in _TAILS:
        return []
    before = _trimmed(_VERBS.sub("", before))
    candidates = [before, shorter := _trimmed(_NOUNS.sub("", before)), _trimmed(_NOUNS.sub("", shorter))]
    forms: _Forms = []
    for words in dict.fromkeys(candidates):
        if words.endswith(_WORDS):
            forms += [form for word in _WORDS if _ends_with(words, word) for form in _FORMS[word]]
    return forms


def _ends_with(text: str, word: str) -> bool:
    """Whether a text ends with a word. Scripts without spaces have no other mark of its beginning."""
    preceding = text[-len(word) - 1 : -len(word)]
    return text.endswith(word) and not (preceding.isalnum() and word[0] < "\u2e80" and preceding < "\u2e80")
