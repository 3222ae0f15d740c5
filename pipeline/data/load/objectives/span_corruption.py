"""Span corruption (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 3.1.4): the decoder predicts spans removed from the text.

    text:    Thank you for inviting me to your party last week .
    encoder: Thank you <0> me to your party <1> week . <end>
    decoder: <0> for inviting <1> last <end>

The number of removed tokens and of spans depends on the length of the text only: every sample has the same lengths, and nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from pipeline.config.data import SpansConfig
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives import objective
from pipeline.data.load.objectives.objective import IGNORE, TokenShardObjective, special_tokens
from pipeline.data.load.permutation import random_words
from pipeline.data.load.samples import Samples


@dataclass(frozen=True)
class Lengths:
    """Lengths of a sample: `removed` tokens, which the decoder predicts, in `spans`, each preceded by a kept one."""

    text: int
    removed: int
    spans: int

    @property
    def encoder(self) -> int:
        """Tokens the encoder reads: kept tokens, one sentinel per span, and the end token."""
        return self.text - self.removed + self.spans + 1

    @property
    def decoder(self) -> int:
        """Tokens the decoder predicts: removed tokens, one sentinel per span, and the end token."""
        return self.removed + self.spans + 1


def lengths(text: int, rates: SpansConfig) -> Lengths:
    """The lengths for a text of `text` tokens; at least one token is removed and at least one is kept."""
    removed = min(max(round(text * rates.rate), 1), text - 1)
    return Lengths(text, removed, min(max(round(removed / rates.mean_length), 1), removed, text - removed))


def longest(encoder: int, rates: SpansConfig) -> Lengths:
    """The lengths of the longest text of which the encoder reads `encoder` tokens, at least 4.

    One more token of text adds a kept token, or a removed token and at most one span: the encoder's length never skips a value.
    """
    low, high = 2, 2
    while lengths(high, rates).encoder <= encoder:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if lengths(middle, rates).encoder <= encoder else (low, middle)
    return lengths(low, rates)


class SpanCorruption(TokenShardObjective):
    """Texts with some spans removed, and these spans as targets. The removed spans of a sample differ between epochs."""

    settings: ClassVar[tuple[str, ...]] = (*TokenShardObjective.settings, "data.spans", "data.decoder_start")

    def __init__(
        self, samples: Samples, sizes: Lengths, sentinels: np.ndarray, start: int, seed: int, decoder_length: int | None = None
    ) -> None:
        """Use samples of sizes.text + 1 tokens.

        Args:
            sentinels: token ids, at least one per span.
            decoder_length: at least sizes.decoder, its default; longer ones are padded.
        """
        self.samples, self._sizes, self._seed, self._start, self._sentinels = samples, sizes, seed, start, sentinels
        self.decoder_length = decoder_length or sizes.decoder

    @staticmethod
    def sample_settings(config: RunConfig) -> dict[str, Any]:
        """See TokenShardObjective."""
        return {"spans": vars(config.data.spans), "decoder_start": config.data.decoder_start}

    @staticmethod
    def text_length(config: RunConfig) -> int:
        """See TokenShardObjective."""
        return longest(config.training.sequence_length, config.data.spans).text

    @classmethod
    def of(cls, config: RunConfig, samples: Samples) -> Self:
        """See TokenShardObjective."""
        sizes = longest(config.training.sequence_length, config.data.spans)
        special = special_tokens(config, samples)
        names = [config.data.spans.sentinel.replace("*", str(number)) for number in range(sizes.spans)]
        sentinels = special.find({f"data.spans.sentinel {number}": (name, ()) for number, name in enumerate(names)})
        # Sequence parallelism splits a sequence evenly over the tensor ranks.
        parts = config.parallel.tensor if config.parallel.sequence_parallel else 1
        padded = -(-sizes.decoder // parts) * parts
        start = objective.decoder_start(config.data.decoder_start, special)
        return cls(samples, sizes, np.array(sentinels), start, config.training.seed, padded)

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: tokens and decoder_tokens, with targets."""
        indices = np.asarray(indices, dtype=np.int64)
        text = self.samples.samples(indices)[:, : self._sizes.text].astype(np.int64)
        removed = self._removed(indices)
        encoder = self._with_sentinels(text, ~removed)
        written = self._with_sentinels(text, removed)
        padding = ((0, 0), (0, self.decoder_length - self._sizes.decoder))
        return {
            "tokens": encoder,
            "decoder_tokens": np.pad(np.insert(written[:, :-1], 0, self._start, axis=1), padding, constant_values=self._start),
            "targets": np.pad(written, padding, constant_values=IGNORE),
        }

    def _removed(self, indices: np.ndarray) -> np.ndarray:
        """Which tokens are removed, bool (n, text): kept and removed spans alternate."""
        sizes = self._sizes
        kept = partitions(sizes.text - sizes.removed, sizes.spans, indices, self._seed)
        removed = partitions(sizes.removed, sizes.spans, indices, self._seed + 1)
        bounds = np.stack([kept, removed], axis=2).reshape(len(indices), -1).cumsum(axis=1)[:, :-1]
        changes = np.zeros((len(indices), sizes.text), dtype=np.int64)
        np.put_along_axis(changes, bounds, 1, axis=1)
        return changes.cumsum(axis=1) % 2 == 1

    def _with_sentinels(self, text: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """The kept tokens, with a sentinel in place of each other span, and the end token: (n, kept + spans + 1)."""
        begins = ~kept & np.insert(kept[:, :-1], 0, True, axis=1)
        marks = self._sentinels[np.maximum(begins.cumsum(axis=1) - 1, 0)]
        rows = np.where(begins, marks, text)[kept | begins].reshape(len(text), -1)
        return np.insert(rows, rows.shape[1], self.samples.end_of_document, axis=1)


def partitions(items: int, parts: int, samples: np.ndarray, seed: int) -> np.ndarray:
    """Random lengths of at least 1 that sum to `items`, uniform over all such partitions: int64 (n, parts), parts <= items.

    The sample numbers, (n,), seed the choice together with `seed`.
    """
    gaps = items - 1
    words = random_words(seed, np.repeat(samples, gaps), np.tile(np.arange(gaps), len(samples)), count=1)[0]
    order = np.broadcast_to(words, (len(samples) * gaps,)).reshape(len(samples), gaps).argsort(axis=1, kind="stable")
    cuts = np.sort(order[:, : parts - 1], axis=1) + 1
    return np.diff(cuts, axis=1, prepend=0, append=items)
