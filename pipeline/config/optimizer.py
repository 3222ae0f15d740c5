"""The optimizers, and the configuration group of the optimizer and its learning-rate schedule. Imports no torch.

An optimizer is a row of OPTIMIZERS and its keys in OptimizerConfig here, its update in pipeline/training, and a plain loop in
pipeline/certification/plain_optimizers.py, with which stage=certify compares it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeline.common.knobs import knob


@dataclass(frozen=True)
class OptimizerKind:
    """What differs between optimizers besides their update.

    Attributes:
        state: keys of the tensors in optimizer.state[weight], fp32 or in state_dtype, each of the shape of the weight: ZeRO shards them by
            element like the weight, checkpoints store them beside it, and the planner counts their bytes.
        change: (arrays of `state` after an update, configuration, learning rate, number of the update from 1, steps of the run) -> what
            the update subtracted from the weights, without weight decay, up to its sign. A checkpoint that lost an update is refused by it.
        largest_update: configuration -> the most that an update can be, divided by the learning rate.
        keys: keys of the group that not every optimizer reads, and this one does.
        matrix_state: as state, for the weights that Muon updates; None where there are none.
        offloads: whether a CPU steps it (parallel.offload=optimizer).
        has_mup: whether the learning rates of model.parametrization=mup are those of its updates.
        separate: whether the forward pass of training reads other values than the weights: those of the optimizer's `gradient_point`.
        moment: key of the state that stage=certify compares.
        first_gradient: (that moment after the first update, configuration) -> the first gradient, up to its sign where it is squared.
        amplifies: whether its updates amplify rounding errors: stage=certify measures them with other orders of sums.
        moves_by_signs: whether a rounding error can turn an update around.
    """

    state: tuple[str, ...]
    change: Callable[[Sequence[Any], OptimizerConfig, float, int, int], Any]
    largest_update: Callable[[OptimizerConfig], float]
    keys: tuple[str, ...] = ("eps",)
    matrix_state: tuple[str, ...] | None = None
    offloads: bool = False
    has_mup: bool = False
    separate: bool = False
    moment: str = "exp_avg"
    first_gradient: Callable[[Any, OptimizerConfig], Any] = lambda moment, config: moment / (1 - config.beta1)
    amplifies: bool = True
    moves_by_signs: bool = False

    def state_of(self, *, muon: bool) -> tuple[str, ...]:
        """The keys of a weight: of one that Muon updates, or of another one."""
        return self.matrix_state if muon and self.matrix_state is not None else self.state


def _adam_change(state: Sequence[Any], config: OptimizerConfig, lr: float, update: int, _steps: int) -> Any:
    """Kingma & Ba 2015, https://arxiv.org/abs/1412.6980, algorithm 1."""
    first, second = state
    return lr * first / (1 - config.beta1**update) / ((second / (1 - config.beta2**update)) ** 0.5 + config.eps)


def _ademamix_change(state: Sequence[Any], config: OptimizerConfig, lr: float, update: int, steps: int) -> Any:
    """Pagliardini et al. 2024, https://arxiv.org/abs/2409.03137, section 3."""
    first, slow, second = state
    weight = config.alpha * min(update / (config.slow_warmup_steps or max(steps, 1)), 1.0)
    direction = first / (1 - config.beta1**update) + weight * slow
    return lr * direction / ((second / (1 - config.beta2**update)) ** 0.5 + config.eps)


def _lion_change(state: Sequence[Any], _config: OptimizerConfig, lr: float, _update: int, _steps: int) -> Any:
    """The sign of another average than the one that is kept, which is zero where all gradients were."""
    return lr * (state[0] != 0)


def schedule_free_shares(config: OptimizerConfig, steps: int) -> tuple[float, ...]:
    """Return c of every update: the share of z in the average after it, gamma^2 divided by the sum of gamma^2 so far.

    Defazio et al. 2024, https://arxiv.org/abs/2405.15682, algorithm 1: gamma = lr sqrt(1 - beta2^t) min(1, t / warm-up) in the update
    t = 1, 2, ...; the shares do not depend on lr.

    Args:
        config: warm-up and beta2.
        steps: of the run; a run without a number of steps has the share of the first update.
    """
    return _shares(config.warmup_steps or math.ceil(config.warmup_ratio * steps), config.beta2, max(steps, 1))


@cache
def _shares(warmup: int, beta2: float, steps: int) -> tuple[float, ...]:
    shares, total = [], 0.0
    for update in range(1, steps + 1):
        squared = (1 - beta2**update) * min(1.0, update / max(warmup, 1)) ** 2
        total += squared
        shares.append(squared / total)
    return tuple(shares)


def _schedule_free_change(state: Sequence[Any], config: OptimizerConfig, _lr: float, update: int, steps: int) -> Any:
    """What was added to the average is c / (1 - c) of the offset that remains; nothing remains of an update that was added as a whole."""
    share = schedule_free_shares(config, steps)[max(min(update, steps), 1) - 1]
    return (share / (1 - share) if share < 1 else 0.0) * abs(state[1])


def _adam_largest(config: OptimizerConfig) -> float:
    """Kingma & Ba 2015, https://arxiv.org/abs/1412.6980, section 2.1."""
    return max(1.0, (1 - config.beta1) / math.sqrt(1 - config.beta2))


def _ademamix_largest(config: OptimizerConfig) -> float:
    """Adam's, and alpha times the same with beta3."""
    return _adam_largest(config) + config.alpha * max(1.0, (1 - config.beta3) / math.sqrt(1 - config.beta2))


#: optimizer.name -> optimizer
OPTIMIZERS = {
    "adamw": OptimizerKind(
        ("exp_avg", "exp_avg_sq"), _adam_change, _adam_largest, ("eps", "state_dtype"), offloads=True, has_mup=True, amplifies=False
    ),
    "ademamix": OptimizerKind(
        ("exp_avg", "exp_avg_slow", "exp_avg_sq"),
        _ademamix_change,
        _ademamix_largest,
        ("eps", "beta3", "alpha", "slow_warmup_steps"),
        offloads=True,
    ),
    "lion": OptimizerKind(
        ("exp_avg",),
        _lion_change,
        lambda _: 1.0,
        (),
        offloads=True,
        first_gradient=lambda moment, config: moment / (1 - config.beta2),  # it keeps another average than it moves by
        moves_by_signs=True,
    ),
    # A matrix has no exp_avg_sq, so that its change, which needs the whole matrix, is not asked for. Other weights are AdamW's.
    "muon": OptimizerKind(
        ("exp_avg", "exp_avg_sq"),
        _adam_change,
        _adam_largest,
        ("eps", "muon_momentum", "muon_nesterov", "muon_steps", "muon_adjust_lr", "muon_lr_factor", "muon_per_head"),
        matrix_state=("exp_avg",),
        has_mup=True,
    ),
    "schedule_free": OptimizerKind(
        ("exp_avg_sq", "offset"),
        _schedule_free_change,
        lambda config: 1 / math.sqrt(1 - config.beta2),  # z moves as with Adam without a first moment, and its average no further
        separate=True,
        moment="exp_avg_sq",
        first_gradient=lambda moment, config: (moment / (1 - config.beta2)) ** 0.5,
    ),
}


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = knob(
        "adamw",
        "optimizer: AdamW (Loshchilov & Hutter 2019), AdEMAMix (Pagliardini et al. 2024), Lion (Chen et al. 2023), Muon (Jordan et al. "
        "2024) for the matrices of the blocks and AdamW for the other weights, or schedule-free AdamW (Defazio et al. 2024)",
        choices=tuple(OPTIMIZERS),
    )
    lr: float = knob(3e-4, "peak learning rate; finetune: 2e-5, with lora.rank 2e-4, for dpo 1e-5", above=0, at_most=10)
    beta1: float = knob(
        0.9, "decay rate of the first moment; schedule_free: share of the average in the weights of training", at_least=0, at_most=0.9999
    )
    beta2: float = knob(0.95, "decay rate of the second moment; lion: of the moment, after the update", at_least=0, at_most=0.99999)
    beta3: float = knob(0.9999, "ademamix: decay rate of the slow first moment", at_least=0, at_most=0.9999999)
    alpha: float = knob(8.0, "ademamix: weight of the slow first moment in the update", at_least=0)
    slow_warmup_steps: int = knob(
        0, "ademamix: steps in which alpha rises from 0, and beta3 from beta1; 0: training.steps", unit="steps", at_least=0
    )
    muon_momentum: float = knob(0.95, "muon: decay rate of the momentum of a matrix", at_least=0, at_most=0.9999)
    muon_nesterov: bool = knob(True, "muon: Nesterov momentum")
    muon_steps: int = knob(5, "muon: iterations of Newton-Schulz", at_least=1, at_most=20)
    muon_adjust_lr: str = knob(
        "match_rms_adamw",
        "muon: factor of the update of a matrix (a, b): 0.2 sqrt(max(a, b)), as large as that of AdamW (Liu et al. 2025), or "
        "sqrt(max(1, a / b)) (original)",
        choices=("match_rms_adamw", "original"),
    )
    muon_lr_factor: float = knob(1.0, "muon: learning rate of the matrices, divided by optimizer.lr", above=0)
    muon_per_head: bool = knob(False, "muon: the rows of each head of queries, keys and values are a matrix of their own")
    eps: float = knob(1e-8, "term added to the denominator of the update", above=0)
    state_dtype: str = knob(
        "fp32",
        "adamw: dtype in which the two moments are kept; bf16 takes 4 bytes a weight less (DeepSeek-AI 2024, section 3.3). Updates are "
        "computed in fp32, and master weights stay fp32",
        choices=("fp32", "bf16"),
    )
    weight_decay: float = knob(0.1, "decoupled weight decay of matrices and embeddings; finetune: 0", at_least=0)
    gradient_clipping: float = knob(1.0, "maximum global gradient norm; 0 disables clipping", at_least=0)
    qk_clip: float | None = knob(
        None,
        "largest attention logit of a head: after a step with a larger one, its weights of queries and keys are scaled (QK-clip: Kimi Team "
        "2025)",
        above=0,
    )
    schedule: str = knob("cosine", "learning-rate schedule after the warm-up", choices=("cosine", "wsd", "linear", "constant"))
    warmup_steps: int = knob(100, "steps of linear warm-up; finetune: 0, for optimizer.warmup_ratio", unit="steps", at_least=0)
    warmup_ratio: float = knob(
        0.0, "linear warm-up as a fraction of the steps, if optimizer.warmup_steps is 0; finetune: 0.03", at_least=0, at_most=1
    )
    decay_steps: int = knob(
        0, "length of a decay of wsd; 0 uses a tenth of the steps from the beginning of the run to its end", unit="steps", at_least=0
    )
    decay_shape: str = knob(
        "linear", "shape of a decay of wsd: linear, 1 - sqrt (sqrt), or half a cosine", choices=("linear", "sqrt", "cosine")
    )
    decay_ends: list[int] = knob(
        [],
        "wsd: steps at which further decays end (WSD-S); after each one a checkpoint is written and kept, and the rate returns to its peak",
        unit="steps",
        at_least=1,
    )
    min_lr_ratio: float = knob(0.1, "ratio of the final to the peak learning rate", at_least=0, at_most=1)
