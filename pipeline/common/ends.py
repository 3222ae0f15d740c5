"""How the ranks of a job end: records that the supervisor of the job reads (launch/supervisor.py). Imports no torch.

The supervisor names a folder on the shared file system in PIPELINE_ENDS. The ranks that fail write end-0.json, end-1.json, ... in the order
of their failures, at most RECORDS of them, so that the folder does not grow with the number of ranks; rank 0 also writes rank-0.json
however it ends. Without the variable nothing is written.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.common import ranks
from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import STOPPED, UserError

VARIABLE = "PIPELINE_ENDS"
#: Most failures that are recorded.
RECORDS = 8
#: File of note_told.
_TOLD = "told-to-end"
#: Errors of a rank whose peer has ended: classes of torch.distributed, and texts of gloo, NCCL and the store.
_PEER_CLASSES = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}
_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Broken pipe",
    "Timed out waiting",
)
#: Errors of a start that succeeds at another port or a little later.
_START_TEXTS = ("Address already in use", "EADDRINUSE", "failed to listen", "socket has timed out", "waiting for clients", "not started")
#: What the watchdog says of a rank whose process does nothing at all, which is not the fault of the program.
NO_ANSWER = ("does not respond", "does not answer")
#: Errors of a device or a host, which another node does not have.
_HARDWARE_TEXTS = ("uncorrectable ECC", "fallen off the bus", "uncorrectable NVLink", "device(s) is/are busy", "no CUDA-capable device")


@dataclass(frozen=True)
class End:
    """The end of a rank.

    Attributes:
        rank: global rank; -1 if it is unknown.
        host: node on which it ran, by the name that Slurm has for it.
        time: seconds since 1970.
        reason: in one line; empty for a success.
        where: file and line of the error; empty if it is unknown.
        follows: the error is that of a rank whose peer had ended.
        final: a further attempt would end in the same way, as with an invalid configuration.
        start: the ranks could not find each other.
        hardware: the device or the host is to blame.
        silent: its process did nothing: it was suspended, or is dead, or its host is.
    """

    rank: int
    host: str
    time: float
    code: int
    reason: str
    where: str = ""
    follows: bool = False
    final: bool = False
    start: bool = False
    hardware: bool = False
    silent: bool = False

    @property
    def may_pass(self) -> bool:
        """Whether the failure is that of a node, of the network or of the start, and not of the program."""
        return self.follows or self.hardware or self.start or self.silent or self.code > 128


def host_name() -> str:
    """Return the name of this node, as Slurm has it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def record(code: int, reason: str, *, where: str = "", final: bool = False, rank: int | None = None, host: str | None = None) -> int | None:
    """Record the end of this rank, or of the rank and host given, which this rank found dead.

    Returns:
        How many ranks have failed before; None for a rank that did not fail (0, or a code of STOPPED), if more than RECORDS have failed,
        or if no supervisor reads it.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    kinds = (("start", _START_TEXTS), ("hardware", _HARDWARE_TEXTS), ("silent", NO_ANSWER))
    causes = {name: _names(reason, texts) for name, texts in kinds}
    here = _rank()
    end = End(here if rank is None else rank, host or host_name(), time.time(), code, reason, where, _follows(reason), final, **causes)
    text = json.dumps(asdict(end))
    try:
        if here == 0:
            with atomic_file(Path(folder) / "rank-0.json", "w") as handle:
                handle.write(text)
        failed = code not in (0, *STOPPED)
        return next((place for place in range(RECORDS) if _written(Path(folder) / f"end-{place}.json", text)), None) if failed else None
    except OSError:  # the supervisor then has the exit code of srun
        return None


def note_told() -> None:
    """Note on rank 0 that SIGTERM has reached it: Slurm sends it to the steps of a job that it preempts, and not to its supervisor."""
    if (folder := os.environ.get(VARIABLE)) and _rank() == 0:
        with suppress(OSError):
            (Path(folder) / _TOLD).touch()


def was_told(folder: Path) -> bool:
    """Return whether SIGTERM has reached rank 0."""
    return (folder / _TOLD).is_file()


def report(error: BaseException) -> None:
    """Record an error that ends this rank and print its traceback; one line of it if another rank has failed before."""
    reason = f"{type(error).__name__}: {error}".partition("\n")[0][:500]
    place = where(error)
    if not is_first(record(1, reason, where=place)) or (os.environ.get(VARIABLE) and _follows(reason)):
        print(f"rank {_rank()} on {host_name()} ends after another one: {reason} at {place}", file=sys.stderr, flush=True)
        return
    sys.excepthook(type(error), error, error.__traceback__)


def tell_torchrun(text: str) -> None:
    """Write why this rank ends where torchrun looks for it, which prints it as the last lines of its own traceback."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": int(time.time())}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")


def where(error: BaseException) -> str:
    """Return file, line and function of this package in which an error was raised, empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/site-packages/" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""


def is_first(place: int | None) -> bool:
    """Whether a failure is the first one by what record() returned; each one is if no supervisor reads the records."""
    return place == 0 or not os.environ.get(VARIABLE)


def read(folder: Path) -> tuple[list[End], End | None]:
    """Return the recorded failures, the first one first, and the end of rank 0, None if it has not recorded one."""
    failures = [end for place in range(RECORDS) if (end := _read(folder / f"end-{place}.json")) is not None]
    return failures, _read(folder / "rank-0.json")


def any_failed(folder: Path) -> bool:
    """Return whether a rank has recorded a failure."""
    return (folder / "end-0.json").is_file()


def _follows(reason: str) -> bool:
    """Whether an error is that of a rank whose peer has ended."""
    is_network = reason.partition(":")[0] in _PEER_CLASSES or _names(reason, _PEER_TEXTS)
    return is_network and not _names(reason, _START_TEXTS)


def _names(reason: str, texts: tuple[str, ...]) -> bool:
    """Whether a reason has one of the texts."""
    return any(text in reason for text in texts)


def _rank() -> int:
    """The rank of this process, -1 if the launcher's variables are invalid."""
    try:
        return ranks.detect().rank
    except UserError:
        return int(os.environ.get("SLURM_PROCID", "-1"))


def _written(path: Path, text: str) -> bool:
    """Write a file that a single rank can have, and return whether it is this one."""
    if path.exists():  # costs the file system less than an attempt to create it
        return False
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)
    return True


def _read(path: Path) -> End | None:
    """A record, None if there is none, or if its rank was killed while it wrote it."""
    try:
        return End(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None
