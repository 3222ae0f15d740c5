"""shard: documents -> cleaned, deduplicated, shuffled text shards. The output is byte-identical for any number of ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.common import artifact, knobs, mpi
from pipeline.common.errors import UserError
from pipeline.common.files import digest
from pipeline.common.locks import claimed
from pipeline.common.mpi import Comm
from pipeline.common.ranks import ArrayTask, Ranks, array_task
from pipeline.common.unfinished import Unfinished, work
from pipeline.config.schema import RunConfig
from pipeline.data.clean.cleaner import Cleaner
from pipeline.data.read import fingerprint, sources
from pipeline.data.read.documents import DEFAULT_CORPUS, Bad, ReadOptions
from pipeline.data.read.sources import Source
from pipeline.data.shard import shards
from pipeline.data.shard.job import Job

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write the folder `data.shards` from the documents of `data.input` and `data.corpora`."""
    folder, array = Path(config.data.shards), array_task()
    mpi.share_cores(ranks)
    with mpi.world(ranks, folder) as comm:
        # Rank 0 lists the input and broadcasts it, which keeps metadata requests off the parallel file system.
        found, bad, settings = comm.bcast(_list_input(config) if comm.rank == 0 else None)
        settings |= {"data.input": fingerprint.content(comm, found)}
        parts = sources.parts(found, sources.part_bytes(found, config.data.part_megabytes))
        resume = {"data.part_megabytes": config.data.part_megabytes, **fingerprint.versions(found)}
        cleaner = Cleaner(config.clean)
        made_as, job_array = ("data.shards", "shard"), array.job if array else None
        with work(comm, folder, made_as, settings, _summary, shards.OUTPUTS, resume=resume, array=job_array) as unfinished:
            if not unfinished:
                return
            job = Job(config, comm, parts, unfinished)
            tasks = array or ArrayTask("", 0, 1)
            job.read(cleaner, tasks.index * comm.size + comm.rank, tasks.size * comm.size)
            with _claim_final_passes(job, unfinished, comm) if array else contextlib.nullcontext(True) as ours:
                if not ours:
                    log.info("shard: this task has read its parts; the last task of the job array completes the stage")
                    return
                totals = job.write(bad)
            if totals:
                log.info("shard: wrote %s (%s)", folder, _summary(totals))


@contextlib.contextmanager
def _claim_final_passes(job: Job, unfinished: Unfinished, comm: Comm) -> Iterator[bool]:
    """Yield whether this task of a job array runs the remaining passes: all parts are read and no other task has claimed them."""
    with contextlib.ExitStack() as claim:
        ours = comm.rank == 0 and job.all_read()
        if ours:
            try:
                claim.enter_context(claimed(unfinished.folder, "data.shards"))
                ours = job.all_read()  # False if another task has completed the stage since and removed its progress records
            except UserError as error:  # another task holds the claim, or the folder is not writable
                log.info("shard: this task does not complete the stage: %s", error)
                ours = False
        yield comm.bcast(ours)


def _list_input(config: RunConfig) -> tuple[list[Source], list[Bad], dict[str, Any]]:
    """Return the input files, the unreadable inputs, and all settings that determine the shards, except the content of the files."""
    data = config.data
    found, bad = sources.find({DEFAULT_CORPUS: data.input, **data.corpora}, data.suffixes, data.exclude)
    against = [artifact.fingerprint(artifact.read(Path(folder), key="dedup.against", stage="shard")) for folder in config.dedup.against]
    fields = ("seed", "shard_megabytes", "validation_fraction", "documents_per_member", "save_dropped")
    return (
        found,
        bad,
        {
            **{f"data.{name}": value for name, value in vars(ReadOptions.of(data)).items()},
            **{f"data.{name}": getattr(data, name) for name in fields},
            "clean.steps": list(config.clean.steps),
            **{key: value for step in config.clean.steps for key, _, value in knobs.walk(getattr(config.clean, step), f"clean.{step}.")},
            **{key: value for key, _, value in knobs.walk(config.dedup, "dedup.")},
            "dedup.against": against,
            **({"clean.contamination.files": _digests(config.clean.contamination.files)} if "contamination" in config.clean.steps else {}),
        },
    )


def _digests(names: list[str]) -> list[str]:
    """Name and checksum of files; without a checksum for one that is missing, which the cleaner refuses."""
    paths = [Path(name).expanduser() for name in names]
    return [f"{path.name} {digest(path) if path.is_file() else ''}" for path in paths]


def _summary(totals: dict[str, Any]) -> str:
    """Format the totals for the log."""
    return "; ".join(_summary_parts(totals))


def _summary_parts(totals: dict[str, Any]) -> Iterator[str]:
    """Yield the non-empty counts of the summary."""
    for split in ("train", "validation"):
        count = totals[split]
        yield f"{split} {count['documents']:,} documents, {count['bytes'] / 1e6:,.1f} MB, {count['shards']} shards"
    for what, words in (
        ("empty", "empty documents dropped"),
        ("bad", "unreadable documents"),
        ("cleaned", "documents dropped by cleaning"),
    ):
        if totals[f"{what}_documents"]:
            yield f"{totals[f'{what}_documents']:,} {words}"
    if totals["exact_duplicates"] or totals["near_duplicates"]:
        yield f"{totals['exact_duplicates']:,} exact and {totals['near_duplicates']:,} near duplicates dropped"
    if totals["repeated_documents"]:
        yield f"{totals['repeated_documents']:,} documents dropped because all of their lines are repeated"
