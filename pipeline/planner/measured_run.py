"""A finished or running job as it was measured: its saved configuration, number of ranks, step time and memory."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.common import artifact, events
from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig, StageConfig
from pipeline.models.config_classes import from_dict

#: Steps at the beginning of a run that are not measured: kernels are compiled and memory is allocated.
WARMUP = 3


@dataclass(frozen=True)
class MeasuredRun:
    """What a run directory tells.

    Attributes:
        config: of the job.
        world_size: ranks of the last job; those of its cluster settings while it has not finished.
        steps: number of measured steps.
        step_time: their median, seconds.
        memory: most bytes that rank 0 reserved on its GPU; None for a CPU.
        gpu: name of the GPU of rank 0 in CUDA; None for a CPU, and for a run that did not record it.
    """

    config: RunConfig
    world_size: int
    steps: int
    step_time: float
    memory: float | None
    gpu: str | None = None


def read(run_dir: Path) -> MeasuredRun:
    """Read a run directory of `pretrain` or `finetune`.

    Raises:
        UserError: it has no configuration or no steps after the first ones.
    """
    config = saved_config(run_dir)
    lines = _lines(run_dir)[WARMUP:]
    if not lines:
        rule = f"has no metrics.jsonl with more than {WARMUP} steps"
        raise UserError.of("stage.run", run_dir, rule, "pass the run_dir of a pretrain job that has trained longer")
    memory = max((line.get("memory_gb") or 0.0 for line in lines), default=0.0) * 1e9
    seconds = [line["seconds"] for line in lines]
    starts = [event for event in events.read(run_dir) if event["event"] == "run_start"]
    gpu = starts[-1].get("gpu") if starts else None
    return MeasuredRun(config, _world_size(run_dir, config), len(lines), statistics.median(seconds), memory or None, gpu)


def saved_config(run_dir: Path) -> RunConfig:
    """Return the configuration that a job wrote to its run directory.

    Raises:
        UserError: config.yaml is not there, or is not a configuration of this version.
    """
    path = run_dir / "config.yaml"
    fix = "pass the run_dir of a pretrain job"
    if not path.is_file():
        raise UserError.of("stage.run", run_dir, "has no config.yaml", fix)
    try:
        saved = OmegaConf.load(path)
        model, stage = saved.pop("model"), saved.pop("stage", {"name": "pretrain"})
        typed = OmegaConf.structured(RunConfig(model=from_dict(OmegaConf.to_container(model)), stage=StageConfig(stage["name"])))
        config = OmegaConf.to_object(OmegaConf.merge(typed, saved))
    except (OmegaConfBaseException, KeyError, TypeError, ValueError) as error:
        raise UserError.of("stage.run", run_dir, f"config.yaml cannot be read: {str(error).splitlines()[0]}", fix) from error
    assert isinstance(config, RunConfig)
    return config


def _lines(run_dir: Path) -> list[dict[str, float]]:
    """The lines of training steps in metrics.jsonl, without an incomplete last one."""
    path = run_dir / "metrics.jsonl"
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if "seconds" in values:
            steps.append(values)
    return steps


def _world_size(run_dir: Path, config: RunConfig) -> int:
    """Ranks of a run."""
    if (run_dir / artifact.MANIFEST).is_file():
        return int(artifact.read(run_dir, key="stage.run", stage=config.stage.name).totals["world_size"])
    return config.cluster.nodes * max(1, config.cluster.tasks_per_node)
