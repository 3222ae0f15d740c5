"""Conversion of token shards part by part, shared by the ranks; an interrupted conversion continues with the missing parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.common import artifact
from pipeline.common.artifact import Manifest
from pipeline.common.mpi import Comm
from pipeline.common.progress import Progress
from pipeline.common.unfinished import work
from pipeline.data.tokenize import token_shards

log = logging.getLogger("pipeline")

Files = dict[str, dict[str, Any]]
"""File name -> manifest entry."""


def convert_parts(
    comm: Comm,
    folder: Path,
    key_and_stage: tuple[str, str],
    settings: dict[str, Any],
    sizes: dict[str, int],
    convert: Callable[[str], Files],
    totals: Callable[[Files], dict[str, Any]],
    resume: dict[str, Any] | None = None,
) -> None:
    """Convert the missing parts, distributed over the ranks, and write the manifest.

    Args:
        key_and_stage: the configuration key of the folder, and the stage recorded in its manifest.
        settings: all settings that determine the content.
        sizes: part -> size, for load balancing.
        convert: writes a part and returns the manifest entries of its files.
        totals: computes the totals of the manifest from all files.
        resume: further settings that must not change until the conversion is finished.
    """
    outputs = ["*-?????.tar", "*.parquet", "*.bin", "*.idx"]
    with work(comm, folder, key_and_stage, settings, lambda _: "converted", outputs, resume=resume) as unfinished:
        if not unfinished:
            return
        mine = [part for part in token_shards.share(sizes, comm.rank, comm.size) if unfinished.note(part) is None]
        with Progress(len(mine), "convert_tokens", "parts", comm.rank) as progress:
            for part in mine:
                unfinished.write(part, convert(part))
                progress.advance(1, part)
        comm.barrier()
        if comm.rank == 0:
            files = {name: entry for part in sizes for name, entry in unfinished.note(part).items()}
            artifact.write(folder, Manifest(key_and_stage[1], settings, files, totals(files)))
            unfinished.clear()
            log.info("convert_tokens: wrote %s (%s files)", folder, len(files))
