"""fp8 training, emulated on CPU ranks: close to bf16, in every layout, and refused where the kernels of GPUs would fail."""

import logging

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.rules.check import violations
from tests.world import causal, configured, share, tiny, trainer

#: Widths that are multiples of 16, also when they are divided by two.
SIZES = tiny(
    *("model=llama-tiny", "model.layers=4", "model.hidden=64", "model.heads=4", "model.kv_heads=4", "model.ffn_hidden=96"),
    *("model.vocab_size=64", "training.steps=50", "training.global_batch_size=8", "training.micro_batch_size=2", "optimizer.lr=3e-3"),
)

#: Largest relative difference between the losses of a step in fp8 and in bf16.
BAND = 0.05


def losses(steps: int, *overrides: str) -> tuple[list[float], int]:
    """Train on sequences that count modulo the vocabulary; returns the losses, and the number of this rank's fp8 layers."""
    config, mine = trainer(*SIZES, *overrides)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        shape = (config.training.global_batch_size, 1)
        start, stride = torch.randint(64, shape, generator=generator), torch.randint(1, 4, shape, generator=generator)
        tokens = (start + stride * torch.arange(config.training.sequence_length + 1)) % 64
        found.append(float(mine.train(*causal(*share(mine, tokens)))[0]))
    return found, sum(type(module).__name__ == "Float8Linear" for module in mine.model.modules())


@pytest.fixture(scope="module")
def bf16(worlds):
    """The losses of 50 steps in bf16, which fall by half."""
    found, layers = worlds(1).run(losses, 50, "precision=bf16", "training.micro_batch_size=8")[0]
    assert layers == 0
    assert found[-1] < 0.6 * found[0]
    return found


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_loss_of_fifty_steps_is_near_that_of_bf16(worlds, bf16, recipe):
    fp8, layers = worlds(1).run(losses, 50, "precision=fp8", f"precision.fp8={recipe}", "training.micro_batch_size=8")[0]
    assert layers == 2 * 7, "all but the first and the last block"
    assert fp8 == pytest.approx(bf16, rel=BAND)
    assert fp8[1:] != bf16[1:]


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tensor=2", "training.activation_checkpointing=selective"),
        pytest.param(("parallel.pipeline=2", "training.activation_checkpointing=full"), marks=pytest.mark.long),
        pytest.param(("parallel.zero_stage=3",), marks=pytest.mark.long),
        pytest.param(("parallel.tensor=2", "parallel.sequence_parallel=false", "parallel.zero_stage=1"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_layouts_train_as_one_process(worlds, layout):
    """Scales of a tensor depend on the slices that the ranks hold, those of a row only on the row or its part."""
    alone, _ = worlds(1).run(losses, 3, "precision=fp8")[0]
    ranks = worlds(2).run(losses, 3, "precision=fp8", *layout)
    assert sum(layers for _, layers in ranks) == 14 * (1 if "parallel.pipeline=2" in layout else 2)
    assert max(found for found, _ in ranks) == pytest.approx(alone, rel=0.01)


#: Models of experts whose products are all in 8 bits, with padded experts and with any number of rows.
EXPERTS = ("model=mixtral-tiny", "model.experts=4", "model.top_k=2", "precision.fp8_experts=true")
PADDED = ("model.capacity_factor=2", "parallel.expert_padding=true")


@pytest.mark.long
@pytest.mark.parametrize("experts", [pytest.param(PADDED, marks=pytest.mark.long), ()], ids=["padded", "any number of rows"])
def test_the_loss_of_experts_in_fp8_is_near_that_of_bf16(worlds, experts):
    model = (*EXPERTS, *experts, "training.micro_batch_size=8")
    bf16, _ = worlds(1).run(losses, 50, *model[:3], *model[4:], "precision=bf16")[0]
    fp8, layers = worlds(1).run(losses, 50, *model, "precision=fp8")[0]
    dense, same = worlds(1).run(losses, 3, *model[:3], *model[4:], "precision=fp8")[0]
    assert layers == same, "experts are no linear layers"
    assert bf16[-1] < 0.7 * bf16[0]
    assert fp8 == pytest.approx(bf16, rel=BAND)
    assert fp8[1:3] != dense[1:]


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.expert=2", *PADDED, "parallel.expert_parts=2", "training.activation_checkpointing=full"),
        ("parallel.expert=2", "parallel.zero_stage=3", "training.activation_checkpointing=selective"),
        ("parallel.tensor=2", "parallel.expert=2", "parallel.expert_padding=true", "parallel.expert_buffer=2"),
        ("parallel.tensor=2", "parallel.expert=2", *PADDED),
        ("parallel.tensor=2", "parallel.expert=2"),
        ("parallel.pipeline=2", "parallel.schedule=zbv"),
    ],
    ids=" ".join,
)
def test_layouts_train_experts_as_one_process(worlds, layout):
    """An expert's rows have scales of their own. The sums of its weights' gradients depend on which rows a rank has."""
    padded = PADDED if PADDED[0] in layout else ()
    alone, _ = worlds(1).run(losses, 3, *EXPERTS, *padded, "precision=fp8")[0]
    ranks = worlds(4 if "parallel.tensor=2" in layout else 2).run(losses, 3, *EXPERTS, *layout, "precision=fp8")
    assert max(found for found, _ in ranks) == pytest.approx(alone, rel=0.01)


def test_master_weights_and_gradients_are_those_of_bf16():
    refused = violations(configured(*SIZES, "precision.fp8=tensorwise"), 1)
    assert [violation.rule for violation in refused] == ["requires precision.dtype=bf16, not fp32"]


@pytest.mark.parametrize("layers, most", [(1, 0), (2, 0), (4, 1)])
def test_fp8_that_converts_no_product_is_refused(layers, most):
    fp8 = (*SIZES, "precision=fp8", f"model.layers={layers}")
    (refused,) = violations(configured(*fp8, f"precision.fp8_exclude_layers={most + 1}"), 1)
    assert f"{refused.key}={refused.value} {refused.rule}".startswith("precision.fp8=tensorwise multiplies no 8-bit numbers")
    assert refused.fix == f"set precision.fp8_exclude_layers={most}, or precision=bf16"
    assert not violations(configured(*fp8, f"precision.fp8_exclude_layers={most}"), 1)


def logged(*overrides: str) -> list[str]:
    """What building a model logs."""
    records: list[str] = []
    log, handler = logging.getLogger("pipeline"), logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        trainer(*SIZES, "precision=fp8", *overrides)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return records


def test_the_log_names_the_products_that_stay_bf16(worlds):
    dense, moe = (worlds(1).run(logged, *model)[0] for model in ((), ("model=mixtral-tiny", "model.experts=2")))
    assert any(line.startswith("fp8 (tensorwise) in 14 linear layers") and "in bf16: blocks.0, blocks.3, head (5" in line for line in dense)
    assert any("in bf16: blocks.0, blocks.*.mlp.router.weight, blocks.*.mlp.experts.gate, " in line for line in moe)
    all_fp8 = worlds(1).run(logged, *EXPERTS)[0]
    assert any(
        "and the experts of 2 blocks" in line and "in bf16: blocks.0, blocks.*.mlp.router.weight, blocks.3, " in line for line in all_fp8
    )


def refusal(*overrides: str) -> str:
    """The message for a model whose matrices the kernels cannot multiply."""
    with pytest.raises(UserError) as caught:
        trainer(*SIZES, "precision=fp8", *overrides)
    return str(caught.value)


def test_sizes_that_fp8_products_do_not_support_are_refused(worlds):
    message = worlds(2).run(refusal, "model.ffn_hidden=80", "parallel.tensor=2")[0]
    assert "multiples of 16; a rank's piece of blocks.1.mlp.gate is 40 x 64" in message
    assert "set precision=bf16, or reduce parallel.tensor" in message
    message = worlds(2).run(refusal, *EXPERTS, "model.ffn_hidden=80", "parallel.tensor=2")[0]
    assert "precision.fp8_experts=True: requires matrices whose sizes are multiples of 16; a rank's piece of an expert" in message
    assert "of blocks.1.mlp.experts is 40 x 64" in message
    assert "set it to false, or reduce parallel.tensor" in message


@pytest.mark.parametrize(
    "overrides, rule",
    [
        ((*EXPERTS, "precision=bf16"), "requires precision.fp8, not none"),
        (("precision=fp8", "precision.fp8_experts=true"), "requires an MoE model; model.family=llama has no experts"),
        ((*EXPERTS, "precision=fp8", "cluster.hardware=a100-80"), "requires a Hopper GPU; cluster.hardware=a100-80 is A100 SXM 80 GB"),
    ],
)
def test_settings_without_fp8_products_of_experts_are_refused(overrides, rule):
    refused = violations(configured(*SIZES, *overrides), 1)
    assert ("precision.fp8_experts", rule) in [(violation.key, violation.rule) for violation in refused]
    assert not [each for each in violations(configured(*SIZES, *EXPERTS, "precision=fp8", "cluster.hardware=h100"), 1) if "fp8" in each.key]
