"""The planned update of Muon is that of a real step: what it allocates, sends and computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config import hardware
from pipeline.config.layout import Layout
from pipeline.planner import plan_report
from pipeline.planner.matrix_update import NAME, exchanges, matrix_rounds, products, update_bytes
from pipeline.planner.plan import plan, table
from pipeline.planner.planned_buckets import planned_buckets
from pipeline.planner.state_memory import state_format_of
from pipeline.planner.trace import trace
from pipeline.training import matrix_homes
from tests.training.layouts import text
from tests.world import configured, share, tiny, trainer
from tools.bench.tensor_memory import TensorMemory

MUON = "optimizer=muon"
WIDE = (MUON, "training.compile=off", "model.hidden=64", "model.layers=3", "model.kv_heads=2", "training.micro_batch_size=4")
DENSE = ("model=llama-tiny", *WIDE, "model.ffn_hidden=160")
MIXTRAL = ("model=mixtral-tiny", *WIDE, "model.ffn_hidden=96", "model.experts=4", "model.top_k=2")
HALF = "precision=bf16"
#: Steps of which the one with the least bytes counts: the threads of gloo free the tensors of an exchange at some time after it.
STEPS = 5
#: Bytes of numbers that an update allocates: learning rates and factors.
NUMBERS = 64


class _Update(TorchDispatchMode):
    """Records the exchanges of an update, with the size of their group and what the rank sends or receives, and the FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, int]] = []
        self.flops = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator.name()
        if name == "c10d::alltoall_base_":
            ranks = next(dist.ProcessGroup.unbox(a).size() for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a))
            self.sent.append((ranks, max(args[0].nbytes, args[1].nbytes)))
        elif name in ("aten::mm", "aten::addmm"):
            first, second = args[-2:]
            self.flops += 2 * first.numel() * second.shape[-1]
        return result


class _Found(NamedTuple):
    """Of a step on a rank: most bytes that its update allocates, with those of gradients, exchanges and FLOPs of the update."""

    update: int
    with_gradients: int
    sent: list[tuple[int, int]]
    flops: int


def _update(settings: tuple[str, ...], most: int) -> _Found:
    """Of steps after the first one, which allocates the state, with so many elements of a rank in a round: that with the least bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_homes, "ELEMENTS_AT_ONCE", most)
        config, mine = trainer(*tiny(*settings))
    tokens, batch = text(config, 0)
    tokens, targets = share(mine, tokens, batch["targets"])
    mine.train(tokens, {"targets": targets}, step=0)
    optimizer, found = mine.engine.update.optimizer, []
    step, between_steps = optimizer.step, [TensorMemory().state]

    def measured() -> None:
        memory, update = TensorMemory(), _Update()
        with update, memory.counting():
            step()
        found.append(_Found(memory.peak - memory.state, memory.peak, update.sent, update.flops))

    optimizer.step = measured
    for number in range(1, 1 + STEPS):
        mine.train(tokens, {"targets": targets}, step=number)
        between_steps.append(TensorMemory().state)
    least = min(found)
    # Threads of gloo may free a tensor of the passes late: the least of all readings is without it.
    return least._replace(with_gradients=least.with_gradients - min(between_steps))


LAYOUTS = [
    (1, DENSE, (HALF, "parallel.zero_stage=0")),
    (1, DENSE, (HALF, "parallel.zero_stage=1")),
    (2, DENSE, (HALF, "parallel.zero_stage=0")),
    (2, DENSE, (HALF, "parallel.zero_stage=1", "model.layers=8")),
    (2, DENSE, ("precision=fp32", "parallel.zero_stage=2")),
    (2, DENSE, (HALF, "parallel.tensor=2", "parallel.zero_stage=1", "model.layers=12")),
    (2, DENSE, (HALF, "parallel.tensor=2", "parallel.zero_stage=0", "optimizer.muon_per_head=true")),
    (4, DENSE, (HALF, "parallel.tensor=2", "parallel.zero_stage=3", "model.layers=8")),
    (4, DENSE, (HALF, "parallel.zero_stage=1", "parallel.zero_group=2")),
    (4, MIXTRAL, (HALF, "parallel.expert=2", "parallel.zero_stage=1")),
    (2, MIXTRAL, (HALF, "parallel.expert=2", "parallel.zero_stage=0")),
    (4, MIXTRAL, (HALF, "parallel.expert=2", "parallel.tensor=2", "parallel.expert_tensor=1", "parallel.zero_stage=1")),
]


#: With the elements of a round: the default, and some rounds.
CASES = [
    *(pytest.param(*each, 1 << 27, marks=pytest.mark.long) for each in LAYOUTS),
    (*LAYOUTS[2], 40_000),
    *(pytest.param(*each, 40_000, marks=pytest.mark.long) for each in LAYOUTS[3:6]),
]


@pytest.mark.parametrize("ranks, model, layout, most", CASES, ids=str)
def test_the_planned_update_is_that_of_a_real_step(worlds, monkeypatch, ranks, model, layout, most):
    """Bytes of the fullest rank, of the busiest rank of every exchange, and FLOPs of a rank with the most work."""
    monkeypatch.setattr(matrix_homes, "ELEMENTS_AT_ONCE", most)
    config = configured(*tiny(*model, *layout))
    sizes, state_format = Layout.of(config, ranks), state_format_of(config)
    rounds = matrix_rounds(planned_buckets(trace(config), sizes, [0], state_format.zero_stage), sizes, state_format.zero_stage)
    found = worlds(ranks).run(_update, (*model, *layout), most)
    planned, on_gpu = (update_bytes(rounds, state_format.weight_bytes, batched=batched) for batched in (False, True))
    assert 0 <= max(each.update for each in found) - planned <= NUMBERS * len(rounds)
    predicted = plan(config, ranks, hardware.load("h100")).estimate.memory.update - on_gpu + planned
    assert 0 <= max(each.with_gradients for each in found) - predicted <= NUMBERS * len(rounds)
    axes = {part.axis: part.ranks for part in rounds} | {"tensor": config.parallel.tensor}
    sent = [(axes[each.axis], each.bytes) for each in exchanges(rounds, state_format.weight_bytes)]
    assert sent == [max(of_ranks) for of_ranks in zip(*(each.sent for each in found), strict=True)]
    # The home that takes longest need not be that with the most FLOPs: the sizes of these matrices take no time.
    flops = sum(count * product.flops for product, count in products(rounds, state_format, hardware.load("h100")).items())
    assert flops == pytest.approx(max(each.flops for each in found), rel=0.05)


JOB = ("stage=pretrain", "model=llama3-8b", "training.sequence_length=4096", "training.micro_batch_size=1", "training.global_batch_size=64")


def test_a_plan_has_the_update_of_muon():
    """Its memory counts if it is more than that of the passes; time and bytes are lines of the plan."""
    gpu = hardware.load("h100")
    plans = {}
    for name in ("adamw", "muon"):
        for stage in (0, 1):
            words = (f"optimizer={name}", f"parallel.zero_stage={stage}", "parallel.tensor=8", "training.activation_checkpointing=full")
            words = (*words, "training.sequence_length=512")
            plans[name, stage] = plan(configured(*JOB, *words), 16, gpu)
    for stage in (0, 1):
        adamw, muon = plans["adamw", stage].estimate, plans["muon", stage].estimate
        assert muon.memory.optimizer < adamw.memory.optimizer
        assert muon.memory.passes == adamw.memory.passes
        assert (adamw.memory.update, adamw.causes.keys() & {"newton-schulz", "matrix exchange"}) == (0, set())
        more = sum(muon.causes[cause] - adamw.causes.get(cause, 0.0) for cause in ("optimizer", "newton-schulz", "matrix exchange"))
        assert muon.step_time - adamw.step_time == pytest.approx(more)
    whole, sharded = plans["muon", 0].estimate.memory, plans["muon", 1].estimate.memory
    assert whole.update > whole.passes
    assert sharded.update < sharded.passes
    for memory, more in ((whole, whole.update), (sharded, sharded.passes)):
        assert memory.total == memory.weights + memory.optimizer + more + memory.overhead
    printed = "\n".join(plan_report.memory_lines(plans["muon", 0]))
    assert "most in the update of the weights" in printed
    rows = {(row.name, row.phase): row for row in table(plans["muon", 1])}
    assert {("all_to_all (data)", "update"), ("all_to_all (tensor)", "update"), (NAME, "update")} <= rows.keys()
    assert not any(phase == "update" for _, phase in {(row.name, row.phase) for row in table(plans["adamw", 1])})


def test_a_plan_has_the_flops_of_five_iterations():
    """4 a^2 b + 2 a^3 each for every (a, b) matrix, a <= b, on the only rank of a pipeline stage, and none in the FLOPs of the model."""
    gpu, words = hardware.load("h100"), (*JOB, "parallel.zero_stage=0", "cluster.check_memory=false")
    muon, adamw = (plan(configured(*words, f"optimizer={name}"), 1, gpu) for name in ("muon", "adamw"))
    matrices = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    expected = 32 * 5 * sum(4 * a * a * b + 2 * a**3 for a, b in matrices)
    assert sum(row.count * row.flops for row in table(muon) if row.name == NAME) == expected
    assert muon.estimate.flops == adamw.estimate.flops
