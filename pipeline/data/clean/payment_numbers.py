"""Numbers of cards and bank accounts, and the words before a number that say that it numbers something else: it is not personal then."""

from __future__ import annotations

import re

from stdnum import iban, luhn

_THINGS = r"""orders?|bestell\w*|best\.?|auftrags?\w*|commande|pedido|orden|заказ\w*
invoice|rechnungs?\w*|re\.|facture|factura|fattura|receipt|belegs?\w*
part|item|model|modell|artikel\w*|art\.?|sku|serial|serien\w*|s/n|batch|lot|product|produkt\w*|material\w*|version|ref|reference|referenz
tracking|sendungs?\w*|paket\w*|shipment|parcel|ticket|case|az\.?|aktenzeichen|vorgangs?\w*|docket|file|konto\w*|blz|account|kunden\w*|customer|vertrags?\w*
imei|iccid|isbn|issn|ean|gtin|upc|asin|doi|pmid|oclc|lccn|uuid|guid|hash|commit|key|lizenz\w*|licen[cs]e|tweet|status|timestamp|page|pages|seiten?|pp?\.
rfc|iso|din|patent\w*|mac|vin|row|line|zeile|id|sum|summe|total|betrag""".replace("\n", "|")
_THING = re.compile(
    rf"(?:^|[^\w])(?:{_THINGS})[ .-]{{0,2}}(?:nos?|nr|num|number|nummer|numbers|n°|nº|№|#|id|code|号|番号)?[.\s:：=#(-]{{0,4}}$",
    re.IGNORECASE,
)
_CJK_THING = re.compile(r"(?:订单|訂單|注文|発注|伝票|快递|运单|주문|송장|运单)(?:号码?|番号|번호)?[\s:：]{0,3}$|第$")
_GAP = r"(?P<gap>[ \u00a0\u202f-])"
_CARD_NUMBER = re.compile(
    rf"[2-6]\d{{3}}(?:{_GAP}(?:\d{{4}}(?P=gap)\d{{4}}(?P=gap)\d{{4}}(?:(?P=gap)\d{{3}})?|\d{{6}}(?P=gap)\d{{4,5}})|\d{{8,15}})"
    r"(?![A-Za-z0-9_\u00c0-\u024f]|[.,/:-]\d)"
)
_BEFORE = re.compile(r"(?:[A-Za-z0-9_\u00c0-\u024f.,/#@&?+=$€£¥-]|[$€£¥=] )$")
# Digits of the number -> the issuers' first digits (American Express, Diners Club, Visa, Mastercard, Discover, JCB, Mir, UnionPay).
_ISSUERS = re.compile(
    r"3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}|4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}"
    r"|6(?:011|4[4-9]\d|5\d\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|220[0-4]\d{12}|62\d{14,17}"
)
_ISSUERS_WITH_A_CUE = re.compile(r"(?:5[06-9]|6\d)\d{11,17}|8[12]\d{14}|9792\d{12}")  # Maestro, RuPay, Troy
_CUE = re.compile(
    r"(?:card|karte|carte|kaart|kort|karta|kart[iı]|tarjeta|cart[ãa]o|carta|carte bancaire|visa|master ?card|amex|american express|maestro"
    r"|discover|diners|jcb|unionpay|rupay|girocard|credit|kredit|cr[ée]dit|debit|карт\w*|мир|カード|卡号?|卡號|카드|بطاقة|कार्ड|บัตร|pay|charge[ds]?|pan)"
    r"[^\d\n]{0,25}$",
    re.IGNORECASE,
)
_CUE_AFTER = re.compile(r"[\s,;(]{0,3}(?:cvv|cvc|cvn|exp\b|exp[.i]|valid|gültig|(?:0[1-9]|1[0-2])[/-]\d\d(?!\d|-))", re.IGNORECASE)
_ROW_BEFORE = re.compile(r"\d[ \t]+$")
_ROW_AFTER = re.compile(r"[ \t]+[-+(.]?\d")
_IBAN = re.compile(r"[A-Z](?<![A-Za-z0-9].)[A-Z]\d{2}(?:[ \u00a0-]?[A-Z0-9]){11,30}")
_SMALL_IBAN = re.compile(r"(?i:\biban\b\W{0,4})(?P<number>[a-z]{2}\d{2}(?:[ \u00a0-]?[a-z0-9]){11,30})")


def numbers_a_thing(text: str, start: int) -> bool:
    """Whether the word before a number says that it is the number of a thing."""
    before = text[max(0, start - 40) : start]
    return _THING.search(before) is not None or _CJK_THING.search(before) is not None


def card_spans(text: str) -> list[tuple[int, int]]:
    """The spans of card numbers, in order."""
    return [match.span() for match in _CARD_NUMBER.finditer(text) if _is_card(text, match)]


def _is_card(text: str, match: re.Match[str]) -> bool:
    """Whether a number is one of a card: of an issuer, with its check digit, and not that of a thing or one in a row of numbers."""
    digits = re.sub(r"\D", "", match[0])
    start, end = match.span()
    cue = _CUE.search(text, max(0, start - 40), start) is not None or _CUE_AFTER.match(text, end) is not None
    if not (_ISSUERS.fullmatch(digits) or (cue and _ISSUERS_WITH_A_CUE.fullmatch(digits))) or not luhn.is_valid(digits):
        return False
    before = text[max(0, start - 8) : start]
    if cue:
        return not _BEFORE.search(before) or before[-1] in "=#"
    return not (_BEFORE.search(before) or _ROW_BEFORE.search(before) or _ROW_AFTER.match(text, end) or numbers_a_thing(text, start))


def iban_spans(text: str) -> list[tuple[int, int]]:
    """Numbers with the length of their country and valid check digits; what follows may look like a part of the number."""
    spans = []
    match = _IBAN.search(text)
    while match:
        start = match.start()
        ends = [start + index for index, character in enumerate(match[0], start=1) if character.isalnum()]
        end = next((end for end in reversed(ends[14:]) if iban.is_valid(text[start:end].replace("\u00a0", ""), check_country=False)), None)
        if end:
            spans.append((start, end))
        match = _IBAN.search(text, end or start + 4)
    for match in _SMALL_IBAN.finditer(text) if "iban" in text.lower() else ():
        if any(map(str.islower, match["number"])):
            spans += [(match.start("number") + first, match.start("number") + end) for first, end in iban_spans(match["number"].upper())]
    return sorted(spans)
