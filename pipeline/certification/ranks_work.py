"""What the local ranks of a certificate do: they train, continue what they saved, and compare layers, sums and validation losses."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.certification.batches import RandomBatch, Rows, random_batches, random_split, split, with_loss_scale
from pipeline.certification.comparison import Outcome
from pipeline.certification.copies import CopyLog
from pipeline.certification.layout_training import begin, gather, train_in_layout, train_steps
from pipeline.certification.module_outputs import first_module
from pipeline.certification.parts import PartReport
from pipeline.certification.reference import build_plain, micro_batches_of
from pipeline.certification.reference_loss import reference_loss
from pipeline.certification.state import Saving, resume_in_other_layout, resume_in_same_layout
from pipeline.config.layout import Layout
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.layers import delta_rule, largest_logits, loss, partial_attention, state_space
from pipeline.layers.batch import Batch
from pipeline.layers.experts import Experts
from pipeline.layers.fp8_products import FP8_PRODUCTS
from pipeline.parallel.mesh import gather_objects
from pipeline.parallel.parallelize import DTYPES
from pipeline.training import matrix_homes
from pipeline.training.trainer import Trainer
from pipeline.training.validation import validate

#: The file in which rank 0 counts its steps.
STEPS = "steps"
#: The file with what the run that continues in another layout has found.
ELSEWHERE = "elsewhere"
#: The file that names the first module whose output differs.
OUTPUTS = "outputs"
#: Rows of a chunk of the loss, tokens of a chunk of linear attention, queries of a block of QK-clip, scores of a chunk of ring attention,
#: and elements of a round of Muon.
CHUNK_ROWS, CHUNK_TOKENS, BLOCK_QUERIES, MOST_SCORES, ROUND_ELEMENTS = 5, 3, 5, 256, 1 << 11
#: The run directory of the run that is saved.
RUN = "run"


@dataclass(frozen=True)
class RankWork:
    """What the ranks do.

    Attributes:
        configs: what is trained, by name.
        folder: of the results.
        copies: whether the copies of the weights are compared.
        validation: whether the loss of a split is compared, in fp32.
        saved: name of the configuration whose run is saved and continued; None for none.
    """

    configs: Mapping[str, RunConfig]
    folder: str
    copies: bool = True
    validation: bool = True
    saved: str | None = None


@dataclass(frozen=True)
class RankResult:
    """What the ranks found with one configuration."""

    outcome: Outcome
    reports: list[PartReport]


def in_folder(config: RunConfig, folder: str) -> RunConfig:
    """Return the configuration with its run directory in a folder."""
    return dataclasses.replace(config, run_dir=str(Path(folder, RUN)))


def train_all(work: RankWork) -> None:
    """Train every configuration on this rank; rank 0 writes the results, and a byte for each finished step."""
    writes = dist.get_rank() == 0
    with several_parts(), open(Path(work.folder, STEPS) if writes else os.devnull, "ab", buffering=0) as steps:
        for name, config in work.configs.items():
            result = _train(work, name, in_folder(config, work.folder), lambda: steps.write(b"."))
            if writes:
                torch.save(result, f"{work.folder}/{name}")


@contextmanager
def several_parts() -> Iterator[None]:
    """Make parts of a fixed size small: what a job computes in several parts, a small one would compute in one, as the plain loop does."""
    sizes: tuple[tuple[ModuleType, str, object], ...] = (
        (loss, "chunk_rows", lambda *_: CHUNK_ROWS),
        (delta_rule, "CHUNK", CHUNK_TOKENS),
        (state_space, "CHUNK", CHUNK_TOKENS),
        (largest_logits, "BLOCK", BLOCK_QUERIES),
        (partial_attention, "MAX_SCORES", MOST_SCORES),
        (matrix_homes, "ELEMENTS_AT_ONCE", ROUND_ELEMENTS),
        (matrix_homes, "ELEMENTS_OF_ONE_RANK", ROUND_ELEMENTS),
    )
    before = [getattr(module, name) for module, name, _ in sizes]
    for module, name, size in sizes:
        setattr(module, name, size)
    try:
        yield
    finally:
        for (module, name, _), size in zip(sizes, before, strict=True):
            setattr(module, name, size)


def _train(work: RankWork, name: str, config: RunConfig, count: Callable[[], object]) -> RankResult:
    """Train one configuration."""
    copies, saved = work.copies, name == work.saved
    trainer = begin(config)
    log = CopyLog(trainer)
    saving = Saving(config, trainer) if saved else None
    calls = [*([log.after_step] if copies or saved else []), *([saving.after_step] if saving else [])]
    outcome = train_in_layout(config, trainer, [*calls, lambda *_: count()])
    reports = [log.report()] if copies else []
    reports += [validation_report(config, trainer, outcome.tensors["weight"])] if work.validation and name == "fp32" else []
    reports += [accumulation_report(config)] if config.precision.dtype != "fp32" else []
    reports += [compare_fp8_layers(config, trainer)] if config.precision.fp8 != "none" else []
    if saving is not None:
        saving.finish()
        reports.append(resume_in_same_layout(config, log))
    return RankResult(outcome, reports)


def continue_elsewhere(config: RunConfig, folder: str) -> None:
    """Continue the saved run in the layout of the configuration; rank 0 writes the report and the outcome."""
    result = resume_in_other_layout(in_folder(config, folder))
    if dist.get_rank() == 0:
        torch.save(result, f"{folder}/{ELSEWHERE}")


def compare_outputs(config: RunConfig, folder: str, tolerance: float) -> None:
    """Compare the outputs of the modules with those of the plain loop; rank 0 writes where the first one differs."""
    text = first_module(config, tolerance)
    if dist.get_rank() == 0:
        Path(folder, OUTPUTS).write_text(text)


def compare_fp8_layers(config: RunConfig, trainer: Trainer) -> PartReport:
    """Compare the names of the layers with 8-bit products on all stages with those of the plain model. Collective."""
    local = _names(trainer.model.stage_modules())
    actual = set().union(*gather_objects(local))
    expected = _names([build_plain(config, DTYPES[config.precision.dtype])])
    report = PartReport("precision", [f"{len(expected)} layers multiply 8-bit numbers, in the layout and in the plain loop"])
    report.failures += [f"{name} multiplies 8-bit numbers in the layout only" for name in sorted(actual - expected)]
    report.failures += [f"{name} multiplies 8-bit numbers in the plain loop only" for name in sorted(expected - actual)]
    return report


def _names(models: Iterable[nn.Module]) -> set[str]:
    """The names of the layers; a row-parallel layer, and experts on several ranks, are inside of a module that has their name."""
    return {
        name.removesuffix(".linear").replace(".experts.experts", ".experts")
        for model in models
        for name, module in model.named_modules()
        if type(module).__name__ == "Float8Linear" or (isinstance(module, Experts) and module.products is FP8_PRODUCTS)
    }


#: How many times as many micro-batches the second step has.
FACTOR = 4
#: Largest relative difference: rounding errors of fp32.
TOLERANCE = 1e-5


def accumulation_report(config: RunConfig) -> PartReport:
    """Train a step on few and a step on many equal micro-batches, and compare their gradients. Collective.

    Micro-batches of equal samples have equal gradients. A step of four times as many, each with a quarter of the weight, has the same
    gradient if sums are kept in fp32: gradients in a lower precision have few digits, and four is a power of two.
    """
    few, many = (_first_moments(config, factor) for factor in (1, FACTOR))
    report = PartReport("precision")
    if not any(bool(moment.any()) for moment in few.values()):
        report.not_covered.append("sums over micro-batches: the first step is skipped, since its gradients overflow")
        return report
    for name, moment in few.items():
        difference = float((many[name] - moment).norm() / moment.norm().clamp(min=torch.finfo(torch.float32).tiny))
        if not difference <= TOLERANCE:
            report.failures.append(
                f"the gradient of {name} depends on the number of equal micro-batches, by {difference:.1e}: their sum is not kept in fp32"
            )
    report.covered.append(f"sums over micro-batches: equal ones, and {FACTOR} times as many, have the same gradients")
    return report


def _first_moments(config: RunConfig, factor: int) -> dict[str, Tensor]:
    """Return Adam's first moments after a step whose micro-batches are equal on each rank, and `factor` times as many as in the run."""
    # fp16 rounds small gradients to multiples of 2^-24: with as large a loss scale, those of a micro-batch are the same numbers.
    precision = dataclasses.replace(config.precision, initial_loss_scale=config.precision.initial_loss_scale * factor)
    training = dataclasses.replace(config.training, global_batch_size=config.training.global_batch_size * factor)
    trainer = begin(dataclasses.replace(config, precision=precision, training=training))
    train_steps(trainer, [(0, _of_equal_parts(config, factor))], ())
    return gather(trainer.engine.fragments(), {OPTIMIZERS[config.optimizer.name].moment: "moment"}, trainer.model.fixed_names())["moment"]


def _of_equal_parts(config: RunConfig, factor: int) -> RandomBatch:
    """Return a global batch: that of the first step, in which every data rank has only its first micro-batch, repeated."""
    tokens, batch = random_batches(config, 1)[0]
    shards = Layout.of(config, dist.get_world_size()).batch_shards
    parts = []
    for rows, fields in split(tokens, batch, shards):
        count = micro_batches_of(config, rows)
        parts.append((split(rows, fields, count)[0], count * factor))
    return (
        torch.cat([first for (first, _), times in parts for _ in range(times)]),
        cast(Batch, {name: torch.cat([cast(Rows, fields)[name] for (_, fields), times in parts for _ in range(times)]) for name in batch}),
    )


#: Largest relative difference of the losses, in fp32.
VALIDATION_TOLERANCE = 1e-5


class _Split:
    """A split of random sequences, with the members of Objective that a validation uses."""

    sums = 0

    def __init__(self, tokens: Tensor, batch: Batch) -> None:
        self._rows = {"tokens": tokens, **cast(Rows, batch)}
        self.parts = [("random", len(tokens))]

    def validation_sample(self, _size: int | None) -> np.ndarray:
        """See Objective."""
        return np.arange(len(self._rows["tokens"]))

    def bytes_per_target(self, _indices: np.ndarray) -> None:
        """See Objective."""

    def measures(self, _sums: np.ndarray) -> dict[str, float]:
        """See Objective."""
        return {}

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective."""
        return {name: values[torch.from_numpy(indices)].numpy() for name, values in self._rows.items()}


def validation_report(config: RunConfig, trainer: Trainer, weights: Mapping[str, Tensor]) -> PartReport:
    """Compare the losses. Collective; the result of rank 0 counts.

    Args:
        config: of the small run, fp32.
        trainer: after training.
        weights: of the trainer, unsharded, by name.
    """
    rows = config.training.global_batch_size + 1  # the second batch has one sequence, and padding for the other ranks
    tokens, batch = random_split(config, rows)
    validation = validate(trainer, cast(Objective, _Split(tokens, batch)), config.training, batches=None, prefetch=1)
    report = PartReport("validation", [f"the loss of {rows} sequences with different numbers of targets, as a run computes it"])
    if dist.get_rank():
        return report
    model = build_plain(config, torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        batch.pop("next_sentence", None)
        expected = float(reference_loss(model, tokens, with_loss_scale(batch)))
    if not abs(validation.loss - expected) <= VALIDATION_TOLERANCE * abs(expected):
        report.failures.append(f"the loss of the split is {validation.loss:.7g} in the layout, {expected:.7g} over all targets")
    return report
