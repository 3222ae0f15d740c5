"""The pictures of the planner, and the files beside them."""

from __future__ import annotations

import json
import struct

import pytest

from pipeline.config.hardware import load, with_node
from pipeline.config.rules import check
from pipeline.planner import plan_report
from pipeline.planner.plan import plan, table
from tests.helpers import pipeline
from tests.world import configured

SMALL = ("model=llama-tiny", "training.sequence_length=128", "training.global_batch_size=32")
NODES = ("cluster.hardware=a100-40", "cluster.nodes=2", "cluster.tasks_per_node=2")


def size_of(path):
    """Width and height of a PNG."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    return struct.unpack(">II", content[16:24])


def test_the_roofline_is_a_picture(tmp_path):
    result = plan(configured("stage=pretrain", *SMALL), 2, with_node(load("h100"), gpus_per_node=2))
    plan_report.draw(result, table(result), tmp_path / "roofline.png")
    width, height = size_of(tmp_path / "roofline.png")
    assert width > height > 500
    assert [path.name for path in tmp_path.iterdir()] == ["roofline.png"]


@pytest.mark.long
def test_the_scaling_curve_is_a_table_a_picture_and_json(tmp_path):
    out, plot = tmp_path / "scaling.json", tmp_path / "scaling.png"
    text = pipeline("stage=plan", "stage.scaling=true", f"stage.out={out}", f"stage.plot={plot}", *SMALL, *NODES)
    points = json.loads(out.read_text())
    assert [point["nodes"] for point in points] == [1, 2]
    assert points[0]["efficiency"] == 1.0
    for point in points:
        assert f"{point['step_time_s']:.3f} s" in text
        assert " ".join(point["settings"]) in text
        assert point["node_hours"] == pytest.approx(point["days"] * 24 * point["nodes"])
    assert min(size_of(plot)) > 500


@pytest.mark.long
def test_the_search_is_a_table_a_picture_and_json(tmp_path):
    out, plot = tmp_path / "search.json", tmp_path / "search.png"
    text = pipeline("stage=plan", "stage.search=true", f"stage.out={out}", f"stage.plot={plot}", *SMALL, *NODES)
    choices = json.loads(out.read_text())
    assert text.strip().splitlines()[-1] == str(plot)
    assert "sbatch" in text
    assert " ".join(choices[0]["settings"]) in text
    assert min(size_of(plot)) > 500


def test_two_kinds_of_plans_and_a_picture_of_none_are_refused():
    config = configured("stage=plan", "stage.search=true", "stage.run=runs/a", "stage.plot=a.png")
    assert [violation.key for violation in check.violations(config, 1)] == ["stage.run"]
    config = configured("stage=plan", "stage.run=runs/a", "stage.plot=a.png")
    assert [violation.key for violation in check.violations(config, 1)] == ["stage.plot"]
