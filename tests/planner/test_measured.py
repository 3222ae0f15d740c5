"""stage=plan with stage.run: a run directory beside its plan."""

from __future__ import annotations

import dataclasses
import json

import pytest
from omegaconf import OmegaConf

from pipeline.common import artifact
from pipeline.common.errors import UserError
from pipeline.planner import measured_report, measured_run
from tests.world import configured

JOB = ("stage=pretrain", "model=llama-tiny", "training.sequence_length=128", "training.global_batch_size=8", "parallel.tensor=2")
CLUSTER = ("cluster.nodes=2", "cluster.tasks_per_node=4", "cluster.hardware=a100-40")


@pytest.fixture
def run_dir(tmp_path):
    """A run directory as pretrain writes it, interrupted while it wrote its last line."""
    config = configured(*JOB, *CLUSTER)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
    steps = [{"step": n, "seconds": 9.0 if n <= measured_run.WARMUP else 0.5 + n / 100, "memory_gb": n / 10} for n in range(1, 9)]
    lines = [json.dumps(line) for line in [*steps, {"step": 8, "validation_loss": 1.0}]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 9, "seco')
    return tmp_path


def test_a_run_is_read_as_it_was_configured(run_dir):
    job = measured_run.read(run_dir)
    assert job.config == configured(*JOB, *CLUSTER)
    assert job.world_size == 8
    assert (job.steps, job.step_time, job.memory) == (5, 0.56, 0.8e9)


def test_the_plan_is_printed_beside_it(run_dir):
    job, planned = measured_report.compare(configured("stage=plan"), run_dir)
    assert planned.layout.tensor == 2
    assert planned.layout.data == 4
    printed = "\n".join(measured_report.lines(run_dir, job, planned))
    assert "8 x A100 SXM 40 GB, median of 5 steps after the first 3" in printed
    assert f"{planned.estimate.step_time / 0.56:.3f}" in printed
    _, other = measured_report.compare(configured("stage=plan", "cluster.hardware=h100", "cluster.tasks_per_node=4"), run_dir)
    assert other.hardware.name.startswith("H100")


def test_a_fine_tuning_run_is_planned_with_its_adapters(run_dir):
    config = configured("stage=finetune", *JOB[1:], *CLUSTER, "lora.rank=4", "data.instructions.train=[unread.jsonl]")
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
    artifact.write(run_dir, artifact.Manifest(stage="finetune", settings={}, files={}, totals={"world_size": 4}))
    job, planned = measured_report.compare(configured("stage=plan"), run_dir)
    assert job.world_size == 4
    assert planned.estimate.memory.frozen > 10 * planned.estimate.memory.weights


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("config.yaml", None, "has no config.yaml"),
        ("config.yaml", "model: {family: nonsense}", "config.yaml cannot be read"),
        ("metrics.jsonl", '{"step": 1, "seconds": 1.0}', "more than 3 steps"),
    ],
)
def test_other_folders_are_refused(run_dir, name, text, rule):
    (run_dir / name).unlink() if text is None else (run_dir / name).write_text(text)
    with pytest.raises(UserError, match=rule):
        measured_run.read(run_dir)
