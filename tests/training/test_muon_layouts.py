"""Muon in layouts: a step equals that of one process, copies stay equal, and every element travels once."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.certification.reference import initialize
from pipeline.models import registry
from pipeline.training import matrix_homes
from pipeline.training.matrix_layout import LocalMatrix, Spread, choose_homes, work
from tests.training.expected import train_plain
from tests.training.layouts import LATENT, text
from tests.world import Observed, configured, share_of, tiny, trainer, unsharded

MUON = "optimizer=muon"
#: A layout differs from one process by at most so many times what other roundings do to one process.
FACTOR = 3


def _layout(settings: tuple[str, ...]) -> tuple[dict[str, Tensor], list[tuple[str, Any, bytes]]]:
    """The weights after a step, and the bytes of this rank's pieces of the weights."""
    config, mine = trainer(*tiny(*settings))
    mine.train(*share_of(mine, *text(config, 0)), step=0)
    held = [(piece.name, piece.box, weight.clone().numpy().tobytes()) for piece, weight in mine.engine.forward_weights()]
    return unsharded(mine), held


DENSE = ("model=llama-tiny", "model.layers=2", "model.kv_heads=2", "model.ffn_hidden=48", "training.micro_batch_size=4")
#: No loss that depends on which samples share a micro-batch.
ROUTED = ("training.balance_loss=0", "training.micro_batch_size=4", "model.layers=2")
MIXTRAL = (
    "model=mixtral-tiny",
    "model.kv_heads=2",
    "model.ffn_hidden=24",
    "training.z_loss=0",
    "model.experts=4",
    "model.top_k=2",
    *ROUTED,
)
DEEPSEEK = ("model=deepseek-tiny", "model.ffn_hidden=48", "model.expert_ffn_hidden=12", "model.mtp_depth=1", *LATENT, *ROUTED)
PER_HEAD = "optimizer.muon_per_head=true"
LAYOUTS = [
    (2, DENSE, ("zero_stage=2",)),
    (4, (*DENSE, PER_HEAD), ("tensor=2", "zero_stage=3")),
    (4, MIXTRAL, ("expert=2", "tensor=2", "zero_stage=0")),
    (4, MIXTRAL, ("expert=2", "tensor=2", "expert_tensor=1", "zero_stage=1")),
]
MORE_LAYOUTS = [
    (4, DENSE, ("tensor=2", "zero_stage=1")),
    (4, DENSE, ("zero_stage=3", "zero_group=2")),
    (2, DEEPSEEK, ("tensor=2", "zero_stage=2")),
    (2, DENSE, ("tensor=2", "zero_stage=0")),
    *((2, DENSE, (f"zero_stage={stage}",)) for stage in (0, 1, 3)),
    (4, DENSE, ("zero_stage=1", "zero_group=2")),
    (2, MIXTRAL, ("expert=2", "zero_stage=1")),
    (4, MIXTRAL, ("expert=2", "zero_stage=1", "zero_group=2")),
]
LAYOUTS += [pytest.param(*case, marks=pytest.mark.long) for case in MORE_LAYOUTS]


@functools.cache
def _one_process(settings: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The weights after a step of the plain loop, and how far those of plain loops are whose values are rounded otherwise.

    Two kinds of them: other orders of the samples, and with them of the sums of all gradients; weights that begin one rounding away, which
    stand for the other orders of the sums of a tensor-parallel layer.
    """
    config = configured(*tiny(MUON, *settings))
    tokens, fields = text(config, 0)
    weights = train_plain(config, [(tokens, fields)]).weights
    bound = dict.fromkeys(weights, 0.0)
    for seed in range(4):
        random = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(tokens), generator=random)
        permuted = train_plain(config, [(tokens[order], {name: values[order] for name, values in fields.items()})])
        model = registry.build(config.model)
        initialize(model, config.model, config.training.seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.nextafter(weight, weight + torch.randint(-1, 2, weight.shape, generator=random)))
        rounded = train_plain(config, [(tokens, fields)], model=model)
        for other in (permuted.weights, rounded.weights):
            bound = {name: max(value, float((other[name] - weights[name]).norm())) for name, value in bound.items()}
    return weights, bound


@pytest.mark.parametrize("ranks, model, layout", LAYOUTS, ids=str)
def test_a_step_in_a_layout_equals_one_process(worlds, ranks, model, layout):
    """The bound is measured: what other roundings do to one process, per weight."""
    expected, bound = _one_process(model)
    found = worlds(ranks).run(_layout, (MUON, *model, *(f"parallel.{word}" for word in layout)))
    weights = found[0][0]
    assert weights.keys() == expected.keys()
    worst = {name: float((weights[name] - value).norm()) / max(bound[name], 1e-7 * float(value.norm())) for name, value in expected.items()}
    assert max(worst.values()) <= FACTOR, sorted(worst.items(), key=lambda item: -item[1])[:5]
    copies: dict[tuple[str, Any], bytes] = {}
    for _, held in found:
        for name, box, content in held:
            assert copies.setdefault((name, box), content) == content, f"copies of {name} differ"


def test_another_rule_would_be_seen():
    """Heads as matrices of their own, as a rank would have them that takes its piece for the matrix: far beyond the bound."""
    expected, bound = _one_process(DENSE)
    other, _ = _one_process((*DENSE, PER_HEAD))
    for name in ("query", "key", "value"):
        weight = f"blocks.0.attention.{name}.weight"
        assert (other[weight] - expected[weight]).norm() > 20 * FACTOR * bound[weight]


def _in_rounds(most: int, settings: tuple[str, ...]) -> tuple[int, dict[str, Tensor]]:
    """The number of rounds of an update of at most so many elements of a rank, and the weights after a step."""
    before, matrix_homes.ELEMENTS_AT_ONCE = matrix_homes.ELEMENTS_AT_ONCE, most
    try:
        config, mine = trainer(*tiny(*settings))
    finally:
        matrix_homes.ELEMENTS_AT_ONCE = before
    mine.train(*share_of(mine, *text(config, 0)), step=0)
    return len(mine.engine.update.optimizer._rounds), unsharded(mine)


@pytest.mark.parametrize(
    "layout",
    ["parallel.zero_stage=1", *(pytest.param(f"parallel.{word}", marks=pytest.mark.long) for word in ("zero_stage=0", "tensor=2"))],
)
def test_rounds_change_nothing(worlds, layout):
    settings = (MUON, *DENSE, layout)
    (one, expected), (several, found) = (worlds(2).run(_in_rounds, most, settings)[0] for most in (1 << 27, 5000))
    assert one == 1 < several
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def _bytes(settings: tuple[str, ...]) -> tuple[int, int, int, int]:
    """What this rank gives to all-to-all exchanges and to the collectives of ZeRO; elements of the hidden matrices, and of the padding."""
    config, mine = trainer(*tiny(*settings))
    batch = share_of(mine, *text(config, 0))
    sent: Counter[str] = Counter()

    def count(operator: Any, args: Any, _result: Any) -> None:
        if operator is torch.ops.c10d.alltoall_base_.default:
            sent["exchanges"] += args[1].nbytes
        elif operator is torch.ops.c10d._reduce_scatter_base_.default:
            sent["ZeRO"] += args[1].nbytes
        elif operator is torch.ops.c10d._allgather_base_.default:
            sent["ZeRO"] += args[0].nbytes

    with Observed(count):
        mine.train(*batch, step=0)
    hidden = sum(bucket.elements for bucket in mine.engine._reducer.buckets if bucket.muon)
    padding = sum(bucket.elements - sum(piece.elements for piece in bucket.pieces.values()) for bucket in mine.engine._reducer.buckets)
    return sent["exchanges"], sent["ZeRO"], hidden, padding


@pytest.mark.parametrize("dtype, size", [pytest.param("fp32", 4, marks=pytest.mark.long), ("bf16", 2)])
def test_every_element_travels_to_its_home_and_back_once(worlds, dtype, size):
    """In the dtype of Newton-Schulz: a fraction of what ZeRO 1 sends, of which each rank sends all but its partition."""
    found = worlds(2).run(_bytes, (MUON, *DENSE, "parallel.zero_stage=1", f"precision={dtype}"))
    _, _, hidden, padding = found[0]
    total = sum(exchanged for exchanged, *_ in found)
    assert 2 * size * (hidden - padding) <= total <= 2 * size * hidden
    for exchanged, zero, *_ in found:
        assert 0 < exchanged + zero < 2 * zero


def test_homes_share_the_work():
    """No rank has more than the best division and one matrix, of the same FLOPs in both groups; every rank chooses alike."""
    shapes = [(4096, 4096)] * 4 + [(1024, 4096)] * 2 + [(14336, 4096)] * 3
    matrices = [LocalMatrix(n, 0, *shape, shape, Spread.ROWS, 1.0) for n, shape in enumerate(shapes * 20)]
    homes = choose_homes(matrices, 16, 4)
    load = {(rank, column): 0 for rank in range(16) for column in range(4)}
    for matrix, home in zip(matrices, homes, strict=True):
        load[home] += work(matrix)
    mean = sum(load.values()) / len(load)
    assert max(load.values()) <= mean + max(work(matrix) for matrix in matrices)
    assert homes == choose_homes(matrices, 16, 4)
    own = [LocalMatrix(n, 0, 128, 4096, (128, 4096), Spread.OWN, 1.0) for n in range(64)]
    assert [column for _, column in choose_homes(own, 16, 4)] == [-1] * 64, "each tensor rank computes its own"
