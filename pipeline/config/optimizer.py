"""The configuration group of the optimizer and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = knob(
        "adamw",
        "optimizer: AdamW (Loshchilov & Hutter 2019), AdEMAMix (Pagliardini et al. 2024), Lion (Chen et al. 2023), Muon (Jordan et al. "
        "2024) for the matrices of the blocks and AdamW for the other weights, or schedule-free AdamW (Defazio et al. 2024)",
        choices=("adamw", "ademamix", "lion", "muon", "schedule_free"),
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
