"""The sites of conf/cluster/: what their files must have, the texts of their jobs, and the choice of a queue."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.common.ranks import slurm_seconds
from pipeline.config import hardware
from pipeline.config.cluster import ClusterConfig, QueueConfig
from pipeline.config.rules import cluster as rules
from pipeline.launch import job, live, queues
from tests.helpers import ROOT
from tests.launch.test_job import PRETRAIN, cluster

GOLDEN = Path(__file__).parent / "golden/sites"
SITES = sorted(path.stem for path in (ROOT / "conf/cluster").glob("*.yaml") if path.stem not in ("local", "devcluster"))
#: Golden file -> (site, nodes).
TEXTS = {site: (site, 8) for site in SITES if site not in ("juwels", "frontier")}
TEXTS |= {"juwels-64": ("juwels", 64), "frontier-91": ("frontier", 91), "frontier-92": ("frontier", 92), "leonardo-65": ("leonardo", 65)}


def at(site: str, **changes: object) -> ClusterConfig:
    """A site with an account and other values."""
    return dataclasses.replace(cluster(site), **{"account": "fir", **changes})


@pytest.mark.parametrize("name", TEXTS)
def test_job_text(name: str) -> None:
    site, nodes = TEXTS[name]
    assert job.render(PRETRAIN, at(site, nodes=nodes)) == (GOLDEN / f"{name}.sbatch").read_text(encoding="utf-8")


@pytest.mark.parametrize("site", SITES)
def test_site(site: str) -> None:
    """Its name is that of the file, its GPU is known, its ranks fit into a node, and each group of facts has its source."""
    config = cluster(site)
    assert config.name == site
    assert hardware.load(config.hardware or "").memory_gb > 0
    assert config.tasks_per_node == config.gpus_per_node
    assert config.tasks_per_node * config.cpus_per_task <= (config.cores or 0)
    assert config.architecture is not None
    assert list(rules.violations(config)) == job.violations(config, "pretrain", ROOT) == []
    text = (ROOT / f"conf/cluster/{site}.yaml").read_text(encoding="utf-8")
    for block in ("queues:", "cores:", "gpus_per_node:", "memory:", "environment:", "fabric:"):
        for line in re.findall(rf"^{block}.*", text, re.MULTILINE):
            described = "#" in line or block in ("cores:", "gpus_per_node:", "environment:")
            assert described, line


@pytest.mark.parametrize("site", SITES)
def test_every_queue_of_a_site_can_be_chosen(site: str) -> None:
    """By its partition and QoS, for its fewest nodes and its longest time; and its limits are not those of an earlier entry."""
    config = cluster(site)
    assert [queue.max_time for queue in config.queues if queue.max_time is None] == []
    for number, queue in enumerate(config.queues):
        named = dataclasses.replace(config, partition=queue.partition, qos=queue.qos, time=queue.max_time)
        chosen = queues.placed(named, queue.min_nodes, queue.min_nodes)
        assert (chosen.partition, chosen.qos, chosen.time) == (queue.partition, queue.qos, queue.max_time)
        assert queue not in config.queues[:number]


@pytest.mark.parametrize(
    ("nodes", "time"), [(1, "02:00:00"), (91, "02:00:00"), (92, "06:00:00"), (183, "06:00:00"), (184, "12:00:00"), (9000, "12:00:00")]
)
def test_the_time_of_frontier_depends_on_the_nodes(nodes: int, time: str) -> None:
    placed = job.placed(at("frontier"), "pretrain", nodes)
    assert (placed.partition, placed.time) == ("batch", time)


@pytest.mark.parametrize("site", ["frontier", "lumi"])
def test_ranks_have_the_cores_beside_their_gpus(site: str) -> None:
    """GPU -> first of its eight cores, as OLCF and CSC print it for the same node; the first one is reserved."""
    masks = at(site).srun[0].removeprefix("--cpu-bind=mask_cpu:").split(",")
    cores = [[core for core in range(64) if int(mask, 16) >> core & 1] for mask in masks]
    assert cores == [list(range(first + 1, first + 8)) for first in (48, 56, 16, 24, 0, 8, 32, 40)]


@pytest.mark.parametrize("site", ["lumi", "frontier", "juwels"])
def test_only_training_asks_for_the_longest_time(site: str) -> None:
    longest = job.placed(at(site), "pretrain", 1).time
    assert slurm_seconds(longest) == max(slurm_seconds(queue.max_time or "") for queue in at(site).queues[:1])
    for stage, own in (("convert", "01:00:00"), ("shard", "04:00:00"), ("evaluate", "01:00:00")):
        assert job.placed(at(site), stage, 1).time == min(own, longest, key=slurm_seconds)


def test_a_longer_job_gets_a_later_queue() -> None:
    assert job.placed(at("frontier", time="12:00:00"), "pretrain", 64).partition == "extended"
    assert job.placed(at("leonardo", time="3-00:00:00"), "pretrain", 2).qos == "boost_qos_lprod"
    assert job.placed(at("leonardo", qos="boost_qos_dbg"), "pretrain", 2).time == "00:30:00"
    assert job.placed(at("lumi", spares=1), "pretrain", 1024).partition is None  # 1,025 nodes with the spare one


def test_a_job_that_fits_no_queue_is_refused_with_the_list() -> None:
    found = job.violations(at("frontier", nodes=92, time="12:00:00"), "pretrain", ROOT)
    assert [violation.key for violation in found] == ["cluster.nodes"]
    assert "92 nodes and 12:00:00: partition batch: 1-91 nodes, 02:00:00, 100 jobs; partition batch: 92-183 nodes, 06:00:00" in str(
        found[0]
    )
    across = job.violations(at("frontier", nodes=100, min_nodes=50), "pretrain", ROOT)
    assert "50-100 nodes" in str(across[0])
    assert job.violations(at("frontier", nodes=92, time="12:00:00", partition="reserved"), "pretrain", ROOT) == []
    unknown = job.violations(at("frontier", partition="reserved"), "pretrain", ROOT)
    assert [violation.key for violation in unknown] == ["cluster.time"]
    assert "partition batch: 1-91 nodes" in unknown[0].rule
    assert unknown[0].rule.endswith("; none has cluster.partition=reserved")
    assert unknown[0].fix == "correct cluster.partition, or set cluster.time=HOURS:MINUTES:SECONDS"


def test_more_jobs_than_a_queue_accepts_are_refused() -> None:
    debug = job.placed(at("alps", partition="debug"), "pretrain", 1)
    assert list(queues.too_many([debug] * 2)) == []
    assert "these 3" in str(next(queues.too_many([debug] * 3)))


TIMES = st.integers(1, 5000).map(lambda minutes: f"{minutes // 60}:{minutes % 60:02}:00")
QUEUES = st.builds(QueueConfig, st.just("a"), st.none(), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 9)), TIMES)


@given(entries=st.lists(QUEUES, min_size=1), nodes=st.integers(1, 9), time=TIMES)
def test_the_first_queue_that_fits_is_chosen(entries: list[QueueConfig], nodes: int, time: str) -> None:
    named = [dataclasses.replace(queue, partition=f"p{number}") for number, queue in enumerate(entries)]
    config = ClusterConfig(queues=named, time=time)
    room = [
        queue
        for queue in named
        if queue.min_nodes <= nodes <= (queue.max_nodes or 9) and slurm_seconds(time) <= slurm_seconds(queue.max_time or "")
    ]
    assert queues.placed(config, nodes, nodes).partition == (room[0].partition if room else None)
    assert (list(queues.violations(config, nodes, nodes)) == []) == bool(room)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"queues": [QueueConfig("a", min_nodes=4, max_nodes=2)]}, "cluster.queues.0.max_nodes"),
        ({"queues": [QueueConfig("a", max_time="86400")]}, "cluster.queues.0.max_time"),
        ({"queues": [QueueConfig("a", max_submitted=1, max_running=2)]}, "cluster.queues.0.max_running"),
        ({"cores": 48, "tasks_per_node": 4, "cpus_per_task": 16}, "cluster.cpus_per_task"),
        ({"environment": {"NCCL NET": "IB"}}, "cluster.environment"),
        ({"srun": ["cpu-bind=none"]}, "cluster.srun"),
    ],
)
def test_what_is_wrong_in_the_file_of_a_site_is_named(changes: dict[str, object], key: str) -> None:
    assert [violation.key for violation in rules.violations(ClusterConfig(**changes))] == [key]  # type: ignore[arg-type]


PARTITIONS = """\
PartitionName=booster AllowGroups=ALL AllowQos=ALL Default=YES QoS=N/A MaxNodes=384 MaxTime=12:00:00 MinNodes=0 State=UP TotalNodes=936
PartitionName=batch AllowGroups=ALL Default=NO MaxNodes=UNLIMITED MaxTime=04:00:00 MinNodes=1 State=UP TotalNodes=9800
"""


def test_limits_that_slurm_tells_replace_those_of_the_file() -> None:
    partitions = live.parse_partitions(PARTITIONS)
    assert partitions["booster"] == {"max_time": "12:00:00", "max_nodes": 384}
    changed, said = live.with_limits(at("juwels"), partitions, {})
    assert changed.queues == [QueueConfig("booster", max_nodes=384, max_time="12:00:00")]
    assert said == ["partition booster: max_time is 12:00:00 in Slurm, and 24:00:00 in cluster=juwels; that of Slurm is used"]
    assert job.placed(changed, "pretrain", 4).time == "12:00:00"


def test_the_slurm_of_another_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Frontier has a partition named batch, as many machines have, and one named extended."""
    monkeypatch.setattr(live, "asked", lambda: (live.parse_partitions(PARTITIONS), {}))
    assert live.corrected(at("frontier")) == at("frontier")
    assert "the Slurm here has no partition extended: its limits are not those of cluster=frontier" in caplog.text


def test_a_partition_with_several_entries_only_bounds_them() -> None:
    changed, said = live.with_limits(at("frontier"), live.parse_partitions(PARTITIONS), {})
    assert [queue.max_time for queue in changed.queues] == ["02:00:00", "04:00:00", "04:00:00", "24:00:00", "02:00:00"]
    assert [queue.max_nodes for queue in changed.queues] == [91, 183, 9800, 64, 91]
    assert len(said) == 2


def test_limits_of_a_qos() -> None:
    limits = live.parse_qos("normal|||\nboost_qos_dbg|00:20:00|4|2\ndamaged line\n")
    changed, said = live.with_limits(at("leonardo"), {}, limits)
    assert changed.queues[3] == QueueConfig("boost_usr_prod", "boost_qos_dbg", 1, 2, "00:20:00", 4, 2)
    assert [line.partition(" is ")[0] for line in said] == [
        f"partition boost_usr_prod qos boost_qos_dbg: {k}" for k in ("max_time", "max_submitted")
    ]


def test_the_same_time_in_another_form_is_no_difference() -> None:
    same = live.parse_partitions("PartitionName=booster MaxTime=1-00:00:00 MinNodes=0 MaxNodes=UNLIMITED")
    assert live.with_limits(at("juwels"), same, {}) == (at("juwels"), [])
