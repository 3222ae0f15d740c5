"""Words before a number that say what it numbers: orders, parts, cases and other things. Their numbers are not personal data."""

from __future__ import annotations

import re

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


def numbers_a_thing(text: str, start: int) -> bool:
    """Whether the word before a number says that it is the number of a thing."""
    before = text[max(0, start - 40) : start]
    return _THING.search(before) is not None or _CJK_THING.search(before) is not None
