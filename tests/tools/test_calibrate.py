"""tools/calibrate on the CPU: the file that it writes, what it refuses, and its collectives on two ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pipeline.config import hardware
from pipeline.planner.communication import Group
from tests.helpers import ROOT, python
from tools.bench import machine


def test_a_calibrated_machine_can_be_planned_on(tmp_path, monkeypatch):
    target = tmp_path / "hardware" / "here.yaml"
    code, printed = python(ROOT / "tools" / "calibrate", "here", f"--out={target}")
    assert code == 0, printed
    assert [path.name for path in target.parent.iterdir()] == ["here.yaml"]
    monkeypatch.setattr(hardware, "CONF_DIR", tmp_path)
    found = hardware.load.__wrapped__("here")
    assert found.name == "here"
    assert found.gpus_per_node == 1
    assert 0 < found.product_share <= 1
    assert 0.001 < found.tflops < 100
    assert "measured by tools/calibrate" in found.source


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h100",), "replace it with --force"),
        (("new", "--like=h1000"), "must be one of a100-40"),
        (("a/b",), "must consist of letters"),
    ],
)
def test_refusals_before_anything_is_measured(call_tool, arguments, message):
    code, printed = call_tool("calibrate", *arguments)
    assert code == 2
    assert message in printed


def collective_shares() -> tuple[float, list[str]]:
    """The share of a link that this rank's collectives sustain by the planner's model."""
    found = machine.collectives(torch.device("cpu"), torch.distributed.group.WORLD)
    here = dataclasses.replace(hardware.load("h100"), link_gb_s=1000.0)
    return machine.collective_share(found, here, Group(2, 2)), [kind for kind, *_ in found]


def test_collectives_of_two_ranks(worlds):
    for share, kinds in worlds(2).run(collective_shares):
        assert 0 < share < 0.5  # gloo on one machine is slower than 500 GB/s
        assert set(kinds) == {"all_reduce", "all_gather", "reduce_scatter"}
