"""One rank of a deduplication: `python dedup_ranks.py CASES RESULTS BYTES`. tests/data/test_duplicates.py verifies the results.

CASES is a JSON list of {"texts", "scores", "settings"}. The documents are assigned to the ranks at random; with more than two ranks, rank 1
gets none.
BYTES is the size of one round of an exchange.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from pipeline.common import mpi
from pipeline.config.data import DedupConfig
from pipeline.data.dedup import duplicates, exact, minhash, paragraphs, signatures
from pipeline.data.dedup.clusters import Clusters, Kind
from pipeline.data.words import Words


def found(comm: mpi.Comm, case: dict[str, Any]) -> dict[str, Any]:
    """The result of this rank."""
    texts, settings = case["texts"], DedupConfig(**case["settings"])
    numbers = np.random.default_rng(comm.size).permutation(len(texts))
    holders = np.random.default_rng(len(texts)).integers(0, comm.size, len(texts))
    if comm.size > 2:
        holders[holders == 1] = 0
    mine = numbers[holders[numbers] == comm.rank]

    def read(wanted: Sequence[int]) -> list[str]:
        return [texts[number] for number in wanted]

    own = read(mine.tolist())
    flat, offsets = minhash.shingles(Words(own), settings.shingle) if own else (np.empty(0, np.uint64), np.zeros(1, np.int64))
    known = signatures.load(comm, settings) if settings.against else None
    score = np.array(case["scores"], dtype=np.int64)[mine]
    made = minhash.signatures(flat, offsets, settings.permutations)
    clusters = duplicates.find(comm, mine, exact.keys(own), made, score, read, settings, known)

    lines, offsets = paragraphs.hashes(own, settings.paragraph_characters)
    repeated = np.split(paragraphs.find_repeated(comm, mine, lines, offsets), offsets[1:-1])
    shortened = [paragraphs.without(text, flags, settings.paragraph_characters) for text, flags in zip(own, repeated, strict=bool(own))]
    all_shortened = dict(pair for part in comm.allgather(list(zip(mine.tolist(), shortened, strict=True))) for pair in part)
    if comm.rank == 0:
        check_origin(clusters, texts)
    return {
        **dataclasses.asdict(clusters),
        "origin": None,
        "drop": clusters.drop.tolist(),
        "shortened": [all_shortened[n] for n in range(len(texts))],
    }


def check_origin(clusters: Clusters, texts: list[str]) -> None:
    """Every dropped document names the one that is kept: an exact copy names a document of the same text."""
    assert len(clusters.origin) == len(clusters.drop)
    assert int((clusters.origin["kind"] == Kind.EXACT).sum()) == clusters.exact
    for number, (kept, kind) in zip(clusters.drop.tolist(), clusters.origin.tolist(), strict=True):
        assert kept < 0 or kind != Kind.EXACT or texts[kept] == texts[number]
        assert kept not in clusters.drop or kind == Kind.EXACT


def check_exchange(comm: mpi.Comm) -> None:
    """Every row arrives on its owner, in order; the rows of the root arrive on every rank."""
    owners = [np.random.default_rng(rank).integers(0, comm.size, 50 * rank) for rank in range(comm.size)]
    sent = [np.arange(len(mine)) + 1000 * rank for rank, mine in enumerate(owners)]
    expected = np.concatenate([rows[mine == comm.rank] for rows, mine in zip(sent, owners, strict=True)])
    assert np.array_equal(mpi.exchange(comm, sent[comm.rank], owners[comm.rank]), expected)
    shared = mpi.broadcast(comm, np.arange(99) if comm.rank == 0 else np.arange(comm.rank))
    assert np.array_equal(shared, np.arange(99))


def main() -> None:
    cases, results, round_bytes = sys.argv[1:]
    mpi.MESSAGE_BYTES = paragraphs.SLICE_ROWS = int(round_bytes)
    comm = MPI.COMM_WORLD
    check_exchange(comm)
    answers = [found(comm, case) for case in json.loads(Path(cases).read_text())]
    everyone = comm.allgather(answers)
    assert all(others == answers for others in everyone), "ranks disagree"
    if comm.rank == 0:
        Path(results).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
