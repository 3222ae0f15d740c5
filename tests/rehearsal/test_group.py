"""The process group of a job of which one rank exists: on CPU tensors, where every rank is taken to have the data of this one."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from pipeline.config.layout import Layout
from pipeline.layers.loss import IGNORE
from pipeline.parallel import collectives, rehearsed_group
from pipeline.parallel import mesh as meshes
from pipeline.training.trainer import Trainer
from tests.world import configured

#: A pipelined job of 16 ranks, whose stages exchange metadata, states and gradients.
PIPELINED = (
    *("stage=pretrain", "model=llama-tiny", "parallel.tensor=2", "parallel.pipeline=4", "parallel.zero_stage=1", "precision=fp32"),
    *("training.sequence_length=32", "training.micro_batch_size=1", "training.global_batch_size=8"),
)


@pytest.fixture
def group_of():
    """`group_of(rank, size)`: the default group, and the collectives that are told from then on."""
    assert not dist.is_initialized()
    calls: list[rehearsed_group.Call] = []

    def initialize(rank: int, size: int):
        meshes.init_rehearsed(rank, size)
        rehearsed_group.listen(calls.append)
        return dist.group.WORLD, calls

    yield initialize
    rehearsed_group.listen(None)
    meshes.destroy_process_group()


def test_reductions(group_of):
    _, calls = group_of(2, 4)
    total, largest = torch.tensor([1.0, 2.0]), torch.tensor([3])
    dist.all_reduce(total)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert total.tolist() == [4, 8]
    assert largest.tolist() == [3]
    own = torch.empty(2)
    dist.reduce_scatter_tensor(own, torch.arange(8.0))
    assert own.tolist() == [16, 20]  # elements 4 and 5, which belong to rank 2, of four ranks
    assert [(call.name, call.size, call.stream) for call in calls] == [
        ("all_reduce", 8, None),
        ("all_reduce", 8, None),
        ("reduce_scatter", 32, None),
    ]


def test_gathers(group_of):
    group, calls = group_of(1, 3)
    whole = torch.empty(6)
    work = dist.all_gather_into_tensor(whole, torch.tensor([1.0, 2.0]), async_op=True)
    assert work.wait()
    assert whole.tolist() == [1, 2] * 3
    whole[2:4] = torch.tensor([5.0, 6.0])
    dist.all_gather_into_tensor(whole, whole[2:4])  # in place
    assert whole.tolist() == [5, 6] * 3
    parts = [torch.empty(1) for _ in range(3)]
    dist.all_gather(parts, torch.tensor([7.0]))
    assert parts == [7, 7, 7]
    assert torch.equal(torch.cat(collectives.all_gather(torch.tensor([[2.0]]), group)), torch.full((3, 1), 2.0))
    assert [call.name for call in calls] == ["all_gather"] * 4
    assert calls[0].reads[0][1] - calls[0].reads[0][0] == 8
    assert calls[0].writes[0][1] - calls[0].writes[0][0] == 24


def test_all_to_all_with_uneven_splits(group_of):
    group_of(1, 2)
    received = torch.empty(5, dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor([1, 2, 3, 4]), [2, 3], [1, 3])
    assert received.tolist() == [2, 3, 2, 3, 4]  # every rank sends what this one sends to itself: 2, 3, 4


def test_objects_and_barriers(group_of):
    group_of(3, 5)
    found = [None] * 5
    dist.all_gather_object(found, {"host": "a"})
    assert found == [{"host": "a"}] * 5
    dist.barrier()
    assert meshes.on_rank_0(lambda: "answer") == "answer"


def test_functional_collectives_have_gradients(group_of):
    group, calls = group_of(0, 2)
    x = torch.ones(1, 2, 4, requires_grad=True)
    collectives.gather_sequence(x, group).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))  # both ranks use both halves
    assert [call.name for call in calls] == ["all_gather", "reduce_scatter"]


def test_point_to_point_names_the_other_rank(group_of):
    group_of(0, 4)
    group = dist.new_group([0, 3], use_local_synchronization=True)
    calls: list[rehearsed_group.Call] = []
    rehearsed_group.listen(calls.append)
    sends = [
        dist.P2POp(dist.isend, torch.ones(3), group=group, group_peer=1),
        dist.P2POp(dist.irecv, torch.ones(2), group=group, group_peer=1),
    ]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    assert [(call.name, call.peer, call.size, call.ranks) for call in calls] == [("send", 3, 12, (0, 3)), ("receive", 3, 8, (0, 3))]


@pytest.mark.parametrize(("rank", "sends", "receives"), [(0, 4, 4), (6, 8, 8)], ids=["first stage", "second stage"])
def test_a_pipelined_rank_trains_a_step(group_of, rank, sends, receives):
    config = configured(*PIPELINED)
    _, calls = group_of(rank, 16)
    layout = Layout.of(config, 16)
    trainer = Trainer(config, meshes.build_mesh(layout, torch.device("cpu")))
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    calls.clear()
    tokens = torch.randint(100, (layout.micro_batches, 32))
    _, result = trainer.train(tokens, {"targets": tokens.masked_fill(tokens < 10, IGNORE)})
    # Four micro-batches, each with a state forward and a gradient backward, on both sides of a stage that has two.
    hidden = [call for call in calls if call.name in ("send", "receive") and call.size > 4]
    assert Counter(call.name for call in hidden) == {"send": sends, "receive": receives}
    assert {call.size for call in hidden} == {16 * config.model.hidden * 4}  # half of the sequence, fp32
    assert float(result.skipped) == 0
    changed = [not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True)]
    assert any(changed)


def test_requests_to_the_store_are_counted(group_of):
    group_of(1, 3)
    store = dist.distributed_c10d._get_default_store()
    before = rehearsed_group.store_requests()
    store.set("a", "b")
    assert store.get("a") == b"b"
    assert store.add("n", 2) == 2
    after = rehearsed_group.store_requests()
    assert {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)} == {
        "set": 1,
        "get": 1,
        "add": 1,
    }
