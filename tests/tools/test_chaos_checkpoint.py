"""tools/chaos_checkpoint: six faults of its kinds, in two layouts."""

import functools
import random

import pytest
import torch

from pipeline.checkpoint import native, save
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.native import Index, TrainState
from pipeline.parallel.pieces import Piece
from tools.faults import driver, runs
from tools.faults.job import preload
from tools.faults.jobs import local
from tools.faults.jobs.kind import MOMENTS


@pytest.mark.long
@pytest.mark.world
def test_a_run_that_is_killed_at_a_random_moment_ends_as_an_undisturbed_one(tokens, tmp_path):
    preload()
    layouts, chance = list(local.LAYOUTS.values())[:2], random.Random(1)
    scene = functools.partial(local.LocalScene, data=tokens, chance=chance)
    rows = [row for row in driver.rows(scene, local.KINDS, layouts, MOMENTS, 6, 1, tmp_path) if row.seen]
    assert [(row.case.where, row.problems) for row in rows if row.problems] == []
    assert len(rows) == 6
    assert {row.case.layout.name for row in rows} == {layout.name for layout in layouts}


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
