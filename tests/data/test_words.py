"""Words and lines of a batch of texts, compared with a character-by-character implementation."""

import re
import unicodedata
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.data import words as words_module
from pipeline.data.words import Lookup, Words, mix, ngrams

TEXTS = st.lists(st.text(st.sampled_from("aäAÄbß1٣. \n\t-_'漢字ไ😀e\u0301\u00a0བོ་ꦱꦧꊿꂷ"), max_size=40), min_size=1, max_size=5)
NO_SPACES = re.compile("[\u0e00-\u0eff\u0f40-\u0fbc\u4e00-\u9fff\ua000-\ua48c\ua980-\uaadf]")


def is_cut(before: str, character: str) -> bool:
    """Whether a word of a script without spaces begins between two characters: 1 in 5 pairs in Thai, 1 in 2 in Han, none in Tibetan."""
    pair = np.array([ord(before) << 32 | ord(character)], dtype=np.uint64)
    if "\u0f00" <= character <= "\u0fff":
        return False
    return int(mix(pair)[0]) % (5 if character < "\u3000" or "\ua980" <= character <= "\uaadf" else 2) == 0


def words_of(text: str) -> list[str]:
    """The words of a text, by a loop over its characters."""
    found, open_word = [], False
    for position, character in enumerate(text):
        if unicodedata.category(character)[0] not in "LMN":
            open_word = False
        elif NO_SPACES.match(character):
            joined = position > 0 and NO_SPACES.match(text[position - 1]) and not is_cut(text[position - 1], character)
            found = [*found[:-1], found[-1] + character] if joined else [*found, character]
            open_word = False
        else:
            found = [*found[:-1], found[-1] + character] if open_word else [*found, character]
            open_word = True
    return found


def span_texts(words: Words, spans) -> list[list[str]]:
    """The strings of the spans of every text."""
    joined = "".join(map(chr, words.codes.tolist()))
    parts = [joined[start:end] for start, end in zip(spans.starts, spans.ends, strict=True)]
    return [parts[a:b] for a, b in zip(spans.offsets[:-1], spans.offsets[1:], strict=True)]


@given(TEXTS)
@example(["", "", ""])
@example(["word", "", "漢字 and kanji"])
def test_words_equal_those_of_a_loop_over_the_characters(texts):
    words = Words(texts)
    assert span_texts(words, words.spans) == [words_of(text) for text in texts]
    flat = [word.lower() for text in texts for word in words_of(text)]
    # Two words have the same hash if and only if they are equal except for case.
    assert len(set(words.hashes.tolist())) == len(set(flat))
    assert len(set(zip(words.hashes.tolist(), flat, strict=True))) == len(set(flat))


@given(TEXTS)
def test_a_hash_does_not_depend_on_the_neighbours(texts):
    together = Words(texts)
    for text, first, stop in zip(texts, together.offsets[:-1], together.offsets[1:], strict=True):
        assert np.array_equal(Words([text]).hashes, together.hashes[first:stop])


@pytest.mark.parametrize("text, kind", [("a b", "u1"), ("aé", "u2"), ("“a” 漢", "u2"), ("\ud83d\ude00", "u2"), ("a😀漢", "u4"), ("", "u1")])
def test_codes_are_in_the_smallest_type_that_holds_them(text, kind):
    """Two surrogates, which are no valid text, are two characters."""
    codes = Words([text, "x"]).codes
    assert codes.tolist() == [ord(character) for character in f"{text}\nx\n"]
    assert codes.dtype == np.dtype(kind)


@given(TEXTS)
def test_lines_are_the_stripped_non_blank_lines(texts):
    words = Words(texts)
    assert span_texts(words, words.lines) == [[line.strip() for line in text.split("\n") if line.strip()] for text in texts]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_ngrams_are_equal_where_their_members_are(values, length):
    hashes = ngrams(Words([" ".join(map(str, values))]).hashes, length).tolist()
    grams = [tuple(values[i : i + length]) for i in range(len(values) - length + 1)]
    assert sorted(Counter(hashes).values()) == sorted(Counter(grams).values())
    assert len(hashes) == len(grams)


@given(st.lists(st.integers(0, 50), min_size=1), st.lists(st.integers(0, 100)))
def test_lookup_finds_the_known_hashes(known, queries):
    lookup = Lookup(np.array(known, dtype=np.uint64), bits=4)
    positions, indices = lookup.find(np.array(queries, dtype=np.uint64))
    assert [queries[position] for position in positions] == [value for value in queries if value in known]
    assert lookup.known[indices].tolist() == [queries[position] for position in positions]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_hashes_do_not_depend_on_the_size_of_a_chunk(monkeypatch, chunk):
    texts = ["", "Ein Tännchen, 漢字 und\n\nlong" + "er" * 500 + "  words.", "x", "a b\nc 🎄 d " * 40]
    whole = Words(texts)
    expected = [whole.hashes, whole.hash_spans(whole.lines), whole.kinds]
    monkeypatch.setattr(words_module, "_CHUNK", chunk)
    pieces = Words(texts)
    for found, wanted in zip([pieces.hashes, pieces.hash_spans(pieces.lines), pieces.kinds], expected, strict=True):
        assert np.array_equal(found, wanted)
