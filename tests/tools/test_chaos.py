"""tools/chaos: two faults on a cluster of its own, what is drawn, and that a run that differs is refused."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
import torch

from pipeline.checkpoint import save
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.native import Index, TrainState
from pipeline.parallel.pieces import Piece
from tests.helpers import ROOT
from tools.faults import runs
from tools.faults.job import Traced
from tools.faults.jobs import cases
from tools.faults.jobs.kind import ANY_TIME, SUBMISSION
from tools.faults.jobs.kinds import KINDS


@pytest.mark.slurm
@pytest.mark.long
def test_a_killed_rank_and_a_canceled_job(tokens, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("requires root: tools/devcluster assigns a separate host name to each node")
    if not shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin"):
        pytest.skip("requires the packages slurm-wlm and munge")
    (tmp_path / "tokens").symlink_to(tokens)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # noqa: PTH120
    base = tempfile.mkdtemp(prefix="chaos-cluster-")  # munged refuses folders below one that others cannot enter
    os.chmod(base, 0o755)  # noqa: PTH101
    cluster = {"DEVCLUSTER_BASE": base, "DEVCLUSTER_PORT": str(15_000 + os.getpid() % 190 * 10), "PATH": path}
    words = ["--faults", "2", "--seed", "1", "--layout", "data2", "--only", "kill rank", "--only", "scancel", "--moment", "mid-step"]
    command = [str(ROOT / "tools" / "chaos"), *words, "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **cluster}, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(base)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert sorted(line.split("mid-step")[0].strip() for line in lines if line.endswith(" OK")) == ["kill rank", "scancel"]
    assert re.match(r"2 faults \(kill rank 1, scancel 1\): 2 OK, 0 failed", lines[-1])


def run_of(folder, losses, weight=1.0, steps=None):
    """A complete run with a checkpoint of its last step."""
    folder.mkdir()
    steps = steps or range(1, len(losses) + 1)
    lines = [
        {"step": s, "samples": 4 * s, "loss": x, "grad_norm": 1.0, "lr": 0.01, "skipped": 0} for s, x in zip(steps, losses, strict=True)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {"weight": torch.full((6,), weight), "exp_avg": torch.ones(6), "exp_avg_sq": torch.ones(6)}
    save.save_full(folder, Index(TrainState(step=3), {}), [Fragment(Piece("norm.weight", (6,)), 0, values)], 1000)
    (folder / "manifest.json").write_text("{}")
    return folder


def test_what_differs_from_an_undisturbed_run_is_named(tmp_path):
    right = run_of(tmp_path / "right", [3.0, 2.0, 1.0])
    assert runs.compare(run_of(tmp_path / "same", [3.0, 2.0, 1.0]), right, same_layout=True) == []

    rounded = run_of(tmp_path / "rounded", [3.0, 2.0 + 1e-6, 1.0], 1 + 1e-6)
    assert runs.compare(rounded, right, same_layout=False) == []
    metrics, weight = runs.compare(rounded, right, same_layout=True)
    assert metrics.startswith("metrics.jsonl: (2, 8, 2.000001")
    assert weight == "step-00000003: weight of norm.weight differs"

    other = run_of(tmp_path / "other", [3.0, 2.0, 1.0], 1.1)
    assert runs.compare(other, right, same_layout=False) == ["step-00000003: weight of norm.weight differs by 1.0e-01"]
    repeated = run_of(tmp_path / "repeated", [3.0, 2.0, 2.0, 1.0], steps=[1, 2, 2, 3])
    assert runs.compare(repeated, right, same_layout=True) == ["metrics.jsonl has the steps [1, 2, 2, 3], not [1, 2, 3]"]
    (other / "manifest.json").unlink()
    assert runs.compare(other, right, same_layout=True) == ["manifest.json is missing"]


def test_every_fault_is_drawn_at_the_lines_of_its_moments():
    lines = {
        ("rank 0", "pipeline/training/resume.py", 1, "starting"): 1,
        ("rank 0", "pipeline/training/trainer.py", 2, "training"): 12,
        ("rank 1", "pipeline/checkpoint/staging.py", 3, "training"): 6,
        ("writer", "pipeline/checkpoint/writer.py", 4, "training"): 6,
        ("writer", "pipeline/checkpoint/commit.py", 5, "training"): 6,
        ("rank 1", "pipeline/training/validation.py", 6, "training"): 3,
        ("rank 0", "pipeline/checkpoint/staging.py", 7, "finishing"): 1,
        ("rank 0", "pipeline/training/run.py", 8, "leaving"): 1,
        ("rank 0", "pipeline/checkpoint/staged_file.py", 9, "training"): 6,
        ("rank 0", "pipeline/checkpoint/catalog.py", 10, "training"): 6,
    }
    layouts = tuple(cases.LAYOUTS.values())
    drawn = cases.Cases(random.Random(0), KINDS, layouts)
    found = [drawn.draw({layout.name: Traced(lines) for layout in layouts}) for _ in range(len(KINDS) * 12)]
    numbers = {}
    for case in found:
        assert case.moment in KINDS[case.fault].moments
        if case.line is None:
            assert case.moment in (ANY_TIME, SUBMISSION)
        else:
            numbers.setdefault(case.moment, set()).add(case.line[2])
            assert 1 <= case.count <= lines[case.line]
        assert not (KINDS[case.fault].ranks and case.line and case.line[0] == "writer")
    one = {"start-up": 1, "first step": 2, "mid-step": 2, "staging": 3, "validation": 6, "finishing": 7, "after the manifest": 8}
    assert numbers == {**{moment: {line} for moment, line in one.items()}, "writing": {4, 9}, "committing": {5, 10}}
    for name, kind in KINDS.items():
        assert {case.moment for case in found if case.fault == name} == set(kind.moments)
