"""Large documents of stage=shard: the memory that they take, and that slices of them are changed as whole texts are."""

import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.config.cleaning import STEPS, CleanConfig, GopherStep, LengthStep
from pipeline.config.data import DedupConfig
from pipeline.data.clean import document_batch
from pipeline.data.clean.cleaner import Cleaner
from pipeline.data.clean.document_batch import DocumentBatch
from pipeline.data.clean.language import built_in
from pipeline.data.read import input_files
from pipeline.data.read.documents import Document, ReadOptions
from pipeline.data.shard.process_part import process
from pipeline.data.shard.shuffle import Order

WIDTHS = {
    "ascii": ("abcdefghij", 0),
    "cjk": ("".join(map(chr, range(0x4E00, 0x5600))), 0),
    "german": ("abcdefghij", 0x201E),
    "emoji": ("abcdefghij", 0x1F600),
}
"""Kind of text -> its letters, and a rare character that decides how many bytes Python takes for every one."""


def prose(kind: str, size: int) -> str:
    """A text of about `size` bytes in UTF-8, with some repeated lines and trailing spaces."""
    letters, rare = WIDTHS[kind]
    chance = random.Random(0)
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(3000)] + ["the", "of", "and"] * 150
    lines, found = [], 0
    while found < size:
        if kind == "cjk":  # a word is several words of two letters, which would be repeated with it
            words = ["".join(chance.choices(letters, k=5)) for _ in range(12)]
        lines.append(" ".join(chance.choices(words, k=12)) + (chr(rare) if rare else "") + ".")
        found += len(lines[-1].encode()) + 1
    return " \n".join(lines)


@contextmanager
def limits(large: int, piece: int) -> Iterator[None]:
    """Change from how many characters on a text is large, and the length of its slices."""
    saved = document_batch.LARGE_TEXT, document_batch.SLICE_CHARACTERS
    document_batch.LARGE_TEXT, document_batch.SLICE_CHARACTERS = large, piece
    try:
        yield
    finally:
        document_batch.LARGE_TEXT, document_batch.SLICE_CHARACTERS = saved


def peak(folder, text: str, config: CleanConfig) -> int:
    """The most memory that reading, cleaning, hashing and spilling of a document takes."""
    path = folder / "large.jsonl"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    (part,) = input_files.parts(input_files.find({"default": [str(path)]}, [], []).files, 1 << 40)
    cleaner, order = Cleaner(config), Order.plan(["default"], 1 << 20, 256, 0, 0.01)
    tracemalloc.start()
    process(part, folder / "part", ReadOptions(), cleaner, order, DedupConfig(), lambda _: None, save_dropped=True)
    largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return largest


KEPT = {"gopher": GopherStep(most_words=10**9), "length": LengthStep(most=10**9)}


@pytest.mark.long
@pytest.mark.parametrize(
    "steps",
    [pytest.param({"steps": []}, marks=pytest.mark.long), {}, pytest.param(KEPT, marks=pytest.mark.long)],
    ids=["none", "default", "kept"],
)
def test_the_memory_for_a_large_document_is_that_of_its_words(tmp_path, steps):
    """README has the multiples of the size in UTF-8; strings of Python take 2 or 4 bytes a character where one character needs them."""
    built_in().identify(["the classifier of languages, which a process reads once"])
    for kind, most in {"ascii": 16, "german": 28, "cjk": 20, "emoji": 36}.items():
        text = prose(kind, 4 << 20)
        found = peak(tmp_path, text, CleanConfig(**steps)) / len(text.encode())
        assert found < most, f"{kind}: {found:.2f} times its size"


PIECES = [
    *("\n", "\n", "\n\n", " ", "word ", "the ", "of ", "a. ", "B! ", "…", "...", "#", "# ", "\n# x", "\n- item", "•", "漢字", "，", "。"),
    *("ไทย", "😀 ", "İ", "e\u0301", "\u200b", "\u00ad", "\r\n", "\x08", "\x1b[0m", "\x85", "\t\n", "\u00a0\n", "Ã¤", "&amp;"),
    *("<b>", "</b>", "`a`", "\n```\n", "\n    x", "privacy policy", "lorem ipsum", "{", "12345", "tel\n", "+49 30 1234567", "8.8.8.8 "),
    *("a@b.com ", "iban:\n", "DE89 3704 0044 0532 0130 00", "4111 1111 1111 1111", "SSN: 536-90-4399", "seven eight nine ten\n"),
    "one two three four five six. ",
]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(PIECES), max_size=120).map("".join), st.integers(1, 4), st.integers(24, 200))
@example("word " * 400, 2, 24)
@example("漢字，" * 300, 1, 24)
def test_slices_of_a_document_give_what_the_whole_gives(text, times, piece):
    text = text * times
    if not text:
        return
    config = CleanConfig(steps=[step for step in STEPS if step not in ("allow", "contamination", "score", "fields")], mode="tag")

    def cleaned() -> tuple:
        counts: dict = {}
        batch = Cleaner(config).clean(DocumentBatch([Document("x", 0, text, {})]), counts)
        return batch.texts, batch.tags, counts

    with limits(1 << 40, piece):
        whole = cleaned()
    with limits(1, piece):
        assert cleaned() == whole
