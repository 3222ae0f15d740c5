"""The norm of gradients on CPUs is that of fp64 sums, whatever the layout cuts."""

from __future__ import annotations

import pytest
import torch

from pipeline.training import gradient_clipping

CPU = torch.device("cpu")


@pytest.mark.parametrize("elements", [1, gradient_clipping.CPU_ROW, gradient_clipping.CPU_ROW + 1, 3_000_000])
def test_the_sum_of_squares_is_that_of_fp64(elements: int) -> None:
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    expected = gradient.double().square().sum()
    assert gradient_clipping.square_sum([gradient], CPU).item() == pytest.approx(expected.item(), rel=2e-7)
    pieces = list(gradient.split(elements // 3 + 1))
    assert gradient_clipping.square_sum(pieces, CPU).item() == pytest.approx(expected.item(), rel=2e-7)


def test_no_gradients_have_no_squares_and_shapes_do_not_matter() -> None:
    assert gradient_clipping.square_sum([], CPU).item() == 0.0
    matrix = torch.randn(100, 100, generator=torch.Generator().manual_seed(1)).T
    assert gradient_clipping.square_sum([matrix], CPU).item() == pytest.approx(matrix.double().square().sum().item(), rel=2e-7)
