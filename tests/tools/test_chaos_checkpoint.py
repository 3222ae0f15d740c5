"""tools/chaos_checkpoint: ten faults of its kinds, in two layouts."""

import random
from types import SimpleNamespace

import pytest
import torch

from pipeline.checkpoint import catalog, native, save
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.native import Index, TrainState
from pipeline.parallel.pieces import Piece
from tests import warm
from tools.faults import runs, trajectory
from tools.faults.choice import Faults
from tools.faults.job import Traced


def start(arguments, environment, output):
    """Start a process forked from one with all imports done."""
    with open(output, "ab") as file:
        return warm.start(*arguments, environment=environment, output=file.fileno())


@pytest.mark.world
def test_a_run_that_is_killed_at_ten_random_moments_ends_as_an_undisturbed_one(tokens, tmp_path):
    layouts = runs.LAYOUTS[:2]
    rows = list(trajectory.run(10, 1, layouts, tokens, tmp_path, start, steps=24))
    assert [(row.where, row.problems) for row in rows if row.problems] == []
    assert len(rows) >= 10
    assert {row.layout for row in rows} == {layout.name for layout in layouts}


def write(run_dir, step, moment):
    values = {"weight": torch.full((6,), float(step)), "exp_avg": torch.full((6,), float(moment)), "exp_avg_sq": torch.ones(6)}
    fragment = Fragment(Piece("norm.weight", (6,)), 0, values)
    save.save_full(run_dir, Index(TrainState(step=step), {}), [fragment], 1000)


def test_a_stale_tensor_is_named(tmp_path):
    """A checkpoint of step 2 with a moment of step 1."""
    for run_dir, step, moment in (("right", 1, 1), ("right", 2, 2), ("stale", 1, 1), ("stale", 2, 1)):
        write(tmp_path / run_dir, step, moment)
    first, second = native.complete(tmp_path / "stale")
    assert runs.difference(first, tmp_path / "right") == ""
    found = runs.difference(second, tmp_path / "right")
    assert found == "step-00000002: exp_avg of norm.weight differs; it is that of step-00000001"


@pytest.mark.parametrize("keep", [2, 3])
def test_a_checkpoint_that_a_writer_removes_while_it_is_compared_is_a_defect_if_it_is_to_be_kept(tmp_path, keep):
    chance = random.Random(0)
    undisturbed = SimpleNamespace(steps=9, run_dir=tmp_path)
    found = trajectory.Trajectory(start, runs.LAYOUTS[0], undisturbed, tmp_path, tmp_path, None, Traced(), chance, Faults(chance))
    found._keep = keep
    for step in (1, 2, 3):
        write(tmp_path / "run", step, step)
    first = native.complete(tmp_path / "run")[0]
    catalog.prune(tmp_path / "run", 2)
    found._check_removal(first)
    problem = "step-00000001 was removed, although 2 checkpoints are newer and checkpoint.keep=3"
    assert [row.problems for row in found._rows] == ([] if keep == 2 else [[problem]])
