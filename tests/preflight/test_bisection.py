"""The nodes because of which a group fails: simulated allocations of up to 1,024 nodes."""

import pytest

from pipeline.preflight.bisection import search


class Nodes:
    """An allocation: a group fails if it has a bad node, or both nodes of a bad pair."""

    def __init__(self, bad=(), pairs=()):
        self.bad, self.pairs = set(bad), [set(pair) for pair in pairs]
        self.rounds = self.steps = 0

    def test(self, groups):
        self.rounds += 1
        self.steps += len(groups)
        members = [node for group in groups for node in group]
        assert len(members) == len(set(members)), "a node is in two steps at once"
        assert all(groups)
        return [not (self.bad & set(group) or any(pair <= set(group) for pair in self.pairs)) for group in groups]


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 9, 64, 1024])
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_one_bad_node(count, where):
    bad = f"n{round(where * (count - 1))}"
    allocation = Nodes([bad])
    assert search(names(count), allocation.test) == {bad: "fails the preflight also without any other node"}
    assert allocation.rounds <= 4
    assert allocation.steps <= 8 * 4


@pytest.mark.parametrize("bad", [(0, 1), (0, 1023), (5, 6, 7, 500), tuple(range(0, 1024, 100))])
def test_several_bad_nodes_in_as_many_rounds(bad):
    allocation = Nodes([f"n{i}" for i in bad])
    assert search(names(1024), allocation.test).keys() == allocation.bad
    assert allocation.rounds <= 4
    assert allocation.steps <= 8 * 4 * len(bad)


@pytest.mark.parametrize("pair", [(0, 1), (0, 1023), (511, 512), (300, 700)])
def test_a_pair_that_fails_only_together(pair):
    """A bad link: leaving one of the two nodes out is enough."""
    allocation = Nodes(pairs=[[f"n{i}" for i in pair]])
    found = search(names(1024), allocation.test)
    assert len(found) == 1
    assert next(iter(found)) in {f"n{i}" for i in pair}
    assert "each passes with others" in next(iter(found.values()))
    assert allocation.rounds <= 30


def test_a_node_that_fails_with_every_other_one():
    """It passes alone: its network does not work."""
    allocation = Nodes(pairs=[("n2", other) for other in names(8) if other != "n2"])
    assert search(names(8), allocation.test).keys() == {"n2"}


def test_two_nodes_alone():
    found = search(["a", "b"], Nodes(pairs=[("a", "b")]).test)
    assert found == dict.fromkeys("ab", "a and b fail together, and each passes alone")


def test_three_nodes_that_fail_only_together():
    found = search(names(9), lambda groups: [not {"n0", "n4", "n8"} <= set(group) for group in groups])
    assert {"n0", "n4", "n8"} <= found.keys()


def test_a_failure_that_does_not_occur_again():
    assert search(names(100), lambda groups: [True] * len(groups)) == {}


def test_all_nodes_bad():
    assert len(search(names(100), lambda groups: [False] * len(groups))) == 100
