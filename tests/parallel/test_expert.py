"""Expert parallelism: every layout trains like a single process; dispatch to the experts and combination of their outputs."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.launch.preflight import violations
from tests.world import causal, configured

MIXTRAL = ("model=mixtral-tiny", "model.kv_heads=2", "model.z_loss=0.05", "model.balance_loss=0.1")
DEEPSEEK = (
    *("model=deepseek-tiny", "model.q_lora_rank=12", "model.kv_lora_rank=12", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4"),
    *("model.v_head_dim=8", "model.expert_ffn_hidden=12", "model.balance_loss=0.1", "model.bias_update_speed=0.01"),
)
TINY = (
    "stage=pretrain",
    "precision=fp32",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "model.ffn_hidden=24",
    "model.vocab_size=67",
    "model.max_positions=16",
    "training.sequence_length=8",
    "training.global_batch_size=16",
    "training.micro_batch_size=2",
    "training.steps=3",
    "optimizer.warmup_steps=2",
    "optimizer.lr=0.01",
    "optimizer.eps=1e-6",
    "optimizer.gradient_clipping=0.5",
)


def batches(config):
    training = config.training
    shape = (training.steps, training.global_batch_size, training.sequence_length + 1)
    return torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def train_plainly(*overrides):
    """Losses, norms, statistics and final weights of a plain training loop."""
    from pipeline.layers.moe import moe_layers
    from pipeline.models import registry
    from pipeline.models.init import initialize
    from pipeline.training.lr_schedule import learning_rate
    from pipeline.training.optimizers import build_optimizer

    config = configured(*TINY, *overrides)
    model = registry.build(config.model)
    initialize(model, config.model, config.training.seed)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(learned, config.optimizer, 0.0)
    parts = config.training.global_batch_size // config.training.micro_batch_size
    numbers = []
    for moe in moe_layers(model):
        moe.loss_scale = 1 / parts
    for step, batch in enumerate(batches(config)):
        loss = torch.zeros(())
        for part in batch.chunk(parts):
            own = model(part[:, :-1], targets=part[:, 1:]) / parts
            own.backward()
            loss += own.detach()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optimizer, config.training)
        norm = torch.nn.utils.clip_grad_norm_(learned, config.optimizer.gradient_clipping)
        records = [moe.take_record() for moe in moe_layers(model)]
        numbers.append((float(loss), float(norm), *statistics(records, config.model.experts)))
        optimizer.step()
        optimizer.zero_grad()
        for moe, record in zip(moe_layers(model), records, strict=True):
            if moe.router.bias is not None:
                load = record[: config.model.experts]
                moe.router.bias += config.model.bias_update_speed * torch.sign(load.mean() - load)
    return numbers, {name: parameter.detach() for name, parameter in model.named_parameters()}


def statistics(records, experts):
    """router_entropy, router_load_max, router_dropped and aux_loss, from the layers' records."""
    means = [record[experts:-1] / record[-1] for record in records]
    worst = max(float(record[:experts].max() / record[:experts].mean()) for record in records)
    entropy, dropped, loss = (torch.stack(values) for values in zip(*means, strict=True))
    return float(entropy.mean()), worst, float(dropped.mean()), float(loss.sum())


def make(*overrides):
    """The configuration and this rank's trainer."""
    from pipeline.config.layout import Layout
    from pipeline.launch import preflight
    from pipeline.parallel import mesh as meshes
    from pipeline.training.trainer import Trainer

    config = configured(*TINY, *overrides)
    preflight.check(config, dist.get_world_size())
    return config, Trainer(config, meshes.build_mesh(Layout.of(config, dist.get_world_size()), torch.device("cpu")))


def run(config, trainer):
    """Losses, norms and statistics of training steps on this rank."""

    numbers = []
    for batch in batches(config):
        loss, result = trainer.train(
            *causal(batch.chunk(trainer.mesh.layout.batch_shards)[trainer.mesh.layout.batch_shard(trainer.mesh.coordinates)])
        )
        more = [float(result.more[key]) for key in ("router_entropy", "router_load_max", "router_dropped", "aux_loss")]
        numbers.append((float(loss), float(result.gradient_norm), *more))
    return numbers


def train_in_layout(*overrides):
    """The same in a layout; rank 0 returns the consolidated weights."""
    from pipeline.checkpoint.consolidate import insert_fragment

    config, trainer = make(*overrides)
    numbers = run(config, trainer)
    owned = [(f.piece, f.start, f.tensors["weight"].detach().clone()) for f in trainer.engine.fragments() if f.owned]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, owned)
    whole = {}
    for piece, start, values in (fragment for rank in gathered for fragment in rank):
        insert_fragment(whole.setdefault(piece.name, torch.full(piece.full_shape, torch.nan)), piece, start, values)
    return numbers, whole if dist.get_rank() == 0 else None


def compare(ranks, reference):
    numbers, weights = reference
    for found, _ in ranks:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(numbers), rtol=1e-5, atol=1e-6)
    whole = ranks[0][1]
    assert whole.keys() == weights.keys()
    for name, weight in weights.items():
        assert float((whole[name] - weight).norm() / weight.norm()) < 1e-5, name


@pytest.fixture(scope="module")
def reference():
    numbers, weights = train_plainly(*MIXTRAL)
    assert max(norm for _, norm, *_ in numbers) > 0.5, "clipping is active"
    assert all(aux > 0.2 for *_, aux in numbers), "two layers, each at least 0.1"
    return numbers, weights


@pytest.mark.parametrize(
    "layout",
    [
        "parallel.expert=2 parallel.zero_stage=0",
        "parallel.expert=2 parallel.zero_stage=2 training.activation_checkpointing=selective",
        "parallel.expert=2 parallel.zero_stage=3",
        "parallel.expert=4 parallel.zero_stage=1 training.activation_checkpointing=full",
        "parallel.expert=2 parallel.tensor=2 parallel.zero_stage=1",
        "parallel.expert=2 parallel.tensor=2 parallel.zero_stage=0 parallel.sequence_parallel=false",
        "parallel.expert=2 parallel.pipeline=2 parallel.zero_stage=3",
        "parallel.expert=2 parallel.pipeline=2 parallel.zero_stage=2 parallel.schedule=zbv model.layers=4",
    ],
)
def test_a_layout_trains_like_one_process(world, reference, layout):
    same = reference if "layers" not in layout else train_plainly(*MIXTRAL, "model.layers=4")
    compare(world.run(train_in_layout, *MIXTRAL, *layout.split()), same)


@pytest.fixture(scope="module")
def corrected():
    numbers, weights = train_plainly(*DEEPSEEK)
    biases = [weight for name, weight in weights.items() if name.endswith("router.bias")]
    assert len(biases) == 2, "of a block and of the prediction of a second token"
    assert all(0.01 - 1e-6 <= bias.abs().max() <= 0.03 + 1e-6 for bias in biases), "three steps of 0.01"
    return numbers, weights


@pytest.mark.parametrize(
    "layout",
    [
        "parallel.expert=2 parallel.tensor=2 parallel.zero_stage=1",
        "parallel.expert=2 parallel.pipeline=2 parallel.zero_stage=3",
        "parallel.expert=4 parallel.zero_stage=0 training.activation_checkpointing=full",
    ],
)
def test_biases_follow_the_load_of_all_ranks(world, corrected, layout):
    compare(world.run(train_in_layout, *DEEPSEEK, *layout.split()), corrected)


def _save_and_load(folder, first, second):
    """The biases of all routers, as saved in one layout and as loaded in another. They differ from the initial values."""
    from pipeline.checkpoint import save
    from pipeline.checkpoint.native import Index, TrainState
    from pipeline.checkpoint.reader import Checkpoint

    config, trainer = make(*first)
    run(config, trainer)
    path = save.save(Path(folder), Index(TrainState(3, 48, 3), dataclasses.asdict(config)), trainer.engine.fragments(), keep=1)
    saved = {name: Checkpoint(path).tensor(name) for name in Checkpoint(path).names() if name.endswith("router.bias")}
    config, trainer = make(*second)
    save.load(Checkpoint(path), trainer.engine.fragments())
    trainer.engine.loaded(3)
    return saved, {piece.name: value for value, piece in trainer.model.fixed.items()}


def test_a_checkpoint_keeps_the_biases(world, tmp_path):
    first = (*DEEPSEEK, "parallel.expert=2", "parallel.zero_stage=3", "precision=bf16")
    second = (*DEEPSEEK, "parallel.pipeline=2", "parallel.tensor=2", "parallel.zero_stage=1")
    found = {}
    for saved, loaded in world.run(_save_and_load, str(tmp_path), first, second):
        assert len(saved) == 2
        assert all(bias.abs().max() > 0.009 for bias in saved.values())
        assert all(torch.equal(saved[name], bias) for name, bias in loaded.items()), "the biases are saved exactly, also in bf16"
        found |= loaded
    assert found.keys() == saved.keys()


def _experts(group_size, counts_of_rank, dropped):
    """Values and gradients of ExpertParallelExperts on each rank's rows, and of unsharded experts on the same rows."""
    from pipeline.layers.moe import Experts
    from pipeline.parallel.expert import ExpertParallelExperts

    rank, group = dist.get_rank(), dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    whole = Experts(8, 6, 10).double()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    mine = Experts(8 // group_size, 6, 10).double()
    with torch.no_grad():
        for own, full in zip(mine.parameters(), whole.parameters(), strict=True):
            own.copy_(full.chunk(group_size)[rank])
    counts = torch.tensor(counts_of_rank[rank])
    x = torch.randn(int(counts.sum()) + dropped, 6, generator=generator.manual_seed(rank + 1), dtype=torch.float64)
    results = []
    for module in (ExpertParallelExperts(mine, group), whole):
        leaf = x.clone().requires_grad_()
        y = module(leaf, counts)[: counts.sum()]
        y.sin().sum().backward()
        results.append((y.detach(), leaf.grad))
    gradients = [parameter.grad for parameter in whole.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
    expected = [gradient.chunk(group_size)[rank] for gradient in gradients]
    return [*zip(*results, strict=True), *zip((p.grad for p in mine.parameters()), expected, strict=True)]


@pytest.mark.parametrize("dropped", [0, 3])
@pytest.mark.parametrize(
    "counts",
    [
        [[2, 0, 1, 3, 0, 0, 5, 1], [0, 0, 0, 0, 0, 0, 0, 9], [1] * 8, [3, 1, 4, 1, 5, 9, 2, 6]],
        [[0, 7, 0, 0, 0, 0, 0, 0]] * 4,
        [[0] * 8, [4] + [0] * 7, [0] * 8, [0] * 7 + [2]],
        [[0] * 8] * 4,
    ],
)
def test_expert_parallel_experts_equal_the_experts(world, counts, dropped):
    for rank in world.run(_experts, 4, counts, dropped):
        for ours, expected in rank:
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def _gradcheck():
    from pipeline.parallel.expert import all_to_all

    rank, group = dist.get_rank(), dist.group.WORLD
    sent, received = [rank, 1, 0, 2], [[0, 1, 2, 3], [1] * 4, [0] * 4, [2] * 4][rank]
    rows = torch.randn(sum(sent), 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64, requires_grad=True)
    there_and_back = all_to_all(all_to_all(rows, sent, received, group) * (rank + 1), received, sent, group)
    there_and_back.sum().backward()
    factors = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64).repeat_interleave(torch.tensor(sent)).unsqueeze(1)
    return torch.equal(there_and_back, rows * factors), torch.equal(rows.grad, factors.expand_as(rows))


def test_gradients_of_all_to_all_return_to_their_rows(world):
    assert world.run(_gradcheck) == [(True, True)] * 4


def _balance_of_parts():
    """Balance loss and mean gradient with a quarter of every sequence on each rank, and with full sequences."""
    from functools import partial

    from pipeline.layers.router import AuxLoss, Router
    from pipeline.parallel import collectives

    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 12, 6), (5, 6)))
    real = torch.arange(12) < torch.tensor([[12], [7], [2]])  # the last ranks have only padding of some sequences
    balance, found = AuxLoss(0.5, 0.3, 0.2), []
    for rows, mask, total in (
        (x.chunk(4, dim=1)[dist.get_rank()], real.chunk(4, dim=1)[dist.get_rank()], partial(collectives.all_reduce_with_grad, group=group)),
        (x, real, None),
    ):
        router = Router(6, 5, 2).double()
        router.weight.data.copy_(weight)
        loss = balance.loss(router(rows.flatten(0, 1)), mask, total)
        loss.backward()
        found.append((loss.detach(), router.weight.grad))
    dist.all_reduce(found[0][1])
    found[0][1].div_(4)
    return found


def test_balance_losses_of_sharded_and_full_sequences_are_equal(world):
    for parts, whole in world.run(_balance_of_parts):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_stacked_experts_are_initialized_matrix_by_matrix():
    from pipeline.layers.init import initial_tensor
    from pipeline.parallel.parallelize import init_piece
    from pipeline.parallel.pieces import slice_weight

    full = initial_tensor("blocks.0.mlp.experts.up", (4, 6, 8), 0.02, 3)
    assert math.isclose(full.std(), 0.02, rel_tol=0.2)
    assert torch.equal(full[2], initial_tensor("blocks.0.mlp.experts.up.2", (6, 8), 0.02, 3))
    for expert, tensor in ((0, 0), (1, 2)):
        piece = slice_weight("blocks.0.mlp.experts.up", (4, 6, 8), "expert_column", {"expert": (2, expert), "tensor": (3, tensor)})
        assert torch.equal(init_piece(piece, 0.02, 3), piece.narrow(full))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model=llama-tiny", "parallel.expert=2"), "requires an MoE model; model.family=llama has no experts"),
        (("model=mixtral-tiny", "parallel.expert=3"), "must divide model.experts=4"),
        (("model=mixtral-tiny", "model.top_k=5"), "is more than model.experts=4"),
        (("model=deepseek-tiny", "model.expert_ffn_hidden=99", "parallel.tensor=2"), "must divide model.expert_ffn_hidden=99"),
    ],
)
def test_mistakes_are_refused(overrides, words):
    found = violations(configured("stage=pretrain", "training.global_batch_size=12", "training.micro_batch_size=1", *overrides), 6)
    assert [violation.rule for violation in found] == [words]


def test_flops_count_only_the_active_experts():
    from pipeline.planner.flops import flops_per_token

    config = configured("stage=pretrain", "model=mixtral-8x7b").model
    head, embedding = 32000 * 4096, 32000 * 4096
    norms = (2 * 32 + 1) * 4096
    active = 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336  # six of eight experts are inactive
    assert active == pytest.approx(12.88e9, rel=1e-3), "as published by Mistral AI"
    assert flops_per_token(config, 0) == 6 * (active - embedding - norms)
    assert head == embedding


def test_statistics_are_in_the_metrics(tmp_path):
    import json

    from pipeline.checkpoint.native import TrainState
    from pipeline.training.engine import StepResult
    from pipeline.training.metrics import Metrics

    config = configured(*TINY, *MIXTRAL, f"run_dir={tmp_path}", "tracking=disabled")
    more = {"aux_loss": torch.tensor(0.5), "router_load_max": torch.tensor(1.25)}
    result = StepResult(torch.tensor(2.0), torch.tensor(0.0), torch.tensor(0.1), more)
    with Metrics(config, 0, TrainState(), 8, 1.0, None) as metrics:
        metrics.add(TrainState(1, 16, 1), torch.tensor(3.0), result, 16, 1.0, {"data_seconds": 0.25})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert [line[key] for key in ("loss", "grad_norm", "aux_loss", "router_load_max", "data_seconds")] == [3.0, 2.0, 0.5, 1.25, 0.25]
