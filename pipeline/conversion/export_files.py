"""Writes the files of an export: shared by the ranks, read again before they count as written, kept when the job is killed."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from pipeline.common import artifact
from pipeline.common.atomic_files import apply_umask, behind_link, digest, partial_folder, publish_folder, sync_folder
from pipeline.common.errors import CheckFailed, UserError
from pipeline.common.locks import claimed
from pipeline.common.mpi import Comm, SingleProcessComm
from pipeline.common.progress import SharedProgress
from pipeline.common.unfinished import Unfinished

log = logging.getLogger("pipeline")

#: Receives the name of a stored tensor, its digest as computed from the checkpoint, and its bytes; calls come in the order of the file.
Written = Callable[[str, str, int], None]


@dataclass(frozen=True)
class OutputFile:
    """A file with weights, which one rank writes.

    Attributes:
        name: of the file, which may be in a subfolder.
        bytes: expected size of its tensors, for progress and for equal shares of the ranks.
        write: writes the file to a path, one tensor in memory at a time. Returns what the other functions of the export must know of the
            file (JSON), and its xxh3-128 checksum if it is known.
        read: reads a written file with a reader of its format; yields (name, digest) of the stored tensors in the order of `write`. A
            digest is that of the weights in the checkpoint's form, so that both sides are computed differently.
    """

    name: str
    bytes: int
    write: Callable[[Path, Written], tuple[Any, str | None]]
    read: Callable[[Path], Iterable[tuple[str, str]]]


class ExportWriter:
    """Writes the files of one export.

    Args:
        records: where completion records are kept; None for an export that begins from the start.
    """

    def __init__(self, comm: Comm | None = None, records: Unfinished | None = None) -> None:
        self.comm, self.records = comm or SingleProcessComm(), records
        self.entries: dict[Path, dict[str, Any]] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is not shared: configurations, indexes, the tokenizer."""
        return self.comm.rank == 0

    def write(self, folder: Path, files: Sequence[OutputFile]) -> dict[str, Any]:
        """Write files that are missing. Collective: all ranks call it with the same files. Afterwards `entries` has their manifest entries.

        Returns:
            File name -> what its `write` returned, on all ranks.

        Raises:
            CheckFailed: a written file does not hold the weights of the checkpoint.
        """
        kept = self.comm.bcast({file.name: note for file in files if (note := self._kept(folder, file))} if self.is_first else None)
        if kept:
            log.info("convert: %d of %d files are there", len(kept), len(files))
        mine = {}
        missing = [file for file in files if file.name not in kept]
        with SharedProgress(self.comm, sum(file.bytes for file in missing), "writing weights", "B") as progress:
            for file in share(missing, self.comm.size)[self.comm.rank]:
                mine[file.name] = note = _write(folder, file, progress)
                if self.records is not None:
                    self.records.write(file.name, note)
        for parent in sorted({(folder / name).parent for name in mine} | {folder}):
            sync_folder(parent)
        notes: dict[str, dict[str, Any]] = dict(kept)
        for written in self.comm.allgather(mine):
            notes |= written
        self.entries |= {folder / name: note["entry"] for name, note in notes.items()}
        return {file.name: notes[file.name]["note"] for file in files}

    def _kept(self, folder: Path, file: OutputFile) -> dict[str, Any] | None:
        """The completion record of a file of an interrupted export."""
        note = None if self.records is None else self.records.note(file.name)
        path = folder / file.name
        if note is None or not path.is_file() or path.stat().st_size != note["entry"]["bytes"]:
            return None
        return dict(note)


def _write(folder: Path, file: OutputFile, progress: SharedProgress) -> dict[str, Any]:
    """Write a file, read it again, and return its completion record."""
    path = folder / file.name
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    expected: list[tuple[str, str]] = []

    def written(name: str, of_checkpoint: str, count: int) -> None:
        expected.append((name, of_checkpoint))
        progress.advance(count, file.name)

    try:
        note, checksum = file.write(partial, written)
        with open(partial, "rb") as handle:
            os.fsync(handle.fileno())
        compare_digests(file.name, expected, file.read(partial))
        apply_umask(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return {"note": note, "entry": {"bytes": path.stat().st_size, "xxh3": checksum or digest(path)}}


def compare_digests(file: str, expected: Iterable[tuple[str, str]], written: Iterable[tuple[str, str]]) -> None:
    """Compare the tensors of a written file with those of the checkpoint.

    Args:
        expected, written: (name, digest) of each tensor, in the same order.

    Raises:
        CheckFailed: they differ; the message names the first tensor that does.
    """
    for want, got in zip_longest(expected, written):
        if want != got:
            name = (want or got)[0]
            problem = "is missing" if got is None else "was not written" if want is None else "differs from the checkpoint"
            raise CheckFailed(f"convert: {name} {problem} in {file}, read again after it was written: nothing is published")


def share(files: Sequence[OutputFile], ranks: int) -> list[list[OutputFile]]:
    """Return the files of each rank: the largest first, each to the rank with the fewest bytes so far."""
    shares: list[list[OutputFile]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for file in sorted(files, key=lambda file: (-file.bytes, file.name)):
        rank = loads.index(min(loads))
        shares[rank].append(file)
        loads[rank] += file.bytes
    return shares


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bytes of tensors, one after another."""
    state = xxhash.xxh3_64()
    for tensor in tensors:
        state.update(buffer_of(tensor))
    return state.hexdigest()


def buffer_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU; they are not copied if it is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data


@contextmanager
def export_folder(output: Path, settings: dict[str, Any], comm: Comm, *, key: str = "stage.output") -> Iterator[tuple[Path, ExportWriter]]:
    """Yield the folder in which an export is collected, and what writes its files; the folder becomes `output` when the block succeeds.

    It is inside of a hidden folder beside `output`, with the completion records. If the job is killed, the next call with the same
    settings keeps the files that are complete; files of other settings are removed. Collective.

    Args:
        settings: all settings that determine the files.

    Raises:
        UserError: another job is writing the folder.
    """
    output = behind_link(output)
    work = partial_folder(output)
    folder, records = work / "files", Unfinished(work, settings)

    def prepare() -> None:
        recorded = records.note("settings")
        if recorded not in (None, records.settings):
            log.info("convert: removes the unfinished export with other settings in %s", work)
        if recorded != records.settings:
            _empty(work)
            records.write("settings", records.settings)
        folder.mkdir(exist_ok=True)
        for partial in folder.rglob(".*.[0-9]*.partial"):  # a file that was being written
            partial.unlink()

    with claimed(work, key, None, prepare) if comm.rank == 0 else nullcontext():
        comm.barrier()
        try:
            yield folder, ExportWriter(comm, records)
        except (UserError, CheckFailed):  # the same command would fail again
            if comm.size == 1:
                _empty(work)
            raise
        else:
            comm.barrier()
            if comm.rank == 0:
                publish_folder(folder, output)
                _empty(work)
        finally:
            if comm.rank == 0 and not folder.exists():
                (work / ".lock").unlink()
                work.rmdir()


def _empty(work: Path) -> None:
    """Remove what the hidden folder of an export holds, without its lock."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def write_manifest(folder: Path, writer: ExportWriter, settings: dict[str, Any], totals: dict[str, Any]) -> None:
    """Write the manifest of an export, with the checksums that were computed when its files were written."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    entries = {path.relative_to(folder).as_posix(): writer.entries.get(path) or artifact.entry(path) for path in paths}
    artifact.write(folder, artifact.Manifest("convert", settings, entries, totals))
