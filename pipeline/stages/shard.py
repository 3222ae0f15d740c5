"""shard: documents -> cleaned, deduplicated, shuffled text shards. The output is byte-identical for any number of ranks."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

from pipeline.common import mpi
from pipeline.common.ranks import Ranks, array_task
from pipeline.common.unfinished import work
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Shard
from pipeline.data.clean.cleaner import Cleaner
from pipeline.data.load import validation_split
from pipeline.data.read import input_files, inventory
from pipeline.data.shard import shards, spill
from pipeline.data.shard.passes import ShardPasses, claim
from pipeline.data.shard.shard_report import summary
from pipeline.data.shard.shards import list_input

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write the folder `data.shards` from the documents of `data.input` and `data.corpora`."""
    assert isinstance(config.stage, Shard)
    folder, array, until = Path(config.data.shards), array_task(), config.stage.until
    mpi.share_cores(ranks)
    with mpi.world(ranks, folder) as comm:
        # Rank 0 lists the input and broadcasts it, which keeps metadata requests off the parallel file system.
        listing, settings = comm.bcast(list_input(config.data, config.clean, config.dedup) if comm.rank == 0 else None)
        files = listing.files
        settings |= {"data.input": input_files.content(comm, files)}
        parts = input_files.parts(files, input_files.part_bytes(files, config.data.part_megabytes))
        resume = {
            "data.part_megabytes": config.data.part_megabytes,
            "version of the intermediate files": spill.FORMAT,
            **input_files.versions(files),
        }
        cleaner = Cleaner(config.clean)
        made_as, job_array = ("data.shards", "shard"), array.job if array else None
        with work(comm, folder, made_as, settings, summary, shards.OUTPUTS, resume=resume, array=job_array) as unfinished:
            if not unfinished:
                return
            if comm.rank == 0:
                inventory.report_listing(listing, config.data.suffixes)
            passes = ShardPasses(config.data, config.dedup, comm, listing, parts, unfinished, ranks.local_size, array)
            passes.check_limits()
            passes.read(cleaner)
            if until == "read":
                return
            with closing(passes):
                passes.write(shards=until == "shards")
                totals = {} if array or until != "shards" else passes.complete()
        if array and until == "shards":
            # Tasks leave before they try to hold the folder alone: the last of them does, after all shards are written.
            with claim(comm, folder) as alone, closing(passes):
                totals = passes.complete() if alone else {}
        if totals:
            log.info("shard: wrote %s (%s)", folder, summary(totals))
            validation_split.warn_of_few_documents(totals["validation"]["documents"], "set a larger data.validation_fraction")
