"""Codes of languages: every spelling of ISO 639 and BCP 47 becomes the label that the detector's result has in reports and shards."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeVar

#: The languages that the built-in detector tells apart, with the scripts that it recognizes them in and the other ISO 639 codes of each:
#: those of ISO 639-2 and 639-3, of the individual language that is meant by a macrolanguage (arb for ar), and withdrawn ones (iw for he).
TABLE = """
Afar | aa | Latn | aar
Abkhazian | ab | Cyrl | abk
Afrikaans | af | Latn | afr
Akan | ak | Latn | aka tw twi fat
Amharic | am | Ethi | amh
Aragonese | an | Latn | arg
Arabic | ar | Arab | ara arb
Assamese | as | Beng | asm
Asturian | ast | Latn
Aymara | ay | Latn | aym ayr ayc
Azerbaijani | az | Arab Latn | aze azj
Bashkir | ba | Cyrl | bak
Balinese | ban | Latn Bali
Bamum | bax | Bamu
Central Bikol | bcl | Latn
Belarusian | be | Cyrl | bel
Bulgarian | bg | Cyrl | bul
Bihari | bh | Deva | bih bho
Bislama | bi | Latn | bis
Tai Dam | blt | Tavt
Bengali | bn | Beng | ben
Tibetan | bo | Tibt | bod tib
Breton | br | Latn | bre
Bosnian | bs | Cyrl Latn | bos
Buginese | bug | Latn Bugi
Catalan | ca | Latn | cat
Chakma | ccp | Cakm
Chechen | ce | Cyrl | che
Cebuano | ceb | Latn
Cherokee | chr | Cher
Cham | cjm | Cham
Sorani | ckb | Arab
Corsican | co | Latn | cos
Coptic | cop | Copt
Seychellois Creole | crs | Latn
Czech | cs | Latn | ces cze
Chuvash | cv | Cyrl | chv
Welsh | cy | Latn | cym wel
Danish | da | Latn | dan
German | de | Latn | deu ger
Lower Sorbian | dsb | Latn
Dhivehi | dv | Thaa | div
Dzongkha | dz | Tibt | dzo
Greek | el | Grek | ell gre
English | en | Latn | eng
Esperanto | eo | Latn | epo
Spanish | es | Latn | spa
Estonian | et | Latn | est ekk
Basque | eu | Latn | eus baq
Persian | fa | Arab | fas per pes
Finnish | fi | Latn | fin
Fijian | fj | Latn | fij
Faroese | fo | Latn | fao
French | fr | Latn | fra fre
Friulian | fur | Latn
Frisian | fy | Latn | fry
Irish | ga | Latn | gle
Scottish Gaelic | gd | Latn | gla
Galician | gl | Latn | glg
Guarani | gn | Latn | grn gug
Gothic | got | Goth
Swiss German | gsw | Latn
Gujarati | gu | Gujr | guj
Manx | gv | Latn | glv
Hausa | ha | Latn | hau
Hawaiian | haw | Latn
Hebrew | he | Hebr | heb iw
Hindi | hi | Deva | hin
Hiligaynon | hil | Latn
Hmong | hmn | Latn | mww hnj
Croatian | hr | Latn | hrv scr
Upper Sorbian | hsb | Latn
Haitian Creole | ht | Latn | hat
Hungarian | hu | Latn | hun
Armenian | hy | Armn | hye arm
Interlingua | ia | Latn | ina
Indonesian | id | Latn | ind in
Interlingue | ie | Latn | ile
Igbo | ig | Latn | ibo
Yi | ii | Yiii | iii
Iloko | ilo | Latn
Icelandic | is | Latn | isl ice
Italian | it | Latn | ita
Inuktitut | iu | Cans | iku ike
Japanese | ja | Jpan Hira Kana Hani | jpn
Javanese | jv | Latn Java | jav jw
Georgian | ka | Geor | kat geo
Kabyle | kab | Latn
Khasi | kha | Latn
Lü | khb | Talu
Kazakh | kk | Arab Cyrl Latn | kaz
Greenlandic | kl | Latn | kal
Khmer | km | Khmr | khm
Kannada | kn | Knda | kan
Korean | ko | Kore Hang Hani | kor
Karachay-Balkar | krc | Cyrl
Kashmiri | ks | Arab Deva | kas
Kurdish | ku | Latn | kur kmr
Kyrgyz | ky | Arab Cyrl | kir
Western Kayah | kyu | Kali
Latin | la | Latn | lat
Luxembourgish | lb | Latn | ltz
Lepcha | lep | Lepc
Ganda | lg | Latn | lug
Limbu | lif | Limb
Ligurian | lij | Latn
Lisu | lis | Lisu
Lombard | lmo | Latn
Lingala | ln | Latn | lin
Lao | lo | Laoo | lao
Lithuanian | lt | Latn | lit
Latvian | lv | Latn | lav lvs
Mauritian Creole | mfe | Latn
Malagasy | mg | Latn | mlg plt
Maori | mi | Latn | mri mao
Mandaic | mid | Mand
Macedonian | mk | Cyrl | mkd mac
Malayalam | ml | Mlym | mal
Mongolian | mn | Cyrl Mong | mon khk
Meitei | mni | Mtei
Marathi | mr | Deva | mar
Malay | ms | Latn Arab | msa may zsm
Maltese | mt | Latn | mlt
Burmese | my | Mymr | mya bur
Low German | nds | Latn
Nepali | ne | Deva | nep npi
Dutch | nl | Latn | nld dut
Norwegian Nynorsk | nn | Latn | nno
Norwegian | no | Latn | nor nb nob
Northern Thai | nod | Lana
N'Ko | nqo | Nkoo
Pedi | nso | Latn
Nyanja | ny | Latn | nya
Occitan | oc | Latn | oci
Oromo | om | Latn | orm gaz
Odia | or | Orya | ori ory
Punjabi | pa | Guru | pan
Polish | pl | Latn | pol
Pashto | ps | Arab | pus pbt pbu
Portuguese | pt | Latn | por
Quechua | qu | Latn | que quz quy
Rejang | rej | Rjng
Romansh | rm | Latn | roh
Rundi | rn | Latn | run
Romanian | ro | Latn Cyrl | ron rum mo mol
Russian | ru | Cyrl | rus
Kinyarwanda | rw | Latn | kin
Sanskrit | sa | Deva Latn | san
Yakut | sah | Cyrl
Santali | sat | Olck
Saurashtra | saz | Saur
Sardinian | sc | Latn | srd src sro
Sicilian | scn | Latn
Scots | sco | Latn
Sindhi | sd | Arab Deva | snd
Northern Sami | se | Latn | sme
Sango | sg | Latn | sag
Sinhala | si | Sinh | sin
Slovak | sk | Latn | slk slo
Slovenian | sl | Latn | slv
Samoan | sm | Latn | smo
Shona | sn | Latn | sna
Somali | so | Latn | som
Albanian | sq | Latn | sqi alb als
Serbian | sr | Cyrl Latn | srp scc
Swati | ss | Latn | ssw
Sotho | st | Latn | sot
Sundanese | su | Latn Sund | sun
Swedish | sv | Latn | swe
Swahili | sw | Latn | swa swh
Sylheti | syl | Sylo
Syriac | syr | Syrc
Silesian | szl | Latn
Tamil | ta | Taml | tam
Tai Nüa | tdd | Tale
Telugu | te | Telu | tel
Tajik | tg | Arab Cyrl | tgk
Thai | th | Thai | tha
Tigrinya | ti | Ethi | tir
Turkmen | tk | Cyrl Latn | tuk
Tagalog | tl | Latn Tglg | tgl fil
Tswana | tn | Latn | tsn
Tongan | to | Latn | ton
Turkish | tr | Latn | tur
Tsonga | ts | Latn | tso
Tatar | tt | Cyrl Latn | tat
Tuvan | tyv | Cyrl
Udmurt | udm | Cyrl
Uyghur | ug | Arab Cyrl Latn | uig
Ukrainian | uk | Cyrl | ukr
Urdu | ur | Arab | urd
Uzbek | uz | Arab Cyrl Latn | uzb uzn
Vai | vai | Vaii
Venda | ve | Latn | ven
Venetian | vec | Latn
Vietnamese | vi | Latn | vie
Volapük | vo | Latn | vol
Walloon | wa | Latn | wln
Waray | war | Latn
Wolof | wo | Latn | wol
Xhosa | xh | Latn | xho
Yiddish | yi | Hebr | yid ydd ji
Yoruba | yo | Latn | yor
Zhuang | za | Hani Latn | zha zyb
Chinese | zh | Hans | zho chi cmn
Chinese, Traditional | zh-Hant | Hant
Zulu | zu | Latn | zul
"""
"""A line per language: name | label | scripts (ISO 15924) | other codes. The label is the shortest ISO 639 code, as in BCP 47."""

T = TypeVar("T")

UNKNOWN = "und"
"""The label of texts whose language is not known (BCP 47: undetermined)."""

_ROWS = [[part.strip() for part in f"{line} |".split("|")] for line in TABLE.strip().splitlines()]
_NAMES = {name: label for name, label, *_ in _ROWS}
_SCRIPTS = {label: set(scripts.split()) for _, label, scripts, *_ in _ROWS}
_LABELS = {code: label for _, label, _, others, *_ in _ROWS for code in (label, *others.split())}

_MACROLANGUAGES = {**dict.fromkeys(("no", "nor"), ("no", "nn")), **dict.fromkeys(("sh", "hbs"), ("bs", "hr", "sr"))}
_MACROLANGUAGES |= dict.fromkeys(("ku", "kur"), ("ckb", "ku"))
_CHINESE = ("zh", "zh-Hant")
_TRADITIONAL = ("TW", "HK", "MO")
_CODE = re.compile(r"([a-z]{2,3})(?:[-_]([a-z]{4}))?(?:[-_]([a-z]{2}|[0-9]{3}))?", re.IGNORECASE)
#: Codes of countries that are often written for a language, and languages for which the detector knows a near one only.
_MEANT = {"cn": "zh", "jp": "ja", "kr": "ko", "gr": "el", "cz": "cs", "dk": "da", "ua": "uk", "se": "sv", "vn": "vi", "ir": "fa"}
_MEANT |= {"il": "he", "yue": "zh-Hant", "wuu": "zh", "cnr": "sr", "false": "no"}  # YAML reads an unquoted no as false


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
    base = _LABELS.get(language)
    if base == "zh" and (script == "Hant" or (not script and region in _TRADITIONAL)):
        return "zh-Hant"
    if base is None or (script and script not in _SCRIPTS[base] and (base, script) != ("zh", "Hani")):
        return None
    return base


def _undetermined(script: str) -> str:
    """The label of a text in a script: that of the only language in this script, or that of the script."""
    if not script:
        return UNKNOWN
    written = [label for label, scripts in _SCRIPTS.items() if script in scripts]
    if len(written) == 1:
        return written[0]
    return f"{UNKNOWN}-{script}"


def normalized(code: str) -> str:
    """The label of a code; a code that the detector does not know is returned as it is."""
    return label(code) or code


@cache
def covered(code: str) -> tuple[str, ...]:
    """The labels of all texts that a code names: zh those of both scripts, no those of Bokmål and Nynorsk.

    Returns:
        Nothing if the detector does not know the code, or cannot distinguish what it names: it labels every script of Serbian sr.
    """
    base, parsed = label(code), _CODE.fullmatch(code)
    if code.lower() in _MACROLANGUAGES:
        return _MACROLANGUAGES[code.lower()]
    if base is None or parsed is None:
        return ()
    script, region = (parsed[2] or "").capitalize(), parsed[3]
    if base == "zh" and (script == "Hani" or not (script or region)):
        return _CHINESE
    return () if script and len(_SCRIPTS.get(base, ())) > 1 and base not in ("ja", "ko") else (base,)


def by_label(values: Mapping[str, T], covered: Callable[[str], tuple[str, ...]] = covered) -> dict[str, T]:
    """Values by code -> values by label. The value of a code that covers fewer labels takes precedence: zh-Hant over zh."""
    broad_first = sorted(values, key=lambda code: -len(covered(code)))
    return {label: values[code] for code in broad_first for label in covered(code) or (code,)}


def nearest(code: str) -> str:
    """The known code that is meant most likely, with its name."""
    wanted = code.strip().lower()
    language = re.split(r"[-_.@ ]", wanted)[0]
    names = {name.lower(): known for name, known in _NAMES.items()}
    close = difflib.get_close_matches(wanted, [*names, *_LABELS], n=1, cutoff=0.5)
    best = _MEANT.get(wanted) or _LABELS.get(language) or _MEANT.get(language) or ""
    best = best or names.get(close[0] if close else "") or _LABELS.get(close[0] if close else "", "en")
    return f"{best} ({next(name for name, known in _NAMES.items() if known == best)})"
