"""tools/chaos_checkpoint: ten faults of its kinds, in two layouts."""

import pytest
import torch

from pipeline.checkpoint import native, save
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.native import Index, TrainState
from pipeline.parallel.pieces import Piece
from tests import warm
from tools.chaos import runs, trajectory


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


def test_a_stale_tensor_is_named(tmp_path):
    """A checkpoint of step 2 with a moment of step 1."""

    def write(run_dir, step, moment):
        values = {"weight": torch.full((6,), float(step)), "exp_avg": torch.full((6,), float(moment)), "exp_avg_sq": torch.ones(6)}
        fragment = Fragment(Piece("norm.weight", (6,)), 0, values)
        save.save_full(tmp_path / run_dir, Index(TrainState(step=step), {}), [fragment], 1000)

    for run_dir, step, moment in (("right", 1, 1), ("right", 2, 2), ("stale", 1, 1), ("stale", 2, 1)):
        write(run_dir, step, moment)
    first, second = native.complete(tmp_path / "stale")
    assert runs.difference(first, tmp_path / "right") == ""
    found = runs.difference(second, tmp_path / "right")
    assert found == "step-00000002: exp_avg of norm.weight differs; it is that of step-00000001"
