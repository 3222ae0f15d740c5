"""Who tests with whom: pairs of neighbors, and the names that a node resolves."""

import pytest

from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.preflight import place


@pytest.mark.parametrize("count", range(1, 20))
def test_every_node_is_in_two_pairs_and_in_one_at_a_time(count):
    rounds = place.pairings(count)
    for pairs in rounds:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members))
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs))
    for node in range(count):
        assert sum(node in pair for pair in pairs) == min(count - 1, 2)


def test_every_name_is_resolved_by_three_nodes_and_no_node_resolves_many():
    nodes = [f"n{i}" for i in range(1000)]
    asked = [place.to_resolve(nodes, index, "i") for index in range(1000)]
    assert max(map(len, asked)) == 4
    assert all(sum(f"{node}i" in names for names in asked) >= 3 for node in nodes)


def test_names_that_do_not_exist():
    found = place.resolve(["localhost", "no-such-host.invalid"], 20)
    assert found["localhost"] is None
    assert found["no-such-host.invalid"]


def test_ranks_of_uneven_nodes():
    environment = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "2"}
    found = place.find(Ranks(rank=8, world_size=9, local_rank=0, local_size=1, launcher="srun"), environment)
    assert (found.node, [list(found.members(i)) for i in range(3)]) == ("n3", [[0, 1, 2, 3], [4, 5, 6, 7], [8]])


def test_ranks_that_do_not_fill_one_node_after_the_other_are_refused():
    environment = {
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_NODEID": "1",
        "SLURM_DISTRIBUTION": "cyclic",
    }
    with pytest.raises(UserError, match="distribution=block"):
        place.find(Ranks(rank=1, world_size=4, local_rank=0, local_size=2, launcher="srun"), environment)


def test_hosts_without_names_are_refused():
    with pytest.raises(UserError, match="names of the other hosts are unknown"):
        place.find(Ranks(rank=0, world_size=4, local_rank=0, local_size=2, launcher="torchrun"), {})
