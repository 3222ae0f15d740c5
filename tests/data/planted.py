"""Personal data planted among numbers and names that look like it: a seeded generator of sentences with the spans that must be masked."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from stdnum import luhn
from stdnum.iso7064 import mod_97_10


def _listed(text: str) -> list[str]:
    return text.strip().replace("\n", "|").split("|")


# Each # is a digit. The numbers are drawn, so that a list of known ones finds none.
PHONES = _listed("""
+49 30 #######|+49 (0)89 ######|0049 341 #######|+44 20 79## ####|+33 1 42 ## ## ##|+1 (212) 555-01##
+1-415-555-01##|+43 1 51389##|+41 44 668 ## ##|+81 3-32##-####|+91 98### #####|+39 06 698 #####|030 1234####
020 7946 0###|01 42 68 ## ##|06 12 34 ## ##|0341/97112##|(0341) 97-112##|(030) 2345##|0171 12345##|0176-234567##
0161 496 0###|044 668 ## ##|01 5138###|03-32##-####|02 93## ####|212-555-01##|(415) 555-01##|650.253.0###
555-123-4###|1-800-555-01##
""")
CUED = [
    "Tel. 94 88 ## ##",
    "Telefon: 30##6 77",
    "phone 5551234###",
    "Fax: 7##### 12",
    "☎ 138######78",
    "电话：010 6552 ####",
    "Tél. 0142685##9",
]
PEOPLE = _listed("jane.doe+list|j_smith|rené.dupont|hans-peter.weiß|o.brien99|ivan.petrov|ana|x.y.z")
DOMAINS = _listed("""
mail.example.org|müller-maschinen.de|xn--mller-kva.de|почта.рф|uni-köln.de|sub.domain.co.uk|ελ.gr|firma.swiss|web.museum
""")
OBFUSCATED = _listed("""
jane.doe [at] mail.example.org|bob(at)stanford.edu|info-schmidt(at)uni-koeln(dot)de|john {at} cs {dot} cmu {dot} edu
pierre.dupont [arobase] orange.fr|hans.meier (ät) gmx (Punkt) de|linus[AT]kernel.org|alice_smith [@] mail.com|a.turing <at> bletchley.ac.uk
""")
# Without the check digit, with the layout.
CARDS = ["4### #### #### ###", "53##-####-####-###", "34## ###### ####", "4##############", "6011###########", "2200 #### #### ###"]
CARD_FRAMES = ("Visa {} 12/27", "Kreditkarte: {}", "カード番号{}です", "It reads {} there.", "({})")
IDS = _listed("""
SSN: 536-22-81##|Her social security number is 536 22 81##|NI number AB 12 34 ## C|Steuer-ID: 86 095 742 7##
Meine IdNr. lautet 659299704##|Sozialversicherungsnummer 65 0708## M 016|n° de sécurité sociale : 2 55 08 14 168 0## 38|DNI: 123456##Z
con NIE X12345##L|codice fiscale RSSMRA85T10A5##S|CPF: 529.982.2##-25|Aadhaar number 2341 2341 ####|PAN: ABCPE12##F
身份证号：1101051949123100##|주민등록번호 900101-12345##|PESEL 440514013##|personnummer 811218-98##|henkilötunnus 131052-3##T
T.C. Kimlik No: 100000001##|AHV-Nr. 756.9217.0769.##|CURP HEGG560427MVZRRL0#
""")
# The number after its word: it begins with a digit, or with the capital letters of a British, Spanish, Italian, Indian or Mexican one.
_ID_PARTS = re.compile(r"(?:AB |X|RSSMRA|ABCPE|HEGG)?\d.*$")
IPV4 = [
    "8.8.8.8",
    "1.1.1.1",
    "9.9.9.9",
    "84.112.#.9",
    "141.30.62.2#",
    "185.199.108.15#",
    "62.1##.7.41",
    "http://93.184.216.3#/x",
    "91.#.7.4:8080",
]
IPV6 = ["2001:4860:4860::888#", "2a00:1450:4001:80b::200#", "[2a02:8108:96c0:1a#0::1]", "2606:4700:4700::111#", "2003:e#:9f0b:1:2:3:4:5"]
IBANS = [("DE", "37040044########00"), ("AT", "19043########300"), ("FR", "2004101005######1M02606"), ("GB", "NWBK601613########")]
IBANS += [("NL", "INGB0#########"), ("CH", "0076201162385295#"), ("ES", "2100041845020005####")]

LOOKALIKES = _listed("""
#1a2b3# |color: #0341##;|background:#03417112##|rgb(012, 345, 67#)|rgba(12 34 56 / 0.#)|M10.5 20.3 l555-123-45## 30z
c0 212 555 01## 20 7.9 46|d="M 030 1234#### 01 42 68 53 00"|viewBox="0 0 020 7946"|version 1.2.3.#|v84.112.7.#
release 10.0.190.4#|Chrome/120.0.60.1##|libfoo-3.45.20.1#|firmware 62.141.7.4#|§ 1.2.84.#|section 3.45.6.#
1.3.6.1.4.1.31#|0000020 1234 5678 9abc|00 49 20 31 32 33 34 3#|0x00493012345#|de ad be ef 01 42 68 53 00 1#
foo@2x.png|icon@3x.svg|logo@1.5x.webp|getty@tty#.service|user@host.local|git@github.com:org/repo#.git|lodash@4.17.2#
obj@attr.png|jane at example|@jane|550e8400-e29b-41d4-a716-44665544####|9f86d081884c7d659a2feaa0c55ad015
da39a3ee5e6b4b0d3255bfef9560189#|978-3-16-148410-0|ISBN 0-306-40615-#|ISBN 0 306 40615 #|127.0.0.1|10.1.2.#
192.168.0.#|192.0.2.1#|198.51.100.#|203.0.113.#|255.255.255.0|0.0.0.0|2001:db8::#|fe80::1|fd00:1234::#|::1
std::vector|dead::beef#|1848-1849|2001-09-1#|03/04/202#|01.02.200#|12:30:4#|2024-01-02 03:04:0#|3.14159265#
12,345,67#|10.1000/182#|arXiv:2112.1144#|0815|+1.5e-0#|1 234 567 89#|4111 1111 1111 111#|DE12 3704 1144 1532 1130 1#
GB00 TEST 1234|AB12 3456|RFC 2606, RFC 576#|100 200 300 400 50#|01 02 03 04 05 0#|52.5200 13.405#|CVE-2024-0123#
pages 212-219|ext4-02-1234|3-5-7|+12|+100 %|0.25 0.5 0.75|1000000000#|20240102030405|$1,234.5#|No. 12345678#
00:1a:2b:3c:4d:5#
7f00 r-xp 00000000 08:02 17352#|fd:03 96063#|T21:27:03.99495#|+3.14000#; -3.14000#
""")

LOOKALIKES += _listed("""
Flash Player 32.0.0.1##|Java 17.0.12.5#|Acrobat 23.6.203.2#|kernel 5.15.120.#|Figure 3.14.15.9#|libpng16-1.6.37.10#|Skype 8.101.0.21#
Order 415-555-26## shipped|Part number 212-555-01##|Invoice no. 555-123-45##|Aktenzeichen 0341 97112-##|Art.-Nr. 0171 23456##
Konto 030 12345##|telephone 1876-1900-1920|Handy 2019 2020 2021|WhatsApp 2.23.20.7#
order number 100-23456##-9012345|Auftragsnummer 4532015112830367
tweet/4539578763621486|x = 4111111111111111|0.4111111111111111|4111111111111111.5|?id=4242424242424242&x=1|IMEI 490154203237518
0x4111111111111111|10 000 000 000 000 000 bytes|ISBN 978030640615# 4|the SSN format is AAA-GG-SSSS|SSN 000-12-34##|PAN issued in 2012
DNI issued in 1944|SIN 146 454 287|BSN 111222334|x [at] y|3 (at) 5.de|he was (at that time) absent|load (at) 5.#
photo (at right) of tower.org|1939-1945 1950-1960|SSN 536-22-8145-0
""")

FRAMES = ("Write to {} today.", "See {}, please.", "({})", "{}", "It is {}. More", "a <{}> b", "the value „{}“", "Kontakt: {} Deutschland")
HARD_FRAMES = ("It reads {} there.", "({})", "{}", "with {}; more", "the value „{}“")


def _filled(pattern: str, draw: random.Random) -> str:
    return "".join(draw.choice("0123456789") if character == "#" else character for character in pattern)


def _iban(draw: random.Random) -> str:
    country, pattern = draw.choice(IBANS)
    account = _filled(pattern, draw)
    number = country + mod_97_10.calc_check_digits(account + country) + account
    return " ".join(number[at : at + 4] for at in range(0, len(number), 4)) if draw.random() < 0.5 else number


def _card(draw: random.Random) -> str:
    number = _filled(draw.choice(CARDS), draw)
    return number + luhn.calc_check_digit(re.sub(r"\D", "", number))


_ADDRESS = re.compile(r"[\d.]{7,}|[0-9a-f:]{10,}")

MAKERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    # (the text, the part of it that is masked)
    "phone": lambda draw: (made := _filled(draw.choice(PHONES), draw), made),
    "cued phone": lambda draw: (made := _filled(draw.choice(CUED), draw), made[min(made.index(c) for c in "0123456789" if c in made) :]),
    "email": lambda draw: (made := f"{draw.choice(PEOPLE)}@{draw.choice(DOMAINS)}", made),
    "ip": lambda draw: (made := _filled(draw.choice(IPV4 + IPV6), draw), _ADDRESS.search(made)[0]),  # type: ignore[index]
    "iban": lambda draw: (made := _iban(draw), made),
    "obfuscated email": lambda draw: (made := draw.choice(OBFUSCATED), made),
    "card": lambda draw: (draw.choice(CARD_FRAMES).format(made := _card(draw)), made),
    "id": lambda draw: (made := _filled(draw.choice(IDS), draw), _ID_PARTS.search(made)[0]),  # type: ignore[index]
}


def positives(count: int, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, sentence, the personal data in it)."""
    draw = random.Random(seed)
    for number in range(count):
        kind = list(MAKERS)[number % len(MAKERS)]
        text, masked = MAKERS[kind](draw)
        yield kind, draw.choice(FRAMES).format(text), masked


def negatives(seed: int = 0) -> Iterator[str]:
    """Yield sentences without personal data, one for every lookalike."""
    draw = random.Random(seed)
    for pattern in LOOKALIKES:
        # A leading # is a CSS color, not a digit.
        text = pattern[:1] + _filled(pattern[1:], draw) if pattern.startswith("#") else _filled(pattern, draw)
        yield draw.choice(HARD_FRAMES).format(text)
