"""The number of nodes and the layout of a job by what Slurm has granted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.common import knobs
from pipeline.common.errors import UserError
from pipeline.config import compose, layouts, phases
from pipeline.config.command_line import parse
from pipeline.config.data import RampupConfig
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.launch import moldable
from tests import world
from tests.helpers import pipeline

BASE = ("stage=pretrain", "model=llama-tiny", "run_dir=runs/none", "training.micro_batch_size=1", "training.global_batch_size=12")


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return configured()


def configured(*overrides: str) -> RunConfig:
    return world.configured(*parse([*BASE, *overrides]).overrides)


def layout(**sizes: int) -> list[str]:
    return [f"parallel.{name}={size}" for name, size in sizes.items()]


LAYOUTS = st.dictionaries(
    st.integers(1, 12),
    st.fixed_dictionaries(
        {}, optional={"tensor": st.sampled_from([1, 2, 3, 4]), "pipeline": st.sampled_from([1, 2, 4]), "zero_stage": st.integers(0, 3)}
    ).map(lambda sizes: layout(**sizes)),
    max_size=4,
)


@given(
    by_nodes=LAYOUTS,
    least=st.none() | st.integers(1, 10),
    batch=st.sampled_from([12, 16, 60, 64, 840]),
    tasks=st.sampled_from([1, 2, 4]),
    granted=st.integers(1, 24),
)
def test_a_shape_is_legal_deterministic_and_grows_with_the_nodes(
    by_nodes: dict[int, list[str]], least: int | None, batch: int, tasks: int, granted: int
) -> None:
    settings: dict[str, Any] = {"cluster.layouts": by_nodes, "cluster.min_nodes": least, "training.global_batch_size": batch}
    config = knobs.changed(CONFIG, {**settings, "cluster.tasks_per_node": tasks})
    overrides = ("parallel.tensor=1", "run_dir=runs/none")

    def shape(nodes: int) -> moldable.Shape | None:
        try:
            return moldable.choose(config, overrides, nodes)
        except UserError:
            return None

    chosen, more = shape(granted), shape(granted + 1)
    assert chosen == shape(granted)
    if chosen is None:
        counts = range(min(least or granted, granted), granted + 1) if (least or granted) <= granted else ()
        assert not [n for n in counts if not found_violations(config, n, tasks)]
        return
    assert (least or granted) <= chosen.nodes <= granted
    assert not found_violations(config, chosen.nodes, tasks)
    words = layouts.overrides_of(config, chosen.nodes)
    assert chosen.overrides[len(chosen.overrides) - len(words) :] == words
    assert len({word.partition("=")[0] for word in chosen.overrides}) == len(chosen.overrides)
    if least is not None:
        assert more is not None
        assert more.nodes >= chosen.nodes
        assert all(found_violations(config, n, tasks) for n in range(chosen.nodes + 1, granted + 1))


def found_violations(config: RunConfig, nodes: int, tasks: int) -> list[Any]:
    """Of the rules that the ranks check, with the layout for a number of nodes."""
    return check.violations(layouts.with_overrides(config, layouts.overrides_of(config, nodes)), nodes * tasks)


CONFIG = configured()


def test_the_settings_of_a_layout_replace_those_of_the_job() -> None:
    words = ("parallel.tensor=4", "cluster.min_nodes=2", 'cluster.layouts={3:["parallel.pipeline=3","parallel.tensor=1"]}')
    config = configured(*words)
    shape = moldable.choose(config, [*BASE, *words], 3, tasks_per_node=2)
    assert shape == moldable.Shape(3, (*BASE, *words[1:], "parallel.pipeline=3", "parallel.tensor=1"), shape.layout)
    assert shape.layout == "pipeline 3 x data 2, ZeRO 1, micro-batches of 1"
    assert compose.recompose(shape.overrides).parallel == layouts.with_overrides(config, layouts.overrides_of(config, 3)).parallel
    assert moldable.choose(config, [*BASE, *words], 2, tasks_per_node=2).overrides == (*BASE, *words)


def test_a_job_without_a_range_uses_exactly_its_nodes() -> None:
    assert moldable.choose(CONFIG, BASE, 4).nodes == 4
    with pytest.raises(UserError, match=r"training.global_batch_size=12: must be a multiple of 5 data ranks"):
        moldable.choose(CONFIG, BASE, 5)
    assert moldable.choose(dataclasses.replace(CONFIG, stage=configured("stage=shard").stage), ["a=b"], 5) == moldable.Shape(
        5, ("a=b",), ""
    )


def test_a_job_continues_on_the_nodes_that_are_left() -> None:
    config = configured("cluster.nodes=4", "cluster.min_nodes=2")
    shape = moldable.choose(config, BASE, 3)
    assert (shape.nodes, shape.layout) == (3, "data 3, ZeRO 1, micro-batches of 1")
    with pytest.raises(UserError, match=r"cluster.min_nodes=2: the job has 1 good node\n"):
        moldable.choose(config, BASE, 1)


def test_the_next_job_asks_for_no_more_nodes_than_this_one() -> None:
    """Also if this job asked for other nodes than conf/cluster/ has: those that it got contain the spare ones."""
    for nodes in (6, 9):
        config = configured("cluster.nodes=4", "cluster.spares=2")
        assert f"--nodes={nodes}" in moldable.size_options(config, nodes, None)


def test_a_range_is_refused_if_its_fewest_nodes_have_no_legal_layout() -> None:
    refused = moldable.violations(configured("cluster.nodes=8", "cluster.min_nodes=5"), BASE)
    assert [(v.key, v.value) for v in refused] == [("cluster.min_nodes", 5)]
    assert "no legal layout on 5 nodes x 1 ranks" in refused[0].rule
    assert "must be a multiple of 5 data ranks" in refused[0].rule
    assert refused[0].fix.startswith("set cluster.min_nodes=6")
    legal = configured("cluster.nodes=8", "cluster.min_nodes=4")
    assert moldable.violations(legal, BASE) == []
    assert moldable.idle(legal) == {5: 1, 7: 1, 8: 2}
    assert [v.key for v in moldable.violations(configured("cluster.nodes=2", "cluster.min_nodes=3"), BASE)] == ["cluster.min_nodes"]
    none = moldable.violations(configured("cluster.nodes=8", "cluster.min_nodes=5", "model.layers=3", "parallel.pipeline=4"), BASE)
    assert "on 5, 6, 7, 8 nodes" in none[0].rule


@pytest.mark.parametrize(
    "words, key, message",
    [
        ('cluster.layouts.4=["optimizer.lr=1"]', "cluster.layouts.4", "sets what is no part of a layout"),
        ('cluster.layouts={4:["parallel.tensr=2"]}', "cluster.layouts.4", "did you mean parallel.tensor"),
        ('cluster.layouts={4:["parallel.tensor=two"]}', "cluster.layouts.4", "could not be converted to Integer"),
        ('cluster.layouts={4:["parallel.tensor=0"]}', "cluster.layouts.4", "must be at least 1"),
        ('cluster.layouts={4:["parallel.tensor"]}', "cluster.layouts.4", "is not of the form key=value"),
        ('cluster.layouts={0:["parallel.tensor=2"]}', "cluster.layouts.0", "is for less than one node"),
        ("cluster.choose_layout=planner", "cluster.hardware", "is required by cluster.choose_layout=planner"),
        ('model=mixtral-tiny cluster.layouts={4:["training.micro_batch_size=3"]}', "cluster.layouts.4", "balance loss"),
    ],
)
def test_layouts_that_are_refused(words: str, key: str, message: str) -> None:
    found = check.violations(configured(*words.split(" ")), 4)
    assert [v.key for v in found] == [key]
    assert message in str(found[0])


RAMP = [RampupConfig(4, 4, 2), RampupConfig(6, 8, 2), RampupConfig(10, 6, 3)]
"""Two phases on 2 nodes, one on 3, and the rest with 12 samples on cluster.nodes=4."""


def phased(base: RunConfig, **more: Any) -> RunConfig:
    return knobs.changed(base, {"training.batch_rampup": RAMP, "cluster.nodes": 4, **more})


def test_nodes_follow_the_batch(base: RunConfig) -> None:
    config = phased(base)
    assert [layouts.nodes_of_phase(config, step) for step in (0, 3, 4, 5, 6, 9, 10, 99)] == [2, 2, 2, 2, 3, 3, 4, 4]
    assert [layouts.phase_end(config, step) for step in (0, 5, 6, 10)] == [6, 6, 10, None]
    assert layouts.nodes_of_phase(base, 0) is None
    assert moldable.violations(config, BASE) == []
    assert [moldable.choose(config, BASE, granted=4, step=step).nodes for step in (0, 6, 10)] == [2, 3, 4]
    assert [moldable.cluster_at(config, step).nodes for step in (0, 6, 10)] == [2, 3, 4]
    assert check.violations(config, 3) == []  # the batches 4 and 8 are not for 3 ranks
    with pytest.raises(UserError, match=r"training.batch_rampup.0.value=4: must be a multiple of 3 data ranks"):
        moldable.choose(phased(base, **{"training.batch_rampup": [RampupConfig(4, 4, 3)]}), BASE, 4, step=0)


def test_phases_that_are_refused(base: RunConfig) -> None:
    found = moldable.violations(phased(base, **{"cluster.nodes": 2}), BASE)
    assert [(v.key, v.value) for v in found] == [("training.batch_rampup.2.nodes", 3)]
    found = moldable.violations(phased(base, **{"training.batch_rampup": [RampupConfig(4, 4, 3)]}), BASE)
    assert [v.key for v in found] == ["training.batch_rampup.0.value"]
    assert check.violations(configured("training.batch_rampup=[{until_step:4,value:5,nodes:2}]"), 24) != []


def test_phases_of_training_have_nodes_and_a_layout_of_their_own() -> None:
    plan = (
        "training.phases=[{until_step:20,nodes:2},{until_step:30,nodes:4,sequence_length:128,overrides:['parallel.tensor=2']},"
        "{until_step:40,global_batch_size:4},{global_batch_size:6,nodes:3,overrides:['parallel.tensor=1']}]"
    )
    words = ("model=llama-tiny", "training.sequence_length=64", "training.global_batch_size=8", "training.micro_batch_size=1")
    ramp = "training.batch_rampup=[{until_step:10,value:3,nodes:1}]"
    words += ("stage=pretrain", ramp, "training.steps=200", "cluster.nodes=4", "cluster.tasks_per_node=1", "precision=fp32")
    config = configured(*words, plan)
    assert [layouts.nodes_of_phase(config, step) for step in (0, 9, 10, 20, 30, 39, 40, 99)] == [1, 1, 2, 4, 4, 4, 3, 3]
    assert [layouts.phase_end(config, step) for step in (0, 10, 20, 35, 40)] == [10, 20, 40, 40, None]
    assert check.violations(config, 1) == moldable.violations(config, BASE) == []
    shapes = [moldable.choose(config, BASE, granted=4, step=step) for step in (0, 10, 20, 40)]
    assert [(shape.nodes, shape.layout.partition(", ")[0]) for shape in shapes] == [
        (1, "data 1"), (2, "data 2"), (4, "tensor 2 x data 2"), (3, "data 3"),
    ]  # fmt: skip
    assert [size for _, size in phases.alone(config, 99)] == [1, 4, 4, 3]
    last = check.violations(configured(*words, plan.replace("size:6", "size:8")), 1)
    assert [v.rule for v in last] == ["must be a multiple of 3 data ranks x micro_batch_size 1 (training.phases.3)"]
    found = moldable.violations(knobs.changed(config, {"cluster.nodes": 3}), BASE)
    assert [(v.key, v.value) for v in found] == [("training.phases.1.nodes", 4), ("training.phases.2.nodes", 4)]
    for key, value in (("cluster.layouts", {4: ["parallel.tensor=2"]}), ("cluster.choose_layout", "planner")):
        refused = check.violations(knobs.changed(config, {key: value, "cluster.hardware": "h100"}), 1)
        assert [v.key for v in refused if "each of which has one layout" in v.rule] == [key]


def test_the_step_is_that_of_the_newest_checkpoint(base: RunConfig, tmp_path: Path) -> None:
    config = phased(base, run_dir=str(tmp_path))
    assert moldable.choose(config, BASE, 4).nodes == 2
    folder = tmp_path / "checkpoints/step-00000006"
    folder.mkdir(parents=True)
    (folder / "index.json").write_text("{}")
    assert moldable.choose(config, BASE, 4).nodes == 3


def test_jobs_of_16384_ranks() -> None:
    config = configured("cluster.nodes=4096", "cluster.min_nodes=8", "cluster.tasks_per_node=4", "training.global_batch_size=16384")
    config = knobs.changed(config, {"cluster.layouts": {2048: layout(tensor=2, pipeline=2)}})
    assert moldable.violations(config, BASE) == []
    assert moldable.choose(config, BASE, 4095).nodes == 2048
    assert moldable.choose(config, BASE, 4096).nodes == 4096


def test_layouts_of_the_planner_keep_the_rules_of_the_run(base: RunConfig) -> None:
    config = knobs.changed(base, {"cluster.choose_layout": "planner", "cluster.min_nodes": 2, "cluster.nodes": 4})
    choices = {4: [layout(tensor=3), layout(tensor=2)], 3: [], 2: [layout(pipeline=2)]}

    def planned(nodes: int) -> list[list[str]]:
        return choices[nodes]

    chosen = [moldable.choose(config, BASE, granted, planned=planned) for granted in (2, 3, 4)]
    assert [(shape.nodes, shape.overrides[-1]) for shape in chosen] == [(2, "parallel.pipeline=2")] * 2 + [(4, "parallel.tensor=2")]
    assert moldable.idle(config, BASE, planned) == {3: 1}


@pytest.mark.long
def test_the_planner_is_asked_once_for_a_number_of_nodes(tmp_path: Path) -> None:
    words = [
        "cluster.choose_layout=planner",
        "cluster.hardware=a100-40",
        "cluster.nodes=2",
        "cluster.tasks_per_node=2",
        f"run_dir={tmp_path}",
    ]
    config = configured(*words, "parallel.tensor=4")
    shape = moldable.choose(config, [*BASE, *words, "parallel.tensor=4"], 2)
    composed = compose.recompose(shape.overrides)
    assert check.violations(composed, 4) == []
    assert composed.parallel.tensor <= 2, "tensor ranks stay within a node"
    record = tmp_path / "layouts.json"
    content = json.loads(record.read_text())
    content["nodes"]["2"] = [layout(tensor=1, pipeline=4)]
    record.write_text(json.dumps(content))
    assert moldable.choose(config, [*BASE, *words, "parallel.tensor=4"], 2).overrides[-1] == "parallel.pipeline=4"


@pytest.mark.long
def test_a_run_ends_where_the_next_phase_has_other_nodes(tokens: Path, tmp_path: Path) -> None:
    """In one process, which is one node: the second command goes on, and the losses are those of a run without a break."""
    words = (
        *("stage=pretrain", "model=llama-tiny", "model.vocab_size=304", "precision=fp32", "tracking=disabled", f"data.tokens={tokens}"),
        *("training.global_batch_size=8", "training.micro_batch_size=2", "training.sequence_length=16", "training.steps=6"),
        *("optimizer.warmup_steps=1", "training.validation_batches=1", "parallel.zero_stage=0"),
    )
    ramp = "training.batch_rampup=[{until_step:2,value:2%s},{until_step:4,value:4%s}]"
    pipeline(*words, ramp % ("", ""), f"run_dir={tmp_path}/one")
    phased = (*words, ramp % (",nodes:1", ",nodes:1"), "cluster.nodes=2", f"run_dir={tmp_path}/run")
    assert "stopped after step 4; the same command continues on other nodes" in pipeline(*phased, expect=75)
    pipeline(*phased)
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("one", "run")]
    one, two = ([json.loads(line) for line in text if '"loss"' in line] for text in lines)
    assert [(line["step"], line["samples"], line["loss"]) for line in one] == [
        (line["step"], line["samples"], line["loss"]) for line in two
    ]
