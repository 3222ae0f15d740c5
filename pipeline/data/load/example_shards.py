"""Token shards of fine-tuning: packed examples, with two arrays more than the shards of pretraining.

The documents of such a shard are examples, in the order of its sequences. `.sequences.npy` (uint32) is the number of examples of every
sequence. `.answers.npy` (uint8) has a bit for every token, 1 for answers, from the highest bit on; every sequence begins with a new byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.common import artifact
from pipeline.common.atomic_files import atomic_file
from pipeline.data.load.example_parts import PackedPart
from pipeline.data.load.shard_checksums import Shard
from pipeline.data.load.token_stream import TokenStream
from pipeline.data.tokenize import token_shards
from pipeline.data.tokenize.tokenizer import TextEncoder


class SequenceIndex:
    """Where sequences and their examples begin. Four bytes of memory for each example, and 24 for each sequence.

    Args:
        lengths: (examples,) uint32, tokens of each, in the order of the sequences.
        counts: (sequences,) examples of each.

    Attributes:
        starts: (sequences + 1,) int64, the first token of each, and the end of the last.
        examples: number of all.
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


class Examples(Protocol):
    """Packed examples, in memory or in shards.

    Attributes:
        index: of the sequences.
        answers: number of tokens that are answers.
    """

    index: SequenceIndex
    answers: int

    def read(self, sequences: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return tokens, and which are answers (bool), of all examples of sequences, (n,) int64."""


class ExamplesInMemory:
    """Examples of parts that this process has tokenized. Implements Examples."""

    def __init__(self, parts: Sequence[PackedPart]) -> None:
        """Keep the parts."""
        self._parts = parts
        self.index = SequenceIndex(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "counts")))
        self.answers = sum(int(part.is_answer.sum()) for part in parts)
        self._firsts = np.cumsum([0, *(len(part.tokens) for part in parts)])

    def read(self, sequences: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """See Examples."""
        starts, stops = self.index.starts[sequences], self.index.starts[sequences + 1]
        owners = np.searchsorted(self._firsts, starts, side="right") - 1
        found = []
        for owner, start, stop in zip(owners.tolist(), starts.tolist(), stops.tolist(), strict=True):
            part, place = self._parts[owner], slice(start - self._firsts[owner], stop - self._firsts[owner])
            found.append((part.tokens[place], part.is_answer[place]))
        return found


class ExamplesInShards:
    """Examples of shards that stage=tokenize wrote: opening reads their lengths. Implements Examples.

    Attributes:
        stream: of the tokens.
    """

    def __init__(self, shards: Sequence[Shard], *, lazy_checks: bool, share: tuple[int, int]) -> None:
        """Read the index; arguments as of TokenStream."""
        self.stream = TokenStream(shards, lazy_checks=lazy_checks, share=share, streams=2)
        bits = [Shard(shard.path, {**shard.entry, **_as_tokens(shard.entry, "answers")}) for shard in shards]
        self._bits = TokenStream(bits, streams=2)
        lengths = [token_shards.lengths(shard.path, shard.entry) for shard in shards]
        counts = [np.fromfile(shard.path, "<u4", shard.entry["sequences"], offset=shard.entry["sequences_offset"]) for shard in shards]
        self.index = SequenceIndex(np.concatenate(lengths), np.concatenate(counts))
        self._bit_starts = np.concatenate([[0], np.cumsum(-(-np.diff(self.index.starts) // 8))])
        self.answers = sum(shard.entry["answer_tokens"] for shard in shards)

    def read(self, sequences: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """See Examples. Raises the errors of TokenStream.read."""
        starts, firsts = self.index.starts[sequences], self._bit_starts[sequences]
        sizes = self.index.starts[sequences + 1] - starts
        tokens = self.stream.read_ranges(starts, sizes)
        bits = self._bits.read_ranges(firsts, self._bit_starts[sequences + 1] - firsts)
        return [
            (np.frombuffer(ids, self.stream.dtype), np.unpackbits(np.frombuffer(mask, np.uint8), count=size).astype(bool))
            for ids, mask, size in zip(tokens, bits, sizes.tolist(), strict=True)
        ]


def _as_tokens(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields with which a TokenStream reads another array of bytes of a shard."""
    return {"dtype": "uint8", "tokens": entry[name], "offset": entry[f"{name}_offset"]}


def write(path: Path, part: PackedPart, encoder: TextEncoder, split: str) -> dict[str, Any]:
    """Write the shard of a part, atomically.

    Args:
        path: of the shard.
        part: its examples.
        encoder: the tokenizer.
        split: train or validation.

    Returns:
        The manifest entry, with the notes of the part under "notes".
    """
    starts = SequenceIndex(part.lengths, part.counts).starts
    bits = [np.packbits(part.is_answer[first:last]) for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
    arrays = {"sequences": part.counts.astype("<u4"), "answers": np.concatenate([np.zeros(0, np.uint8), *bits])}
    about = {"text_bytes": part.notes.text_bytes, "split": split, "corpus": "default"}
    about |= {"content": part.fingerprint, "answer_tokens": int(part.is_answer.sum())}
    with atomic_file(path) as handle:
        writer = token_shards.Writer(handle, path.name.removesuffix(".tar"), encoder.dtype)
        writer.add(part.tokens, part.lengths)
        places = writer.close(arrays, **about, **encoder.totals)
    return artifact.entry(path, **places, **about, notes=asdict(part.notes))
