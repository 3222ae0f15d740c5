"""Muon: the rule that says which matrices it updates, the update, and that the update is the same in every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config.layout import Layout
from pipeline.config.rules import check
from pipeline.models import registry
from pipeline.parallel.parallelize import partition_model
from pipeline.planner.planned_buckets import planned_buckets
from pipeline.planner.rank_report import init_fake
from pipeline.planner.state_memory import model_state, state_format_of
from pipeline.planner.trace import trace
from pipeline.training import muon
from pipeline.training.buckets import build_buckets
from pipeline.training.matrix_rule import MatrixRule, lines
from pipeline.training.muon import newton_schulz
from tests.helpers import one_in
from tests.training.layouts import MODELS, text
from tests.training.test_engine import _load_in_another
from tests.world import configured, tiny, trainer
from tools.audit.family_cases import FAMILIES

MUON = "optimizer=muon"
SMALL = (MUON, "model=llama-tiny", "model.layers=2", "model.kv_heads=2", "model.ffn_hidden=48", "training.micro_batch_size=4")
PER_HEAD = "optimizer.muon_per_head=true"
EXPERTS = (MUON, *(word for word in MODELS["mixtral"].overrides if "ema" not in word), "training.steps=8")


#: Within blocks: routers, biases of experts, and of Qwen3-Next the filters of convolutions and what gives one number a head.
ADAMW = ("router.weight", "_bias", "_conv", "attention.beta.weight", "attention.decay.weight", "shared_gate.weight")


def _rule(*overrides: str) -> tuple[Any, MatrixRule]:
    config = configured(*tiny(MUON, *overrides))
    return config, MatrixRule.of(config.optimizer, config.model)


def _pieces(config: Any, world_size: int, rank: int) -> list[Any]:
    return list(partition_model(config, Layout.of(config, world_size), rank).pieces.values())


# The rule


@pytest.mark.parametrize("family", one_in(4, sorted(registry.FAMILIES)))
def test_every_weight_of_every_family_has_a_rule(family):
    """The matrices of Muon are those of torch.nn.Linear and of experts in blocks; no other weight of two dimensions is one."""
    more = ("model.mtp_depth=1",) if family == "deepseek_v3" else ()
    config, rule = _rule(f"model={FAMILIES[family].tiny}", *more)
    found = {piece.name: rule.matrices(piece.name, piece.full_shape) for piece in _pieces(config, 1, 0)}
    shapes = {piece.name: piece.full_shape for piece in _pieces(config, 1, 0)}
    for name, matrices in found.items():
        outside = not name.startswith(("blocks.", "head.depths."))
        expected = len(shapes[name]) >= 2 and not outside and not name.endswith(ADAMW)
        assert (matrices is not None) == expected, name
        if matrices is not None:
            assert matrices.count * matrices.rows * matrices.columns == math.prod(shapes[name])
            assert matrices.count == (shapes[name][0] if len(shapes[name]) == 3 else 1), name
    assert any(found.values())


def test_a_matrix_without_a_rule_is_an_error():
    with pytest.raises(KeyError, match=r"blocks\.0\.attention\.qkv\.weight is in no table"):
        MatrixRule(muon=True).matrices("blocks.0.attention.qkv.weight", (96, 32))


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("llama-7b", ((16384, "tensor=8 pipeline=4"), (16384, "tensor=4 pipeline=8 zero_stage=3"), (64, "tensor=2"))),
        ("mixtral-8x7b", ((16384, "tensor=4 expert=8 pipeline=4"), (8, "expert=8 zero_stage=3"))),
    ],
)
@pytest.mark.parametrize("per_head", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_rule_is_the_same_in_every_layout(model, layouts, per_head):
    """It reads full shapes. On each rank, what it holds of a matrix is the whole matrix, or a slice whose home has all slices."""
    heads = (f"optimizer.muon_per_head={str(per_head).lower()}",)
    shared = ("stage=pretrain", MUON, f"model={model}", *heads, "training.global_batch_size=16384", "training.micro_batch_size=1")
    single = configured(*shared)
    rule = MatrixRule.of(single.optimizer, single.model)
    whole = {piece.name: rule.matrices(piece.name, piece.full_shape) for piece in _pieces(single, 1, 0)}
    for world_size, words in layouts:
        config = configured(*shared, *(f"parallel.{word}" for word in words.split()))
        layout, rule = Layout.of(config, world_size), MatrixRule.of(config.optimizer, config.model)
        found = {}
        for stage in range(layout.pipeline):
            rank = layout.rank(
                layout.coordinates(world_size - 1).__class__(stage, layout.data - 1, layout.expert - 1, 0, layout.tensor - 1)
            )
            found |= {piece.name: rule.matrices(piece.name, piece.full_shape) for piece in _pieces(config, world_size, rank)}
        assert found == whole
    assert whole["blocks.0.attention.query.weight"].count == (32 if per_head else 1)


def test_the_dry_run_prints_the_rule():
    config, rule = _rule(*EXPERTS[1:], "optimizer.muon_per_head=true")
    printed = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines(rule, _pieces(config, 1, 0))}
    assert printed["blocks.*.attention.query.weight"] == "2 of muon 4 x (8, 32)"
    assert printed["blocks.*.attention.key.weight"] == "2 of muon 2 x (8, 32)"
    assert printed["blocks.*.attention.output.weight"] == "2 of muon (32, 32)"
    assert printed["blocks.*.mlp.experts.up"].startswith(f"2 of muon {config.model.experts} x (24, 32)")
    assert printed["blocks.*.mlp.router.weight"] == printed["head.weight"].replace("1 of", "2 of") == "2 of adamw"


# The update


def test_newton_schulz_is_that_of_pytorch():
    """In bf16, in which torch.optim.Muon computes: equal up to the order of sums, which exchanging rows changes."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    generator = torch.Generator().manual_seed(0)
    for shape in ((24, 40), (40, 24), (32, 32)):
        matrices = torch.randn(3, *shape, generator=generator)
        ours = newton_schulz(matrices.bfloat16(), 5).float()
        order = torch.randperm(shape[0], generator=generator)
        for matrix, found in zip(matrices, ours, strict=True):
            theirs = _zeropower_via_newtonschulz(matrix, muon.COEFFICIENTS, 5, muon.EPS).float()
            exchanged = torch.empty_like(theirs)
            exchanged[order] = _zeropower_via_newtonschulz(matrix[order], muon.COEFFICIENTS, 5, muon.EPS).float()
            assert (found - theirs).norm() <= 2 * (exchanged - theirs).norm() + 1e-2 * theirs.norm()
            singular = torch.linalg.svdvals(newton_schulz(matrix[None].double(), 5)[0])
            assert 0.3 < singular.min() < singular.max() < 1.3


def test_each_matrix_of_a_batch_is_orthogonalized_by_itself():
    matrices = torch.randn(5, 6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone = torch.stack([newton_schulz(matrix[None], 5)[0] for matrix in matrices])
    torch.testing.assert_close(newton_schulz(matrices, 5), alone)
    torch.testing.assert_close(torch.stack(muon.orthogonalized(list(matrices), 5)), alone)


def _against_torch(adjust: str) -> float:
    """Train three steps of one process, in bf16, by the engine's optimizer and by torch.optim.Muon with AdamW; the largest difference."""
    words = (f"optimizer.muon_adjust_lr={adjust}", "precision=bf16", "parallel.zero_stage=0", "optimizer.gradient_clipping=0")
    config, mine = trainer(*tiny(*SMALL), *words)
    pieces, optimizer = mine.model.pieces, config.optimizer
    weight_of = {piece.name: p for p, piece in pieces.items()}
    masters = {weight_of[f.piece.name]: f.tensors["weight"].view(f.piece.shape) for f in mine.engine.fragments()}
    twins = {p: nn.Parameter(master.detach().clone()) for p, master in masters.items()}
    hidden = [twins[p] for p, piece in pieces.items() if piece.name.startswith("blocks.") and p.dim() == 2]
    rest = [twin for twin in twins.values() if not any(twin is other for other in hidden)]
    theirs = torch.optim.Muon(hidden, lr=1.0, weight_decay=optimizer.weight_decay, adjust_lr_fn=adjust)
    groups = [{"params": [p for p in rest if (p.dim() > 1) is decays], "weight_decay": 0.1 * decays} for decays in (True, False)]
    adamw = torch.optim.AdamW(groups, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)
    step = mine.engine.update.step

    def both(norm: Tensor, gradients: Any) -> Any:
        for bucket, gradient in zip((flat.bucket for flat in mine.engine.weights), gradients, strict=True):
            for parameter in bucket.pieces:
                twins[parameter].grad = bucket.view(gradient, parameter).clone()
        result = step(norm, gradients)
        for group in (*theirs.param_groups, *adamw.param_groups):
            group["lr"] = float(result.lr)
        theirs.step()
        adamw.step()
        return result

    mine.engine.update.step = both
    for number in range(3):
        tokens, batch = text(config, number)
        mine.train(tokens, batch, step=number)
    moved = max(float((twins[p] - p.float()).norm() / twins[p].norm()) for p in pieces)  # p is rounded to bf16
    assert moved < 0.01
    return max(float((twins[p] - masters[p]).norm() / (3 * optimizer.lr * masters[p].numel() ** 0.5)) for p in pieces)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_one_process_equals_torch_optim_muon_and_adamw(worlds, adjust):
    """Relative to updates of full size; in bf16 both have the same roundings, up to the order of sums."""
    assert worlds(1).run(_against_torch, adjust)[0] < 5e-3


# Checkpoints, and what is refused; resumed runs and skipped steps: test_optimizers.py


def test_a_state_is_loaded_in_another_layout(worlds, tmp_path):
    """Momentum of matrices, both moments of the other weights; the second moment of matrices does not exist."""
    for equal, tensors, _ in worlds(2).run(
        _load_in_another, tmp_path, (MUON, "parallel.zero_stage=3"), (MUON, "parallel.zero_stage=1", "parallel.tensor=2")
    ):
        assert equal
        assert tensors > 100


def test_the_planned_state_has_one_moment_of_a_matrix():
    """12 bytes of a weight in bf16 with AdamW, 8 with Muon; the buckets of the planner are those of the engine."""
    config = configured(*tiny(*EXPERTS, "precision=bf16", "parallel.zero_stage=1"), "parallel.expert=2")
    local, model = init_fake(config, 4)
    buckets = build_buckets(model, local, sequence_parallel=True, rule=MatrixRule.of(config.optimizer, config.model))
    planned = planned_buckets(trace(config), local.layout, [0])
    described = [sorted((b.elements, b.ranks, b.muon, b.decays) for b in each) for each in (buckets, planned)]
    assert described[0] == described[1]
    state = model_state(planned, state_format_of(config, local.layout))
    assert state.optimizer == sum(bucket.elements / bucket.ranks * (8 if bucket.muon else 12) for bucket in buckets)
    assert any(bucket.muon for bucket in buckets)
    assert not all(bucket.muon for bucket in buckets if bucket.decays), "the routers of blocks, embedding and head"


def test_biases_of_experts_are_vectors():
    """They have two dims: a vector for each expert. They do not decay, AdamW updates them, and they are no matrix products."""
    config = configured("model=gpt-oss-tiny", "parallel.expert=2", "parallel.tensor=2", MUON)
    local, model = init_fake(config, 4)
    rule = MatrixRule.of(config.optimizer, config.model)
    homes = {
        piece.name: bucket for bucket in build_buckets(model, local, sequence_parallel=True, rule=rule) for piece in bucket.pieces.values()
    }
    vectors = {name for name, bucket in homes.items() if not bucket.decays}
    assert vectors == {name for name in homes if name.endswith(("bias", "norm.weight", "sinks"))}
    matrices = {name for name, bucket in homes.items() if bucket.muon}
    assert not any(name.endswith(("_bias", "sinks", "router.weight")) for name in matrices)
    assert {f"blocks.0.mlp.experts.{name}" for name in ("gate", "up", "down")} < matrices
    # 4 blocks: 4 projections, a router and 2 of 8 experts of 3 matrices; the head; and the scores, of which every second layer has 128.
    products = 4 * (2 * 192 * 256 + 2 * 192 * 128 + 8 * 192 + 2 * 3 * 192 * 96) + 8192 * 192
    scores = 2 * (1024 + 128) * 8 * 2 * 32
    assert registry.family_of(config.model).costs_per_token(config.model, 1024).total == 6 * (products + scores)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("parallel.offload=optimizer",), "parallel.offload=optimizer: requires an optimizer that the CPU steps"),
        (("lora.rank=4",), "lora.rank=4: is not supported with optimizer.name=muon"),
        (("model=deepseek-tiny", PER_HEAD), "optimizer.muon_per_head=True: is not supported for model.family=deepseek_v3"),
        (("optimizer=adamw", "optimizer.muon_steps=3"), "optimizer.muon_steps=3: has no effect with optimizer.name=adamw"),
        (("optimizer.muon_steps=3", PER_HEAD, "parallel.zero_group=2"), None),
    ],
)
def test_what_is_refused(settings, message):
    words = {word.partition("=")[0]: word for word in ("stage=pretrain", "model=llama-tiny", MUON, *settings)}
    config = configured(*words.values())
    found = [str(violation) for violation in check.violations(config, 4)]
    assert any(message in text for text in found) if message else not found, found
