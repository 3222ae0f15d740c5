"""What a step communicates, when, and what it holds: counted on four ranks, under every ZeRO stage."""

import weakref
from collections import Counter
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.training.buckets import padded_elements
from pipeline.training.gradient_reduction import MAX_PENDING
from pipeline.training.weight_gathering import FlatWeights
from tests.world import causal, share, tiny, trainer
from tools.audit.reduced_gradient import reduction_error

RANKS = 4
BLOCKS = 6
MICRO_BATCHES = 4
#: Blocks that are large beside embedding and head.
SETTINGS = tiny(
    *("model=llama-tiny", "model.kv_heads=4", f"model.layers={BLOCKS}", "model.ffn_hidden=64", "model.vocab_size=32"),
    *("training.global_batch_size=32", "precision=bf16"),
)

REDUCE = {torch.ops.c10d.allreduce_.default: "all-reduce", torch.ops.c10d._reduce_scatter_base_.default: "reduce-scatter"}
GATHER = {torch.ops.c10d._allgather_base_.default: "all-gather"}


class Collectives(TorchDispatchMode):
    """Records the collectives, as (name, bytes of the whole tensor), between other events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = (REDUCE | GATHER).get(operation)
        if name == "reduce-scatter":
            self.events.append((name, args[1].nbytes))
        elif name == "all-gather":
            self.events.append((name, args[0].nbytes))
        elif name:
            self.events.append((name, sum(tensor.nbytes for tensor in args[0])))
        return operation(*args, **(kwargs or {}))

    def bytes(self, name: str) -> int:
        """The bytes of all collectives of a kind, without scalars (losses, norms)."""
        return sum(size for kind, size in self.events if kind == name and size > 64)

    def calls(self, name: str) -> int:
        """The number of collectives of a kind, without scalars."""
        return sum(kind == name and size > 64 for kind, size in self.events)


def batch_of(config: Any, trainer: Any) -> list[Any]:
    """This rank's share of a global batch."""
    shape = (config.training.global_batch_size, config.training.sequence_length + 1)
    return list(causal(*share(trainer, torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(3)))))


def record(*overrides: str) -> dict[str, Any]:
    """Count the collectives of a second step, and what is alive when a gradient arrives."""
    config, job = trainer(*SETTINGS, *overrides)
    inputs = batch_of(config, job)
    job.train(*inputs)
    held: list[int] = []
    gathered: list[int] = []
    with Collectives() as found:

        def arrived(_: Any) -> None:
            held.append(sum(state.flat.nbytes for state in job.engine._reducer._states.values() if state.flat is not None))
            if config.parallel.zero_stage:
                gathered.append(sum(flat.flat.untyped_storage().nbytes() for flat in job.engine.weights))

        for parameter in job.model.pieces:
            # This hook runs before the engine's, which may start a collective.
            parameter.register_hook(lambda _: found.events.append(("gradient", 0)))
            parameter.register_post_accumulate_grad_hook(arrived)
        job.train(*inputs)
    weights = sum(bucket.elements for bucket in job.engine._reducer.buckets)
    last = max(index for index, event in enumerate(found.events) if event[0] == "gradient")
    kind = "all-reduce" if config.parallel.zero_stage == 0 else "reduce-scatter"
    before = sum(size for name, size in found.events[:last] if name == kind)
    return {
        "elements": weights,
        "largest": max(bucket.elements for bucket in job.engine._reducer.buckets),
        "kinds": Counter(name for name, size in found.events if size > 64),
        **{name: found.bytes(name) for name in ("all-reduce", "reduce-scatter", "all-gather")},
        "gathers": found.calls("all-gather"),
        "sums": found.calls("all-reduce"),
        "sums before the last gradient": sum(size for name, size in found.events[:last] if name == "all-reduce")
        / max(1, found.bytes("all-reduce")),
        "before the last gradient": before / max(1, found.bytes(kind)),
        "whole gradients": max(held),
        "whole weights": max(gathered, default=0),
        "buckets": len(job.engine._reducer.buckets),
    }


@pytest.fixture(scope="module")
def recorded(worlds):
    """The record of rank 0 under every ZeRO stage."""
    return {stage: worlds(RANKS).run(record, f"parallel.zero_stage={stage}")[0] for stage in (0, 1, 2, 3)}


@pytest.mark.long
def test_zero_0_reduces_each_gradient_once_in_fp32(recorded):
    assert recorded[0]["all-reduce"] == 4 * recorded[0]["elements"]
    assert recorded[0]["reduce-scatter"] == recorded[0]["all-gather"] == 0


def test_zero_1_moves_at_most_a_reduce_scatter_and_a_gathering(recorded):
    """4P + 2P bytes, of which a rank sends (D-1)/D; an all-reduce of fp32 gradients alone would send 8P."""
    assert recorded[1]["reduce-scatter"] == 4 * recorded[1]["elements"]
    assert recorded[1]["all-gather"] == 2 * recorded[1]["elements"]
    assert recorded[1]["all-reduce"] == 0


def test_zero_2_reduces_after_every_micro_batch_and_holds_few_whole_gradients(recorded):
    assert recorded[2]["reduce-scatter"] > (MICRO_BATCHES - 1) * recorded[1]["reduce-scatter"]
    assert recorded[2]["all-gather"] == recorded[1]["all-gather"]
    # The matrices of one block, and the vectors, which arrive from all blocks.
    assert recorded[2]["whole gradients"] <= 2 * 4 * recorded[2]["largest"] < recorded[1]["whole gradients"]


def test_zero_3_gathers_a_block_twice_a_micro_batch(recorded):
    buckets = recorded[3]["buckets"] - 1  # vectors are gathered once a step
    assert recorded[3]["gathers"] <= 2 * buckets * MICRO_BATCHES + 1
    assert recorded[3]["reduce-scatter"] == recorded[2]["reduce-scatter"]


def test_zero_3_holds_the_weights_of_few_blocks(recorded):
    """The block in use, the one that is gathered ahead, and the vectors."""
    assert recorded[3]["whole weights"] <= 3 * 2 * recorded[3]["largest"] < 2 * recorded[3]["elements"]
    assert recorded[1]["whole weights"] == 2 * recorded[1]["elements"]


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 3))])
def test_partitions_are_summed_over_the_groups_once_a_step_beside_the_backward_pass(worlds, recorded, stage):
    """A group of two gathers and reduces as four ranks do; what crosses groups is half of the gradient, whatever the micro-batches."""
    found = worlds(RANKS).run(record, f"parallel.zero_stage={stage}", "parallel.zero_group=2")[0]
    assert found["all-reduce"] == 4 * found["elements"] / 2
    assert found["sums"] == found["buckets"]
    assert found["sums before the last gradient"] > 0.5
    for kind in ("reduce-scatter", "all-gather"):
        assert found[kind] == pytest.approx(recorded[stage][kind], rel=0.02), "but for the padding"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_reduced_while_the_backward_pass_runs(recorded, stage):
    """Only embedding and vectors are complete with the last gradient. MAX_PENDING bounds the gradients that wait for the network."""
    assert recorded[stage]["before the last gradient"] > 0.8
    assert MAX_PENDING < BLOCKS


def gathering(*overrides: str) -> list[tuple[str, str]]:
    """The gatherings of two steps: ("start" or "wait", bucket), and ("compute", "") for a block or the gradient of a matrix."""
    config, job = trainer(*SETTINGS, *overrides)
    inputs = batch_of(config, job)
    events: list[tuple[str, str]] = []
    start, wait = FlatWeights.refresh, FlatWeights.wait

    def started(flat: FlatWeights) -> None:
        events.append(("start", flat.bucket.name))
        start(flat)

    def waits(flat: FlatWeights) -> None:
        if flat._work is not None:
            events.append(("wait", flat.bucket.name))
        wait(flat)

    for parameter in job.model.pieces:
        if parameter.dim() > 1:
            parameter.register_hook(lambda _: events.append(("compute", "")))
    for stage in job.model.stages.values():
        for block in stage.blocks.values():
            block.register_forward_pre_hook(lambda *_: events.append(("compute", "")))
    with mock.patch.object(FlatWeights, "refresh", started), mock.patch.object(FlatWeights, "wait", waits):
        job.train(*inputs)
        job.train(*inputs)
    return events


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2])
def test_weights_are_gathered_in_the_order_of_their_use(worlds, stage):
    """Collectives of a communicator run in order: a module that waits for its weights must not wait for those of later ones."""
    events = worlds(RANKS).run(gathering, f"parallel.zero_stage={stage}")[0]
    starts, waits = ([name for kind, name in events if kind == which] for which in ("start", "wait"))
    assert len(waits) > BLOCKS
    assert starts == 2 * waits, "the second step waits for what the first one has started"


def test_zero_3_starts_every_gathering_before_the_module_ahead_computes(worlds):
    """All but the first ones of a forward pass: exposed is one with nothing large between its start and the wait."""
    events = worlds(RANKS).run(gathering, "parallel.zero_stage=3")[0]
    exposed = [name for (kind, name), after in pairwise(events) if kind == "start" and after == ("wait", name)]
    assert sum(kind == "wait" for kind, _ in events) > 4 * BLOCKS * MICRO_BATCHES
    assert set(exposed) == {"stage 0 embed dense", "stage 0 blocks.0 dense"}


def started() -> tuple[int, int, int]:
    """The most bytes of weights that a rank holds while ZeRO 3 starts, the largest bucket, and the weights of the model, in elements."""
    from pipeline.parallel.parallelize import LocalModel

    held: list[int] = []
    draw = LocalModel.materialize

    def spy(model: LocalModel, parameter: torch.nn.Parameter) -> None:
        draw(model, parameter)
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.pieces}
        held.append(sum(storages.values()))

    with mock.patch.object(LocalModel, "materialize", spy):
        _, job = trainer(*SETTINGS, "parallel.zero_stage=3")
    sizes = [bucket.elements for bucket in job.engine._reducer.buckets]
    return max(held), max(sizes), sum(sizes)


def test_zero_3_starts_without_holding_the_model(worlds):
    for held, largest, elements in worlds(RANKS).run(started):
        assert 0 < held <= 2 * 2 * largest < 2 * elements


def reduced_and_mean(*overrides: str) -> float:
    """The error of the reduction of one batch."""
    config, job = trainer(*SETTINGS, *overrides)
    tokens, batch = batch_of(config, job)
    return reduction_error(job, tokens, batch, MICRO_BATCHES)


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2))])
def test_a_bf16_gradient_is_reduced_in_fp32(worlds, stage):
    assert max(worlds(RANKS).run(reduced_and_mean, f"parallel.zero_stage={stage}")) < 1e-6


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 3))])
def test_gradients_are_sent_in_bf16_if_that_is_set(worlds, recorded, stage):
    """Half of the bytes, and the rounding errors of bf16."""
    words = (f"parallel.zero_stage={stage}", "precision.reduce_dtype=bf16")
    found, kind = worlds(RANKS).run(record, *words)[0], "reduce-scatter" if stage else "all-reduce"
    assert 2 * found[kind] == recorded[stage][kind]
    assert 1e-4 < max(worlds(RANKS).run(reduced_and_mean, *words)) < 2**-6


class Stream:
    """A stream that records what waits for what."""

    current = None

    def __init__(self, name: str, events: list[tuple[str, str]]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: Any) -> None:
        self.events.append((self.name, other.name))

    def __enter__(self) -> None:
        self.outer, Stream.current = Stream.current, self

    def __exit__(self, *_: Any) -> None:
        Stream.current = self.outer


def memory_of_gradients(*overrides: str) -> list[tuple[str, str]]:
    """Streams that wait for each other, and ("freed", stream) when the memory of a whole gradient becomes another's, in a step."""
    config, job = trainer(*SETTINGS, *overrides)
    events: list[tuple[str, str]] = []
    reducer, default = job.engine._reducer, Stream("main", events)
    reducer._stream, Stream.current = Stream("side", events), default
    complete = type(next(iter(reducer._states.values()))).complete

    def watched(state: Any) -> torch.Tensor:
        flat = complete(state)
        weakref.finalize(flat, lambda: events.append(("freed", Stream.current.name)))
        return flat

    with (
        mock.patch.object(type(next(iter(reducer._states.values()))), "complete", watched),
        mock.patch.object(torch.cuda, "current_stream", side_effect=lambda: Stream.current),
        mock.patch.object(torch.cuda, "stream", lambda stream: stream),
        mock.patch.object(torch.Tensor, "record_stream", side_effect=lambda *_: events.append(("record", Stream.current.name))),
    ):
        job.train(*batch_of(config, job))
    return events


@pytest.mark.parametrize("stage", ["2", *(pytest.param(stage, marks=pytest.mark.long) for stage in ("1", "1 parallel.zero_group=2"))])
def test_the_memory_of_gradients_on_a_gpu_is_bounded_by_what_the_device_has_done(worlds, stage):
    """Memory that is recorded as used by another stream comes back when the host sees that: a host that runs ahead asks for more."""
    events = worlds(RANKS).run(memory_of_gradients, *f"parallel.zero_stage={stage}".split())[0]
    freed = [index for index, event in enumerate(events) if event[0] == "freed"]
    assert len(freed) >= BLOCKS
    assert not [event for event in events if event[0] == "record"]
    # Between two whole gradients that become free, the stream that writes the next one waits for the one that has read them.
    assert all(("main", "side") in events[before:after] for before, after in pairwise([0, *freed]))
    assert {events[index] for index in freed} == {("freed", "main")}


@given(elements=st.integers(1, 10**12), ranks=st.integers(1, 16_384))
def test_partitions_are_equal_and_aligned(elements, ranks):
    """Llama 8B's block has 218,103,808 elements: on 48 ranks its 16-bit partitions were 12 bytes past a multiple of 16."""
    padded = padded_elements(elements, ranks)
    assert padded % ranks == 0
    assert padded // ranks % 128 == 0
    assert 0 <= padded - elements < 128 * ranks
