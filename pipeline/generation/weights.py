"""A model for generation, and its draft model: the weights of native checkpoints, without optimizer and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint import native
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.reader import WantedRun
from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.config.lora import LoraConfig
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Generate
from pipeline.conversion import imported
from pipeline.data.tokenize import tokenizer as tokenizers
from pipeline.models import config_classes
from pipeline.models.config import ModelConfig
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel, parallelize
from pipeline.parallel.pieces import Piece


def model_of(checkpoint: MergedWeights) -> ModelConfig:
    """Return the model configuration of a checkpoint."""
    return config_classes.from_dict(checkpoint.config["model"])


def for_generation(config: RunConfig, model: ModelConfig) -> RunConfig:
    """Return the configuration with a checkpoint's model, and without what serves training only."""
    values: dict[str, Any] = {"model": model, "lora": LoraConfig(), "training.frozen": []}  # adapters are merged
    values |= {"training.activation_checkpointing": "none", "training.compile": "off", "training.attention_group": 0}
    values |= {"training.delta_rule": "plain"}  # its kernels are for many tokens
    values |= {"parallel.zero_stage": 0, "parallel.zero_group": "job", "parallel.sequence_parallel": False, "parallel.schedule": "1f1b"}
    values |= {"parallel.expert_padding": False, "parallel.expert_parts": 1}
    values |= {"parallel.expert_tensor": None}  # whole experts require sequence parallelism
    values |= {"parallel.stages_per_rank": None, "parallel.layers_per_stage": [], "parallel.balance": "layers"}
    return knobs.changed(config, values)


def load(checkpoint: MergedWeights, config: RunConfig, mesh: Mesh) -> LocalModel:
    """Build this rank's part of the model.

    Raises:
        UserError: the checkpoint is damaged.
    """

    def value(piece: Piece, dtype: torch.dtype) -> Tensor:
        values = torch.empty(piece.elements)
        checkpoint.read([WantedRun(piece.name, piece.full_shape, piece.box, 0, {"weight": values})])
        return values.view(piece.shape).to(mesh.device, dtype)

    model = parallelize(config, mesh, value)
    return model.eval().requires_grad_(False)


def find_draft(draft: str) -> Path:
    """Return the checkpoint that stage.draft names: a checkpoint folder, or a run directory, of which the newest is taken.

    Raises:
        UserError: there is none.
    """
    return native.find_start(draft, "stage.draft", "set it to the run directory or a checkpoint of a smaller model")


def draft_config(config: RunConfig, checkpoint: MergedWeights) -> RunConfig:
    """Return the configuration of a draft model for generation; every rank of an expert group holds the whole of it."""
    return for_generation(knobs.changed(config, {"parallel.expert": 1}), model_of(checkpoint))


def check_draft(stage: Generate, checkpoint: MergedWeights, target: ModelConfig, tokenizer: Path, expert: int = 1) -> None:
    """Refuse a draft model with another vocabulary or a shorter context, or with experts that would be sharded.

    Raises:
        UserError: the models or their tokenizers do not match, or the tokenizer of the draft model is not found.
    """
    draft, violations = model_of(checkpoint), list[Violation]()

    def refuse(rule: str, fix: str) -> None:
        violations.append(Violation("stage.draft", stage.draft, rule, fix))

    if draft.objective != "causal" or target.objective != "causal":
        rule = f"is of family {draft.family}, the target of family {target.family}; speculative decoding requires two decoders"
        refuse(rule, "choose a decoder")
    for name in ("vocab_size", "max_positions"):
        ours, theirs = getattr(target, name), getattr(draft, name)
        if theirs < ours or (name == "vocab_size" and theirs != ours):
            fix = "choose a draft model that was trained for the same tokenizer and length"
            refuse(f"has model.{name}={theirs}; the target has {ours}", fix)
    if getattr(draft, "linear_layers", 0):
        rule = f"is of family {draft.family}, whose recurrent states cannot remove the tokens of several passes"
        refuse(rule, "choose a draft model without recurrent layers")
    if expert > 1 and getattr(draft, "experts", False):
        rule = f"has experts, which parallel.expert={expert} shards in the target only"
        refuse(rule, "choose a dense draft model, or set parallel.expert=1")
    UserError.raise_for(violations)
    folder = _tokenizer_folder(stage, checkpoint)
    ours, theirs = (
        tokenizers.load(path, key).get_vocab(with_added_tokens=True)
        for path, key in ((tokenizer, "tokenizer.path"), (folder, "stage.draft"))
    )
    if ours != theirs:
        fix = "choose a draft model with the tokenizer of the target"
        raise UserError.of("stage.draft", stage.draft, f"has another tokenizer, {folder}", fix)


def _tokenizer_folder(stage: Generate, checkpoint: MergedWeights) -> Path:
    """Return the folder with the tokenizer of the draft model."""
    recorded = checkpoint.config.get("tokenizer", {}).get("path")
    candidates = [imported.folder_of(checkpoint.path), *([Path(recorded)] if recorded else [])]
    if stage.draft_tokenizer:
        candidates = [Path(stage.draft_tokenizer)]
    for folder in candidates:
        if (folder / "tokenizer.json").is_file():
            return folder
    rule = f"cannot be verified to have the same tokenizer: no tokenizer.json in {' or '.join(map(str, candidates))}"
    raise UserError.of("stage.draft", stage.draft, rule, "set stage.draft_tokenizer to the folder of its tokenizer")
