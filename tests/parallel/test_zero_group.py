"""parallel.zero_group: groups of ZeRO are blocks of the axes of data parallelism, those of nodes are on one, and others are refused."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config import hardware as hardware_files
from pipeline.config import zero_group
from pipeline.config.layout import Layout
from pipeline.config.parallel import ParallelConfig
from pipeline.config.rules import check
from pipeline.planner.plan import plan, table
from pipeline.training.run import check_nodes
from tests.world import configured

SIZES = st.integers(1, 6)


@given(SIZES, SIZES, SIZES, st.integers(1, 3), st.data())
def test_groups_are_successive_ranks_and_divide_the_experts_alike(data, expert, context, tensor, chosen):
    parallel = ParallelConfig(tensor=tensor, context=context, expert=expert)
    legal = zero_group.legal(parallel, data)
    assume(legal)
    ranks = chosen.draw(st.sampled_from(legal))
    layout = Layout(1, data, tensor, expert, context, zero_block=zero_group.block(ranks, parallel, data))
    experts = set()
    for rank in range(layout.world_size):
        where = layout.coordinates(rank)
        shards, replicas = layout.zero_members(where, experts=False)
        assert [member // tensor for member in shards] == list(
            range(rank // tensor // ranks * ranks, rank // tensor // ranks * ranks + ranks)
        )
        assert len({layout.zero_group_of(layout.coordinates(member)) for member in replicas}) == layout.zero_sizes(experts=False)[1]
        # Those of the group with the same experts.
        shards_of_experts, _ = layout.zero_members(where, experts=True)
        assert set(shards_of_experts) == {member for member in shards if layout.coordinates(member).expert == where.expert}
        experts.add(len(shards_of_experts))
    assert len(experts) == 1


@given(SIZES, SIZES, st.integers(1, 3), st.integers(1, 3), st.integers(1, 12))
def test_groups_of_nodes_are_on_one_node(data, context, tensor, pipeline, tasks):
    parallel = ParallelConfig(tensor=tensor, context=context, pipeline=pipeline, zero_group="node")
    world = data * context * tensor * pipeline
    ranks = zero_group.group_ranks(parallel, tasks, world)
    block = zero_group.block(ranks, parallel, data) if ranks else None
    assume(block)
    layout = Layout(pipeline, data, tensor, 1, context, zero_block=block)
    for rank in range(world):
        nodes = Counter(member // tasks for member in layout.zero_members(layout.coordinates(rank), experts=False)[0])
        assert len(nodes) == 1


EXPERTS = ("model=mixtral-tiny", "parallel.expert=4")


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        (("parallel.zero_group=4",), 8, None),
        (("parallel.zero_group=8",), 8, None),
        (("parallel.zero_group=node", "cluster.tasks_per_node=4", "parallel.tensor=2"), 8, None),
        (("parallel.zero_group=node", "cluster.tasks_per_node=8"), 4, None),
        ((*EXPERTS, "parallel.zero_group=2"), 8, None),
        (("parallel.zero_group=3",), 8, "=3: is no size of groups of 8 data ranks (data 8 x expert 1 x context 1) that divide these axes"),
        (("parallel.zero_group=3",), 8, "fix: set it to job or 2 or 4"),
        (("parallel.zero_group=16",), 8, "parallel.zero_group=16: is no size of groups"),
        ((*EXPERTS, "parallel.context=3", "parallel.zero_group=4", "training.sequence_length=48"), 12, "fix: set it to job or 3 or 6"),
        (("parallel.zero_group=1",), 8, "parallel.zero_group=1: is neither job nor node nor a number of ranks from 2 on"),
        (("parallel.zero_group=nodes",), 8, "parallel.zero_group=nodes: is neither job nor node"),
        (("parallel.zero_group=2", "parallel.zero_stage=0"), 8, "parallel.zero_group=2: has no effect with parallel.zero_stage=0"),
        (
            ("parallel.zero_group=node",),
            8,
            "shards over the data ranks of a node, and nodes of cluster.tasks_per_node=1 ranks have one each",
        ),
        (
            ("parallel.zero_group=node", "cluster.tasks_per_node=3", "parallel.tensor=2"),
            12,
            "node: requires nodes of cluster.tasks_per_node=3 ranks that hold whole tensor groups (parallel.tensor=2)",
        ),
        (
            ("parallel.zero_group=node", "cluster.tasks_per_node=4", "parallel.pipeline=2", "parallel.zero_stage=1"),
            12,
            "and parts of one pipeline stage",
        ),
    ],
)
def test_what_is_refused(words, ranks, message):
    base = ("stage=pretrain", "training.global_batch_size=96", "training.micro_batch_size=1", "parallel.zero_stage=1")
    found = [str(violation) for violation in check.violations(configured(*base, *words), ranks)]
    assert any(message in text for text in found) if message else not found, found


def test_nodes_of_another_size_are_refused():
    config = configured("stage=pretrain", "parallel.zero_group=node", "cluster.tasks_per_node=4")
    check_nodes(config, Ranks(rank=5, world_size=8, local_rank=1, local_size=4))
    check_nodes(config, Ranks(rank=1, world_size=2, local_rank=1, local_size=2))
    with pytest.raises(UserError, match=r"tasks_per_node=4 ranks, and this node has 2\n    fix: set cluster.tasks_per_node=2"):
        check_nodes(config, Ranks(rank=5, world_size=8, local_rank=1, local_size=2))


def exchanges(planned):
    """Operations of gradients and weights in a step -> (calls, bytes of one, seconds of one), of all sizes together."""
    found: dict[str, list[float]] = {}
    for row in table(planned):
        if row.bound == "network":
            calls, size, seconds = found.setdefault(row.name, [0, 0.0, 0.0])
            found[row.name] = [calls + row.count, size + row.count * row.bytes, seconds + row.count * row.time]
    return found


def test_the_plan_has_the_memory_and_the_collectives_of_the_groups():
    """16 nodes: a node gathers over its links, and sends an eighth of the gradient; it holds an eighth of the state."""
    words = ("model=llama3-8b", "parallel.zero_stage=3", "cluster=local", "cluster.hardware=h100", "cluster.nodes=16")
    words = (*words, "cluster.tasks_per_node=8", "training.global_batch_size=256", "training.micro_batch_size=1")
    job, node = (
        plan(
            configured("stage=pretrain", *words, f"parallel.zero_group={group}"), 128, replace(hardware_files.load("h100"), gpus_per_node=8)
        )
        for group in ("job", "node")
    )
    whole, grouped = exchanges(job), exchanges(node)
    assert grouped["all_gather (ZeRO group)"][:2] == pytest.approx(whole["all_gather (data)"][:2], rel=1e-3)
    assert grouped["all_gather (ZeRO group)"][2] < 0.7 * whole["all_gather (data)"][2]
    assert grouped["reduce_scatter (ZeRO group)"][1] == pytest.approx(whole["reduce_scatter (data)"][1], rel=1e-3)
    micro_batches = node.layout.micro_batches
    assert grouped["all_reduce (ZeRO replicas)"][1] == pytest.approx(grouped["reduce_scatter (ZeRO group)"][1] / micro_batches / 8)
    for kind in ("optimizer", "gradients"):
        assert getattr(node.estimate.memory, kind) == pytest.approx(16 * getattr(job.estimate.memory, kind), rel=1e-2)
    assert node.estimate.causes["data"] < job.estimate.causes["data"]
