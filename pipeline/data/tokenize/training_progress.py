"""Progress of tokenizer training while the libraries, which do not report it, are at work."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from datetime import timedelta
from typing import TextIO

from pipeline.common.progress import Progress

log = logging.getLogger("pipeline")

EVERY = 30.0
"""Seconds between two lines of the log."""

_LINE = re.compile(rb"[IW]\d{4} [\d:.]+\s+\d+ \S+\] (.*)")
"""A line of SentencePiece's log that is no error: severity and date, time, thread, place in its source, message."""
_ERROR = re.compile(rb"[EF]\d{4} ")
_SEEDS, _EM = re.compile(r"Initialized (\d+) seed pieces"), re.compile(r"EM sub_iter=(\d+) size=(\d+)")
_SHRINKING = 0.75
"""The share of the pieces that SentencePiece keeps after each round of two EM steps (its default shrinking_factor)."""
_DESIRED = 1.1
"""It ends when the pieces are fewer than the vocabulary size times this."""


class Waiting:
    """Logs the time that a task without further information has taken, from begin() to the end of the block."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start to log; without effect after the first call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._log, daemon=True)
            self._thread.start()

    def _log(self) -> None:
        start = time.monotonic()
        while not self._ended.wait(EVERY):
            log.info("%s, for %s", self._label, timedelta(seconds=round(time.monotonic() - start)))

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()


class UnigramProgress:
    """Progress and remaining time of SentencePiece's trainer, from the messages of its log.

    The trainer extracts seed pieces, and removes the worst quarter of them after every two EM steps, until the vocabulary remains.
    """

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size
        self._steps = 0
        self._progress: Progress | None = None

    def read(self, message: str) -> None:
        """Read a message of the log."""
        if message.startswith("Extracting seed"):
            log.info("train_tokenizer: extracting seed pieces")
        elif seeds := _SEEDS.match(message):
            label = f"train_tokenizer: {self._size:,} entries"
            self._progress = Progress(self._remaining(int(seeds[1]), 0), label, "EM steps", every=EVERY)
        elif self._progress is not None and (step := _EM.match(message)):
            self._steps += 1
            self._progress.expect(self._steps + self._remaining(int(step[2]), int(step[1]) + 1))
            self._progress.advance(1, f"({int(step[2]):,} pieces remain)")

    def _remaining(self, pieces: int, steps: int) -> int:
        """EM steps that remain, of which `steps` of the current round are done."""
        rounds = math.ceil(math.log(max(1.0, pieces / (_DESIRED * self._size))) / -math.log(_SHRINKING))
        return 2 * max(1, rounds) - steps

    def end(self) -> None:
        """Log the total."""
        if self._progress is not None:
            self._progress.expect(self._steps)
            self._progress.__exit__(None, None, None)


@contextmanager
def sentencepiece_messages(read: Callable[[str], None]) -> Iterator[None]:
    """Pass the messages of SentencePiece's log to `read`; errors are printed, and what Python writes to standard error.

    Its trainer writes to file descriptor 2 and releases the interpreter's lock.
    """
    original, (receiving, sending) = os.dup(2), os.pipe()

    def pump() -> None:
        with open(receiving, "rb") as lines:
            for line in lines:
                if message := _LINE.match(line):
                    read(message[1].decode("utf-8", "replace"))
                elif _ERROR.match(line):
                    os.write(original, line)

    thread = threading.Thread(target=pump, daemon=True)
    thread.start()
    with open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1) as stream, _python_writes_to(stream):
        os.dup2(sending, 2)
        os.close(sending)
        try:
            yield
        finally:
            os.dup2(original, 2)  # closes the last writing end: the thread reads to the end
            thread.join()
            os.close(original)


@contextmanager
def _python_writes_to(stream: TextIO) -> Iterator[None]:
    """Replace standard error by a stream, for Python only."""
    sys.stderr.flush()
    moved = [h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler) and h.stream is sys.stderr]
    previous = sys.stderr
    with redirect_stderr(stream):
        for handler in moved:
            handler.setStream(stream)
        try:
            yield
        finally:
            for handler in moved:
                handler.setStream(previous)
