"""Training in a parallel layout, by the code that pretraining runs; and local ranks to run it on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from pipeline.certification.batches import random_batches, split
from pipeline.certification.comparison import Outcome
from pipeline.certification.reference import initial_noise
from pipeline.checkpoint.fragments import Fragment, insert_fragment
from pipeline.checkpoint.native import EMA
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.parallel import mesh as meshes
from pipeline.parallel.parallelize import LocalModel, parallelize
from pipeline.training.trainer import Trainer

#: Modules that take a rank seconds to import, the last one with DeepSpeed's engines. They are imported once, not once per rank.
PRELOAD = ["pipeline.certification.distributed", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"]
#: Entries of Fragment.tensors -> key of Outcome.tensors.
KINDS = {"weight": "weight", "exp_avg": "moment"}


def train_in_layout(config: RunConfig, spoil: str | None = None, *, after_step: Callable[[], object] = lambda: None) -> Outcome:
    """Train in the layout of the configuration on the CPU. Collective; every rank returns the same result.

    Args:
        config: of the run, valid for the world size.
        spoil: the name of a weight whose gradients tensor rank 0 scales by 1.01, to show that a wrong gradient is found.
        after_step: called after every step.
    """
    mesh = meshes.build_mesh(Layout.of(config, dist.get_world_size()), torch.device("cpu"))
    model = parallelize(config, mesh)
    for weight in model.pieces:
        model.materialize(weight)
    with torch.no_grad():
        for parameter, piece in (*model.pieces.items(), *model.fixed.items()):
            parameter += piece.narrow(initial_noise(piece.name, piece.full_shape))
    trainer = Trainer(config, mesh, model)
    if spoil and mesh.coordinates.tensor == 0:
        _scale_gradients(model, spoil, 1.01)
    losses, norms = [], []
    gradients: dict[str, torch.Tensor] = {}
    fixed = {piece.name for piece in model.fixed.values()}
    for step, (tokens, batch) in enumerate(random_batches(config)):
        mine, fields = split(tokens, batch, mesh.layout.batch_shards)[mesh.layout.batch_shard(mesh.coordinates)]
        loss, result = trainer.train(mine, fields, step=step)
        losses.append(float(loss))
        norms.append(float(result.gradient_norm))
        if not gradients:  # the first moments after one step
            moments = _gather(trainer.engine.fragments(), {"exp_avg": "moment"}, fixed)["moment"]
            gradients = {name: moment / (1 - config.optimizer.beta1) for name, moment in moments.items()}
        after_step()
    kinds = KINDS if config.training.ema is None else {**KINDS, EMA: "average"}
    return Outcome(losses, norms, {"gradient": gradients, **_gather(trainer.engine.fragments(), kinds, fixed)})


def _scale_gradients(model: LocalModel, name: str, factor: float) -> None:
    for parameter, piece in model.pieces.items():
        if piece.name == name:
            parameter.register_hook(lambda gradient: gradient * factor)


def _gather(fragments: Sequence[Fragment], kinds: dict[str, str], fixed: set[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the unsharded tensors of each kind by name. Collective. The weights in `fixed` have no moments; missing elements are nan."""
    owned = [
        (f.piece, f.start, {kind: f.tensors[kind].detach().clone() for kind in kinds if kind == "weight" or f.piece.name not in fixed})
        for f in fragments
        if f.replica == 0
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, owned)
    full: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in kinds.values()}
    for piece, start, tensors in (fragment for rank in gathered for fragment in rank):
        for kind, values in tensors.items():
            weight = full[kinds[kind]].setdefault(piece.name, torch.full(piece.full_shape, torch.nan))
            insert_fragment(weight, piece, start, values)
    return full


class RanksFailedError(Exception):
    """A local rank raised an exception, was killed, or did not end in time.

    Attributes:
        details: the traceback of the rank, empty without one.
    """

    def __init__(self, message: str, details: str = "") -> None:
        self.details = details
        super().__init__(message)


def preload() -> None:
    """Begin to import what the ranks need, in a server process that they are forked from. Returns at once."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    from multiprocessing import forkserver

    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def run_ranks(
    size: int,
    function: Callable[..., None],
    *arguments: object,
    seconds: float | None = None,
    watch: Callable[[], object] = lambda: None,
) -> None:
    """Run `function(*arguments)` on gloo ranks of this machine, without GPUs.

    Args:
        size: number of ranks.
        function: importable by its name; so are the arguments' types.
        arguments: of the function.
        seconds: time limit; None for none.
        watch: called every second while they run.

    Raises:
        RanksFailedError: see there. No rank is left running.
    """
    preload()
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(
            _serve_rank, (size, f"file://{folder}/store", function, arguments), nprocs=size, join=False, start_method="forkserver"
        )
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while not context.join(1.0 if deadline is None else min(1.0, max(0.1, deadline - time.monotonic()))):
                watch()
                if deadline is not None and time.monotonic() > deadline:
                    raise RanksFailedError(f"the ranks did not finish within {seconds:g} s: one of them may wait for another forever")
        except (ProcessRaisedException, ProcessExitedException) as error:
            details = str(error).strip()
            raise RanksFailedError(f"rank {error.error_index}: {details.splitlines()[-1]}", details) from None
        finally:
            for process in context.processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)


def _serve_rank(rank: int, size: int, store: str, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    meshes.init_distributed(rank, size, 0, store)
    function(*arguments)
    dist.barrier()
    meshes.destroy_process_group()
