"""shard: documents -> clean, deduplicated, shuffled text shards, with the same bytes on any number of ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import artifact, knobs
from pipeline.config.schema import RunConfig
from pipeline.data import mpi
from pipeline.data.clean.cleaner import Cleaner
from pipeline.data.mpi import Comm
from pipeline.data.read import sources
from pipeline.data.read.documents import DEFAULT_CORPUS, Bad, ReadOptions
from pipeline.data.read.sources import Part
from pipeline.data.shard.job import Job
from pipeline.data.unfinished import Unfinished, claimed, work
from pipeline.errors import UserError
from pipeline.launch.ranks import ArrayTask, Ranks, array_task

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write the folder `data.shards` from the documents of `data.input` and `data.corpora`."""
    folder, array = Path(config.data.shards), array_task()
    mpi.share_cores(ranks)
    with mpi.world(ranks, folder) as comm:
        # One rank looks around and tells the others: a parallel file system should not answer the same questions a thousand times.
        parts, bad, settings = comm.bcast(_look(config) if comm.rank == 0 else None)
        cleaner = Cleaner(config.clean)
        with work(comm, folder, ("data.shards", "shard"), settings, _summary, array.job if array else None) as unfinished:
            if not unfinished:
                return
            job = Job(config, comm, parts, unfinished)
            tasks = array or ArrayTask("", 0, 1)
            job.read(cleaner, tasks.index * comm.size + comm.rank, tasks.size * comm.size)
            with _turn(job, unfinished, comm) if array else contextlib.nullcontext(True) as ours:
                if not ours:
                    log.info("shard: this task's share is done; the last task of the job array goes on with all of them")
                    return
                totals = job.write(bad)
            if totals:
                log.info("shard: wrote %s (%s)", folder, _summary(totals))


@contextlib.contextmanager
def _turn(job: Job, unfinished: Unfinished, comm: Comm) -> Iterator[bool]:
    """Whether this task of a job array is the one that goes on: every part is read, and no other task was faster."""
    with contextlib.ExitStack() as claim:
        ours = comm.rank == 0 and job.all_read()
        if ours:
            try:
                claim.enter_context(claimed(unfinished.folder, "data.shards"))
                ours = job.all_read()  # a task that has written everything has cleared the notes
            except UserError as error:  # another task was faster; or the folder cannot be written, which the log must say
                log.info("shard: not for this task to finish: %s", error)
                ours = False
        yield comm.bcast(ours)


def _look(config: RunConfig) -> tuple[list[Part], list[Bad], dict[str, Any]]:
    """The parts of the input, what is no input after all, and all that determines the shards."""
    data = config.data
    found, bad = sources.find({DEFAULT_CORPUS: data.input, **data.corpora}, data.suffixes, data.exclude)
    against = [artifact.fingerprint(artifact.read(Path(folder), key="dedup.against", stage="shard")) for folder in config.dedup.against]
    fields = ("seed", "part_megabytes", "shard_megabytes", "validation_fraction", "documents_per_member")
    return (
        sources.parts(found, sources.part_bytes(found, data.part_megabytes)),
        bad,
        {
            "data.input": sources.fingerprint(found),
            **{f"data.{name}": value for name, value in vars(ReadOptions.of(data)).items()},
            **{f"data.{name}": getattr(data, name) for name in fields},
            "clean.steps": list(config.clean.steps),
            **{key: value for step in config.clean.steps for key, _, value in knobs.walk(getattr(config.clean, step), f"clean.{step}.")},
            **{key: value for key, _, value in knobs.walk(config.dedup, "dedup.")},
            "dedup.against": against,
        },
    )


def _summary(totals: dict[str, Any]) -> str:
    """The totals for people."""
    return "; ".join(_summary_parts(totals))


def _summary_parts(totals: dict[str, Any]) -> Iterator[str]:
    for split in ("train", "validation"):
        count = totals[split]
        yield f"{split} {count['documents']:,} documents, {count['bytes'] / 1e6:,.1f} MB, {count['shards']} shards"
    for what, words in (("empty", "empty documents left out"), ("bad", "not readable"), ("cleaned", "left out by cleaning")):
        if totals[f"{what}_documents"]:
            yield f"{totals[f'{what}_documents']:,} {words}"
    if totals["exact_duplicates"] or totals["near_duplicates"]:
        yield f"{totals['exact_duplicates']:,} exact and {totals['near_duplicates']:,} near duplicates left out"
