"""Which corpus does sample i come from, and which number does it have there? Exact integer arithmetic on i, without randomness or state.

Within a phase, a chain of Beatty sequences (https://en.wikipedia.org/wiki/Beatty_sequence) assigns the samples. The first corpus is
assigned sample n if round((n + 1) * share) > round(n * share). The remaining samples are renumbered, and the next corpus is assigned its
share of them in the same way. The last corpus is assigned all samples that remain. All counts are integers. For any n, the first n samples
contain n times the weight of each corpus to within 2 samples, and any n consecutive samples to within 3 (tested with up to 24 corpora).
A corpus with weight 0 is assigned no samples and does not change the assignment of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNITS = 1 << 20
"""Weights are rounded to multiples of 1 / UNITS. Sample numbers times UNITS must stay below 2**63."""


@dataclass(frozen=True)
class Phase:
    """The corpus weights of a range of samples.

    Attributes:
        weights: one per corpus, at least 0 and not all 0; only their proportions matter.
        end: first sample of the next phase; None in the last phase.
        run: samples in a row that are of one corpus.
    """

    weights: Sequence[float]
    end: int | None = None
    run: int = 1


class BlendSchedule:
    """Maps every sample to a corpus and to its number within that corpus."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        """Build the schedule from phases in order, with ascending ends; the last phase has no end."""
        self._units = [units(phase.weights) for phase in phases]
        self._runs = [phase.run for phase in phases]
        ends = [phase.end for phase in phases[:-1]]
        assert phases[-1].end is None
        # First sample of each phase, (phases,); and the samples of each corpus before it, (phases, corpora).
        self._starts = np.array([0, *ends], dtype=np.int64)
        assert (np.diff(self._starts) > 0).all()
        before = [np.zeros(len(phases[0].weights), dtype=np.int64)]
        for phase, length in enumerate(np.diff(self._starts).tolist()):
            before.append(before[-1] + self._counts(phase, length))
        self._before = np.stack(before)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The corpus of each of (n,) int64 samples, and its number within that corpus: (n,) int64 each."""
        corpora, ordinals = np.empty_like(samples), np.empty_like(samples)
        phases = np.searchsorted(self._starts, samples, side="right") - 1
        for phase in np.unique(phases).tolist():
            of_phase = np.flatnonzero(phases == phase)
            numbers, places = np.divmod(samples[of_phase] - self._starts[phase], self._runs[phase])
            for corpus, unit, remaining in _chain(self._units[phase]):
                before, remainder = np.divmod(numbers * unit + remaining // 2, remaining)
                assigned = remainder + unit >= remaining
                corpora[of_phase[assigned]] = corpus
                ordinals[of_phase[assigned]] = (before * self._runs[phase] + places)[assigned] + self._before[phase, corpus]
                of_phase, numbers, places = of_phase[~assigned], (numbers - before)[~assigned], places[~assigned]
        return corpora, ordinals

    def numbers(self, corpus: int, ordinals: np.ndarray) -> np.ndarray:
        """The inverse of locate: the samples with these numbers within a corpus, (n,) int64 -> (n,) int64.

        -1 if the corpus ends before it, with weight 0 in the last phase.
        """
        samples = np.full_like(ordinals, -1)
        phases = np.searchsorted(self._before[:, corpus], ordinals, side="right") - 1
        for phase in np.unique(phases).tolist():
            chain = _chain(self._units[phase])
            if (level := next((n for n, (other, *_) in enumerate(chain) if other == corpus), None)) is None:
                continue  # only in the last phase: another one without the corpus does not change _before
            of_phase = np.flatnonzero(phases == phase)
            runs, places = np.divmod(ordinals[of_phase] - self._before[phase, corpus], self._runs[phase])
            _, unit, remaining = chain[level]
            # Sample n is assigned if round((n + 1) * share) > round(n * share): the first n + 1 whose rounded share is the next number.
            numbers = -(-((runs + 1) * remaining - remaining // 2) // unit) - 1
            for _, unit, remaining in reversed(chain[:level]):  # among the samples that the corpora before it leave
                numbers = (numbers * remaining + remaining // 2) // (remaining - unit)
            samples[of_phase] = numbers * self._runs[phase] + places + self._starts[phase]
        return samples

    def counts(self, samples: int) -> np.ndarray:
        """The number of samples of each corpus among the first `samples` samples, (corpora,) int64."""
        phase = int(np.searchsorted(self._starts, samples, side="right")) - 1
        return self._before[phase] + self._counts(phase, samples - int(self._starts[phase]))

    def _counts(self, phase: int, samples: int) -> np.ndarray:
        """The number of samples of each corpus among the first `samples` of a phase, (corpora,) int64."""
        runs, rest = divmod(samples, self._runs[phase])
        counts = _counts(runs, self._units[phase])
        return counts * self._runs[phase] + rest * (_counts(runs + 1, self._units[phase]) - counts)


def units(weights: Sequence[float]) -> list[int]:
    """Weights as integers that sum to UNITS, by the largest remainder method. Any weight above 0 is rounded to at least 1.

    The result depends neither on the scale of the weights nor on corpora with weight 0.
    """
    total = sum(weights)
    assert total > 0
    assert min(weights) >= 0
    exact = [weight / total * UNITS for weight in weights]
    whole = [max(int(share), 1) if share > 0 else 0 for share in exact]
    missing = UNITS - sum(whole)
    by_loss = sorted((c for c, unit in enumerate(whole) if unit > 0), key=lambda c: (whole[c] - exact[c], c))
    for corpus in by_loss[: max(missing, 0)]:
        whole[corpus] += 1
    whole[max(range(len(whole)), key=whole.__getitem__)] += min(missing, 0)  # the largest compensates for those that were rounded up to 1
    return whole


def _chain(shares: list[int]) -> list[tuple[int, int, int]]:
    """The order in which corpora are assigned samples: largest weight first, which keeps the counts closest to the weights.

    Returns:
        (corpus, its units, sum of its units and those of the corpora after it) for every corpus with weight above 0.
    """
    order = sorted((c for c, unit in enumerate(shares) if unit > 0), key=lambda c: (-shares[c], c))
    remaining = UNITS
    chain = []
    for corpus in order:
        chain.append((corpus, shares[corpus], remaining))
        remaining -= shares[corpus]
    return chain


def _counts(samples: int, shares: list[int]) -> np.ndarray:
    """The number of samples of each corpus among the first `samples` samples of a phase, (corpora,) int64."""
    counts = np.zeros(len(shares), dtype=np.int64)
    for corpus, unit, remaining in _chain(shares):
        counts[corpus] = (samples * unit + remaining // 2) // remaining
        samples -= int(counts[corpus])
    return counts
