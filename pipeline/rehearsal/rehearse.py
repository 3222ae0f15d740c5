"""The rehearsal of one rank: the real trainer and training loop on the driver without a GPU, for some steps, a validation and a save."""

from __future__ import annotations

import logging
import resource
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch

from pipeline.checkpoint.fragments import plan
from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.saver import SaveOutcome, Saver, SaveRequest
from pipeline.checkpoint.staging import LiveSource, Snapshot, Staging, staged_bytes
from pipeline.common.errors import UserError
from pipeline.config.layout import Coordinates, Layout
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.objective import IGNORE, Objective
from pipeline.data.load.objectives.registry import objective_of
from pipeline.layers.moe import filled_rows
from pipeline.layers.row_counts import VALUES
from pipeline.parallel import mesh as meshes
from pipeline.parallel import rehearsed_group
from pipeline.parallel.mesh import Mesh
from pipeline.planner.plan import JobPlan, hardware_of
from pipeline.rehearsal import graph_breaks, memory
from pipeline.rehearsal.calls import DeviceCalls
from pipeline.rehearsal.graph_breaks import GraphBreak
from pipeline.rehearsal.memory import BETWEEN, ByKind, Moments
from pipeline.rehearsal.observed import RECORDED, Observations, ObservedTrainer
from pipeline.rehearsal.start_up import StartUp
from pipeline.training import loop
from pipeline.training.batch_loader import BatchLoader
from pipeline.training.checkpoint_hooks import CheckpointHooks
from pipeline.training.metrics import Metrics
from pipeline.training.saves import Saves
from pipeline.training.step_control import StepControl
from pipeline.training.trainer import Trainer
from pipeline.training.validation import Validations
from pipeline.training.watchdog import Watchdog

log = logging.getLogger("pipeline")


@dataclass(frozen=True)
class Rehearsal:
    """What was seen of a rank.

    Attributes:
        moments: memory at the parts of the observed step, the validation and the save.
        kinds: the peak, by kind.
        seen: of the steps.
        state: bytes of weights and of optimizer state.
        saved: bytes that a save copies to the host.
        random: whether the tokens were random.
        start_up: of the rank.
        host_peak: most bytes of host memory of this process.
        unknown: functions that the driver does not know.
        breaks: of graphs of torch.compile -> count.
    """

    mesh: Mesh
    moments: Moments
    kinds: ByKind
    seen: Observations
    state: tuple[int, int]
    saved: int
    random: bool
    start_up: StartUp
    host_peak: int
    unknown: list[str]
    breaks: Counter[GraphBreak]


def fullest_rank(layout: Layout, planned: JobPlan) -> int:
    """Return the first rank of the pipeline stage that needs the most memory, as planned."""
    return layout.rank(Coordinates(planned.estimate.pipeline_rank, 0, 0, 0, 0))


def rehearse(config: RunConfig, world_size: int, rank: int, steps: int, outside: int, moments: Moments, imports: float = 0.0) -> Rehearsal:
    """Build one rank of a job and run steps, one more while a checkpoint is copied, and a validation.

    Args:
        rank: the rank.
        steps: number of steps.
        outside: bytes of the device that are not PyTorch's.
        moments: to which memory is noted, also if the rehearsal fails.
        imports: seconds that the imports of this process took.

    Raises:
        UserError: the data cannot be read.
        OutOfMemoryError: the rank does not fit on the device.
    """
    start_up, started = StartUp({"imports": imports}), time.perf_counter()
    device = meshes.init_rehearsed(rank, world_size)
    try:
        return _rehearse(config, Layout.of(config, world_size), device, steps, outside, moments, start_up, started)
    finally:
        meshes.destroy_process_group()  # the planner creates one of its own


def _rehearse(
    config: RunConfig, layout: Layout, device: torch.device, steps: int, outside: int, moments: Moments, start_up: StartUp, started: float
) -> Rehearsal:
    """Rehearse in the process group of the job, which is made since `started`; arguments and errors as of rehearse."""
    VALUES.missing = True
    calls = DeviceCalls(outside)
    torch.cuda.reset_peak_memory_stats()
    mesh = meshes.build_mesh(layout, device, config.training.timeout_minutes)
    start_up.seconds["groups"], started = time.perf_counter() - started, time.perf_counter()
    trainer = ObservedTrainer(config, mesh, moments, calls, observed=min(2, steps), timed=steps, hardware=hardware_of(config))
    VALUES.filled = filled_rows(trainer.model)
    saver = HostCopySaver(trainer, device, moments)
    moments.note("start")
    start_up.seconds["trainer"] = time.perf_counter() - started
    log.info("rehearse: built rank %d in %.1f s", mesh.rank, start_up.seconds["groups"] + start_up.seconds["trainer"])
    data, is_random = _data(config, mesh.rank, layout.world_size)
    alone = rehearsed_group.without_shared_memory(mesh.tensor)
    with closing(saver), tempfile.TemporaryDirectory() as folder, alone, graph_breaks.listening() as breaks:
        _train(config, trainer, data, saver, steps, Path(folder))
        state = memory.state_bytes(trainer)
        start_up.count()
    start_up.seconds["first step"] = trainer.seen.first_step
    kinds = memory.by_kind(moments, state, outside)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    unknown = calls.record.unknown()
    return Rehearsal(mesh, moments, kinds, trainer.seen, state, saver.bytes, is_random, start_up, host, unknown, breaks)


def _data(config: RunConfig, rank: int, world_size: int) -> tuple[Objective, bool]:
    """Return the training data, and whether it is random.

    Raises:
        UserError: it exists and cannot be read, or it does not exist and cannot be random.
    """
    objective = registry.objective_of(config)
    if objective.data_key != "data.tokens" or Path(config.data.tokens).is_dir():
        return registry.open_data(config, (rank, world_size))[0], False
    if not RandomTokens.supports(config):
        rule, fix = "has no random data", "name the files that the job reads"
        raise UserError.of("training.objective", config.objective, rule, fix)
    return RandomTokens(config), True


def _train(config: RunConfig, trainer: ObservedTrainer, data: Objective, saver: HostCopySaver, steps: int, folder: Path) -> None:
    """Run the training loop of the job for `steps` steps, RECORDED steps, a save and one step more, and validate one global batch."""
    saved = steps + RECORDED
    training = replace(config.training, steps=saved + 1, validate_every=0, validation_batches=1, epochs=None)
    checkpoint = replace(config.checkpoint, every=saved, every_minutes=0.0)
    tracking = replace(config.tracking, wandb="disabled")
    short = replace(config, run_dir=str(folder), training=training, checkpoint=checkpoint, tracking=tracking)
    state = TrainState(step=0, samples=0, updates=0)
    rank, watchdog, level = trainer.mesh.rank, Watchdog(training.timeout_minutes), log.level
    log.setLevel(logging.WARNING)  # losses and rates mean nothing here
    try:
        with Metrics(short, rank, state) as metrics:
            saves = Saves(short, trainer, data, metrics, watchdog, CheckpointHooks(), saver)
            validations = Validations(short, trainer, data, metrics.validation, watchdog.report)
            loader = BatchLoader(data, training, trainer.mesh, config.data.prefetch)
            loop.train(state, loader, trainer, [metrics, StepControl(short, rank), saves, validations], watchdog.report)
    finally:
        log.setLevel(level)


class HostCopySaver(Saver):
    """The part of AsyncSaver that uses the device.

    Args:
        trainer: whose state is saved.
        device: of the rank.
        moments: where memory is noted.

    Attributes:
        bytes: that are copied.
    """

    def __init__(self, trainer: Trainer, device: torch.device, moments: Moments) -> None:
        self._shares = plan([fragment.held() for fragment in trainer.engine.fragments()])
        self.bytes = staged_bytes([share.part for share in self._shares])
        self._staging = Staging([share.part for share in self._shares], device)
        self._moments = moments
        self._snapshot: Snapshot | None = None
        self._outcomes: list[SaveOutcome] = []

    def begin(self, request: SaveRequest) -> None:
        """See Saver."""
        self.before_update()
        self._moments.note(BETWEEN)
        sources = [LiveSource(share.part, request.fragments[share.fragment].tensors, share.first) for share in self._shares]
        self._snapshot = self._staging.begin(sources, lambda _: None)
        self._snapshot.queued.wait()
        self._moments.note("save")
        self._outcomes.append(SaveOutcome(request.step))

    def holds_weights(self) -> bool:
        """See Saver."""
        return self._snapshot is not None

    def before_update(self) -> None:
        """See Saver."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot.released.set()
            self._snapshot = None

    def poll(self) -> list[SaveOutcome]:
        """See Saver."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """See Saver."""
        self.before_update()

    def wait_for_commit(self) -> None:
        """See Saver."""

    def abandon(self, reason: str) -> None:
        """See Saver."""

    def close(self) -> None:
        """See Saver."""
        self.before_update()
        self._staging.close()


class RandomTokens(Objective):
    """Samples of random tokens with the arrays of the objective of a model: causal, masked, or encoder-decoder."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._kind = config, config.objective
        self.decoder_length = config.training.sequence_length if self._kind in ("pairs", "span_corruption", "encoder_decoder") else 0

    @classmethod
    def open_training(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self:  # noqa: ARG003 - see Objective
        """See Objective."""
        return cls(config)

    @classmethod
    def open_validation(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self | None:  # noqa: ARG003 - see Objective
        """See Objective."""
        return cls(config)

    @staticmethod
    def supports(config: RunConfig) -> bool:
        """Whether the objective is one whose data is token shards or pairs of texts."""
        return objective_of(config).data_key in ("data.tokens", "data.pairs.train")

    def fingerprint(self, config: RunConfig, consumed: int) -> str:  # noqa: ARG002 - see Objective
        """See Objective."""
        return "random"

    @property
    def parts(self) -> list[tuple[str, int]]:
        """See Objective: one global batch."""
        return [("", self._config.training.global_batch_size)]

    @property
    def identity(self) -> dict[str, str]:
        """See Objective."""
        return {"validation_data": "random", "tokenizer": ""}

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective."""
        training, model = self._config.training, self._config.model
        rows, length = len(indices), training.sequence_length
        generator = np.random.default_rng(int(indices[0]))

        def tokens(width: int) -> np.ndarray:
            return generator.integers(model.vocab_size, size=(rows, width), dtype=np.int64)

        documents = np.zeros((rows, length), np.int32)
        text = tokens(length + 1)
        if self._kind == "masked":
            targets = np.where(generator.random((rows, length)) < 0.15, text[:, 1:], IGNORE)
            arrays = {"tokens": text[:, :-1], "targets": targets, "documents": documents}
            if getattr(model, "next_sentence", False):
                arrays |= {"segments": np.zeros((rows, length), np.int64), "next_sentence": generator.integers(2, size=rows)}
            return arrays
        if self.decoder_length:
            return {"tokens": tokens(length), "targets": text[:, 1:], "decoder_tokens": text[:, :-1], "documents": documents}
        arrays = {"tokens": text[:, :-1], "targets": text[:, 1:]}
        return arrays | ({"documents": documents} if training.document_mask else {})
