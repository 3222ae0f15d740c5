"""A checkpoint whose weights are the mean of those of other ones, in a run directory of its own: tools/checkpoint merge.

(Mean of the last checkpoints of a run: Izmailov et al. 2018, https://arxiv.org/abs/1803.05407; of runs that were fine-tuned from one model:
Wortsman et al. 2022, https://arxiv.org/abs/2203.05482.)

The optimizer's moments are averaged with the same weights, so that training continues without a restart of the optimizer. Step, samples,
updates, loss scale, configuration and data are those of the newest checkpoint: training continues at its sample.

Members have one model, tokenizer and kind of adapter. config.yaml, tokenizer and imported model are those of the newest one.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from pipeline.checkpoint import native, save
from pipeline.checkpoint.compatibility import fingerprint_of
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.lora_adapter import lora_of
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.atomic_files import atomic_file, atomic_folder, digest, make_folder
from pipeline.common.errors import UserError, Violation
from pipeline.common.progress import Progress
from pipeline.config.lora import is_adapter
from pipeline.conversion import imported
from pipeline.models import config_classes, registry
from pipeline.models.tensor_parallel_roles import role
from pipeline.parallel.pieces import Piece

log = logging.getLogger("pipeline")

_TOKENIZER = "checksum of the tokenizer"
_FIX = "merge checkpoints of one model, tokenizer and kind of adapter"
#: Settings of adapters that two checkpoints may differ in.
_FREE = ("adapter", "dropout")
#: Files and folders of a run directory.
CONFIG, TOKENIZER = "config.yaml", "tokenizer"
#: Elements that are averaged at a time, fp64.
CHUNK = 1 << 24
#: Bytes at which a file of the merged checkpoint is ended.
FILE_BYTES = 512 << 20


def check(checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse checkpoints of different models, tokenizers or adapters.

    Raises:
        UserError: with one violation per difference from the first checkpoint.
    """
    first, violations = checkpoints[0], []
    for other in checkpoints[1:]:
        differences = _differences(_settings(first), _settings(other))
        for key, (expected, actual) in differences.items():
            violations.append(Violation("PATH", other.path, f"has {key}={actual}; {first.path} has {key}={expected}", _FIX))
        names = set(first.names()) ^ set(other.names())
        if names and not differences:
            violations.append(Violation("PATH", other.path, f"has other weights than {first.path}: {', '.join(sorted(names)[:3])}", _FIX))
    UserError.raise_for(violations)
    tokenizers = {checkpoint.path: fingerprint_of(checkpoint.config, checkpoint.path) for checkpoint in checkpoints}
    if unknown := [path for path, tokenizer in tokenizers.items() if tokenizer is None]:
        log.warning("whether all members have the same tokenizer is not known: the data of %s is gone", unknown[0])


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """What members have in common: key -> value."""
    model, lora = config_classes.from_dict(checkpoint.config["model"]), dataclasses.asdict(lora_of(checkpoint.config))
    adapter = {name: value for name, value in lora.items() if name not in _FREE} if lora["rank"] else {"rank": 0}
    return {
        **{f"model.{name}": value for name, value in dataclasses.asdict(model).items()},
        **{f"lora.{name}": value for name, value in adapter.items()},
        _TOKENIZER: fingerprint_of(checkpoint.config, checkpoint.path),
    }


def _differences(expected: dict[str, Any], actual: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> both values, where they differ; the family alone if that differs, whose models have other keys."""
    differing = {key: (expected.get(key), actual.get(key)) for key in expected | actual if expected.get(key) != actual.get(key)}
    if None in differing.get(_TOKENIZER, ()):  # not known
        del differing[_TOKENIZER]
    if "model.family" in differing:
        return {"model.family": differing["model.family"]}
    if 0 in differing.get("lora.rank", ()):  # one has no adapter
        return {key: values for key, values in differing.items() if key == "lora.rank" or not key.startswith("lora.")}
    return differing


def find_complete(run_dir: Path, step: int, parent: dict[str, Any]) -> Path | None:
    """Return the merged checkpoint with this step and Index.parent if it is complete already.

    Raises:
        UserError: the directory has other checkpoints, or cannot be written.
    """
    complete, path = native.complete(run_dir), native.folder_of(run_dir, step)
    if not complete:
        make_folder(run_dir)
        return None
    if path in complete and native.read_index(path).parent == parent:
        return path
    rule = f"contains the checkpoints of another run, the newest of step {native.step_of(complete[-1])}"
    raise UserError.of("--output", run_dir, rule, "choose a new run directory")


def write_settings(newest: Checkpoint, run_dir: Path) -> dict[str, Any]:
    """Write what the stages read of a run directory beside its checkpoints, and return the configuration for its checkpoint."""
    source, config = newest.path.resolve().parent.parent, {**newest.config, "run_dir": str(run_dir)}
    tokenizer = dict(config.get("tokenizer", {}))
    if (source / TOKENIZER / "tokenizer.json").is_file():  # with the chat template of the run
        with atomic_folder(run_dir / TOKENIZER) as folder:
            shutil.copytree(source / TOKENIZER, folder, dirs_exist_ok=True)
        tokenizer["path"] = str(run_dir / TOKENIZER)
    imported.carry(newest.path, run_dir)
    with atomic_file(run_dir / CONFIG, "w") as handle:
        handle.write(OmegaConf.to_yaml(OmegaConf.create({**config, "tokenizer": tokenizer})))
    return config


@dataclass(frozen=True)
class MergeMember:
    """A checkpoint and its weight in the mean; the weights of all sources add up to 1."""

    checkpoint: Checkpoint
    weight: float


def weighted(paths: Sequence[Path], weights: Sequence[float] | None) -> list[MergeMember]:
    """Return checkpoints with their weights.

    Args:
        paths: of the checkpoints.
        weights: of each of them, above 0, of any sum; None for the plain mean.

    Raises:
        UserError: there are fewer than two, one is named twice, the numbers differ, or a weight is not above 0.
    """
    weights = [1.0] * len(paths) if weights is None else weights
    shown = ",".join(f"{weight:g}" for weight in weights)
    if len(paths) < 2:
        raise UserError.of("PATH", " ".join(map(str, paths)), "is one checkpoint, and a mean is of two or more", "name more, or --last N")
    if len(weights) != len(paths):
        rule = f"must have one weight for each of the {len(paths)} checkpoints, and has {len(weights)}"
        raise UserError.of("--weights", shown, rule, "write one for each PATH, in the same order")
    if not all(0 < weight < float("inf") for weight in weights):
        raise UserError.of("--weights", shown, "must be numbers above 0", "leave out checkpoints that do not count")
    _check_distinct(paths)
    return [MergeMember(Checkpoint(path), weight / sum(weights)) for path, weight in zip(paths, weights, strict=True)]


def _check_distinct(paths: Sequence[Path]) -> None:
    """Refuse a checkpoint that is named twice, or beside a copy of it: the mean would not be what the weights say.

    Raises:
        UserError: with one violation for each.
    """
    known: dict[str, Path] = {}
    violations = []
    for path in paths:
        if (same := known.setdefault(digest(path / native.INDEX), path)) is not path:
            rule = "is named twice" if same.resolve() == path.resolve() else f"is a copy of {same}"
            violations.append(Violation("PATH", path, rule, "name every checkpoint once; --weights gives one of them more weight"))
    UserError.raise_for(violations)


def newest(run_dir: Path, count: int, decay: float) -> list[Path]:
    """Return the newest checkpoints of a run, oldest first.

    Args:
        decay: as for decayed.

    Raises:
        UserError: the run has fewer checkpoints, or a number is not legal.
    """
    complete = native.complete(run_dir)
    if not 0 < decay <= 1:
        raise UserError.of("--decay", decay, "must be above 0 and at most 1", "set it to 1 for the plain mean")
    if count < 2 or count > len(complete):
        steps = ", ".join(str(native.step_of(path)) for path in complete) or "none"
        rule = "must be 2 or more" if count < 2 else f"is more than {run_dir} has (steps {steps})"
        fix = "set it to 2 or more" if count < 2 else "reduce it; checkpoint.keep and checkpoint.keep_every of a run keep more of them"
        raise UserError.of("--last", count, rule, fix)
    return list(map(native.with_index, complete[-count:]))


def decayed(count: int, decay: float) -> list[float]:
    """Return the weights of checkpoints, oldest first: that of one is `decay` times that of the next newer one."""
    return [decay**age for age in reversed(range(count))]


def merge(sources: Sequence[MergeMember], run_dir: Path, *, file_bytes: int = FILE_BYTES) -> Path:
    """Write the mean of checkpoints as the only checkpoint of a new run directory, and return its path.

    Memory holds a file, or one weight with its moments if that is larger, fp32, and CHUNK elements of every source. What is complete is not
    written again.

    Args:
        file_bytes: size at which a file of the checkpoint is ended.

    Raises:
        UserError: the checkpoints are of different models, tokenizers or adapters; or run_dir has another content.
    """
    checkpoints = [source.checkpoint for source in sources]
    check(checkpoints)
    newest = max(reversed(checkpoints), key=lambda checkpoint: checkpoint.step)  # of equal steps, the one that is named last
    members = [{"path": str(s.checkpoint.path.resolve()), "step": s.checkpoint.step, "weight": s.weight} for s in sources]
    parent = {"path": str(newest.path.resolve()), "step": newest.step, "how": "merge", "members": members}
    if (complete := find_complete(run_dir, newest.step, parent)) is not None:
        log.info("%s is complete, nothing to do", complete)
        return complete
    kinds = _kinds(checkpoints)
    config = write_settings(newest, run_dir)
    index = native.Index(newest.train_state, config, newest.data, parent=parent)
    elements = {name: torch.Size(newest.shape(name)).numel() for name in newest.names()}
    with Progress(sum(elements.values()), "merge", "elements", every=10.0) as progress:
        path = save.save_full(run_dir, index, _fragments(sources, kinds, elements, progress), file_bytes)
    log.info("wrote %s, the mean of %s", path, ", ".join(f"{s.weight:.4g} x {s.checkpoint.path}" for s in sources))
    return path


def _kinds(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """The kinds of tensors that all checkpoints have; others are announced."""
    kinds = dict.fromkeys(kind for checkpoint in checkpoints for kind in checkpoint.index.kinds)
    for kind in kinds:
        if missing := [checkpoint.path for checkpoint in checkpoints if kind not in checkpoint.index.kinds]:
            log.warning("%s: %s has none, so the merged checkpoint has none either", kind, missing[0])
    return [kind for kind in kinds if all(kind in checkpoint.index.kinds for checkpoint in checkpoints)]


def _fragments(sources: Sequence[MergeMember], kinds: Sequence[str], elements: dict[str, int], progress: Progress) -> Iterator[Fragment]:
    """Yield every weight with its kinds of tensors, merged when it is used."""
    config = sources[0].checkpoint.config
    lora, table = lora_of(config), registry.family_of(config_classes.from_dict(config["model"])).tensor_parallel
    for name, count in elements.items():
        shape = sources[0].checkpoint.shape(name)
        stored = [kind for kind in kinds if all(source.checkpoint.has(name, kind) for source in sources)]
        is_base = bool(lora.rank) and not is_adapter(name) and not lora.saves(name)
        tensors: dict[str, Any] = {kind: _mean(sources, name, shape, kind, same=is_base) for kind in stored}
        yield Fragment(Piece(name, shape, role=role(table, name)), 0, tensors)
        progress.advance(count, name)


def _mean(sources: Sequence[MergeMember], name: str, shape: tuple[int, ...], kind: str, *, same: bool) -> Tensor:
    """Return the mean of a tensor of all sources, flat: summed in fp64, rounded once to the dtype in which all have it, or to fp32.

    Raises:
        UserError: the tensors must be the `same`, and are not.
    """
    box = tuple((0, size) for size in shape)
    whole = torch.Size(shape).numel()
    parts: list[Tensor] = []
    for first in range(0, whole, CHUNK):
        run = (first, min(CHUNK, whole - first))
        read = partial(Checkpoint.ranges, name=name, kind=kind, box=box, run=run)
        values = [read(source.checkpoint) for source in sources]
        if same:
            for source, other in zip(sources[1:], values[1:], strict=True):
                if not torch.equal(other, values[0]):
                    rule = f"has adapters of another base than {sources[0].checkpoint.path}: {name} differs"
                    raise UserError.of("PATH", source.checkpoint.path, rule, "merge checkpoints of adapters with one base")
        total = torch.zeros(run[1], dtype=torch.float64)
        for source, value in zip(sources, values, strict=True):
            total.add_(value.double(), alpha=source.weight)
        dtypes = {value.dtype for value in values}
        parts.append(total.to(dtypes.pop() if len(dtypes) == 1 else torch.float32))
    return torch.cat(parts) if len(parts) != 1 else parts[0]
