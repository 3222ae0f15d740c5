"""One rank of a deduplication: `python dedup_ranks.py CASES RESULTS BYTES`. tests/data/test_duplicates.py verifies the results.

CASES is a JSON list of {"texts", "scores", "settings"}. The documents are assigned to the ranks at random; with more than two ranks, rank 1
gets none.
BYTES is the size of one round of an exchange.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

from pipeline.common import mpi
from pipeline.config.data import DedupConfig
from pipeline.data.dedup import distributed, duplicates, exact, minhash, paragraphs, signatures
from pipeline.data.dedup.clusters import LISTED, ClusterKind, Clusters, near_stars, resolve
from pipeline.data.shard import span_search
from pipeline.data.words import Words
from tests.data.test_spans import found as found_spans


def found(comm: mpi.Comm, case: dict[str, Any]) -> dict[str, Any]:
    """The result of this rank."""
    texts, settings = case["texts"], DedupConfig(**case["settings"])
    numbers = np.random.default_rng(comm.size).permutation(len(texts))
    holders = np.random.default_rng(len(texts)).integers(0, comm.size, len(texts))
    if comm.size > 2:
        holders[holders == 1] = 0
    mine = numbers[holders[numbers] == comm.rank]

    def read(wanted: Sequence[int]) -> list[str]:
        assert set(wanted) <= set(mine.tolist()), "a rank reads only the documents that it holds"
        return [texts[number] for number in wanted]

    own = read(mine.tolist())
    flat, offsets = minhash.shingles(Words(own), settings.shingle) if own else (np.empty(0, np.uint64), np.zeros(1, np.int64))
    known = signatures.load(comm, settings) if settings.against else None
    length = np.array(case["scores"], dtype=np.int64)[mine]
    made = minhash.signatures(flat, offsets, settings.permutations)
    hashes = minhash.all_band_hashes(made, settings.bands, settings.rows)
    documents = duplicates.Documents(mine, length, exact.keys(own), hashes.__getitem__, made.__getitem__, read)
    clusters = duplicates.find(comm, documents, settings, known)
    assert set(clusters.drop.tolist()) <= set(mine.tolist()), "a rank has only the drops of its documents"
    drop, origin = (np.concatenate(comm.allgather(array)) for array in (clusters.drop, clusters.origin))
    order = np.argsort(drop)
    clusters = dataclasses.replace(clusters, drop=drop[order], origin=origin[order])

    lines, offsets = paragraphs.hashes(own, settings.paragraph_characters)
    repeated = np.split(paragraphs.find_repeated(comm, mine, lines, offsets), offsets[1:-1])
    shortened = [paragraphs.without(text, flags, settings.paragraph_characters) for text, flags in zip(own, repeated, strict=bool(own))]
    with TemporaryDirectory() as folder:
        cut = found_spans(comm, Path(folder), dict(zip(mine.tolist(), own, strict=True)), 8, 1e9)
    all_shortened = dict(pair for part in comm.allgather(list(zip(mine.tolist(), shortened, strict=True))) for pair in part)
    all_cut = dict(pair for part in comm.allgather(list(cut.items())) for pair in part)
    if comm.rank == 0:
        check_origin(clusters, texts, settings)
    return {
        **dataclasses.asdict(clusters),
        "origin": clusters.origin.tolist(),
        "drop": clusters.drop.tolist(),
        "shortened": [all_shortened[n] for n in range(len(texts))],
        "cut": [all_cut[n] for n in range(len(texts))],
    }


def check_origin(clusters: Clusters, texts: list[str], settings: DedupConfig) -> None:
    """Every dropped document names one that is kept; an exact copy is no near duplicate."""
    assert len(clusters.origin) == len(clusters.drop)
    assert int((clusters.origin["kind"] == ClusterKind.EXACT).sum()) == clusters.exact
    for number, (kept, kind) in zip(clusters.drop.tolist(), clusters.origin.tolist(), strict=True):
        assert kept not in clusters.drop
        assert kind != ClusterKind.NEAR or kept < 0 or texts[kept] != texts[number] or not settings.exact


def check_exchange(comm: mpi.Comm) -> None:
    """Every row arrives on its owner, in order."""
    owners = [np.random.default_rng(rank).integers(0, comm.size, 50 * rank) for rank in range(comm.size)]
    sent = [np.arange(len(mine)) + 1000 * rank for rank, mine in enumerate(owners)]
    expected = np.concatenate([rows[mine == comm.rank] for rows, mine in zip(sent, owners, strict=True)])
    assert np.array_equal(mpi.exchange(comm, sent[comm.rank], owners[comm.rank]), expected)


def check_sort(comm: mpi.Comm) -> None:
    """All rows are sorted over the ranks, and the rows of one hash, which is half of them, are divided."""
    chance = np.random.default_rng(comm.rank)
    rows = np.empty(3000, dtype=[("hash", "<u8"), ("number", "<i8")])
    rows["hash"] = np.where(chance.random(3000) < 0.5, 7, chance.integers(0, 20, 3000))
    rows["number"] = comm.size * np.arange(3000) + comm.rank
    everyone = np.concatenate(comm.allgather(rows))
    ordered = distributed.sorted_over_ranks(comm, rows)
    assert len(ordered) < 2 * len(rows)
    assert np.array_equal(np.concatenate(comm.allgather(ordered)), everyone[np.lexsort((everyone["number"], everyone["hash"]))])


def check_frequent_paragraph(comm: mpi.Comm) -> None:
    """A line that is in every document is kept in the first one, and a rank sends it once."""
    numbers = np.arange(1000, dtype=np.int64)[::-1] * comm.size + comm.rank
    with patch.object(paragraphs, "exchange", wraps=mpi.exchange) as exchanged:
        repeated = paragraphs.find_repeated(comm, numbers, np.full(1000, 7, dtype=np.uint64), np.arange(1001))
    assert numbers[~repeated].tolist() == [0] * (comm.rank == 0)
    assert len(exchanged.call_args_list[0].args[1]) == 1


def check_clusters(comm: mpi.Comm) -> None:
    """Clusters of random graphs, one of them a long chain, equal those of a loop over all documents, the best one first."""
    for seed in range(6):
        chance = np.random.default_rng(seed)
        pairs = chance.integers(-5, 200, (chance.integers(1, 250), 2))
        if seed == 5:
            pairs = np.stack([order := chance.permutation(450), np.roll(order, 1)], axis=1)[1:]
        lengths = {number: int(chance.integers(3)) if number >= 0 else duplicates.ALWAYS_KEPT for number in range(-5, 450)}
        order = sorted(lengths, key=lambda number: (-lengths[number], number))
        place = {number: rank for rank, number in enumerate(order)}
        distinct = sorted({tuple(sorted(pair, key=place.__getitem__)) for pair in pairs.tolist() if max(pair) >= 0 and pair[0] != pair[1]})
        edges = np.zeros(len(distinct), dtype=exact.EDGE)
        for side, numbers in zip(("left", "right"), np.array(distinct).reshape(-1, 2).T, strict=True):
            edges[side], edges[f"{side}_length"] = numbers, [lengths[number] for number in numbers.tolist()]
            edges[f"{side}_holder"] = numbers % 3 % comm.size
        mine = edges[chance.integers(0, comm.size, len(edges)) == comm.rank]
        stars, _ = near_stars(comm, mine)
        result = resolve(comm, mine[:0], mine, stars)
        kept_for: dict[int, int] = {}
        for number in order:
            centers = [left for left, right in distinct if right == number and kept_for.get(left) == left]
            kept_for[number] = min(centers, key=place.__getitem__, default=number)
        dropped = {number: kept for number, kept in kept_for.items() if number != kept}
        assert result.drop.tolist() == sorted(number for number in dropped if number % 3 % comm.size == comm.rank)
        assert result.origin["kept"].tolist() == [dropped[number] for number in result.drop.tolist()]
        sizes = Counter(dropped.values())
        assert result.sizes == Counter(size + 1 for size in sizes.values())
        ordered = sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0]))[:LISTED]
        assert [(cluster.kept, cluster.size) for cluster in result.clusters] == [(k if k >= 0 else None, n + 1) for k, n in ordered]


def main() -> None:
    cases, results, round_bytes = sys.argv[1:]
    mpi.MESSAGE_BYTES = int(round_bytes)
    if mpi.MESSAGE_BYTES < 1000:  # many rounds, slices and batches
        paragraphs.SLICE_ROWS = exact.SLICE_ROWS = duplicates.SLICE_ROWS = 20
        duplicates.PAIR_BATCH, duplicates.BATCH_CHARACTERS = 7, 10
        span_search.RUN_ROWS, span_search.ANCHOR_BYTES, span_search.WINDOW_BYTES = 30, 10**8, 5 * 10**7
    comm = MPI.COMM_WORLD
    check_exchange(comm)
    check_sort(comm)
    check_frequent_paragraph(comm)
    check_clusters(comm)
    answers = [found(comm, case) for case in json.loads(Path(cases).read_text())]
    everyone = comm.allgather(answers)
    assert all(others == answers for others in everyone), "ranks disagree"
    if comm.rank == 0:
        Path(results).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
