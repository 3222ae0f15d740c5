"""Expert parallelism: dispatch to the experts and combination of their outputs. Training with it: tests/training/test_layouts.py."""

import functools
import math
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipeline.config.rules.check import violations
from tests.training.layouts import text
from tests.world import configured, queued, saved, tiny, train_steps, trainer

MIXTRAL = ("model=mixtral-tiny", "model.kv_heads=2", "training.z_loss=0.05", "training.balance_loss=0.1")
DEEPSEEK = (
    *("model=deepseek-tiny", "model.q_lora_rank=12", "model.kv_lora_rank=12", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4"),
    *("model.v_head_dim=8", "model.expert_ffn_hidden=12", "training.balance_loss=0.1", "training.bias_update_speed=0.01"),
)
TINY = tiny("model.layers=2", "model.ffn_hidden=24", "training.steps=3", "optimizer.eps=1e-6", "optimizer.gradient_clipping=0.5")


def make(*overrides):
    """The configuration and this rank's trainer."""
    return trainer(*TINY, *overrides)


@contextmanager
def host_reads():
    """Yields a list, to which each read of the values of integers by the host adds a shape."""
    reads, tolist = [], torch.Tensor.tolist

    def counted(tensor):
        if tensor.dtype in (torch.int32, torch.int64):
            reads.append(tensor.shape)
        return tolist(tensor)

    with mock.patch.object(torch.Tensor, "tolist", counted):
        yield reads


def reads_and_losses(*overrides):
    """How often numbers of rows are read in three steps, and the losses."""
    config, mine = trainer(*overrides)
    with host_reads() as reads:
        losses = [loss for loss, _ in train_steps(mine, config, text, 3)]
    return len(reads), losses


def _save_and_load(folder, first, second):
    """The biases of all routers, as saved in one layout and as loaded in another. They differ from the initial values."""
    from pipeline.checkpoint import load_any_layout
    from pipeline.checkpoint.native import TrainState
    from pipeline.checkpoint.reader import Checkpoint

    config, trainer = make(*first)
    train_steps(trainer, config, text, 3)
    checkpoint = Checkpoint(saved(folder, config, trainer, TrainState(3, 48, 3)))
    biases = {name: checkpoint.tensor(name) for name in checkpoint.names() if name.endswith("router.bias")}
    config, trainer = make(*second)
    load_any_layout.load(checkpoint, trainer.engine.fragments())
    trainer.engine.loaded(3)
    return biases, {piece.name: value for value, piece in trainer.model.fixed.items()}


def test_a_checkpoint_keeps_the_biases(world, tmp_path):
    first = (*DEEPSEEK, "parallel.expert=2", "parallel.zero_stage=3", "precision=bf16")
    second = (*DEEPSEEK, "parallel.pipeline=2", "parallel.tensor=2", "parallel.zero_stage=1")
    found = {}
    for biases, loaded in world.run(_save_and_load, str(tmp_path), first, second):
        assert len(biases) == 2
        assert all(bias.abs().max() > 0.009 for bias in biases.values())
        assert all(torch.equal(biases[name], bias) for name, bias in loaded.items()), "the biases are saved exactly, also in bf16"
        found |= loaded
    assert found.keys() == biases.keys()


def _experts(expert, tensor, counts_of_rank, dropped):
    """Values and gradients of ExpertParallelExperts on each rank's rows, and of unsharded experts on the same rows."""
    from pipeline.layers.experts import Experts
    from pipeline.parallel.expert_parallel import ExpertParallelExperts, _own_part

    group, tensor_group = _groups(expert, tensor)
    which, piece = group.rank(), tensor_group.rank()
    generator = torch.Generator().manual_seed(0)
    whole = Experts(8, 6, 12).double()
    mine = Experts(8 // expert, 6, 12 // tensor).double()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for own, full in zip(mine.parameters(), whole.parameters(), strict=True):
            own.copy_(_piece(full, which, expert, piece, tensor))
    counts = torch.tensor(counts_of_rank[which])
    x = torch.randn(int(counts.sum()) + dropped, 6, generator=generator.manual_seed(which + 1), dtype=torch.float64)
    leaf, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    parallel = ExpertParallelExperts(mine, group, tensor_group)
    y = parallel(_own_part(leaf, tensor_group), counts)[: counts.sum()]
    y.sin().sum().backward()
    expected = whole(reference, counts)[: counts.sum()]
    expected.sin().sum().backward()
    gradients = [parameter.grad for parameter in whole.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
    values = [(y.detach(), _own_part(expected.detach(), tensor_group))]
    values += [(_own_part(leaf.grad, tensor_group), _own_part(reference.grad, tensor_group))]
    pieces = [_piece(gradient, which, expert, piece, tensor) for gradient in gradients]
    return values + list(zip((p.grad for p in mine.parameters()), pieces, strict=True))


@functools.cache
def _groups(expert, tensor):
    """This rank's expert and tensor groups of four ranks; the tensor ranks are neighbors."""
    assert expert * tensor == 4
    mesh = torch.arange(4).view(expert, tensor)
    experts = [dist.new_group(ranks) for ranks in mesh.T.tolist()][dist.get_rank() % tensor]
    return experts, [dist.new_group(ranks) for ranks in mesh.tolist()][dist.get_rank() // tensor]


def _piece(full, which, expert, piece, tensor):
    """The experts of a rank, and its piece of their width, which is dim 2 of the last product."""
    dim = 2 if full.shape[1] == 6 else 1
    return full.chunk(expert)[which].chunk(tensor, dim=dim)[piece]


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
@pytest.mark.parametrize("tensor", [1, 2])
def test_expert_parallel_experts_equal_the_experts(world, counts, dropped, tensor):
    for rank in world.run(_experts, 4 // tensor, tensor, counts, dropped):
        for ours, expected in rank:
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def _events(layout):
    """What happens in forward and backward pass of a layer with a shared expert, and the bytes of each all-to-all of rows."""
    from pipeline.layers.moe import SharedExpertMoE
    from pipeline.parallel.expert_parallel import Exchange

    config, mine = make(*DEEPSEEK, "parallel.expert=2", "parallel.zero_stage=0", "training.global_batch_size=8", *layout)
    layer = next(module for module in mine.model.modules() if isinstance(module, SharedExpertMoE))
    events, sizes = [], []

    def spied(name, method):
        def call(self, *arguments):
            events.append(name)
            if name == "send":
                sizes.append(arguments[0].nbytes / max(1, len(arguments[0])))
            return method(self, *arguments)

        return mock.patch.object(Exchange, method.__name__, call)

    layer.shared.register_forward_pre_hook(lambda *_: events.append("shared"))
    layer.shared.down.register_full_backward_pre_hook(lambda *_: events.append("shared"))
    generator = torch.Generator().manual_seed(0)  # with it, every rank gets rows for its experts
    x = torch.randn(2, 8 // mine.mesh.tensor.size(), config.model.hidden, generator=generator, requires_grad=True)
    with spied("send", Exchange._send), spied("wait", Exchange._wait):
        y = layer(x)
        events.append("backward")
        y.sum().backward()
    return events, sizes


@pytest.mark.long
def test_a_recomputation_does_not_wait_for_the_numbers_of_rows_again(world):
    """It has them from the forward pass; the losses are the same."""
    words = (*TINY, *MIXTRAL, "parallel.expert=2", "parallel.zero_stage=1")
    kept, losses = world.run(reads_and_losses, *words, "training.activation_checkpointing=none")[0]
    assert kept > 0
    for recompute in ("full", "selective"):
        assert world.run(reads_and_losses, *words, f"training.activation_checkpointing={recompute}")[0] == (kept, losses)


def test_the_shared_expert_computes_while_tokens_travel(world):
    """Rows go to the experts and return; so do their gradients."""
    events, sizes = world.run(_events, ())[0]
    assert events == ["send", "shared", "wait", "send", "wait", "backward", "send", "wait", "send", "shared", "wait"]
    assert sizes == [4 * 32] * 4


def test_a_token_crosses_the_network_once_and_not_once_a_tensor_rank(world):
    events, sizes = world.run(_events, ("parallel.tensor=2",))[0]
    assert events.count("send") == 4
    assert sizes == [4 * 32 / 2] * 4, "each tensor rank sends its columns"


def test_tensor_ranks_send_their_own_tokens_to_whole_experts(world):
    """Rows have all columns; each tensor rank has half of the tokens."""
    events, sizes = world.run(_events, ("parallel.tensor=2", "parallel.expert_tensor=1"))[0]
    assert events == ["send", "shared", "wait", "send", "wait", "backward", "send", "wait", "send", "shared", "wait"]
    assert sizes == [4 * 32] * 4


def _gradcheck():
    from pipeline.parallel.expert_parallel import Exchange

    rank, group = dist.get_rank(), dist.group.WORLD
    sent, received = [rank, 1, 0, 2], [[0, 1, 2, 3], [1] * 4, [0] * 4, [2] * 4][rank]
    rows = torch.randn(sum(sent), 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64, requires_grad=True)
    exchange = Exchange(sent, received, group)
    there_and_back = exchange.returning().transfer(exchange.transfer(rows) * (rank + 1))
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


def test_the_initial_values_of_stacked_experts_do_not_depend_on_the_layout():
    from pipeline.layers.init import initial_tensor
    from pipeline.parallel.parallelize import init_piece
    from pipeline.parallel.pieces import slice_weight

    full = initial_tensor("blocks.0.mlp.experts.up", (4, 6, 8), 0.02, 3)
    assert math.isclose(full.std(), 0.02, rel_tol=0.2)
    for expert, tensor in ((0, 0), (1, 2)):
        piece = slice_weight("blocks.0.mlp.experts.up", (4, 6, 8), "expert_column", {"expert": (2, expert), "tensor": (3, tensor)})
        assert torch.equal(init_piece(piece, 0.02, 3), piece.narrow(full))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model=llama-tiny", "parallel.expert=2"), "requires an MoE model; model.family=llama has no experts"),
        (("model=mixtral-tiny", "parallel.expert=3"), "must divide model.experts=4"),
        (
            ("model=deepseek-tiny", "model.experts=12", "parallel.expert=3", "parallel.tensor=2", "model.hidden=91"),
            "must divide model.hidden=91 with parallel.expert=3",
        ),
        (("model=mixtral-tiny", "model.top_k=5"), "is more than model.experts=4"),
        (("model=llama-tiny", "parallel.tensor=2", "parallel.expert_tensor=1"), "requires an MoE model; model.family=llama has no experts"),
        (("model=mixtral-tiny", "parallel.tensor=2", "parallel.expert_tensor=4"), "is neither 1 nor parallel.tensor=2"),
        (
            ("model=mixtral-tiny", "model.experts=3", "parallel.tensor=2", "parallel.expert_tensor=1"),
            "requires that parallel.tensor=2 x parallel.expert=1 divides model.experts=3",
        ),
        (
            ("model=mixtral-tiny", "parallel.tensor=2", "parallel.expert_tensor=1", "parallel.sequence_parallel=false"),
            "requires parallel.sequence_parallel=true: each tensor rank sends its own tokens to the experts",
        ),
        (("model=deepseek-tiny", "model.expert_ffn_hidden=99", "parallel.tensor=2"), "must divide model.expert_ffn_hidden=99"),
        (
            ("model=mixtral-tiny", "parallel.expert=2", "training.global_batch_size=9"),
            "must be a multiple of 6 data ranks x micro_batch_size 1",
        ),
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
    from pipeline.training.metrics import Metrics
    from pipeline.training.weight_update import StepResult

    config = configured("stage=pretrain", "model=mixtral-tiny", "tracking=disabled", f"run_dir={tmp_path}")
    more = {"aux_loss": torch.tensor(0.5), "router_load_max": torch.tensor(1.25)}
    result = StepResult(torch.tensor(2.0), torch.tensor(0.0), torch.tensor(0.1), more)
    with Metrics(config, 0, TrainState()) as metrics:
        metrics.after_step(queued(1, loss=torch.tensor(3.0), result=result, more={"data_seconds": 0.25}))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert [line[key] for key in ("loss", "grad_norm", "aux_loss", "router_load_max", "data_seconds")] == [3.0, 2.0, 0.5, 1.25, 0.25]
