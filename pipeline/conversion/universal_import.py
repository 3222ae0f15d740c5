"""DeepSpeed's universal checkpoints: weights, moments and step, as ds_to_universal.py makes them of the files of ZeRO 1 to 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.native import TrainState
from pipeline.common.errors import UserError, Violation
from pipeline.conversion import safe_pickle
from pipeline.conversion import universal_format as universal
from pipeline.conversion.foreign_weights import NamedTensors, Source
from pipeline.conversion.huggingface_import import ImportedWeights

_CONVERT = "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {0} --output_folder {0}_universal"
_AGAIN = "run deepspeed.checkpoint.ds_to_universal again, into a new folder"


def command(step_folder: Path) -> str:
    """Return the command that makes a universal checkpoint of a checkpoint of DeepSpeed's engine."""
    return _CONVERT.format(step_folder)


def step_folder(folder: Path) -> Path | None:
    """Return the universal checkpoint: the folder itself, the one that its file `latest_universal` names, or the only one.

    Raises:
        UserError: `latest_universal` names another folder, or there are several and no `latest_universal`.
    """
    if _is_universal(folder):
        return folder
    candidates = sorted(path for path in folder.iterdir() if _is_universal(path))
    if (latest := folder / universal.LATEST).is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        if (chosen := folder / tag) in candidates:
            return chosen
        rule = f"names {tag!r}, which is not a universal checkpoint: it has no folder {universal.ZERO}"
        fix = f"name one: stage.input={candidates[-1]}" if candidates else command(folder / (tag.removesuffix("_universal") or "TAG"))
        raise UserError.of("stage.input", latest, rule, fix)
    if len(candidates) > 1:
        rule = f"has no file {universal.LATEST}, and the universal checkpoints {', '.join(path.name for path in candidates)}"
        raise UserError.of("stage.input", folder, rule, f"name one: stage.input={candidates[-1]}")
    return candidates[0] if candidates else None


def _is_universal(folder: Path) -> bool:
    zero = folder / universal.ZERO
    return (zero / universal.OPTIMIZER).is_file() or any(zero.glob(f"*/{universal.FILES['weight']}"))


class UniversalFolder:
    """The files of a universal checkpoint. Tensors are mapped, and read when they are used.

    Attributes:
        weights: the fp32 weights, by the names of the module that DeepSpeed trained.
        state: steps and updates of the run. No sample counts as consumed, since the order of its data was another one.
    """

    def __init__(self, folder: Path) -> None:
        """Read what the files say of the run.

        Raises:
            UserError: a file is missing or damaged, or the parameters have different steps.
        """
        self.path = folder
        engine = _entries(next(iter(sorted(folder.glob(f"*{universal.MODEL_SUFFIX}"))), folder / universal.MODEL_FILES[0]))
        optimizer = _entries(folder / universal.ZERO / universal.OPTIMIZER)
        self._shapes = _shapes(engine)
        self.weights = _Tensors(self, "weight")
        if not isinstance(steps := engine.get("global_steps"), int):
            raise UserError.of("stage.input", folder, f"has no number of steps: global_steps={steps}", _AGAIN)
        self.state = TrainState(step=steps, updates=self._updates(optimizer, steps))

    def shaped(self, name: str, value: Tensor) -> Tensor:
        """Give a tensor of ZeRO 3, which is flat, the shape of the parameter."""
        shape = self._shapes.get(name)
        return value.view(shape) if shape is not None and value.dim() == 1 and value.numel() == shape.numel() else value

    def files(self) -> list[Path]:
        """All files of the checkpoint."""
        return sorted(path for path in self.path.rglob("*.pt") if path.is_file())

    def moments(self, weights: ImportedWeights, named: NamedTensors) -> dict[str, ImportedWeights]:
        """Return the moments of weights, by kind.

        Args:
            weights: read from `self.weights`.
            named: how these are named.

        Raises:
            UserError: a trained parameter has no moments, or of another shape; one violation each.
        """
        moments: dict[str, ImportedWeights] = {}
        problems: list[Violation] = []
        for kind, file in universal.FILES.items():
            if kind == "weight":
                continue
            source = _Tensors(self, kind)
            present = set(source.names())
            known = {name: original for name, original in named.originals.items() if original in present}
            tensors = NamedTensors(source, known)
            moments[kind] = weights.reading(tensors)
            where = self.path / universal.ZERO / "*" / file
            problems += [Violation("stage.input", where, problem, _FROZEN) for problem in weights.differences(tensors)]
        UserError.raise_for(problems)
        return moments

    def _updates(self, optimizer: dict[str, Any], steps: int) -> int:
        """Return the number of updates, by which Adam corrects its moments."""
        paths = sorted(self.path.glob(f"{universal.ZERO}/*/{universal.STEP}"))
        by_step = {_step(safe_pickle.load(path), path): path for path in paths}
        if not by_step:  # ZeRO 3
            states = (optimizer.get(universal.OPTIMIZER_STATE) or {}).get("state") or {}
            by_step = {_step(state["step"], self.path): self.path for state in states.values() if "step" in state}
        if len(by_step) != 1:
            have = ", ".join(f"{step} ({path.parent.name})" for step, path in sorted(by_step.items())[:3]) or "none"
            rule = f"needs one step of the optimizer, which is that of all parameters; it has {have}"
            raise UserError.of("stage.input", self.path, rule, "convert a checkpoint of Adam or AdamW, which all parameters share")
        (updates,) = by_step
        if not 0 <= updates <= steps:
            rule = f"has {updates} updates of the optimizer after {steps} steps of the engine"
            raise UserError.of("stage.input", self.path, rule, "use a checkpoint whose engine has loaded both or neither of them")
        return updates


_FROZEN = (
    "a frozen parameter has no moments: import the folder that ds_to_universal has converted, of which the weights are read; otherwise "
    "run it again"
)


class _Tensors(Source):
    """The tensors of a kind, by the names of their folders."""

    def __init__(self, folder: UniversalFolder, kind: str) -> None:
        self.path, self._folder = folder.path, folder
        self._file = universal.FILES[kind]
        zero = folder.path / universal.ZERO
        self._names = sorted(path.parent.relative_to(zero).as_posix() for path in zero.rglob(self._file))

    def names(self) -> list[str]:
        """Names of the parameters that have such a file."""
        return self._names

    def shards(self, name: str) -> list[Tensor]:
        """The tensor."""
        path = self.path / universal.ZERO / name / self._file
        content = safe_pickle.load(path)
        value = content.get(universal.PARAM) if isinstance(content, dict) else content  # ZeRO 3 writes the tensor alone
        if not isinstance(value, Tensor):
            raise UserError.of("stage.input", path, f"has no tensor {universal.PARAM}", _AGAIN)
        return [self._folder.shaped(name, value.detach())]


def _entries(path: Path) -> dict[str, Any]:
    """Read a file with entries.

    Raises:
        UserError: it is missing, damaged, or has none.
    """
    if not path.is_file():
        rule = "is missing, without which the universal checkpoint is incomplete"
        raise UserError.of("stage.input", path, rule, _AGAIN)
    if not isinstance(content := safe_pickle.load(path), dict):
        raise UserError.of("stage.input", path, "has no entries", _AGAIN)
    return content


def _shapes(engine: dict[str, Any]) -> dict[str, torch.Size]:
    """Return the shapes of the trained parameters, which the engine records for each group of the optimizer."""
    groups = engine.get(universal.PARAM_SHAPES) or []
    return {name: torch.Size(shape) for group in groups for name, shape in group.items()}


def _step(value: Any, path: Path) -> int:
    """Return a step, which is a number or a tensor.

    Raises:
        UserError: it is something else.
    """
    try:
        return int(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError.of("stage.input", path, f"has a step of the optimizer that is no number: {type(value).__name__}", _AGAIN) from error
