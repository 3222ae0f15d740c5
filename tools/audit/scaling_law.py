"""Fits the scaling law L(N, D) = E + A / N^alpha + B / D^beta to losses, as approach 3 of Hoffmann et al. 2022.

N are weights, D training tokens (https://arxiv.org/abs/2203.15556, section 3.3 and appendix D.3). The fit minimizes the Huber loss, with
delta 0.001, of the logarithms of predicted over measured loss, from many initial values. Minimizer: Levenberg-Marquardt with the weights of
iteratively reweighted least squares (Holland & Welsch 1977), all initial values side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Width of the quadratic part of the Huber loss.
DELTA = 1e-3
#: FLOPs of training for each weight and token, forward and backward pass (Kaplan et al. 2020, https://arxiv.org/abs/2001.08361).
FLOPS = 6
#: Points that determine the five constants.
LEAST = 5
#: Initial exponents; of the shares of the three terms in the loss at the mean point, all combinations are tried as well.
_EXPONENTS, _SHARES = (0.1, 0.3, 0.5, 1.0, 2.0), (0.05, 0.3, 0.9)
_ITERATIONS = 500


@dataclass(frozen=True)
class Point:
    """A measured loss.

    Attributes:
        weights: N.
        tokens: D.
        loss: nats per token.
    """

    weights: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Law:
    """The constants of the law.

    Attributes:
        e: loss that no size reaches, nats per token.
        a, alpha: of the term of weights.
        b, beta: of the term of tokens.
    """

    e: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, weights: float, tokens: float) -> float:
        """The predicted loss, nats per token."""
        return float(self.e + self.a * weights**-self.alpha + self.b * tokens**-self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Return the weights and tokens with the lowest predicted loss for a number of FLOPs (Hoffmann et al. 2022, equation 4)."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        weights = ratio * (flops / FLOPS) ** (self.beta / (self.alpha + self.beta))
        return float(weights), float(flops / FLOPS / weights)


def fit(points: Sequence[Point]) -> Law:
    """Return the law with the lowest Huber loss.

    Raises:
        ValueError: the points do not determine five constants: fewer than LEAST, or of fewer than three sizes or numbers of tokens, of
            which a term and the constant E are not determined.
    """
    sizes, horizons = len({point.weights for point in points}), len({point.tokens for point in points})
    if len(points) < LEAST or sizes < 3 or horizons < 3:
        got = f"{len(points)} of {sizes} sizes and {horizons} numbers of tokens"
        raise ValueError(f"five constants require {LEAST} losses of 3 sizes and 3 numbers of tokens, got {got}")
    logs = np.log([[point.weights, point.tokens, point.loss] for point in points])
    center = logs.mean(0)
    x, y, loss = (logs - center).T  # each term is then its share of the mean loss at the mean point
    starts = [
        (math.log(e), math.log(a), math.log(alpha), math.log(b), math.log(beta))
        for e, a, b in itertools.product(_SHARES, repeat=3)
        for alpha, beta in itertools.product(_EXPONENTS, repeat=2)
    ]
    e, a, alpha, b, beta = _minimize(np.array(starts), x, y, loss)
    a, b = a + math.exp(alpha) * center[0], b + math.exp(beta) * center[1]
    return Law(*(float(np.exp(value)) for value in (e + center[2], a + center[2], alpha, b + center[2], beta)))


def _minimize(theta: np.ndarray, x: np.ndarray, y: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Return the best minimum: logarithms of E, A, alpha, B, beta, fp64 (5,).

    Args:
        theta: initial values, fp64 (starts, 5).
        x, y, loss: logarithms of weights, tokens and losses, fp64 (points,).
    """
    damping = np.full(len(theta), 1e-2)
    residual, jacobian = _residuals(theta, x, y, loss)
    found = _huber(residual)
    for _ in range(_ITERATIONS):
        weight = np.minimum(1, DELTA / np.maximum(np.abs(residual), 1e-300))[..., None]
        normal = np.einsum("spi,spj->sij", jacobian * weight, jacobian)
        gradient = np.einsum("spi,sp->si", jacobian * weight, residual)
        # An absolute term beside the relative one: a term that vanished leaves a row of zeros.
        diagonal = np.einsum("sii->si", normal) * damping[:, None] + 1e-15
        step = np.linalg.solve(normal + diagonal[..., None] * np.eye(5), gradient[..., None])[..., 0]
        trial = theta - np.clip(step, -1, 1)
        new_residual, new_jacobian = _residuals(trial, x, y, loss)
        new = _huber(new_residual)
        better = new < found
        theta, found = np.where(better[:, None], trial, theta), np.where(better, new, found)
        residual, jacobian = np.where(better[:, None], new_residual, residual), np.where(better[:, None, None], new_jacobian, jacobian)
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e12)
    best: np.ndarray = theta[np.argmin(found)]
    return best


def _residuals(theta: np.ndarray, x: np.ndarray, y: np.ndarray, loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log predicted minus log measured loss, fp64 (starts, points), and its derivatives, fp64 (starts, points, 5)."""
    e, a, alpha, b, beta = (values[:, None] for values in theta.T)
    slopes = np.exp(np.minimum(alpha, 5)), np.exp(np.minimum(beta, 5))
    terms = np.stack(np.broadcast_arrays(e, a - slopes[0] * x, b - slopes[1] * y))
    largest = terms.max(0)
    shares = np.exp(terms - largest)
    total = shares.sum(0)
    shares /= total
    derivatives = (shares[0], shares[1], -shares[1] * slopes[0] * x, shares[2], -shares[2] * slopes[1] * y)
    return largest + np.log(total) - loss, np.stack(derivatives, -1)


def _huber(residual: np.ndarray) -> np.ndarray:
    """The Huber loss of each start, fp64 (starts,)."""
    size = np.abs(residual)
    total: np.ndarray = np.where(size <= DELTA, size**2 / 2, DELTA * (size - DELTA / 2)).sum(-1)
    return total
