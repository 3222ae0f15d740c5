"""Repeated spans: what is removed equals what a dictionary of all windows finds. tests/data/test_duplicates.py has several ranks."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.common.mpi import Comm, SingleProcessComm
from pipeline.data.dedup import spans
from pipeline.data.shard import span_search
from pipeline.data.words import Words

ONE = SingleProcessComm()


def kept_units(documents: list[list[str]], length: int) -> list[list[str]]:
    """The units of every document that are in no window that occurs in an earlier document, or `length` units before it in its own."""
    first: dict[tuple[str, ...], tuple[int, int]] = {}
    left = []
    for number, units in enumerate(documents):
        removed: set[int] = set()
        for index in range(len(units) - length + 1):
            there, at = first.setdefault(tuple(units[index : index + length]), (number, index))
            if there < number or at + length <= index:
                removed |= set(range(index, index + length))
        left.append([unit for index, unit in enumerate(units) if index not in removed])
    return left


def found(comm: Comm, folder: Path, texts: dict[int, str], length: int, memory: float, reads: Counter[int] | None = None) -> dict[int, str]:
    """The texts of this rank, by number, without what the search finds; `reads` counts how often each of three parts is read."""

    def read(part: int) -> span_search.Texts:
        (Counter() if reads is None else reads)[part] += 1
        mine = list(texts)[part::3]
        for chosen in filter(None, (mine[:2], mine[2:])):
            yield np.array(chosen, dtype=np.uint32), [texts[number] for number in chosen]

    sources = [(folder / f"part-{comm.rank}-{part}", 0, partial(read, part)) for part in range(3)]
    with ExitStack() as opened:
        handle = cache(lambda path: opened.enter_context(path.open("rb")))
        counts = span_search.find(comm, sources, length, memory, lambda path: handle(path).fileno())
    cuts: dict[int, list[list[int]]] = {number: [] for number in texts}
    for number, *cut in np.concatenate([np.load(stem.with_suffix(span_search.CUTS)) for stem, _, _ in sources], axis=1).T.tolist():
        cuts[number].append(cut)
    assert counts["spans"] == sum(comm.allgather(sum(map(len, cuts.values()))))
    return {number: spans.without(text, cuts[number]) for number, text in texts.items()}


@given(
    st.lists(st.text("ab", max_size=40), max_size=7) | st.lists(st.text("abcd", min_size=20, max_size=60), min_size=4, max_size=7),
    st.integers(2, 9),
    st.sampled_from([1e9, 1500]),
    st.sampled_from([1 << 20, 7]),
    st.randoms(use_true_random=False),
)
def test_the_windows_that_a_dictionary_finds_are_removed(documents, length, memory, run_rows, chance):
    texts = [(number, " ".join(document)) for number, document in enumerate(documents)]
    with TemporaryDirectory() as folder, patch.object(span_search, "RUN_ROWS", run_rows):
        left = found(ONE, Path(folder), dict(chance.sample(texts, len(texts))), length, memory)
    assert [left[number].split() for number, _ in texts] == kept_units(documents, length)


def test_an_interrupted_search_reads_only_the_parts_that_have_no_files(tmp_path):
    chance, reads = random.Random(0), Counter[int]()
    texts = {number: " ".join(chance.choices("abc", k=50)) for number in range(6)}
    left = found(ONE, tmp_path, texts, 6, 1e9, reads)
    assert left != texts
    assert reads == {0: 2, 1: 2, 2: 2}
    (tmp_path / "part-0-1.windows").unlink()
    assert found(ONE, tmp_path, texts, 6, 1e9, reads) == left
    assert reads == {0: 2, 1: 3, 2: 2}


def test_scripts_without_spaces_are_cut_within_lines_and_all_characters_count(tmp_path):
    passage = "".join(random.Random(1).choices("天地玄黃宇宙洪荒日月盈昃辰宿列張寒來暑往秋收冬藏", k=200)) + "。"
    texts = {0: f"子曰{passage}學而時習之", 1: f"不亦說乎有朋自遠方來{passage}人不知"}
    left = found(ONE, tmp_path / "han", texts, 20, 1e9)
    assert left[0] == texts[0]
    assert left[1].startswith("不亦說乎有朋自遠方來")
    assert len(left[1]) < 30
    english = " ".join(f"word{number}," for number in range(30))
    rare = [character * 15 for character in map(chr, range(0x20000, 0x20020)) if len(Words([character * 15]).units) == 15]
    different = dict(enumerate([english, english.upper(), english.replace(",", "."), english.replace(" ", "_"), *rare]))
    assert found(ONE, tmp_path / "different", different, 10, 1e9) == different


def test_the_larger_of_two_breaks_stays():
    for text in ("a b c d", "a\n\nb c\n\nd", "a b c\n\nd"):
        assert spans.without(text, [(1, 3)]) == ("a\n\nd" if "\n" in text else "a d")
    assert [spans.without(" a b\nc \n", [cut]) for cut in ((0, 2), (2, 3), (0, 3))] == ["c \n", " a b", ""]
