"""Span corruption (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 3.1.4): spans are taken out, and the decoder writes them.

    text:    Thank you for inviting me to your party last week .
    encoder: Thank you <0> me to your party <1> week . <end>
    decoder: <0> for inviting <1> last <end>

How many tokens are taken out, in how many spans, follows from the length of the text alone: every sample has the same lengths, and
nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from pipeline.config.data import SpansConfig
from pipeline.config.schema import RunConfig
from pipeline.data.load.loader import Samples
from pipeline.data.load.objectives.objective import IGNORE, Objective
from pipeline.data.load.objectives.special import SpecialTokens, decoder_start
from pipeline.data.load.permutation import random_words


@dataclass(frozen=True)
class Lengths:
    """Of a sample.

    Attributes:
        text: tokens.
        taken: of these, the decoder's to write.
        spans: in which they stand, each after a span that stays.
    """

    text: int
    taken: int
    spans: int

    @property
    def encoder(self) -> int:
        """Tokens the encoder reads: what stays, a sentinel a span, and the end."""
        return self.text - self.taken + self.spans + 1

    @property
    def decoder(self) -> int:
        """Tokens the decoder writes: what is taken, a sentinel a span, and the end."""
        return self.taken + self.spans + 1


def lengths(text: int, rates: SpansConfig) -> Lengths:
    """How much of a text is taken out; at least a token, and at least one stays."""
    taken = min(max(round(text * rates.rate), 1), text - 1)
    return Lengths(text, taken, min(max(round(taken / rates.mean_length), 1), taken, text - taken))


def longest(encoder: int, rates: SpansConfig) -> Lengths:
    """The longest text of which the encoder reads so many tokens, at least 4.

    A token more of text is one that stays, or one that is taken and then perhaps a span more: the encoder's length never jumps.
    """
    low, high = 2, 2
    while lengths(high, rates).encoder <= encoder:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if lengths(middle, rates).encoder <= encoder else (low, middle)
    return lengths(low, rates)


class SpanCorruption(Objective):
    """Texts with some spans taken out, and these as targets. What is taken out of a sample changes from epoch to epoch."""

    samples: Samples

    def __init__(
        self, samples: Samples, sizes: Lengths, sentinels: np.ndarray, start: int, seed: int, decoder_length: int | None = None
    ) -> None:
        """Take samples of whole texts.

        Args:
            samples: of sizes.text tokens and one more.
            sizes: of all samples.
            sentinels: ids, (spans,) or more.
            start: what the decoder reads first.
            seed: of the choices.
            decoder_length: at least sizes.decoder, which it is when None; what is more is padding.
        """
        self.samples, self._sizes, self._seed, self._start = samples, sizes, seed, start
        self._sentinels = sentinels
        self.decoder_length = decoder_length or sizes.decoder

    @staticmethod
    def text_length(config: RunConfig) -> int:
        """See Objective."""
        return longest(config.training.sequence_length, config.data.spans).text

    @classmethod
    def of(cls, config: RunConfig, samples: Samples) -> Self:
        """See Objective."""
        sizes = longest(config.training.sequence_length, config.data.spans)
        special = SpecialTokens(config, samples)
        names = [config.data.spans.sentinel.replace("*", str(number)) for number in range(sizes.spans)]
        sentinels = special.find({f"data.spans.sentinel {number}": (name, ()) for number, name in enumerate(names)})
        # Tensor ranks share a sequence out evenly under sequence parallelism.
        parts = config.parallel.tensor if config.parallel.sequence_parallel else 1
        padded = -(-sizes.decoder // parts) * parts
        return cls(samples, sizes, np.array(sentinels), decoder_start(config, special), config.training.seed, padded)

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: tokens and decoder_tokens, with targets."""
        indices = np.asarray(indices, dtype=np.int64)
        text = self.samples.samples(indices)[:, : self._sizes.text].astype(np.int64)
        taken = self._taken(indices)
        encoder = self._marked(text, ~taken)
        written = self._marked(text, taken)
        padding = ((0, 0), (0, self.decoder_length - self._sizes.decoder))
        return {
            "tokens": encoder,
            "decoder_tokens": np.pad(np.insert(written[:, :-1], 0, self._start, axis=1), padding, constant_values=self._start),
            "targets": np.pad(written, padding, constant_values=IGNORE),
        }

    def _taken(self, indices: np.ndarray) -> np.ndarray:
        """Which tokens are taken out, bool (n, text): spans that stay and spans that go, in turns."""
        sizes = self._sizes
        stay = partitions(sizes.text - sizes.taken, sizes.spans, indices, self._seed)
        go = partitions(sizes.taken, sizes.spans, indices, self._seed + 1)
        bounds = np.stack([stay, go], axis=2).reshape(len(indices), -1).cumsum(axis=1)[:, :-1]
        changes = np.zeros((len(indices), sizes.text), dtype=np.int64)
        np.put_along_axis(changes, bounds, 1, axis=1)
        return changes.cumsum(axis=1) % 2 == 1

    def _marked(self, text: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """What is kept, a sentinel for each span of the rest, and the end: (n, kept + spans + 1)."""
        begins = ~kept & np.insert(kept[:, :-1], 0, True, axis=1)
        marks = self._sentinels[np.maximum(begins.cumsum(axis=1) - 1, 0)]
        rows = np.where(begins, marks, text)[kept | begins].reshape(len(text), -1)
        return np.insert(rows, rows.shape[1], self.samples.end_of_document, axis=1)


def partitions(items: int, parts: int, samples: np.ndarray, seed: int) -> np.ndarray:
    """Random lengths, at least 1 each, that add up to the items; every such partition is as likely as any other.

    Args:
        items: to share out.
        parts: of each partition, at most `items`.
        samples: (n,) numbers that decide the choice.
        seed: of the choice.

    Returns:
        int64 (n, parts).
    """
    gaps = items - 1
    words = random_words(seed, np.repeat(samples, gaps), np.tile(np.arange(gaps), len(samples)), count=1)[0]
    order = np.broadcast_to(words, (len(samples) * gaps,)).reshape(len(samples), gaps).argsort(axis=1, kind="stable")
    cuts = np.sort(order[:, : parts - 1], axis=1) + 1
    return np.diff(cuts, axis=1, prepend=0, append=items)
