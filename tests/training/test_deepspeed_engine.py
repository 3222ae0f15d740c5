"""DeepSpeed's engine: the steps of our own, one state with it, and those of a plain loop of DeepSpeed with the same configuration."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.training.layouts import MODELS
from tests.training.test_engine import TINY, _load_in_another, _save_and_continue, make, train
from tests.world import causal, configured, share, tiny, train_steps, trainer

DEEPSPEED = "parallel.engine=deepspeed"
STAGES = [f"parallel.zero_stage={stage}" for stage in range(4)]


@pytest.fixture
def world(world):
    """DeepSpeed refuses fp16 on a CPU, whose products PyTorch computes."""
    world.run(_allow_fp16)
    return world


def _allow_fp16():
    from deepspeed.accelerator import get_accelerator

    os.environ["DS_ACCELERATOR"] = "cpu"
    get_accelerator().is_fp16_supported = lambda: True
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]


def _steps(*words):
    config, trainer = make("training.micro_batch_size=2", *words)
    return train(config, trainer, range(3))


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.long)])
def test_its_steps_are_those_of_our_engine(worlds, tensor):
    """Losses and gradient norms in fp32, with ZeRO 0 to 3."""
    world, words = worlds(2 * tensor), ("precision=fp32", f"parallel.tensor={tensor}", "optimizer.gradient_clipping=0.5")
    expected = world.run(_steps, *words, "parallel.zero_stage=1")[0]
    for stage in STAGES:
        for steps in world.run(_steps, *words, stage, DEEPSPEED):
            assert torch.allclose(torch.tensor(steps), torch.tensor(expected), rtol=2e-6), stage


def test_a_closed_engine_leaves_the_process_as_it_was(worlds):
    """With ZeRO 3, DeepSpeed replaces PyTorch's linear function: the next run of a sweep in one process would compute with it."""
    assert worlds(2).run(_linear_functions) == [[False, True]] * 2


def _linear_functions():
    before = torch.nn.functional.linear
    _, trainer = make("precision=fp32", STAGES[3], DEEPSPEED)
    found = [torch.nn.functional.linear is before]
    trainer.engine.close()
    return [*found, torch.nn.functional.linear is before]


#: Families whose layers are others: encoder-decoder, experts, latent attention with tied weights and further tokens, linear attention.
FAMILIES = ["t5", "bert", "mixtral", "deepseek", "qwen3-next-documents"]


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("stage", STAGES[2:4])
def test_other_families(world, name, stage):
    model = MODELS[name]
    ours, theirs = (world.run(_steps_of, name, stage, *engine)[0] for engine in ((), (DEEPSPEED,)))
    assert torch.allclose(torch.tensor(theirs), torch.tensor(ours), rtol=5e-6), model.overrides


def _steps_of(name, *words):
    config, mine = trainer(*tiny(*MODELS[name].overrides, "precision=fp32", *words))
    return train_steps(mine, config, MODELS[name].batch, 3)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(("precision=bf16", stage), marks=pytest.mark.long) for stage in STAGES[1:3]),
        pytest.param(("precision=bf16", STAGES[3]), marks=pytest.mark.long),
        ("precision=fp16", STAGES[3]),
    ],
    ids=" ".join,
)
def test_low_precision(world, words):
    """Both sum the gradients of micro-batches in fp32, and differ by the roundings before that."""
    ours, theirs = (world.run(_steps, *words, *engine)[0] for engine in ((), (DEEPSPEED,)))
    assert [step[3] for step in ours] == [step[3] for step in theirs], "skipped steps"
    for mine, other in zip(ours, theirs, strict=True):
        assert other[:2] == pytest.approx(mine[:2], rel=2e-3)


STATES = [
    ((STAGES[1], "parallel.tensor=2", DEEPSPEED), (STAGES[2], "parallel.pipeline=2")),
    ((STAGES[3], DEEPSPEED), (STAGES[1], DEEPSPEED)),
    ((STAGES[3], "parallel.tensor=2"), (STAGES[2], DEEPSPEED)),
    ((STAGES[1], "parallel.pipeline=2"), (STAGES[3], "parallel.tensor=2", DEEPSPEED)),
]


@pytest.mark.parametrize(
    "first, second", [STATES[2], *(pytest.param(*pair, marks=pytest.mark.long) for pair in (*STATES[:2], *STATES[3:]))], ids=str
)
def test_a_checkpoint_has_the_same_state_in_both_engines(world, tmp_path, first, second):
    for equal, tensors, _ in world.run(_load_in_another, tmp_path, first, second):
        assert equal
        assert tensors > 100


CONTINUED = [
    ("precision=fp32", STAGES[0], DEEPSPEED),
    ("precision=fp16", STAGES[1], DEEPSPEED),
    ("precision=bf16", STAGES[1], DEEPSPEED),
    ("precision=bf16", STAGES[3], "parallel.tensor=2", DEEPSPEED),
]


@pytest.mark.parametrize(
    "layout", [CONTINUED[1], *(pytest.param(each, marks=pytest.mark.long) for each in (CONTINUED[0], *CONTINUED[2:]))], ids=" ".join
)
def test_a_loaded_state_continues_bit_for_bit(world, tmp_path, layout):
    for (straight, average), (loaded, same) in world.run(_save_and_continue, tmp_path, layout, layout):
        assert straight == loaded
        assert all(torch.equal(average[name], same[name]) for name in average | same)


@pytest.mark.long
def test_a_run_changes_its_engine(world, tmp_path):
    first, second = ("precision=fp32", STAGES[2]), ("precision=fp32", STAGES[3], DEEPSPEED)
    for (straight, _), (loaded, _) in world.run(_save_and_continue, tmp_path, first, second):
        assert torch.allclose(torch.tensor(straight), torch.tensor(loaded), rtol=2e-6)


#: As of a guide: ZeRO 2, CPU offload, a schedule. DeepSpeed would compile an optimizer for the CPU.
FILE = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.98], "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 4, "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
}


def _with_a_file(path, steps):
    from pipeline.config.command_line import parse

    words = parse(["stage=pretrain", f"parallel.deepspeed={path}"]).overrides
    config, trainer = make(*(word for word in words if word != "stage=pretrain"), "precision=fp32", f"training.steps={steps}")
    return train(config, trainer, range(steps))


def _plain_loop(document, steps):
    """DeepSpeed's own loop over the same weights and batches: the losses, rates and norms of its steps."""
    import deepspeed

    from pipeline.config.layout import Layout
    from pipeline.parallel.mesh import build_mesh
    from pipeline.parallel.parallelize import parallelize

    config = configured(*TINY, "precision=fp32")
    mesh = build_mesh(Layout.of(config, dist.get_world_size()), torch.device("cpu"))
    module = parallelize(config, mesh).stages["0"]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=document, dist_init_required=False)
    found = []
    for step in range(steps):
        shape = (config.training.global_batch_size, config.training.sequence_length + 1)
        batch = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(step))
        tokens, targets = causal(*share(SimpleNamespace(mesh=mesh), batch))
        rate, losses = engine.get_lr()[0], []
        for part, target in zip(tokens.split(4), targets["targets"].split(4), strict=True):
            loss = engine(part, targets=target)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        found.append((float(mean) / dist.get_world_size(), float(engine.get_global_grad_norm()), rate, 0.0))
    return found


@pytest.mark.long
@pytest.mark.parametrize("steps", [12, 200])
def test_a_file_trains_as_in_a_loop_of_deepspeed(worlds, tmp_path, steps):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(FILE))
    filled = json.loads(json.dumps(FILE).replace('"reduce_bucket_size": "auto"', '"reduce_bucket_size": 500000000'))
    filled["scheduler"]["params"]["total_num_steps"] = steps
    world = worlds(2)
    ours, theirs = world.run(_with_a_file, path, steps)[0], world.run(_plain_loop, filled, steps)[0]
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-6)
