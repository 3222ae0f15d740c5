"""The comparison of the modules' outputs: a right layout has no difference, a fault in a forward pass is named with module and rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.certification.conditioning import in_precision
from pipeline.certification.module_outputs import local_part
from pipeline.certification.ranks_work import OUTPUTS, compare_outputs
from pipeline.certification.shrink import shrink
from pipeline.config.layout import Layout
from tests.certification import faults
from tests.certification.faults import with_fault
from tests.world import configured

BATCH = ("stage=certify", "training.global_batch_size=16", "training.micro_batch_size=2", "training.sequence_length=64")


def first_module(worlds, folder: Path, *words: str, ranks: int = 4, fault: Callable[[], Any] | None = None) -> str:
    small = shrink(configured(*BATCH, *words), ranks, 3)
    run = (compare_outputs,) if fault is None else (with_fault, fault, compare_outputs)
    worlds(small.world_size).run(*run, in_precision(small.config, "fp32"), str(folder), 1e-4)
    return Path(folder, OUTPUTS).read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("model=llama-tiny", "parallel.tensor=2", "parallel.context=2"),
        pytest.param(
            ("model=qwen3-tiny", "parallel.tensor=2", "parallel.context=2", "parallel.context_kind=ulysses"), marks=pytest.mark.long
        ),
        ("model=llama-tiny", "parallel.pipeline=2", "parallel.schedule=zbv", "training.activation_checkpointing=full"),
        ("model=mixtral-tiny", "parallel.expert=2", "parallel.tensor=2"),
        pytest.param(("model=deepseek-tiny", "parallel.tensor=2", "parallel.pipeline=2"), marks=pytest.mark.long),
        pytest.param(("model=t5-tiny", "parallel.tensor=2", "parallel.zero_stage=3"), marks=pytest.mark.long),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_right_layout(worlds, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert first_module(worlds, tmp_path, *words) == ""


def test_a_fault_in_the_forward_pass(worlds, tmp_path: Path) -> None:
    words = ("model=gpt-tiny", "parallel.tensor=2", "parallel.pipeline=2")
    found = first_module(worlds, tmp_path, *words, fault=faults.bias_added_by_every_rank)
    assert found.startswith("blocks.0.attention.output, pipeline rank 0, tensor rank "), found


def test_parts_of_an_output() -> None:
    layout = Layout(pipeline=1, data=1, tensor=2, context=2)
    full = torch.arange(2 * 8 * 4).view(2, 8, 4)
    last = layout.coordinates(3)
    assert last.tensor == last.context == 1
    early_and_late = local_part(full, (2, 4, 4), layout, last, "ring")
    assert early_and_late is not None
    assert early_and_late.equal(full[:, 2:6])
    sliced = local_part(full, (2, 2, 4), layout, last, "ulysses")
    assert sliced is not None
    assert sliced.equal(full[:, 6:])
    columns = local_part(full, (2, 4, 2), layout, last, "ulysses")
    assert columns is not None
    assert columns.equal(full[:, 4:, 2:])
    assert local_part(full, (2, 3, 4), layout, last, "ring") is None
    assert local_part(full[0], (4, 4), layout, last, "ring") is None
