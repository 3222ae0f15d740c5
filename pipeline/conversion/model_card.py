"""The model card of an export: README.md in the format of the Hugging Face Hub, with what the run can tell and blanks for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from pipeline.checkpoint import native
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.common import git_commit, knobs, metrics_file
from pipeline.models.config import ModelConfig

FILE = "README.md"
BLANK = "_(to be written)_"

#: Tasks of the Hub by the objective of a model.
TASKS = {"causal": "text-generation", "masked": "fill-mask", "classification": "text-classification"}
#: Settings of the training that the card lists, as far as a run has them.
SETTINGS = (
    *("training.steps", "training.sequence_length", "training.global_batch_size", "training.seed", "training.objective"),
    *("optimizer.name", "optimizer.lr", "optimizer.schedule", "optimizer.weight_decay", "precision.dtype", "precision.fp8"),
    *("data.tokens", "data.packing", "data.remove", "data.teacher", "tokenizer.path"),
)
#: Measures of the last validation.
MEASURES = ("validation_loss", "validation_loss_stderr", "bits_per_byte", "validation_targets")


def write(folder: Path, weights: MergedWeights, model: ModelConfig) -> None:
    """Write the card to an export folder."""
    data = ModelCardData(library_name="transformers", pipeline_tag=TASKS.get(model.objective, "text2text-generation"), tags=[model.family])
    text = "\n".join(_lines(weights, model))
    (folder / FILE).write_text(f"---\n{data.to_yaml()}\n---\n\n{text}\n", encoding="utf-8")


def _lines(weights: MergedWeights, model: ModelConfig) -> Iterator[str]:
    """Yield the lines below the metadata."""
    run_dir, config = weights.path.resolve().parent.parent, weights.config
    parameters = sum(prod(weights.shape(name)) for name in weights.names())
    measured = [line for line in metrics_file.read(run_dir) if line["step"] <= weights.step]
    yield f"# {run_dir.name}"
    yield ""
    about = f"family {model.family}, {parameters:,} parameters, a context of {model.max_positions:,} tokens"
    yield f"Step {weights.step:,} of the training of a model: {about}."
    for title in ("License", "Developers and contact", "Intended use", "Limitations and risks"):
        yield from ("", f"## {title}", "", BLANK)
    yield from ("", "## Training", "")
    parent = native.read_index(weights.path).parent if (weights.path / native.INDEX).is_file() else None
    if parent is not None:
        how = ", ".join(parent[key] for key in ("how", "growth") if key in parent)
        yield f"It began with step {parent['step']} of {parent['path']} ({how})."
        yield ""
    if (last := next((line for line in reversed(measured) if "tokens" in line), None)) is not None:
        yield f"{last['tokens']:,} tokens up to step {last['step']:,}, training loss {last['loss']:.4f}."
        yield ""
    settings = dict(knobs.leaves("", config))
    yield from (*_table({key: settings.get(key) for key in SETTINGS}), "")
    for name, corpus in config.get("data", {}).get("blend", {}).items():
        yield f"- corpus {name}: {', '.join(f'{key} {value}' for key, value in corpus.items() if value is not None) or 'weight 1'}"
    for number, phase in enumerate(config.get("training", {}).get("phases", ())):
        yield f"- phase {number}: {', '.join(f'{key} {value}' for key, value in phase.items() if value)}"
    yield from ("", "What it was trained on: the summary that `stage=ledger stage.summary` writes belongs here.")
    if (last := next((line for line in reversed(measured) if "validation_loss" in line), None)) is not None:
        yield from ("", f"## Validation at step {last['step']:,}", "")
        yield from _table({name: last.get(name) for name in MEASURES})
    yield from ("", f"Exported with {git_commit.version()}.")


def _table(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table without the values that are not there."""
    yield from ("| | |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in values.items() if value not in (None, "", "none"))
