"""Copies that differ between ranks end a run, in every layout; weights that stand still are named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from pipeline.common import events
from pipeline.common.errors import UserError
from pipeline.training.replica_checks import ReplicaChecks
from pipeline.training.trainer import Trainer
from pipeline.training.weight_update import StepResult
from tests.world import causal, queued, share, tiny, trainer

NORM, MATRIX, TABLE = "blocks.0.mlp_norm.weight", "blocks.1.attention.output.weight", "embed.tokens.weight"
#: Layouts of four ranks -> (weight, rank that is spoiled, axis along which it has copies).
LAYOUTS = {
    "data": (("parallel.zero_stage=0",), (MATRIX, 2, "data")),
    "zero 1": (("parallel.tensor=2", "parallel.zero_stage=1", "precision=bf16"), (NORM, 1, "tensor")),
    "zero 3": (("parallel.tensor=2", "parallel.zero_stage=3"), (NORM, 1, "tensor")),
    "zero 1 in groups": (("parallel.zero_stage=1", "parallel.zero_group=2"), (MATRIX, 2, "data")),
    "zero 3 in groups": (("parallel.zero_stage=3", "parallel.zero_group=2", "precision=bf16"), (MATRIX, 2, "data")),
    "tied": (("model=gpt-tiny", "parallel.pipeline=4", "parallel.zero_stage=0", "model.layers=4"), (TABLE, 3, "pipeline")),
    "experts": (("model=mixtral-tiny", "parallel.expert=2", "parallel.tensor=2", "parallel.zero_stage=1"), (NORM, 1, "tensor")),
    "offloaded": (("parallel.tensor=2", "parallel.zero_stage=2", "precision=bf16", "parallel.offload=optimizer"), (NORM, 1, "tensor")),
    "context": (("parallel.context=2", "parallel.zero_stage=0", "training.ema=0.9"), (NORM, 1, "context")),
}
#: Each axis and each way to hold copies.
COVER = {"zero 1", "tied", "context"}
HOSTS = [f"n{rank}" for rank in range(4)]


def raised(checks: ReplicaChecks, step: int, result: StepResult, *, saving: bool = False) -> str:
    """What a check says; empty if it finds nothing."""
    try:
        made = queued(step, result=result)
        checks.after_step(made)
        if saving:
            checks.before_save(made)
    except UserError as error:
        return str(error)
    return ""


def spoil(trained: Trainer, rank: int, name: str, kind: str, amount: float) -> None:
    """Change an element of a rank's copy of a weight or of its optimizer state; the forward pass reads the changed weight. Collective."""
    for fragment in trained.engine.fragments():
        if fragment.piece.name == name and trained.mesh.rank == rank:
            fragment.tensors[kind].view(-1)[0] += amount
    trained.engine.loaded(trained.engine.updates())


def spoiled(settings: tuple[str, ...], name: str, rank: int, run_dir: str) -> list[str]:
    """Train, and return what the checks say of the intact state and of three spoiled ones."""
    config, trained = trainer(
        *tiny("model=llama-tiny", "model.layers=2", "training.global_batch_size=8", *settings),
        *("training.check_replicas_every=2", f"run_dir={run_dir}"),
    )
    checks, tokens = ReplicaChecks(config, trained, HOSTS), torch.randint(67, (8, 9), generator=torch.Generator().manual_seed(1))
    said = []
    for step in (1, 2, 3, 4):
        inputs, batch = causal(*share(trained, tokens))
        _, result = trained.train(inputs, batch, step=step - 1)
        said.append(raised(checks, step, result))
    for kind in ("weight", "exp_avg_sq"):
        kept = [fragment.tensors[kind].clone() for fragment in trained.engine.fragments() if kind in fragment.tensors]
        spoil(trained, rank, name, kind, 0.25)
        scheduled = kind == "exp_avg_sq" and config.parallel.offload == "optimizer"  # state on the host is not checked before saves
        said.append(raised(checks, 6 if scheduled else 5, result, saving=True))
        for fragment, values in zip((one for one in trained.engine.fragments() if kind in one.tensors), kept, strict=True):
            fragment.tensors[kind].copy_(values)
    trained.engine.loaded(trained.engine.updates())
    said.append(raised(checks, 5, result))
    said.append(raised(checks, 6, dataclasses.replace(result, lr=result.lr * (0.5 if trained.mesh.rank == rank else 1))))
    return said


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name in COVER else pytest.mark.long) for name in LAYOUTS])
def test_copies_that_differ_are_named(worlds, tmp_path: Path, layout: str) -> None:
    settings, (name, rank, axis) = LAYOUTS[layout]
    by_rank = worlds(4).run(spoiled, settings, name, rank, str(tmp_path))
    assert all(said == by_rank[0] for said in by_rank), "all ranks end with the same message"
    *intact, weight, state, not_due, number = by_rank[0]
    assert intact == [""] * 4
    assert not_due == ""
    for said, kind in ((weight, "weight"), (state, "exp_avg_sq"), (number, "learning rate")):
        assert "training.check_replicas_every=2" in said
        assert f"n{rank}" in said
        assert kind in said
        assert "all were equal after step 4" in said
    for said, step in ((weight, 5), (state, 6 if layout == "offloaded" else 5)):
        assert name in said
        assert f"along the {axis} axis" in said
        assert f"copies differ after step {step}" in said


def still(settings: tuple[str, ...], run_dir: str) -> None:
    """Train with a weight that is left out of the loss and one whose updates are lost."""
    config, trained = trainer(
        *tiny(
            "model=llama-tiny",
            "training.global_batch_size=8",
            *settings,
            "training.check_replicas_every=6",
            "training.steps=20",
            f"run_dir={run_dir}",
        )
    )
    checks, tokens = ReplicaChecks(config, trained, HOSTS), torch.randint(67, (8, 9), generator=torch.Generator().manual_seed(1))
    kept: dict[str, torch.Tensor] = {}
    for parameter, piece in trained.model.pieces.items():
        if piece.name == NORM:
            parameter.register_hook(torch.zeros_like)
    for step in range(1, 19):
        inputs, batch = causal(*share(trained, tokens))
        _, result = trained.train(inputs, batch, step=step - 1)
        for fragment in trained.engine.fragments():
            if fragment.piece.name == MATRIX:
                before = kept.setdefault(f"{fragment.piece.box}{fragment.start}", fragment.tensors["weight"].clone())
                fragment.tensors["weight"].copy_(before)
        trained.engine.loaded(trained.engine.updates())
        checks.after_step(queued(step, result=result))


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [("parallel.tensor=2", "parallel.zero_stage=2"), pytest.param(("parallel.pipeline=2", "model.layers=4"), marks=pytest.mark.long)],
    ids=str,
)
def test_weights_that_stand_still_are_named(worlds, tmp_path: Path, settings: tuple[str, ...]) -> None:
    worlds(4).run(still, settings, str(tmp_path))
    found = [(event["step"], event["what"], event["weights"]) for event in events.read(tmp_path) if event["event"] == "untrained"]
    unchanged, silent = "did not change since step", "never had a gradient"
    assert found == [
        (12, f"{unchanged} 6", [NORM, MATRIX]),
        (12, silent, [NORM]),
        (18, f"{unchanged} 12", [NORM, MATRIX]),
        (18, silent, [NORM]),
    ]
