"""The sequences of fine-tuning: examples of prompts and chats (examples.py), packed.

Opening reads and tokenizes all files, on every rank: packing needs the length of every example. Five bytes of memory per token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash

from pipeline.common import json_lines
from pipeline.common.atomic_files import atomic_file, make_folder
from pipeline.common.errors import UserError, Violation
from pipeline.common.json_lines import BadLine
from pipeline.data.load.corpus import Corpus
from pipeline.data.load.packing import best_fit
from pipeline.data.load.permutation import permute
from pipeline.data.load.prompts_and_answers import Example, ExampleReader, TooLongError
from pipeline.data.load.records import Notes
from pipeline.data.load.samples import Dataset
from pipeline.data.tokenize.tokenizer import TextEncoder

log = logging.getLogger("pipeline")

#: Lines that are tokenized with one call.
_CHUNK_LINES = 1024
#: Maximum number of unusable lines that the log and messages list.
_SHOWN = 10


class Instructions(Dataset):
    """The sequences of a run: packed examples. Training visits those of an epoch in the order of a permutation of (seed, epoch).

    Attributes:
        examples: number of usable lines.
        answers: fraction of their tokens that are answers.
        padding: fraction of the tokens of all sequences that is padding.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        length: int,
        *,
        pack: bool,
        seed: int | None,
        encoder: TextEncoder,
        content: str,
        per_line: int = 1,
    ) -> None:
        """Pack examples.

        Args:
            examples: in the order of the files.
            length: tokens per sequence. An example takes one token less than it has: its last token is only a target.
            pack: put several examples into a sequence.
            seed: of the order; None reads the sequences in order.
            encoder: the tokenizer.
            content: fingerprint of the examples.
            per_line: examples of a line; more than one make up a sequence.
        """
        lengths = np.array([len(example.tokens) - 1 for example in examples], dtype=np.int64)
        sequences = best_fit(lengths, length) if pack and per_line == 1 else np.arange(len(lengths)) // per_line
        self._order = np.argsort(sequences, kind="stable")  # within a sequence, examples keep their order
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(sequences))])
        self._starts = np.concatenate([[0], np.cumsum(lengths + 1)])
        self._tokens = np.concatenate([example.tokens for example in examples]).astype(np.uint32)
        self._is_answer = np.concatenate([example.is_answer for example in examples])
        self._seed, self.examples, self.answers = seed, len(examples), float(self._is_answer.mean())
        count = len(self._bounds) - 1
        self.padding = 1 - float(lengths.sum()) / (count * length)
        totals = {"tokenizer": encoder.fingerprint, "end_of_document": encoder.end_of_document, "vocab_size": encoder.vocab_size}
        self.corpora, self.counts, self.schedule = [Corpus("", [], totals, content)], np.array([count], dtype=np.int64), None
        self.end_of_document, self.vocab_size = encoder.end_of_document, encoder.vocab_size

    def sequences(self, indices: np.ndarray) -> Iterator[list[Example]]:
        """Yield the examples of sequences by sample number; numbers beyond an epoch continue with the next epoch."""
        count = int(self.counts[0])
        epochs, places = np.divmod(np.asarray(indices, dtype=np.int64), count)
        if self._seed is not None:
            places = permute(places, count, self._seed, epochs)
        for place in places.tolist():
            numbers = self._order[self._bounds[place] : self._bounds[place + 1]]
            parts = [slice(*self._starts[number : number + 2]) for number in numbers]
            yield [Example(self._tokens[part].astype(np.int64), self._is_answer[part]) for part in parts]


def open_files(
    paths: Sequence[str],
    reader: ExampleReader,
    encoder: TextEncoder,
    *,
    key: str,
    length: int,
    pack: bool,
    seed: int | None,
    limit: float,
    report: Path | None = None,
) -> Instructions:
    """Read, tokenize and pack files.

    Args:
        paths: .jsonl files, in order.
        reader: of lines.
        encoder: the same tokenizer.
        key: configuration key that lists the files, for messages.
        length: tokens per sequence.
        pack: put several examples into a sequence.
        seed: of the order; None reads in order.
        limit: maximum fraction of the lines that are unusable (data.quarantine_limit).
        report: run directory that gets the list of all unusable lines; what was read is logged. None: neither.

    Raises:
        UserError: a file is missing or has no example, or too many lines are unusable; the message names lines with reasons.
    """
    problems = [Violation(key, path, "is not a file", "list files of JSON lines") for path in paths if not Path(path).is_file()]
    if problems:
        raise UserError(problems)
    state, lengths = xxhash.xxh3_128(), _Lengths()
    examples: list[Example] = []
    bad: list[_Unusable] = []
    for path in paths:
        reader.notes = Notes()
        with open(path, "rb") as handle:
            lines = ((number, line) for number, line in enumerate(handle, 1) if line.strip())
            while chunk := list(islice(lines, _CHUNK_LINES)):
                for (number, line), found in zip(chunk, reader.examples([line for _, line in chunk]), strict=True):
                    state.update(line)
                    if isinstance(found, BadLine):
                        bad.append(_Unusable(path, number, str(found), left_out=isinstance(found, TooLongError)))
                    else:
                        lengths.add(found)
                        examples += found
        _check_format(reader.notes, key, path)
        if report is not None:
            _log_notes(reader.notes, key, path)
    listed = _write_list(report, key, bad) if report is not None else None
    unusable, usable = [line for line in bad if not line.left_out], len(examples) // reader.per_line
    lengths.left_out = len(bad) - len(unusable)
    shown = "; ".join(map(str, unusable[:_SHOWN])) + (f"; and {len(unusable) - _SHOWN} more" if len(unusable) > _SHOWN else "")
    all_of_them = f" ({listed} lists all)" if listed is not None else ""
    if len(unusable) > limit * (len(bad) + usable):
        rule = f"{len(unusable):,} of {len(bad) + usable:,} lines are unusable: {shown}{all_of_them}"
        fix = f"correct them, or raise data.quarantine_limit={limit:g} to skip them"
        raise UserError.of(key, ", ".join(paths), rule, fix)
    if not examples:
        fix = f"raise training.sequence_length={length}" if lengths.left_out else f"write lines such as {reader.example_line}"
        rule = f"has no usable lines: all are too long{all_of_them}" if lengths.left_out else "has no usable lines"
        raise UserError.of(key, ", ".join(paths), rule, fix)
    changed = f" {lengths.cut} cut, {lengths.left_out} left out" if lengths.cut or lengths.left_out else ""
    opened = Instructions(
        examples,
        length,
        pack=pack,
        seed=seed,
        encoder=encoder,
        per_line=reader.per_line,
        content=f"{state.hexdigest()} {xxhash.xxh3_64_hexdigest(reader.template_text.encode())}{changed}",
    )
    if report is not None:
        if unusable:
            log.warning("%s: skipped %d unusable lines: %s%s", key, len(unusable), shown, all_of_them)
        if changed:
            text = "%s: training.sequence_length=%d is too short for %s of %s lines (data.instructions.too_long): %s"
            log.warning(text, key, length, f"{lengths.cut + lengths.left_out:,}", f"{usable + len(bad):,}", lengths.text(examples))
        text = "%s: %s %s in %s sequences, %.1f %% padding; %.1f %% of the tokens are targets"
        log.info(text, key, f"{opened.examples:,}", reader.kind, f"{opened.counts[0]:,}", 100 * opened.padding, 100 * opened.answers)
    return opened


@dataclass(frozen=True)
class _Unusable:
    """A line that is not used, and why."""

    path: str
    line: int
    error: str
    left_out: bool

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.error}"


@dataclass
class _Lengths:
    """What training.sequence_length has no room for: lines that are cut, their tokens, and lines that are left out."""

    cut: int = 0
    tokens: int = 0
    left_out: int = 0

    def add(self, examples: Sequence[Example]) -> None:
        """Count the examples of a line."""
        removed = sum(example.cut for example in examples)
        self.cut, self.tokens = self.cut + (removed > 0), self.tokens + removed

    def text(self, examples: Sequence[Example]) -> str:
        """Return the counts, for the log."""
        share = 100 * self.tokens / (self.tokens + sum(len(example.tokens) for example in examples))
        return f"{self.cut:,} are cut ({share:.1f} % of the tokens), and {self.left_out:,} are left out"


def _check_format(notes: Notes, key: str, path: str) -> None:
    """Refuse a file with records of several formats.

    Raises:
        UserError: it has some.
    """
    if len(notes.formats) > 1:
        found = ", ".join(f"{count:,} {name}" for name, count in notes.formats.most_common())
        raise UserError.of(key, path, f"has records of several formats: {found}", "write a file for each format")


def _log_notes(notes: Notes, key: str, path: str) -> None:
    """Log the format of a file, and the keys that are not used."""
    for name, count in notes.formats.items():
        log.info("%s: %s: %s lines of the format: %s", key, path, f"{count:,}", name)
    if notes.ignored:
        found = ", ".join(f"{name} ({count:,})" for name, count in notes.ignored.most_common())
        log.info("%s: %s: these keys are not used: %s", key, path, found)


def _write_list(run_dir: Path, key: str, bad: Sequence[_Unusable]) -> Path | None:
    """Write all lines that are not used to a file of the run directory, and return its path; None, and no file, without such lines."""
    path = run_dir / f"unusable-{key.rpartition('.')[2]}.jsonl"
    if not bad:
        path.unlink(missing_ok=True)
        return None
    make_folder(run_dir)
    with atomic_file(path, "w") as handle:
        for line in bad:
            handle.write(json_lines.dump({"file": line.path, "line": line.line, "error": line.error}) + "\n")
    return path
