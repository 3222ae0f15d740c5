"""Training with context parallelism: losses, gradient norms and weights equal those of a single process."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.helpers import pipeline
from tests.world import causal, configured

STEPS = 3
TINY = (
    "stage=pretrain",
    "precision=fp32",
    "model.layers=4",
    "model.hidden=32",
    "model.heads=4",
    "model.vocab_size=67",
    "model.max_positions=32",
    "training.sequence_length=32",
    "training.global_batch_size=8",
    "training.micro_batch_size=2",
    f"training.steps={STEPS}",
    "training.document_mask=true",
    "optimizer.lr=0.001",
    "optimizer.warmup_steps=1",
    "optimizer.gradient_clipping=0.5",
    "optimizer.eps=1e-6",
)
FAMILIES = {
    "gpt": ("model=gpt-tiny", "model.ffn_hidden=48"),
    "llama": ("model=llama-tiny", "model.kv_heads=4", "model.ffn_hidden=48"),
    "bloom": ("model=bloom-tiny",),
    "mistral": ("model=mistral-tiny", "model.kv_heads=2", "model.window=11", "model.ffn_hidden=48"),
}


def _batch(config, step):
    """Tokens, targets and documents of a global batch; a document ends after about every ninth token."""
    chance = torch.Generator().manual_seed(step)
    shape = (config.training.global_batch_size, config.training.sequence_length)
    tokens = torch.randint(config.model.vocab_size, (shape[0], shape[1] + 1), generator=chance)
    return tokens, (torch.rand(shape, generator=chance) < 0.11).int().cumsum(1, dtype=torch.int32)


@functools.cache
def _plainly(family):
    """The reference: a plain training loop with PyTorch's cross-entropy and AdamW."""
    from pipeline.models import registry
    from pipeline.models.init import initialize
    from pipeline.training.lr_schedule import learning_rate

    config = configured(*FAMILIES[family], *TINY)
    model = registry.build(config.model)
    initialize(model, config.model, config.training.seed)
    decays = [{"params": [p for p in model.parameters() if (p.dim() >= 2) == wide]} for wide in (True, False)]
    decays[0]["weight_decay"], decays[1]["weight_decay"] = config.optimizer.weight_decay, 0.0
    optimizer = torch.optim.AdamW(decays, betas=(config.optimizer.beta1, config.optimizer.beta2), eps=config.optimizer.eps)
    numbers = []
    for step in range(STEPS):
        tokens, documents = _batch(config, step)
        loss = F.cross_entropy(model(tokens[:, :-1], documents=documents).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optimizer, config.training)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((float(loss.detach()), float(norm)))
    return numbers, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _in_layout(overrides):
    """The same run in a layout: losses and norms, validation losses, and on rank 0 the consolidated weights."""
    from pipeline.checkpoint.consolidate import insert_fragment
    from pipeline.config.layout import Layout
    from pipeline.launch import preflight
    from pipeline.parallel import mesh as meshes
    from pipeline.training.trainer import Trainer

    config = configured(*overrides)
    preflight.check(config, dist.get_world_size())
    mesh = meshes.build_mesh(Layout.of(config, dist.get_world_size()), torch.device("cpu"))
    trainer = Trainer(config, mesh)
    numbers, validated = [], []
    for step in range(STEPS):
        tokens, documents = (t.chunk(mesh.layout.batch_shards)[mesh.layout.batch_shard(mesh.coordinates)] for t in _batch(config, step))
        validated.append(float(trainer.evaluate(*causal(tokens, documents))))
        loss, result = trainer.train(*causal(tokens, documents))
        numbers.append((float(loss), float(result.gradient_norm)))
    owned = [(f.piece, f.start, f.tensors["weight"].detach().clone()) for f in trainer.engine.fragments() if f.owned]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, owned)
    weights = {}
    for piece, start, values in (fragment for rank in gathered for fragment in rank):
        insert_fragment(weights.setdefault(piece.name, torch.full(piece.full_shape, torch.nan)), piece, start, values)
    return numbers, validated, weights if dist.get_rank() == 0 else {}


LAYOUTS = [
    "context=4 context_kind=ring zero_stage=0",
    "context=4 context_kind=ulysses zero_stage=3",
    "context=2 context_kind=ring tensor=2 zero_stage=1",
    "context=2 context_kind=ulysses tensor=2 zero_stage=0 sequence_parallel=false",
    "context=2 context_kind=ring pipeline=2 zero_stage=2",
    "context=2 context_kind=ulysses pipeline=2 zero_stage=0 schedule=zbv",
    "context=2 context_kind=ring zero_stage=3",
]
RECOMPUTED = "context=2 context_kind=ring tensor=2 zero_stage=2", ("training.activation_checkpointing=full",)
# Runs after a case with ZeRO 3, whose replacement of F.linear must be undone.
KEPT = "context=4 context_kind=ring zero_stage=1", ("training.activation_checkpointing=selective",)
CASES = [*((layout, ()) for layout in LAYOUTS), RECOMPUTED, KEPT]


#: Learned and rotary positions in every layout; ALiBi and sliding windows also with sharded heads.
ALL = [("gpt", *case) for case in CASES]
ALL += [("llama", *case) for case in (CASES[0], RECOMPUTED)]
ALL += [(family, "context=2 context_kind=ring tensor=2 zero_stage=1", ()) for family in ("bloom", "mistral")]


@pytest.mark.parametrize("family, layout, more", ALL, ids=str)
def test_context_parallel_training_equals_one_process(world, family, layout, more):
    numbers, weights = _plainly(family)
    overrides = (*FAMILIES[family], *TINY, *(f"parallel.{word}" for word in layout.split()), *more)
    for rank, (found, validated, gathered) in enumerate(world.run(_in_layout, overrides)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(numbers), rtol=1e-5, atol=0)
        assert validated == pytest.approx([loss for loss, _ in found], rel=1e-6), "validation computes the same loss"
        for name in weights if rank == 0 else ():
            if not name.endswith("attention.key.bias"):  # softmax is invariant to it, so its gradient is rounding error
                gap = (gathered[name] - weights[name]).norm() / weights[name].norm()
                assert gap < 1e-5, f"{name}: {gap}"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["training.sequence_length=36"], ["training.sequence_length=36", "2 x parallel.context=4", "multiple of 8"]),
        (["parallel.tensor=2", "training.sequence_length=24"], ["parallel.tensor=2", "multiple of 16"]),
        (["training.sequence_warmup=[{until_step: 2, value: 12}]"], ["training.sequence_warmup.0.value=12", "multiple of 8"]),
        (["parallel.context_kind=ulysses", "model.kv_heads=2"], ["parallel.context=4", "model.kv_heads=2", "context_kind=ring"]),
        (["model=bert-tiny"], ["parallel.context=4", "model.family=bert"]),
    ],
)
def test_unsupported_combinations_are_refused(tmp_path, arguments, said):
    given = ["model=llama-tiny", "parallel.context=4", "dry_run=true", "dry_run.world_size=8", "training.sequence_length=32", *arguments]
    message = pipeline(*given, f"run_dir={tmp_path / 'run'}", expect=2)
    assert all(text in message for text in [*said, "fix:"]), message
