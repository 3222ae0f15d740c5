"""tools/chaos_checkpoint: ten faults of its kinds, in two layouts."""

import contextlib
import shutil

import pytest

from tests import warm
from tools.chaos import job, trajectory

pytestmark = pytest.mark.world


def start(arguments, environment, output):
    """Start a process forked from one with all imports done."""
    with open(output, "ab") as file:
        return warm.start(*arguments, environment=environment, output=file.fileno())


def test_a_run_that_is_killed_at_ten_random_moments_ends_as_an_undisturbed_one(tokens, tmp_path):
    layouts = trajectory.LAYOUTS[:2]
    rows = list(trajectory.run(10, 1, layouts, tokens, tmp_path, start, steps=24))
    assert [(row.where, row.problems) for row in rows if row.problems] == []
    assert len(rows) >= 10
    assert {row.layout for row in rows} == {layout.name for layout in layouts}
