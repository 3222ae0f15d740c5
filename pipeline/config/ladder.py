"""Sizes, batch, learning rate and tokens of the models of a ladder (conf/experiment/ladder.yaml): arithmetic on the configuration.

Batch and rate are the fits of Porian et al. 2024 (https://arxiv.org/abs/2406.19146), as in the ladder of OLMo (Bhagia et al. 2024,
https://arxiv.org/abs/2412.04403), for sequences of 2,048 tokens; tokens follow Hoffmann et al. 2022 (https://arxiv.org/abs/2203.15556).
"""

from __future__ import annotations

import math
from typing import Any

from pipeline.common.errors import UserError

#: Weights, learning rate and tokens of a batch of the model from which both are scaled.
BASE_WEIGHTS, BASE_LR, BASE_BATCH = 108e6, 0.0047, 160 * 2048
#: Width of a head, and the multiple to which the width of the feed-forward is rounded up; sequences to which a batch is rounded.
HEAD_WIDTH, FFN_MULTIPLE, BATCH_MULTIPLE = 64, 64, 8
#: Families whose weights are counted: dense, with experts in every block, and with those of qwen3_moe; all with gated feed-forwards.
FAMILIES = ("llama", "mixtral", "qwen3_moe")
#: Ends of decays (WSD-S), as shares of the steps; the last one is the end of the run.
HORIZONS = (0.25, 0.5, 1.0)


def weights(model: Any, *, of_token: bool = True) -> int:
    """Return the number of weights of the matrices of all blocks, without embeddings and norms.

    Args:
        model: sizes of a model of FAMILIES, as a mapping.
        of_token: with the experts of a token, else with all of them.
    """
    experts = model.get("top_k" if of_token else "experts", 1)
    hidden, layers, interval = model["hidden"], model["layers"], model.get("expert_interval", 1)
    attention = 2 * (model.get("head_width") or hidden // model["heads"]) * (model["heads"] + model["kv_heads"])
    dense = 3 * model["ffn_hidden"]
    routed = 3 * experts * model.get("expert_ffn_hidden", model["ffn_hidden"]) + model.get("experts", 0)
    sparse = len(set(range(interval - 1, layers, interval)) - set(model.get("dense_blocks", ())))
    return int(hidden * (layers * attention + sparse * routed + (layers - sparse) * dense))


def lr(count: float) -> float:
    """Return the peak learning rate for a number of weights, with three digits."""
    return float(f"{BASE_LR * (count / BASE_WEIGHTS) ** (-1 / 3):.3g}")


def sequences(count: float, sequence_length: int) -> int:
    """Return the sequences of a global batch: a multiple of BATCH_MULTIPLE, at least that."""
    tokens = BASE_BATCH * (count / BASE_WEIGHTS) ** (2 / 3)
    return BATCH_MULTIPLE * max(1, round(tokens / sequence_length / BATCH_MULTIPLE))


def steps(tokens: int, batch: int, sequence_length: int) -> int:
    """Return the smallest number of steps that process the tokens and of which every horizon is a whole number."""
    multiple = round(1 / min(HORIZONS))
    return multiple * math.ceil(tokens / (batch * sequence_length * multiple))


def resolve(name: str, argument: float = 1, *, _root_: Any) -> int | float:
    """The resolver ${ladder:NAME,ARGUMENT}: a value of the ladder that follows from the rest of the configuration.

    Args:
        name: hidden, ffn_hidden, tokens (ARGUMENT for each weight), batch, lr, or steps (ARGUMENT as a share of all).
        argument: see name; of ffn_hidden a factor, such as 0.5 for fine-grained experts.

    Raises:
        UserError: there is no such value, or the model is none of a ladder.
    """
    model, training = _root_.model, _root_.training
    if model.family not in FAMILIES:
        rule = f"the weights of a ladder (experiment=ladder) are counted for model.family={', '.join(FAMILIES)}"
        fix = "choose a model of one of them, or set the values that refer to the ladder on the command line"
        raise UserError.of("model.family", model.family, rule, fix)
    if not isinstance(model.layers, int) or model.layers < 1:
        raise UserError.of("model.layers", model.layers, "must be at least 1", "set a size of the ladder: model.layers=4")
    if not isinstance(argument, int | float):
        raise UserError.of(f"ladder:{name}", argument, "must be a number", f"write ${{ladder:{name},20}}")
    match name:
        case "hidden":
            return int(HEAD_WIDTH * model.layers)
        case "ffn_hidden":
            return FFN_MULTIPLE * math.ceil(8 * model.hidden * argument / (3 * FFN_MULTIPLE))
        case "tokens":
            return math.ceil(argument * weights(model))
        case "batch":
            return sequences(weights(model), training.sequence_length)
        case "lr":
            return lr(weights(model))
        case "steps":
            return round(argument * steps(training.token_budget, training.global_batch_size, training.sequence_length))
    known = "hidden, ffn_hidden, tokens, batch, lr, steps"
    raise UserError.of("ladder", name, f"must be one of {known}", "correct the name in the interpolation")
