"""The process groups of a rank: their backend, number, timeout and creation; and the groups that a training step uses."""

import itertools
import os
import resource
import signal
import socket
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.common import signals
from pipeline.common.errors import RunFailed, ToBeContinued, UserError
from pipeline.config.layout import Layout
from pipeline.parallel import mesh as meshes
from pipeline.parallel import open_files, rendezvous, serial_gloo
from pipeline.parallel.rehearsed_store import CountingStore
from pipeline.parallel.serial_gloo import SERIAL_GLOO
from tests.world import causal, share, tiny, trainer


class Collectives(TorchDispatchMode):
    """Records the process groups of all collectives."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            self.seen += [
                dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
            ]
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("device, backend", [("cuda:3", "nccl"), ("cpu", "serial_gloo"), ("meta", None)])
def test_groups_of_the_mesh_have_one_backend(device, backend):
    assert meshes.backend_of_groups(torch.device(device)) == backend


def _files():
    return len(list(Path("/proc/self/fd").iterdir()))


def _files_of_a_new_group():
    """Files that the creation of a group of all ranks opens, and its first barrier."""
    counts, connected_at_once = [_files()], os.environ["TORCH_GLOO_LAZY_INIT"]
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as in jobs
    group = dist.new_group(list(range(dist.get_world_size())), backend=SERIAL_GLOO)
    os.environ["TORCH_GLOO_LAZY_INIT"] = connected_at_once
    counts.append(_files())
    dist.barrier(group=group)
    return counts[1] - counts[0], _files() - counts[0], resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.mark.long
def test_a_rank_connects_to_those_that_it_communicates_with(worlds):
    """Eight ranks: five files of its own, and a connection to each of the others, were they connected at once."""
    groups = [worlds(8).run(_files_of_a_new_group) for _ in range(3)]
    for rank in zip(*groups, strict=True):
        created, used, (soft, hard) = min(rank)  # a connection of a group before may open at the same time
        assert created <= 5
        assert used <= created + 2 * 3  # a barrier exchanges messages in three rounds, each with one rank to and one from
        assert soft == hard


def _needs(layout):
    """Requests of rank 0 to the store of a job, and files that it opens, until it has its process groups; no other rank exists."""
    files, store, options = _files(), CountingStore(), {"timeout": timedelta(seconds=5)}
    dist.init_process_group(SERIAL_GLOO, store=store, rank=0, world_size=layout.world_size, **options)
    try:
        meshes._create_groups(layout, 0, (0, layout.pipeline - 1), partial(dist.new_group, backend=SERIAL_GLOO, **options))
        return dict(store.requests), _files() - files
    finally:
        meshes.destroy_process_group()


def test_what_a_rank_asks_the_store_for_and_opens_does_not_grow_with_the_job(monkeypatch):
    """At 64, 256 and 4,096 ranks with all axes: a request for each group of the rank, and one for the default group."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")  # which is restored after the test
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    open_files.allow_many_connections()
    _needs(Layout(1, 4, 1))  # opens the device that groups of one rank share
    found = [_needs(Layout(4, data, 4)) for data in (4, 16, 256)]
    assert found[0] == found[1] == found[2]
    assert found[0][0] == {"set": 6}
    assert found[0][1] <= 6 * 5


@pytest.mark.parametrize(
    "ranks, limit, outcome", [(256, 1024, "none"), (300, 1024, "warned"), (512, 1024, "refused"), (16_384, -1, "none")]
)
def test_more_connections_to_the_store_than_open_files_are_refused_with_their_number(ranks, limit, outcome, caplog):
    given = pytest.raises(UserError) if outcome == "refused" else nullcontext()
    with given as refused:
        open_files.check_store(ranks, limit)
    text = str(refused.value) if refused else caplog.text
    assert bool(text) == (outcome != "none")
    if text:
        assert f"ulimit -Hn={limit}: is the hard limit of open files of rank 0" in text
        assert f"raise the hard limit of the nodes' jobs to {3 * ranks + 256:,}" in text


def test_the_rank_that_hosts_the_store_compares_its_limit_before_it_connects(monkeypatch):
    """Under torchrun, the agent hosts it."""
    asked = []

    def asks(world_size):
        asked.append(world_size)
        raise UserError.of("ulimit -Hn", 1, "", "")

    monkeypatch.setattr(open_files, "check_store", asks)
    with pytest.raises(UserError):
        meshes.init_distributed(0, 1_000_000, 0, "tcp://127.0.0.1:1")
    assert asked == [1_000_000]


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = server.getsockname()[1]
    signals.received.clear()
    yield found
    signals.received.clear()


@pytest.mark.parametrize("rank, missing", [(0, "rank 1 on n1, 2 on n2"), (1, "rank 0 at 127.0.0.1:{}: Connection refused")])
def test_a_rank_says_for_which_ranks_it_waits_and_does_not_wait_for_ever(port, monkeypatch, caplog, rank, missing):
    monkeypatch.setattr(rendezvous, "SAY", 0.1)
    monkeypatch.setattr(rendezvous, "LONGER", 0.1)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2,1")
    with pytest.raises(RunFailed, match=f"have not started within 1 s .*: {missing.format(port)}"):
        meshes.init_distributed(rank, 3, 0, f"tcp://127.0.0.1:{port}", minutes=1 / 30)
    assert f" s for {missing.format(port)}" in caplog.text


def test_ranks_that_start_again_do_not_meet_those_of_the_first_start(port, monkeypatch):
    """In the store of torchrun's agent, which stays."""
    for start, ranks in (("0", 1), ("1", 2)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        monkeypatch.setattr(rendezvous, "_MEETINGS", itertools.count())
        with pytest.raises(RunFailed, match=r"ranks have not started .*: rank 1") if ranks == 2 else nullcontext():
            rendezvous.meet(0, ranks, 0, f"tcp://127.0.0.1:{port}", 0.2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_ends_a_rank_that_waits(port, rank):
    signals.received.add(signal.SIGTERM)
    with pytest.raises(ToBeContinued) as stopped:
        meshes.init_distributed(rank, 2, 0, f"tcp://127.0.0.1:{port}")
    assert stopped.value.code == 143


#: 1,024 ranks, with every axis larger than 1.
LAYOUTS = [
    Layout(pipeline=8, data=4, tensor=4, expert=4, context=2),
    Layout(pipeline=4, data=32, tensor=8),
    Layout(pipeline=4, data=32, tensor=8, schedule="zbv", stages_per_rank=2),
    Layout(pipeline=1, data=1024, tensor=1),
    Layout(pipeline=8, data=4, tensor=4, expert=4, context=2, folded=True),
]
#: The same with groups of ZeRO, of two sizes where experts have other ones.
GROUPS = [
    Layout(pipeline=8, data=4, tensor=4, expert=4, context=2, zero_block=(2, 4, 2)),
    Layout(pipeline=8, data=4, tensor=4, expert=4, context=2, zero_block=(1, 2, 2)),
    Layout(pipeline=1, data=1024, tensor=1, zero_block=(8, 1, 1)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rank", [0, 517, 1023])
def test_a_rank_of_a_large_job_has_at_most_eight_groups(layout, rank):
    device = meshes.init_fake(rank, layout.world_size)
    try:
        mesh = meshes.build_mesh(layout, device)
        assert len(dist.distributed_c10d._world.pg_map) <= 8 + layout.folded
        assert dist.get_process_group_ranks(mesh.dispatch).index(rank) == mesh.dispatch.rank()
        assert mesh.dispatch.size() == layout.expert_ranks
        assert mesh.data.size() == layout.data * layout.context
    finally:
        meshes.destroy_process_group()


@pytest.mark.parametrize("layout", GROUPS, ids=str)
@pytest.mark.parametrize("rank", [0, 517, 1023])
def test_groups_of_zero_divide_the_ranks_with_the_same_weights(layout, rank):
    device = meshes.init_fake(rank, layout.world_size)
    try:
        mesh = meshes.build_mesh(layout, device)
        assert len(dist.distributed_c10d._world.pg_map) <= 12
        for whole, experts in ((mesh.dense, False), (mesh.data, True)):
            shards, replicas = mesh.zero_groups(experts=experts)
            ranks, copies = (dist.get_process_group_ranks(group) for group in (shards, replicas))
            assert set(ranks) & set(copies) == {rank}
            assert set(ranks) | set(copies) <= set(dist.get_process_group_ranks(whole))
            assert len(ranks) * len(copies) == whole.size()
            assert (len(ranks), len(copies)) == layout.zero_sizes(experts=experts)
            where = layout.coordinates(rank)
            assert {layout.zero_group_of(layout.coordinates(other)) for other in ranks} == {layout.zero_group_of(where)}
        # Successive ranks, so that they share a node.
        ranks = sorted(dist.get_process_group_ranks(mesh.zero_groups(experts=False)[0]))
        assert ranks == list(range(ranks[0], ranks[0] + len(ranks) * layout.tensor, layout.tensor))
    finally:
        meshes.destroy_process_group()


def _creation(layout):
    """Sizes of the groups that were created with more than one rank, and of those that communicated, in this order."""
    created = []

    def create(members, **options):
        group = dist.new_group(members, **options)
        created.append(group)
        return group

    groups = meshes._create_groups(layout, dist.get_rank(), (0, layout.pipeline - 1), create)
    assert {id(group) for group in created} == {id(group) for group in groups.values()}
    with Collectives() as found:
        for group in dict.fromkeys(groups.values()):
            meshes._connect(group, torch.device("cpu"))
    return [g.size() for g in created if g.size() > 1], [g.size() for g in found.seen]


@pytest.mark.parametrize(
    "layout", [Layout(2, 1, 2), Layout(4, 1, 1), Layout(1, 1, 2, context=2), Layout(1, 4, 1, zero_block=(2, 1, 1))], ids=str
)
def test_every_group_communicates_when_it_is_created(world, layout):
    for created, communicated in world.run(_creation, layout):
        assert communicated == created
        assert created


def _new_mesh():
    """Collectives on groups of the mesh, by build_mesh; with a timeout that no other test has, so that the groups are new."""
    with Collectives() as found:
        mesh = meshes.build_mesh(Layout(2, 1, 2), torch.device("cpu"), 7.5)
    timeout = mesh.tensor._get_backend(torch.device("cpu")).options._timeout
    return sorted(group.size() for group in found.seen), timeout, dist.get_backend(mesh.tensor)


def test_a_mesh_is_connected_when_it_is_built_and_its_collectives_end_after_the_watchdog(world):
    for sizes, timeout, backend in world.run(_new_mesh):
        assert sizes == [2, 2]
        assert timeout == timedelta(minutes=8.5)
        assert backend == SERIAL_GLOO


def _threads():
    mesh = meshes.build_mesh(Layout(2, 1, 2), torch.device("cpu"))
    groups = [dist.group.WORLD, mesh.tensor, mesh.data, dist.new_group(list(range(dist.get_world_size())))]
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]


def test_a_gloo_group_has_one_thread(world):
    """Of two threads, both write one string of their group without a lock, and now and then the memory of a rank is corrupted."""
    assert world.run(_threads) == [[1] * 4] * 4


def _further_loops():
    def loops():
        return sum(path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm"))

    before = loops()
    dist.new_group(list(range(dist.get_world_size())), backend=SERIAL_GLOO)
    serial_gloo._create(dist.HashStore(), 0, 1, timedelta(seconds=5))
    return before > 0, loops() - before


def test_groups_share_the_thread_of_a_device(world):
    """It wakes up a hundred times a second."""
    assert world.run(_further_loops) == [(True, 0)] * 4


def _devices():
    backend = serial_gloo._create(dist.HashStore(), 0, 1, timedelta(seconds=5))
    return len(backend.options._devices)


def test_gloo_uses_the_network_interfaces_that_are_asked_for(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert _devices() == 2
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(RuntimeError, match="none0"):
        _devices()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert _devices() == 1


def _step(*overrides):
    """A training step: the sizes of its groups, its loss, and the requests counted."""
    _, local = trainer(*tiny("model=llama-tiny", "model.layers=4", "model.ffn_hidden=64", "model.kv_heads=2", *overrides))
    tokens = torch.arange(16 * 9).remainder(67).view(16, 9)
    shares = causal(*share(local, tokens))
    local.train(*shares)
    with Collectives() as found:
        loss, result = local.train(*shares, (dist.get_rank() == 3, True, False))
    assert dist.get_world_size() == 4
    return [group.size() for group in found.seen], float(loss), result.requests.tolist()


STEPS = [
    ("parallel.tensor=2", "parallel.zero_stage=3"),
    ("parallel.pipeline=2", "parallel.zero_stage=2"),
    pytest.param(("parallel.tensor=2", "parallel.zero_stage=0"), marks=pytest.mark.long),
    pytest.param(("parallel.pipeline=2", "parallel.zero_stage=0"), marks=pytest.mark.long),
    pytest.param(("parallel.tensor=2", "parallel.zero_stage=1"), marks=pytest.mark.long),
]


@pytest.mark.parametrize("overrides", STEPS, ids=" ".join)
def test_a_step_has_no_collective_over_the_world(world, overrides):
    found = world.run(partial(_step, *overrides))
    losses = {loss for _, loss, _ in found}
    assert len(losses) == 1, "equal on all ranks"
    for sizes, _, requests in found:
        assert set(sizes) == {2}
        assert requests == [1, 4, 0]
