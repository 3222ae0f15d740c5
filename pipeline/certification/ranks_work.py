"""What the local ranks of a certificate do."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from pipeline.certification import accumulation, validation
from pipeline.certification.comparison import Outcome
from pipeline.certification.copies import CopyLog
from pipeline.certification.fp8_layers import compare_fp8_layers
from pipeline.certification.layout_training import begin, train_in_layout
from pipeline.certification.module_outputs import first_module
from pipeline.certification.parts import PartReport
from pipeline.certification.state import Saving, resume_in_other_layout, resume_in_same_layout
from pipeline.config.schema import RunConfig
from pipeline.layers import delta_rule, largest_logits, loss, partial_attention
from pipeline.training import matrix_homes

#: The file in which rank 0 counts its steps.
STEPS = "steps"
#: The file that names the first module whose output differs.
OUTPUTS = "outputs"
#: Rows of a chunk of the loss, tokens of a chunk of linear attention, queries of a block of QK-clip, scores of a chunk of ring attention,
#: and elements of a round of Muon.
CHUNK_ROWS, CHUNK_TOKENS, BLOCK_QUERIES, MOST_SCORES, ROUND_ELEMENTS = 5, 3, 5, 256, 1 << 11
#: The run directory of the run that is saved.
RUN = "run"


@dataclass(frozen=True)
class Work:
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


def train_all(work: Work) -> None:
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


def _train(work: Work, name: str, config: RunConfig, count: Callable[[], object]) -> RankResult:
    """Train one configuration."""
    copies, saved = work.copies, name == work.saved
    trainer = begin(config)
    log = CopyLog(trainer)
    saving = Saving(config, trainer) if saved else None
    calls = [*([log.after_step] if copies or saved else []), *([saving.after_step] if saving else [])]
    outcome = train_in_layout(config, trainer, [*calls, lambda *_: count()])
    reports = [log.report()] if copies else []
    reports += [validation.report(config, trainer, outcome.tensors["weight"])] if work.validation and name == "fp32" else []
    reports += [accumulation.report(config)] if config.precision.dtype != "fp32" else []
    reports += [compare_fp8_layers(config, trainer)] if config.precision.fp8 != "none" else []
    if saving is not None:
        saving.finish()
        reports.append(resume_in_same_layout(config, log))
    return RankResult(outcome, reports)


def continue_elsewhere(config: RunConfig, folder: str) -> None:
    """Continue the saved run in the layout of the configuration; rank 0 writes the report and the losses."""
    result = resume_in_other_layout(in_folder(config, folder))
    if dist.get_rank() == 0:
        torch.save(result, f"{folder}/elsewhere")


def compare_outputs(config: RunConfig, folder: str, tolerance: float) -> None:
    """Compare the outputs of the modules with those of the plain loop; rank 0 writes where the first one differs."""
    found = first_module(config, tolerance)
    if dist.get_rank() == 0:
        Path(folder, OUTPUTS).write_text(found)
