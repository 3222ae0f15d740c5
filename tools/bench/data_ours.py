"""Our own jobs of tools/bench_data that no stage does, in the form of data_peers.py; and a rank whose memory is noted."""

from __future__ import annotations

import itertools
import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tools.bench.data_peers import Job, digest, main, rate

BATCH = 1024
"""Samples that a loader is asked for at a time."""

TRILLION, SHARDS = 10**12, 250

MEAN_DOCUMENT = 1000
"""Tokens of a document in the loaders' data, on average: about DOCUMENT_BYTES of text."""

MADE_WITH = {"vocab_size": 1 << 15, "end_of_document": 0, "tokenizer": ""}


def resident_bytes(field: str) -> int:
    """This process's memory by the kernel's count: VmRSS now, VmHWM at its highest."""
    line = next(line for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def ids(job: Job) -> Job:
    """What stage=tokenize wrote to `output`."""
    from pipeline import artifact

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
    """The loaders' data: random tokens in documents, as arrays for the peers and as token shards in `output`."""
    from pipeline import artifact
    from pipeline.data.tokenize import tokens as token_shards

    random = np.random.default_rng(0)
    lengths = random.integers(1, 2 * MEAN_DOCUMENT, max(1, job["tokens"] // MEAN_DOCUMENT))
    tokens = random.integers(1, MADE_WITH["vocab_size"], lengths.sum(), dtype=np.uint16)
    tokens[np.cumsum(lengths) - 1] = MADE_WITH["end_of_document"]
    np.save(f"{job['input']}/tokens.npy", tokens)
    np.save(f"{job['input']}/lengths.npy", lengths)
    folder, files = Path(job["output"]), {}
    for number, part in enumerate(np.array_split(np.arange(len(lengths)), 8)):
        shard, start = folder / f"train-{number:05d}.tar", int(lengths[: part[0]].sum())
        with shard.open("wb") as handle:
            writer = token_shards.Writer(handle, shard.stem, np.dtype("<u2"))
            writer.add(tokens[start : start + lengths[part].sum()], lengths[part])
            counts = writer.close()
        files[shard.name] = artifact.entry(shard, **counts, text_bytes=4 * counts["tokens"], split="train", corpus="default")
    artifact.write(folder, artifact.Manifest("tokenize", {}, files, {**MADE_WITH, **token_shards.totals(files)}))
    return {"tokens": len(tokens)}


def loader(job: Job) -> Job:
    """The training loader in its shuffled order, over and over the data."""
    from pipeline.data.load.loader import TokenDataset

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
    """Two token folders in `input` that claim TRILLION tokens; the files are sparse and take no space."""
    from pipeline import artifact

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
        artifact.write(folder, artifact.Manifest("tokenize", {}, files, MADE_WITH))
    return {}


def first_batch(job: Job) -> Job:
    """The seconds to the first batch of 1,024 samples out of a blend of `trillion`'s folders, and the memory that they took."""
    from pipeline.config.data import CorpusConfig
    from pipeline.config.schema import RunConfig
    from pipeline.data.load import blend

    config = RunConfig()
    config.training.sequence_length = job["sequence"]
    config.data.blend = {name: CorpusConfig(weight, f"{job['input']}/{name}") for name, weight in (("web", 0.7), ("books", 0.3))}
    before, start = resident_bytes("VmRSS"), time.perf_counter()
    batch = blend.open_training(config).samples(np.arange(BATCH))
    seconds = time.perf_counter() - start
    assert batch.shape == (BATCH, job["sequence"] + 1)
    return {"seconds": seconds, "bytes": resident_bytes("VmHWM") - before}


def rank(folder: Path, arguments: list[str]) -> None:
    """`python -m pipeline ARGUMENTS`; afterwards `folder` has a file with the most memory that this rank had."""
    sys.argv = ["pipeline", *arguments]
    try:
        runpy.run_module("pipeline", run_name="__main__", alter_sys=True)
    finally:
        (folder / str(os.getpid())).write_text(str(resident_bytes("VmHWM")), encoding="ascii")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank(Path(sys.argv[2]), sys.argv[3:])
    else:
        main({"ours": {"ids": ids, "store": store, "loader": loader, "trillion": trillion, "first_batch": first_batch}})
