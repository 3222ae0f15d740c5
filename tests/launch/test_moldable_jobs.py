"""Training runs whose jobs get different numbers of nodes, on the dev cluster: the losses are those of one job in one layout."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.common import events
from tests.helpers import pipeline
from tests.launch.test_slurm_jobs import DEVCLUSTER, MODEL, command, ended, sbatch, slurm, succeeded, training_steps  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slurm, pytest.mark.long]

#: 12 samples a step: data ranks 4, 2 or 3, micro-batches of 1.
STEPS = 80
TRAINING = [
    f"training.steps={STEPS}", "optimizer.warmup_steps=10", "training.global_batch_size=12", "training.micro_batch_size=1",
    "training.sequence_length=16", "training.validation_batches=1", "checkpoint.every=0",
]  # fmt: skip
LAYOUTS = (
    'cluster.layouts={2:["parallel.pipeline=2","parallel.zero_stage=1"],3:["parallel.zero_stage=0"],'
    '4:["parallel.tensor=2","parallel.zero_stage=2"]}'
)
TOLERANCE = 1e-5
"""Of losses in fp32: sums over ranks and micro-batches are added in another order."""


def waiting(nodes: int) -> int:
    """Submit a job that occupies nodes as soon as they are free, before any other job; returns its id."""
    return sbatch(Path("/dev/null"), "--partition=high", f"--nodes={nodes}", "--exclusive", "--wrap=sleep 900")


def trained(run: Path, step: int, log: Path) -> None:
    """Wait until a run has made some steps."""
    for _ in range(4800):
        if (run / "metrics.jsonl").is_file() and len(training_steps(run)) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def starts(run: Path) -> list[tuple[int, str]]:
    """The numbers of nodes on which the ranks of a run were started, and their layouts."""
    return [(len(event["nodes"]), event["layout"]) for event in events.read(run) if event["event"] == "ranks_start"]


def equal_losses(run: Path, undisturbed: Path) -> None:
    """Every step was made once, with the samples and the loss of the undisturbed run."""
    found, expected = training_steps(run), training_steps(undisturbed)
    assert [line["step"] for line in found] == [line["step"] for line in expected] == list(range(1, STEPS + 1))
    assert [line["samples"] for line in found] == [line["samples"] for line in expected]
    losses = [line["loss"] for line in expected]
    print("largest difference of a loss:", max(abs(line["loss"] - loss) for line, loss in zip(found, losses, strict=True)))
    assert [line["loss"] for line in found] == pytest.approx(losses, rel=0, abs=TOLERANCE)
    assert max(losses) - min(losses) > 100 * TOLERANCE


def test_a_job_gets_4_nodes_then_2_then_3(tokens: Path, tmp_path: Path) -> None:
    """One job, which is put back into the queue twice. Other jobs take the nodes that it does not get."""
    run, log = tmp_path / "run", tmp_path / "log"
    words = [*MODEL, *TRAINING, f"data.tokens={tokens}"]
    pipeline("stage=pretrain", *words, f"run_dir={tmp_path}/one")
    moldable = ["cluster.nodes=4", "cluster.min_nodes=2", LAYOUTS, f"run_dir={run}"]
    number = sbatch(log, "--nodes=2-4", "--mincpus=1", "slurm/pretrain.sbatch", *words, *moldable)
    trained(run, 5, log)
    others = waiting(2)
    command("scancel", "--signal=USR1", str(number))
    trained(run, len(training_steps(run)) + 10, log)
    one = waiting(1)
    command("scancel", "--signal=USR1", str(number))
    command("scancel", str(others))
    try:
        succeeded(number, log)
    finally:
        command("scancel", str(others), str(one))
        ended(one)
    assert starts(run) == [
        (4, "tensor 2 x data 2, ZeRO 2, micro-batches of 1"),
        (2, "pipeline 2 x data 1, ZeRO 1, micro-batches of 1"),
        (3, "data 3, ZeRO 0, micro-batches of 1"),
    ]
    equal_losses(run, tmp_path / "one")
    assert json.loads((run / "manifest.json").read_text())["totals"]["world_size"] == 3


def test_nodes_follow_the_batch(tokens: Path, tmp_path: Path) -> None:
    """Phases of 4, 8 and 12 samples a step on 1, 2 and 4 nodes: the job comes back with the nodes of the next phase."""
    run, log = tmp_path / "run", tmp_path / "log"
    words = [*MODEL, *TRAINING, f"data.tokens={tokens}"]
    ramp = "training.batch_rampup=[{until_step:10,value:4%s},{until_step:30,value:8%s}]"
    pipeline("stage=pretrain", *words, ramp % ("", ""), f"run_dir={tmp_path}/one")
    phases = [ramp % (",nodes:1", ",nodes:2"), "cluster.nodes=4", 'cluster.layouts.4=["parallel.tensor=2"]', f"run_dir={run}"]
    number = sbatch(log, "--nodes=1", "--ntasks-per-node=1", "slurm/pretrain.sbatch", *words, *phases)
    text = succeeded(number, log)
    assert [nodes for nodes, _ in starts(run)] == [1, 2, 4], text
    known: list[dict[str, Any]] = [event for event in events.read(run) if event["event"] == "ranks_end"]
    assert [event["step"] for event in known] == [10, 30, STEPS]
    equal_losses(run, tmp_path / "one")


def test_nodes_and_layout_follow_the_phases(tokens: Path, tmp_path: Path) -> None:
    """A longer context on more nodes and another axis, and back to fewer; the batches are those of one process."""
    run, log = tmp_path / "run", tmp_path / "log"
    words = [*MODEL, *TRAINING, f"data.tokens={tokens}", "training.document_mask=true", "model.max_positions=64"]
    plan = (
        "training.phases=[{until_step: 20%s}, {until_step: 50, sequence_length: 64, global_batch_size: 4, overrides: ["
        '"model.rope_theta=500000"%s]%s}, {sequence_length: 32, global_batch_size: 6%s}]'
    )
    pipeline("stage=pretrain", *words, plan % ("", "", "", ""), f"run_dir={tmp_path}/one")
    phases = plan % (", nodes: 2", ', "parallel.tensor=2"', ", nodes: 4", ', nodes: 3, overrides: ["parallel.tensor=1"]')
    number = sbatch(log, "--nodes=2", "--ntasks-per-node=1", "slurm/pretrain.sbatch", *words, phases, "cluster.nodes=4", f"run_dir={run}")
    text = succeeded(number, log)
    assert [(nodes, layout.partition(",")[0]) for nodes, layout in starts(run)] == [
        (2, "data 2"),
        (4, "tensor 2 x data 2"),
        (3, "data 3"),
    ], text
    equal_losses(run, tmp_path / "one")


def test_a_job_that_loses_a_node_continues_on_the_others(tokens: Path, tmp_path: Path) -> None:
    """No spare node, and no way back to the queue: 4 nodes are 3, of which the layout uses 2."""
    run, log = tmp_path / "run", tmp_path / "log"
    words = [*MODEL, *TRAINING, f"data.tokens={tokens}", "checkpoint.every=5"]
    pipeline("stage=pretrain", *words, f"run_dir={tmp_path}/one")
    moldable = ["cluster.nodes=4", "cluster.min_nodes=2", 'cluster.layouts.2=["parallel.tensor=2"]']
    number = sbatch(log, "--nodes=2-4", "--mincpus=1", "--no-kill", "slurm/pretrain.sbatch", *words, *moldable, f"run_dir={run}")
    trained(run, 12, log)
    subprocess.run([DEVCLUSTER, "kill", "n3"], check=True)
    try:
        text = succeeded(number, log)
    finally:
        subprocess.run([DEVCLUSTER, "revive", "n3"], check=True)
    assert starts(run) == [(4, "tensor 2 x data 2, ZeRO 1, micro-batches of 1"), (2, "tensor 2 x data 1, ZeRO 1, micro-batches of 1")], text
    equal_losses(run, tmp_path / "one")


def test_fine_tuning_on_other_nodes(tokens: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Phases on 1, 2 and 3 nodes, from the weights of a run."""
    run, log, data = tmp_path / "run", tmp_path / "log", tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n} and {n}?", "completion": f" {2 * n}."}) + "\n" for n in range(60)))
    pipeline(
        "stage=pretrain",
        *MODEL,
        *TRAINING,
        "training.steps=2",
        "optimizer.warmup_steps=1",
        f"data.tokens={tokens}",
        f"run_dir={tmp_path}/base",
    )
    words = [
        "precision=fp32", "tracking=disabled", f"checkpoint.initialize_from={tmp_path}/base", f"tokenizer.path={tokenizer}",
        f"data.instructions.train=[{data}]", *TRAINING, "training.sequence_length=64",
    ]  # fmt: skip
    ramp = "training.batch_rampup=[{until_step:10,value:4%s},{until_step:30,value:8%s}]"
    pipeline("stage=finetune", *words, ramp % ("", ""), f"run_dir={tmp_path}/one")
    phases = [ramp % (",nodes:1", ",nodes:2"), "cluster.nodes=3", 'cluster.layouts.2=["parallel.pipeline=2"]', "cluster.layouts.3=[]"]
    number = sbatch(log, "--nodes=1", "--ntasks-per-node=1", "slurm/finetune.sbatch", *words, *phases, f"run_dir={run}")
    text = succeeded(number, log)
    assert [nodes for nodes, _ in starts(run)] == [1, 2, 3], text
    equal_losses(run, tmp_path / "one")
