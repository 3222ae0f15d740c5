"""Cleaning: every step on texts that it keeps, changes and drops; the result for a document depends only on that document."""

import json
import random
import re
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.common.knobs import changed
from pipeline.config.cleaning import STEPS, CleanConfig
from pipeline.data.clean.cleaner import RULES_OFF, Cleaner, turned_off
from pipeline.data.clean.document_batch import BATCH_CHARACTERS, DocumentBatch, batches
from pipeline.data.clean.language import built_in
from pipeline.data.dedup import minhash
from pipeline.data.read.documents import Document
from tests.data import planted
from tests.helpers import pipeline

PROSE = (
    "The old lighthouse keeper walked along the shore every evening, and he thought of the ships that had passed. "
    "It was a quiet life, but he would not have traded it for any other. In winter the storms came from the north, "
    "and with them the cold; the waves rose higher than the rocks on which he stood. He used to count the seconds "
    "between two flashes of the lamp, as his father had done before him. Nobody visited the island for months."
)


NEEDS_FILES = {"contamination", "score", "fields"}
"""Steps that need files, or a condition, of the user."""


def config(*steps: str, **knobs: dict) -> CleanConfig:
    """A configuration with the given steps, and the given knobs of each step."""
    return changed(
        CleanConfig(steps=list(steps)), {f"{step}.{key}": value for step, values in knobs.items() for key, value in values.items()}
    )


def clean(texts: list[str], wanted: CleanConfig, meta: dict | None = None) -> tuple[list[str | None], dict]:
    """Return every text after cleaning, None if it was dropped, and the counts."""
    counts: dict = {}
    batch = DocumentBatch([Document("x.jsonl", number, text, meta or {}) for number, text in enumerate(texts)])
    batch = Cleaner(wanted).clean(batch, counts)
    return [text if alive else None for text, alive in zip(batch.texts, batch.alive, strict=True)], counts


CHANGES = {
    "mojibake": ("repair", "Das schÃ¶ne MÃ¤dchen in KÃ¶ln, â€žgrÃ¼nâ€œ", "Das schöne Mädchen in Köln, „grün“"),
    "entities": ("repair", "Fish &amp; chips &#8211; 5&nbsp;pounds", "Fish & chips – 5\u00a0pounds"),
    "C1 controls": ("repair", "1990\x961995 \x93quoted\x94", "1990–1995 “quoted”"),
    "entities in code": (
        "repair",
        "Fish &amp; chips, `&amp;`\n\n    x = '&lt;'\n\n```\n&nbsp;\n```",
        "Fish & chips, `&amp;`\n\n    x = '&lt;'\n\n```\n&nbsp;\n```",
    ),
    "entities beside a tag": ("repair", "Er sagt, da&szlig; A&amp;B<br>f&#252;r 5&nbsp;&euro;", "Er sagt, daß A&B<br>für 5\u00a0€"),
    "entities in parentheses": ("repair", "Preis (&euro;) <br> AT&amp;T <a@b.de> a &amp;&amp; b", "Preis (€) <br> AT&T <a@b.de> a && b"),
    "entities in a list": (
        "repair",
        "1.  da&szlig; das\n    Gro&szlig;e &sect; 5&nbsp;&amp;&quot;",
        "1.  daß das\n    Große § 5\u00a0&amp;&quot;",
    ),
    "entities beside a comparison": ("repair", "Wei&szlig;t du, da&szlig; 2 < 3?", "Weißt du, daß 2 < 3?"),
    "escaped code beside tags": ("repair", "gr&ouml;&szlig;er <b>if</b> a &lt; b &amp;amp; c", "größer <b>if</b> a &lt; b &amp;amp; c"),
    "named entities": ("repair", 'Write the entity &szlig; in <p>, or "&auml;" there.', None),
    "entities as the subject": ("repair", "It encodes <p> as b'&lt;p&gt;'.", None),
    "escaped twice": ("repair", "Write &amp;lt; for a less-than sign", "Write &lt; for a less-than sign"),
    "source": ("repair", 'import html\nx = f("&amp;")\ny = x.replace("&quot;", q)\nreturn y', None),
    "no mojibake": ("repair", "„Schönheit“, Ära, Über-Ich: naïve façade & co", None),
    "composed": ("normalise", "cafe\u0301 a\u0308", "café ä"),
    "newlines": ("normalise", "one\r\ntwo\rthree\u2028four", "one\ntwo\nthree\nfour"),
    "invisible": ("normalise", "\ufeffso\u00adft\u200b hy\x00phen \U0001f468\u200d\U0001f469", "soft hyphen \U0001f468\u200d\U0001f469"),
    "line ends": ("normalise", "a  \nb\u00a0\nc\t\n\n\n\n\n\nd", "a\nb\nc\n\n\nd"),
    "page breaks": ("normalise", "one\x0ctwo\x85three\u2029four", "one\ntwo\nthree\nfour"),
    "terminal": ("normalise", "N\x08NA\x08AM\x08ME \x1b[1mbold\x1b[0m", "NAME bold"),
    "word boundaries": ("normalise", "ភាសា\u200bខ្មែរ soft\u200bware", "ភាសា\u200bខ្មែរ software"),
    "plain": ("normalise", "nothing to do\n\n\nhere", None),
    "tags": ("boilerplate", "<p>2 < 3 and <b>bold</b><br/> i <j</p>", "2 < 3 and bold\n i <j"),
    "tags in Markdown": (
        "boilerplate",
        "# Logo\n<p align='center'><b>A</b></p>\n\n`<b>x</b>`\n```\n<b>y</b>\n```",
        "# Logo\nA\n\n`<b>x</b>`\n```\n<b>y</b>\n```",
    ),
    "a client is no version": ("personal", "client 77.12.3.4 connected, player 91.4.7.22 left", "client <ip> connected, player <ip> left"),
    "versions of clients": ("personal", "client 4.2.1.10, Flash Player 11.2.202.235", None),
    "Spanish numbers": (
        "personal",
        "612 34 56 78, 91 123 45 67. Llámanos: 666 123 456. Llame al 912 345 678 para reservar.",
        "<phone>, <phone>. Llámanos: <phone>. Llame al <phone> para reservar.",
    ),
    "numbers in threes": ("personal", "RCS Paris 732 829 320. Org.nr. 987 654 321, 612 345 678 habitantes", None),
    "AT and DOT": ("personal", "jane.doe AT uni DOT de, jane AT cs DOT uni DOT de", "<email>, <email>"),
    "AT in capitals": ("personal", "LOOK AT example.com, LOOK AT ALL DOT COM companies, meet AT 5 DOT", None),
    "a list with zeros": ("personal", "Numbers 030 040 050 060, rooms 0301 0302 0303", None),
    "cells": ("boilerplate", "<table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table>", "a\tb\t\nc\t\n"),
    "subscripts": ("boilerplate", "The value x[i](y) is called; List<String> holds it. the <b> tag begins bold text, </b> ends it.", None),
    "calls": ("boilerplate", "Call f[0](x) twice. Use <b>, <i> and </b>, </i> for fonts.", None),
    "types": ("boilerplate", "# Types\n\nA List<String>, a Map<Label>, a Box<Source>, a Vec<Link>; see Option<Input>.", None),
    "tags that a sentence names": (
        "boilerplate",
        "# Tags\n\nThe <b> tag is closed by the </b> tag. The tag <em> begins, the tag </em> ends emphasis. Das <i>-Element, </i>.",
        None,
    ),
    "tags in a list": (
        "boilerplate",
        "# Tags\n\nDie Tags <b> und </b>, <i> und </i> heben hervor. "
        'Use <u>...</u>, "<br>", (<hr>) or \\<s>this\\</s>. <br> or <hr> elements.',
        None,
    ),
    "paragraphs as the subject": ("boilerplate", "<p> starts a paragraph, and the </p> tag ends it: these are tags.", None),
    "tags beside links": (
        "boilerplate",
        "See [a](b.md), [b](https://x.org).\n\nThis is <b>bold</b> tag soup,<br>next, \"<i>Title</i>\" and <img src='x.png'> <b>tags</b>.",
        'See [a](b.md), [b](https://x.org).\n\nThis is bold tag soup, next, "Title" and  tags.',
    ),
    "a page": ("boilerplate", "<html><style>p {}</style><script>a<b</script><!-- x --><p>One<p>Two</html>", "One\nTwo"),
    "drawings": ("boilerplate", '<html><p>One</p><svg width="2">\n<path d="M1 2"></path></svg><p>Two</html>', "One\nTwo"),
    "tags as the subject": ("boilerplate", "Das <b>-Element macht Text fett: <b>so</b>. Ende.\n<table>\nZeilen und Zellen", None),
    "templates": ("boilerplate", "std::map<S, T> m; std::vector<p> v;\n#include <table>\nif (a <b and c> d) return", None),
    "tags in RST": ("boilerplate", "The ``feed`` method:\n\n   p.feed('<html><p>Test</p></html>')\n", None),
    "tags in comments": (
        "boilerplate",
        "The policy of a module lists its rules, as in the following example of a file:\n\n## <summary>Myapp</summary>\n##  <p>More</p>\n",
        None,
    ),
    "tags in a root shell": ("boilerplate", "Load the module:\n\n# semodule -i x.pp\n# edit x.if\n\n## <summary>Myapp</summary>\n", None),
    "Markdown tables": ("boilerplate", "# Keys\n\n| a | b<br>c |", "# Keys\n\n| a | b c |"),
    "attributes": ("boilerplate", "# Compare\n\nIf a <b and c> d, or `x` <b y=1 then", None),
    "YAML": ("boilerplate", "---\napiVersion: v1\n---\nkind: Pod\n", None),
    "a technology": ("boilerplate", "JavaScript runs in browsers.\n```javascript\nx\n```\nlearn JavaScript", None),
    "wrapped notices": (
        "boilerplate",
        "The program follows the rules of the server, and our use of cookies\nis described below. It reads the\nprivacy policy of hosts.",
        None,
    ),
    "long lines": ("boilerplate", "He wrote about the privacy policy. " * 10, None),
    "front matter": ("boilerplate", "---\nTitle: x\nslug: y\n---\nText\n---\n", "Text\n---\n"),
    "phrases": ("boilerplate", "Text.\nPlease enable JavaScript!\nWe use cookies.\nMore.", "Text.\nMore."),
    "e-mail": ("personal", "Write to jane.doe+x@mail.example.org, or to @jane.", "Write to <email>, or to @jane."),
    "ip": ("personal", "from 84.112.7.9 and 127.0.0.1, version 1.2.3.4", "from <ip> and 127.0.0.1, version 1.2.3.4"),
    "iban": ("personal", "DE89 3704 0044 0532 0130 00, not DE12 3704 1144 1532 1130 11", "<iban>, not DE12 3704 1144 1532 1130 11"),
    "phones": ("personal", "+49 30 1234567, (0341) 97-11222, 0341/9711222, 555-123-4567", "<phone>, <phone>, <phone>, <phone>"),
    "phones beside letters": (
        "personal",
        "電話は03-5321-1111です。手机号是13800138000，谢谢。전화 02-2100-2114로 연락. โทร 02-123-4567ค่ะ",
        "電話は<phone>です。手机号是<phone>，谢谢。전화 <phone>로 연락. โทร <phone>ค่ะ",
    ),
    "ips beside letters": ("personal", "服务器84.112.7.9的日志, 서버 2001:4860:4860::8888에서", "服务器<ip>的日志, 서버 <ip>에서"),
    "numbers beside letters": ("personal", "版本84.112.7.9です。第03-1234-5678号、座席は020-1234番、共555-123-4567个、2010-11-12日", None),
    "few digits": ("personal", "Reisepass: C01XYCCT4", "Reisepass: <id>"),
    "wide at sign": ("personal", "連絡先は jane.doe＠mail.example.org です", "連絡先は <email> です"),
    "no phones": ("personal", "1848-1849, 2001-09-11, 3.141592653, 12,345,678 in 0815 cases, 020  16   10   DLE", None),
}


@pytest.mark.parametrize("case", CHANGES)
def test_texts_are_repaired(case):
    step, before, after = CHANGES[case]
    texts, counts = clean([PROSE, before], config(step))
    assert texts == [PROSE, before if after is None else after]
    changed = sum(count for reason, count in counts[step].changed.items() if reason != "entities left")
    assert changed == (after is not None)


def test_the_next_step_processes_the_changed_text():
    texts, _ = clean(["jane&#64;mail.example.org", PROSE], config("repair", "personal"))
    assert texts == ["<email>", PROSE]


DROPS = {
    "short": ("length", "short", "too short"),
    "few words": ("gopher", "Only these few words of the text.", "too few words"),
    "long words": ("gopher", "and the " + "incomprehensibilities " * 60, "mean word length"),
    "symbols": ("gopher", PROSE.replace(" the ", " #the "), "too many symbols"),
    "ellipses": ("gopher", PROSE.replace(" ", "…", 20), "too many symbols"),
    "bullets": ("gopher", "- " + PROSE.replace(". ", ".\n- "), "mostly bullet points"),
    "open lines": ("gopher", PROSE.replace(". ", "...\n") + "\n" + PROSE, "many lines end in an ellipsis"),
    "numbers": ("gopher", "the and " + PROSE.replace(" a ", " 17 ").replace(" the ", " 1 2 3 "), "too few words with letters"),
    "no stop words": ("gopher", " ".join(f"Lighthouse{'abcdefghij'[i % 10] * 2} ships islands" for i in range(30)), "too few stop words"),
    "sentences": ("c4", "One. Two? Three!", "too few sentences"),
    "placeholder": ("c4", PROSE + " Lorem ipsum dolor.", "lorem ipsum"),
    "menu": ("fineweb", "Home\nContact\nAbout us\nShop now", "few lines end in punctuation"),
    "list": ("fineweb", "Home.\nContact.\nAbout us.\nShop.", "mostly short lines"),
    "a repeated line": ("fineweb", PROSE.replace(". ", ".\n") + "\n" + PROSE.split(". ")[1] + ".", "characters in duplicate lines"),
    "lines": ("repetition", PROSE + "\nAgain and again." * 4, "repeated lines"),
    "paragraphs": ("repetition", "\n\n".join([PROSE.replace(". ", ".\n"), *["A\nb"] * 4]), "repeated lines"),
    "a bigram": ("repetition", "well yes " * 30 + PROSE, "one frequent 2-gram"),
    "long runs": ("repetition", PROSE + " " + " ".join(PROSE.split()[:30]), "repeated 5-grams"),
    "other language": (
        "language",
        "Der alte Leuchtturmwärter ging jeden Abend am Ufer entlang und dachte an die Schiffe.",
        "other language",
    ),
}


@pytest.mark.parametrize("case", DROPS)
def test_texts_are_dropped_for_the_expected_reason(case):
    step, text, reason = DROPS[case]
    texts, counts = clean([PROSE, text, PROSE], config(step, language={"keep": ["en"]}))
    assert texts == [PROSE, None, PROSE]
    assert counts[step].dropped == {reason: [1, len(text.encode())]}
    assert [shown[2] for shown in counts[step].examples[reason]] == [text[:300]]


#: Further rules: the settings with which the step drops a text, and what follows it.
STRICTER = {
    "too long": ("length", PROSE, {"most": 10}),
    "too many words": ("gopher", PROSE, {"most_words": 10}),
    "language unclear": ("language", PROSE, {"keep": ["en"], "share": 1.0}),
    "curly brackets": ("c4", PROSE + " {", {"no_curly_brackets": True}),
    "too many lines for its words": ("fineweb", PROSE.replace(". ", ".\n"), {"newlines": 0.01}),
    "characters in repeated lines": ("repetition", PROSE + "\n" + PROSE, {"lines": 1.0}),
    "repeated paragraphs": ("repetition", PROSE + 2 * "\n\nAgain.", {"lines": 0.9, "line_characters": 1.0, "paragraphs": 0.1}),
    "characters in repeated paragraphs": ("repetition", f"{PROSE}\n\n{PROSE}", {"lines": 0.9, "line_characters": 1.0, "paragraphs": 0.9}),
    **{f"repeated {n}-grams": ("repetition", DROPS["long runs"][1], {"long_ngrams": [9.0] * (n - 5) + [0.1] * (11 - n)}) for n in (6, 10)},
}


def test_the_named_setting_turns_a_rule_off():
    """Of every rule for quality that has one."""
    dropping = {(step, reason): (text, {}) for step, text, reason in DROPS.values() if turned_off(step, reason)}
    dropping |= {(step, reason): (text, knobs) for reason, (step, text, knobs) in STRICTER.items()}
    for (step, reason), (text, knobs) in dropping.items():
        assert clean([text], config(step, **{step: knobs}))[1][step].dropped.keys() == {reason}
        pairs = [setting.split("=") for setting in turned_off(step, reason).split()]
        off = {key.removeprefix(f"clean.{step}."): json.loads(value) for key, value in pairs}
        assert reason not in clean([text], config(step, **{step: {**knobs, **off}}))[1][step].dropped
    rules = {(step, reason) for step, reasons in RULES_OFF.items() for reason in reasons}
    assert {(step, re.sub(r"\d+", "n", reason)) for step, reason in dropping} == rules
    assert turned_off("language", "other language") is None


WITHOUT_SPACES = {
    "zh": "那位年老的灯塔看守人每天傍晚都沿着海岸散步，想着从这里驶过的船只。他的生活很平静，但是他不愿意用它去换任何别的生活。"
    "冬天的暴风雨从北方来，海浪比他站立的岩石还要高。他常常数着灯光两次闪烁之间的秒数，就像他的父亲从前做过的那样。"
    "好几个月都没有人到这座岛上来。到了春天，第一批渔民给他带来了面包、信件和报纸，他坐在窗前一直读到深夜。",
    "ja": "年老いた灯台守は毎晩海岸を歩き、通り過ぎていった船のことを考えていた。静かな暮らしだった。"
    "冬には北から嵐がやって来て、波は彼が立っている岩よりも高くなった。彼は灯火が光る間の秒数を数えた。何か月もの間、島を訪れる人はいなかった。"
    "春になると最初の漁師たちがパンと手紙と新聞を届けてくれ、彼は窓辺に座って夜遅くまで読みふけった。",
    "th": "คนเฝ้าประภาคารชราเดินเลียบชายฝั่งทุกเย็น และคิดถึงเรือที่แล่นผ่านไป ชีวิตของเขาเงียบสงบ แต่เขาไม่อยากแลกมันกับชีวิตอื่นใด "
    "ในฤดูหนาวพายุพัดมาจากทางเหนือ คลื่นสูงกว่าโขดหินที่เขายืนอยู่ เขาเคยนับวินาทีระหว่างแสงไฟสองครั้ง อย่างที่พ่อของเขาเคยทำมาก่อน "
    "ไม่มีใครมาเยือนเกาะนี้เป็นเวลาหลายเดือน เมื่อถึงฤดูใบไม้ผลิ ชาวประมงกลุ่มแรกก็นำขนมปัง จดหมาย และหนังสือพิมพ์มาให้",
    "ko": "늙은 등대지기는 매일 저녁 바닷가를 거닐며 지나간 배들을 생각했다. 조용한 삶이었다. "
    "겨울에는 북쪽에서 폭풍이 몰려왔고 파도는 그가 서 있는 바위보다 높았다. 그는 불빛이 두 번 번쩍이는 사이의 초를 세곤 했다. "
    "몇 달 동안 아무도 섬을 찾아오지 않았다. 봄이 되면 첫 어부들이 빵과 편지와 신문을 가져다주었고, 그는 창가에 앉아 밤늦도록 읽었다. "
    "그 뒤로 등대에는 다시 불이 켜졌다. 사람들은 모두 기뻐했고 아이들은 바닷가에서 노래를 불렀다.",
    "hi": "बूढ़ा प्रकाशस्तंभ रक्षक हर शाम समुद्र के किनारे टहलता था और उन जहाज़ों के बारे में सोचता था जो गुज़र चुके थे। उसका जीवन शांत था। "
    "सर्दियों में उत्तर से तूफ़ान आते थे और लहरें उन चट्टानों से ऊँची होती थीं जिन पर वह खड़ा रहता था। महीनों तक कोई द्वीप पर नहीं आता था। "
    "वसंत में पहले मछुआरे उसके लिए रोटी, चिट्ठियाँ और अख़बार लाते थे, और वह खिड़की के पास बैठकर देर रात तक पढ़ता था।",
    "ar": "كان حارس المنارة العجوز يمشي على الشاطئ كل مساء ويفكر في السفن التي مرت. كانت حياته هادئة، لكنه لم يكن ليستبدلها بأي حياة أخرى. "
    "في الشتاء كانت العواصف تأتي من الشمال، وكانت الأمواج أعلى من الصخور التي يقف عليها. لم يزر أحد الجزيرة لعدة أشهر. هل كان وحيدا؟ لا. "
    "وفي الربيع كان أول الصيادين يحملون إليه الخبز والرسائل والصحف، فيجلس قرب النافذة ويقرأ حتى وقت متأخر من الليل.",
}


@pytest.mark.parametrize("language", WITHOUT_SPACES)
def test_running_text_of_other_scripts_passes_every_rule(language):
    text = WITHOUT_SPACES[language]
    steps = [step for step in STEPS if step not in NEEDS_FILES]
    kept, counts = clean([text], config(*steps, length={"least": 50}, language={"keep": [language]}))
    assert kept == [text], {step: count.dropped for step, count in counts.items() if count.dropped}
    repeated = "\n".join([WITHOUT_SPACES[language]] * 3)
    assert clean([repeated], config("repetition"))[0] == [None]
    assert clean([text + PROSE + text], config("repetition"))[0] == [None]  # a repetition within a line


def test_thresholds_of_a_language_apply_to_that_language():
    wanted = config("gopher", gopher={"by_language": {"en": {"least_words": 1000}}})
    assert clean([PROSE, WITHOUT_SPACES["hi"]], wanted)[0] == [None, WITHOUT_SPACES["hi"]]
    wanted = config("repetition", repetition={"by_language": {"en": {"top_ngrams": [0.001] * 3}}})
    assert clean([PROSE + " " + PROSE[:60], WITHOUT_SPACES["hi"]], wanted)[0] == [None, WITHOUT_SPACES["hi"]]


def test_the_language_is_that_of_the_prose():
    code = "```c\n" + "int main(void) { return printf(x); }\n" * 40 + "```\n"
    german = "Am Abend ging der alte Mann noch einmal an den Strand, um nach den Schiffen zu sehen, die nicht gekommen waren. " * 3
    batch = DocumentBatch([Document("x", 0, code + german + "\n" + code, {})])
    assert batch.languages[0][0] == "de"


def test_headings_are_no_symbols_and_dot_leaders_are_one():
    headings = "\n\n".join(f"## {sentence}" for sentence in PROSE.split(". "))
    leaders = PROSE + "\n" + "\n".join(f"Chapter {name} ............................ {name}" for name in ("one", "two", "three"))
    assert clean([headings, leaders], config("gopher"))[0] == [headings, leaders]


def test_tag_mode_keeps_and_annotates_every_document():
    wanted = changed(config("normalise", "length", "gopher"), {"mode": "tag"})
    counts: dict = {}
    batch = Cleaner(wanted).clean(DocumentBatch([Document("x", 0, "short \ntext", {}), Document("x", 1, PROSE, {})]), counts)
    assert batch.alive.all()
    assert batch.texts == ["short\ntext", PROSE]
    assert batch.tags == [["length: too short", "gopher: too few words"], []]
    assert (counts["length"].tagged, counts["length"].dropped) == ({"too short": [1, 10]}, {})


def test_planted_personal_data_is_masked_and_lookalikes_are_not():
    masked, missed, kinds = 0, [], {}
    for kind, text, secret in planted.positives(640):
        (found,), _ = clean([text], config("personal"))
        label = f"<{kind.split()[-1]}>"
        wanted = text.replace(f"<{secret}>", label) if f"<{secret}>" in text else text.replace(secret, label)
        masked += found == wanted
        missed += [(text, found)] if found != wanted else []
        kinds[kind] = kinds.get(kind, 0) + (found == wanted)
    wrong = [(text, found) for text in planted.negatives() for found in clean([text], config("personal"))[0] if found != text]
    assert masked >= 0.98 * 640, missed
    assert masked >= 0.98 * (masked + len(wrong)), wrong
    assert min(kinds.values()) >= 0.95 * 80, kinds


INERT = [
    *planted.negatives(),
    *(before for step, before, after in CHANGES.values() if step == "personal" and after is None),
    *(text.strip() for text in (WITHOUT_SPACES | {"en": PROSE}).values()),
    "The value x[i](y) and M[k](v) are calls; a List<String>, a Box<Link>, the <b> tag.",
    "if (a < b && b > c) return &x; // R&D, AT&T, 5 < 6 > 4",
]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(INERT), min_size=1, max_size=8))
def test_no_step_changes_text_that_it_does_not_name(pieces):
    """No combination of texts without markup, notices, defects of encoding and personal data is changed."""
    text = "\n\n".join(pieces)
    assert clean([text], config("boilerplate", "repair", "normalise", "personal"))[0] == [text]


def test_examples_show_the_masked_form_in_every_step():
    secrets = ["jane.doe@mail.example.org", "030 12345678"]
    text = f"Fish &amp; chips: {secrets[0]}, Tel. {secrets[1]}"
    _, counts = clean([text], config("repair", "personal", "length"))
    shown = json.dumps([step.examples for step in counts.values()])
    assert len([step for step in counts.values() if step.examples]) == 3
    assert not [secret for secret in secrets if secret in shown]
    assert "<email>" in shown
    _, counts = clean([text], config("repair"))
    assert secrets[0] in json.dumps(counts["repair"].examples)  # what is not masked in the shards is not masked in the report


def test_the_classifier_of_languages_is_read_where_a_step_asks_for_it():
    built_in.cache_clear()
    assert clean(["Fish &amp; chips", PROSE], config("repair", "length"))[0] == [None, PROSE]
    assert not built_in.cache_info().currsize
    clean([PROSE], config("gopher"))
    assert built_in.cache_info().currsize


def test_prose_passes_every_step():
    assert clean([PROSE], config(*(set(STEPS) - NEEDS_FILES)))[0] == [PROSE]


@pytest.mark.parametrize(
    "code, text",
    [
        ("en", PROSE),
        ("de", "Am Abend ging der alte Mann noch einmal an den Strand, um nach den Schiffen zu sehen, die nicht gekommen waren."),
        ("fr", "Le vieil homme se promenait chaque soir au bord de la mer et pensait aux bateaux qui étaient passés."),
        ("pl", "Stary latarnik spacerował co wieczór brzegiem morza i myślał o statkach, które przepłynęły obok wyspy."),
        ("el", "Ο γέρος φαροφύλακας περπατούσε κάθε βράδυ στην ακτή και σκεφτόταν τα πλοία που είχαν περάσει."),
        ("und", "0x1f 0x2e 93 17 ...."),
    ],
)
def test_languages_are_identified(code, text):
    assert built_in().identify([text])[0][0] == code


def test_sources_and_licenses_that_are_not_allowed_are_dropped():
    wanted = config("allow", allow={"licences": ["cc-by*", "cc0"]})
    assert clean([PROSE], wanted, {"license": "CC-BY-4.0"})[0] == [PROSE]
    assert clean([PROSE], wanted, {"license": "all rights reserved"})[0] == [None]
    assert clean([PROSE], wanted)[0] == [None]
    for tag, kept in [("MIT OR GPL-2.0-only", True), ("MIT AND GPL-2.0-only", False), ("(MIT OR Apache-2.0) AND GPL-2.0-only", False)]:
        code = f"/* SPDX-License-Identifier: {tag} */\n{PROSE}"
        assert clean([code], config("allow", allow={"licences": ["mit", "apache-*"]}))[0] == [code if kept else None], tag
    assert clean([f"{PROSE * 20}\nSPDX-License-Identifier: CC0"], wanted)[0] == [None]  # only its beginning speaks of the text
    assert clean([PROSE], config("allow", allow={"reserved": False}), {"reserved": "robots"})[0] == [None]
    assert clean([PROSE], config("allow"), {"reserved": "robots"})[0] == [PROSE]
    assert clean([PROSE], config("allow", allow={"sources": ["*.txt"]}))[0] == [None]  # without metadata, the file name is the source


BLOCKED = """\ufeff# a list
example.org
*.ads.example.com   # only what is below
https://Books.example.net:443/shop/
münchen.example
10.0.0.1
[2001:DB8:0::1]
straße.de
path.example/%C3%A4
query.example/bad?id=5
beginning.example/bad
"""
ADDRESSES = {
    "http://example.org": True,
    "https://user:word@www.EXAMPLE.org:8080/a?b=c#d": True,
    "https://notexample.org/": False,
    "https://example.org.evil.example/": False,
    "//x.ads.example.com/": True,
    "https://example.com/ads.example.com": False,
    "http://books.example.net/shop": True,
    "http://www.books.example.net/shop/1/2.html": True,
    "http://books.example.net/shop?page=2": True,
    "http://books.example.net/shopping": False,
    "http://books.example.net/Shop/": False,
    "http://xn--mnchen-3ya.example/x": True,
    "ftp://10.0.0.1/": True,
    "http://110.0.0.1/": False,
    "http://[2001:db8::1]:80/x": True,
    "http://[2001:db8::2]/": False,
    "https://xn--strae-oqa.de/": True,
    "https://strasse.de/": False,
    "http://path.example/ä/1": True,
    "http://query.example/bad?id=5": True,
    "http://query.example/bad?id=51": False,
    "http://beginning.example/bad#top": True,
    "http://beginning.example/badly": False,
    "not an address": False,
    "": False,
}


def test_documents_of_blocked_addresses_are_dropped(tmp_path):
    (tmp_path / "list.txt").write_text(BLOCKED)
    wanted = config("allow", allow={"blocked": [str(tmp_path / "list.txt")]})
    assert {url: clean([PROSE], wanted, {"url": url})[0] == [None] for url in ADDRESSES} == ADDRESSES
    texts, counts = clean([PROSE] * 2, wanted, {"url": "http://example.org"})
    assert (texts, counts["allow"].dropped) == ([None] * 2, {"blocked address": [2, 2 * len(PROSE)]})
    assert clean([PROSE], wanted)[0] == clean([PROSE], wanted, {"url": None})[0] == [PROSE]
    for content, said in (
        ("0.0.0.0 example.org\n", "line 1 is no address: '0.0.0.0 example.org'"),
        ("\n/a\n", "line 2"),
        ("||example.com^\n", "line 1"),
        ("a.org\nexample.com,site.org\n", "line 2"),
        ("2001:db8::1", "line 1"),
        (b"\xff", "cannot be read"),
    ):
        (tmp_path / "bad.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UserError, match=said):
            Cleaner(config("allow", allow={"blocked": [str(tmp_path / "bad.txt")]}))
    (tmp_path / "empty.txt").touch()
    assert clean([PROSE], config("allow", allow={"blocked": [str(tmp_path / "empty.txt")]}), {"url": "http://a"})[0] == [PROSE]


def test_an_ngram_of_a_benchmark_is_found_regardless_of_case_and_punctuation(tmp_path):
    (tmp_path / "bench.jsonl").write_text(json.dumps({"text": PROSE[:220]}))
    wanted = config("contamination", contamination={"files": [str(tmp_path / "bench.jsonl")]})
    words = PROSE.split()
    caught = "Something else: " + " ".join(words[3:16]).upper() + " and more"
    missed = "Something else: " + " ".join(words[3:15]) + " and more"
    assert clean([caught, missed], wanted)[0] == [None, missed]
    assert Cleaner(wanted).notes["contamination"] == {"items": 1, "items matched as a whole": 0, "items of fewer than 8 words, ignored": 0}
    for files, rule in (([], "contain no text of 8 words"), ([str(tmp_path / "none.jsonl")], "no such file")):
        with pytest.raises(UserError, match=rule):
            Cleaner(config("contamination", contamination={"files": files}))


def test_short_items_of_a_benchmark_are_matched_as_a_whole(tmp_path):
    short, other = "What is the tallest mountain of the Northern Alps?", "Which of these rivers flows through the capital of Hungary today?"
    chinese = "那位年老的灯塔看守人每天傍晚都沿着海岸散步想着船只"
    items = [short, other, "Too short an item.", chinese, PROSE[:220]]
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps({"text": item}) + "\n" for item in items))
    wanted = config("contamination", contamination={"files": [str(tmp_path / "bench.jsonl")]})
    caught = [
        f"Question: {short} Answer: the Zugspitze.",
        f"He asked:\n{other.upper()}",
        f"从前，{chinese}的故事。",
        f"听说{chinese}的故事",
        " ".join(PROSE.split()[3:16]),
    ]
    missed = [
        "What is the tallest mountain of the Northern Andes?",
        "Too short an item.",
        " ".join(other.split()[:9]),
        " ".join(PROSE.split()[3:15]),
    ]
    split = [short[:20], short[20:]]  # in two documents
    assert clean([*caught, *missed, *split], wanted)[0] == [None] * 5 + missed + split
    assert Cleaner(wanted).notes["contamination"] == {"items": 5, "items matched as a whole": 3, "items of fewer than 8 words, ignored": 1}


PIECES = [PROSE, *PROSE.split(". "), "the of and", "\n", "\n\n", "- item", "# head", "...", "a b c d e f"]
PIECES += ["jane@x.org", "&amp;", "Ã¤", "12 34", "漢字", ""]


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map(" ".join), min_size=1, max_size=6))
def test_the_result_for_a_document_does_not_depend_on_its_batch(texts):
    wanted = config(*(set(STEPS) - NEEDS_FILES), length={"least": 20})
    together, _ = clean(texts, wanted)
    assert together == [clean([text], wanted)[0][0] for text in texts]


def covered(words: list[str], length: int) -> int:
    """Characters of words in n-grams that occurred earlier, directly from the definition."""
    seen, inside = set(), set()
    for start in range(len(words) - length + 1):
        gram = tuple(words[start : start + length])
        if gram in seen:
            inside.update(range(start, start + length))
        seen.add(gram)
    return sum(len(words[index]) for index in inside)


@given(
    st.lists(st.tuples(st.sampled_from(["aa", "b", "ccc"]), st.sampled_from([" ", ", ", "    "])), min_size=1, max_size=60),
    st.floats(0.05, 0.5),
)
def test_repetition_matches_its_definition(pairs, share):
    """The occurrences of an n-gram differ in the characters between the words: the measure is the sum over all of them."""
    words = [word for word, _ in pairs]
    text = "".join(word + space for word, space in pairs[:-1]) + words[-1]
    starts = [sum(len(word + space) for word, space in pairs[:number]) for number in range(len(pairs))]
    rules = {"top_ngrams": [share] * 3, "long_ngrams": [share] * 6}
    everything = {"lines": 1.0, "line_characters": 1.0, "paragraphs": 1.0, "paragraph_characters": 1.0}
    kept, counts = clean([text], config("repetition", repetition={**rules, **everything}))
    faults = []
    for length in (2, 3, 4):
        grams = Counter(tuple(words[i : i + length]) for i in range(len(words) - length + 1))
        characters: Counter[tuple[str, ...]] = Counter()
        for i in range(len(words) - length + 1):
            characters[tuple(words[i : i + length])] += starts[i + length - 1] + len(words[i + length - 1]) - starts[i]
        sizes = [characters[gram] for gram, number in grams.items() if number > 1]
        faults += [f"one frequent {length}-gram"] if max(sizes, default=0) > share * len(text) else []
    faults += [f"repeated {length}-grams" for length in range(5, 11) if covered(words, length) > share * len(text)]
    assert list(counts["repetition"].dropped) == faults[:1]
    assert kept == [None if faults else text]


def test_the_memory_for_a_large_document_is_bounded():
    """Of all steps and of the signature; the original text and the first tables are not counted."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 9))) for _ in range(5000)] + ["the", "of", "and"] * 300
    text = ".\n".join(" ".join(chance.choices(words, k=20)) for _ in range(25_000))
    wanted = config(*(set(STEPS) - NEEDS_FILES - {"repair"}), gopher={"most_words": 10**9})

    def peak(content: str) -> int:
        tracemalloc.start()
        batch = Cleaner(wanted).clean(DocumentBatch([Document("x", 0, content, {})]), {})
        minhash.signatures(*minhash.shingles(batch.words), 128)
        largest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return largest

    peak(text[:10_000])
    assert peak(text) < 22 * len(text)


def test_a_large_document_is_a_batch_of_its_own():
    sizes = [10, BATCH_CHARACTERS + 1, 10, 10]
    found = [[len(text) for text in batch.texts] for batch in batches(Document("x", n, "y" * size, {}) for n, size in enumerate(sizes))]
    assert found == [[10], [BATCH_CHARACTERS + 1], [10, 10]]


def test_batches_contain_every_document_once():
    documents = [Document("x", number, "y" * 40_000, {}) for number in range(20)]
    assert [document for batch in batches(documents) for document in batch.documents] == documents
    assert len(list(batches(documents))) > 1


def test_unknown_steps_are_refused_with_the_list_of_known_ones():
    own = "clean.gopher.by_language={ko: {least_word_length: -1, words: 2}}"
    printed = pipeline(
        *("stage=shard", "data.input=[x]", "clean.steps=[repair,spelling,repair]", "clean.personal.kinds=[names]", own),
        *("clean.language.keep=[he,english,sr-Latn]", "clean.length.by_language={jp: {least: 10}}"),
        expect=2,
    )
    assert "spelling" in printed
    assert "choose allow, repair" in printed
    assert "names" in printed
    assert "clean.gopher.by_language.ko.least_word_length" in printed
    assert "clean.gopher.by_language.ko.words" in printed
    assert "twice" in printed
    unknown, nearest = "is no code of a language that the detector knows", "\n    fix: the nearest is"
    assert f"clean.language.keep=english: {unknown}{nearest} en (English)" in printed
    assert f"clean.language.keep=sr-Latn: names a part of sr that the detector does not distinguish{nearest} sr (Serbian)" in printed
    assert f"clean.length.by_language.jp=jp: {unknown}{nearest} ja (Japanese)" in printed
    assert "keep=he:" not in printed
