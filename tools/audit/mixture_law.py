"""Fits the held-out loss of each corpus to the weights of a blend, and finds the weights with the lowest mean of these losses.

The law of a corpus is L(w) = c + exp(t . w), w the shares of the training corpora (Ye et al. 2024, "Data Mixing Laws",
https://arxiv.org/abs/2403.16952; log-linear fits are also the choice of https://arxiv.org/abs/2602.12237). For a given c the logarithm of
L - c is linear in w, so that the fit is a least-squares problem; c is the one with the smallest error on runs that are left out. The mean
of such laws is convex in w: what the search finds is the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

#: The constants c that are tried, as shares of the lowest loss.
_SHARES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_ITERATIONS = 400


@dataclass(frozen=True)
class MixtureLaw:
    """The laws of several corpora.

    Attributes:
        c: (targets,) the part of each loss that no blend changes.
        t: (targets, corpora) the exponents.
    """

    c: np.ndarray
    t: np.ndarray

    def losses(self, weights: np.ndarray) -> np.ndarray:
        """Return the predicted losses, (n, targets), for (n, corpora) shares."""
        return self.c + np.exp(weights @ self.t.T)


def fit(weights: np.ndarray, losses: np.ndarray) -> MixtureLaw:
    """Fit a law for each target.

    Args:
        weights: (runs, corpora) shares, each row with the sum 1.
        losses: (runs, targets), above 0.

    Raises:
        ValueError: there are too few runs, or their weights do not determine the exponents.
    """
    runs, corpora = weights.shape
    if runs < corpora + 2:
        raise ValueError(f"{runs} runs do not determine the law of {corpora} corpora: {corpora + 2} or more do")
    if np.linalg.matrix_rank(weights, tol=1e-6) < corpora:
        raise ValueError("the weights of the runs do not differ in all corpora")
    chosen = [min(_candidates(weights, own), key=lambda candidate: candidate[0])[1:] for own in losses.T]
    return MixtureLaw(np.array([c for c, _ in chosen]), np.stack([t for _, t in chosen]))


def _candidates(weights: np.ndarray, losses: np.ndarray) -> list[tuple[float, float, np.ndarray]]:
    """For each constant its squared error on left-out runs, the constant and the exponents."""
    inverse = np.linalg.pinv(weights)
    leverage = np.clip(np.einsum("ij,ji->i", weights, inverse), 0, 1 - 1e-9)
    found = []
    for share in _SHARES:
        c = share * float(losses.min())
        logs = np.log(losses - c)
        t = inverse @ logs
        without = logs - (logs - weights @ t) / (1 - leverage)  # the prediction of each run by the fit to the others
        found.append((float(np.square(c + np.exp(without) - losses).sum()), c, t))
    return found


def left_out(weights: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return the prediction of every run by the law of the others, (runs, targets); raises as fit."""
    rows = np.arange(len(weights))
    return np.concatenate([fit(weights[rows != row], losses[rows != row]).losses(weights[row : row + 1]) for row in rows])


def optimum(laws: Sequence[MixtureLaw], values: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Return the shares with the lowest weighted mean of the losses of each law, (laws, corpora), by accelerated projected gradients.

    Method: FISTA (Beck & Teboulle 2009), with the step that the largest curvature on the shares allows.

    Args:
        laws: of the losses of the same corpora.
        values: (targets,) weights of the losses, with the sum 1.
        caps: (corpora,) the largest share of each corpus, with a sum of 1 or more.
    """
    t = np.stack([law.t for law in laws])  # (laws, targets, corpora)
    curvature = (values * np.exp(t.max(axis=2)) * np.square(t).sum(axis=2)).sum(axis=1)
    step = 1 / np.maximum(curvature, 1e-12)[:, None]
    weights = momentum = _projected(np.full((len(laws), t.shape[2]), 1.0 / t.shape[2]), caps)
    for iteration in range(_ITERATIONS):
        losses = values * np.exp(np.einsum("ltc,lc->lt", t, momentum))
        following = _projected(momentum - step * np.einsum("lt,ltc->lc", losses, t), caps)
        momentum = following + iteration / (iteration + 3) * (following - weights)
        weights = following
    return weights


def _projected(weights: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """The nearest shares between 0 and their caps with the sum 1, of each row."""
    low, high = (weights - caps).min(axis=1, keepdims=True) - 1, weights.max(axis=1, keepdims=True)
    for _ in range(50):
        middle = (low + high) / 2
        above = np.clip(weights - middle, 0, caps).sum(axis=1, keepdims=True) > 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.clip(weights - high, 0, caps)


def redrawn(weights: np.ndarray, losses: np.ndarray, seeds: Sequence[int]) -> list[MixtureLaw]:
    """Return the laws of runs that are drawn with repetition; draws that determine no law are drawn anew."""
    found = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        law = None
        while law is None:
            rows = random.integers(len(weights), size=len(weights))
            with suppress(ValueError):
                law = fit(weights[rows], losses[rows])
        found.append(law)
    return found
