"""Saves a checkpoint while its caller waits: every rank its share, or one process full weights. An incomplete one is never visible."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint import catalog, commit, handover
from pipeline.checkpoint.data_file import DataFile, WrittenFile, write
from pipeline.checkpoint.fragments import Fragment, Share, plan
from pipeline.checkpoint.native import Index
from pipeline.checkpoint.records import write_record
from pipeline.common.atomic_files import advice
from pipeline.common.errors import UserError
from pipeline.common.locks import claimed
from pipeline.parallel.mesh import gather_objects, on_rank_0

log = logging.getLogger("pipeline")

#: Bytes of each of the two pinned buffers that a tensor of a GPU passes through.
BOUNCE = 32 << 20
#: Bytes of weights at which a file of full weights is written.
_MOST = 512 << 20
_THEN = "checkpoint.resume=auto continues"


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self) -> object:
        """Mark this moment in the work of the GPU."""

    def synchronize(self) -> object:
        """Wait until the GPU has come to the mark."""


def host_bytes(values: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a flat tensor, in order. A buffer may be overwritten when the next one is requested.

    A tensor in host memory is not copied. That of a GPU passes through two pinned buffers: one is filled while the caller uses the other.
    """
    flat = values.view(torch.uint8)
    if flat.device.type == "cpu":
        yield flat.numpy().data
        return
    buffers = [torch.empty(min(BOUNCE, len(flat)), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    yield from through_buffers(flat, buffers, [torch.cuda.Event(), torch.cuda.Event()])


def through_buffers(flat: Tensor, buffers: Sequence[Tensor], copied: Sequence[Event]) -> Iterator[memoryview]:
    """Copy bytes through two buffers in turn; the next copy begins before the caller gets the one before.

    Args:
        flat: the bytes.
        buffers: two of the same size, in host memory.
        copied: an event for each.
    """
    chunks = flat.split(len(buffers[0]))

    def begin(number: int) -> None:
        buffers[number % 2][: len(chunks[number])].copy_(chunks[number], non_blocking=True)
        copied[number % 2].record()

    begin(0)
    for number, chunk in enumerate(chunks):
        copied[number % 2].synchronize()
        if number + 1 < len(chunks):
            begin(number + 1)
        yield buffers[number % 2][: len(chunk)].numpy().data


def file_name(rank: int) -> str:
    """Name of the file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def node_file_name(node: int) -> str:
    """Name of the file of a node."""
    return f"node-{node:05d}.safetensors"


def save(
    run_dir: Path,
    index: Index,
    fragments: Sequence[Fragment],
    keep: int,
    needed: Callable[[Path], bool] = lambda _: False,
    *,
    every: int = 0,
    files: str = "rank",
) -> Path:
    """Write a checkpoint; every rank calls this, and continues when it is complete.

    Args:
        run_dir: the run directory, locked by this job.
        index: the index without its files.
        keep: number of newest checkpoints to keep; older ones are removed.
        needed: whether an older one is kept, too; called on rank 0.
        every: checkpoints whose step is a multiple are kept, too; 0 for none.
        files: "rank" for a file of each rank, "node" for a file of each node.

    Raises:
        UserError: a weight is not finite, or a rank could not write (disk full, quota); the partial checkpoint is removed.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def begin() -> Path:
        with _reported(run_dir):
            return commit.begin(run_dir, index, commit.new_attempt(), world_size)

    _check_finite(fragments, index.train_state.step)
    folder = on_rank_0(begin)
    shares = plan([fragment.held() for fragment in fragments])
    write_files = _write_with_node if files == "node" else _write_alone
    answers = gather_objects(_try_to(lambda: write_record(folder, rank, write_files(folder, fragments, shares))))
    failures = [answer for answer in answers if answer is not None]

    def finish() -> Path:
        try:
            if failures:
                raise UserError.of("run_dir", folder, failures[0], advice(failures[0], _THEN))
            with _reported(run_dir):
                return commit.commit(run_dir)
        except UserError:
            _abandon(run_dir)
            raise

    def prune() -> None:
        try:
            catalog.prune(run_dir, keep, every, needed)
        except OSError as error:
            raise UserError.of(
                "checkpoint.keep", keep, f"an older checkpoint cannot be removed: {error}", "correct its permissions"
            ) from error

    final: Path = on_rank_0(finish)
    on_rank_0(prune)
    return final


def _abandon(run_dir: Path) -> None:
    """Remove the partial checkpoint; the next start removes what cannot be removed now."""
    try:
        commit.abandon(run_dir)
    except OSError as error:
        log.warning("%s: the partial checkpoint is not removed: %s", run_dir, error)


@contextmanager
def _reported(run_dir: Path) -> Iterator[None]:
    """A context that writes to the run directory.

    Raises:
        UserError: it could not write, or the records do not fit together.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError.of("run_dir", run_dir, f"the checkpoint could not be written: {error}", advice(str(error), _THEN)) from error


def _check_finite(fragments: Sequence[Fragment], step: int) -> None:
    """Refuse to save weights that are not finite; every rank calls this.

    Raises:
        UserError: on every rank, with the name of such a weight.
    """
    names = (f.piece.name for f in fragments if not bool(f.tensors["weight"].detach().isfinite().all()))
    if not_finite := sorted(name for name in gather_objects(next(names, None)) if name):
        raise handover.not_finite(step, not_finite[0])


def _try_to(call: Callable[[], None]) -> str | None:
    """Call a function that writes files. Returns the error message, None without one."""
    try:
        call()
    except Exception as error:  # the other ranks wait for the answer
        return f"could not be written: {error}"
    return None


def _write_alone(folder: Path, fragments: Sequence[Fragment], shares: Sequence[Share]) -> list[WrittenFile]:
    """Write the file of this rank, if it has anything to write."""
    path = folder / file_name(dist.get_rank())
    return [write(path, [share.part for share in shares], _reader(fragments, shares))] if shares else []


def _reader(fragments: Sequence[Fragment], shares: Sequence[Share]) -> Callable[[int, str], Iterator[memoryview]]:
    """The bytes of the parts of this rank, from memory or from its GPU."""

    def read(number: int, kind: str) -> Iterator[memoryview]:
        share = shares[number]
        values = fragments[share.fragment].tensors[kind].detach().view(-1)
        return host_bytes(values[share.first : share.first + share.part.count])

    return read


def _write_with_node(folder: Path, fragments: Sequence[Fragment], shares: Sequence[Share]) -> list[WrittenFile]:
    """Write this rank's parts into the file of its node; every rank calls this. The first rank of the node returns the file.

    Raises:
        OSError: a rank could not write; on every rank.
    """
    rank = dist.get_rank()
    others = gather_objects((socket.gethostname(), [share.part for share in shares]))
    hosts = list(dict.fromkeys(host for host, _ in others))
    members = [other for other, (host, _) in enumerate(others) if host == others[rank][0]]
    first = sum(len(others[other][1]) for other in members if other < rank)
    file = DataFile(folder / node_file_name(hosts.index(others[rank][0])), [part for other in members for part in others[other][1]])
    read = _reader(fragments, shares)

    def write_own() -> dict[tuple[int, str], Any]:
        return file.write_parts(range(first, first + len(shares)), lambda number, kind: read(number - first, kind))

    _together(file.create if rank == members[0] else lambda: None)
    digests = _together(write_own)
    if rank != members[0]:
        return []
    return [file.finish({key: value for other in members for key, value in digests[other].items()})]


def _together(call: Callable[[], Any]) -> list[Any]:
    """Call a function on every rank, and return the results by rank; collective.

    Raises:
        OSError: a call failed; on every rank.
    """
    try:
        answer, failure = call(), ""
    except Exception as error:  # the other ranks wait for the answer
        answer, failure = None, str(error)
    answers = gather_objects((answer, failure))
    if failures := [failure for _, failure in answers if failure]:
        raise OSError(failures[0])
    return [answer for answer, _ in answers]


def save_full(run_dir: Path, index: Index, fragments: Iterable[Fragment], file_bytes: int) -> Path:
    """Write a checkpoint of full weights in one process, as files of similar size. Memory holds the weights of one file.

    Args:
        run_dir: the run directory; it is locked meanwhile.
        index: the index without its files.
        fragments: one per weight, loaded lazily.
        file_bytes: size at which a file is written, at most 512 MB.

    Raises:
        UserError: a file could not be written, or another job uses the run directory; the partial checkpoint is removed.
    """
    with _reported(run_dir), claimed(run_dir, "run_dir"):
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        commit.finish_interrupted(run_dir)
        folder = commit.begin(run_dir, index, commit.new_attempt(), 1)
        try:
            written = []
            for number, group in enumerate(_groups(fragments, min(file_bytes, _MOST))):
                shares = plan([fragment.held() for fragment in group])
                written.append(write(folder / file_name(number), [share.part for share in shares], _reader(group, shares)))
                group.clear()  # before the next ones are loaded
            write_record(folder, 0, written)
            return commit.commit(run_dir)
        except BaseException:
            _abandon(run_dir)
            raise


def _groups(fragments: Iterable[Fragment], file_bytes: int) -> Iterator[list[Fragment]]:
    """Group fragments up to the size of a file."""
    group: list[Fragment] = []
    size = 0
    for fragment in fragments:
        group.append(fragment)
        size += sum(tensor.nbytes for tensor in fragment.tensors.values())
        if size >= file_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group
