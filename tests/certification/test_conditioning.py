"""The seed of a small job: none with which rounding errors of a layout would move an input over a jump of a derivative."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.certification import conditioning, reference
from pipeline.certification.conditioning import TIED, in_precision, well_conditioned
from pipeline.certification.shrink import shrink
from pipeline.common.progress import Progress
from pipeline.layers.mlp import XIELU, ClampedSwiGLU
from tests.world import configured


def xielu(values: torch.Tensor) -> torch.Tensor:
    activation = XIELU()
    nn.init.zeros_(activation.alpha_p)
    nn.init.zeros_(activation.alpha_n)
    return activation(values)


def clamped(values: torch.Tensor) -> torch.Tensor:
    return ClampedSwiGLU(limit=2.0, alpha=1.0)(values, torch.ones(1))


@pytest.mark.parametrize("activation, jump", [(F.relu, 0.0), (xielu, 0.0), (xielu, XIELU.EPS), (clamped, 2.0)])
def test_an_input_at_a_jump(activation, jump: float) -> None:
    for shift, tied in ((3 * TIED, False), (TIED / 2, True), (-TIED / 2, True)):
        values = torch.cat([torch.tensor([1.0, -1.0]).repeat(50), torch.tensor([jump + shift], dtype=torch.float64)])
        with conditioning._Jumps() as jumps:
            activation(values)
        assert jumps.tied == tied
    with conditioning._Jumps() as jumps:
        F.relu(torch.tensor([0.0, 1.0]))  # padding: zero in every layout
    assert not jumps.tied


@pytest.mark.long
def test_a_seed_without_such_an_input_is_chosen(monkeypatch) -> None:
    """Of twelve seeds of this job some are tied; the chosen one is the first that is not."""
    words = ("stage=certify", "model=opt-tiny", "training.global_batch_size=16", "training.micro_batch_size=2")
    planned = configured(*words)
    monkeypatch.setattr(conditioning, "TIED", 4e-5)  # which tie most seeds
    with Progress(100, "certify", "training steps", every=10) as progress:
        chosen = well_conditioned(planned, shrink(planned, 2, 2), progress).small.config
    tied = []
    for seed in itertools.count(planned.training.seed):
        config = conditioning.knobs.changed(chosen, {"training.seed": seed})
        with conditioning._Jumps() as jumps:
            reference.train_plain(in_precision(config, "fp32"))
        tied.append(jumps.tied)
        if not jumps.tied:
            break
    assert len(tied) > 1
    assert chosen.training.seed == planned.training.seed + len(tied) - 1
