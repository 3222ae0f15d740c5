"""Digests of copies: equal exactly if the bits are, however ZeRO divides a weight; and the axis along which copies differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.config.layout import Coordinates, Layout
from pipeline.training.weight_copies import PieceDigest, digest, disagreements

#: 32 ranks.
LAYOUT = Layout(pipeline=2, data=2, tensor=2, expert=2, context=2)
FULL = ((0, 8), (0, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_digest_is_the_sum_of_those_of_the_partitions(dtype: torch.dtype) -> None:
    values = torch.randn(1000).to(dtype)
    whole = int(digest(values))
    parts = int(digest(values[:321])) + int(digest(values[321:], 321))
    assert (whole - parts) % 2**64 == 0
    assert int(digest(values.view(10, 100))) == whole


def test_a_digest_depends_on_every_bit_and_position() -> None:
    values = torch.randn(1000)
    changed, swapped = values.clone(), values.clone()
    changed.view(torch.int32)[700] ^= 1
    swapped[[3, 4]] = values[[4, 3]]
    assert len({int(digest(each)) for each in (values, changed, swapped, values + 0.0)}) == 3
    assert int(digest(torch.tensor([0.0]))) != int(digest(torch.tensor([-0.0])))


def copies(wrong: Coordinates, name: str = "norm.weight") -> list[list[PieceDigest]]:
    """The parts of all ranks, of which one holds other values."""
    return [
        [
            PieceDigest("exp_avg", name, FULL, 32, 32, 7 if LAYOUT.coordinates(rank) == wrong else 5),
            PieceDigest("weight", name, FULL, 32, 32, 1),
        ]
        for rank in range(LAYOUT.world_size)
    ]


FIRST = Coordinates(0, 0, 0, 0, 0)


@pytest.mark.parametrize("axis", ["pipeline", "data", "expert", "context", "tensor"])
def test_the_axis_is_named(axis: str) -> None:
    """The copies along one axis only: the other ranks hold other weights."""
    wrong = replace(FIRST, **{axis: 1})
    ranks = copies(wrong)
    for rank, parts in enumerate(ranks):
        if LAYOUT.coordinates(rank) not in (FIRST, wrong):
            parts.clear()
    (found,) = disagreements(LAYOUT, ranks)
    assert str(found) == f"norm.weight (exp_avg) differs along the {axis} axis: ranks 0 and {LAYOUT.rank(wrong)}"


def test_equal_copies() -> None:
    assert disagreements(LAYOUT, copies(replace(FIRST, pipeline=9))) == []


def test_copies_that_zero_divides() -> None:
    """Tensor ranks divide a replicated weight over their data ranks, each at another element."""
    layout = Layout(pipeline=1, data=2, tensor=2)
    shares = {(0, 0): (20, 3), (0, 1): (18, 2), (1, 0): (12, 4), (1, 1): (14, 5)}  # (data, tensor): elements and digest

    def ranks(changed: int = 0) -> list[list[PieceDigest]]:
        where = [layout.coordinates(rank) for rank in range(4)]
        held = [(shares[at.data, at.tensor], changed * at.tensor) for at in where]
        return [[PieceDigest("weight", "w", FULL, 32, count, value + more)] for (count, value), more in held]

    assert disagreements(layout, ranks()) == []
    assert [found.axis for found in disagreements(layout, ranks(changed=1))] == ["tensor"]


def test_copies_in_groups_of_zero() -> None:
    """The first two data ranks have one copy, the others another one."""
    layout = Layout(pipeline=1, data=4, tensor=1, zero_block=(2, 1, 1))

    def ranks(*digests: int) -> list[list[PieceDigest]]:
        return [[PieceDigest("weight", "w", FULL, 32, 16, value)] for value in digests]

    assert disagreements(layout, ranks(1, 2, 1, 2)) == []
    (found,) = disagreements(layout, ranks(1, 2, 1, 3))
    assert (found.axis, found.ranks) == ("data", (0, 2))


def test_a_missing_partition_is_no_copy() -> None:
    layout = Layout(pipeline=1, data=2, tensor=2)
    parts = [[PieceDigest("weight", "w", FULL, 32, 16, 1)] for _ in range(3)]
    assert disagreements(layout, [*parts, []])


def test_forward_weights_are_the_rounded_master_weights() -> None:
    layout = Layout(pipeline=1, data=1, tensor=1)
    parts = [PieceDigest("forward weight", "w", FULL, 32, 32, 1), PieceDigest("rounded master weight", "w", FULL, 32, 32, 2)]
    (found,) = disagreements(layout, [parts])
    assert str(found) == "w: the forward pass of rank 0 does not read the rounded master weight"
