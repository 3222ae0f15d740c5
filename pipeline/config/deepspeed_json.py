"""The configuration of DeepSpeed's engine (parallel.deepspeed). Imports neither DeepSpeed nor torch.

The file goes to deepspeed.initialize as it is, with "auto" filled in. What the rules, the planner and the checkpoints must know before
(batch sizes, precision, clipping, ZeRO stage, offload) becomes settings of the run.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped] # PyYAML has no types

from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation

if TYPE_CHECKING:
    from pipeline.config.layout import Layout
    from pipeline.config.optimizer import OptimizerConfig
    from pipeline.config.parallel import ParallelConfig
    from pipeline.config.schema import PrecisionConfig
    from pipeline.config.training import TrainingConfig

KEY = "parallel.deepspeed"
AUTO = "auto"
#: The keys of the first level that DeepSpeed 0.19 reads. It reads past others, such as one with a spelling mistake.
KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print"),
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "bf16", "fp16", "optimizer", "scheduler"),
    *("communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients", "gradient_predivide_factor"),
    *("gradient_allreduce_op", "disable_allgather", "sparse_gradients", "data_types", "activation_checkpointing", "aio", "checkpoint"),
    *("wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers", "comms_logger", "flops_profiler"),
    *("tensorboard", "csv_monitor", "wandb", "comet", "disable_python_gc", "dataloader_drop_last", "nebula", "datastates_ckpt"),
)
#: Keys whose value is an object.
SECTIONS = (
    *("zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
    *("bf16", "fp16", "optimizer", "optimizer.params", "scheduler", "scheduler.params"),
)
#: Section -> what is refused of it unless it is off, and what to set instead.
OFF = {
    "amp": ("is Apex's mixed precision", 'remove it, and set "bf16": {"enabled": true}'),
    "torch_autocast": ("casts beside precision.dtype", 'remove it, and set "bf16": {"enabled": true}'),
    "autotuning": ("starts other jobs", "remove it, and run stage=plan stage.search=true"),
    "elasticity": ("changes the batch with the ranks", "remove it; cluster.min_nodes lets the layout follow the nodes"),
    "curriculum_learning": ("changes the data", "remove it, and set training.sequence_warmup with parallel.engine=native"),
    "data_efficiency": ("changes the data", "remove it, and set training.sequence_warmup with parallel.engine=native"),
    "progressive_layer_drop": ("drops layers", "remove it"),
    "eigenvalue": ("is computed for MoQ alone", "remove it"),
    "quantize_training": ("quantizes weights", "remove it, and set training.fake_quantize=int8"),
    "compression_training": ("quantizes weights", "remove it, and set training.fake_quantize=int8"),
    "weight_quantization": ("quantizes weights", "remove it, and run stage=convert stage.quantize=int8"),
    "sparse_attention": ("replaces attention", "remove it, and set training.attention_group"),
    "hybrid_engine": ("generates text", "remove it, and run stage=generate"),
    "compile": ("needs DeepSpeed's compiler passes, which nobody has run here", "remove it, and set training.compile=on"),
    "pipeline": ("needs DeepSpeed's pipeline module", "remove it, and set parallel.engine=native parallel.pipeline"),
    "expert_parallel": ("needs DeepSpeed's experts", "remove it, and set parallel.engine=native parallel.expert"),
    "tensor_parallel": ("slices the modules of transformers", "remove it, and set parallel.tensor"),
    "zero_optimization.zenflow": ("updates some weights later", "remove it"),
    "zero_optimization.offload_optimizer.super_offload": ("has another optimizer state", "set it to false"),
    "zero_optimization.cpu_offload": ("is deprecated", 'set "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": ("is deprecated", 'set "offload_param": {"device": "cpu"}'),
    "bf16.bf16_master_weights_and_grads": ("keeps master weights in bf16, and checkpoints have fp32", "set it to false"),
    "fp16.fp16_master_weights_and_grads": ("keeps master weights in fp16, and checkpoints have fp32", "set it to false"),
}
#: (key, accepted values, rule, fix)
ONLY = (
    ("optimizer.type", ("Adam", "AdamW", "adam", "adamw"), "has a state that checkpoints do not store", "set it to AdamW"),
    ("zero_optimization.offload_optimizer.device", ("none", "cpu", None), "is on a disk that checkpoints do not read", "set it to cpu"),
    ("zero_optimization.offload_param.device", ("none", "cpu", None), "is on a disk that checkpoints do not read", "set it to cpu"),
    ("gradient_allreduce_op", ("mean",), "is not the mean over the samples of a step", "set it to mean"),
)
#: What the file sets, also if it lacks the key: (our key, the key of the file, DeepSpeed's default). Batch sizes are ours by default.
SETS = (
    ("training.global_batch_size", "train_batch_size", None),
    ("training.micro_batch_size", "train_micro_batch_size_per_gpu", None),
    ("optimizer.gradient_clipping", "gradient_clipping", 0.0),
    ("parallel.zero_stage", "zero_optimization.stage", 0),
)


@dataclass
class Settings:
    """What a file says.

    Attributes:
        values: our key -> (value, key of the file), also of what it leaves out.
        violations: of what is refused.
    """

    path: str
    document: dict[str, Any]
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key."""
        node: Any = self.document
        for name in key.split("."):
            node = node.get(name, default) if isinstance(node, dict) else default
        return node

    def refuse(self, key: str, value: Any, rule: str, fix: str) -> None:
        """Add a violation of a key of the file."""
        self.violations.append(Violation(f"{self.path}: {key}", json.dumps(value), rule, fix))


@functools.cache
def read(path: str) -> Settings:
    """Read a file.

    Raises:
        UserError: it is missing, or is not a JSON object.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise UserError.of(KEY, path, f"cannot be read: {error.strerror}", "name a JSON file with a DeepSpeed configuration") from error
    except ValueError as error:
        raise UserError.of(KEY, path, f"is not JSON: {error}", "correct the file; JSON has no comments") from error
    if not isinstance(document, dict):
        raise UserError.of(KEY, path, "is not a JSON object", "name a JSON file with a DeepSpeed configuration")
    settings = Settings(path, document)
    for key in SECTIONS:
        if not isinstance(value := settings.get(key, {}), dict | None):
            settings.refuse(key, value, "is not a section", "correct it to {...}")
    known = (*KEYS, *(key for key in OFF if "." not in key))
    for key, value in document.items():
        if key not in known and not key.startswith(("_", "#", "/")):  # a comment
            close = difflib.get_close_matches(key, known, n=2)
            settings.refuse(key, value, "is no key of DeepSpeed", f"did you mean {' or '.join(close)}?" if close else "remove it")
    for key, (rule, fix) in OFF.items():
        if not _is_off(value := settings.get(key)):
            settings.refuse(key, value, rule, fix)
    for key, values, rule, fix in ONLY:
        if (value := settings.get(key)) is not None and value not in values:
            settings.refuse(key, value, rule, fix)
    settings.values = {"parallel.engine": ("deepspeed", "the file")}
    for ours, key, default in SETS:
        if (value := settings.get(key, default)) is None or value == AUTO:
            continue
        kind = float if isinstance(default, float) else int
        if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
            rule = f"is not {'a number' if kind is float else 'an integer'}"
            settings.refuse(key, value, rule, f'write it without quotes, or set it to "auto" and {ours} here')
        else:
            settings.values[ours] = (kind(value), key)
    if settings.get("zero_optimization.offload_optimizer.device") != AUTO:
        offloads = settings.get("zero_optimization.offload_optimizer.device") == "cpu"
        settings.values["parallel.offload"] = ("optimizer" if offloads else "none", "zero_optimization.offload_optimizer.device")
    if not isinstance(count := settings.get("gradient_accumulation_steps", AUTO), int) and count != AUTO:
        settings.refuse("gradient_accumulation_steps", count, "is not an integer", "write it without quotes")
    enabled = {name: settings.get(f"{name}.enabled", default=False) for name in ("bf16", "fp16")}
    for name, on in enabled.items():
        if not isinstance(on, bool) and on != AUTO:
            settings.refuse(f"{name}.enabled", on, "is neither true nor false", "write it without quotes")
    kinds = [name for name, on in enabled.items() if on is True]
    if len(kinds) == 2:
        settings.refuse("fp16.enabled", value=True, rule="contradicts bf16.enabled=true", fix="set one of them to false")
    if AUTO not in enabled.values() or kinds:
        settings.values["precision.dtype"] = (kinds[0] if kinds else "fp32", f"{kinds[0] if kinds else 'bf16'}.enabled")
    return settings


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As DeepSpeed, refuse a key that occurs twice."""
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} occurs twice")
    return dict(pairs)


def _is_off(value: Any) -> bool:
    """Whether a section is absent, empty, or disabled."""
    return value in (None, False, {}, AUTO) or (isinstance(value, dict) and value.get("enabled") is False)


def filled(
    parallel: ParallelConfig, training: TrainingConfig, optimizer: OptimizerConfig, precision: PrecisionConfig, layout: Layout
) -> dict[str, Any]:
    """Return the configuration for deepspeed.initialize: that of the file, with "auto" filled in; without a file that of the settings."""
    document = copy.deepcopy(read(parallel.deepspeed).document) if parallel.deepspeed else _document(parallel, optimizer, precision)
    micro, batch = training.micro_batch_size, training.global_batch_size
    document |= {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": batch // (micro * layout.batch_shards),
    }
    if "optimizer" not in document:  # then it is PyTorch's
        document = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False} | document
    warmup = optimizer.warmup_steps or int(optimizer.warmup_ratio * training.steps)
    ours = {
        "gradient_clipping": optimizer.gradient_clipping,
        "stage": parallel.zero_stage,
        "device": "cpu" if parallel.offload == "optimizer" else "none",
        **dict.fromkeys(("lr", "warmup_max_lr"), optimizer.lr),
        "betas": [optimizer.beta1, optimizer.beta2],
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "warmup_min_lr": 0.0,
        "warmup_num_steps": max(warmup, 1),  # DeepSpeed refuses 0
        "total_num_steps": training.steps,
    }
    for name in ("bf16", "fp16"):
        if document.get(name, {}).get("enabled") == AUTO:
            document[name]["enabled"] = precision.dtype == name
    _fill(document, ours)
    return document


def _document(parallel: ParallelConfig, optimizer: OptimizerConfig, precision: PrecisionConfig) -> dict[str, Any]:
    """The configuration of a run without a file."""
    config: dict[str, Any] = {"gradient_clipping": optimizer.gradient_clipping, "zero_optimization": {"stage": parallel.zero_stage}}
    if parallel.offload == "optimizer":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if precision.dtype == "fp16":
        power = int(precision.initial_loss_scale).bit_length() - 1
        config["fp16"] = {"enabled": True, "initial_scale_power": power, "loss_scale_window": precision.loss_scale_window, "hysteresis": 1}
    elif precision.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if precision.dtype != "fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # as the engine of this program adds the gradients of micro-batches
    return config


def _fill(node: dict[str, Any], ours: dict[str, Any]) -> None:
    """Replace "auto" in nested dictionaries; without a value of ours the key is removed, and DeepSpeed takes its default."""
    for name, value in list(node.items()):
        if isinstance(value, dict):
            _fill(value, ours)
        elif value == AUTO and name in ours:
            node[name] = ours[name]
        elif value == AUTO:
            del node[name]


def expanded(overrides: Sequence[str], folders: Sequence[Path]) -> tuple[list[str], list[Violation]]:
    """Add the settings of the file to a command line, before those that it has; what it sets itself is left out.

    The rules compare both (config/rules/deepspeed.py).

    Args:
        overrides: in Hydra's grammar.
        folders: with configuration groups.

    Returns:
        The overrides, and the violations of the file.
    """
    named = [override.partition("=")[2].strip("'\"") for override in overrides if override.lstrip("+~").startswith(f"{KEY}=")]
    if not named or named[-1] in ("", "null"):
        return list(overrides), []
    try:
        settings = read(named[-1])
    except UserError as error:
        return list(overrides), list(error.violations)
    written = set(_written(overrides, folders))
    added = [f"{key}={_text(value)}" for key, (value, _) in settings.values.items() if key not in written]
    return [*added, *overrides], settings.violations


def _text(value: Any) -> str:
    """A value in Hydra's grammar."""
    return f"'{value}'" if isinstance(value, str) else repr(value)


def _written(overrides: Sequence[str], folders: Sequence[Path]) -> Iterator[str]:
    """Yield the keys that a command line sets, itself or by the files of groups and experiments that it names."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        yield key
        if re.fullmatch(r"\w+", key):
            for option in re.findall(r"[\w.-]+", value):
                yield from _keys_of_file(key, option, folders)


def _keys_of_file(group: str, option: str, folders: Sequence[Path]) -> Iterator[str]:
    """Yield the keys that a file of a group sets, with those of the files that an experiment chooses."""
    for path in (folder / group / f"{option}.yaml" for folder in folders):
        if not path.is_file() or not isinstance(content := yaml.safe_load(path.read_text(encoding="utf-8")), dict):
            continue
        for entry in content.pop("defaults", []):
            for name, chosen in entry.items() if isinstance(entry, dict) else ():
                yield from _keys_of_file(name.removeprefix("override ").strip("/ "), str(chosen), folders)
        yield from (key for key, _ in knobs.leaves("" if group == "experiment" else group, content))


def lines(path: str) -> Iterator[str]:
    """Yield what the log says of a file."""
    values = ", ".join(f"{key}={value} ({source})" for key, (value, source) in read(path).values.items())
    yield f"{KEY}={path} is the configuration of DeepSpeed's engine; it sets {values}"
