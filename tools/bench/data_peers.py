"""The jobs of the peer libraries for tools/bench_data.

Run as a script by the Python of .venv-peers with a job in JSON; runs the job once and prints its result in JSON. The time of the process is
measured, so every job imports only what it needs.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

Job = dict[str, Any]
"""A job: "peer" and "task", and the arguments of the task: folders "input" and "output", file "tokenizer", token "end", "workers" ...

The result of a job has the same type."""

BATCH = 1000
"""Documents per call of the tokenizer where the peer does not define a batch."""


def digest(documents: Iterable[np.ndarray]) -> str:
    """Return a checksum of the ids of all documents, each with its end token. It does not depend on their order."""
    return f"{sum(xxhash.xxh3_64_intdigest(ids.astype('<u4').tobytes()) for ids in documents) % (1 << 64):016x}"


def rate(job: Job, read: Callable[[], int]) -> float:
    """Return samples per second over job["seconds"]; the first call is not counted. `read` returns the number of samples it read."""
    read()
    samples, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < job["seconds"]:
        samples += read()
    return samples / elapsed


def texts(file: Path) -> Iterator[str]:
    with file.open("rb") as handle:
        for line in handle:
            yield json.loads(line)["text"]


def in_workers(work: Callable[[int, list[Path]], None], job: Job) -> None:
    """Distribute the input files over forked processes, which inherit the imports of this one."""
    files, workers = sorted(Path(job["input"]).glob("*.jsonl")), job["workers"]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        pool.starmap(work, [(number, files[number::workers]) for number in range(workers)])


def main(tasks: Mapping[str, Mapping[str, Callable[[Job], Job]]]) -> None:
    job = json.loads(sys.argv[1])
    if "core" in job:
        os.sched_setaffinity(0, {job["core"]})
    print(json.dumps(tasks[job["peer"]][job["task"]](job)))


# megatron-core


def megatron_tokenize(job: Job) -> Job:
    """Write ids of Hugging Face tokenizers with IndexedDatasetBuilder. The wheel lacks preprocess_data, which encodes one by one."""
    from megatron.core.datasets import indexed_dataset  # noqa: F401 - imported before the fork

    in_workers(partial(megatron_write, job), job)
    return {}


def megatron_write(job: Job, number: int, files: list[Path]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = f"{job['output']}/{number}"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for ids in tokenized(job, files):
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")


def megatron_ids(job: Job) -> Job:
    """Return the checksum of the ids that `megatron_tokenize` wrote."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefixes = [str(file.with_suffix("")) for file in Path(job["output"]).glob("*.bin")]
    return {"digest": digest(ids for prefix in prefixes for ids in IndexedDataset(prefix))}


def tokenized(job: Job, files: list[Path]) -> Iterator[np.ndarray]:
    """Yield the ids of every document and its end token, from Hugging Face tokenizers in batches."""
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # set explicitly: tokenizers warns after a fork otherwise
    tokenizer = Tokenizer.from_file(job["tokenizer"])
    end = tokenizer.token_to_id(job["end"])
    batch: list[str] = []

    def encoded() -> Iterator[np.ndarray]:
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            yield np.array([*encoding.ids, end], np.uint16)

    for file in files:
        for text in texts(file):
            batch.append(text)
            if len(batch) == BATCH:
                yield from encoded()
                batch.clear()
    yield from encoded()


def megatron_prepare(job: Job) -> Job:
    """Write the tokens of `input` as .bin and .idx."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokens, lengths = stored(job)
    builder = IndexedDatasetBuilder(f"{job['output']}/all.bin", dtype=np.uint16)
    for document in np.split(tokens, np.cumsum(lengths)[:-1]):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{job['output']}/all.idx")
    return {}


def megatron_loader(job: Job) -> Job:
    """Measure GPTDataset in its shuffled order: the token lookup only, its samples, or its samples with positions reset and loss masked."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Vocabulary:
        """The attributes of a tokenizer that GPTDataset reads."""

        vocab_size, eod, pad, unique_identifiers = job["vocab_size"], job["end_id"], -1, {"class": "bench"}

    resets = job["variant"] == "boundaries"
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=job["sequence"],
        blend=None,
        split="1",
        tokenizer=Vocabulary(),
        path_to_cache=f"{job['output']}/cache",
        reset_position_ids=resets,
        reset_attention_mask=resets,
        eod_mask_loss=resets,
        create_attention_mask=False,
    )
    indexed = IndexedDataset(f"{job['output']}/all")
    dataset = GPTDataset(indexed, f"{job['output']}/all", np.arange(len(indexed), dtype=np.int32), None, Split.train, config)
    numbers = itertools.cycle(range(len(dataset)))
    read_sample = dataset._query_document_sample_shuffle_indices if job["variant"] == "tokens" else dataset.__getitem__

    def read() -> int:
        for _ in range(256):
            read_sample(next(numbers))
        return 256

    return {"rate": rate(job, read)}


def stored(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that every loader reads, and the lengths of their documents in tokens."""
    return np.load(f"{job['input']}/tokens.npy"), np.load(f"{job['input']}/lengths.npy")


def windows(job: Job) -> Iterator[np.ndarray]:
    """Yield the samples of formats that store samples: sequence + 1 tokens each, without overlap."""
    tokens, size = stored(job)[0], job["sequence"] + 1
    yield from tokens[: len(tokens) // size * size].reshape(-1, size)


# mosaicml-streaming


def import_streaming() -> Any:
    """Import `streaming` without its image datasets, which require torchvision."""
    for name in ("vision", "multimodal"):
        sys.modules[f"streaming.{name}"] = types.ModuleType(f"streaming.{name}")
    import streaming

    return streaming


def mosaic_tokenize(job: Job) -> Job:
    """Write ids of Hugging Face tokenizers with MDSWriter, one sample per document."""
    import_streaming()
    in_workers(partial(mosaic_write, job), job)
    return {}


def mosaic_write(job: Job, number: int, files: list[Path]) -> None:
    with import_streaming().MDSWriter(out=f"{job['output']}/{number}", columns={"tokens": "ndarray:uint16"}) as writer:
        for ids in tokenized(job, files):
            writer.write({"tokens": ids})


def mosaic_ids(job: Job) -> Job:
    """Return the checksum of the ids that `mosaic_tokenize` wrote."""
    streaming = import_streaming()
    datasets = [streaming.LocalDataset(str(folder)) for folder in Path(job["output"]).iterdir()]
    return {"digest": digest(dataset[number]["tokens"] for dataset in datasets for number in range(len(dataset)))}


def mosaic_prepare(job: Job) -> Job:
    """Write the windows of `input` as MDS shards."""
    with import_streaming().MDSWriter(out=job["output"], columns={"tokens": f"ndarray:uint16:{job['sequence'] + 1}"}) as writer:
        for window in windows(job):
            writer.write({"tokens": window})
    return {}


def mosaic_loader(job: Job) -> Job:
    """Measure StreamingDataset on local shards, shuffled, without worker processes."""
    streaming = import_streaming()
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local=job["output"], shuffle=True, batch_size=8)
    return {"rate": rate(job, sample_reader(dataset))}


# webdataset


def webdataset_prepare(job: Job) -> Job:
    """Write the windows of `input` as members of tar shards."""
    import webdataset

    with webdataset.ShardWriter(f"{job['output']}/%05d.tar", maxcount=4000, verbose=0) as writer:
        for number, window in enumerate(windows(job)):
            writer.write({"__key__": f"{number:08d}", "tokens.bin": window.tobytes()})
    return {}


def webdataset_loader(job: Job) -> Job:
    """Measure WebDataset on local tar shards, with shuffled shards and a shuffle buffer of 1,000 samples, without worker processes."""
    import webdataset

    tars = [str(file) for file in sorted(Path(job["output"]).glob("*.tar"))]
    dataset = webdataset.WebDataset(tars, shardshuffle=len(tars), empty_check=False).shuffle(1000)
    return {"rate": rate(job, sample_reader(dataset.map(lambda sample: np.frombuffer(sample["tokens.bin"], np.uint16))))}


def sample_reader(dataset: Iterable[Any]) -> Callable[[], int]:
    """Return a function that reads 256 samples per call; the epochs of the dataset repeat."""
    samples = itertools.chain.from_iterable(itertools.repeat(dataset))

    def read() -> int:
        for _ in range(256):
            next(samples)
        return 256

    return read


TASKS = {
    "megatron-core": {
        "tokenize": megatron_tokenize,
        "ids": megatron_ids,
        "prepare": megatron_prepare,
        "loader": megatron_loader,
    },
    "mosaicml-streaming": {"tokenize": mosaic_tokenize, "ids": mosaic_ids, "prepare": mosaic_prepare, "loader": mosaic_loader},
    "webdataset": {"prepare": webdataset_prepare, "loader": webdataset_loader},
}


if __name__ == "__main__":
    main(TASKS)
