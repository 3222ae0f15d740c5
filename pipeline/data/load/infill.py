"""Fill-in-the-middle (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle").

Within a sample, a share of the documents is cut in three at two random places and put together anew, so that a model learns to write
the middle last. Cuts fall between tokens. Documents that the sample itself cuts are treated as whole ones ("context level" in the paper).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.data.load.permutation import random_words
from pipeline.errors import UserError
from pipeline.files import digest

SENTINELS = 3


@dataclass(frozen=True)
class Infill:
    """What is done to which documents.

    Attributes:
        rate: share of the documents that are put together anew.
        spm_rate: share of these in the order suffix, prefix, middle; the others are prefix, suffix, middle.
        prefix, middle, suffix: token ids of the sentinels.
        end_of_document: id of the token that closes every document.
        seed: of the choices; the same sample is always treated the same way.
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    end_of_document: int
    seed: int

    def apply(self, tokens: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Samples of the same shape. Three sentinels a document push as many tokens off a sample's end.

        Args:
            tokens: (n, sequence_length + 1).
            samples: (n,) their numbers, which decide the choices.
        """
        changed = np.empty_like(tokens)
        for row, source, sample in zip(changed, tokens, samples.tolist(), strict=True):
            self._fill(row, source, sample)
        return changed

    def _fill(self, row: np.ndarray, source: np.ndarray, sample: int) -> None:
        """One sample, document by document."""
        stops = [*np.flatnonzero(source == self.end_of_document).tolist(), len(source)]
        # Four numbers in [0, 1) for each document: whether, where twice, and in which order.
        words = random_words(self.seed, sample, np.arange(len(stops)), count=4)
        chances = np.stack(words, axis=1).astype(np.float64) / 2.0**64
        first, filled = 0, 0
        for stop, (whether, one, other, order) in zip(stops, chances.tolist(), strict=True):
            room = len(row) - filled
            document = source[first : min(stop, first + room)]
            if whether < self.rate and len(document) > 0 and room > SENTINELS:
                # The end is cut off first, so that every middle is whole.
                document = self._rearranged(document[: room - SENTINELS], one, other, suffix_first=order < self.spm_rate)
            closed = np.append(document, source[stop : stop + 1])[:room]
            row[filled : filled + len(closed)] = closed
            first, filled = stop + 1, filled + len(closed)
            if filled == len(row):
                return

    def _rearranged(self, document: np.ndarray, one: float, other: float, *, suffix_first: bool) -> np.ndarray:
        """A document with its middle last; `one` and `other` say where it is cut, as shares of its length."""
        low, high = sorted(int(chance * (len(document) + 1)) for chance in (one, other))
        prefix, middle, suffix = document[:low], document[low:high], document[high:]
        marks = {name: np.array([getattr(self, name)], dtype=document.dtype) for name in ("prefix", "middle", "suffix")}
        if suffix_first:
            return np.concatenate([marks["prefix"], marks["suffix"], suffix, marks["middle"], prefix, middle])
        return np.concatenate([marks["prefix"], prefix, marks["suffix"], suffix, marks["middle"], middle])


def sentinel_ids(folder: Path, fingerprint: str, names: dict[str, str]) -> list[int]:
    """The ids of sentinel tokens.

    Args:
        folder: of the tokenizer.
        fingerprint: checksum of the tokenizer.json that the token shards were made with.
        names: configuration key -> token.

    Returns:
        Their ids, in the same order.

    Raises:
        UserError: the folder holds no tokenizer or another one, or the tokens are not among its special tokens.
    """
    path = folder / "tokenizer.json"
    if not path.is_file() or digest(path) != fingerprint:
        rule = "holds no tokenizer.json" if not path.is_file() else "is not the tokenizer that data.tokens was made with"
        raise UserError.of("tokenizer.path", folder, rule, "point tokenizer.path to the folder that stage=tokenize used")
    added = {token["content"]: token["id"] for token in json.loads(path.read_text(encoding="utf-8"))["added_tokens"]}
    for key, name in names.items():
        if name not in added:
            fix = f"train or bring a tokenizer that has it; the special tokens of this one: {', '.join(sorted(added)[:20])}"
            raise UserError.of(key, name, f"is no special token of {path}", fix)
    return [added[name] for name in names.values()]
