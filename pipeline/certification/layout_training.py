"""Training in a parallel layout by the code that pretraining runs, on CPU ranks or GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from pipeline.certification.batches import RandomBatch, random_batches, split, to_device
from pipeline.certification.comparison import Outcome
from pipeline.certification.reference import initial_noise
from pipeline.checkpoint.fragments import Fragment, insert_fragment
from pipeline.checkpoint.native import EMA
from pipeline.config.layout import Layout
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.schema import RunConfig
from pipeline.parallel import device as rank_device
from pipeline.parallel import mesh as meshes
from pipeline.parallel.mesh import gather_objects
from pipeline.parallel.parallelize import parallelize
from pipeline.training.matrix_rule import MatrixRule
from pipeline.training.trainer import Trainer
from pipeline.training.weight_update import StepResult

CPU = torch.device("cpu")
#: Called after every step with the step, from 0, and its result; on every rank, so that it may be collective.
AfterStep = Callable[[int, StepResult], object]


def begin(config: RunConfig) -> Trainer:
    """Return the trainer of this rank, with the initial weights of the plain loop. Collective. All ranks are on this machine."""
    device = rank_device.choose(dist.get_rank())
    mesh = meshes.build_mesh(Layout.of(config, dist.get_world_size()), device)
    model = parallelize(config, mesh)
    for weight in (*model.pieces, *model.sharded):
        model.materialize(weight)
    with torch.no_grad():
        for parameter, piece in (*model.pieces.items(), *model.sharded.items(), *model.fixed.items()):
            parameter += piece.narrow(initial_noise(piece.name, piece.full_shape)).to(device)
    return Trainer(config, mesh, model)


def train_in_layout(config: RunConfig, trainer: Trainer, after_step: Sequence[AfterStep] = (), steps: int | None = None) -> Outcome:
    """Train in the layout of the configuration. Collective; every rank returns the same result.

    Args:
        config: of the run, valid for the world size.
        trainer: from `begin`.
        after_step: called after every step, in order.
        steps: all when None.
    """
    fixed, moment = trainer.model.fixed_names(), OPTIMIZERS[config.optimizer.name].moment
    gradients: dict[str, torch.Tensor] = {}

    def keep_first_moments(step: int, _: StepResult) -> None:
        if step == 0:
            moments = gather(trainer.engine.fragments(), {moment: "moment"}, fixed)["moment"]
            gradients.update({name: first_gradient(config, name, values) for name, values in moments.items()})

    losses, norms = train_steps(trainer, enumerate(random_batches(config, steps)), (keep_first_moments, *after_step))
    return Outcome(losses, norms, {"gradient": gradients, **trained(config, trainer)})


def trained(config: RunConfig, trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    """Return what Outcome.tensors has of a run but its gradients. Collective."""
    kinds = {"weight": "weight", OPTIMIZERS[config.optimizer.name].moment: "moment"}
    kinds |= {} if config.training.ema is None else {EMA: "average"}
    return gather(trainer.engine.fragments(), kinds, trainer.model.fixed_names())


def first_gradient(config: RunConfig, name: str, moment: torch.Tensor) -> torch.Tensor:
    """Return the first gradient of a weight, from its moment (OptimizerKind.moment) after its first update; without its sign if squared.

    Args:
        name: of the full weight.
        moment: of the full weight.
    """
    optimizer = config.optimizer
    if MatrixRule.of(optimizer, config.model).matrices(name, tuple(moment.shape)) is not None:
        return moment / (1 - optimizer.muon_momentum)
    gradient: torch.Tensor = OPTIMIZERS[optimizer.name].first_gradient(moment, optimizer)
    return gradient


def train_steps(
    trainer: Trainer, batches: Iterable[tuple[int, RandomBatch]], after_step: Sequence[AfterStep]
) -> tuple[list[float], list[float]]:
    """Train on global batches with their steps, and return the losses and the gradient norms. Collective."""
    losses, norms = [], []
    layout = trainer.mesh.layout
    for step, (tokens, batch) in batches:
        mine, fields = split(tokens, batch, layout.batch_shards)[layout.batch_shard(trainer.mesh.coordinates)]
        loss, result = trainer.train(*to_device(mine, fields, trainer.mesh.device), step=step)
        losses.append(float(loss))
        norms.append(float(result.gradient_norm))
        for call in after_step:
            call(step, result)
    return losses, norms


def gather(fragments: Sequence[Fragment], kinds: dict[str, str], fixed: set[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the unsharded tensors of each kind by name. Collective.

    Args:
        fragments: of this rank. Of several copies, the primary one is returned.
        kinds: entries of Fragment.tensors -> key of the result; the same on all ranks. A weight without one is left out of it.
        fixed: weights that have no optimizer state.

    Returns:
        On the CPU; elements that no rank holds are nan.
    """
    owned = [
        (
            f.piece,
            f.start,
            {
                kind: f.tensors[kind].detach().to(CPU, copy=True)
                for kind in kinds
                if kind == "weight" or (f.piece.name not in fixed and kind in f.tensors)
            },
        )
        for f in fragments
        if f.replica == 0
    ]
    gathered = gather_objects(owned)
    full: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in kinds.values()}
    for piece, start, tensors in (fragment for rank in gathered for fragment in rank):
        for kind, values in tensors.items():
            weight = full[kinds[kind]].setdefault(piece.name, torch.full(piece.full_shape, torch.nan))
            insert_fragment(weight, piece, start, values)
    return full
