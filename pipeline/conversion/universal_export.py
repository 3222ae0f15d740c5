"""stage.format=deepspeed_universal: master weights, moments and step as a universal checkpoint, from which DeepSpeed's engine continues.

One tensor is in memory at a time. The files (universal_format.py) serve ZeRO 1, 2 and 3 on any number of ranks. The parameters have the
names of the model's Hugging Face class, which is the module that the engine is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint import native
from pipeline.checkpoint.lora_adapter import adapter_of
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.common.errors import UserError
from pipeline.conversion import universal_format as universal
from pipeline.conversion.export_files import ExportWriter, OutputFile, Written, digest_of
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.huggingface_mapping import StockTensor

_FORMAT = "deepspeed_universal"
#: Families whose files have other names, or other tensors, than the parameters of their class.
_OTHER_NAMES = ("kimi_linear", "nemotron_h", "olmo_hybrid")


def tag(step: int) -> str:
    """Return the name of the folder of a step, as DeepSpeed's documentation has it."""
    return f"global_step{step}_universal"


def check(weights: MergedWeights, config: ModelConfig) -> None:
    """Refuse checkpoints that have no such form.

    Raises:
        UserError: the model is not a dense decoder with a Hugging Face class, has adapters, or lacks moments.
    """
    with torch.device("meta"):
        fixed = [name for name, weight in registry.build(config).named_parameters() if not weight.requires_grad]
    rule = ""
    if config.objective != "causal" or any(entry.expert is not None or entry.stacked for entry in registry.stock_tensors(config)[0]):
        rule = f"is supported for dense decoders; model.family={config.family} is another model"
    elif config.family in _OTHER_NAMES:
        rule = f"is not supported for model.family={config.family}, whose files have other names than the parameters of its class"
    elif fixed:
        rule = f"has the moments of all weights, and {fixed[0]} of model.family={config.family} is not trained"
    if rule:
        raise UserError.of("stage.format", _FORMAT, rule, "set stage.format=huggingface, which exports the weights")
    if adapter_of(weights.checkpoint) is not None:
        rule = f"has the moments of all weights, and {weights.path} those of adapters"
        raise UserError.of("stage.format", _FORMAT, rule, "set stage.format=huggingface, which exports the merged weights")
    kinds = [kind for kind in universal.FILES if kind != "weight"]
    lacking = [f"{kind} of {name}" for name in weights.names() for kind in kinds if not weights.has(name, kind)]
    if lacking and weights.train_state.updates:
        rule = f"has no {lacking[0]}" + (f", and lacks {len(lacking) - 1} further moments" if lacking[1:] else "")
        rule += f", after {weights.train_state.updates} updates"
        fix = "set stage.format=huggingface, which exports the weights, or train with optimizer=adamw and without training.frozen"
        raise UserError.of("stage.checkpoint", weights.path, rule, fix)


def write(folder: Path, weights: MergedWeights, config: ModelConfig, rate: float, writer: ExportWriter) -> int:
    """Write the files of all parameters, and those of the engine, and return the number of parameters. Collective.

    Args:
        weights: of the checkpoint, with its moments.
        rate: learning rate of the next update; 0 for that of DeepSpeed's configuration.

    Raises:
        CheckFailed: a file does not hold the tensor of the checkpoint.
    """
    entries = [entry for entry in registry.stock_tensors(config)[0] if entry.names]  # others are constants, no parameters
    shapes = {entry.hf_name: entry.shape([weights.shape(name) for name in entry.names]) for entry in entries}
    step = tag(weights.step)
    files = []
    for entry in entries:
        for kind, name in universal.FILES.items():
            file = _File(weights, entry, kind)
            path = f"{step}/{universal.ZERO}/{entry.hf_name}/{name}"
            files.append(OutputFile(path, 4 * prod(shapes[entry.hf_name]), file.write, file.read))
    writer.write(folder, files)
    if writer.is_first:
        _write_engine(folder / step, weights.train_state, shapes, rate)
        (folder / universal.LATEST).write_text(step, encoding="utf-8")
    return sum(prod(shape) for shape in shapes.values())


class _File:
    """Writes and reads a tensor of a parameter."""

    def __init__(self, weights: MergedWeights, entry: StockTensor, kind: str) -> None:
        self._weights, self._entry, self._kind = weights, entry, kind

    def write(self, path: Path, written: Written) -> tuple[None, None]:
        """Write the file; see OutputFile."""
        parts = [self._weights.tensor(name, self._kind).float() for name in self._entry.names]
        value = self._entry.to_hf(parts)
        _save(path, {universal.PARAM: value, universal.CAT_DIM: 0})
        written(self._entry.hf_name, digest_of(parts), value.nbytes)
        return None, None

    def read(self, path: Path) -> Iterator[tuple[str, str]]:
        """Yield what the file holds, as weights of the checkpoint; see OutputFile."""
        value: Tensor = torch.load(path, weights_only=True)[universal.PARAM]
        shapes = [self._weights.shape(name) for name in self._entry.names]
        yield self._entry.hf_name, digest_of(self._entry.from_hf(value, shapes))


def _write_engine(folder: Path, state: native.TrainState, shapes: dict[str, tuple[int, ...]], rate: float) -> None:
    """Write the optimizer's step and the counters of the engine.

    The groups of the optimizer have no betas and no weight decay: DeepSpeed keeps those of its configuration. It loads the state of as many
    groups as the file has, so there is one for each parameter, and no optimizer has more. Their learning rate is that of the first step:
    schedulers of DeepSpeed set the later ones, and before it they have set that of their beginning.
    """
    for name in shapes:
        # A tensor, which torch.optim.AdamW requires, and DeepSpeed's kernels accept; each process reads its own.
        _save(folder / universal.ZERO / name / universal.STEP, torch.tensor(float(state.updates)))
    version = native.versions().get("deepspeed", "0.19.0")
    groups: list[dict[str, Any]] = [{"params": []} | ({"lr": rate} if rate else {}) for _ in shapes]
    # A number: ZeRO 3 gives all of its sub-groups this object, and each adds 1 to it.
    optimizer = {"state": {0: {"step": state.updates}}, universal.PARAM_GROUPS: groups}
    _save(
        folder / universal.ZERO / universal.OPTIMIZER,
        {universal.DS_VERSION: version, universal.PARAM_GROUPS: groups, universal.OPTIMIZER_STATE: optimizer},
    )
    steps = state.updates
    engine = {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        universal.PARAM_SHAPES: [{name: torch.Size(shape) for name, shape in shapes.items()}],
        # DeepSpeed's scheduler has the first entry, torch.optim's LambdaLR and others the rest.
        "lr_scheduler": {"last_batch_iteration": steps - 1, "last_epoch": steps, "_step_count": steps + 1, "lr_lambdas": []},
        "global_steps": state.step,
        "global_samples": state.samples,
        "skipped_steps": state.step - state.updates,
        "dp_world_size": 1,
        "mp_world_size": 1,
        universal.DS_VERSION: version,
        universal.INFO: {universal.INFO_VERSION: universal.VERSION},
    }
    for name in universal.MODEL_FILES:
        _save(folder / name, engine)


def _save(path: Path, content: Any) -> None:
    """Write a file of torch.save, whose bytes do not depend on its name."""
    with open(path, "wb") as file:
        torch.save(content, file)
