"""Encoder-decoders on four ranks: every layout equals a single process."""

import pytest
import torch
import torch.distributed as dist

from pipeline.layers.loss import IGNORE
from tests.world import configured

TINY = (
    "stage=pretrain",
    "model.hidden=32",
    "model.heads=4",
    "model.ffn_hidden=64",
    "model.vocab_size=67",
    "model.max_positions=16",
    "training.sequence_length=12",
    "training.global_batch_size=16",
    "training.micro_batch_size=2",
    "training.steps=8",
    "optimizer.warmup_steps=2",
    "optimizer.lr=0.01",
    "precision=fp32",
)
#: The last model has three encoder blocks and two decoder blocks.
MODELS = {
    "t5": ("model=t5-tiny", "model.head_width=16"),
    "t5-1.1": ("model=t5-tiny", "model.head_width=8", "model.gated=true", "model.tie_embeddings=false"),
    "transformer": ("model=transformer-tiny", "model.layers=5", "model.encoder_layers=3", "data.pairs.train=[unread.tsv]"),
}


def a_batch(seed):
    """16 pairs of up to 12 and 8 tokens, padded."""
    generator = torch.Generator().manual_seed(seed)
    tokens, text = torch.randint(67, (16, 12), generator=generator), torch.randint(67, (16, 9), generator=generator)
    lengths = torch.randint(3, 13, (16, 1), generator=generator), torch.randint(1, 9, (16, 1), generator=generator)
    documents = torch.where(torch.arange(12) < lengths[0], 0, -1).int()
    targets = torch.where(torch.arange(8) < lengths[1], text[:, 1:], IGNORE)
    return tokens, {"decoder_tokens": text[:, :-1].contiguous(), "targets": targets, "documents": documents}


def numbers(overrides):
    """Loss and gradient norm of three steps."""
    from pipeline.config.layout import Layout
    from pipeline.launch import preflight
    from pipeline.parallel import mesh as meshes
    from pipeline.training.trainer import Trainer

    config = configured(*TINY, *overrides)
    preflight.check(config, dist.get_world_size())
    trainer = Trainer(config, meshes.build_mesh(Layout.of(config, dist.get_world_size()), torch.device("cpu")))
    shard, shares = trainer.mesh.layout.batch_shard(trainer.mesh.coordinates), trainer.mesh.layout.batch_shards
    found = []
    for seed in range(3):
        tokens, batch = a_batch(seed)
        mine = {name: tensor.chunk(shares)[shard] for name, tensor in batch.items()}
        loss, result = trainer.train(tokens.chunk(shares)[shard], mine)
        found.append((float(loss), float(result.gradient_norm)))
    return found


def plain(overrides):
    """Loss and gradient norm of the first step in a single process, by autograd."""
    from pipeline.models import registry
    from pipeline.models.init import initialize

    config = configured(*TINY, *overrides).model
    model = registry.build(config)
    initialize(model, config, seed=0)
    tokens, batch = a_batch(0)
    loss = model(tokens, **batch)
    loss.backward()
    return loss.item(), torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


TENSOR_PIPELINE = ("parallel.tensor=2", "parallel.pipeline=2")
LAYOUTS = [
    ("t5", TENSOR_PIPELINE),
    ("t5", ("parallel.pipeline=4", "parallel.zero_stage=0", "training.activation_checkpointing=full")),
    ("t5", ("parallel.tensor=4", "parallel.sequence_parallel=false", "training.activation_checkpointing=selective")),
    ("t5", ("parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.zero_stage=2")),
    ("t5", ("parallel.pipeline=2", "parallel.schedule=zbv", "parallel.tensor=2")),
    ("t5-1.1", ("parallel.zero_stage=3", "parallel.tensor=2")),
    ("t5", ("parallel.zero_stage=3", "parallel.pipeline=2")),
    ("transformer", TENSOR_PIPELINE),
    ("transformer", ("parallel.pipeline=2", "parallel.schedule=zbv", "parallel.zero_stage=2")),
]


@pytest.fixture(scope="module")
def expected(world):
    """The reference of each model: four data-parallel ranks; their first step is verified against a single process."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = world.run(numbers, (*MODELS[name], "parallel.zero_stage=0"))[0]
            assert found[name][0] == pytest.approx(plain(MODELS[name]), rel=1e-5)
        return found[name]

    return of


@pytest.mark.parametrize("name, layout", LAYOUTS, ids=str)
def test_every_layout_equals_one_process(world, expected, name, layout):
    for ours in world.run(numbers, (*MODELS[name], *layout)):
        for step, theirs in zip(ours, expected(name), strict=True):
            assert step == pytest.approx(theirs, rel=1e-5)
