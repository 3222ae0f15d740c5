"""training.recompute_every: ranks that compute other bits end a run, in every layout; others go on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.layers.batch import Batch
from pipeline.training.callback import Step
from pipeline.training.recomputation_checks import RecomputationChecks
from tests.world import causal, queued, share, tiny, trainer

HOSTS = [f"n{rank}" for rank in range(4)]
#: Layouts of four ranks -> ranks that are named if rank 1 computes other bits the second time, and if it always computes other bits.
LAYOUTS = {
    "data": (("parallel.zero_stage=2",), "ranks 1 (on n1)", "data rank 1 differs from both of its neighbors"),
    "tensor": (("parallel.tensor=2", "precision=bf16"), "ranks 0 (on n0), 1 (on n1)", "one of data ranks 0, 1 is wrong"),
    "pipeline": (("parallel.pipeline=2", "parallel.zero_stage=0"), "ranks 1 (on n1)", "one of data ranks 0, 1 is wrong"),
    "context": (("parallel.context=2", "parallel.zero_stage=3"), "ranks 0 (on n0), 1 (on n1)", "one of data ranks 0, 1 is wrong"),
    "experts": (("model=mixtral-tiny", "parallel.expert=2"), "ranks 1 (on n1)", "one of data ranks 0, 1 is wrong"),
}


def checked(*settings: str) -> list[str]:
    """What the check says of ranks without a fault, of one that is wrong now and then, and of one that is always wrong."""
    config, trained = trainer(*tiny("model=llama-tiny", *settings, "model.layers=2", "training.recompute_every=2"))
    checks = RecomputationChecks(config, trained, HOSTS)
    tokens = torch.randint(67, (32, 9), generator=torch.Generator().manual_seed(1))
    inputs, batch = causal(*share(trained, tokens))
    trained.train(inputs, batch)
    passes, wrong, evaluate, said = 0, set[int](), trained.evaluate, []

    def counting(tokens: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        nonlocal passes
        passes += 1
        return evaluate(tokens, batch)

    def spoil(_module: object, _inputs: object, output: Tensor) -> Tensor:
        return output * (1 + 2**-7) if trained.mesh.rank == 1 and passes in wrong else output

    trained.evaluate = counting  # type: ignore[method-assign]
    (block, *_) = next(trained.model.stage_modules()).blocks.values()
    block.mlp.register_forward_hook(spoil)
    for spoiled_passes in (), (2,), (1, 2, 3):
        passes = 0
        wrong.update(spoiled_passes)
        assert raised(checks, queued(1, tokens=inputs, batch=batch)) == "", "not due"
        said.append(raised(checks, queued(2, tokens=inputs, batch=batch)))
    return said


def raised(checks: RecomputationChecks, step: Step) -> str:
    try:
        checks.after_step(step)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in ("tensor", "pipeline") else pytest.mark.long) for name in LAYOUTS]
)
def test_a_rank_that_computes_other_bits_is_named(worlds, layout: str) -> None:
    settings, unstable, wrong = LAYOUTS[layout]
    results = worlds(4).run(checked, *settings)
    for said in results:
        assert said == results[0], "every rank ends with the same message"
    right, once, always = results[0]
    assert right == ""
    assert f"{unstable} computed other bits when they computed a forward pass again" in once
    assert wrong in always
    assert "training.recompute_every=2" in always
    assert "after step 2; no checkpoint of step 2 was written" in always
