"""One rank of a counted run of stage=shard: `python counted_shard.py FOLDER key=value ...`, which writes FOLDER/rank-N.json.

Counted are, by pass, the files that are opened and created in the folders of input and output (by an audit hook of Python), the bytes that
system calls read and write (/proc/self/io), the messages and bytes that the communicator sends to other ranks, and the peak of memory:

  list      finding and sampling the input
  read      pass 1: reading, cleaning, intermediate files
  clusters  pass 2: duplicates
  spans     pass 2: repeated spans (dedup.spans)
  shuffle   records of the searches, plan, shards, report, manifest, removal of the intermediate files

Properties of the corpus that a model cannot know, such as the number of similar pairs, are recorded as well.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PASSES = ("list", "read", "clusters", "spans", "shuffle")
COUNTS = ("opens", "inodes", "bytes_read", "bytes_written", "messages", "bytes_sent", "memory")


class Counts:
    """The counts of this process.

    Args:
        watched: path prefixes; only files below them count.

    Attributes:
        current: the pass.
        passes: its name -> counts.
        corpus: properties of the corpus.
    """

    def __init__(self, watched: tuple[str, ...]) -> None:
        self.passes = {name: Counter(dict.fromkeys(COUNTS, 0)) for name in PASSES}
        self.corpus: Counter[str] = Counter()
        self._watched, self.current = watched, "list"
        self._io = self._read_io()
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename") or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if os.fsdecode(arguments[0]).startswith(self._watched):
            self.passes[self.current]["opens" if event == "open" else "inodes"] += 1

    def sent(self, messages: int, size: int) -> None:
        """Count messages to other ranks."""
        self.passes[self.current]["messages"] += messages
        self.passes[self.current]["bytes_sent"] += size

    def within(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Count a block as one pass."""

        @contextlib.contextmanager
        def block() -> Iterator[None]:
            before = self.current
            self.turn(name)
            yield
            self.turn(before)

        return block()

    def turn(self, name: str) -> None:
        now, counts = self._read_io(), self.passes[self.current]
        counts["bytes_read"] += now[0] - self._io[0]
        counts["bytes_written"] += now[1] - self._io[1]
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        if self.current != "list" or not counts["memory"]:  # at the end it is what the other passes have left
            counts["memory"] = max(counts["memory"], 1024 * int(status["VmHWM"].split()[0]))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        self._io, self.current = self._read_io(), name

    def begin(self) -> None:
        """Leave out the bytes that were read until now: imports."""
        self._io = self._read_io()

    @staticmethod
    def _read_io() -> tuple[int, int]:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["rchar"]), int(lines["wchar"])


class CountingComm:
    """A communicator that counts what it sends to other ranks."""

    def __init__(self, comm: Any, counts: Counts) -> None:
        self._comm, self._counts = comm, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def _send(self, messages: int, value: Any) -> None:
        if messages:
            self._counts.sent(messages, messages * len(pickle.dumps(value, -1)))

    def bcast(self, value: Any, root: int = 0) -> Any:
        self._send((self._comm.size - 1) * (self._comm.rank == root), value)
        return self._comm.bcast(value, root)

    def gather(self, value: Any, root: int = 0) -> Any:
        self._send(int(self._comm.rank != root), value)
        return self._comm.gather(value, root)

    def allgather(self, value: Any) -> Any:
        self._send(self._comm.size - 1, value)
        return self._comm.allgather(value)

    def alltoall(self, values: Any) -> Any:
        for rank, value in enumerate(values):
            self._send(int(rank != self._comm.rank), value)
        return self._comm.alltoall(values)


def wrapped(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace an attribute by a function that wraps it."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))


def install(counts: Counts) -> None:
    """Make the stage count its passes, its messages and the properties of the corpus."""
    from pipeline.common import mpi
    from pipeline.common.unfinished import Unfinished
    from pipeline.data.dedup import clusters, distributed, duplicates, spans
    from pipeline.data.shard import dropped, searches, span_search
    from pipeline.data.shard.passes import ShardPasses
    from pipeline.data.shard.spilled_documents import SpillPool

    def in_pass(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any, **named: Any) -> Any:
                with counts.within(name):
                    return function(*arguments, **named)

            return counted

        return wrap

    def with_property(name: str, size: Callable[[Any], int], of_result: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any, **named: Any) -> Any:
                result = function(*arguments, **named)
                counts.corpus[name] += size(result if of_result else arguments)
                return result

            return counted

        return wrap

    def counting_world(world: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def counted(*arguments: Any) -> Iterator[Any]:
            with world(*arguments) as comm:
                counts.begin()
                yield CountingComm(comm, counts)

        return counted

    for name, place in (("read", "read"), ("write", "shuffle"), ("complete", "shuffle")):
        wrapped(ShardPasses, name, in_pass(place))
    wrapped(searches, "find", in_pass("clusters"))
    wrapped(searches.Records, "keep", in_pass("shuffle"))
    wrapped(dropped, "save", in_pass("shuffle"))
    wrapped(span_search, "find", in_pass("spans"))
    for name, rows in (("several", "anchors"), ("repeated", "windows")):
        wrapped(spans, name, with_property(rows, len))
    asked = with_property("asked", lambda args: (args[1].nbytes + 5 * len(args[1])) * (counts.current == "spans"), of_result=False)
    wrapped(distributed, "ask", asked)
    wrapped(span_search, "find", with_property("cuts", lambda found: found["spans"]))
    wrapped(span_search, "find", with_property("cut_words", lambda found: found["words"]))
    wrapped(mpi, "world", counting_world)
    wrapped(duplicates, "_bucket_pairs", with_property("bucket_pairs", len))
    wrapped(duplicates, "_verified", with_property("pairs", lambda arguments: len(arguments[1]), of_result=False))
    wrapped(clusters, "resolve", with_property("edges", lambda arguments: len(arguments[1]) + len(arguments[2]), of_result=False))
    wrapped(clusters, "near_stars", with_property("searches", lambda _: 1))
    wrapped(distributed, "fetch", with_property("fetched", len))
    wrapped(distributed, "values_of", with_property("lookups", lambda _: 1))
    wrapped(Unfinished, "write", with_property("note_bytes", _note_bytes, of_result=False))
    wrapped(SpillPool, "record", with_property("texts", lambda _: counts.current == "clusters"))
    wrapped(SpillPool, "record", with_property("texts_bytes", lambda result: sum(map(len, result)) * (counts.current == "clusters")))
    wrapped(SpillPool, "record", with_property("shown_bytes", lambda result: sum(map(len, result)) * (counts.current == "shuffle")))


def _note_bytes(arguments: Any) -> int:
    """The bytes of the completion record of a part, 0 for another record."""
    _, name, note = arguments
    return len(json.dumps(note)) if name.startswith("part-") else 0


def main() -> None:
    import jinja2  # noqa: F401 (imported late by the stage: what an import reads is not counted)
    import numpy.ma  # noqa: F401

    from pipeline.__main__ import run
    from pipeline.common import ranks

    folder, *settings = sys.argv[1:]
    keys = dict(setting.split("=", 1) for setting in settings)
    counts = Counts(tuple(str(Path(path).resolve()) for path in (keys["data.input"].strip("[]"), keys["data.shards"])))
    install(counts)
    sys.argv = ["pipeline", "stage=shard", *settings]
    run()
    counts.turn("list")
    (Path(folder) / f"rank-{ranks.detect().rank}.json").write_text(json.dumps({"passes": counts.passes, "corpus": counts.corpus}))


if __name__ == "__main__":
    main()
