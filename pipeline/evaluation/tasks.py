"""Scores of a checkpoint on the tasks of lm-eval (stage=evaluate stage.tasks).

Only rank 0 runs the evaluation itself, so that a data set is read once, not by every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from pipeline.common.errors import UserError, Violation
from pipeline.common.texts import table_lines
from pipeline.config.stages import Evaluate
from pipeline.data.tokenize.chat_template import ChatTemplate
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.evaluation import harness, record
from pipeline.evaluation.likelihood import completions, log_likelihoods
from pipeline.generation.runner import decoder_runner
from pipeline.models.config import ModelConfig
from pipeline.parallel.mesh import Mesh, gather_objects
from pipeline.parallel.parallelize import LocalModel


def settings_of(stage: Evaluate, encoder: TextEncoder, dtype: str, chats: ChatTemplate | None = None) -> dict[str, Any]:
    """Return what the scores of a checkpoint depend on; `chats` is the template if the questions are chats."""
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

    Raises:
        UserError: it does not.
    """
    if model.objective != "causal":
        rule = f"is of family {model.family}, which is not a decoder"
        raise UserError.of("run_dir", str(run_dir), rule, "evaluate tasks with a decoder, such as llama or gpt")


def evaluate(stage: Evaluate, mesh: Mesh, local: LocalModel, model: ModelConfig, text: harness.Text) -> dict[str, Any]:
    """Return task -> metrics on rank 0; the other ranks help.

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
            if name not in record.NOTES:
                error = metrics.get(f"{name}_stderr")
                shown = "" if error is None else f"{error:.4f}"
                counts = ("" if metrics[key] is None else str(metrics[key]) for key in record.NOTES[:2])
                rows.append((task, name, f"{metrics[name]:.4f}", shown, *counts))
    return "\n".join(table_lines(rows))


@dataclass(frozen=True)
class _Order:
    """What rank 0 asks for: items to compute, None at the end; and why it has stopped."""

    items: Sequence[Any] | None
    options: dict[str, Any] = field(default_factory=dict)
    problems: Sequence[Violation] = ()


class Replicas:
    """The replicas of a model, of which every rank runs `compute`: items, and options for all of them -> a result for each item."""

    def __init__(self, mesh: Mesh, compute: Callable[..., list[Any]]) -> None:
        self._mesh, self._compute = mesh, compute

    def lead(self, work: Callable[[], Any]) -> Any:
        """Run `work`, which calls `map`, on rank 0, while the other ranks take part in its calls; its result on rank 0, else None.

        Raises:
            UserError: of `work` or of a computation, on every rank.
        """
        if self._mesh.rank > 0:
            while (order := _broadcast(None)).items is not None:
                self._take_part(order)
            UserError.raise_for(order.problems)
            return None
        try:
            result = work()
        except UserError as error:
            _broadcast(_Order(None, problems=error.violations))
            raise
        _broadcast(_Order(None))
        return result

    def map(self, items: Sequence[Any], **options: Any) -> list[Any]:
        """Return the results of the items, in their order; on rank 0 within `lead`.

        Raises:
            UserError: of the computation.
        """
        results: list[Any] = [None] * len(items)
        problems: list[Violation] = []
        for share, part, violations in filter(None, self._take_part(_broadcast(_Order(items, options)))):
            problems += violations
            if part is not None:
                results[share :: self._mesh.layout.batch_shards] = part
        UserError.raise_for(problems)
        return results

    def _take_part(self, order: _Order) -> list[Any]:
        """Compute this replica's share; returns by rank the number of the share, its results, and why there are none."""
        layout, where = self._mesh.layout, self._mesh.coordinates
        share = layout.batch_shard(where)
        assert order.items is not None
        answer: tuple[int, list[Any] | None, Sequence[Violation]]
        try:
            answer = share, self._compute(order.items[share :: layout.batch_shards], **order.options), ()
        except UserError as error:
            answer = share, None, error.violations
        return gather_objects(answer if where.tensor == where.pipeline == 0 else None)


def _broadcast(order: _Order | None) -> _Order:
    """Return the order of rank 0."""
    box = [order]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return box[0]
