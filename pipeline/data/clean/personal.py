"""The step that masks personal data: e-mail addresses, IP addresses, phone numbers, IBANs."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable

import numpy as np

from pipeline.config.cleaning import PersonalStep
from pipeline.data.clean.batch import Batch, Step, Verdict, alive_indices
from pipeline.data.words import UPPER, Words

_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[a-zA-Z0-9-]{1,63}\.)+[a-zA-Z]{2,24}\b")
_IP = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
# International; a leading zero with parentheses, a slash or one long group (Europe); three groups (North America). Years, dates, amounts
# and section numbers do not match.
_PHONE = re.compile(
    r"(?<![\w.,+-])(?:(?:\+|00)[1-9]\d{0,2}(?:[ /.-]?\(?\d{1,5}\)?){2,6}"
    r"|\(0[1-9]\d{1,4}\) ?\d[\d -]{4,11}\d|0[1-9]\d{1,4} ?/ ?\d[\d -]{3,11}\d|0[1-9]\d{2,4}[ -]\d{5,8}"
    r"|\(?[2-9]\d{2}\)?[ .-]\d{3}[.-]\d{4})(?!\w|[.,-]\d)"
)
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")


def personal(knobs: PersonalStep) -> Step:
    """Replace every match by its kind in angle brackets. Regular expressions run only on documents that can contain a match."""
    searches = [_SEARCHES[kind] for kind in knobs.kinds]

    def step(batch: Batch) -> Iterable[Verdict]:
        searched = [(kind, masked, batch.mark(possible)) for kind, possible, masked in searches]
        if not searched:
            return
        for index in alive_indices(batch, np.logical_or.reduce([possible for _, _, possible in searched])):
            text, found = batch.texts[index], []
            for kind, masked, possible in searched:
                if possible[index]:
                    changed = masked(text)
                    found += [kind] if changed != text else []
                    text = changed
            if found:
                yield Verdict(index, "masked " + ", ".join(found), text)

    return step


def _email_possible(words: Words) -> np.ndarray:
    return words.sum_texts(np.flatnonzero(words.codes == ord("@"))) > 0


def _ip_possible(words: Words) -> np.ndarray:
    """Whether a text has three periods between digits."""
    digits = words.digits
    dots = digits[:-1][digits[1:] - digits[:-1] == 2] + 1
    return words.sum_texts(dots[words.codes[dots] == ord(".")]) >= 3


def _phone_possible(words: Words) -> np.ndarray:
    """Whether a text has seven digits within fifteen characters."""
    digits = words.digits
    return words.sum_texts(digits[:-6][digits[6:] - digits[:-6] <= 15]) > 0


def _iban_possible(words: Words) -> np.ndarray:
    """Whether a text has two capital letters before two digits."""
    digits = words.digits
    pairs = digits[:-1][digits[1:] - digits[:-1] == 1]
    pairs = pairs[pairs >= 2]
    return words.sum_texts(pairs[(words.kinds[pairs - 1] & words.kinds[pairs - 2] & UPPER) != 0]) > 0


def _mask_emails(text: str) -> str:
    return _EMAIL.sub("<email>", text)


def _mask_ips(text: str) -> str:
    """Mask public addresses. Four small numbers are a version or a section ("section 1.2.5.1"): at least one part must be above 31."""

    def mask(match: re.Match[str]) -> str:
        try:
            return "<ip>" if ipaddress.ip_address(match[0]).is_global and max(map(int, match[0].split("."))) > 31 else match[0]
        except ValueError:
            return match[0]

    return _IP.sub(mask, text)


def _mask_phones(text: str) -> str:
    return _PHONE.sub(lambda match: "<phone>" if 7 <= sum(map(str.isdigit, match[0])) <= 15 else match[0], text)


def _mask_ibans(text: str) -> str:
    """Mask numbers with valid check digits (ISO 13616: the rearranged number modulo 97 is 1)."""

    def mask(match: re.Match[str]) -> str:
        plain = match[0].replace(" ", "")
        number = "".join(str(int(character, 36)) for character in plain[4:] + plain[:4])
        return "<iban>" if int(number) % 97 == 1 else match[0]

    return _IBAN.sub(mask, text)


_SEARCHES: dict[str, tuple[str, Callable[[Words], np.ndarray], Callable[[str], str]]] = {
    "email": ("e-mail addresses", _email_possible, _mask_emails),
    "ip": ("IP addresses", _ip_possible, _mask_ips),
    "iban": ("IBANs", _iban_possible, _mask_ibans),  # before phone numbers, which match parts of IBANs
    "phone": ("phone numbers", _phone_possible, _mask_phones),
}
KINDS = tuple(_SEARCHES)
