"""Languages: one label for every spelling of a code, in cleaning, statistics and labels; scripts that do not separate words."""

import pytest

from pipeline.common import languages
from pipeline.common.languages import TABLE
from pipeline.data.clean.counts import STOP_WORDS
from pipeline.data.clean.document_batch import DocumentBatch
from pipeline.data.clean.fasttext_model import FastText
from pipeline.data.clean.language import BUILT_IN, UNKNOWN, built_in
from pipeline.data.dedup.clusters import NOTHING
from pipeline.data.read.documents import Document, add_in_group
from pipeline.data.shard import shard_report, text_shards
from pipeline.data.shard.process_part import KEPT, PartCounts
from tests.data.test_clean import PROSE, clean, config

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
    assert built_in().identify([TEXTS[label]])[0][0] == label
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


def test_the_table_lists_what_the_built_in_detector_knows_and_keep_accepts_it():
    known = [line.split("|")[1].strip() for line in TABLE.strip().splitlines()]
    assert sorted([*known, languages.UNKNOWN]) == sorted(FastText(BUILT_IN).labels)
    for label in known:
        assert languages.label(label) == label
        assert label in languages.covered(label)
        assert label in built_in().covered(label)


NO_LANGUAGE = {
    "nothing": "",
    "numbers": "1 957,34 2 001,16 2 046,17 - 17.001, 0x1f 0x2e 93; 12:30",
    "a table": "DM 17.001 - 18.000 | 211 DM | 18.001 - 19.000 | 202 DM " * 9,
    "two words": "OK, cancel",
    "a hash": "da39a3ee5e6b4b0d3255bfef95601890afd80709 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "random letters": "qxz vkp wjfq zzt bxh kqj wvx pfz qhx jjk zxv mqp xkw vbq hzj",
    "emoji": "😀 🎉 ❤️ 👍🏽 → ★★★ ©",
}


@pytest.mark.parametrize("kind", NO_LANGUAGE)
def test_what_is_in_no_language_is_unknown(kind):
    assert built_in().identify([NO_LANGUAGE[kind]]) == [UNKNOWN]


def test_a_good_text_in_one_of_two_close_languages_is_kept_and_one_half_in_each_of_two_others_is_unclear():
    close = [TEXTS["id"], TEXTS["no"], TEXTS["nn"], TEXTS["zh"]]
    assert clean(close, config("language", language={"keep": ["id", "no", "zh"], "share": 0.8}))[0] == close
    mixed = f"{TEXTS['id']} {TEXTS['nn']}"
    assert clean([mixed], config("language", language={"keep": ["id", "nn"], "share": 0.8}))[0] == [None]


DECIDED_BY_WORDS = {
    "ms": "Kerajaan telah memutuskan bahawa semua sekolah akan ditutup pada minggu hadapan kerana banjir yang teruk di negeri itu.",
    "id": "Pemerintah memutuskan bahwa semua sekolah akan ditutup minggu depan karena banjir yang parah di provinsi itu.",
    "bs": "Niko ne zna koliko će hiljada ljudi prije septembra ostati bez posla. Evropske zemlje traže saradnju univerziteta, a porodice "
    "djece iz tog mjesta čekaju već tri sedmice da im neko odgovori.",
    "hr": "Nitko ne zna koliko će tisuća ljudi prije rujna ostati bez posla. Europske zemlje traže suradnju sveučilišta, a obitelji "
    "djece iz tog mjesta čekaju već tri tjedna da im netko odgovori.",
    "sr": "Niko ne zna koliko će hiljada ljudi pre septembra ostati bez posla. Evropske zemlje traže saradnju univerziteta, a porodice "
    "dece iz tog mesta čekaju već tri nedelje da im neko odgovori.",
}


def test_words_decide_between_close_languages():
    assert [label for label, _ in built_in().identify(list(DECIDED_BY_WORDS.values()))] == list(DECIDED_BY_WORDS)
    assert built_in().identify([f"{TEXTS['nn']} Kerana bahawa sahaja."])[0][0] == "nn", "languages of other groups are not decided by them"


def test_case_digits_punctuation_and_control_characters_do_not_matter():
    for label, text in TEXTS.items():
        changed = "\x00" + text.upper().replace(" ", " – 17 * ") + "\uffff\ud800"
        assert built_in().identify([changed])[0][0] == label


def test_every_code_of_the_table_names_one_language():
    codes = [code for line in TABLE.strip().splitlines() for code in "|".join(line.split("|")[1::2]).replace("|", " ").split()]
    assert len(set(codes)) == len(codes)
    assert set(STOP_WORDS) <= set(codes)


def test_the_label_of_a_document_is_the_one_of_cleaning():
    for given, label in {"iw": "he", "deu_Latn": "de", "zh-TW": "zh-Hant", "en-US": "en", "own label": "own label"}.items():
        assert text_shards.language({"lang": given}) == label
        assert text_shards.language({"lang": "und", "meta": {"lang": given}}) == label
        assert DocumentBatch([Document("x", 0, "", {"lang": given})]).labels([0]) == [label]
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
