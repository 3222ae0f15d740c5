"""The training loader: sample i is a pure function of (seed, i). No index to build, no state but the number of samples consumed.

A split's shards, in the order of their names, are one stream of tokens. Window j is tokens[j * T : j * T + T + 1] with T the sequence
length. Training visits the windows of an epoch in the order of a permutation that (seed, epoch) names; validation goes straight through.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline import artifact
from pipeline.data.permutation import permute
from pipeline.errors import UserError, Violation

OPEN_SHARDS = 256
"""Shards that are mapped at a time; each costs a file descriptor."""


class TokenDataset:
    """Windows of one split of a folder that stage=tokenize wrote.

    Attributes:
        tokens: length of the split's stream.
        windows: samples an epoch.
        vocab_size: one more than the largest token id.
        end_of_document: id of the token that closes every document.
        bytes_per_token: UTF-8 bytes of text per token of the split, for bits per byte.
    """

    def __init__(self, folder: Path, split: str, sequence_length: int, seed: int) -> None:
        """Open the split without reading a token.

        Args:
            split: train (shuffled anew every epoch) or validation (in order).
            sequence_length: tokens a sample, not counting the last label.

        Raises:
            UserError: the folder is not finished, a shard is missing or truncated, or the split is shorter than one window.
        """
        assert split in ("train", "validation")
        self._manifest = artifact.read(folder, key="data.tokens", stage="tokenize")
        self._folder, self._split, self._seed = folder, split, seed
        self._names = sorted(name for name in self._manifest.files if name.startswith(f"{split}-"))
        self._check_sizes()
        files = [self._manifest.files[name] for name in self._names]
        # Position in the stream at which each shard begins, and the end of the last.
        self._starts = np.cumsum([0, *(file["tokens"] for file in files)], dtype=np.int64)
        self._maps: dict[int, np.ndarray] = {}

        self.sequence_length = sequence_length
        self.tokens = int(self._starts[-1])
        self.windows = (self.tokens - 1) // sequence_length
        self.vocab_size = int(self._manifest.totals["vocab_size"])
        self.end_of_document = int(self._manifest.totals["end_of_document"])
        self.bytes_per_token = self._manifest.totals[split]["bytes"] / max(self.tokens, 1)
        if self.windows < 1:
            raise UserError.of(
                "training.sequence_length",
                sequence_length,
                f"needs {sequence_length + 1} tokens, the {split} split of {folder} has {self.tokens}",
                "lower it, or shard more text" + (" or a larger data.validation_fraction" if split == "validation" else ""),
            )

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """Samples by their number; numbers beyond an epoch go on with the next.

        Args:
            indices: (n,) integers from 0 on.

        Returns:
            (n, sequence_length + 1) int64: the input is [:, :-1], the labels are [:, 1:].
        """
        positions = self._windows(np.asarray(indices, dtype=np.int64)) * self.sequence_length
        shards = np.searchsorted(self._starts, positions, side="right") - 1
        offsets = positions - self._starts[shards]
        batch = np.empty((len(positions), self.sequence_length + 1), dtype=np.int64)
        for row, shard, offset in zip(batch, shards.tolist(), offsets.tolist(), strict=True):
            self._read(shard, offset, row)
        return batch

    def verify(self) -> None:
        """Read every shard of the split and hold it against its checksum.

        Raises:
            UserError: one is corrupt; it is named.
        """
        artifact.verify_files(self._folder, self._manifest, self._names)

    def _windows(self, indices: np.ndarray) -> np.ndarray:
        """The window that each sample is."""
        epochs, places = np.divmod(indices, self.windows)
        if self._split == "train":
            for epoch in np.unique(epochs).tolist():
                within = epochs == epoch
                places[within] = permute(places[within], self.windows, self._seed, epoch)
        return places

    def _read(self, shard: int, offset: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens from an offset in a shard on, over as many shards as that takes."""
        filled = 0
        while filled < len(out):
            part = self._map(shard)[offset : offset + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            shard, offset = shard + 1, 0

    def _map(self, shard: int) -> np.ndarray:
        """A shard's tokens, mapped into memory on first use."""
        if shard not in self._maps:
            if len(self._maps) >= OPEN_SHARDS:
                del self._maps[next(iter(self._maps))]
            name = self._names[shard]
            file = self._manifest.files[name]
            dtype = np.dtype(file["dtype"]).newbyteorder("<")
            mapped = np.memmap(self._folder / name, dtype, mode="r", offset=file["offset"], shape=(file["tokens"],))
            self._maps[shard] = mapped.view(np.ndarray)  # slices of a memmap object itself are slow
        return self._maps[shard]

    def _check_sizes(self) -> None:
        """A shard that is missing or has another length would be noticed only when its turn comes."""
        violations = []
        for name in self._names:
            path, written = self._folder / name, self._manifest.files[name]["bytes"]
            found = path.stat().st_size if path.is_file() else None
            if found != written:
                rule = "is missing" if found is None else f"is truncated or overwritten: {found} bytes, {written} were written"
                fix = f"remove {self._folder / artifact.MANIFEST} and run stage=tokenize again"
                violations.append(Violation("data.tokens", path, rule, fix))
        if violations:
            raise UserError(violations)


def document_ids(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """Which document of its sequence each token belongs to, counted from 0; the end token still belongs to its document.

    Args:
        tokens: (batch, sequence) input tokens.

    Returns:
        (batch, sequence) int32.
    """
    ids = np.zeros(tokens.shape, dtype=np.int32)
    np.cumsum(tokens[:, :-1] == end_of_document, axis=1, out=ids[:, 1:])
    return ids
