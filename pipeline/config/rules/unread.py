"""Settings of a stage that another setting makes it ignore: one row for each such setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, cast

from pipeline.common.errors import Violation
from pipeline.config import loss_weights, phases, preferences
from pipeline.config.cleaning import STEPS, CleanConfig
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES, Evaluate, Generate


@dataclass(frozen=True)
class Row:
    """Keys that are read under a condition.

    Attributes:
        switch: the key that decides; "objective" is that of the run.
        keys: dotted; each is refused if its value is not the default of its field.
        read: whether a configuration reads them.
        fix: what makes them read.
        stages: those to which it applies. Others may have the settings of a file or of a run.
    """

    switch: str
    keys: tuple[str, ...]
    read: Callable[[RunConfig], bool]
    fix: str
    stages: tuple[str, ...] = (*TRAINING_STAGES, "certify")


def _optimizer(key: str) -> Row:
    names = [name for name, kind in OPTIMIZERS.items() if key in kind.keys]
    return Row("optimizer.name", (f"optimizer.{key}",), lambda config: config.optimizer.name in names, f"set it to {' or '.join(names)}")


def _objective(names: tuple[str, ...], keys: tuple[str, ...], fix: str) -> Row:
    return Row("objective", keys, lambda config: config.objective in names, fix)


def _step(name: str) -> Row:
    keys = _of(f"clean.{name}", *(field.name for field in fields(getattr(CleanConfig(), name))))
    return Row("clean.steps", keys, lambda config: name in config.clean.steps, f"add {name} to clean.steps", ("shard",))


def _of(group: str, *keys: str) -> tuple[str, ...]:
    return tuple(f"{group}.{key}" for key in keys)


#: Of the layout that the user names. They may be set for several layouts, of which a job or a search chooses one that does not read them.
LAYOUT_ROWS = (
    Row("parallel.pipeline", _of("parallel", "balance", "layers_per_stage"), lambda c: c.parallel.pipeline > 1, "set it to 2 or more"),
    Row("parallel.context", ("parallel.context_kind",), lambda config: config.parallel.context > 1, "set it to 2 or more"),
)
_MASKING = ("masked", "masked_diffusion", "classification")
ROWS = (
    Row(
        "parallel.pipeline",
        _of("parallel", "schedule", "stages_per_rank"),
        lambda config: config.parallel.pipeline > 1,
        "set it to 2 or more",
    ),
    Row("precision.dtype", _of("precision", "initial_loss_scale", "loss_scale_window"), lambda c: c.precision.dtype == "fp16", "set fp16"),
    Row("precision.fp8", ("precision.fp8_exclude_layers",), lambda config: config.precision.fp8 != "none", "set precision=fp8"),
    *(_optimizer(key) for key in dict.fromkeys(key for kind in OPTIMIZERS.values() for key in kind.keys)),
    Row(
        "optimizer.schedule",
        _of("optimizer", "decay_steps", "decay_shape", "decay_ends"),
        lambda config: config.optimizer.schedule == "wsd",
        "set optimizer.schedule=wsd",
    ),
    Row("optimizer.schedule", ("optimizer.min_lr_ratio",), lambda c: c.optimizer.schedule != "constant", "choose another schedule"),
    Row(
        "optimizer.warmup_steps",
        ("optimizer.warmup_ratio",),
        lambda config: not config.optimizer.warmup_steps or config.stage.name == "finetune",  # which has a ratio by default
        "set optimizer.warmup_steps=0",
    ),
    Row(
        "training.spike_factor",
        _of("training", "spike_window", "spike_patience", "max_rewinds"),
        lambda config: config.training.spike_factor > 0,
        "set training.spike_factor, such as 6",
    ),
    Row("training.profile", ("training.profile_ranks",), lambda config: bool(config.training.profile), "name steps in training.profile"),
    Row("training.goldfish_k", ("training.goldfish_context",), lambda c: c.training.goldfish_k > 0, "set training.goldfish_k, such as 4"),
    Row(
        "training.activation_checkpointing",
        ("training.activation_budget",),
        lambda config: config.training.activation_checkpointing == "selective",
        "set training.activation_checkpointing=selective",
    ),
    _objective(("dpo",), _of("training", "dpo_beta", "preference_loss", "simpo_margin"), "set training.objective=dpo"),
    _objective(("masked_diffusion",), ("training.diffusion_eps",), "set training.objective=masked_diffusion"),
    _objective(("causal",), ("training.goldfish_k",), "pretrain a decoder"),
    Row(
        "training.preference_loss",
        ("training.simpo_margin",),
        lambda config: config.objective != "dpo" or config.training.preference_loss == "simpo",
        "set training.preference_loss=simpo",
    ),
    Row("data.infill.rate", _of("data.infill", "spm_rate", "prefix", "middle", "suffix"), lambda c: c.data.infill.rate > 0, "set a rate"),
    Row(
        "data.blend",
        ("data.blend_weights",),
        lambda config: bool(config.data.blend or config.data.phases),
        "name the corpora in data.blend",
    ),
    _objective(
        _MASKING,
        _of("data.masking", "rate", "random", "keep", "mask", "first", "between"),
        "train a model of masked tokens (model=bert-tiny)",
    ),
    _objective(("causal",), ("data.teacher",), "train a decoder on token shards"),
    Row("data.teacher", ("training.teacher_weight",), lambda config: config.data.teacher is not None, "name the folder of a teacher"),
    _objective(("causal",), ("data.remove",), "leave the documents out with stage=shard, in a new run"),
    _objective(("span_corruption",), _of("data.spans", "rate", "mean_length", "sentinel"), "train a T5 (model=t5-tiny)"),
    _objective(("pairs",), _of("data.pairs", "train", "validation", "source", "target"), "train an encoder-decoder on pairs"),
    Row(
        "evaluation.every",
        _of("evaluation", "validation", "tasks", "task_folder", "few_shot", "limit", "nodes", "tasks_per_node", "time", "overrides"),
        lambda config: config.evaluation.every > 0,
        "set evaluation.every to a number of steps",
    ),
    Row(
        "checkpoint.initialize_from",
        _of("checkpoint", "expert_noise", "expert_reinitialized", "new_blocks"),
        lambda config: config.checkpoint.initialize_from is not None and config.stage.name != "finetune",
        "start stage=pretrain from the run of a smaller model",
    ),
    Row("checkpoint.resume", ("checkpoint.skip_damaged",), lambda config: config.checkpoint.resume != "none", "set it to auto"),
    Row(
        "lora.rank",
        _of("lora", "alpha", "dropout", "targets", "rank_pattern", "alpha_pattern"),
        lambda config: config.lora.rank > 0 or config.lora.adapter is not None,
        "set lora.rank, for example 16",
    ),
    Row(
        "evaluation.tasks",
        _of("evaluation", "task_folder", "few_shot", "limit"),
        lambda config: bool(config.evaluation.tasks) or not config.evaluation.every,
        "name tasks of lm-eval",
    ),
    Row(
        "model.rope_scaling",
        ("model.rope_factor",),
        lambda config: getattr(config.model, "rope_scaling", "") != "none",
        "set model.rope_scaling, such as yarn",
    ),
    Row("certify.required", ("certify.certificate",), lambda config: config.certify.required, "set certify.required=true"),
    Row("cluster.preflight", ("cluster.preflight_seconds",), lambda config: config.cluster.preflight != "off", "set it to auto"),
    Row(
        "dedup.near",
        _of("dedup", "threshold", "shingle", "bands", "rows"),
        lambda config: config.dedup.near or config.dedup.save_signatures,
        "set dedup.near=true",
        ("shard",),
    ),
    Row("dedup.url", ("dedup.url_field",), lambda config: config.dedup.url, "set dedup.url=true", ("shard",)),
    Row("dedup.paragraphs", ("dedup.paragraph_characters",), lambda c: c.dedup.paragraphs, "set dedup.paragraphs=true", ("shard",)),
    *(_step(step.name) for step in fields(CleanConfig) if step.name in STEPS and is_dataclass(getattr(CleanConfig(), step.name))),
    Row("stage.temperature", _of("stage", "top_k", "top_p", "min_p"), lambda c: _generate(c).temperature > 0, "set one", ("generate",)),
    Row("stage.distill", ("stage.distill_top_k",), lambda c: cast(Evaluate, c.stage).distill is not None, "name a folder", ("evaluate",)),
    Row("stage.beams", ("stage.length_penalty",), lambda c: _generate(c).beams > 1, "set it to 2 or more", ("generate",)),
    Row("stage.draft", ("stage.draft_tokenizer",), lambda c: _generate(c).draft is not None, "name a draft model", ("generate",)),
    Row("stage.engine", ("stage.export",), lambda c: _generate(c).engine == "vllm", "set stage.engine=vllm", ("generate",)),
    Row(
        "stage.draft",
        ("stage.speculative_tokens",),
        lambda c: _generate(c).draft is not None or _generate(c).prompt_lookup,
        "name a draft model, or set stage.prompt_lookup=true",
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
    if config.data.instructions.reference is not None and not preferences.has_reference(config):
        rule = "is not read by a loss without a reference model"
        fix = "remove it, or set training.objective=dpo and another training.preference_loss than simpo and orpo"
        yield Violation("data.instructions.reference", config.data.instructions.reference, rule, fix)


def unread(config: RunConfig, rows: Iterable[Row]) -> Iterator[Violation]:
    """Yield the keys of rows that are set and not read."""
    for row in rows:
        for key in row.keys if config.stage.name in row.stages and not row.read(config) else ():
            value, default = _value_and_default(config, key)
            if value != default:
                switch = (
                    f"{row.switch}={_value_and_default(config, row.switch)[0]}"
                    if "." in row.switch
                    else f"the objective {config.objective}"
                )
                yield Violation(key, value, f"has no effect with {switch}", f"remove it, or {row.fix}")


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
