"""Settings of a stage that another setting makes it ignore: one row for each such setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any, cast

from pipeline.common.errors import Violation
from pipeline.config import loss_weights, phases, warmup
from pipeline.config.cleaning import STEPS, CleanConfig
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES, Generate


@dataclass(frozen=True)
class Row:
    """Keys that are read under a condition.

    Attributes:
        switch: the key that decides; "objective" is that of the run.
        keys: dotted; each is refused if its value is not the default of its field.
        fix: what makes them read.
        read: whether a configuration reads them; default: where the switch is set, and not 0 or off.
        stages: those to which it applies. Others may have the settings of a file or of a run.
    """

    switch: str
    keys: tuple[str, ...]
    fix: str
    read: Callable[[RunConfig], bool] | None = None
    stages: tuple[str, ...] = (*TRAINING_STAGES, "certify")

    def is_read(self, config: RunConfig) -> bool:
        """Whether a configuration reads the keys."""
        return bool(attrgetter(self.switch)(config)) if self.read is None else self.read(config)


def _optimizer(key: str) -> Row:
    names = [name for name, kind in OPTIMIZERS.items() if key in kind.keys]
    return Row("optimizer.name", (f"optimizer.{key}",), f"set it to {' or '.join(names)}", lambda config: config.optimizer.name in names)


def _objective(names: tuple[str, ...], keys: tuple[str, ...], fix: str) -> Row:
    return Row("objective", keys, fix, lambda config: config.objective in names)


def _step(name: str) -> Row:
    keys = _of(f"clean.{name}", *(field.name for field in fields(getattr(CleanConfig(), name))))
    return Row("clean.steps", keys, f"add {name} to clean.steps", lambda config: name in config.clean.steps, ("shard",))


def _of(group: str, *keys: str) -> tuple[str, ...]:
    return tuple(f"{group}.{key}" for key in keys)


#: Of the layout that the user names. They may be set for several layouts, of which a job or a search chooses one that does not read them.
LAYOUT_ROWS = (
    Row("parallel.pipeline", _of("parallel", "balance", "layers_per_stage"), "set it to 2 or more", lambda c: c.parallel.pipeline > 1),
    Row("parallel.context", ("parallel.context_kind",), "set it to 2 or more", lambda config: config.parallel.context > 1),
    Row(
        "parallel.expert_padding",
        ("parallel.expert_buffer",),
        "set it to true without model.capacity_factor, with experts on several ranks",
        lambda config: config.buffers_experts,
    ),
)
_MASKING = ("masked", "masked_diffusion", "classification")
ROWS = (
    Row("parallel.pipeline", _of("parallel", "schedule", "stages_per_rank"), "set it to 2 or more", lambda c: c.parallel.pipeline > 1),
    Row("precision.dtype", _of("precision", "initial_loss_scale", "loss_scale_window"), "set fp16", lambda c: c.precision.dtype == "fp16"),
    Row("precision.fp8", ("precision.fp8_exclude_layers",), "set precision=fp8", lambda config: config.precision.fp8 != "none"),
    *(_optimizer(key) for key in dict.fromkeys(key for kind in OPTIMIZERS.values() for key in kind.keys)),
    Row(
        "optimizer.schedule",
        _of("optimizer", "decay_steps", "decay_shape", "decay_ends"),
        "set optimizer.schedule=wsd",
        lambda config: config.optimizer.schedule == "wsd",
    ),
    Row("optimizer.schedule", ("optimizer.min_lr_ratio",), "choose another schedule", lambda c: c.optimizer.schedule != "constant"),
    Row(
        "optimizer.warmup_steps",
        ("optimizer.warmup_ratio",),
        "set optimizer.warmup_steps=0",
        lambda config: not config.optimizer.warmup_steps or config.stage.name == "finetune",  # which has a ratio by default
    ),
    Row("training.spike_factor", _of("training", "spike_window", "spike_patience", "max_rewinds"), "set training.spike_factor, such as 6"),
    Row("training.profile", ("training.profile_ranks",), "name steps in training.profile"),
    Row("training.goldfish_k", ("training.goldfish_context",), "set training.goldfish_k, such as 4"),
    Row(
        "training.activation_checkpointing",
        ("training.activation_budget",),
        "set training.activation_checkpointing=selective",
        lambda config: config.training.activation_checkpointing == "selective",
    ),
    _objective(("dpo",), _of("training", "dpo_beta", "preference_loss", "simpo_margin"), "set training.objective=dpo"),
    _objective(("masked_diffusion",), ("training.diffusion_eps",), "set training.objective=masked_diffusion"),
    _objective(("causal",), ("training.goldfish_k",), "pretrain a decoder"),
    Row(
        "model.family",
        ("training.delta_rule",),
        "train a model with linear attention (model=qwen3-next-tiny)",
        lambda config: hasattr(config.model, "linear_key_heads"),
    ),
    Row(
        "training.preference_loss",
        ("training.simpo_margin",),
        "set training.preference_loss=simpo",
        lambda config: config.objective != "dpo" or config.training.preference_loss == "simpo",
    ),
    Row("data.infill.rate", _of("data.infill", "spm_rate", "prefix", "middle", "suffix"), "set a rate"),
    Row("data.blend", ("data.blend_weights",), "name the corpora in data.blend", lambda c: bool(c.data.blend or c.data.phases)),
    _objective(
        _MASKING,
        _of("data.masking", "rate", "random", "keep", "mask", "first", "between"),
        "train a model of masked tokens (model=bert-tiny)",
    ),
    _objective(("causal",), ("data.teacher",), "train a decoder on token shards"),
    Row("data.teacher", ("training.teacher_weight",), "name the folder of a teacher"),
    _objective(("causal",), ("data.remove",), "leave the documents out with stage=shard, in a new run"),
    _objective(("span_corruption",), _of("data.spans", "rate", "mean_length", "sentinel"), "train a T5 (model=t5-tiny)"),
    _objective(("pairs",), _of("data.pairs", "train", "validation", "source", "target"), "train an encoder-decoder on pairs"),
    Row(
        "evaluation.every",
        _of("evaluation", "validation", "tasks", "task_folder", "few_shot", "limit", "nodes", "tasks_per_node", "time", "overrides"),
        "set evaluation.every to a number of steps",
    ),
    Row(
        "checkpoint.initialize_from",
        _of("checkpoint", "expert_noise", "expert_reinitialized", "new_blocks"),
        "start stage=pretrain from the run of a smaller model",
        lambda config: config.checkpoint.initialize_from is not None and config.stage.name != "finetune",
    ),
    Row("checkpoint.resume", ("checkpoint.skip_damaged",), "set it to auto", lambda config: config.checkpoint.resume != "none"),
    Row(
        "lora.rank",
        _of("lora", "alpha", "dropout", "targets", "rank_pattern", "alpha_pattern"),
        "set lora.rank, for example 16",
        lambda config: config.lora.rank > 0 or config.lora.adapter is not None,
    ),
    Row(
        "evaluation.tasks",
        _of("evaluation", "task_folder", "few_shot", "limit"),
        "name tasks of lm-eval",
        lambda config: bool(config.evaluation.tasks) or not config.evaluation.every,
    ),
    Row(
        "model.rope_scaling",
        ("model.rope_factor",),
        "set model.rope_scaling, such as yarn",
        lambda config: getattr(config.model, "rope_scaling", "") != "none",
    ),
    Row("certify.required", ("certify.certificate",), "set certify.required=true"),
    Row("cluster.preflight", ("cluster.preflight_seconds",), "set it to auto", lambda config: config.cluster.preflight != "off"),
    Row(
        "dedup.near",
        _of("dedup", "threshold", "shingle", "bands", "rows"),
        "set dedup.near=true",
        lambda config: config.dedup.near or config.dedup.save_signatures,
        ("shard",),
    ),
    Row("dedup.url", ("dedup.url_field",), "set dedup.url=true", stages=("shard",)),
    Row("dedup.paragraphs", ("dedup.paragraph_characters",), "set dedup.paragraphs=true", stages=("shard",)),
    Row("dedup.spans", ("dedup.span_megabytes",), "set dedup.spans, such as 50", stages=("shard",)),
    *(_step(step.name) for step in fields(CleanConfig) if step.name in STEPS and is_dataclass(getattr(CleanConfig(), step.name))),
    Row("stage.temperature", _of("stage", "top_k", "top_p", "min_p"), "set one", stages=("generate",)),
    Row("stage.distill", ("stage.distill_top_k",), "name a folder", stages=("evaluate",)),
    Row("stage.beams", ("stage.length_penalty",), "set it to 2 or more", lambda c: _generate(c).beams > 1, ("generate",)),
    Row("stage.draft", ("stage.draft_tokenizer",), "name a draft model", stages=("generate",)),
    Row("stage.engine", ("stage.export",), "set stage.engine=vllm", lambda c: _generate(c).engine == "vllm", ("generate",)),
    Row(
        "stage.draft",
        ("stage.speculative_tokens",),
        "name a draft model, or set stage.prompt_lookup=true",
        lambda c: _generate(c).draft is not None or _generate(c).prompt_lookup,
        ("generate",),
    ),
)


def _generate(config: RunConfig) -> Generate:
    return cast(Generate, config.stage)


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the settings that the stage ignores."""
    yield from unread(config, ROWS)
    if config.stage.name not in (*TRAINING_STAGES, "certify"):
        return
    if config.data.instructions.reference is not None and not config.has_reference:
        rule = "is not read by a loss without a reference model"
        fix = "remove it, or set training.objective=dpo and another training.preference_loss than simpo and orpo"
        yield Violation("data.instructions.reference", config.data.instructions.reference, rule, fix)


def unread(config: RunConfig, rows: Iterable[Row]) -> Iterator[Violation]:
    """Yield the keys of rows that are set and not read."""
    for row in rows:
        for key in row.keys if config.stage.name in row.stages and not row.is_read(config) else ():
            value, default = _value_and_default(config, key)
            if value != default:
                switch = (
                    f"{row.switch}={_value_and_default(config, row.switch)[0]}"
                    if "." in row.switch
                    else f"the objective {config.objective}"
                )
                yield Violation(key, value, f"has no effect with {switch}", f"remove it, or {row.fix}")


def unlike(config: RunConfig, values: Mapping[str, Any], rule: str, fix: str) -> Iterator[Violation]:
    """Yield a violation of each key that has another value than this one; {key} and {value} in the fix stand for the key and this value."""
    for key, legal in values.items():
        if (value := attrgetter(key)(config)) != legal:
            yield Violation(key, value, rule, fix.format(key=key, value=legal))


def beyond_the_end(config: RunConfig) -> Iterator[str]:
    """Yield what a training job says of warm-ups and phases that its last step does not reach. It may be continued with more steps."""
    steps, training = config.training.steps, config.training
    for name in ("batch_rampup", "sequence_warmup", *(f"{name}_schedule" for name in loss_weights.NAMES)):
        entries: Any = getattr(training, name)
        if entries and entries[-1].until_step >= steps:
            yield f"training.{name} lasts until step {entries[-1].until_step}: what follows it has no effect with training.steps={steps}"
    for number, begin in enumerate(phases.starts(config)):
        if begin >= steps > 0:
            yield f"training.phases.{number} begins at step {begin}: it has no effect with training.steps={steps}"
    tokens = warmup.samples(training, steps) * training.sample_length
    for number, phase in enumerate(config.data.phases, 1):
        if phase.until_tokens is not None and phase.until_tokens >= tokens > 0:
            yield f"data.phases.{number} begins at token {phase.until_tokens:,}: it has no effect in a run of {tokens:,} tokens"


def _value_and_default(config: RunConfig, key: str) -> tuple[Any, Any]:
    """The value of a dotted key, and the default of its field; None for what has none."""
    node: Any = config
    default = None
    for name in key.split("."):
        field = next((field for field in fields(node) if field.name == name), None)
        if field is not None and field.default_factory is not MISSING:
            default = field.default_factory()
        elif field is not None:
            default = field.default
        node = getattr(node, name, default)
    return node, default
