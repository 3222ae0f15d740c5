"""At the end of a run: are all token shards that it has read verified? With data.verify=lazy the checks run in the background."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from pipeline.data.load.objectives.objective import Objective
from pipeline.data.load.token_stream import TokenStream

log = logging.getLogger("pipeline")

WAIT_SECONDS = 60.0
"""Maximum time that the end of a run is delayed. A short run on a large corpus opens all shards; to read them in full may take hours."""


def finish(data: Sequence[Objective | None], seconds: float = WAIT_SECONDS) -> int:
    """Complete the background verification of all shards that any rank has read, within some time, and warn about the others. Collective.

    Returns:
        The number of shards that the run has read and not verified.

    Raises:
        UserError: a shard is corrupt; the message names it.
    """
    deadline = time.monotonic() + seconds
    streams = [stream for objective in data if objective is not None for stream in objective.streams]
    counts = [_finish(stream, deadline) for stream in streams if stream.lazy_checks]
    unverified, read = (sum(count) for count in zip(*counts, strict=True)) if counts else (0, 0)
    if unverified and dist.get_rank() == 0:
        outcome = "were not verified against their checksums before it ended; data.verify=all verifies all shards before the run"
        log.warning("data.verify=lazy: %d of %d token shards that this run has read %s", unverified, read, outcome)
    return unverified


def _finish(stream: TokenStream, deadline: float) -> tuple[int, int]:
    """The number of shards of a stream that are not verified, and of those that were read."""
    read = _any_rank(stream.read_shards)
    verified = _any_rank(stream.wait_verified(read, max(0.0, deadline - time.monotonic())))
    return int(np.count_nonzero(read & ~verified)), int(np.count_nonzero(read))


def _any_rank(flags: np.ndarray) -> np.ndarray:
    """The logical or of the flags of all ranks, over gloo."""
    combined = torch.from_numpy(flags.astype(np.int32))
    dist.all_reduce(combined, dist.ReduceOp.MAX)
    return combined.numpy() > 0
