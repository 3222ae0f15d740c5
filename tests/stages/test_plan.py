"""stage=plan: the printed command starts the job that was planned, and no command is printed for a job that does not fit."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Sequence

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from pipeline.common.errors import UserError
from pipeline.common.ranks import detect
from pipeline.config import command_line, compose, hardware, layout, warmup
from pipeline.config.paths import CONF_DIR
from pipeline.config.planned import job_stage, planned_job
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.launch import live
from pipeline.planner import run_cost, site_correction
from pipeline.planner.plan import hardware_of, plan
from pipeline.planner.plan_report import head_lines
from pipeline.stages import plan as stage
from tests.world import configured

A100 = ("cluster.hardware=a100-40", "cluster.tasks_per_node=4", "cluster.gpus_per_node=4")
TINY = ("stage=plan", "model=llama-tiny", *A100)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    """Run stage=plan in this process and return what it prints."""

    def run(*words: str) -> str:
        config = configured_as(words)
        with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            composed = hydra.compose("config", command_line.parse(words).overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(composed)
        try:
            check.check(config, layout.job_size(config, 1))
            stage.run(config, detect())
        finally:
            HydraConfig.instance().cfg = None
        return capsys.readouterr().out

    yield run
    HydraConfig.instance().cfg = None


def configured_as(words: Sequence[str]) -> RunConfig:
    """The configuration that a command line composes."""
    compose.register()
    return compose.recompose(list(words))


def submitted(text: str, job: str = "pretrain") -> RunConfig:
    """The configuration of the job that the printed command starts, as a dry run composes it."""
    line = next(line for line in text.splitlines() if line.startswith("sbatch "))
    words = shlex.split(line)
    arguments = words[words.index(f"slurm/{job}.sbatch") + 1 :]
    return configured_as([f"stage={job}", "dry_run=true", *arguments])


def differences(one: RunConfig, other: RunConfig) -> dict[str, tuple[object, object]]:
    """The fields in which two jobs differ, beside the stage and the dry run."""
    left, right = dataclasses.asdict(one), dataclasses.asdict(other)
    flat = {(group, name) for group, fields in left.items() if isinstance(fields, dict) for name in fields}
    found = {
        f"{group}.{name}": (left[group].get(name), right[group].get(name)) for group, name in flat if group not in ("stage", "dry_run")
    }
    found["run_dir"] = left["run_dir"], right["run_dir"]
    return {key: pair for key, pair in found.items() if pair[0] != pair[1]}


#: Settings of every kind: quotes, spaces, lists, null, numbers, keys of user-defined names, added keys, groups.
SETTINGS = (
    """run_dir="my runs/it's #1\"""",
    "run_dir='a=b, c'",
    'data.input=["/a b/c.jsonl",/d]',
    "data.exclude=['.*','*.tmp']",
    "data.blend={web: {weight: 3, max_epochs: null}, code: {weight: 1, corpus: default}}",
    "+lora.rank_pattern={blocks.0.*: 4}",
    "model.head_width=null",
    "training.activation_budget=null",
    "training.batch_rampup=[{until_step:10,value:64},{until_step:20,value:128}]",
    "training.sequence_warmup=[{until_step:5,value:64}]",
    "tracking.name='${model.family} ${training.steps}'",
    "cluster.sbatch=['--exclusive','--comment=two words']",
    "cluster.account=fir",
    "parallel.tensor=2",
    "parallel.zero_stage=3",
    "training.global_batch_size=256",
    "optimizer.lr=1e-3",
    "precision=fp32",
    "cluster=devcluster",
    "tokenizer=unigram",
)


def check_command(printed, words: Sequence[str], tokens: int | None) -> None:
    """The printed command starts the job of these settings."""
    command = [*TINY, *words, *([] if tokens is None else [f"stage.tokens={tokens}"])]
    wanted, found = configured_as(command), submitted(printed(*command))
    changed = differences(wanted, found)
    if tokens is not None:
        changed.pop("training.steps", None)
        changed.pop("tracking.name", None)  # shows the number of steps
        assert warmup.samples(found.training, found.training.steps) * found.training.sample_length >= tokens
    assert not changed


@pytest.mark.parametrize("tokens", [10**10, pytest.param(None, marks=pytest.mark.long)])
def test_the_printed_command_starts_the_planned_job(printed, tokens):
    check_command(printed, ["lora.rank=8", SETTINGS[0], *SETTINGS[2:]], tokens)


@pytest.mark.long
@settings(deadline=None, max_examples=4, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.sampled_from(SETTINGS), unique_by=lambda word: word.partition("=")[0].lstrip("+"), max_size=8),
    tokens=st.none() | st.integers(20_000_000, 10**11),
)
def test_commands_of_some_settings_start_the_planned_job(printed, words, tokens):
    adapters = ["lora.rank=8"] if any("rank_pattern" in word for word in words) else []
    check_command(printed, [*words, *adapters], tokens)


@pytest.mark.long
def test_the_command_replaces_what_an_experiment_sets(printed, tmp_path):
    (tmp_path / "experiment").mkdir()
    own = "# @package _global_\nparallel: {tensor: 4}\ntraining: {steps: 300, micro_batch_size: 8}\noptimizer: {lr: 0.001}\n"
    (tmp_path / "experiment" / "own.yaml").write_text(own)
    command = (*TINY, f"--config-dir={tmp_path}", "experiment=own", "stage.tokens=2e7")
    wanted, found = configured_as(command), submitted(printed(*command))
    assert found.training.steps == 1221
    assert set(differences(wanted, found)) == {"training.steps"}
    text = printed(*command, "stage.search=true", "training.global_batch_size=64")
    found, best = submitted(text), next(line for line in text.splitlines() if " best " in line)
    assert " parallel.tensor=" not in best  # one rank holds the model: the tensor size of the experiment must not return
    assert found.parallel.tensor == 1
    assert f"training.micro_batch_size={found.training.micro_batch_size}" in best
    assert found.training.steps == 1221


def test_other_words_of_the_stage_do_not_reach_the_job(printed):
    submitted(printed(*TINY, "++stage.tokens=2e7", "++dry_run.rank=0"))


def test_tokens_decide_the_warm_up_rules_and_contradict_other_steps(printed):
    assert submitted(printed(*TINY, "stage.tokens=1e9", "optimizer.warmup_steps=2000")).optimizer.warmup_steps == 2000
    with pytest.raises(UserError, match=r"optimizer.warmup_steps=100: .*training.steps=7"):
        printed(*TINY, "stage.tokens=1e5")
    with pytest.raises(UserError, match=r"stage.tokens=.*training.steps=61036, and the command line has training.steps=500"):
        printed(*TINY, "stage.tokens=1e9", "training.steps=500")
    with pytest.raises(UserError, match=r"stage.tokens=1e\+18: takes training.steps="):
        printed(*TINY, "stage.tokens=1e18")
    assert submitted(printed(*TINY, "stage.tokens=8192000", "training.steps=500")).training.steps == 500


def test_a_job_that_does_not_fit_has_no_command_and_no_cost(printed, capsys, tmp_path):
    job = ("stage=plan", "model=llama3.2-1b", "training.sequence_length=512", "training.micro_batch_size=8", "cluster.hardware=v100-16")
    with pytest.raises(UserError) as refused:
        printed(*job, f"stage.out={tmp_path}/plan.json")
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    for words in ("sbatch", "node-hours", "of the peak"):
        assert words not in text
    assert "does not fit: it needs" in str(refused.value)
    assert "no layout of 1 ranks fits (the smallest layout needs" in str(refused.value)
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is False
    text = printed(*job, "cluster.check_memory=false")
    assert "DOES NOT FIT" in text
    assert "sbatch" in text


def test_what_a_command_lacks_is_named():
    def said(*words: str) -> str:
        config = configured_as(["stage=plan", "model=llama-tiny", *words])
        return "\n".join(live.lines(planned_job(config), layout.job_size(config, 1), words, has_weights=True))

    text = said("cluster=juwels")
    assert "cluster.account is not set, and cluster=juwels requires it" in text
    assert "--nodes=4 --ntasks-per-node=4 --partition=booster --cpus-per-task=12 --gpus-per-node=4" in text
    for given_by in ("cluster.account=fir", "cluster.sbatch=['--account=fir']"):
        assert "requires it" not in said("cluster=juwels", given_by)
    assert "no GPUs are requested: add cluster.gpus_per_node=8" in said("cluster.hardware=a100-80", "cluster.tasks_per_node=8")
    assert "cluster.gpus_per_node=4 and cluster.tasks_per_node=1 differ" in said("cluster.hardware=a100-80", "cluster.gpus_per_node=4")
    assert "one rank a node" in said("cluster.hardware=a100-80", "cluster.sbatch=['--gres=gpu:1']")


@pytest.mark.long
def test_fine_tuning_is_planned_as_the_job_that_it_is(printed, tmp_path):
    """The stage follows from the settings; a classifier has its labels, and a longer context the model that stage=finetune makes."""
    (tmp_path / "lines.jsonl").write_text('{"text": "good", "label": "yes"}\n{"text": "bad", "label": "no"}\n')
    data, none = f"data.instructions.train=[{tmp_path}/lines.jsonl]", f"run_dir={tmp_path}/none"
    chats = printed(*TINY, data, none, "lora.rank=4", "lora.quantize=nf4", "training.context_factor=2", "training.sequence_length=512")
    assert submitted(chats, "finetune").lora.quantize == "nf4"
    assert "adapters of rank 4, the weights are frozen (nf4 in the blocks)" in chats
    assert "checkpoint.initialize_from is not set" in chats
    preferences = printed(*TINY, data, none, "lora.rank=4", "training.objective=dpo")
    assert re.search(r"^  reference +\d", preferences, re.MULTILINE)
    encoder = ("stage=plan", "model=bert-tiny", *A100, "training.objective=classification", data, none)
    assert submitted(printed(*encoder), "finetune").objective == "classification"
    stored = printed(*TINY, data, none, "training.objective=dpo")
    assert not re.search(r"^  reference +\d", stored, re.MULTILINE), "all weights: its log-probabilities are read"
    with pytest.raises(UserError, match="bidirectional encoder"):
        printed(*TINY, data, none, "training.objective=classification", "stage.search=true")
    assert "checkpoint.initialize_from is not set" in printed(*TINY, none, "lora.rank=4")


@pytest.mark.parametrize(
    "words", [[], ["lora.rank=4", "data.instructions.train=[unread.jsonl]"], ["training.objective=dpo", "lora.rank=4"]]
)
def test_a_plan_has_the_defaults_of_the_planned_job(words):
    """A fine-tuning job of the printed command has the batch and the warm-up that were planned."""
    plan_of = configured(*TINY, *words, "training.steps=500")
    job = configured(f"stage={job_stage(plan_of)}", *words, "training.steps=500")
    assert plan_of.training.global_batch_size == job.training.global_batch_size
    assert plan_of.optimizer.warmup_steps == job.optimizer.warmup_steps
    assert configured(*TINY, *words, "training.global_batch_size=8").training.global_batch_size == 8


def test_the_planned_fine_tuning_is_the_submitted_one(printed, tmp_path):
    """Fewer steps than the warm-up of pretraining are planned, too."""
    words = ("lora.rank=4", f"data.instructions.train=[{tmp_path}/unread.jsonl]", f"run_dir={tmp_path}/none", "stage.tokens=1e5")
    text = printed(*TINY, *words)
    job = submitted(text, "finetune")
    steps = math.ceil(1e5 / (job.training.global_batch_size * job.training.sequence_length))
    assert job.training.steps == steps
    assert f"tokens = {steps:,} steps" in text


def test_every_collective_is_a_row_of_the_table(printed):
    text = printed("stage=plan", "model=gpt-tiny", *A100, "parallel.pipeline=2", "parallel.zero_stage=2")
    rows = {(name, phase): int(count) for name, phase, count in re.findall(r"^  (\w+ \([\w ]+\)) +(\w+) +(\d+) ", text, re.MULTILINE)}
    micro_batches = 8
    assert rows["send (pipeline)", "forward"] == rows["send (pipeline)", "backward"] == micro_batches
    assert rows["reduce_scatter (data)", "backward"] > micro_batches * 4  # ZeRO 2: each block of every micro-batch
    assert rows["all_gather (data)", "forward"] >= 4
    assert rows["all_reduce (tied embedding)", "backward"] == 2


def test_the_run_costs_what_its_steps_take():
    """Steps of a ramp-up take the time of their own batch, and have its tokens."""
    job = ("stage=pretrain", "model=llama-tiny", *A100, "training.steps=100", "training.compile=off")

    def planned(*words: str) -> tuple[float, dict[str, float]]:
        config = configured(*job, *words)
        result = plan(config, 4, hardware_of(config))
        return result.estimate.step_time, run_cost.cost(result)

    full, costs = planned()
    small, _ = planned("training.global_batch_size=16")
    _, ramped = planned("training.batch_rampup=[{until_step:40,value:16}]")
    assert small < full
    assert costs["days"] == pytest.approx(100 * full / 86400)
    assert ramped["days"] == pytest.approx((40 * small + 60 * full) / 86400)
    assert ramped["tokens"] == (40 * 16 + 60 * 64) * 256
    _, warmed = planned("training.sequence_warmup=[{until_step:40,value:64}]")
    assert warmed["tokens"] == costs["tokens"]
    assert warmed["days"] < costs["days"]


@pytest.mark.parametrize(("seconds", "text"), [(0.5, "0.50 seconds"), (90, "1.50 minutes"), (5400, "1.50 hours"), (129600, "1.50 days")])
def test_durations_are_readable(seconds, text):
    assert run_cost.duration(seconds) == text


def test_every_time_and_memory_has_a_range(printed, tmp_path):
    """The printed and written ranges are those of site_correction.py; a correction of the site narrows those of times."""
    text = printed(*TINY, f"stage.out={tmp_path}/plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())
    low, high = found["step_time_range_s"]
    assert low < found["step_time_s"] < high
    assert f"{low:10.4f} to {high:.4f} s contains 80% of unseen runs" in text
    low, high = found["memory_range_bytes"]
    assert low < found["memory_bytes"]["total"] < high
    assert f"{low / 1e9:9.2f} to {high / 1e9:.2f} GB" in text
    assert re.search(r"the run: .*\n.*node-hours.*\n  \S+ \w+ to \S+ \w+, .* contain 80% of unseen runs", text)
    one_rank = ("cluster.tasks_per_node=1", "cluster.gpus_per_node=1", "training.global_batch_size=8")
    text = printed(*TINY, "stage.search=true", *one_rank)
    assert "ranges that contain 80% of unseen runs" in text
    assert re.search(r"the best layout\n  step +\d.* tokens/s and .* TFLOP/s a GPU \(.*% of the bf16 peak\)\n", text)
    site_correction.write(tmp_path / "site.yaml", site_correction.SiteCorrection("a100-40", 1.25, 1.25))
    text = printed(*TINY, f"stage.out={tmp_path}/site.json", f"cluster.correction={tmp_path}/site.yaml")
    corrected = json.loads((tmp_path / "site.json").read_text())
    assert corrected["step_time_s"] == pytest.approx(1.25 * found["step_time_s"], rel=1e-4)
    assert f"corrected by {tmp_path}/site.yaml" in text
    (own, other) = (range_[1] / range_[0] for range_ in (corrected["step_time_range_s"], found["step_time_range_s"]))
    assert own < other


def test_a_measured_run_corrects_later_plans(printed, tmp_path):
    config = configured("stage=pretrain", *TINY[1:])
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
    seconds = 1.4 * plan(config, 4, hardware_of(config)).estimate.step_time
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps({"step": step, "seconds": seconds}) for step in range(9)))
    words = ("stage=plan", f"stage.run={tmp_path}", f"cluster.correction={tmp_path}/site.yaml")
    text = printed(*words)
    assert "correction of a100-40 by 1 runs" in text
    assert "DOES NOT CONTAIN" not in text
    before, after = (float(value) for value in re.search(r"measured (\S+), corrected (\S+) ", text).groups())
    assert before == pytest.approx(1 / 1.4, abs=1e-3)
    assert before < after < 1


def test_the_time_of_8_bits_is_said_to_be_that_of_16():
    config = configured("stage=pretrain", "model=llama-tiny", "precision=fp8")
    assert "planned with their time in bf16" in "\n".join(head_lines(plan(config, 1, hardware.load("h100"))))
