"""Token shards of fine-tuning: packed examples, with two arrays more than the shards of pretraining.

The documents of such a shard are examples, in the order of its sequences. `.sequences.npy` (uint32) is the number of examples of every
sequence. `.answers.npy` (uint8) has a bit for every token, 1 for answers, from the highest bit on; every sequence begins with a new byte.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common import artifact, json_lines
from pipeline.common.atomic_files import atomic_file, make_folder
from pipeline.common.errors import UserError
from pipeline.common.texts import first_names
from pipeline.data.load.example_parts import PackedPart, PartNotes
from pipeline.data.load.prompts_and_answers import ExampleReader
from pipeline.data.load.shard_checksums import Shard
from pipeline.data.load.token_stream import TokenStream
from pipeline.data.tokenize import token_shards
from pipeline.data.tokenize.tokenizer import TextEncoder, warn_of_spelled

log = logging.getLogger("pipeline")
#: Maximum number of unusable lines that the log and messages list.
_SHOWN = 10


class SequenceIndex:
    """Where sequences and their examples begin. Four bytes of memory for each example, and 24 for each sequence.

    Args:
        lengths: (examples,) uint32, tokens of each, in the order of the sequences.
        counts: (sequences,) examples of each.

    Attributes:
        starts: (sequences + 1,) int64, the first token of each, and the end of the last.
    """

    def __init__(self, lengths: np.ndarray, counts: np.ndarray) -> None:
        self._lengths = lengths.astype(np.uint32, copy=False)
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[self._firsts]
        self.examples = len(lengths)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._firsts) - 1

    def lengths(self, sequence: int) -> np.ndarray:
        """The tokens of each example of a sequence, (n,) uint32."""
        return self._lengths[self._firsts[sequence] : self._firsts[sequence + 1]]


class ExamplesInMemory:
    """Examples of parts that this process has tokenized."""

    def __init__(self, parts: Sequence[PackedPart]) -> None:
        self._parts = parts
        self.index = SequenceIndex(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "counts")))
        self.answers = sum(int(part.is_answer.sum()) for part in parts)
        self._firsts = np.cumsum([0, *(len(part.tokens) for part in parts)])

    def read(self, sequences: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return tokens, and which are answers (bool), of all examples of sequences, (n,) int64."""
        starts, stops = self.index.starts[sequences], self.index.starts[sequences + 1]
        owners = np.searchsorted(self._firsts, starts, side="right") - 1
        examples = []
        for owner, start, stop in zip(owners.tolist(), starts.tolist(), stops.tolist(), strict=True):
            part, place = self._parts[owner], slice(start - self._firsts[owner], stop - self._firsts[owner])
            examples.append((part.tokens[place], part.is_answer[place]))
        return examples


class ExamplesInShards:
    """Examples of shards that stage=tokenize wrote, whose tokens are `stream`: opening reads their lengths."""

    def __init__(self, shards: Sequence[Shard], *, lazy_checks: bool, share: tuple[int, int]) -> None:
        """Read the index; arguments as of TokenStream."""
        self.stream = TokenStream(shards, lazy_checks=lazy_checks, share=share, streams=2)
        self._bits = TokenStream([shard.of_bytes("answers") for shard in shards], streams=2)
        lengths = [token_shards.lengths(shard.path, shard.entry) for shard in shards]
        counts = [np.fromfile(shard.path, "<u4", shard.entry["sequences"], offset=shard.entry["sequences_offset"]) for shard in shards]
        self.index = SequenceIndex(np.concatenate(lengths), np.concatenate(counts))
        self._bit_starts = np.concatenate([[0], np.cumsum(-(-np.diff(self.index.starts) // 8))])
        self.answers = sum(shard.entry["answer_tokens"] for shard in shards)

    def read(self, sequences: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """As ExamplesInMemory.read. Raises the errors of TokenStream.read."""
        starts, firsts = self.index.starts[sequences], self._bit_starts[sequences]
        sizes = self.index.starts[sequences + 1] - starts
        tokens = self.stream.read_ranges(starts, sizes)
        bits = self._bits.read_ranges(firsts, self._bit_starts[sequences + 1] - firsts)
        return [
            (np.frombuffer(ids, self.stream.dtype), np.unpackbits(np.frombuffer(mask, np.uint8), count=size).astype(bool))
            for ids, mask, size in zip(tokens, bits, sizes.tolist(), strict=True)
        ]


def write(path: Path, part: PackedPart, encoder: TextEncoder, split: str) -> dict[str, Any]:
    """Write the shard of a part, atomically; returns the manifest entry, with the notes of the part under "notes"."""
    starts = SequenceIndex(part.lengths, part.counts).starts
    bits = [np.packbits(part.is_answer[first:last]) for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
    arrays = {"sequences": part.counts.astype("<u4"), "answers": np.concatenate([np.zeros(0, np.uint8), *bits])}
    about = {"text_bytes": part.notes.text_bytes, "split": split, "corpus": "default"}
    about |= {"content": part.fingerprint, "answer_tokens": int(part.is_answer.sum())}
    with atomic_file(path) as handle:
        writer = token_shards.ShardWriter(handle, path.name.removesuffix(".tar"), encoder.dtype)
        writer.add(part.tokens, part.lengths)
        places = writer.close(arrays, **about, **encoder.totals)
    return artifact.entry(path, **places, **about, notes=asdict(part.notes))


@dataclass(frozen=True)
class _Unusable:
    """A line that is not used, and why."""

    path: str
    line: int
    error: str
    left_out: bool

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.error}"


def check(
    parts: Sequence[PartNotes], reader: type[ExampleReader], *, key: str, limit: float, length: int, tokens: int, folder: Path | None
) -> str:
    """Refuse files with too many unusable lines, and log what else was found.

    Args:
        parts: the notes of all parts of the files of a key, in order.
        limit: maximum fraction of the lines that are unusable (data.quarantine_limit).
        folder: gets the list of all unusable lines; what was read is logged. None: neither.

    Returns:
        What the sequence length changed, for the fingerprint; empty if nothing.

    Raises:
        UserError: a file has records of several formats, none are usable, or too many are not; the message names lines with reasons.
    """
    bad = _numbered(parts)
    formats, ignored = _added([notes.formats for notes in parts]), _added([notes.ignored for notes in parts])
    spelled = _added([notes.spelled for notes in parts])
    for path, counts in formats.items():
        if len(counts) > 1:
            listed = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
            raise UserError.of(key, path, f"has records of several formats: {listed}", "write a file for each format")
        if folder is not None:
            _log_notes(key, path, counts, ignored[path])
            warn_of_spelled(f"{key}: {path}", spelled.get(path, {}))
    list_path = _write_list(folder, key, bad) if folder is not None else None
    unusable, usable = [line for line in bad if not line.left_out], sum(notes.usable for notes in parts)
    left_out, cut, cut_tokens = len(bad) - len(unusable), sum(notes.cut for notes in parts), sum(notes.cut_tokens for notes in parts)
    shown = first_names(unusable, _SHOWN, "; ", "; and ")
    all_of_them = f" ({list_path} lists all)" if list_path is not None else ""
    paths, lines = ", ".join(formats), usable + len(bad)
    if len(unusable) > limit * lines:
        rule = f"{len(unusable):,} of {lines:,} lines are unusable: {shown}{all_of_them}"
        raise UserError.of(key, paths, rule, f"correct them, or raise data.quarantine_limit={limit:g} to skip them")
    if not usable:
        fix = f"raise training.sequence_length={length}" if left_out else f"write lines such as {reader.example_line}"
        rule = f"has no usable lines: all are too long{all_of_them}" if left_out else "has no usable lines"
        raise UserError.of(key, paths, rule, fix)
    if folder is not None and unusable:
        log.warning("%s: skipped %d unusable lines: %s%s", key, len(unusable), shown, all_of_them)
    changed = f" {cut} cut, {left_out} left out" if cut or left_out else ""
    if folder is not None and changed:
        share = 100 * cut_tokens / (cut_tokens + tokens)
        counted = f"{cut:,} are cut ({share:.1f} % of the tokens), and {left_out:,} are left out"
        text = "%s: training.sequence_length=%d is too short for %s of %s lines (data.instructions.too_long): %s"
        log.warning(text, key, length, f"{cut + left_out:,}", f"{lines:,}", counted)
    return changed


def _numbered(parts: Sequence[PartNotes]) -> list[_Unusable]:
    """The lines that are not used, with their numbers in the files."""
    before: Counter[str] = Counter()
    unusable = []
    for notes in parts:
        unusable += [_Unusable(path, before[path] + line, error, left_out) for path, line, error, left_out in notes.unusable]
        before.update(notes.lines)
    return unusable


def _added(parts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, Counter[str]]:
    """The sums of counts over parts, by file."""
    sums: dict[str, Counter[str]] = {}
    for part in parts:
        for path, counts in part.items():
            sums.setdefault(path, Counter()).update(counts)
    return sums


def _log_notes(key: str, path: str, formats: Counter[str], ignored: Counter[str]) -> None:
    """Log the format of a file, and the keys that are not used."""
    for name, count in formats.items():
        log.info("%s: %s: %s lines of the format: %s", key, path, f"{count:,}", name)
    if repaired := ignored.pop("messages.repaired", 0):
        log.info("%s: %s: %s chats are repaired (data.instructions.repair)", key, path, f"{repaired:,}")
    if ignored:
        listed = ", ".join(f"{name} ({count:,})" for name, count in ignored.most_common())
        log.info("%s: %s: these keys are not used: %s", key, path, listed)


def _write_list(folder: Path, key: str, bad: Sequence[_Unusable]) -> Path | None:
    """Write all lines that are not used to a file of the folder, and return its path; None, and no file, without such lines."""
    path = folder / f"unusable-{key.rpartition('.')[2]}.jsonl"
    if not bad:
        path.unlink(missing_ok=True)
        return None
    make_folder(folder)
    with atomic_file(path, "w") as handle:
        for line in bad:
            handle.write(json_lines.dump({"file": line.path, "line": line.line, "error": line.error}) + "\n")
    return path
