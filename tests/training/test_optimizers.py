"""AdEMAMix, Lion and schedule-free AdamW: against plain loops, in every ZeRO stage, resumed, and with settings that they do not read."""

import dataclasses
import json
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.certification import plain_optimizers, ranks_work
from pipeline.certification.plain_optimizers import plain_rate
from pipeline.checkpoint import native
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config.layout import Layout
from pipeline.config.optimizer import OPTIMIZERS, OptimizerConfig
from pipeline.config.rules import check
from pipeline.planner.planned_buckets import planned_buckets
from pipeline.planner.state_memory import model_state, state_format_of
from pipeline.planner.trace import trace
from pipeline.training.weight_copies import disagreements, on_host, parts_of
from pipeline.training.weight_update import BUILD
from tests.helpers import ROOT
from tests.training.expected import train_plain
from tests.training.layouts import EPS, text
from tests.training.one_rank import run
from tests.training.test_engine import _load_in_another, _poison, _save_and_continue
from tests.training.test_lora import initialized
from tests.training.test_offload import OFFLOAD, _trained
from tests.world import configured, share_of, tiny, train_steps, trainer, unsharded

STEPS = 3
SMALL = ("model=gpt-tiny", "model.layers=2", "model.ffn_hidden=64", "training.micro_batch_size=4", "optimizer.gradient_clipping=0.5")
#: Few steps of the warm-up of the slow average, so that it ends within a test.
BF16_MOMENTS = ("optimizer.state_dtype=bf16",)
ADEMAMIX = ("optimizer=ademamix", "optimizer.beta3=0.99", "optimizer.slow_warmup_steps=2")
LION = ("optimizer=lion",)
#: A short warm-up, so that the shares of the average change within a test.
SCHEDULE_FREE = ("optimizer=schedule_free", "optimizer.warmup_steps=2")
#: Tested besides in files of their own.
MUON, QK_CLIP = ("optimizer=muon",), ("optimizer.qk_clip=0.001",)


def _gradients(shapes, updates):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(updates)]


def test_every_optimizer_has_what_the_recipe_says():
    recipe = (ROOT / ".github/CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Add an optimizer")[2].partition("\n## ")[0]
    files = {
        name for name in re.findall(r"`([\w./]+\.(?:py|yaml))`", recipe.partition("\n\nAn optimizer that needs")[0]) if "NAME" not in name
    }
    assert len(files) == 5
    assert not [name for name in files if not (ROOT / name).is_file()], "with conf/optimizer/NAME.yaml they are six"
    for name, kind in OPTIMIZERS.items():
        assert (ROOT / f"conf/optimizer/{name}.yaml").is_file()
        assert set(kind.keys) <= {field.name for field in dataclasses.fields(OptimizerConfig)}
        assert name in plain_optimizers.PLAIN
        assert BUILD[name].__doc__


@pytest.mark.parametrize(
    "settings",
    [BF16_MOMENTS, ADEMAMIX, ("optimizer=ademamix",), LION, ("optimizer=lion", "optimizer.beta1=0.5"), SCHEDULE_FREE],
    ids=" ".join,
)
def test_the_update_is_that_of_the_paper(settings):
    """Gradients are divided, and a step that is skipped leaves no trace: neither in the weights nor in the count of updates."""
    config = configured(*tiny(*SMALL), *settings)
    shapes = [(5, 3), (4,)]
    start = _gradients(shapes, 1)[0]
    ours, plain = ([nn.Parameter(values.clone().to(dtype)) for values in start] for dtype in (torch.float32, torch.float64))
    kind, lr = OPTIMIZERS[config.optimizer.name], torch.zeros(())
    groups = [{"params": [p], "weight_decay": config.optimizer.weight_decay if p.dim() > 1 else 0.0, "muon": False} for p in ours]
    optimizer = BUILD[config.optimizer.name](groups, config.optimizer, lr, config.training.steps)
    expected = plain_optimizers.build(config, {str(index): weight for index, weight in enumerate(plain)})
    updates = 0
    for number, gradients in enumerate(_gradients(shapes, 6)):
        skipped = number in (0, 3)
        lr.fill_(plain_rate(updates, config.optimizer, config.training))  # rates follow the updates
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(skipped)), torch.tensor(torch.nan if skipped else 4.0)
        for weight, gradient in zip(ours, gradients, strict=True):
            weight.grad = gradient * (torch.inf if skipped else 4.0)
        before = [weight.detach().clone() for weight in ours]
        optimizer.step()
        if skipped:
            assert all(torch.equal(a, b) for a, b in zip(before, ours, strict=True))
            continue
        for weight, gradient in zip(plain, gradients, strict=True):
            weight.grad = gradient.double()
        for group in expected.param_groups:
            group["lr"] = float(lr)
        expected.step()
        updates += 1
        for weight, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(weight.double(), plain_optimizers.trained(expected, other), rtol=1e-5, atol=1e-6)
            state, wanted = optimizer.state[weight], expected.state[other]
            assert set(state) == {"step", *kind.state}
            for name in kind.state:
                value = wanted["z"] - wanted["x"] if name == "offset" else wanted[name]
                torch.testing.assert_close(state[name].double(), value, rtol=1e-5, atol=1e-7)
            if kind.separate:
                point = optimizer.gradient_point({"weight": weight.detach(), **state})
                torch.testing.assert_close(point.double(), other.detach(), rtol=1e-5, atol=1e-6)
    assert all(float(optimizer.state[weight]["step"]) == 4 for weight in ours)


def _train(*overrides):
    config, mine = trainer(*tiny(*SMALL), *overrides)
    numbers = train_steps(mine, config, text, STEPS)
    return numbers, unsharded(mine), {kind: unsharded(mine, kind) for kind in OPTIMIZERS[config.optimizer.name].state}


@pytest.mark.parametrize(
    "stage, optimizer",
    [
        pytest.param(stage, optimizer, marks=() if stage in default else pytest.mark.long)
        for optimizer, default in ((ADEMAMIX, (2,)), (SCHEDULE_FREE, (3,)))
        for stage in range(4)
    ],
)
def test_a_layout_equals_a_plain_loop(worlds, stage, optimizer):
    """The state is one of every element, so that any partition has it."""
    settings = (*optimizer, EPS)
    config = configured(*tiny(*SMALL), *settings)
    expected = train_plain(config, [text(config, step) for step in range(STEPS)])
    more = ("parallel.tensor=2",) if stage == 0 else ()
    numbers, weights, _ = worlds(2).run(_train, f"parallel.zero_stage={stage}", *settings, *more)[0]
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected.numbers), rtol=1e-5, atol=0)
    for name in weights.keys() - {name for name in weights if name.endswith("key.bias")}:  # its gradient is rounding
        assert (weights[name] - expected.weights[name]).norm() < 1e-5 * expected.weights[name].norm(), name


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 2])
def test_adapters_are_averaged(worlds, stage):
    settings = (*SCHEDULE_FREE, "stage=finetune", "lora.rank=3", "optimizer.lr=0.01", "optimizer.warmup_ratio=0")
    config = configured(*tiny(*SMALL), *settings)
    expected = train_plain(config, [text(config, step) for step in range(STEPS)], model=initialized(config))
    numbers, weights, _ = worlds(2).run(_train, f"parallel.zero_stage={stage}", *settings)[0]
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected.numbers), rtol=1e-5, atol=1e-7)
    adapters = [name for name in weights if name.endswith(".b") and "attention.key" not in name]
    assert len(adapters) > 4
    assert all((weights[name] - expected.weights[name]).norm() < 1e-4 * expected.weights[name].norm() for name in adapters)


def _validate(*overrides):
    """Three steps with and without validations between them: numbers of the steps, what is wrong after them, and losses at y and x."""
    (config, straight), (_, other) = (trainer(*tiny(*SMALL), *SCHEDULE_FREE, *overrides) for _ in range(2))
    numbers, problems, losses = [], [], []
    for step in range(STEPS):
        batch = share_of(straight, *text(config, step))
        results = [mine.train(*batch, step=step) for mine in (straight, other)]
        numbers.append([(float(loss), float(result.gradient_norm)) for loss, result in results])
        problems += ranks_work.validation_report(config, other, unsharded(other)).failures
        ranks = [None, None]
        dist.all_gather_object(ranks, on_host(parts_of(other.engine)))
        problems += disagreements(other.mesh.layout, ranks)
        at_gradient = other.evaluate(*batch)[0].mean()
        with other.engine.trained_weights():
            losses.append((float(at_gradient), float(other.evaluate(*batch)[0].mean())))
    return numbers, problems, losses


@pytest.mark.parametrize(
    "layout", ["zero_stage=3", "pipeline=2", *(pytest.param(layout, marks=pytest.mark.long) for layout in ("zero_stage=0", "zero_stage=1"))]
)
def test_validation_is_that_of_the_average_and_changes_nothing(worlds, layout):
    for numbers, problems, losses in worlds(2).run(_validate, f"parallel.{layout}", "precision=fp32"):
        assert not problems
        assert all(one == other for one, other in numbers)
        # After the first update, the three sequences of the paper are one.
        assert [at_gradient == average for at_gradient, average in losses] == [True, False, False], losses


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.zero_stage=1", "precision=fp32", *ADEMAMIX),
        pytest.param(("parallel.zero_stage=3", "precision=bf16", *BF16_MOMENTS), marks=pytest.mark.long),
        pytest.param(("parallel.zero_stage=3", "precision=bf16", *LION), marks=pytest.mark.long),
        pytest.param(
            ("parallel.zero_stage=0", "precision=fp32", "parallel.pipeline=2", *SCHEDULE_FREE, "training.ema=null"), marks=pytest.mark.long
        ),
        pytest.param(("parallel.zero_stage=3", "precision=bf16", *SCHEDULE_FREE, "training.ema=null"), marks=pytest.mark.long),
        ("parallel.zero_stage=3", "precision=bf16", *MUON),
        pytest.param(("parallel.zero_stage=0", "precision=fp32", "parallel.tensor=2", *MUON), marks=pytest.mark.long),
        pytest.param(("parallel.zero_stage=3", "precision=fp32", *QK_CLIP), marks=pytest.mark.long),
        pytest.param(("parallel.zero_stage=0", "precision=bf16", *QK_CLIP), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_a_loaded_state_continues_bit_for_bit(worlds, tmp_path, settings):
    for (straight, average), (loaded, same) in worlds(2).run(_save_and_continue, tmp_path, settings, settings):
        assert straight == loaded
        assert all(torch.equal(average[name], same[name]) for name in average | same)


def test_moments_in_bf16_are_stored_as_such_and_loaded_in_another_layout(worlds, tmp_path):
    layouts = ("parallel.zero_stage=3",), ("parallel.zero_stage=1", "parallel.tensor=2")
    found = worlds(2).run(_load_in_another, tmp_path / "bf16", *((*BF16_MOMENTS, *layout) for layout in layouts))
    assert all(equal and tensors > 100 for equal, tensors, _ in found)
    whole, low = (
        sum(worlds(2).run(_load_in_another, tmp_path / name, settings + layouts[0], settings + layouts[0])[0][2])
        for name, settings in (("whole", ()), ("low", BF16_MOMENTS))
    )
    assert low / whole == pytest.approx(12 / 16, abs=0.02), "weight, two moments and average"


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.zero_stage=2", *ADEMAMIX),
        ("parallel.zero_stage=2", *MUON),
        QK_CLIP,
        pytest.param(("parallel.zero_stage=0", *LION), marks=pytest.mark.long),
        pytest.param(("parallel.zero_stage=0", *MUON), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_a_non_finite_gradient_skips_the_step(worlds, settings):
    for skipped, then, _, still, moved, updates in worlds(2).run(_poison, ("precision=fp32", *settings)):
        assert (skipped, then, still, moved, updates) == (1, 0, True, True, 3)


def test_the_cpu_updates_an_offloaded_state_bit_for_bit(worlds, tmp_path):
    settings = ("precision=bf16", "parallel.zero_stage=2", *ADEMAMIX)
    plain = worlds(2).run(_trained, tmp_path / "plain", *settings)
    offloaded = worlds(2).run(_trained, tmp_path / "offloaded", *settings, OFFLOAD)
    for (numbers, tensors, stored, _), (same, others, as_stored, _) in zip(plain, offloaded, strict=True):
        assert numbers == same
        assert stored == as_stored
        assert all(torch.equal(value, others[kind][name]) for kind, values in tensors.items() for name, value in values.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("optimizer.beta3=0.99",), "optimizer.beta3=0.99: has no effect with optimizer.name=adamw"),
        (("optimizer.alpha=2",), "optimizer.alpha=2.0: has no effect with optimizer.name=adamw"),
        (("optimizer=lion", "optimizer.state_dtype=bf16"), "optimizer.state_dtype=bf16: has no effect with optimizer.name=lion"),
        (("optimizer.state_dtype=bf16", "optimizer.beta2=0.999"), "optimizer.beta2=0.999: changes a moment by less than"),
        (("optimizer=lion", "optimizer.slow_warmup_steps=5"), "optimizer.slow_warmup_steps=5: has no effect with optimizer.name=lion"),
        (("optimizer=lion", "optimizer.eps=1e-6"), "optimizer.eps=1e-06: has no effect with optimizer.name=lion"),
        (("optimizer=ademamix", "optimizer.beta3=0.99", "optimizer.alpha=2", "optimizer.eps=1e-6"), None),
        (("optimizer=lion", "parallel.offload=optimizer"), None),
        (("optimizer=schedule_free",), None),
        (("optimizer=schedule_free", "optimizer.schedule=wsd"), "optimizer.schedule=wsd: is a decay, in whose place"),
        (("optimizer.name=schedule_free",), "optimizer.schedule=cosine: is a decay, in whose place"),
        (("optimizer=schedule_free", "training.ema=0.9"), "training.ema=0.9: averages weights that"),
        (("optimizer=schedule_free", "parallel.offload=optimizer"), "parallel.offload=optimizer: requires an optimizer that the CPU steps"),
    ],
)
def test_settings_of_another_optimizer_are_refused(settings, message):
    config = configured("stage=pretrain", "model=llama-tiny", *settings)
    found = [str(violation) for violation in check.violations(config, 1)]
    assert any(message in text for text in found) if message else not found, found


def _bytes(*overrides):
    """Bytes of weights, master weights and optimizer state of a rank after a step."""
    config, mine = trainer(*tiny(*SMALL), *SCHEDULE_FREE, *overrides)
    mine.train(*share_of(mine, *text(config, 0)))
    kept = [*mine.model.parameters(), *mine.engine.partitions(), *(t for f in mine.engine.fragments() for t in f.tensors.values())]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}.values())


@pytest.mark.parametrize(
    "stage, precision",
    [
        (0, "fp32"),
        (3, "bf16"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, "bf16"), (1, "fp32"), (1, "bf16"), (3, "fp32"))),
    ],
)
def test_the_planned_memory_has_the_weights_of_the_forward_pass_beside_the_master_weights(worlds, stage, precision):
    words = (f"parallel.zero_stage={stage}", f"precision={precision}")
    config = configured(*tiny(*SMALL), *SCHEDULE_FREE, *words)
    layout = Layout.of(config, 2)
    planned = model_state(planned_buckets(trace(config), layout, [0]), state_format_of(config, layout))
    assert worlds(2).run(_bytes, *words)[0] == pytest.approx(planned.weights + planned.optimizer, rel=0.01)  # padding of buckets


def _stored(run_dir):
    """All tensors of the last checkpoint of a run."""
    checkpoint = Checkpoint(native.folder_of(run_dir, 4))
    kinds = ("weight", *OPTIMIZERS["schedule_free"].state)
    return {(kind, name): checkpoint.tensor(name, kind) for kind in kinds for name in checkpoint.names()}


@pytest.mark.long
def test_a_schedule_free_run_is_interrupted_forked_and_evaluated(tokens, tmp_path):
    settings = (f"data.tokens={tokens}", "optimizer.name=schedule_free", "optimizer.schedule=constant", "training.validate_every=1")
    run("pretrain", tmp_path / "straight", *settings, "training.steps=4")
    for steps in (2, 4):
        run("pretrain", tmp_path / "continued", *settings, f"training.steps={steps}")
    run("pretrain", tmp_path / "forked", *settings, "training.steps=4", f"checkpoint.fork={tmp_path}/straight/step-3")
    straight = _stored(tmp_path / "straight")
    for other in (_stored(tmp_path / name) for name in ("continued", "forked")):
        assert all(torch.equal(values, other[key]) for key, values in straight.items())
    assert any(straight["offset", name].any() for kind, name in straight if kind == "offset")
    run("evaluate", tmp_path / "straight", *settings, "training.steps=4", "stage.batches=1")
    scored = json.loads((tmp_path / "straight" / "evaluation.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    validated = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert len(set(validated)) == 4
    assert scored["validation_loss"] == pytest.approx(validated[-1], rel=1e-6)


def test_the_defaults_of_a_group_are_those_of_the_paper():
    lion, ademamix = (configured("stage=pretrain", f"optimizer={name}").optimizer for name in ("lion", "ademamix"))
    assert (lion.name, lion.beta1, lion.beta2) == ("lion", 0.9, 0.99)
    assert (ademamix.name, ademamix.beta2, ademamix.beta3, ademamix.alpha) == ("ademamix", 0.999, 0.9999, 8.0)
    assert dataclasses.replace(ademamix, name="adamw", beta2=0.95) == configured("stage=pretrain").optimizer
