"""Who writes what: each element once, the same number of bytes on all ranks that hold the same, arithmetic of the rank's own fragments."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.fragments import Fragment, Held, Share, plan
from pipeline.config.layout import Layout
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import init_weights, partition_model
from pipeline.training.buckets import build_buckets, partition_fragments, replica_of
from pipeline.training.engine import fixed_fragments
from tests.world import configured, tiny

KINDS = ("weight", "exp_avg", "exp_avg_sq")


@given(
    st.integers(1, 9),
    st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from(["a", "b"]), st.sampled_from([{"weight": "BF16"}, {"weight": "F32", "m": "F32"}]))
    ),
)
def test_shares_are_equal_and_hold_each_element_once(replicas: int, fragments: list[tuple[int, str, dict[str, str]]]) -> None:
    """Also if the ranks have the fragments in another order."""
    count = [np.zeros(size, int) for size, _, _ in fragments]
    written: dict[str, list[int]] = defaultdict(list)
    for replica in range(replicas):
        order = list(range(len(fragments))) if replica % 2 else list(reversed(range(len(fragments))))
        sizes, groups, kinds = zip(*(fragments[i] for i in order), strict=True) if fragments else ((), (), ())
        held = [
            Held(f"w{i}", (60,), ((0, 60),), 5, sizes[n], kinds[n], replicas=replicas, replica=replica, group=groups[n])
            for n, i in enumerate(order)
        ]
        own: dict[str, int] = dict.fromkeys(groups, 0)
        for share in plan(held):
            fragment, part = held[share.fragment], share.part
            assert part.start == 5 + share.first
            count[order[share.fragment]][share.first : share.first + part.count] += 1
            own[fragment.group] += sum(part.bytes(kind) for kind in part.dtypes)
        for group, size in own.items():
            written[group].append(size)
    assert all((c == 1).all() for c in count)
    assert all(max(sizes) - min(sizes) <= 2 * 8 for sizes in written.values()), "equal to the element at each end"


def test_the_parts_of_many_ranks_are_few() -> None:
    """Ranks that hold the same weights divide each at most at the borders of their shares."""
    fragments = [("BF16", 8192)] * 30 + [("F32", 1024 * 8192)] * 20
    held = [Held(f"w{n:03}", (size,), ((0, size),), 0, size, {"weight": d}, replicas=512) for n, (d, size) in enumerate(fragments)]
    plans = [plan([replace(fragment, replica=replica) for fragment in held]) for replica in range(512)]
    assert sum(map(len, plans)) <= len(held) + 512
    sizes = [sum(share.part.bytes("weight") for share in shares) for shares in plans]
    assert max(sizes) - min(sizes) <= 8


def group(size: int, rank: int) -> Any:
    """A process group that nothing is sent over."""
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def mesh_of(layout: Layout, rank: int) -> Mesh:
    """The mesh of a rank without process groups."""
    at = layout.coordinates(rank)
    data = group(layout.data * layout.context, at.data * layout.context + at.context)
    dense_rank = (at.data * layout.expert + at.expert) * layout.context + at.context
    dense = group(layout.data * layout.expert * layout.context, dense_rank)
    tensor, expert = group(layout.tensor, at.tensor), group(layout.expert, at.expert)
    context, pipeline = group(layout.context, at.context), group(layout.pipeline, at.pipeline)
    members = [ranks for experts in (False, True) for ranks in layout.zero_members(at, experts=experts)] if layout.zero_block else []
    zero = [group(len(ranks), ranks.index(rank)) for ranks in members]
    return Mesh(layout, rank, torch.device("cpu"), tensor, context, expert, data, dense, pipeline, None, None, *zero)


def fragments_of(config: Any, layout: Layout, rank: int) -> list[Fragment]:
    """The fragments of a rank, by the functions of the engines on weights without an optimizer."""
    mesh, model = mesh_of(layout, rank), partition_model(config, layout, rank)
    init_weights(model, config, torch.device("cpu"), lambda piece, dtype: torch.empty(piece.shape, dtype=dtype))
    fixed = fixed_fragments(model, mesh)
    if config.parallel.zero_stage == 0:
        pieces = model.pieces.values()
        return [Fragment(p, 0, dict.fromkeys(KINDS, torch.empty(p.elements)), *replica_of(p, mesh)) for p in pieces] + fixed
    buckets = build_buckets(model, mesh, sequence_parallel=False)
    flat = [dict.fromkeys(KINDS, torch.empty(bucket.partition_elements)) for bucket in buckets]
    return [f for bucket, own in zip(buckets, flat, strict=True) for f in partition_fragments(bucket, mesh, own)] + fixed


def check(config: Any, ranks: int, *, even: bool = True) -> None:
    """Every element of every weight and kind is written once; the padding of partitions, in the last one, is small beside the model.

    Without ZeRO, the ranks of a pipeline stage write the same number of bytes, to an element for each set of replicas. With ZeRO, the
    tensor ranks do. Those of another partition write about as much: less, if more of it is the same on all tensor ranks.
    """
    layout = Layout.of(config, ranks)
    count: dict[tuple[str, str], np.ndarray] = {}
    primary: dict[str, int] = defaultdict(int)
    stages: dict[int, list[int]] = defaultdict(list)
    partitions: dict[tuple[int, ...], list[int]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(ranks):
        fragments = fragments_of(config, layout, rank)
        shares: list[Share] = plan([fragment.held() for fragment in fragments])
        for fragment in fragments:
            shapes[fragment.piece.name] = fragment.piece.full_shape
            primary[fragment.piece.name] += fragment.tensors["weight"].numel() * (fragment.replica == 0)
        for part in (share.part for share in shares):
            for kind in part.dtypes:
                full = count.setdefault((part.name, kind), np.zeros(part.shape, int))
                box = full[tuple(slice(*sides) for sides in part.box)]
                flat = box.flatten()
                flat[part.start : part.start + part.count] += 1
                box[...] = flat.reshape(box.shape)
        at, size = layout.coordinates(rank), sum(share.part.bytes(kind) for share in shares for kind in share.part.dtypes)
        stages[at.pipeline].append(size)
        partitions[at.pipeline, at.data, at.expert, at.context].append(size)
    assert {name for name, _ in count} == set(shapes)
    assert all((full == 1).all() for full in count.values())
    assert primary == {name: np.prod(shape) for name, shape in shapes.items()}, "one primary copy of each element"
    if even:
        same = partitions if config.parallel.zero_stage else stages
        assert all(max(sizes) - min(sizes) <= 5 * 12 for sizes in same.values()), same
        assert all(min(sizes) > 0.9 * max(sizes) for sizes in stages.values()), stages


EXPERTS = ("model.hidden=128", "model.ffn_hidden=96", "model.experts=4", "model.top_k=2")
CASES = {
    "data": (("model=llama-tiny",), 4),
    "context": (("model=llama-tiny", "parallel.context=2"), 4),
    "tensor": (("model=llama-tiny", "parallel.tensor=2"), 4),
    "tied": (("model=gpt-tiny", "model.vocab_size=68", "parallel.pipeline=2", "parallel.tensor=2"), 8),
    "zbv": (("model=gpt-tiny", "model.vocab_size=68", "parallel.pipeline=2", "parallel.schedule=zbv", "model.layers=4"), 4),
    "experts": (("model=mixtral-tiny", *EXPERTS, "parallel.expert=2", "parallel.tensor=2"), 8),
    "whole experts": (("model=mixtral-tiny", *EXPERTS, "parallel.expert=2", "parallel.tensor=2", "parallel.expert_tensor=1"), 8),
    "router bias": (("model=deepseek-tiny", "parallel.expert=2"), 4),
    "encoder": (
        ("model=t5-tiny", "model.head_width=16", "parallel.pipeline=2", "parallel.tensor=2", "training.objective=span_corruption"),
        8,
    ),
}


def one_of(values: tuple[Any, ...], *others: Any) -> list[Any]:
    """Parameters in which every other value meets one of the values in the default tier: each time the next one."""
    return [
        pytest.param(*other, value, marks=() if number % len(values) == place else pytest.mark.long)
        for number, other in enumerate(others)
        for place, value in enumerate(values)
    ]


@pytest.mark.parametrize(("case", "zero"), one_of((1, 3, 0), *((case,) for case in CASES)))
def test_each_rank_of_a_layout_writes_its_equal_share(case: str, zero: int) -> None:
    words, ranks = CASES[case]
    config = configured(*tiny("model.layers=4", "model.vocab_size=68", *words, f"parallel.zero_stage={zero}"))
    check(config, ranks)


@pytest.mark.parametrize(("case", "zero_group"), one_of((2, 4), ("experts",), ("data",), ("context",)))
def test_the_groups_of_zero_write_equal_shares(case: str, zero_group: int) -> None:
    words, ranks = CASES[case]
    words = (*words, "parallel.zero_stage=2", f"parallel.zero_group={zero_group}")
    config = configured(*tiny("model.layers=4", "model.vocab_size=68", *words))
    assert (Layout.of(config, 2 * ranks).zero_sizes(experts=False)) == (zero_group, 2 * ranks // config.parallel.tensor // zero_group)
    check(config, 2 * ranks)


def test_groups_of_zero_and_a_vocabulary_that_does_not_divide() -> None:
    words = ("parallel.tensor=2", "parallel.zero_stage=2", "parallel.zero_group=2")
    check(configured(*tiny("model=gpt-tiny", "model.vocab_size=67", "model.max_positions=64", *words)), 8, even=False)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_vocabulary_that_does_not_divide(zero: int) -> None:
    """Partitions of the tensor ranks then begin at other elements: what they share is not divided, and still written once."""
    config = configured(
        *tiny("model=gpt-tiny", "model.vocab_size=67", "model.max_positions=64", "parallel.tensor=2", f"parallel.zero_stage={zero}")
    )
    check(config, 4, even=False)


UNTRAINED = (("lora.rank=4",), ("lora.rank=4", "lora.quantize=nf4"), ("training.frozen=[embed.*]",))


@pytest.mark.parametrize(("words", "zero"), one_of((0, 2), *((words,) for words in UNTRAINED)))
def test_weights_that_are_not_trained_are_shared_too(words: tuple[str, ...], zero: int) -> None:
    base = tiny("model=llama-tiny", "model.hidden=64", "model.vocab_size=68", "parallel.tensor=2", f"parallel.zero_stage={zero}", *words)
    check(configured(*base), 8)
