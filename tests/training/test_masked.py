"""Training with targets at some positions only, and padding: equal metrics in every layout, and a run whose loss decreases."""

import json

import pytest
import torch
import torch.distributed as dist

from pipeline.layers.loss import IGNORE
from tests.helpers import pipeline
from tests.world import configured

TINY = (
    "stage=pretrain",
    "model.layers=4",
    "model.hidden=32",
    "model.heads=4",
    "model.ffn_hidden=64",
    "model.vocab_size=67",
    "model.max_positions=16",
    "training.sequence_length=8",
    "training.global_batch_size=16",
    "training.micro_batch_size=2",
    "training.steps=8",
    "optimizer.warmup_steps=2",
    "optimizer.lr=0.01",
    "optimizer.eps=1e-6",
    "precision=fp32",
)


def batch_of(config, step):
    """A global batch with padding and uneven numbers of targets, so that the mean of the micro-batches' means would differ."""
    generator = torch.Generator().manual_seed(step)
    shape = (config.training.global_batch_size, config.training.sequence_length)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    lengths = torch.arange(shape[0]) * 7 % 6 + 3
    padding = torch.arange(shape[1]) >= lengths[:, None]
    chosen = torch.rand(shape, generator=generator) < torch.linspace(0.1, 0.9, shape[0])[:, None]
    batch = {"targets": torch.where(chosen & ~padding, tokens, IGNORE), "documents": torch.where(padding, -1, 0).int()}
    if getattr(config.model, "next_sentence", False):
        batch["segments"] = (torch.arange(shape[1]) >= lengths[:, None] // 2).long()
        batch["next_sentence"] = torch.randint(2, shape[:1], generator=generator)
    return tokens, batch


def train(config, trainer, steps):
    """Loss and gradient norm of each step."""
    layout, coordinates = trainer.mesh.layout, trainer.mesh.coordinates
    numbers = []
    for step in steps:
        tokens, batch = batch_of(config, step)
        mine = [tensor.chunk(layout.batch_shards)[layout.batch_shard(coordinates)] for tensor in (tokens, *batch.values())]
        held_out = float(trainer.evaluate(mine[0], dict(zip(batch, mine[1:], strict=True))))
        loss, result = trainer.train(mine[0], dict(zip(batch, mine[1:], strict=True)))
        assert held_out == pytest.approx(float(loss), rel=1e-5), "evaluation and training compute the same mean"
        numbers.append((float(loss), float(result.gradient_norm)))
    return numbers


def moments(trainer):
    """Sum and sum of squares of each weight's first moment, which a wrongly scaled gradient would change."""
    names = {}
    for fragment in trainer.engine.fragments():
        if fragment.owned:
            values = fragment.tensors["exp_avg"].double()
            one = names.setdefault(fragment.piece.name, torch.zeros(2, dtype=torch.float64))
            one += torch.stack([values.sum(), values.square().sum()])
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, names)
    return {name: sum(part[name] for part in gathered if name in part) for part in gathered for name in part}


def _trained(overrides):
    from pipeline.config.layout import Layout
    from pipeline.launch import preflight
    from pipeline.parallel import mesh as meshes
    from pipeline.training.trainer import Trainer

    config = configured(*TINY, *overrides)
    preflight.check(config, dist.get_world_size())
    trainer = Trainer(config, meshes.build_mesh(Layout.of(config, dist.get_world_size()), torch.device("cpu")))
    return train(config, trainer, range(4)), moments(trainer)


@pytest.fixture(scope="module")
def single_process():
    """The same in a single process, for each model."""
    from pipeline.config.layout import Layout
    from pipeline.parallel import mesh as meshes
    from pipeline.training.trainer import Trainer

    found = {}
    for model, needs in MODELS.items():
        config = configured(*TINY, f"model={model}", *needs, "parallel.zero_stage=0")
        try:
            trainer = Trainer(config, meshes.build_mesh(Layout.of(config, 1), meshes.init_distributed(0, 1, 0, "")))
            found[model] = train(config, trainer, range(4)), moments(trainer)
        finally:
            meshes.destroy_process_group()
    return found


#: Best-fit packing pads; padding is not a target of a causal model either.
MODELS = {"bert-tiny": (), "roberta-tiny": (), "llama-tiny": ("data.packing=best_fit",)}
LAYOUTS = [
    ("bert-tiny", ("parallel.zero_stage=0",)),
    ("bert-tiny", ("parallel.zero_stage=1", "parallel.tensor=2", "parallel.pipeline=2")),
    ("bert-tiny", ("parallel.zero_stage=0", "parallel.tensor=4")),
    ("bert-tiny", ("parallel.zero_stage=2", "parallel.tensor=2", "parallel.sequence_parallel=false")),
    ("bert-tiny", ("parallel.zero_stage=0", "parallel.pipeline=2", "parallel.schedule=zbv")),
    ("roberta-tiny", ("parallel.zero_stage=1", "parallel.tensor=2", "parallel.pipeline=2")),
    ("roberta-tiny", ("parallel.zero_stage=3",)),
    ("llama-tiny", ("parallel.zero_stage=1", "parallel.tensor=2", "parallel.pipeline=2", "training.micro_batch_size=4")),
    ("llama-tiny", ("parallel.zero_stage=2", "parallel.tensor=2", "parallel.context=2")),
    ("llama-tiny", ("parallel.zero_stage=0", "parallel.pipeline=2", "parallel.schedule=zbv")),
]


@pytest.mark.parametrize("model, layout", LAYOUTS, ids=str)
def test_four_ranks_equal_one_process(world, single_process, model, layout):
    numbers, sums = single_process[model]
    for theirs, their_sums in world.run(_trained, (f"model={model}", *MODELS[model], *layout)):
        assert theirs == [pytest.approx(one, rel=1e-5) for one in numbers]
        assert their_sums.keys() == sums.keys()
        for name, expected in sums.items():
            if not name.endswith("attention.key.bias"):  # softmax is invariant to it, so its gradient is rounding error
                torch.testing.assert_close(their_sums[name], expected, rtol=1e-4, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("model, kind", [("bert-tiny", "bert"), ("roberta-tiny", "roberta")])
@pytest.mark.slow
def test_pretraining_learns_and_evaluates_alike(shards, tmp_path, model, kind):
    paths = (f"tokenizer.path={tmp_path}/tokenizer", f"data.tokens={tmp_path}/tokens", f"data.shards={shards}")
    common = (*paths, f"tokenizer={kind}", f"run_dir={tmp_path}/run", f"model={model}", "model.vocab_size=520", "model.hidden=64")
    run = (
        "model.ffn_hidden=128",
        "training.sequence_length=48",
        "training.global_batch_size=16",
        "precision=fp32",
        "parallel.zero_stage=0",
    )
    more = ("training.steps=60", "optimizer.lr=0.003", "optimizer.warmup_steps=5", "tracking=disabled")
    pipeline("stage=train_tokenizer", *common, "tokenizer.vocab_size=520", "tokenizer.report=false")
    pipeline("stage=tokenize", *common)
    pipeline("stage=pretrain", *common, *run, *more)
    found = lines(tmp_path / "run")
    losses = [line["loss"] for line in found if "loss" in line]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert found[-1]["bits_per_byte"] is None
    pipeline("stage=evaluate", *common, *run, *more, "stage.batches=8")
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluation["validation_loss"] == pytest.approx(found[-1]["validation_loss"], rel=1e-5)
    assert evaluation["bits_per_byte"] is None


def test_settings_that_a_masked_model_does_not_support_are_refused():
    said = pipeline(
        "stage=pretrain",
        "model=bert-tiny",
        "data.masking.random=0.7",
        "data.masking.keep=0.7",
        "data.infill.rate=0.5",
        "training.document_mask=true",
        "training.sequence_warmup=[{until_step:2,value:64}]",
        expect=2,
    )
    for key in ("data.masking.random=0.7", "data.infill.rate=0.5", "training.document_mask=True", "training.sequence_warmup"):
        assert key in said
    assert "Traceback" not in said
