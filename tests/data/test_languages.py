"""Languages: one label for every spelling of a code, in cleaning, statistics and labels; scripts that do not separate words."""

import pycld2
import pytest

from pipeline.common import languages
from pipeline.common.errors import UserError
from pipeline.common.languages import TABLE
from pipeline.data.clean.counts import STOP_WORDS
from pipeline.data.clean.document_batch import DocumentBatch
from pipeline.data.clean.language import Cld2
from pipeline.data.dedup.clusters import NOTHING
from pipeline.data.read.documents import Document, add_in_group
from pipeline.data.shard import shard_report, text_shards
from pipeline.data.shard.process_part import KEPT, PartCounts
from tests.data.test_clean import PROSE, clean, config

DETECTED = sorted({code for name, code in pycld2.LANGUAGES if name in pycld2.DETECTED_LANGUAGES})

TEXTS = {
    "he": "השומר הזקן של המגדלור הלך כל ערב לאורך החוף וחשב על הספינות שעברו. חייו היו שקטים, אבל הוא לא היה מחליף אותם באחרים.",
    "zh": "那位年老的灯塔看守人每天傍晚都沿着海岸散步，想着从这里驶过的船只。他的生活很平静，但是他不愿意用它去换任何别的生活。",
    "zh-Hant": "那位年老的燈塔看守人每天傍晚都沿著海岸散步，想著從這裡駛過的船隻。他的生活很平靜，但是他不願意用它去換任何別的生活。",
    "no": "Den gamle fyrvokteren gikk langs stranden hver kveld og tenkte på skipene som hadde passert. Det var et stille liv, men han "
    "ville ikke ha byttet det mot noe annet. Om vinteren kom stormene fra nord.",
    "nn": "Den gamle fyrvaktaren gjekk langs stranda kvar kveld og tenkte på skipa som hadde siglt forbi. Det var eit stilt liv, men han "
    "ville ikkje ha bytt det mot noko anna. Om vinteren kom stormane frå nord, og ingen vitja øya.",
    "jv": "Saben sore wong tuwa penjaga mercusuar iku mlaku-mlaku ing pinggir segara lan mikirake kapal-kapal sing wis lumaku. Uripe "
    "tentrem, nanging dheweke ora gelem ngijolake karo urip liyane. Ing mangsa rendheng angin gedhe teka saka lor.",
    "id": "Penjaga mercusuar yang tua itu berjalan di sepanjang pantai setiap malam dan memikirkan kapal-kapal yang telah lewat. Hidupnya "
    "tenang, tetapi dia tidak akan menukarnya dengan kehidupan yang lain.",
    "tl": "Ang matandang tagapag-alaga ng parola ay naglalakad sa tabing-dagat tuwing gabi at iniisip ang mga barkong dumaan. Tahimik ang "
    "kanyang buhay, ngunit hindi niya ito ipagpapalit sa iba.",
}

SPELLINGS = {
    "he": ["he", "iw", "heb", "HE", "he-IL"],
    "zh": ["zh", "zho", "chi", "cmn", "zh-Hans", "zh_CN", "cmn_Hani"],
    "zh-Hant": ["zh", "zh-Hant", "zh-TW", "ZH_HK", "zho-hant", "cmn_Hani"],
    "no": ["no", "nb", "nob", "nor", "nb-NO"],
    "nn": ["nn", "nno", "no"],
    "jv": ["jv", "jw", "jav"],
    "id": ["id", "in", "ind"],
    "tl": ["tl", "fil", "tgl"],
}


@pytest.mark.parametrize("label", TEXTS)
def test_every_spelling_of_a_language_keeps_its_texts(label):
    assert Cld2().identify([TEXTS[label]])[0][0] == label
    for code in SPELLINGS[label]:
        assert clean([TEXTS[label], PROSE], config("language", language={"keep": [code]}))[0] == [TEXTS[label], None], code
        wanted = config("length", length={"least": 0, "by_language": {code: {"least": 10_000}}})
        assert clean([TEXTS[label], PROSE], wanted)[0] == [None, PROSE], code


def test_a_narrow_code_keeps_no_more_than_it_names():
    both = [TEXTS["zh"], TEXTS["zh-Hant"], TEXTS["no"], TEXTS["nn"]]
    assert clean(both, config("language", language={"keep": ["zh-Hans", "nb"]}))[0] == [both[0], None, both[2], None]
    own = {"zh": {"least": 10_000}, "zh-TW": {"least": 10}}  # the narrower code takes precedence, in either order
    for values in (own, dict(reversed(own.items()))):
        assert clean(both[:2], config("length", length={"least": 0, "by_language": values}))[0] == [None, both[1]]


@pytest.mark.parametrize("code", DETECTED)
def test_every_code_of_the_detector_has_a_label_that_keep_accepts(code):
    label = languages.label(code)
    assert label is not None
    assert languages.label(label) == label
    assert label in languages.covered(label)


def test_every_code_of_the_table_names_one_language():
    codes = [code for line in TABLE.strip().splitlines() for code in "|".join(line.split("|")[1::2]).replace("|", " ").split()]
    assert len(set(codes)) == len(codes)
    assert set(STOP_WORDS) <= set(codes)


def test_the_label_of_a_document_is_the_one_of_cleaning():
    for given, label in {"iw": "he", "deu_Latn": "de", "zh-TW": "zh-Hant", "en-US": "en", "own label": "own label"}.items():
        assert text_shards.language({"lang": given}) == label
        assert text_shards.language({"lang": "und", "meta": {"lang": given}}) == label
        assert DocumentBatch([Document("x", 0, "", {"lang": given})]).label(0) == label
    assert text_shards.language({"lang": "un", "meta": {}, "corpus": "web"}) == "web"


WITHOUT_SPACES = {
    # Syllables of two or three characters, as running text has them.
    "Tibetan": "འབྲུག་རྒྱལ་ཁབ་འདི་ཤར་ཧི་མ་ལ་ཡའི་རི་རྒྱུད་ནང་ལུ་ཡོད་པའི་རྒྱལ་ཁབ་ཅིག་ཨིན། མི་སེར་ཚུ་གིས་སོ་ནམ་ལཱ་འབད་དོ། ང་ཚོ་འདི་ན་ཡོད། ཁྱོད་ག་ཏེ་འགྱོ་ནི་ཨིན་ན། "
    "ཁོ་རང་དེ་རི་འོང་མི་ཨིན། དེ་བས་མ་དེ་ལ་ཚེ་ཐར། མི་འདི་ལུ་བུ་གཅིག་དང་བུ་མོ་གཉིས་ཡོད། ",
    "Javanese": "ꦱꦧꦼꦤ꧀ꦲꦸꦮꦺꦴꦁꦏꦭꦲꦶꦫꦏꦺꦏꦤ꧀ꦛꦶꦩꦂꦢꦶꦏꦭꦤ꧀ꦢꦂꦧꦺꦩꦂꦠꦧꦠ꧀ꦭꦤ꧀ꦲꦏ꧀ꦲꦏ꧀ꦏꦁꦥꦝ꧉",
    "Balinese": "ᬲᬓᬯᬾᬄᬫᬦᬸᬲᬦᬾᬲᬦᬾᬳᬾᬫᬧᬮᬶᬢᬳ᭄ᬯᬶᬯᬶᬢ᭄ᬫᬃᬤᬶᬓᬮᬦ᭄ᬲᬫᬳᬾᬗ᭄ᬓᬦᬶᬂᬧ᭄ᬭᬓᬵᬭᬧᬗᬚᬶ᭟",
    "Tai Tham": "ᨾᨶᩩᩔ᩼ᨴ᩠ᨦᩢᩉᩖᩣ᩠ᨿᨠᩮ᩠ᨯᨾᩣᨾᩦᩋᩥᩔᩁᩮᩣᩃᩯᨵᨾ᩠ᨾᩣᩋᩢ᩠ᨶᨣᩬᩴᩁᨴ᩠ᨦᩢᨾ᩠ᩅᩃ᪨",
    "Yi": "ꊿꂷꃅꄿꐨꐥꌅꍀꂏ꽐ꐯꒈꃅꐥꌐ。ꊿꊇꉪꍆꌋꆀꁨꉌꑌꐥ。".replace("꽐", ""),
    "Shan": "ၵူၼ်းတင်းသဵင်ႈၼႆႉပဵၼ်ၵူၼ်းဢၼ်လွတ်ႈလႅဝ်းမႃးမၢၼ်ႇၸူမ်းႁူမ်ႈတင်းမူတ်း။",
}


@pytest.mark.parametrize("script", WITHOUT_SPACES)
def test_scripts_without_spaces_pass_the_rules_for_words_and_sentences(script):
    text = WITHOUT_SPACES[script] * 12
    lines = "\n".join([WITHOUT_SPACES[script].strip()] * 12)
    for step in ("gopher", "c4", "fineweb"):
        for form in (text, lines):
            kept, counts = clean([form], config(step, fineweb={"duplicate_characters": 1.0} if step == "fineweb" else {}))
            assert kept == [form], counts[step].dropped


def test_the_zero_width_space_of_a_script_without_spaces_is_kept():
    text = "ꦱꦧꦼꦤ\u200bꦲꦸꦮꦺꦴ ᨾᨶᩩᩔ\u200bᨴ᩠ᨦᩢ soft\u200bware"
    assert clean([text], config("normalise"))[0] == [text.replace("soft\u200bware", "software")]


def test_the_report_counts_what_cleaning_dropped_of_every_language():
    counts, other = PartCounts(documents=60, bytes=6000), PartCounts()
    for count in (counts, PartCounts.from_json(other.to_json())):
        add_in_group(count.languages, "dz", KEPT, 5, 500)
        add_in_group(count.languages, "dz", "gopher: mean word length", 15, 1500)
        add_in_group(count.languages, "en", KEPT, 10, 1000)
        other = count
    counts.add(other)
    empty = {"documents": 0, "bytes": 0}
    output = {"train": empty, "validation": empty, "corpora": {}, "languages": {}, "lengths": {}, "scores": {}, "repeated_documents": 0}
    built = shard_report.build(counts, NOTHING, None, output, {}, [])
    assert built["languages"]["dz"] == {"gopher: mean word length": [30, 3000], KEPT: [10, 1000]}
    made = shard_report.html(built)
    assert "Cleaning drops 75.0 % of the documents in <b>dz</b>: gopher: mean word length (75.0 %)" in made
    assert "documents in <b>en</b>" not in made


def test_without_cld2_only_cleaning_that_identifies_languages_is_refused(monkeypatch):
    """As on aarch64, where its package must be compiled."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert clean([PROSE], config("repair", "length"))[0] == [PROSE]
    for settings in (config("repair", "gopher"), config("length", length={"by_language": {"ko": {"least": 1}}})):
        with pytest.raises(UserError, match=r"clean.language.model=null: CLD2 \(pycld2\), by which (gopher|length) of clean.steps"):
            clean([PROSE], settings)
