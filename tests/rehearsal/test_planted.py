"""Faults that are planted into jobs (planted.py) are named by their rehearsal, with the line of code; jobs without them are clean."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rehearsal import test_contract
from tests.rehearsal.planted import FAULTS, line
from tests.rehearsal.test_matrix import rehearsed

pytestmark = [pytest.mark.long, *test_contract.pytestmark]
EXCHANGE = line("parallel/expert_parallel.py", "self._work = dist.all_to_all_single(")
RING = line("parallel/ring_attention.py", "self._work = dist.batch_isend_irecv(")
GATHER = line("training/weight_gathering.py", "dist.all_gather_into_tensor(")
REDUCE = line("training/gradient_reduction.py", "dist.reduce_scatter_tensor(")
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    return rehearsed("planted.py", list(FAULTS), tmp_path_factory.mktemp("planted"))


def replay_of(results: Results, name: str) -> dict[str, Any]:
    """What the replay of a job says."""
    assert results[name]["code"] == 0, results[name]["log"]
    found: dict[str, Any] = results[name]["report"]["replay"]
    return found


def late(results: Results, name: str) -> int:
    """Gatherings that are queued behind others that are needed later."""
    return sum(gather["count"] for gather in replay_of(results, name)["late_gathers"] if gather["site"] == GATHER)


@pytest.mark.parametrize("name", [name for name in FAULTS if name.startswith("none")])
def test_the_job_without_faults_is_clean(results: Results, name: str) -> None:
    replayed = replay_of(results, name)
    assert replayed["races"] == []
    assert results[name]["report"]["steps"]["waits"] == []
    assert late(results, name) <= 1
    assert replayed["run_ahead_memory"]["peak"] == replayed["run_ahead_memory"]["allocated"]
    assert "blocks keep" not in results[name]["log"]


@pytest.mark.parametrize(
    ("name", "kind", "site"),
    [
        ("no wait for gathered weights", "read before its write", GATHER),
        ("no wait for reduced gradients", "read before its write", REDUCE),
        (
            "no wait for tokens of experts",
            "read before its write",
            line("parallel/expert_parallel.py", "self._work = dist.all_to_all_single("),
        ),
        ("no wait in the ring", "read before its write", RING),
        ("freed buffer", "reused while used", REDUCE),
    ],
)
def test_a_race_is_named_with_its_line(results: Results, name: str, kind: str, site: str) -> None:
    races = replay_of(results, name)["races"]
    assert any(race["kind"] == kind and race["first"][1] == site for race in races), races[:3]
    assert f"{kind}: " in results[name]["log"]


def test_gathers_in_the_wrong_order_are_named(results: Results) -> None:
    assert late(results, "gathers in the wrong order") >= 4
    assert f"all_gather (data) at {GATHER}" in results["gathers in the wrong order"]["log"]


def test_memory_that_record_stream_holds_is_named(results: Results) -> None:
    memory = replay_of(results, "unbounded gradients")["run_ahead_memory"]
    assert memory["peak"] > 1.2 * memory["allocated"]
    assert any(site.startswith("training/gradient_reduction.py:") for site in memory["sites"])


def test_a_host_wait_for_each_bucket_is_named(results: Results) -> None:
    site = line("training/gradient_reduction.py", "        state.remaining = 0")
    waits = results["host wait for each bucket"]["report"]["steps"]["waits"]
    assert [(wait["line"], wait["count"]) for wait in waits] == [(site, 7)]  # embedding, head, vectors and four blocks


def test_flash_attention_3_on_another_gpu_fails_with_its_line(results: Results) -> None:
    result = results["flash attention 3 on every GPU"]
    assert result["code"] != 0
    assert "FA3 requires compute capability 9.0" in result["log"]
    assert 'layers/attention_kernel.py", line' in result["log"]


def test_a_mask_that_every_layer_computes_has_the_most_launches(results: Results) -> None:
    site = line("layers/flex.py", "return create(_mask_mod(")
    launches = {name: replay_of(results, name)["launches"].get(site, 0) for name in ("none: documents", "mask in every layer")}
    assert launches["mask in every layer"] >= 4 * launches["none: documents"] > 0
    assert f"launches at {site}" in results["mask in every layer"]["log"]


@pytest.mark.parametrize(("name", "said"), [("break: print", "`print`"), ("break: branch", "data-dependent branching")])
def test_a_broken_graph_is_named(results: Results, name: str, said: str) -> None:
    assert results[name]["code"] == 0, results[name]["log"]
    breaks = results[name]["report"]["launches"]["compiled"]["breaks"]
    site = line("layers/mlp.py", "return self.down(self.activation(gate) * up)")
    assert {one["site"] for one in breaks} == {site}
    assert all(said in one["reason"] for one in breaks)
    assert results["none: compiled"]["report"]["launches"]["compiled"]["breaks"] == []


def test_more_activations_are_named_with_the_part_of_the_step(results: Results) -> None:
    named = "the plan differs: in a forward pass, 3 blocks keep"
    kept = {name: results[name]["report"]["memory"]["blocks"] for name in ("none: activations", "more activations")}
    assert kept["more activations"]["rehearsed"] > 1.09 * kept["none: activations"]["rehearsed"]
    assert named in results["more activations"]["log"]
