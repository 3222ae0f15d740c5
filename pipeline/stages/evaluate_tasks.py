"""evaluate with stage.tasks: scores of checkpoints on the tasks of lm-eval. Neither model= nor an export is required."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import xxhash

from pipeline.checkpoint.lora_merge import open_merged
from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config.layout import Layout
from pipeline.config.rules.check import layout_violations
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate
from pipeline.evaluation import harness, record, selection
from pipeline.evaluation.likelihood import completions, log_likelihoods
from pipeline.evaluation.replicas import Replicas
from pipeline.generation import weights
from pipeline.generation.runner import Runner
from pipeline.models.config import ModelConfig
from pipeline.parallel import mesh as meshes
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.pipeline_relay import Relay
from pipeline.stages.convert import open_tokenizer

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks, stage: Evaluate) -> None:
    """Record the metrics of every task for a checkpoint, or for all of them.

    Raises:
        UserError: a checkpoint, the tokenizer or a task is missing, or they do not match.
    """
    encoder = open_tokenizer(config)
    text, run_dir, minutes = harness.Text(encoder), Path(config.run_dir), config.training.timeout_minutes
    settings = {
        "stage.tasks": stage.tasks,
        "stage.task_folder": _digest(Path(stage.task_folder or "")),
        "stage.few_shot": stage.few_shot,
        "stage.limit": stage.limit,
        "tokenizer.path": encoder.fingerprint,
        "precision.dtype": config.precision.dtype,
    }
    device = meshes.init_distributed(ranks.rank, ranks.world_size, ranks.local_rank, ranks.rendezvous(), minutes)
    try:
        # Rank 0 chooses for all: other ranks may see an older listing of the folder.
        paths = meshes.on_rank_0(lambda: selection.checkpoints(run_dir, stage, "tasks", settings, config.training.steps))
        mesh: Mesh | None = None
        for path in paths:
            checkpoint = open_merged(path, stage.adapter)
            model = weights.model_of(checkpoint)
            _check(config, model, encoder.vocab_size)
            config = weights.for_generation(config, model)
            if found := layout_violations(config):
                raise UserError(found)
            mesh = mesh or meshes.build_mesh(Layout.of(config, ranks.world_size), device, minutes)
            runner = _runner(config, mesh, next(weights.load(checkpoint, config, mesh).stage_modules()))
            results = _evaluate(stage, mesh, runner, model, text)
            if ranks.rank == 0:
                record.write(run_dir, checkpoint.step, "tasks", results, selection.settings_of(path, stage, settings))
                log.info("step %d, %s:\n%s", checkpoint.step, path, _table(results))
    finally:
        meshes.destroy_process_group()


def _evaluate(stage: Evaluate, mesh: Mesh, runner: Runner, model: ModelConfig, text: harness.Text) -> dict[str, Any]:
    """Return the results on rank 0; the other ranks help."""

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


def _check(config: RunConfig, model: ModelConfig, entries: int) -> None:
    """Refuse a model that does not predict the next token, and a tokenizer of another model."""
    if model.objective != "causal":
        rule = f"is of family {model.family}, which is not a decoder"
        raise UserError.of("run_dir", config.run_dir, rule, "evaluate tasks with a decoder, such as llama or gpt")
    if entries > model.vocab_size:
        rule = f"has {entries} entries, which exceeds model.vocab_size={model.vocab_size} of the checkpoint"
        raise UserError.of("tokenizer.path", config.tokenizer.path, rule, "set it to the tokenizer of the training run")


def _runner(config: RunConfig, mesh: Mesh, module: Any) -> Runner:
    """Return what runs the model."""
    model = config.model
    relay = Relay(mesh) if mesh.layout.pipeline > 1 else None
    return Runner(module, model.max_positions, relay=relay, vocab_size=model.vocab_size, hidden=model.hidden)


def _digest(folder: Path) -> str:
    """Return a hash of the task files of a folder."""
    state = xxhash.xxh3_64()
    for path in sorted(folder.rglob("*.y*ml")):
        state.update(f"{path.relative_to(folder)} ".encode() + path.read_bytes())
    return state.hexdigest()


def _table(results: dict[str, Any]) -> str:
    """Format the metrics of all tasks."""
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
