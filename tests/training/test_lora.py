"""LoRA and QLoRA: training in a layout equals a plain loop in a single process, and only adapters are trained."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.common import knobs
from pipeline.common.errors import UserError
from pipeline.config.layout import Layout
from pipeline.config.lora import is_adapter
from pipeline.layers.attention import sdpa
from pipeline.layers.init import initial_tensor
from pipeline.layers.linear import Linear
from pipeline.layers.nf4 import NF4Weight
from pipeline.layers.shifted_attention import ShiftedSparseAttention
from pipeline.models import registry
from pipeline.parallel.parallelize import adapter_std, attention_layers, build_model, check_trained
from pipeline.parallel.pieces import Piece
from tests.training.expected import Trained, train_plain
from tests.training.layouts import MODELS
from tests.world import configured, in_layout, mean_loss, tiny, train_steps, trainer, unsharded

STEPS = 3
LORA = (
    *("stage=finetune", "lora.rank=3", "lora.alpha=12", "++lora.rank_pattern={*.attention.*:2}", "++lora.alpha_pattern={*.key:8}"),
    "training.ema=0.6",
    "optimizer.lr=0.01",  # rounding of one process changes the third norm by 3e-7; at twice the rate by 6e-6
)
LAYOUTS = {
    "llama": ["zero_stage=2 context=2 tensor=2 training.activation_checkpointing=selective"],
    "llama nf4": ["zero_stage=0 tensor=2 pipeline=2 schedule=zbv"],
    "llama long": ["zero_stage=1 tensor=2 pipeline=2"],
    "mixtral-padded experts": ["zero_stage=3 expert=2 tensor=2 expert_padding=true expert_parts=2"],
}
MORE_LAYOUTS = {
    "llama": [
        *("zero_stage=0 tensor=2", "zero_stage=2 tensor=2 pipeline=2", "zero_stage=3"),
        *("zero_stage=1 tensor=2 sequence_parallel=false", "zero_stage=0 pipeline=2 schedule=zbv"),
        "zero_stage=3 tensor=2 training.activation_checkpointing=full",
    ],
    "llama nf4": ["zero_stage=3 context=2", "zero_stage=1 tensor=2 training.activation_checkpointing=selective"],
    "llama long": ["zero_stage=3 tensor=2 training.activation_checkpointing=full"],
    "gpt": ["zero_stage=0 pipeline=4", "zero_stage=1 tensor=4"],
    "mixtral": ["zero_stage=1 expert=2 tensor=2"],
    "deepseek-grouped": ["zero_stage=1 tensor=2 pipeline=2", "zero_stage=2 expert=2"],
    "deepseek-grouped experts": ["zero_stage=2 expert=2 pipeline=2", "zero_stage=0 tensor=2 expert=2"],
    "mixtral experts": [
        *("zero_stage=0 expert=4 training.activation_checkpointing=full", "zero_stage=2 expert=2", "zero_stage=1 expert=2 tensor=2"),
        *("zero_stage=1 tensor=2 expert_tensor=1", "zero_stage=3 tensor=2 sequence_parallel=false"),
    ],
}
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]
CASES += [pytest.param(name, layout, marks=pytest.mark.long) for name, layouts in MORE_LAYOUTS.items() for layout in layouts]


#: QLoRA with slices of two tensor ranks that are full blocks; the attention has no adapters.
NF4 = ("lora.quantize=nf4", "model.hidden=128", "model.ffn_hidden=128", "lora.targets=[*.mlp.*]", "++lora.rank_pattern={}")
#: LongLoRA; the two query heads of a rank are of both kinds, or of one.
LONG = ("training.attention_group=4", "lora.modules_to_save=[embed.*,*norm]")
#: All matrices of routed experts, of the one with another rank.
EXPERTS = ("lora.targets=[*.attention.*,*.experts.*]", "++lora.rank_pattern={*.attention.*:2,*.experts.down:4}")
KINDS = {"": (), "nf4": NF4, "long": LONG, "experts": EXPERTS}


def settings(name: str, *more: str) -> tuple[str, ...]:
    model, _, kind = name.partition(" ")
    return tiny(*MODELS[model].overrides, *LORA, *KINDS[kind], *more)


def model_of(name: str) -> Any:
    return MODELS[name.partition(" ")[0]]


def initialized(config: Any) -> nn.Module:
    """The model of one process with the initial values of a run; only adapters have a gradient."""
    model = build_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            std = adapter_std(Piece(name, shape)) if is_adapter(name) else registry.family_of(config.model).initial_std(config.model, name)
            parameter.copy_(initial_tensor(name, shape, std, config.training.seed))
            parameter.requires_grad_(is_trained(config, name))
        for module in model.modules() if config.lora.quantize == "nf4" else ():
            if isinstance(module, Linear):
                module.weight.copy_(NF4Weight(module.weight).dequantize())
    for layer in attention_layers(model) if config.training.attention_group else ():
        layer.core = ShiftedSparseAttention(sdpa, config.training.attention_group, config.model.heads // 2)
    return model


def is_trained(config: Any, name: str) -> bool:
    return is_adapter(name) or config.lora.saves(name)


@functools.cache
def reference(name: str) -> Trained:
    config = configured(*settings(name))
    model = initialized(config)
    config = knobs.changed(config, {"training.bias_update_speed": 0.0})  # with LoRA, routers are not changed
    return train_plain(config, [model_of(name).batch(config, step) for step in range(STEPS)], model=model)


def train(name: str, layout: str) -> tuple[Trained, set[str], int]:
    """Train in a layout; also the names with optimizer state and the number of elements that this rank's optimizer has."""
    config, mine = trainer(*settings(name, *in_layout(layout)))
    numbers = train_steps(mine, config, model_of(name).batch, STEPS)
    fragments = mine.engine.fragments()
    state = {f.piece.name for f in fragments if "exp_avg" in f.tensors}
    without_gradient = all(p.grad is None and not p.requires_grad for p in mine.model.fixed)
    assert without_gradient
    return (
        Trained(numbers, [], *(unsharded(mine, kind) for kind in ("weight", "exp_avg", "ema"))),
        state,
        sum(p.numel() for p in mine.model.pieces),
    )


@pytest.mark.parametrize("name, layout", CASES)
def test_four_ranks_equal_a_plain_loop(world, name, layout):
    expected = reference(name)
    config = configured(*settings(name))
    begun = {name: value.detach() for name, value in initialized(config).named_parameters()}
    ranks = world.run(train, name, layout)
    found, _, elements = ranks[0]
    for trained, _, _ in ranks:
        ours, theirs = torch.tensor(trained.numbers), torch.tensor([numbers[:2] for numbers in expected.numbers])
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert found.weights.keys() == expected.weights.keys()
    adapters = {weight for weight in expected.weights if is_trained(config, weight)}
    assert name != "llama long" or any("norm" in weight for weight in adapters)
    assert name.endswith("experts") == any(".experts." in weight for weight in adapters)
    assert set().union(*(state for _, state, _ in ranks)) == adapters == found.moments.keys()
    assert elements <= sum(expected.weights[weight].numel() for weight in adapters)
    for weight, value in found.weights.items():
        if weight not in adapters:
            assert torch.equal(value, begun[weight]), f"{weight} is frozen"
        elif weight.endswith(".b") and "attention.key" not in weight:  # softmax is invariant to some directions of keys
            gap = (value - expected.weights[weight]).norm() / expected.weights[weight].norm()
            assert gap < 1e-4, f"{weight}: {gap}"
            gap = (found.averages[weight] - expected.averages[weight]).norm() / expected.averages[weight].norm()
            assert gap < 1e-4, f"average of {weight}: {gap}"
    assert found.averages.keys() == adapters, "both factors of adapters are averaged, frozen weights are not"
    for weight in adapters:  # a wrongly scaled gradient changes them, but not the steps of Adam
        ours, theirs = found.moments[weight], expected.moments[weight]
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm() + 1e-7, weight


def dropped(name: str, layout: str) -> list[float]:
    """Losses with dropout of the inputs of all linear layers of the blocks, or of all experts; and of an evaluation."""
    more = ("lora.dropout=0.5", "++lora.rank_pattern={}", "++lora.alpha_pattern={}")
    config, mine = trainer(*settings(name, *more, *in_layout(layout)))
    numbers = []
    for step in (0, 1, 0):
        tokens, batch = model_of(name).batch(config, step)
        loss, result = mine.train(tokens, batch, step=step)
        numbers += [float(loss), float(result.gradient_norm), float(mean_loss(mine, tokens, batch))]
    return numbers


DROPPED = (
    "tensor=2 zero_stage=0",
    "tensor=2 zero_stage=0 sequence_parallel=false",
    "tensor=2 zero_stage=1 training.activation_checkpointing=full",
)
DROPPED_PADDED = ("tensor=2 zero_stage=0 training.activation_checkpointing=selective",)


@pytest.mark.long
@pytest.mark.parametrize(
    "name, layouts",
    [
        ("llama", DROPPED[2:]),
        ("mixtral experts", DROPPED[1:2]),
        ("llama", DROPPED[:2]),
        ("mixtral experts", DROPPED[2:]),
        ("mixtral-padded experts", DROPPED_PADDED),
    ],
)
def test_tensor_ranks_drop_the_elements_that_one_process_drops_also_when_they_are_recomputed(worlds, name, layouts):
    """A row-parallel layer has other columns of its input on each rank. Several data ranks draw numbers of their own."""
    alone = worlds(1).run(dropped, name, "zero_stage=0")[0]
    for layout in layouts:
        for found in worlds(2).run(dropped, name, layout):
            assert found == pytest.approx(alone, rel=1e-5)
    assert dropped_everywhere(alone)


def dropped_everywhere(numbers: list[float]) -> bool:
    """Whether dropout has changed the losses of training, but not those of evaluation, which fall on the same batch."""
    return numbers[3] != numbers[5] and numbers[8] < numbers[2]


MOE = ("stage=finetune", "model=mixtral-tiny")
UP = (*MOE, "lora.targets=[*.attention.*,*.experts.up]")


def test_the_default_targets_fit_models_whose_feed_forwards_are_routed_experts():
    config = configured(*MOE, "lora.rank=3")
    check_trained(config, Layout.of(config, 1))


def test_experts_are_adapted_where_they_are_named():
    with torch.device("meta"):
        names = [name for name, _ in build_model(configured(*UP, "lora.rank=8")).named_parameters()]
    assert {name for name in names if ".lora." in name and "attention" not in name} == {
        f"blocks.{block}.mlp.experts.lora.up.{factor}" for block in range(4) for factor in "ab"
    }


def refusal(ranks: int, *words: str) -> str:
    """What is said of settings that are refused."""
    config = configured(*words)
    with pytest.raises(UserError) as raised:
        check_trained(config, Layout.of(config, ranks))
    return str(raised.value)


def test_targets_and_ranks_that_do_not_fit_experts_are_refused():
    said = refusal(1, *MOE, "lora.rank=3", "lora.targets=[*.attention.*,*.mlp.*]")
    assert "lora.targets=*.mlp.*: matches no linear layer of model.family=mixtral" in said
    said = refusal(1, *UP, "lora.rank=12", "precision=bf16")
    assert "lora.rank=12: is the rank of blocks.0.mlp.experts.up, and " in said
    assert "must be a multiple of 8" in said
    said = refusal(2, *UP, "lora.rank=8", "lora.dropout=0.1", "parallel.tensor=2", "parallel.expert_tensor=1")
    assert "lora.dropout=0.1: would drop the same elements on all tensor ranks" in said
    said = refusal(1, *UP, "lora.rank=8", "lora.modules_to_save=[*.experts]")
    assert "lora.modules_to_save=*.experts: matches blocks.0.mlp.experts, which has an adapter" in said


def test_targets_that_match_nothing_are_refused():
    said = refusal(1, *settings("llama", "lora.targets=[*.attention.*,*.querry]", "++lora.rank_pattern={*.mlp.*:2}"))
    assert "lora.targets=*.querry: matches no linear layer" in said
    assert "lora.rank_pattern=*.mlp.*: matches no linear layer of model.family=llama with an adapter" in said
    said = refusal(1, *settings("llama", "lora.modules_to_save=[embed,*.query]"))
    assert "lora.modules_to_save=embed: matches no module of model.family=llama" in said
    assert "lora.modules_to_save=*.query: matches blocks.0.attention.query, which has an adapter" in said
    said = refusal(2, *settings("llama", "lora.targets=[blocks.0.*]", "parallel.pipeline=2"))
    assert "leaves nothing to train in pipeline stage 1 of 2" in said
