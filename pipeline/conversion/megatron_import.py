"""The tensors of a Megatron-LM checkpoint: a file a rank (torch), or a distributed checkpoint of megatron-core (torch_dist)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.common.errors import UserError, Violation
from pipeline.conversion import safe_pickle
from pipeline.conversion.dcp_import import INDEX, DcpFolder
from pipeline.conversion.foreign_weights import RankFiles, Source

#: File beside the folders of the steps, which names the newest.
TRACKER = "latest_checkpointed_iteration.txt"
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_COMMON = "common.pt"
_FIX = "copy the whole folder of the checkpoint"
#: Before version 2, the rows of queries, keys and values have another order.
_OLDEST = 2.0


def step_folder(folder: Path) -> Path | None:
    """Return the folder of one step: the folder itself, that which the tracker file names, or the only one.

    Raises:
        UserError: the tracker names a folder that does not exist, or there are several and no tracker.
    """
    if _is_step(folder):
        return folder
    steps = sorted(path.name for path in folder.iterdir() if re.fullmatch(r"iter_\d+|release", path.name) and _is_step(path))
    if (folder / TRACKER).is_file():
        text = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
        name = f"iter_{int(text):07d}" if text.isdecimal() else text
        if name in steps:
            return folder / name
        rule = f"names {text!r}, and there is no {name}; there are {', '.join(steps) or 'none'}"
        raise UserError.of("stage.input", folder / TRACKER, rule, f"name one: stage.input={folder / (steps or ['iter_...'])[-1]}")
    if len(steps) > 1:
        rule = f"has no {TRACKER}, and the checkpoints {', '.join(steps)}"
        raise UserError.of("stage.input", folder, rule, f"name one: stage.input={folder / steps[-1]}")
    return folder / steps[0] if steps else None


def _is_step(folder: Path) -> bool:
    return is_distributed(folder) or any((path / name).is_file() for path in folder.glob("mp_rank_*") for name in _FILES)


def is_distributed(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint of megatron-core."""
    return (folder / INDEX).is_file() and (folder / _COMMON).is_file()


def arguments(state: Any, path: Path) -> dict[str, Any] | None:
    """Return the arguments of the training that a file has, None without.

    Raises:
        UserError: the file is not of Megatron-LM.
    """
    if not isinstance(state, dict):
        raise UserError.of("stage.input", path, "is not a state dict", "use a folder that Megatron-LM's save_checkpoint wrote")
    args = state.get("args")
    return None if args is None else dict(vars(args))


class MegatronFolder(RankFiles):
    """The tensors of a step with a file a rank. Layers are numbered over all pipeline stages, experts over all expert-parallel ranks.

    Attributes:
        arguments: those of the training, None if the files have none.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files of all ranks; tensors are mapped.

        Raises:
            UserError: files are missing, damaged, of several steps, or of a version whose order of weights is another one.
        """
        super().__init__(folder)
        paths = {path.name: path / name for path in sorted(folder.glob("mp_rank_*")) for name in _FILES if (path / name).is_file()}
        assert paths, f"{folder} has no ranks"
        first = next(iter(paths.values()))
        state = safe_pickle.load(first)
        self.arguments = arguments(state, first)
        self._files = _by_rank(paths, self.arguments or {}, folder)
        self._read()

    def files(self) -> list[Path]:
        """All files that are read."""
        return list(self._files.values())

    def _read(self) -> None:
        """Collect the tensors: virtual stages in their order, in each the pipeline ranks, in each the tensor-parallel ranks."""
        states = {rank: safe_pickle.load(path) for rank, path in self._files.items()}
        steps = {self._files[rank]: state.get("iteration") for rank, state in states.items()}
        if len(set(steps.values())) > 1:
            rule = "mixes files of several steps: " + ", ".join(f"{path.relative_to(self.path)} of {step}" for path, step in steps.items())
            raise UserError.of("stage.input", self.path, rule, "copy the files of one step into a folder of their own")
        oldest = min(float(state.get("checkpoint_version") or 0) for state in states.values())
        if oldest < _OLDEST:
            rule = f"has checkpoint_version {oldest:g}, in which the rows of queries, keys and values have another order"
            raise UserError.of("stage.input", self.path, rule, "load and save it with a current Megatron-LM")
        first = 0
        stages = sorted({pipeline for _, pipeline, _ in states})
        virtual = sorted(key for key in next(iter(states.values())) if re.fullmatch(r"model\d*", key))
        for chunk in sorted(virtual, key=lambda key: int(key.removeprefix("model") or 0)):
            for stage in stages:
                layers = 0
                for (tensor, pipeline, expert), state in sorted(states.items()):
                    if pipeline == stage:
                        content = state.get(chunk)
                        if not isinstance(content, dict):
                            raise UserError.of("stage.input", self._files[tensor, pipeline, expert], f"has no entry {chunk}", _FIX)
                        layers = self._add(content, first, expert, self._files[tensor, pipeline, expert])
                first += layers

    def _add(self, content: dict[str, Any], first: int, expert: int, path: Path) -> int:
        """Add the tensors of a rank; returns the number of layers that it has."""
        flat = dict(_flatten(content))
        local = _count(flat, r"\.layers\.(\d+)\.")
        experts = _count(flat, r"\.local_experts\.(\d+)\.|experts\.linear_fc\d\.weight(\d+)$")
        for name, value in flat.items():
            is_expert = ".experts." in name
            if expert and not is_expert:
                continue  # expert-parallel ranks hold the other weights alike
            full = re.sub(r"(\.layers\.)(\d+)(\.)", lambda match: f"{match[1]}{int(match[2]) + first}{match[3]}", name, count=1)
            if is_expert:
                offset = expert * experts
                full = re.sub(r"(local_experts\.|fc\d\.weight)(\d+)", lambda match: f"{match[1]}{int(match[2]) + offset}", full)  # noqa: B023
            self._shards[full].append((value, path))
        return local


def _by_rank(paths: dict[str, Path], args: dict[str, Any], folder: Path) -> dict[tuple[int, int, int], Path]:
    """Return (tensor, pipeline, expert rank) -> file.

    Raises:
        UserError: the files are not those of all ranks.
    """
    sizes = {key: int(args.get(f"{key}_model_parallel_size") or 1) for key in ("tensor", "pipeline", "expert")}
    if not args:  # as far as names tell: the last number is that of an expert rank only if the one before is there
        numbers = [[int(number) for number in name.split("_")[2:]] for name in paths]
        sizes = dict(zip(sizes, [max(column) + 1 for column in zip(*numbers, strict=False)] + [1, 1], strict=False))
    if (etp := args.get("expert_tensor_parallel_size")) not in (None, sizes["tensor"]) and sizes["expert"] > 1:
        rule = f"has expert_tensor_parallel_size={etp}, another one than tensor_model_parallel_size={sizes['tensor']}"
        raise UserError.of("stage.input", folder, rule, "save it with equal sizes, or as torch_dist")
    ranks = {}
    for tensor in range(sizes["tensor"]):
        for pipeline in range(sizes["pipeline"]):
            for expert in range(sizes["expert"]):
                name = f"mp_rank_{tensor:02d}"
                name += f"_{pipeline:03d}" if sizes["pipeline"] > 1 else ""
                name += f"_{expert:03d}" if sizes["expert"] > 1 else ""
                ranks[name] = tensor, pipeline, expert
    problems = [Violation("stage.input", folder / name, "is missing", _FIX) for name in ranks if name not in paths]
    problems += [Violation("stage.input", folder / name, f"is not of the layout {sizes}", _FIX) for name in paths if name not in ranks]
    UserError.raise_for(problems)
    return {ranks[name]: path for name, path in sorted(paths.items())}


def _flatten(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts, which older releases have."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        elif torch.is_tensor(value) and not name.endswith("_extra_state"):
            yield f"{prefix}{name}", value.detach()


def _count(names: dict[str, Any], pattern: str) -> int:
    """Return the number of layers or experts in names."""
    matches = (re.search(pattern, f".{name}") for name in names)
    return max((int(next(group for group in match.groups() if group)) + 1 for match in matches if match), default=0)


class MegatronDistributed(Source):
    """The tensors of a distributed checkpoint, one of which may be that of all layers, and of all experts.

    Attributes:
        arguments: those of the training, None if common.pt has none.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index and common.pt.

        Raises:
            UserError: a file is missing or damaged.
        """
        self.path = folder
        self._folder = DcpFolder(folder)
        self.arguments = arguments(safe_pickle.load(folder / _COMMON), folder / _COMMON)
        self._places: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name in self._folder.names():
            if not name.startswith(("optimizer", "chained_", "rng_state", "rerun_state")) and "_extra_state" not in name:
                self._places.update(_unstacked(name, tuple(self._folder.meta(name)[0].shape)))

    def files(self) -> list[Path]:
        """All files that are read."""
        return [self.path / _COMMON, *self._folder.files()]

    def names(self) -> list[str]:
        """Names of the tensors of single layers and experts."""
        return list(self._places)

    def origin(self, name: str) -> str:
        """The name of the stored tensor."""
        stored, index = self._places[name]
        return f"{stored}{[*index] if index else ''}"

    def meta(self, name: str) -> list[Tensor]:
        """Shape and dtype of a tensor."""
        stored, index = self._places[name]
        (meta,) = self._folder.meta(stored)
        return [meta[index] if index else meta]

    def shards(self, name: str) -> list[Tensor]:
        """The tensor."""
        stored, index = self._places[name]
        return [self._folder.read(stored, index)]


def _unstacked(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield the names of single layers and experts that a stored tensor has: name, (stored name, first indices)."""
    patterns: list[tuple[str, tuple[int, ...]]] = [(name, ())]
    for pattern, replacement in ((r"\.layers\.(?!\d)", ".layers.{}."), (r"\.experts\.experts\.(?!\d)", ".experts.local_experts.{}.")):
        if re.search(pattern, patterns[0][0]):
            size = shape[len(patterns[0][1])]
            patterns = [(re.sub(pattern, replacement.format(k), full), (*index, k)) for full, index in patterns for k in range(size)]
    yield from ((full, (name, index)) for full, index in patterns)
