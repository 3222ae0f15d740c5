"""Duplicates, on any number of ranks, compared with an exhaustive search over all pairs."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common import artifact
from pipeline.common.errors import UserError
from pipeline.common.mpi import SingleProcessComm
from pipeline.config.data import DedupConfig
from pipeline.data.dedup import clusters, duplicates, exact, minhash, signatures
from pipeline.data.dedup.exact import EDGE
from pipeline.data.words import Words
from tests.data.library import here
from tests.data.test_spans import kept_units
from tests.helpers import ROOT, one_in, python

VOCABULARY = [f"wort{number}" for number in range(3000)]


def changed(chance: random.Random, words: list[str], count: int) -> list[str]:
    """Replace `count` words, evenly distributed over the text; each word is in five shingles."""
    words = list(words)
    for part in range(count):
        words[(part * len(words) + chance.randrange(len(words))) // count % len(words)] = chance.choice(VOCABULARY)
    return words


def planted(seed: int) -> dict:
    """Documents of 200 words with copies, near copies, chains of near copies, and some below the threshold."""
    chance = random.Random(seed)
    texts: list[str] = []
    for _ in range(15):
        words = [chance.choice(VOCABULARY) for _ in range(200)]
        texts.append(" ".join(words))
        match chance.randrange(6):
            case 0:
                texts += [texts[-1]] * chance.randrange(1, 4)
            case 1:
                texts += [" ".join(changed(chance, words, 2)) for _ in range(3)]
            case 2:  # each document is a near copy of the previous one, the last not of the first
                for _ in range(4):
                    words = changed(chance, words, 3)
                    texts.append(" ".join(words))
            case 3:
                texts.append(texts[-1].upper().replace(" ", ", "))
            case 4:  # slightly and far below the threshold
                texts += [" ".join(changed(chance, words, count)) for count in (6, 25)]
    chance.shuffle(texts)
    return {"texts": texts, "scores": [chance.randrange(3) for _ in texts]}


def lines_repeated(seed: int) -> list[str]:
    chance = random.Random(seed)
    lines = ["A line that is long enough to count", "  und eine zweite, die lang genug ist ", "short", "", "the third line of some length"]
    return ["\n".join(chance.choice(lines) for _ in range(chance.randrange(6))) for _ in range(20)]


CASES = {
    **{f"planted {seed}": planted(seed) for seed in range(4)},
    "nothing": {"texts": []},
    "one": {"texts": ["ein Dokument"]},
    "all equal": {"texts": ["immer das gleiche Dokument, in allem Ernst"] * 23},
    "one band": {"texts": ["eine Menge, die zwischen Rängen geteilt ist"] * 23, "settings": {"exact": False, "bands": 1, "rows": 6}},
    "short": {"texts": ["a b", "a b", "A, B!", "a", "b a", "a b c d", "a b c d e", "a b c d e f", "a b c d"]},
    "periodic": {"texts": [f"{'so la ' * (4 + number)}ti{number}" for number in range(9)]},
    "no words": {"texts": ["", "", "!!!", "???", "!!!", "..."]},
    "lines": {"texts": lines_repeated(1), "settings": {"paragraph_characters": 20}},
    "near only": {"texts": planted(0)["texts"], "settings": {"exact": False, "bands": 20, "rows": 6}},
    "exact only": {"texts": planted(1)["texts"], "settings": {"near": False}},
    "none": {"texts": planted(2)["texts"], "settings": {"exact": False, "near": False}},
}
for case in CASES.values():
    case.setdefault("scores", [0] * len(case["texts"]))
    case.setdefault("settings", {})


def shingle_set(text: str, length: int) -> set[tuple[str, ...]]:
    words = "".join(character if character.isalnum() else " " for character in text.lower()).split()
    return {tuple(words[i : i + length]) for i in range(max(1, len(words) - length + 1))} if words else set()


def greedy(numbers: Iterable[int], better: Callable[[int], tuple], duplicate: Callable[[int, int], bool]) -> dict[int, int]:
    """Every document -> the one that is kept for it: from the best one on, each is kept that is no duplicate of a kept one."""
    kept_for: dict[int, int] = {}
    for number in sorted(numbers, key=better):
        centers = (kept for kept, center in kept_for.items() if kept == center and duplicate(kept, number))
        kept_for[number] = next(centers, number)
    return kept_for


def compared(texts: list[str], scores: list[int], settings: DedupConfig) -> tuple[list[int], int]:
    """Return (documents to drop, copies among them) by comparing all pairs."""
    sets = [shingle_set(text, settings.shingle) for text in texts]

    def duplicate(a: int, b: int) -> bool:
        near = settings.near and len(sets[a] & sets[b]) >= settings.threshold * max(1, len(sets[a] | sets[b]))
        return near or (settings.exact and texts[a] == texts[b])

    kept_for = greedy(range(len(texts)), lambda n: (-scores[n], n), duplicate)
    copies = sum(count - 1 for count in Counter(texts).values()) if settings.exact else 0
    return [n for n in range(len(texts)) if n != kept_for[n]], copies


def ranks_find(folder: Path, cases: list[dict], ranks: int, round_bytes: int = 1 << 26) -> list[dict]:
    """Run the cases on `ranks` ranks; every rank verifies that all ranks have the same result."""
    (folder / "cases.json").write_text(json.dumps(cases))
    script = (ROOT / "tests/data/dedup_ranks.py", folder / "cases.json", folder / "results.json", round_bytes)
    code, printed = python(*script, ranks=ranks, env={"RAYON_NUM_THREADS": "1"})
    assert code == 0, printed
    return json.loads((folder / "results.json").read_text())


def against_folder(folder: Path, texts: list[str], settings: DedupConfig, files: int) -> str:
    """A text-shard folder with the files that dedup.against reads."""
    entries = {}
    for file in range(files):
        part = texts[file::files]
        name = f"{signatures.PREFIX}{file:05d}.safetensors"
        made = minhash.signatures(*minhash.shingles(Words(part), settings.shingle), settings.permutations)
        entries[name] = signatures.write(folder / name, exact.keys(part), made, settings)
        assert entries[name]["documents"] == len(part)
        assert entries[name]["bytes"] <= len(part) * (16 + 4 * settings.permutations) + 500
    artifact.write(folder, artifact.Manifest("shard", {}, entries))
    return str(folder)


@pytest.fixture(scope="module")
def all_cases(tmp_path_factory) -> dict[str, dict]:
    """CASES, and two with the corpora of two folders: documents of which some are in them, and none."""
    chance, folder = random.Random(1), tmp_path_factory.mktemp("against")
    old = [[chance.choice(VOCABULARY) for _ in range(200)] for _ in range(12)]
    new = [chance.choice(VOCABULARY) for _ in range(200)]
    of_old = [" ".join(words) for words in (old[0], changed(chance, old[1], 1), changed(chance, old[2], 60), old[0])]
    of_new = [" ".join(words) for words in (new, changed(chance, new, 1))]
    folders = [
        against_folder(folder / "a", [" ".join(words) for words in old[:6]] + ["", "?"], DedupConfig(), 3),
        against_folder(folder / "b", [" ".join(words) for words in [*old[6:], old[0], changed(chance, old[0], 1)]], DedupConfig(), 1),
    ]
    texts = [of_old[0], of_new[0], of_old[1], of_new[1], of_old[2], of_old[3], "!!!"]
    against = {"texts": texts, "scores": [0, 0, 9, 1, 0, 9, 0], "settings": {"against": folders}}
    return CASES | {"against": against, "nothing against": {**against, "texts": [], "scores": []}}


@pytest.fixture(scope="module")
def one_rank(all_cases, tmp_path_factory) -> dict[str, dict]:
    return dict(zip(all_cases, ranks_find(tmp_path_factory.mktemp("one"), list(all_cases.values()), 1), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_all_pairs_and_no_others_are_found(one_rank, name):
    case, found = CASES[name], one_rank[name]
    drop, copies = compared(case["texts"], case["scores"], DedupConfig(**case["settings"]))
    assert found["drop"] == drop
    assert (found["exact"], found["near"]) == (copies, len(drop) - copies)
    assert sum(int(size) * count for size, count in found["sizes"].items()) == len(drop) + sum(found["sizes"].values())
    for cluster in found["clusters"]:
        assert cluster["size"] == 1 + len(cluster["dropped"])
        assert set(cluster["dropped"]) <= set(drop)
        assert cluster["kept"] not in drop
        one_text = len({case["texts"][n] for n in [cluster["kept"], *cluster["dropped"]]}) == 1
        assert (cluster["kind"] == "exact") == (one_text and case["settings"].get("exact", True))
        for dropped, jaccard in zip(cluster["dropped"], cluster["jaccard"], strict=True):
            left, right = (shingle_set(case["texts"][n], 5) for n in (cluster["kept"], dropped))
            assert jaccard >= 0.8 or not case["settings"].get("near", True)
            assert jaccard == (1 if left == right else pytest.approx(len(left & right) / len(left | right)))


def test_planted_cases_contain_duplicates(one_rank):
    """Otherwise the comparison above would be empty."""
    found = [one_rank[name] for name in CASES if name.startswith("planted")]
    assert sum(result["exact"] for result in found) >= 5
    assert sum(result["near"] for result in found) >= 20
    assert min(jaccard for result in found for cluster in result["clusters"] for jaccard in cluster["jaccard"]) < 0.9
    assert sum(result["chained"] for result in found) >= 5


@pytest.mark.parametrize("ranks, round_bytes", one_in(3, [(2, 900), (2, 100), (4, 1 << 26)]))
def test_the_result_does_not_depend_on_the_number_of_ranks(all_cases, one_rank, tmp_path, ranks, round_bytes):
    """With rounds of 900 bytes, each exchange has many."""
    assert dict(zip(all_cases, ranks_find(tmp_path, list(all_cases.values()), ranks, round_bytes), strict=True)) == one_rank


def test_documents_of_another_corpus_are_dropped(one_rank):
    found, nothing = one_rank["against"], one_rank["nothing against"]
    assert (nothing["drop"], nothing["clusters"]) == ([], [])
    assert found["drop"] == [0, 1, 2, 5]
    assert (found["exact"], found["near"]) == (2, 2)
    assert [(cluster["kept"], cluster["dropped"], cluster["kind"]) for cluster in found["clusters"] if cluster["size"] == 2] == [
        (None, [2], "near"),
        (3, [1], "near"),
    ]


def test_repeated_spans_are_those_that_a_dictionary_finds(one_rank):
    for name, case in CASES.items():
        documents = [text.split() for text in case["texts"]]
        assert [text.split() for text in one_rank[name]["cut"]] == kept_units(documents, 8)


def test_repeated_lines_are_removed_except_the_first(one_rank):
    seen: set[str] = set()
    for text, shortened in zip(CASES["lines"]["texts"], one_rank["lines"]["shortened"], strict=True):
        kept = []
        for line in text.split("\n"):
            if len(line.strip()) < 20 or line.strip() not in seen:
                kept.append(line)
            seen.add(line.strip())
        assert shortened == "\n".join(kept)
    assert len(seen) == 5


EDGE_PAIRS = st.tuples(st.integers(-3, 30), st.integers(0, 30)).filter(lambda pair: pair[0] != pair[1])
EDGES = st.lists(EDGE_PAIRS, max_size=40, unique_by=frozenset)


def resolved(pairs: list[tuple[int, int]], lengths: dict[int, int]) -> clusters.Clusters:
    """The clusters of a graph of near duplicates."""
    edges = np.zeros(len(pairs), dtype=EDGE)
    edges["jaccard"] = 0.9
    for edge, pair in zip(edges, pairs, strict=True):
        edge["left"], edge["right"] = sorted(pair, key=lambda number: (-lengths.get(number, 0), number))
    for side in ("left", "right"):
        edges[f"{side}_length"] = [lengths.get(number, 0) for number in edges[side].tolist()]
    comm = SingleProcessComm()
    stars, kept = clusters.near_stars(comm, edges)
    found = clusters.resolve(comm, edges[:0], edges, stars)
    assert sorted({*kept.tolist(), *found.drop.tolist()}) == sorted({number for pair in pairs for number in pair})
    return found


@settings(max_examples=50)
@given(EDGES, st.randoms(use_true_random=False))
def test_every_dropped_document_is_a_duplicate_of_a_kept_one(pairs, chance):
    pairs = [pair for pair in pairs if max(pair) >= 0]
    numbers = sorted({number for pair in pairs for number in pair})
    scores = {number: chance.randrange(3) if number >= 0 else duplicates.ALWAYS_KEPT for number in numbers}
    known = {frozenset(pair) for pair in pairs}
    kept_for = greedy(numbers, lambda number: (-scores[number], number), lambda a, b: frozenset((a, b)) in known)

    found = resolved(pairs, scores)
    assert dict(zip(found.drop.tolist(), found.origin["kept"].tolist(), strict=True)) == {n: k for n, k in kept_for.items() if n != k}
    assert found.sizes == Counter(size for size in Counter(kept_for.values()).values() if size > 1)
    assert sorted(number for cluster in found.clusters for number in cluster.dropped) == found.drop.tolist()
    groups: list[set[int]] = []
    for pair in pairs:
        touched = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touched] + [set(pair).union(*touched)]
    in_chains = sum(len([n for n in group if n >= 0]) - (min(group) >= 0) for group in groups)
    assert found.chained == in_chains - len(found.drop)
    again = resolved(chance.sample(pairs, len(pairs)), scores)
    assert (again.clusters, again.sizes, again.drop.tolist()) == (found.clusters, found.sizes, found.drop.tolist())


def test_every_second_document_of_a_long_chain_is_kept():
    chain = [(number, number + 1) for number in range(5000)]
    found = resolved(chain, {})
    assert found.drop.tolist() == list(range(1, 5000, 2))
    assert (found.sizes, found.chained) == ({2: 2500}, 2500)
    assert len(found.clusters) == clusters.LISTED


def test_only_a_part_of_a_large_cluster_is_listed():
    (cluster,) = resolved([(0, number) for number in range(1, 300)], {}).clusters
    assert (cluster.kept, cluster.size, len(cluster.dropped)) == (0, 300, clusters.LISTED_DOCUMENTS)


def test_versions_of_a_page_keep_those_that_share_little():
    """60 windows of 500 words, each shifted by 25: two shifts have a Jaccard index of 0.82, three of 0.73."""
    words = [random.Random(0).choice(VOCABULARY) + str(number) for number in range(2000)]
    texts = [" ".join(words[25 * start : 25 * start + 500]) for start in range(60)]
    made = minhash.signatures(*minhash.shingles(Words(texts)))
    found = find_on_one_rank(texts, exact.keys(texts), made)
    kept = sorted(set(range(60)) - set(found.drop.tolist()))
    assert all(abs(a - b) > 2 for a, b in combinations(kept, 2))
    assert all(min(abs(number - other) for other in kept) <= 2 for number in found.drop.tolist())
    assert len({word for number in kept for word in texts[number].split()}) >= 1925


TEXTS = st.lists(st.text(alphabet="abÄ \n.", max_size=20), min_size=1, max_size=8)


@given(TEXTS, st.integers(1, 6))
def test_shingles_are_equal_where_their_words_are(texts, length):
    flat, offsets = minhash.shingles(Words(texts), length)
    meaning: dict[int, tuple[str, ...]] = {}
    for number, text in enumerate(texts):
        words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
        expected = [tuple(words[i : i + length]) for i in range(max(1, len(words) - length + 1))] if words else []
        hashes = flat[offsets[number] : offsets[number + 1]].tolist()
        assert len(hashes) == len(expected)
        for value, shingle in zip(hashes, expected, strict=True):
            assert meaning.setdefault(value, shingle) == shingle
    assert len(set(meaning.values())) == len(meaning)


def test_signatures_agree_as_often_as_the_jaccard_index_says():
    """In every element, within the bounds of a binomial distribution."""
    chance = np.random.default_rng(0)
    pairs, shingles, common = 1000, 90, 80  # 80 of 100 distinct ones in common
    values = chance.integers(0, 1 << 64, (pairs, 2 * shingles - common), dtype=np.uint64)
    left, right = values[:, :shingles], values[:, -shingles:]
    offsets = np.arange(0, pairs * shingles + 1, shingles)
    first, second = (minhash.signatures(np.ascontiguousarray(part).ravel(), offsets) for part in (left, right))
    equal = first == second
    assert abs(equal.mean() - 0.8) < 0.005
    deviation = np.sqrt(0.8 * 0.2 / pairs)
    assert np.abs(equal.mean(axis=0) - 0.8).max() < 4 * deviation
    assert equal.mean(axis=0).std() < 1.3 * deviation  # the elements are no worse than independent draws
    assert 0.7 < minhash.estimated_jaccard(first, second).std() / np.sqrt(0.8 * 0.2 / 128) < 1.1
    shuffled = chance.permuted(left, axis=1)
    twice = np.concatenate([shuffled, shuffled], axis=1)
    assert np.array_equal(minhash.signatures(twice.ravel(), 2 * offsets), first)


def test_saved_signatures_stay_comparable():
    """A rensa version with other values, or another hash of words, requires another minhash.ALGORITHM."""
    made = minhash.signatures(*minhash.shingles(Words(["Der Wald steht schwarz und schweiget."])))
    assert minhash.ALGORITHM == "shingles 1, rensa RMinHash 2, seed 1"
    assert made[0, :3].tolist() == [3478983431, 3705117907, 3982736318]


def find_on_one_rank(texts: list[str], keys: np.ndarray, made: np.ndarray, read: Counter[int] | None = None) -> clusters.Clusters:
    """The result of one rank for the given keys and signatures; `read` counts how often each text is read."""

    def reader(wanted: Sequence[int]) -> list[str]:
        if read is not None:
            read.update(wanted)
        return [texts[number] for number in wanted]

    numbers, settings = np.arange(len(texts)), DedupConfig()
    hashes = minhash.all_band_hashes(made, settings.bands, settings.rows)
    documents = duplicates.Documents(numbers, numbers[::-1], keys, hashes.__getitem__, made.__getitem__, reader)
    return duplicates.find(SingleProcessComm(), documents, settings)


def test_boilerplate_that_fills_a_bucket_is_read_in_linear_time():
    chance = random.Random(0)
    common = [chance.choice(VOCABULARY) for _ in range(300)]
    texts = [" ".join([*common, f"seite{number}"]) for number in range(1500)]
    copies = texts[:10]
    read: Counter[int] = Counter()
    made = minhash.signatures(*minhash.shingles(Words(texts + copies)))
    found = find_on_one_rank(texts + copies, exact.keys(texts + copies), made, read)
    assert found.drop.tolist() == list(range(1, 1510))
    assert (found.exact, found.near, found.sizes) == (10, 1499, {1510: 1})
    assert max(read) < 1500
    assert read.total() < 4 * len(texts)


def test_a_bucket_whose_first_document_differs_is_still_searched():
    texts = ["ein ganz anderer Text steht hier", "der Wald steht schwarz und schweiget", "Der Wald steht schwarz und schweiget!"]
    made = np.random.default_rng(0).integers(0, 1 << 32, (3, 128), dtype=np.uint32)
    assert find_on_one_rank(texts, exact.keys(texts), made).drop.tolist() == []
    made[:, :8] = 5  # one of sixteen bands
    assert find_on_one_rank(texts, exact.keys(texts), made).drop.tolist() == [2]


def test_half_of_a_key_does_not_match():
    keys = np.array([[1, 2], [1, 3], [4, 2], [1, 3]], dtype=np.uint64)
    made = np.full((4, 128), minhash.NO_WORDS)
    read: Counter[int] = Counter()
    assert find_on_one_rank([""] * 4, keys, made, read).drop.tolist() == [3]
    assert not read  # texts without words have no near duplicates


def test_signatures_are_saved_correctly_from_strided_views(tmp_path):
    kind = np.dtype([("other", "<u4"), ("keys", "<u8", 2), ("signatures", "<u4", 128)])
    rows = np.frombuffer(np.random.default_rng(0).bytes(9 * kind.itemsize), dtype=kind)
    name = f"{signatures.PREFIX}00000.safetensors"
    entry = signatures.write(tmp_path / name, rows["keys"], rows["signatures"], DedupConfig())
    artifact.write(tmp_path, artifact.Manifest("shard", {}, {name: entry}))
    known = signatures.load(SingleProcessComm(), DedupConfig(against=[str(tmp_path)]))
    assert np.array_equal(known.keys, rows["keys"])
    assert np.array_equal(known.signatures, rows["signatures"])


def test_signatures_that_cannot_be_compared_are_refused(tmp_path):
    folder = against_folder(tmp_path / "a", ["ein Text"], DedupConfig(), 1)
    with pytest.raises(UserError, match=r"contains signatures computed with .* 128 permutations .* required: .* 120 permutations"):
        signatures.load(SingleProcessComm(), DedupConfig(against=[folder], bands=15))
    with pytest.raises(UserError, match=r"3 words \(dedup.shingle\)"):
        signatures.load(SingleProcessComm(), DedupConfig(against=[folder], shingle=3))
    artifact.write(tmp_path / "b", artifact.Manifest("shard", {}, {}))
    with pytest.raises(UserError, match="contains no signatures"):
        signatures.load(SingleProcessComm(), DedupConfig(against=[folder, str(tmp_path / "b")]))
    (path,) = Path(folder).glob("signatures-*")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="is corrupt"):
        signatures.load(SingleProcessComm(), DedupConfig(against=[folder]))


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("http://www.Example.org/a/", "https://example.org/a#part", True),
        ("https://example.org:443", "http://example.org/", True),
        ("https://example.org/a?x=1", "https://example.org/a?x=2", False),
        ("https://example.org/A", "https://example.org/a", False),
        ("https://example.org:8080/a", "https://example.org/a", False),
        ("http://[half", "http://[half ", True),
        ("urn:isbn:1", "urn:isbn:2", False),
        ("", "https://example.org", False),
    ],
)
def test_urls_of_one_page_are_equal(one, other, same):
    first, second = exact.keys(map(exact.normal_url, [one, other]))
    assert np.array_equal(first, second) == same


def test_settings_without_effect_are_refused():
    printed = here("stage=shard", "dedup.threshold=0.5", "dedup=none", "dedup.near=true", "dedup.against=[old]", expect=2)
    assert "dedup.rows=8: with dedup.bands=16 finds 6% of the pairs at dedup.threshold=0.5" in printed
    assert "dedup.against=['old']: needs dedup.exact and dedup.near" in printed
