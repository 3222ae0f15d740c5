"""How a run saves: beside training, if every node has the memory and its writer process answers; otherwise while training waits."""

from __future__ import annotations

import logging
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint import commit
from pipeline.checkpoint.async_save import AsyncSaver, Node
from pipeline.checkpoint.fragments import plan
from pipeline.checkpoint.saver import Saver, SyncSaver
from pipeline.checkpoint.staging import staged_bytes
from pipeline.checkpoint.writer_process import WriterProcess
from pipeline.common.host_memory import available_bytes
from pipeline.common.ranks import Ranks
from pipeline.config.schema import CheckpointConfig, RunConfig
from pipeline.parallel.mesh import INPUT_OUTPUT, gather_objects
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")

#: Share of the available memory that copies may take.
_SHARE = 0.9
#: Share of training.timeout_minutes for which a save waits for the one before: other ranks may be in a collective of the next step.
_BEFORE_NEXT = 0.8


@dataclass(frozen=True)
class Offer:
    """What a rank tells the others before the first save.

    Attributes:
        writer: address of the writer process that it has started, empty if it has not.
        token: for the names of partial folders; that of rank 0 counts.
        bytes: that its copies need.
        available: bytes of memory of its node.
    """

    host: str
    local_rank: int
    writer: str
    token: str
    bytes: int
    available: float


def start_writer(config: CheckpointConfig, ranks: Ranks) -> WriterProcess | None:
    """Start the writer process on the first rank of a node, before that has process groups and a GPU."""
    if config.async_save == "off" or ranks.local_rank > 0:
        return None
    process = WriterProcess(f"tannschen-{uuid.uuid4().hex}")
    with suppress(OSError):  # all ranks learn of it when they connect
        process.start()
    return process


def choose(config: RunConfig, ranks: Ranks, trainer: Trainer, process: WriterProcess | None, lock: int | None) -> Saver:
    """Return what saves the checkpoints of a run; every rank calls this.

    Args:
        trainer: whose state is saved.
        process: the writer process of the node, on its first rank.
        lock: file descriptor of the lock of the run directory, on rank 0.
    """
    run_dir, settings = Path(config.run_dir), config.checkpoint
    if settings.async_save == "off":
        return SyncSaver(run_dir, settings.files)
    shares = plan([fragment.held() for fragment in trainer.engine.fragments()])
    needed = staged_bytes([share.part for share in shares])
    name = "" if process is None else process.name
    offers = gather_objects(Offer(socket.gethostname(), ranks.local_rank, name, commit.new_attempt(), needed, available_bytes()))
    nodes = nodes_of(offers)
    reason = without_memory(offers, nodes)
    saver: AsyncSaver | None = None
    if not reason:
        number = next(number for number, members in enumerate(nodes) if ranks.rank in members)
        node = Node(offers[nodes[number][0]].writer, nodes[number], number, len(nodes))
        seconds, device, problem = config.training.timeout_minutes * 60, trainer.mesh.device, ""
        waits = (seconds * INPUT_OUTPUT / 2, seconds * _BEFORE_NEXT)
        try:
            saver = AsyncSaver(run_dir, ranks.rank, node, process, shares, settings.files, device, offers[0].token, lock, *waits)
        except OSError as error:
            problem = f"rank {ranks.rank}: {error}"
        reason = next(filter(None, gather_objects(problem)), "")
    if not reason and saver is not None:
        return saver
    if saver is not None:
        saver.close()
    elif process is not None:
        process.close()
    if ranks.rank == 0:
        log.info("checkpoint.async_save=%s: training waits for each checkpoint: %s", settings.async_save, reason)
    return SyncSaver(run_dir, settings.files)


def nodes_of(offers: list[Offer]) -> list[tuple[int, ...]]:
    """Return the ranks of each node, the one that has started the writer process first.

    Of several writers on one host, as in tests of several nodes on one machine, a rank uses that of its launcher, which numbers the ranks
    of a node in a row.
    """
    leaders = {rank: [rank] for rank, offer in enumerate(offers) if offer.writer}
    for rank, offer in enumerate(offers):
        if not offer.writer:
            here = [leader for leader in leaders if offers[leader].host == offer.host]
            leader = here[0] if len(here) == 1 else rank - offer.local_rank
            leaders.setdefault(leader, []).append(rank)
    return [tuple(members) for members in leaders.values()]


def without_memory(offers: list[Offer], nodes: list[tuple[int, ...]]) -> str:
    """Return why the copies do not fit in the memory of a node; empty if they do."""
    for members in nodes:
        needed, available = sum(offers[rank].bytes for rank in members), min(offers[rank].available for rank in members)
        if needed > _SHARE * available:
            ranks = f"its {len(members)} ranks" if len(members) > 1 else "its rank"
            where = f"the copies of {ranks} need {needed / 1e9:.1f} GB of {offers[members[0]].host}"
            return f"{where}, of whose memory {available / 1e9:.1f} GB are available"
    return ""
