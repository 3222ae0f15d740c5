"""Our jobs of tools/bench_data that are not stages, in the job format of data_peers.py; and a rank that records its peak memory."""

from __future__ import annotations

import itertools
import json
import os
import resource
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.data_peers import Job, digest, main, rate
from tools.bench.harness import resident

BATCH = 1024
"""Samples per call of the loader."""

TRILLION, SHARDS = 10**12, 250

MEAN_DOCUMENT = 1000
"""Mean tokens per document in the data of the loaders: about data_text.DOCUMENT_BYTES of text."""

VOCABULARY = 1 << 15
TOKENIZER_TOTALS: dict[str, Any] = {"vocab_size": VOCABULARY, "end_of_document": 0, "tokenizer": ""}


def ids(job: Job) -> Job:
    """Return checksum and number of the ids that stage=tokenize wrote to `output`."""
    from pipeline.common import artifact

    folder = Path(job["output"])
    entries = [
        (name, entry) for name, entry in artifact.read(folder, key="data.tokens", stage="tokenize").files.items() if "split" in entry
    ]

    def documents() -> Iterator[np.ndarray]:
        for name, entry in entries:
            dtype = np.dtype(entry["dtype"]).newbyteorder("<")
            tokens = np.fromfile(folder / name, dtype, entry["tokens"], offset=entry["offset"])
            lengths = np.fromfile(folder / name, "<u4", entry["documents"], offset=entry["lengths_offset"])
            yield from np.split(tokens, np.cumsum(lengths)[:-1])

    return {"digest": digest(documents()), "tokens": sum(entry["tokens"] for _, entry in entries)}


def store(job: Job) -> Job:
    """Write the data of the loaders: random tokens in documents, as arrays in `input` for the peers and as token shards in `output`."""
    from pipeline.common import artifact
    from pipeline.data.tokenize import token_shards as token_shards

    random = np.random.default_rng(0)
    lengths = random.integers(1, 2 * MEAN_DOCUMENT, max(1, job["tokens"] // MEAN_DOCUMENT))
    tokens = random.integers(1, VOCABULARY, lengths.sum(), dtype=np.uint16)
    tokens[np.cumsum(lengths) - 1] = TOKENIZER_TOTALS["end_of_document"]
    np.save(f"{job['input']}/tokens.npy", tokens)
    np.save(f"{job['input']}/lengths.npy", lengths)
    folder, files = Path(job["output"]), {}
    for number, part in enumerate(np.array_split(np.arange(len(lengths)), 8)):
        shard, start = folder / f"train-{number:05d}.tar", int(lengths[: part[0]].sum())
        with shard.open("wb") as handle:
            writer = token_shards.ShardWriter(handle, shard.stem, np.dtype("<u2"))
            writer.add(tokens[start : start + lengths[part].sum()], lengths[part])
            counts = writer.close()
        files[shard.name] = artifact.entry(shard, **counts, text_bytes=4 * counts["tokens"], split="train", corpus="default")
    artifact.write(folder, artifact.Manifest("tokenize", {}, files, {**TOKENIZER_TOTALS, **token_shards.totals(files)}))
    return {"tokens": len(tokens)}


def clean(job: Job) -> Job:
    """Return user CPU seconds of cleaning and signatures with the default rules, for documents in memory, and their bytes."""
    from pipeline.config.cleaning import CleanConfig
    from pipeline.config.data import DedupConfig
    from pipeline.data.clean.cleaner import Cleaner
    from pipeline.data.clean.document_batch import batches
    from pipeline.data.dedup import minhash
    from pipeline.data.read.documents import Document

    with Path(job["input"]).open(encoding="utf-8") as handle:
        documents = [Document("text", number, json.loads(line)["text"], {}) for number, line in enumerate(handle)]
    dedup = DedupConfig()

    def work(some: list[Document]) -> float:
        cleaner, start = Cleaner(CleanConfig()), resource.getrusage(resource.RUSAGE_SELF).ru_utime
        for batch in batches(some):
            cleaned = cleaner.clean(batch, {})
            signatures = minhash.signatures(*minhash.shingles(cleaned.words, dedup.shingle), dedup.permutations)
            minhash.all_band_hashes(signatures, dedup.bands, dedup.rows)
        return resource.getrusage(resource.RUSAGE_SELF).ru_utime - start

    work(documents[:20])  # compiles and loads the models
    return {"seconds": work(documents), "bytes": sum(len(document.text.encode()) for document in documents)}


def loader(job: Job) -> Job:
    """Measure the training loader in its shuffled order; the epochs repeat."""
    from tools.bench.token_dataset import TokenDataset

    dataset = TokenDataset(Path(job["output"]), "train", job["sequence"], seed=0)
    batches = (np.arange(first, first + BATCH) for first in itertools.count(step=BATCH))

    def read() -> int:
        if job["variant"] == "boundaries":
            dataset.samples_with_boundaries(next(batches))
        elif job["variant"] == "wide":
            dataset.samples(next(batches)).astype(np.int64)
        else:
            dataset.samples(next(batches))
        return BATCH

    return {"rate": rate(job, read)}


def trillion(job: Job) -> Job:
    """Write two token folders with TRILLION tokens in total to `input`, as sparse files that occupy no disk space."""
    from pipeline.common import artifact

    each = TRILLION // SHARDS
    for name, count in (("web", SHARDS * 4 // 5), ("books", SHARDS // 5)):
        folder, files = Path(job["input"]) / name, {}
        folder.mkdir()
        for number in range(count):
            shard = folder / f"train-{number:05d}.tar"
            with shard.open("wb") as handle:
                handle.truncate(1024 + 2 * each)
            entry = {"bytes": 1024 + 2 * each, "xxh3": "", "split": "train", "corpus": name, "documents": 1, "lengths_offset": 0}
            files[shard.name] = {**entry, "dtype": "uint16", "tokens": each, "offset": 1024, "text_bytes": 4 * each}
        artifact.write(folder, artifact.Manifest("tokenize", {}, files, TOKENIZER_TOTALS))
    return {}


def first_batch(job: Job) -> Job:
    """Return the seconds to the first batch of 1,024 samples from a blend of the folders of `trillion`, and the added memory in bytes."""
    from pipeline.common import knobs
    from pipeline.config.data import CorpusConfig
    from pipeline.config.schema import RunConfig
    from pipeline.data.load import blend

    blended = {name: CorpusConfig(weight, f"{job['input']}/{name}") for name, weight in (("web", 0.7), ("books", 0.3))}
    config = knobs.changed(RunConfig(), {"training.sequence_length": job["sequence"], "data.blend": blended})
    before, start = resident("VmRSS"), time.perf_counter()
    batch = blend.open_training(config).samples(np.arange(BATCH))
    seconds = time.perf_counter() - start
    assert batch.shape == (BATCH, job["sequence"] + 1)
    return {"seconds": seconds, "bytes": resident("VmHWM") - before}


def rank(folder: Path, arguments: list[str]) -> None:
    """Run `python -m pipeline ARGUMENTS`, then write the peak memory of this rank in bytes to a file in `folder`."""
    sys.argv = ["pipeline", *arguments]
    try:
        runpy.run_module("pipeline", run_name="__main__", alter_sys=True)
    finally:
        (folder / str(os.getpid())).write_text(str(resident("VmHWM")), encoding="ascii")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank(Path(sys.argv[2]), sys.argv[3:])
    else:
        tasks = {"ids": ids, "store": store, "clean": clean, "loader": loader, "trillion": trillion, "first_batch": first_batch}
        main({"ours": tasks})
