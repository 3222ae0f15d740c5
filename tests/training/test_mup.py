"""model.parametrization=mup: training is that of the paper's table in every layout, and exported weights need no multipliers."""

import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.certification.shrink_model import shrink_model
from pipeline.checkpoint import native
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import UserError
from pipeline.config import command_line, compose, loss_weights
from pipeline.config.rules import check as rules
from pipeline.layers.init import initial_tensor
from pipeline.models import registry
from pipeline.models.config_classes import from_dict
from pipeline.parallel.parallelize import partition_model
from pipeline.planner.planned_buckets import planned_buckets
from pipeline.planner.rank_report import init_fake
from pipeline.planner.trace import trace
from pipeline.training.buckets import build_buckets
from pipeline.training.muon import newton_schulz
from tests.helpers import one_in
from tests.training.expected import train_plain
from tests.training.layouts import text
from tests.training.one_rank import lines, run
from tests.world import configured, tiny, train_steps, trainer, unsharded

STEPS = 3
#: No clipping: norms of gradients differ in a model with multipliers. No eps, for the same reason.
COMMON = tiny("optimizer.gradient_clipping=0", "optimizer.eps=1e-20", "optimizer.weight_decay=2", "training.steps=3", "training.seed=3")


class Case(NamedTuple):
    """A model of width 32 with heads of 8, and its base model.

    Attributes:
        head_width, depth: those of the base model.
        muon: optimizer.muon_adjust_lr, None for AdamW.
    """

    model: tuple[str, ...]
    head_width: int = 8
    depth: int = 4
    muon: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        base = (f"model.mup_base_head_width={self.head_width}", f"model.mup_base_depth={self.depth}")
        muon = () if self.muon is None else ("optimizer=muon", f"optimizer.muon_adjust_lr={self.muon}")
        return (*COMMON, *muon, *self.model, "model.ffn_hidden=48", "model.parametrization=mup", "model.mup_base_width=8", *base)


CASES = {
    "llama": Case(("model=llama-tiny", "model.kv_heads=2")),
    "llama-everything": Case(("model=llama-tiny", "model.kv_heads=2", "model.attention_bias=true"), head_width=2, depth=1),
    "llama-tied": Case(("model=llama-tiny", "model.kv_heads=2", "model.tie_embeddings=true", "model.query_key_norm=true"), head_width=4),
    "gpt": Case(("model=gpt-tiny",), head_width=4, depth=2),
    "experts": Case(
        ("model=qwen3-moe-tiny", "model.kv_heads=2", "model.head_width=8", "model.expert_ffn_hidden=24", "training.balance_loss=0"), depth=2
    ),
    "muon": Case(("model=llama-tiny", "model.kv_heads=2"), head_width=4, depth=2, muon="match_rms_adamw"),
    "muon-original": Case(("model=llama-tiny", "model.kv_heads=2", "model.tie_embeddings=true"), depth=2, muon="original"),
}


def train(words: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The weights after some steps, and as "groups" the number of groups that the optimizer updates."""
    config, mine = trainer(*words)
    train_steps(mine, config, text, config.training.steps)
    return {**unsharded(mine), "groups": torch.tensor(len(mine.engine.update._merged))}


class Matrix:
    """A hidden matrix that Muon updates, in a model with multipliers: by the spectral condition, at the rate of the base model.

    Args:
        weight: the matrix.
        adjust: the rule for the size of its update.
        rate: its learning rate, over that of the base model.
    """

    def __init__(self, weight: torch.nn.Parameter, adjust: str, rate: float) -> None:
        self.weight, self.rate, self.average = weight, rate, torch.zeros_like(weight)
        rows, columns = weight.shape
        self.size = math.sqrt(max(1, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        gradient = self.weight.grad
        self.average.lerp_(gradient, 0.05)
        update = newton_schulz(gradient.lerp(self.average, 0.95)[None], 5)[0]
        self.weight.mul_(1 - 2 * lr).sub_(lr * self.rate * self.size * update)


@cache
def from_the_table(name: str) -> dict[str, torch.Tensor]:
    """A plain loop with the multipliers of table 8: the weights that a model without multipliers must have.

    Yang et al. 2022: input weights have the initial variance and the rate of the base model; hidden weights 1/m of both; output weights
    those of the base model, and a multiplier 1/m; attention divides by the width of a head. Dey et al. 2025: layers have a multiplier base
    depth / depth. The share by which a step decays a matrix is that of the base model.
    """
    case, config = CASES[name], configured(*CASES[name].words)
    sizes, m = config.model, 4
    model = registry.build(sizes)
    model.set_loss_weights(dict.fromkeys(loss_weights.defaults(sizes), 0.0))
    matrices: list[Matrix] = []
    depth, scores = case.depth / sizes.layers, math.sqrt(case.head_width) / sizes.head_dim
    model.head.factor = 1 / m
    for block in model.blocks.values():
        block.attention.scale = scores
        for layer in (block.attention, block.mlp):
            layer.register_forward_hook(lambda _module, _inputs, output: output * depth)
        if hasattr(block.mlp, "router"):
            block.mlp.router.register_forward_pre_hook(lambda _module, inputs: (inputs[0] / m,))
    groups = []
    for weight, parameter in model.named_parameters():
        hidden = weight.startswith("blocks.") and parameter.dim() > 1 and not weight.endswith("router.weight")
        std = sizes.init_std * (0.5 if weight == "embed.positions.weight" else 1)
        if weight.endswith(("attention.output.weight", "mlp.down.weight", "experts.down")):
            std /= math.sqrt(2 * case.depth)
        if parameter.dim() > 1:
            drawn = initial_tensor(weight, parameter.shape, 1.0, config.training.seed)
            parameter.data.copy_(drawn * std / (math.sqrt(m) if hidden else 1))
        else:
            parameter.data.fill_(0.0 if weight.endswith("bias") else 1.0)
        rate = 1 / m if hidden else 1
        groups.append({"params": [parameter], "rate": rate, "weight_decay": 2 / rate if parameter.dim() > 1 else 0})
        if case.muon and hidden:
            matrices.append(Matrix(parameter, case.muon, 1 if case.muon == "original" else 1 / math.sqrt(m)))
            groups.pop()
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-20)
    for step in range(STEPS):
        tokens, batch = text(config, step)
        model(tokens, targets=batch["targets"]).backward()
        lr = 0.01 * (0.5, 1.0, 0.1)[step]  # two steps of warm-up; then the cosine to a tenth at the last step
        for group in optimizer.param_groups:
            group["lr"] = lr * group["rate"]
        optimizer.step()
        for matrix in matrices:
            matrix.step(lr)
        model.zero_grad()
    folded = {"norm": 1 / m} if sizes.tie_embeddings else {"head": 1 / m}
    scaled = "query_norm" if getattr(sizes, "query_key_norm", False) else "attention.query"
    folded |= {
        scaled: scores * math.sqrt(sizes.head_dim),
        "attention.output": depth,
        "mlp.down": depth,
        "experts.down": depth,
        "router": 1 / m,
    }
    found = {}
    for weight, parameter in model.named_parameters():
        layer = weight.removesuffix(".weight").removesuffix(".bias")
        factor = next((c for part, c in folded.items() if layer == part or layer.endswith(f".{part}")), 1.0)
        found[weight] = parameter.detach() * factor
    return found


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    assert found.keys() - {"groups"} == expected.keys()
    for weight, value in expected.items():
        if not weight.endswith("attention.key.bias"):  # its gradient is a rounding error
            gap = (found[weight] - value).norm() / value.norm()
            assert gap < bound, f"{weight}: {gap}"


LAYOUTS = {
    "llama-everything": ("zero_stage=3 offload=optimizer", "tensor=2"),
    "experts": ("zero_stage=1", "expert=2"),
}
MORE_LAYOUTS = {
    "llama": ("zero_stage=1", "tensor=2", "pipeline=2"),
    "llama-everything": (*(f"zero_stage={stage}" for stage in range(4)), "pipeline=2", "pipeline=2 schedule=interleaved"),
    "llama-tied": ("zero_stage=1", "tensor=2", "pipeline=2"),
    "gpt": ("zero_stage=1", "tensor=2", "pipeline=2"),
    "muon": ("zero_stage=1", "tensor=2", "pipeline=2"),
    "muon-original": ("zero_stage=1", "tensor=2", "pipeline=2"),
}


@pytest.mark.world
@pytest.mark.parametrize(
    "name, layouts", [*LAYOUTS.items(), *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_LAYOUTS.items())]
)
def test_every_layout_computes_what_the_table_says(worlds, name, layouts):
    for layout in layouts:
        words = tuple(f"parallel.{word}" for word in layout.split())
        check(worlds(2).run(train, (*CASES[name].words, *words))[0], from_the_table(name), 2e-5)


@pytest.mark.world
def test_the_plain_loop_of_certificates_has_the_same_rule(worlds):
    """With clipping and eps, as jobs have; the table's multipliers would change both."""
    words = (*CASES["llama-everything"].words, "optimizer.gradient_clipping=0.5", "optimizer.eps=1e-6")
    config = configured(*words)
    expected = train_plain(config, [text(config, step) for step in range(STEPS)]).weights
    check(worlds(2).run(train, (*words, "parallel.zero_stage=2"))[0], expected, 1e-5)


@pytest.mark.world
def test_the_base_model_has_the_standard_parametrization(worlds):
    words = (*COMMON, "model=llama-tiny", "model.kv_heads=2", "model.ffn_hidden=48", "parallel.zero_stage=2")
    base = ("model.mup_base_width=32", "model.mup_base_head_width=8", "model.mup_base_depth=4")
    standard = worlds(2).run(train, words)[0]
    mup = worlds(2).run(train, (*words, *base, "model.parametrization=mup"))[0]
    assert mup.keys() == standard.keys()
    assert all(torch.equal(mup[name], standard[name]) for name in standard)
    wider = worlds(2).run(train, (*words, "model.parametrization=mup", "model.mup_base_width=8"))[0]
    assert not torch.equal(wider["head.weight"], standard["head.weight"])
    assert standard["groups"] == 2
    assert wider["groups"] == 3, "embedding, matrices, and vectors: not one for each bucket"


@pytest.mark.parametrize("name", one_in(2, CASES))
@pytest.mark.parametrize("layout", ["tensor=2", pytest.param("pipeline=2", marks=pytest.mark.long)])
def test_the_planner_has_the_buckets_of_the_engine(name, layout):
    config = configured(*CASES[name].words, f"parallel.{layout}")
    mesh, _ = init_fake(config, 4)
    for rank in range(0, 4, 3):
        model = partition_model(config, mesh.layout, rank)
        real = build_buckets(model, mesh, sequence_parallel=True)
        stages = mesh.layout.stages(mesh.layout.coordinates(rank).pipeline)
        planned = planned_buckets(trace(config), mesh.layout, stages)
        assert sorted(bucket.elements for bucket in planned) == sorted(bucket.elements for bucket in real)


def test_a_certificate_keeps_the_factors():
    config = configured("stage=certify", "model=llama-7b", "model.parametrization=mup", "model.mup_base_width=512")
    small = shrink_model(config, config).model
    assert small.hidden < 512
    assert small.hidden / small.mup_base_width == 4096 / 512


MUP = ("model=llama-tiny", "model.kv_heads=1", "model.parametrization=mup", "model.mup_base_width=4", "optimizer.schedule=constant")


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mup") / "run"
    run("pretrain", folder, *MUP, f"data.tokens={tokens}", "training.steps=4")
    return folder


def test_a_resumed_run_is_equal_in_every_bit(tokens, trained, tmp_path):
    for steps in (2, 4):
        run("pretrain", tmp_path, *MUP, f"data.tokens={tokens}", f"training.steps={steps}")
    ours, theirs = lines(tmp_path), lines(trained)
    assert [(ours[step]["loss"], ours[step]["grad_norm"]) for step in (3, 4)] == [
        (theirs[step]["loss"], theirs[step]["grad_norm"]) for step in (3, 4)
    ]
    checkpoints = [Checkpoint(native.find(folder, "latest")) for folder in (tmp_path, trained)]
    for name in checkpoints[1].names():
        assert torch.equal(*(checkpoint.tensor(name) for checkpoint in checkpoints))


def test_the_export_of_a_run_has_its_logits(tokenizer, trained):
    run("convert", trained, f"tokenizer.path={tokenizer}")
    stock = AutoModelForCausalLM.from_pretrained(trained / "hf", dtype=torch.float32)
    checkpoint = Checkpoint(native.find(trained, "latest"))
    ours = registry.build(from_dict(checkpoint.config["model"]))
    with torch.no_grad():
        for weight, parameter in ours.named_parameters():
            parameter.copy_(checkpoint.tensor(weight))
        some = torch.randint(320, (2, 16), generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(ours(some), stock(some).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model=llama-tiny", "model.parametrization=mup"), "model.mup_base_width=None: is required with model.parametrization=mup"),
        (("model=gpt-tiny", "model.mup_base_width=64"), "model.mup_base_width=64: has no effect with model.parametrization=standard"),
        (("model=llama-tiny", "model.mup_base_depth=2"), "model.mup_base_depth=2: has no effect with model.parametrization=standard"),
        (
            ("model=llama-tiny", "model.parametrization=mup", "model.mup_base_width=48", "optimizer=lion"),
            "optimizer.name=lion: has other updates than AdamW and Muon",
        ),
        (
            ("model=llama-tiny", "model.parametrization=mup", "model.mup_base_width=48", "optimizer=muon", "optimizer.muon_per_head=true"),
            "optimizer.muon_per_head=True: has no learning rate for model.parametrization=mup",
        ),
        (
            ("model=mistral-tiny", "model.parametrization=mup"),
            "model.parametrization=mup: no such key in this model; the families gpt, llama, qwen3_moe have it",
        ),
    ],
)
def test_what_is_refused(words, message):
    """Where there is no such key, when the command line is composed; else as the rules say."""
    if "no such key" in message:
        compose.register()
        found, _ = compose.diagnose(command_line.parse(["stage=pretrain", *words]))
    else:
        found = rules.violations(configured("stage=pretrain", *words), 1)
    assert any(message in str(violation) for violation in found)


def test_other_weights_are_refused_at_the_start(tokens, tmp_path):
    """Weights that were not trained with these initial values and rates, such as those of an imported model."""
    common = ("model=llama-tiny", "model.kv_heads=1", f"data.tokens={tokens}", "training.steps=5")
    run("pretrain", tmp_path / "standard", *common)
    with pytest.raises(UserError, match=r"model.parametrization=mup: \S+ was made with standard"):
        run("pretrain", tmp_path / "mup", *common, *MUP[2:], f"checkpoint.initialize_from={tmp_path}/standard")
