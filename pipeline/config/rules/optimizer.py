"""Rules of the group optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.schema import OptimizerConfig, RunConfig
from pipeline.config.zero_group import JOB

#: Keys that only some optimizers read -> these optimizers.
_READ_BY = {
    "eps": ("adamw", "ademamix", "muon"),
    **dict.fromkeys(("beta3", "alpha", "slow_warmup_steps"), ("ademamix",)),
    **dict.fromkeys(
        ("muon_momentum", "muon_nesterov", "muon_steps", "muon_adjust_lr", "muon_lr_factor", "muon_per_head"),
        ("muon",),
    ),
}


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if warm-up and decay are longer than the run, no decay has that length, or the optimizer does not read a key."""
    optimizer, steps = config.optimizer, config.training.steps
    if optimizer.decay_steps and optimizer.schedule != "wsd":
        rule = f"has no effect with optimizer.schedule={optimizer.schedule}, which decays from the end of the warm-up to the end of the run"
        yield Violation("optimizer.decay_steps", optimizer.decay_steps, rule, "remove it, or set optimizer.schedule=wsd")
    if steps and optimizer.warmup_steps + optimizer.decay_steps > steps:  # 0: known once the data is open
        rule = f"plus optimizer.decay_steps={optimizer.decay_steps} must not exceed training.steps={steps}"
        yield Violation("optimizer.warmup_steps", optimizer.warmup_steps, rule, "reduce them, or increase training.steps")
    for key, names in _READ_BY.items():
        value = getattr(optimizer, key)
        if optimizer.name not in names and value != getattr(OptimizerConfig(), key):
            rule = f"has no effect with optimizer.name={optimizer.name}"
            yield Violation(f"optimizer.{key}", value, rule, f"remove it, or set optimizer.name to {' or '.join(names)}")
    if optimizer.name == "muon":
        yield from _muon(config)


def _muon(config: RunConfig) -> Iterator[Violation]:
    """What is not done for matrices, whose update needs all of their elements."""
    rule = "is not supported with optimizer.name=muon"
    if config.parallel.zero_group != JOB:
        yield Violation("parallel.zero_group", config.parallel.zero_group, rule, f"set it to {JOB}, or choose optimizer.name=adamw")
    if config.lora.rank:
        yield Violation("lora.rank", config.lora.rank, rule, "choose optimizer.name=adamw for adapters")
    if config.optimizer.muon_per_head and hasattr(config.model, "kv_lora_rank"):
        rule = f"is not supported for model.family={config.model.family}: its projections mix the parts of a head"
        yield Violation("optimizer.muon_per_head", True, rule, "remove it")


def stage_violations(optimizer: OptimizerConfig, stage: str) -> Iterator[Violation]:
    """Yield a violation if the stage compares with AdamW only."""
    if optimizer.name != "adamw" and stage == "certify":
        rule = f"is not supported by stage={stage}, whose bounds are those of AdamW"
        yield Violation("optimizer.name", optimizer.name, rule, "set it to adamw: layout and model are the same")
