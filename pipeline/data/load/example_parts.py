"""The unit of work of fine-tuning data: some lines of the files, tokenized, and their examples packed into sequences.

Best-fit packing needs the length of every example of a part, and parts are packed separately: memory depends on the size of a part only,
and ranks need no exchange. Where the input is divided depends on data.shard_megabytes only, not on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
import xxhash

from pipeline.common.errors import UserError, Violation
from pipeline.common.json_lines import BadLine
from pipeline.data.load.packing import best_fit
from pipeline.data.load.prompts_and_answers import Example, ExampleReader, TooLongError
from pipeline.data.load.records import Notes
from pipeline.data.read import input_files, streams, suffixes
from pipeline.data.read.input_files import InputFile, InputPart, Span

#: Lines that are tokenized with one call.
_CHUNK_LINES = 1024


@dataclass
class PartNotes:
    """What was found in the lines of a part; JSON has all of it.

    Attributes:
        lines: file -> lines of it that the part has, also blank ones.
        unusable: (file, number of the line within the part's lines of this file, counted from 1, reason, whether its length is the reason).
        formats: file -> format -> records.
        ignored: file -> key that is not used -> records.
        spelled: file -> special token -> texts that spell it.
        usable: lines with examples.
        cut: lines of which training.sequence_length cuts something.
        text_bytes: size of the lines in UTF-8.
    """

    lines: dict[str, int] = field(default_factory=dict)
    unusable: list[tuple[str, int, str, bool]] = field(default_factory=list)
    formats: dict[str, dict[str, int]] = field(default_factory=dict)
    ignored: dict[str, dict[str, int]] = field(default_factory=dict)
    spelled: dict[str, dict[str, int]] = field(default_factory=dict)
    usable: int = 0
    cut: int = 0
    cut_tokens: int = 0
    text_bytes: int = 0


@dataclass(frozen=True)
class PackedPart:
    """The examples of a part, in the order of their sequences.

    Attributes:
        tokens: (tokens,) uint16 or uint32, of all examples.
        is_answer: (tokens,) bool, the tokens that the model learns to write; never the first of an example.
        lengths: (examples,) int64, tokens of each. An example takes one token less of a sequence: its last token is only a target.
        counts: (sequences,) int64, examples of each.
    """

    tokens: np.ndarray
    is_answer: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    notes: PartNotes

    @property
    def fingerprint(self) -> str:
        """A hash of everything that a sample depends on."""
        state = xxhash.xxh3_64()
        for values in (self.tokens.astype("<u4"), np.packbits(self.is_answer), self.lengths.astype("<u4"), self.counts.astype("<u4")):
            state.update(np.ascontiguousarray(values).data)
        return state.hexdigest()


def sources(paths: Sequence[str], key: str) -> list[InputFile]:
    """Return the files of a key, in order.

    Raises:
        UserError: some are no files.
    """
    if missing := [path for path in paths if not Path(path).is_file()]:
        raise UserError([Violation(key, path, "is not a file", "list files of JSON lines, or Parquet") for path in missing])
    return [InputFile(path, Path(path).name, Path(path).stat().st_size) for path in paths]


def parts(files: Sequence[InputFile], megabytes: float) -> list[InputPart]:
    """Divide files into parts of about data.shard_megabytes: small files are grouped, large ones split where a line begins."""
    return input_files.parts(files, max(1, round(megabytes * 1e6)))


def pack_part(
    part: InputPart, reader: ExampleReader, length: int, dtype: np.dtype, *, pack: bool, progress: Callable[[int], None] = lambda _: None
) -> PackedPart:
    """Tokenize and pack the lines of a part.

    Args:
        length: tokens per sequence.
        pack: put several examples into a sequence; those of a line are always in one.
        progress: called with the number of bytes that were read.
    """
    notes, examples, tokens, answers = PartNotes(), [np.zeros(0, np.int64)], [np.zeros(0, dtype)], [np.zeros(0, bool)]
    for span in part.spans:
        path, number, reader.notes = span.file.path, 0, Notes()
        lines = lines_of(span)
        while chunk := list(islice(lines, _CHUNK_LINES)):
            kept = [line for line in chunk if line.strip()]
            parsed: Iterator[list[Example] | BadLine] = iter(reader.examples(kept))
            usable: list[Example] = []
            for line in chunk:
                number += 1
                if not line.strip():
                    continue
                result = next(parsed)
                if isinstance(result, BadLine):
                    notes.unusable.append((path, number, str(result), isinstance(result, TooLongError)))
                    continue
                removed = sum(example.cut for example in result)
                notes.usable, notes.cut, notes.cut_tokens = notes.usable + 1, notes.cut + (1 if removed else 0), notes.cut_tokens + removed
                usable += result
            if usable:  # compact at once: an example of int64 takes four times the memory
                examples.append(np.array([len(example.tokens) for example in usable], dtype=np.int64))
                tokens.append(np.concatenate([example.tokens for example in usable]).astype(dtype))
                answers.append(np.concatenate([example.is_answer for example in usable]))
            size = sum(map(len, chunk))
            notes.text_bytes += size
            progress(size)
        notes.lines[path] = notes.lines.get(path, 0) + number
        found_in = reader.notes
        notes.formats[path], notes.ignored[path], notes.spelled[path] = map(dict, (found_in.formats, found_in.ignored, found_in.spelled))
    lengths, all_tokens, is_answer = (np.concatenate(arrays) for arrays in (examples, tokens, answers))
    sequences = best_fit(lengths - 1, length) if pack and reader.per_line == 1 else np.arange(len(lengths)) // reader.per_line
    order = np.argsort(sequences, kind="stable")  # within a sequence, examples keep their order
    ends = np.cumsum(lengths)
    pieces = [slice(start, stop) for start, stop in zip((ends - lengths)[order].tolist(), ends[order].tolist(), strict=True)]
    if pieces:
        all_tokens, is_answer = (np.concatenate([values[piece] for piece in pieces]) for values in (all_tokens, is_answer))
    return PackedPart(all_tokens, is_answer, lengths[order], np.bincount(sequences), notes)


def lines_of(span: Span) -> Iterator[bytes]:
    """Yield the lines that begin in a span, of Parquet the rows as lines. A line that crosses its start belongs to the span before."""
    if suffixes.file_format(span.file.name) == "parquet":
        from pipeline.data.read.formats import parquet

        try:
            yield from (orjson.dumps(row, default=str) for row in parquet.rows(span))
        except parquet.DAMAGE as error:
            raise UserError.of("data.instructions", span.file.path, f"is damaged: {error}", "copy it again, or remove it") from error
        return
    with streams.open_bytes(span.file.path) as handle:
        place = span.start
        try:
            if span.start:
                handle.seek(span.start - 1)
                place += len(handle.readline()) - 1
            while (span.end is None or place < span.end) and (line := handle.readline()):
                place += len(line)
                yield line
        except streams.DamageError as error:
            rule = f"{error.problem} after {error.position:,} bytes: {error}"
            raise UserError.of("data.instructions", span.file.path, rule, "copy it again, or remove it from the list") from error
