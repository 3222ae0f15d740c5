"""The training loader: sample i is a pure function of (seed, i). No index to build, no state but the number of samples consumed.

A corpus' shards, in the order of their names, are one stream of tokens. Window j is tokens[j * T : j * T + T + 1] with T the sequence
length. Training visits the windows of an epoch in the order of a permutation that (seed, corpus, epoch) names; validation goes straight
through. With several corpora, a schedule says which corpus each sample is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from pipeline import artifact
from pipeline.artifact import Manifest
from pipeline.data.load.blend_schedule import BlendSchedule
from pipeline.data.load.boundaries import cumulative_lengths
from pipeline.data.load.infill import Infill
from pipeline.data.load.permutation import permute
from pipeline.data.load.stream import TokenStream
from pipeline.data.load.token_shards import Shard
from pipeline.errors import UserError


@dataclass(frozen=True)
class Corpus:
    """Shards that belong together.

    Attributes:
        name: of the corpus in the run; empty for all of a folder, whose order depends on the seed alone.
        shards: in order.
        totals: of the manifest they stand in.
        fingerprint: of their content.
    """

    name: str
    shards: list[Shard]
    totals: dict[str, Any]
    fingerprint: str

    @classmethod
    def of(cls, folder: Path, manifest: Manifest, split: str, *, name: str = "", corpus: str | None = None) -> Corpus:
        """The shards of a split in a folder that stage=tokenize wrote: of all its corpora, or of one.

        Raises:
            UserError: the manifest does not tell shards from other files.
        """
        if not any("split" in entry for entry in manifest.files.values()):
            rule, fix = "was written by an earlier version: its manifest names no splits", "remove it and run stage=tokenize again"
            raise UserError.of("data.tokens", folder, rule, fix)
        files = {
            file: entry
            for file, entry in sorted(manifest.files.items())
            if entry.get("split") == split and (corpus is None or entry["corpus"] == corpus)
        }
        content = manifest if corpus is None else replace(manifest, files=files)
        return cls(name, [Shard(folder / file, entry) for file, entry in files.items()], manifest.totals, artifact.fingerprint(content))

    def total(self, count: str) -> int:
        """The sum of a count ("tokens", "text_bytes", "documents") over the shards."""
        return sum(shard.entry[count] for shard in self.shards)

    def order_seed(self, seed: int) -> int:
        """What seeds the permutations of this corpus."""
        return xxhash.xxh3_64_intdigest(f"{seed} {self.name}".encode()) if self.name else seed


class Source(Protocol):
    """What training samples are made of, as far as a run must know it.

    Attributes:
        corpora: one, or several with a schedule.
        counts: (corpora,) int64, samples of each: an epoch.
        schedule: which corpus a sample is of; None with one corpus.
        end_of_document: id of the token that closes every document.
        vocab_size: one more than the largest token id.
    """

    corpora: Sequence[Corpus]
    counts: np.ndarray
    schedule: BlendSchedule | None
    end_of_document: int
    vocab_size: int


class Sequences(Protocol):
    """What corpora are cut into.

    Attributes:
        counts: (corpora,) int64, sequences of each corpus: an epoch.
    """

    counts: np.ndarray

    def read(self, corpora: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Sequences by corpus (n,) or (1,) and place (n,); (n, sequence_length + 1) in the stream's dtype."""


class Windows:
    """A corpus' tokens in pieces of equal length, whatever documents they cut."""

    def __init__(self, stream: TokenStream, corpora: Sequence[Corpus], sequence_length: int) -> None:
        """Cut corpora that lie one after the other in a stream."""
        self._stream, self._length = stream, sequence_length
        tokens = np.array([corpus.total("tokens") for corpus in corpora], dtype=np.int64)
        self._starts = np.cumsum(tokens) - tokens
        self.counts = np.maximum(tokens - 1, 0) // sequence_length

    def read(self, corpora: np.ndarray, places: np.ndarray) -> np.ndarray:
        """See Sequences."""
        return self._stream.read(self._starts[corpora] + places * self._length, self._length + 1)


class Samples(Source):
    """Samples of one corpus, or of several in a blend.

    Attributes:
        corpora: one, or several with a schedule.
        counts: (corpora,) int64, samples of each: an epoch.
        end_of_document: id of the token that closes every document.
        vocab_size: one more than the largest token id.
        bytes_per_token: UTF-8 bytes of text per token, for bits per byte.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        stream: TokenStream,
        sequences: Sequences,
        seed: int | None,
        schedule: BlendSchedule | None = None,
        infill: Infill | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            corpora: one, or several with a schedule; made with one tokenizer.
            stream: of all their shards, in order.
            sequences: what the corpora are cut into.
            seed: of the order; None goes straight through.
            schedule: which corpus a sample is of.
            infill: puts documents together anew for fill-in-the-middle.
        """
        assert len(corpora) == 1 or schedule is not None
        self.corpora, self.stream, self.counts, self.schedule = corpora, stream, sequences.counts, schedule
        self._sequences, self._shuffled, self._infill = sequences, seed is not None, infill
        self._seeds = np.array([corpus.order_seed(seed or 0) & ((1 << 64) - 1) for corpus in corpora], dtype=np.uint64)
        self.end_of_document = int(corpora[0].totals["end_of_document"])
        self.vocab_size = int(corpora[0].totals["vocab_size"])
        self.bytes_per_token = sum(corpus.total("text_bytes") for corpus in corpora) / max(stream.tokens, 1)

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """Samples by their number; numbers beyond an epoch of their corpus go on with the next.

        Args:
            indices: (n,) integers from 0 on.

        Returns:
            (n, sequence_length + 1) in the dtype of the shards (uint16 or uint32): the input is [:, :-1], the labels are [:, 1:].

        Raises:
            UserError: a shard is missing, truncated or found to be corrupt; it is named.
        """
        indices = np.asarray(indices, dtype=np.int64)
        corpora, ordinals = (np.zeros(1, dtype=np.int64), indices) if self.schedule is None else self.schedule.place(indices)
        counts = self.counts[corpora]
        epochs, places = np.divmod(ordinals, counts)
        if self._shuffled:
            if len(counts) == 1 and len(epochs) > 0 and epochs.min() == epochs.max():
                epochs = epochs[:1]  # one permutation for all
            places = permute(places, counts, self._seeds[corpora], epochs)
        tokens = self._sequences.read(corpora, places)
        return tokens if self._infill is None else self._infill.apply(tokens, indices)

    def samples_with_boundaries(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples, and the bounds of the documents in their inputs.

        Returns:
            As `samples`, and int32 (documents + 1,) as boundaries.cumulative_lengths gives it for [:, :-1].
        """
        tokens = self.samples(indices)
        return tokens, cumulative_lengths(tokens[:, :-1], self.end_of_document)


class TokenDataset(Samples):
    """Windows of one split of a folder that stage=tokenize wrote: all its corpora as one, so that an epoch holds every window once.

    Attributes:
        sequence_length: tokens a sample, not counting the last label.
        tokens: length of the split's stream.
        windows: samples an epoch.
    """

    def __init__(self, folder: Path, split: str, sequence_length: int, seed: int) -> None:
        """Open the split without reading a token.

        Args:
            folder: of the token shards.
            split: train (shuffled anew every epoch) or validation (in order).
            sequence_length: tokens a sample, not counting the last label.
            seed: of the order.

        Raises:
            UserError: the folder is not finished, a shard is missing or truncated, or the split is shorter than one window.
        """
        assert split in ("train", "validation")
        corpus = Corpus.of(folder, artifact.read(folder, key="data.tokens", stage="tokenize"), split)
        stream = TokenStream(corpus.shards)
        stream.check_sizes()
        super().__init__([corpus], stream, Windows(stream, [corpus], sequence_length), seed if split == "train" else None)
        self.sequence_length, self.tokens, self.windows = sequence_length, stream.tokens, int(self.counts[0])
        if self.windows < 1:
            raise too_short(split, folder, sequence_length, stream.tokens)


def too_short(split: str, where: Path | str, sequence_length: int, tokens: int) -> UserError:
    """A split that holds no window."""
    rule = f"needs {sequence_length + 1} tokens, the {split} split of {where} has {tokens}"
    fix = "lower it, or shard more text" + (" or a larger data.validation_fraction" if split == "validation" else "")
    return UserError.of("training.sequence_length", sequence_length, rule, fix)
