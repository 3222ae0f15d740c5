"""The fast rules of cleaning, compared with plain ones on random texts: of code, repetition, personal data and examples."""

import re
from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.data.clean import code_detection, phones, pii_masking
from pipeline.data.clean.cleaner import DROPPED, EXAMPLES, OF_LANGUAGE, Change, StepCounts
from pipeline.data.clean.repetition import ChosenWords
from pipeline.data.words import Words

#: White space and control characters, combined and wide ones, scripts without spaces, surrogates, and digits that are no ASCII.
NASTY = ["", "\r\n", "e\u0301", "漢字", *" \n\t\x00\u00a0\u2028\u200bİﬁก😀\ud800\udfff²٣１"]
CODE = ["```", "~~~", "> ```py", "- ~~~", "    ", "\n    x = 1", "\n\ty", "\n```\n", "\n~~~~\n", "`a`", "`", "word " * 9]
LINES = st.lists(st.sampled_from(NASTY + CODE), max_size=60).map("".join)


def prose(text: str) -> str:
    """The text without code, line by line."""
    if "`" not in text and "\n    " not in text and "\n\t" not in text:
        return text
    lines, fence = [], ""
    for line in text.split("\n"):
        if fence:
            fence = "" if line.lstrip(" \t>").startswith(fence) else fence
        elif opened := re.fullmatch(r"[ \t>]*(?:[-*+][ \t]+)?(```|~~~)[^`]*", line):
            fence = opened[1]
        elif not line.startswith(("    ", "\t")):
            lines.append(line)
    rest = re.sub(r"`[^`\n]*`", " ", "\n".join(lines))
    return rest if len(rest) >= max(200, len(text) // 5) else text


@given(LINES)
@example("    code\n" + "prose " * 100)
@example("prose " * 100 + "\n   three spaces\n    four")
@example("prose " * 100 + "\n\n    code")
@example("\n\t" + "prose\n" * 100 + "\t")
def test_prose_is_what_a_loop_over_the_lines_leaves(text):
    """Also of texts whose code is never most of them, so that it is left out."""
    for whole in (text, "prose " * 40 + "\n" + text):
        assert code_detection.prose(whole) == prose(whole)


@pytest.mark.parametrize("line", ["a ", "漢", "`", "    ", "\x00"])
def test_prose_of_a_line_of_two_megabytes(line):
    text = "\n" + line * (2_000_000 // len(line))
    assert code_detection.prose(text) == prose(text)


def grams(words: list[str], spans: list[tuple[int, int]], length: int) -> tuple[int, int]:
    """(Characters in all occurrences of the n-gram with the most, characters of the words in repetitions), from the definitions."""
    starts = range(len(words) - length + 1)
    number = Counter(tuple(words[start : start + length]) for start in starts)
    characters: Counter[tuple[str, ...]] = Counter()
    seen, inside = set(), set()
    for start in starts:
        gram = tuple(words[start : start + length])
        characters[gram] += spans[start + length - 1][1] - spans[start][0] if number[gram] > 1 else 0
        if gram in seen:
            inside.update(range(start, start + length))
        seen.add(gram)
    return max(characters.values(), default=0), sum(spans[index][1] - spans[index][0] for index in inside)


PIECES = st.tuples(st.sampled_from(["a", "A", "bb", "ccc", "ß", "e\u0301", "1"]), st.sampled_from([" ", ", ", "\n\n", "\x00"]))


@given(st.lists(st.tuples(st.lists(PIECES), st.booleans()), min_size=1, max_size=5), st.integers(1, 4))
def test_repeated_ngrams_are_those_of_the_definition(cases, first):
    """Of a part of the texts of a batch: the n-grams of neighbors do not count."""
    texts = ["".join(word + space for word, space in pairs) for pairs, _ in cases]
    chosen = np.array([taken for _, taken in cases])
    lengths = range(first, first + 6)
    words = ChosenWords(Words(texts), chosen)
    found = list(zip(words.most_covered(lengths), words.covered(lengths), strict=True))
    for length, (most, covered) in zip(lengths, found, strict=True):
        for number, (pairs, taken) in enumerate(cases):
            ends = np.cumsum([len(word + space) for word, space in pairs]).tolist()
            spans = [(end - len(word + space), end - len(space)) for end, (word, space) in zip(ends, pairs, strict=True)]
            wanted = grams([word.lower() for word, _ in pairs], spans, length) if taken else (0, 0)
            assert (most[number], covered[number]) == wanted


DATA = [
    *("a@b.com", "＠x.org", "jane [at] example (dot) org", "{ät}", "8.8.8.8", "2a00:1450:4001:81b::200e", "DE89370400440532013000"),
    *("iban de89 3704 0044 0532 0130 00", "4111 1111 1111 1111", "SSN: 536-90-4399", "curp ABCD123456HDFRRL09", "passport C01X00T47"),
    *("+49 30 1234567", "tel ", "phone: ", "(555) 123-4567", "電話", "030", "00", "12", "123", "12345678", *"()-/.:"),
]
PERSONAL = st.lists(st.sampled_from(NASTY + DATA), max_size=12).map("".join)


@given(st.lists(PERSONAL, max_size=4))
@example(["", "a@b.com", ""])
@example(["(030) 12345"])
def test_the_fast_tests_miss_no_personal_data(texts):
    plain = []
    for text in texts:
        for kind, (_, _, find) in pii_masking._SEARCHES.items():
            text = pii_masking._replaced(text, find(text), kind)
        plain.append(text)
    assert pii_masking.mask(texts, pii_masking.KINDS) == plain
    assert pii_masking.mask(texts, []) == texts


@given(PERSONAL)
@example("phone: 555-1234")
def test_runs_with_few_digits_hold_no_phone_number(text):
    fast = phones.spans(text)
    everywhere = re.compile("")
    kept, phones._SEVEN_DIGITS = phones._SEVEN_DIGITS, everywhere
    try:
        assert phones.spans(text) == fast
    finally:
        phones._SEVEN_DIGITS = kept


@given(st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), max_size=30), max_size=4))
def test_examples_are_those_with_the_lowest_hashes(batches):
    """Batches of many documents give the examples that the same documents one by one give."""
    together, one_by_one, shown = StepCounts(), StepCounts(), []

    def shown_as(texts):
        shown.extend(texts)
        return [text.upper() for text in texts]

    for batch in batches:
        changes = [Change(reason, str(number), f"before {number}", f"after {number}") for reason, number in batch]
        together.add_examples(changes, shown_as)
        for change in changes:
            one_by_one.add_examples([change], lambda texts: [text.upper() for text in texts])
    assert together.examples == one_by_one.examples
    for reason in "ab":
        numbers = [number for batch in batches for own, number in batch if own == reason]
        examples = together.examples.get(reason, [])
        assert len(examples) == min(EXAMPLES, len(numbers))
        assert all(row[2] == f"BEFORE {row[1]}" for row in examples)


@pytest.mark.long
@given(st.integers(0, 400), st.integers(1, 6), st.randoms(use_true_random=False))
def test_examples_of_dropped_documents_are_of_every_corpus_and_language_in_any_division_into_parts(documents, parts, chance):
    """Twenty of each corpus, and three of each language, those with the lowest hashes."""
    rare = [f"language {number}" for number in range(20)]
    changes = [
        Change("r", str(n), "", None, chance.choice("aaab"), chance.choice(["de"] * 50 + rare))
        for n in chance.sample(range(10**6), documents)
    ]
    whole = StepCounts()
    whole.add_examples(changes, list)
    counts = [StepCounts() for _ in range(parts)]
    for change in changes:
        chance.choice(counts).add_examples([change], list)
    chance.shuffle(counts)
    summed = StepCounts()
    for part in counts:
        summed.add(part)
    assert summed == whole
    found = whole.examples.get("r", [])
    assert found == sorted(found)
    by_hash = sorted(changes, key=lambda change: xxhash.xxh3_64_intdigest(change.identity.encode()))
    lowest = {c.identity for corpus in "ab" for c in [c for c in by_hash if c.corpus == corpus][:DROPPED]}
    lowest |= {c.identity for label in ("de", *rare) for c in [c for c in by_hash if c.language == label][:OF_LANGUAGE]}
    assert {example[1] for example in found} == lowest
