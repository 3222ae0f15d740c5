"""Which corpus a sample comes from, as arithmetic: exact shares in every stretch of samples, nothing drawn and nothing stored.

Within a phase the samples are dealt out by a chain of Beatty sequences (https://en.wikipedia.org/wiki/Beatty_sequence). The first
corpus takes sample n when round((n + 1) * share) > round(n * share); what it leaves is counted anew and offered to the next
corpus with its share of the rest; the last one takes all that is left. All counts are integers: of each corpus, the first n samples
hold n times its weight to within 2 samples and any stretch to within 3, whatever n (tried with up to 24 corpora), and the number of a
sample within its corpus is known without looking back. A corpus without weight takes nothing and moves nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNITS = 1 << 20
"""Weights are rounded to multiples of 1 / UNITS. Sample numbers times UNITS must stay below 2**63."""


@dataclass(frozen=True)
class Phase:
    """Weights that hold for a stretch of samples.

    Attributes:
        weights: one a corpus, at least 0 and not all 0; their sum does not matter.
        end: first sample of the next phase; None in the last one.
    """

    weights: Sequence[float]
    end: int | None = None


class BlendSchedule:
    """The corpus of every sample, and the sample's number within that corpus."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        """Take phases in order, each ending after the one before; the last has no end."""
        self._units = [units(phase.weights) for phase in phases]
        ends = [phase.end for phase in phases[:-1]]
        assert phases[-1].end is None
        # First sample of each phase, and the samples of each corpus (phases, corpora) before it.
        self._starts = np.array([0, *ends], dtype=np.int64)
        assert (np.diff(self._starts) > 0).all()
        before = [np.zeros(len(phases[0].weights), dtype=np.int64)]
        for phase, length in enumerate(np.diff(self._starts).tolist()):
            before.append(before[-1] + _counts(length, self._units[phase]))
        self._before = np.stack(before)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where samples come from.

        Args:
            samples: (n,) int64 numbers from 0 on.

        Returns:
            Each sample's corpus and its number in that corpus, (n,) int64 each.
        """
        corpora, ordinals = np.empty_like(samples), np.empty_like(samples)
        phases = np.searchsorted(self._starts, samples, side="right") - 1
        for phase in np.unique(phases).tolist():
            of_phase = np.flatnonzero(phases == phase)
            rest = samples[of_phase] - self._starts[phase]
            for corpus, unit, left in _chain(self._units[phase]):
                before, remainder = np.divmod(rest * unit + left // 2, left)
                takes = remainder + unit >= left
                corpora[of_phase[takes]] = corpus
                ordinals[of_phase[takes]] = before[takes] + self._before[phase, corpus]
                of_phase, rest = of_phase[~takes], (rest - before)[~takes]
        return corpora, ordinals

    def counts(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples each corpus has, (corpora,) int64."""
        phase = int(np.searchsorted(self._starts, samples, side="right")) - 1
        return self._before[phase] + _counts(samples - int(self._starts[phase]), self._units[phase])


def units(weights: Sequence[float]) -> list[int]:
    """Weights as integers that sum up to UNITS: rounded down, then one more for those that lost most. Any weight above 0 gets one.

    Neither the scale of the weights nor corpora without weight change the others' units.
    """
    total = sum(weights)
    assert total > 0
    assert min(weights) >= 0
    exact = [weight / total * UNITS for weight in weights]
    found = [max(int(share), 1) if share > 0 else 0 for share in exact]
    missing = UNITS - sum(found)
    by_loss = sorted((c for c, unit in enumerate(found) if unit > 0), key=lambda c: (found[c] - exact[c], c))
    for corpus in by_loss[: max(missing, 0)]:
        found[corpus] += 1
    found[max(range(len(found)), key=found.__getitem__)] += min(missing, 0)  # the largest pays for those that were lifted to one
    return found


def _chain(shares: list[int]) -> list[tuple[int, int, int]]:
    """(corpus, its units, units of it and those after it) of every corpus with weight: largest first, which keeps counts closest."""
    order = sorted((c for c, unit in enumerate(shares) if unit > 0), key=lambda c: (-shares[c], c))
    left = UNITS
    links = []
    for corpus in order:
        links.append((corpus, shares[corpus], left))
        left -= shares[corpus]
    return links


def _counts(samples: int, shares: list[int]) -> np.ndarray:
    """How many of a phase's first samples each corpus takes."""
    counts = np.zeros(len(shares), dtype=np.int64)
    for corpus, unit, left in _chain(shares):
        counts[corpus] = (samples * unit + left // 2) // left
        samples -= int(counts[corpus])
    return counts
