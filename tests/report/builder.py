"""Run directories with the lines that jobs write, for tests of their readers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: When the runs begin, seconds since 1970.
BEGIN = 1_795_000_000.0

CONFIG = """stage:
  name: pretrain
run_dir: somewhere
training:
  steps: {steps}
  sequence_length: 16
  timeout_minutes: 10.0
  validate_every: 10
optimizer:
  lr: {lr}
data:
  blend: {blend}
  blend_weights: samples
  phases: []
"""


def events(run_dir: Path, *lines: tuple[float, str, dict[str, Any]], job: str | None = "7") -> None:
    """Append events: seconds after BEGIN, name, fields."""
    with open(run_dir / "events.jsonl", "a") as handle:
        for seconds, event, fields in lines:
            handle.write(json.dumps({"time": BEGIN + seconds, "event": event, "job": job, **fields}) + "\n")


def steps(first: int, last: int, seconds: float = 1.0) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl: the loss falls, with some noise."""
    return [
        {
            "step": step,
            "samples": 8 * step,
            "tokens": 128 * step,
            "loss": 3.0 + 4.0 / step + 0.01 * (step * 7 % 5),
            "grad_norm": 0.5,
            "lr": 1e-3,
            "skipped": 0,
            "seconds": seconds,
            "tokens_per_second": 128 / seconds,
            "save_failures": 0,
        }
        for step in range(first, last + 1)
    ]


def validation(step: int, loss: float, error: float | None = 0.01) -> dict[str, Any]:
    """The line of a validation."""
    return {"step": step, "validation_loss": loss, "validation_loss_stderr": error, "validation_targets": 1000}


def write(
    run_dir: Path, lines: Sequence[dict[str, Any]], total: int = 100, lr: float = 1e-3, blend: dict[str, Any] | None = None, done: int = 0
) -> Path:
    """Write metrics.jsonl and config.yaml of a run of `total` steps, and the manifest of one that has made `done`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "config.yaml").write_text(CONFIG.format(steps=total, lr=lr, blend=json.dumps(blend or {})))
    if done:
        content = {"stage": "pretrain", "settings": {}, "files": {}, "totals": {"step": done}}
        (run_dir / "manifest.json").write_text(json.dumps(content))
    return run_dir


def restarted(run_dir: Path) -> Path:
    """A run of 100 steps on 2 of 3 nodes in Slurm: 40 steps, a node is lost, 60 more steps with the spare node, finished.

    The job lasts 300 s. First start: 100 s, of which 20 s start-up and 40 s steps that count. Then 10 s nothing. Second start: 100 s,
    of which 15 s start-up and 60 s steps. The job began 80 s before its first start, and ended 10 s after the last one. From second
    180 on it has two nodes: Slurm takes out the lost one.
    """
    blend = {"web": {"weight": 3.0}, "books": {"weight": 1.0}}
    write(run_dir, [*steps(1, 100), validation(100, 3.02)], blend=blend, done=100)
    common = {"ranks": 4, "version": "v1", "corpora": {"books": 100, "web": 1000}}
    events(
        run_dir,
        (5, "job_start", {"nodes": ["a", "b", "c"], "restarts": 0, "commit": "c0", "started": BEGIN, "limit": BEGIN + 3600}),
        (80, "ranks_start", {"nodes": ["a", "b"], "step": -1, "layout": ""}),
        (100, "run_start", {"nodes": ["a", "b"], "step": 0, "layout": "data 4", **common}),
        (
            180,
            "ranks_end",
            {"code": 1, "step": 40, "progress": True, "failed": True, "lost": ["b"], "host": "a", "reason": "RuntimeError: peer"},
        ),
        (180, "action", {"action": "restart", "reason": "started again", "code": 1, "exclude": ["b"]}),
        (190, "ranks_start", {"nodes": ["a", "c"], "step": 40, "layout": ""}),
        (
            205,
            "run_start",
            {"nodes": ["a", "c"], "step": 40, "layout": "tensor 2 x data 2", **common},
        ),
        (288, "run_end", {"step": 100, "code": 0, "reason": "finished", "where": ""}),
        (290, "ranks_end", {"code": 0, "step": 100, "progress": True, "failed": False, "lost": []}),
        (300, "action", {"action": "end", "reason": "finished", "code": 0, "exclude": []}),
    )
    return run_dir
