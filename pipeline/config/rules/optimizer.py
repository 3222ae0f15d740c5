"""Rules of the group optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config import warmup
from pipeline.config.optimizer import OPTIMIZERS, OptimizerConfig
from pipeline.config.schema import RunConfig

#: Largest decay rate of a moment in bf16. Half a unit in the last place is up to 2^-8 of the moment, and a change by 1 - beta of it must be
#: well above that: a smaller one is rounded away.
LARGEST_RATE_IN_BF16 = 0.99


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield what does not fit together: warm-up, decays and length of the run, or a key that schedule or optimizer do not read."""
    optimizer, steps = config.optimizer, config.training.steps
    if steps and optimizer.warmup_steps + optimizer.decay_steps > steps:  # 0: known once the data is open
        rule = f"plus optimizer.decay_steps={optimizer.decay_steps} must not exceed training.steps={steps}"
        yield Violation("optimizer.warmup_steps", optimizer.warmup_steps, rule, "reduce them, or increase training.steps")
    if optimizer.state_dtype == "bf16":
        for key in ("beta1", "beta2"):
            if (rate := getattr(optimizer, key)) > LARGEST_RATE_IN_BF16:
                rule = "changes a moment by less than three times what optimizer.state_dtype=bf16 resolves, 2^-8 of it: most would be lost"
                yield Violation(f"optimizer.{key}", rate, rule, f"set it to at most {LARGEST_RATE_IN_BF16}, or optimizer.state_dtype=fp32")
    if getattr(config.model, "parametrization", "standard") == "mup":
        yield from _mup(optimizer)
    if optimizer.name == "muon":
        yield from _muon(config)
    if optimizer.name == "schedule_free":
        yield from _schedule_free(config)
    if optimizer.qk_clip is not None:
        yield from _qk_clip(config, optimizer.qk_clip)
    if optimizer.schedule == "wsd" and optimizer.decay_ends:
        yield from _decay_ends(config)


def _mup(optimizer: OptimizerConfig) -> Iterator[Violation]:
    """What has no learning rates for model.parametrization=mup."""
    if not OPTIMIZERS[optimizer.name].has_mup:
        rule = "has other updates than AdamW and Muon, for which the learning rates of model.parametrization=mup are"
        yield Violation("optimizer.name", optimizer.name, rule, "choose adamw or muon, or model.parametrization=standard")
    if optimizer.name == "muon" and optimizer.muon_per_head:
        rule = "has no learning rate for model.parametrization=mup: the matrix of a head grows in one dimension only"
        yield Violation("optimizer.muon_per_head", True, rule, "remove it, or set model.parametrization=standard")


def _decay_ends(config: RunConfig) -> Iterator[Violation]:
    """Every decay ends before the run, and begins after the warm-up and the decay before it have ended."""
    optimizer, training = config.optimizer, config.training
    before, phase = warmup.lr_steps(optimizer, training), "the warm-up"
    keys = [*(f"optimizer.decay_ends.{number}" for number in range(len(optimizer.decay_ends))), "training.steps"]
    for key, (begin, end) in zip(keys, warmup.decays(optimizer, training), strict=True):
        if 0 < training.steps <= end and key != "training.steps":
            rule = f"is not before training.steps={training.steps}, where the last decay ends"
            yield Violation(key, end, rule, "remove it, or increase training.steps")
            return
        if begin < before and end:  # 0: known once the data is open
            rule = f"is the end of a decay of {end - begin} steps, which begins before the end of {phase} at step {before}"
            least = before + (optimizer.decay_steps or max(1, before // 9))
            yield Violation(key, end, rule, f"set it to at least {least}, or reduce optimizer.decay_steps")
            return
        before, phase = end, "the decay before it"


def _schedule_free(config: RunConfig) -> Iterator[Violation]:
    """The optimizer averages the weights itself, at a constant rate."""
    optimizer, average = config.optimizer, config.training.ema
    if optimizer.schedule != "constant":
        rule = "is a decay, in whose place optimizer.name=schedule_free averages the weights"
        yield Violation("optimizer.schedule", optimizer.schedule, rule, "set optimizer.schedule=constant, as optimizer=schedule_free does")
    if average is not None:
        rule = "averages weights that optimizer.name=schedule_free has averaged: checkpoints, validation and exports have its average"
        yield Violation("training.ema", average, rule, "remove it")


def _qk_clip(config: RunConfig, threshold: float) -> Iterator[Violation]:
    """The logits are measured on the rank that has all keys, and the weights are scaled before the forward pass reads them."""
    key, parallel = "optimizer.qk_clip", config.parallel
    if parallel.context > 1:
        rule = f"requires all keys of a sequence on one rank, and parallel.context={parallel.context} divides them"
        yield Violation(key, threshold, rule, "set parallel.context=1, or remove it")
    if parallel.offload == "optimizer":
        rule = "scales master weights on the device, and parallel.offload=optimizer has them in host memory"
        yield Violation(key, threshold, rule, "set parallel.offload=none, or remove it")
    if config.optimizer.name == "schedule_free":
        rule = "scales weights after an update, and those of optimizer.name=schedule_free are averages of all updates"
        yield Violation(key, threshold, rule, "choose another optimizer, or remove it")
    if getattr(config.model, "query_key_norm", False):
        rule = f"has no effect on model.family={config.model.family} here: its queries and keys have norms, which undo a change of scale"
        yield Violation(key, threshold, rule, "remove it")
    if config.lora.rank or config.training.frozen:
        rule = "scales the weights of queries and keys, which adapters (lora.rank) and training.frozen leave as they are"
        yield Violation(key, threshold, rule, "remove it")


def _muon(config: RunConfig) -> Iterator[Violation]:
    """What is not done for matrices, whose update needs all of their elements."""
    if config.lora.rank:
        rule = "is not supported with optimizer.name=muon: orthogonal updates of both factors of an adapter are none of the weight"
        yield Violation("lora.rank", config.lora.rank, rule, "choose optimizer.name=adamw for adapters")
    if config.optimizer.muon_per_head and hasattr(config.model, "kv_lora_rank"):
        rule = f"is not supported for model.family={config.model.family}: its projections mix the parts of a head"
        yield Violation("optimizer.muon_per_head", True, rule, "remove it")
    if config.optimizer.muon_per_head and getattr(config.model, "linear_layers", False):
        rule = f"is not supported for model.family={config.model.family}: the heads of its linear attention are others than model.heads"
        yield Violation("optimizer.muon_per_head", True, rule, "remove it")
    if config.optimizer.muon_per_head and (heads := getattr(config.model, "global_kv_heads", None)):
        rule = f"is not supported with model.global_kv_heads={heads}, other heads than those of the local layers"
        yield Violation("optimizer.muon_per_head", True, rule, "remove it")
