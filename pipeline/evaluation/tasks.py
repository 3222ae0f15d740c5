"""Scores of a checkpoint on the tasks of lm-eval (stage=evaluate stage.tasks)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from pipeline.common.errors import UserError
from pipeline.config.stages import Evaluate
from pipeline.data.tokenize.chat_template import ChatTemplate
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.evaluation import harness
from pipeline.evaluation.likelihood import completions, log_likelihoods
from pipeline.evaluation.replicas import Replicas
from pipeline.generation.runner import decoder_runner
from pipeline.models.config import ModelConfig
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel


def settings_of(stage: Evaluate, encoder: TextEncoder, dtype: str, chats: ChatTemplate | None = None) -> dict[str, Any]:
    """Return what the scores of a checkpoint depend on.

    Args:
        stage: the settings of the evaluation.
        encoder: the tokenizer.
        dtype: precision.dtype.
        chats: the template of chats, if the questions are chats.
    """
    asked = {key: value for key in ("fewshot_as_multiturn", "system_instruction") if (value := getattr(stage, key)) is not None}
    asked |= {} if chats is None else {"apply_chat_template": xxhash.xxh3_64_hexdigest(chats.text.encode())}
    return {
        "stage.tasks": stage.tasks,
        "stage.task_folder": _digest(Path(stage.task_folder or "")),
        "stage.few_shot": stage.few_shot,
        "stage.limit": stage.limit,
        **encoder.settings,
        "precision.dtype": dtype,
        **{f"stage.{key}": value for key, value in asked.items()},
    }


def check_model(model: ModelConfig, run_dir: Path) -> None:
    """Refuse a model that does not predict the next token.

    Args:
        model: of the checkpoint.
        run_dir: for the message.

    Raises:
        UserError: it does not.
    """
    if model.objective != "causal":
        rule = f"is of family {model.family}, which is not a decoder"
        raise UserError.of("run_dir", str(run_dir), rule, "evaluate tasks with a decoder, such as llama or gpt")


def evaluate(stage: Evaluate, mesh: Mesh, local: LocalModel, model: ModelConfig, text: harness.Text) -> dict[str, Any]:
    """Return task -> metrics on rank 0; the other ranks help.

    Args:
        stage: the settings of the evaluation.
        mesh: this rank's process groups.
        local: this rank's part of the model.
        model: configuration of the full model.
        text: the tokenizer.

    Raises:
        UserError: as harness.evaluate.
    """
    runner = decoder_runner(local, model, mesh)

    def compute(items: list[Any], **options: Any) -> list[Any]:
        if "sampling" not in options:
            return log_likelihoods(runner, model.vocab_size, items)
        sampling, settings = options["sampling"], options["stopping"]
        return completions(runner, sampling, harness.stopping(text, **settings), items)

    replicas = Replicas(mesh, compute)

    def complete(prompts: list[Any], sampling: Any, stopping: dict[str, Any]) -> list[str]:
        return replicas.map(prompts, sampling=sampling, stopping=stopping)

    results: dict[str, Any] = replicas.lead(lambda: harness.evaluate(stage, text, model.max_positions, replicas.map, complete))
    return results


def _digest(folder: Path) -> str:
    """Return a hash of the task files of a folder."""
    state = xxhash.xxh3_64()
    for path in sorted(folder.rglob("*.y*ml")):
        state.update(f"{path.relative_to(folder)} ".encode() + path.read_bytes())
    return state.hexdigest()


def text_table(results: dict[str, Any]) -> str:
    """Format the metrics of all tasks for the log."""
    rows = [("task", "metric", "value", "stderr", "shots", "documents")]
    for task, metrics in results.items():
        for name in (name for name in metrics if f"{name}_stderr" in metrics or not name.endswith("_stderr")):
            if name not in ("num_fewshot", "samples", "sample_len"):
                error = metrics.get(f"{name}_stderr")
                shown = "" if error is None else f"{error:.4f}"
                counts = ("" if metrics[key] is None else str(metrics[key]) for key in ("num_fewshot", "samples"))
                rows.append((task, name, f"{metrics[name]:.4f}", shown, *counts))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
