"""stage=plan with stage.run: a run directory beside its plan."""

from __future__ import annotations

import dataclasses
import json

import pytest
from omegaconf import OmegaConf

from pipeline.common import artifact, events
from pipeline.common.errors import UserError
from pipeline.planner import measured_report, site_correction
from pipeline.planner.plan import hardware_of, plan
from tests.world import configured

JOB = ("stage=pretrain", "model=llama-tiny", "training.sequence_length=128", "training.global_batch_size=8", "parallel.tensor=2")
CLUSTER = ("cluster.nodes=2", "cluster.tasks_per_node=4", "cluster.hardware=a100-40")


@pytest.fixture
def run_dir(tmp_path):
    """A run directory as pretrain writes it, interrupted while it wrote its last line."""
    config = configured(*JOB, *CLUSTER)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
    steps = [{"step": n, "seconds": 9.0 if n <= measured_report.WARMUP else 0.5 + n / 100, "memory_gb": n / 10} for n in range(1, 9)]
    lines = [json.dumps(line) for line in [*steps, {"step": 8, "validation_loss": 1.0}]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 9, "seco')
    return tmp_path


def test_a_run_is_read_as_it_was_configured(run_dir):
    job = measured_report.read(run_dir)
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


@pytest.mark.long
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
        measured_report.read(run_dir)


def measured(run_dir, seconds: float) -> None:
    """Rewrite the steps of a run."""
    lines = [json.dumps({"step": step, "seconds": seconds}) for step in range(1, 9)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines))


def anchored(run_dir, *words: str):
    """Add a run to a file of corrections, and return the correction."""
    config = configured("stage=plan", *words)
    job, planned = measured_report.compare(config, run_dir)
    return measured_report.correct(config, run_dir, job, planned)


def test_measured_runs_correct_later_plans(run_dir):
    """The file is that of one run whichever number of times it is added; the plans of jobs move towards what was measured."""
    file = f"cluster.correction={run_dir}/site/corrections.yaml"
    _, planned = measured_report.compare(configured("stage=plan"), run_dir)
    truth = 1.4 * planned.estimate.step_time
    measured(run_dir, truth)
    for _ in range(2):
        correction = anchored(run_dir, file)
        assert len(correction.runs) == 1
    assert 1 < correction.compute < 1.4
    assert 1 < correction.fabric < 1.4
    assert site_correction.read(run_dir / "site" / "corrections.yaml").runs == correction.runs
    _, after = measured_report.compare(configured("stage=plan", file), run_dir)
    assert planned.estimate.step_time < after.estimate.step_time < truth
    job = configured(*JOB, *CLUSTER, file)
    assert plan(job, 8, hardware_of(job)).estimate.step_time == pytest.approx(after.estimate.step_time)
    assert after.estimate.memory == planned.estimate.memory


def test_factors_of_gpu_and_network_are_told_apart():
    """Many runs, of which some depend on the network, give both factors; one run moves them less, and none not at all."""
    runs = [site_correction.Anchor("", 8, 1.0, 1.2 ** (1 - share) * 0.8**share, share) for share in (0.0, 0.2, 0.4, 0.8)]
    assert site_correction.fitted(runs * 200) == pytest.approx((1.2, 0.8), rel=0.01)
    assert site_correction.fitted([]) == (1.0, 1.0)
    compute, fabric = site_correction.fitted(runs[:1])
    assert 1 < compute < 1.2
    assert fabric == 1.0


def test_equal_factors_are_that_of_a_step():
    job = configured(*JOB, *CLUSTER)
    hardware = hardware_of(job)
    slower = plan(job, 8, site_correction.corrected(hardware, 1.3, 1.3)).estimate.step_time
    assert slower == pytest.approx(1.3 * plan(job, 8, hardware).estimate.step_time)


def test_runs_that_say_nothing_about_the_gpu_are_refused(run_dir, tmp_path):
    file = tmp_path / "corrections.yaml"
    word = f"cluster.correction={file}"
    _, planned = measured_report.compare(configured("stage=plan"), run_dir)
    measured(run_dir, planned.estimate.step_time)
    with pytest.raises(UserError, match=r"cluster.hardware=a100-40.*cluster.hardware=h100"):
        anchored(run_dir, word, "cluster.hardware=h100", "cluster.tasks_per_node=4")
    events.record(run_dir, "run_start", gpu="NVIDIA H100 80GB HBM3")
    with pytest.raises(UserError, match=r"ran on NVIDIA H100 80GB HBM3.*A100 SXM 40 GB"):
        anchored(run_dir, word)
    assert not file.exists()
    anchored(run_dir, word, "cluster.hardware=h100", "cluster.tasks_per_node=4")
    with pytest.raises(UserError, match=r"h100.*a100-40"):
        hardware_of(configured(*JOB, *CLUSTER, word))
    events.record(run_dir, "run_start", gpu="NVIDIA A100-SXM4-40GB")
    with pytest.raises(UserError, match=r"on h100.*on a100-40|measured on h100.*a100-40"):
        anchored(run_dir, word)
    measured(run_dir, 10 * planned.estimate.step_time)
    with pytest.raises(UserError, match="x the planned time"):
        anchored(run_dir, f"cluster.correction={tmp_path}/other.yaml")
    with pytest.raises(UserError, match="is not a file"):
        hardware_of(configured(*JOB, *CLUSTER, f"cluster.correction={tmp_path}/none.yaml"))
    file.write_text("hardware: [")
    with pytest.raises(UserError, match="cannot be read"):
        hardware_of(configured(*JOB, *CLUSTER, word))
