"""Is the input the one that a run has read? Fingerprints of the input files, without reading them in full."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from pipeline.common.mpi import Comm
from pipeline.data.read.input_files import InputFile
from pipeline.data.read.streams import is_remote

BLOCKS, BLOCK_BYTES = 8, 1 << 14
"""The content of a file is sampled in this many blocks, evenly spaced from its first to its last byte: files up to 128 kB in full."""

_THREADS = 8
"""Concurrent reads of a rank: a parallel file system has a high latency per file, but serves many files in parallel."""


def content(comm: Comm, sources: Sequence[InputFile]) -> str:
    """Summarize the corpora, names, sizes and sampled contents of the files; independent of their location and times. Collective.

    A remote file is represented by its version instead of its content.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        mine = list(pool.map(_sample, sources[comm.rank :: comm.size]))
    samples: list[str] = [""] * len(sources)
    for rank, found in enumerate(comm.allgather(mine)):
        samples[rank :: comm.size] = found
    state = xxhash.xxh3_64()
    for source, sample in zip(sources, samples, strict=True):
        state.update(f"{source.label}\0{source.size}\0{sample}\0".encode())
    return f"{len(sources)} files, {sum(source.size for source in sources)} bytes, xxh3 {state.hexdigest()}"


def versions(sources: Sequence[InputFile]) -> dict[str, str]:
    """Describe the size and the version of every file: an edit that the sample of the content misses changes its modification time.

    Returns:
        "data.input/NAME" -> description.
    """
    return {f"data.input/{source.label}": f"{source.size} bytes, {source.version or 'of unknown version'}" for source in sources}


def _sample(source: InputFile) -> str:
    """The checksum of evenly spaced blocks of a file; its version if it is remote, its error if it cannot be read."""
    if is_remote(source.path):
        return source.version
    state = xxhash.xxh3_64()
    last = max(0, source.size - BLOCK_BYTES)
    try:
        with open(source.path, "rb", buffering=0) as handle:
            for place in sorted({last * block // (BLOCKS - 1) for block in range(BLOCKS)}):
                handle.seek(place)
                state.update(handle.read(BLOCK_BYTES))
    except OSError as error:
        return str(error.strerror)
    return state.hexdigest()
