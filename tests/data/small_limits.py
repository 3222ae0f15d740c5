"""stage=shard with limits so small that every loop over them has many turns: `python small_limits.py key=value ...`."""

from __future__ import annotations

import sys

from pipeline.__main__ import run
from pipeline.common import mpi
from pipeline.data.dedup import duplicates, exact, paragraphs
from pipeline.data.shard import span_search, spill, spilled_documents, sweep

mpi.MESSAGE_BYTES = 5_000
spill.RUN_BYTES = 9_000
sweep.PIECE_BYTES = 7_000
duplicates.PAIR_BATCH = 3
exact.SLICE_ROWS = duplicates.SLICE_ROWS = paragraphs.SLICE_ROWS = 40
span_search.RUN_ROWS, span_search.ANCHOR_BYTES, span_search.WINDOW_BYTES = 50, 10_000, 5_000
spilled_documents.most_open_files = lambda: 2

if __name__ == "__main__":
    sys.argv = ["pipeline", *sys.argv[1:]]
    run()
