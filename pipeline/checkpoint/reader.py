"""Reads weights of a native checkpoint into tensors, without a GPU or a process group: full ones or parts, trained or averaged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint.contents import Contents, read_contents
from pipeline.checkpoint.data_reader import Counters
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.native import EMA, REMEDY, find
from pipeline.checkpoint.parts import Box
from pipeline.checkpoint.range_reader import RangeReader, RangeRequest
from pipeline.common.errors import DamagedCheckpointError, UserError, Violation
from pipeline.layers.nf4 import NF4Weight

__all__ = ["Checkpoint", "WantedRun", "find"]

#: PyTorch's dtype of the name of a dtype in safetensors.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
#: Bytes of a run, and of all runs, that are read into a buffer first: those of a tensor on a GPU, or of another dtype.
_STAGED_RUN, _STAGED = 64 << 20, 256 << 20


@dataclass(frozen=True)
class WantedRun:
    """Elements of a weight that are wanted.

    Attributes:
        shape: of the full weight.
        box: first and last + 1 index along each dim of the full weight.
        start: first element of the flattened box.
        tensors: kind -> flat tensor of the elements, written in place.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    tensors: dict[str, Tensor | NF4Weight]

    @classmethod
    def of(cls, fragment: Fragment) -> WantedRun:
        """The elements of a fragment."""
        return cls(fragment.piece.name, fragment.piece.full_shape, fragment.piece.box, fragment.start, fragment.tensors)


class Checkpoint:
    """A checkpoint on disk. Only what is used is read; each block that is read is verified against its checksum.

    Args:
        contents: of the checkpoint, if they have been read.

    Attributes:
        config: the configuration of the run that wrote it, as nested dictionaries.
        train_state: step, samples and updates of that run.
        data: fingerprint of the token shards.

    Raises:
        DamagedCheckpointError: the index is not readable.
    """

    def __init__(self, path: Path, contents: Contents | None = None) -> None:
        self.path = path
        self.contents = read_contents(path) if contents is None else contents
        self.index = self.contents.index
        self.config, self.train_state, self.data = self.index.config, self.index.train_state, self.index.data
        self._reader = RangeReader(path, self.contents)

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.train_state.step

    @property
    def counters(self) -> Counters:
        """What has been read."""
        return self._reader.counters

    def names(self) -> list[str]:
        """Names of all weights; a head tied to the embedding has no entry."""
        return sorted(self._reader.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""
        return self._reader.tensors[name].shape

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """Return a full weight, or one of its moments, fp32. Moments that the checkpoint does not have are zero.

        Args:
            kind: weight, exp_avg or exp_avg_sq.

        Raises:
            DamagedCheckpointError: the checkpoint does not have the weight, or its bytes are missing or damaged.
        """
        shape = self._shape(name)
        full = torch.empty(shape)
        self.read([WantedRun(name, shape, tuple((0, size) for size in shape), 0, {kind: full.view(-1)})])
        return full

    def has(self, name: str, kind: str) -> bool:
        """Whether the checkpoint has tensors of a kind for a weight; moments that it does not have are zero."""
        return name in self._reader.tensors and kind in self._reader.tensors[name].dtypes

    def ranges(self, name: str, kind: str, box: Box, run: tuple[int, int]) -> Tensor:
        """Return elements of a weight or one of its moments, flat, in the dtype in which they are stored.

        Args:
            kind: weight, exp_avg or exp_avg_sq.
            box: first and last + 1 index along each dim of the full weight.
            run: first element of the flattened box, and number of elements.

        Raises:
            DamagedCheckpointError: as tensor.
        """
        shape = self._shape(name)
        values = torch.empty(run[1], dtype=DTYPES[self._reader.tensors[name].dtypes.get(kind, "F32")])
        self.read([WantedRun(name, shape, box, run[0], {kind: values})])
        return values

    @torch.no_grad()
    def read(self, runs: Iterable[WantedRun]) -> None:
        """Read elements of weights into tensors, in place. Memory holds no more than 0.3 GB beside them.

        Raises:
            DamagedCheckpointError: a weight is missing or has another shape, or bytes are missing or damaged.
        """
        runs = list(runs)
        self._check_shapes(runs)
        requests: list[RangeRequest] = []
        staged: list[tuple[Tensor | NF4Weight, Tensor]] = []
        for run in runs:
            for kind, values in run.tensors.items():
                if (dtype := self._reader.tensors[run.name].dtypes.get(kind)) is None:
                    values.copy_(torch.zeros(1).expand(values.numel()))
                    continue
                for first, part in _in_parts(values, DTYPES[dtype]):
                    buffer = part
                    if _is_staged(part, DTYPES[dtype]):
                        buffer = torch.empty(part.numel(), dtype=DTYPES[dtype])
                        staged.append((part, buffer))
                    assert isinstance(buffer, Tensor)
                    requests.append(RangeRequest(run.name, kind, run.box, run.start + first, buffer.detach().view(torch.uint8).numpy()))
                    if sum(buffer.nbytes for _, buffer in staged) >= _STAGED:
                        self._read(requests, staged)
                        requests, staged = [], []
        self._read(requests, staged)

    def _read(self, requests: list[RangeRequest], staged: list[tuple[Tensor | NF4Weight, Tensor]]) -> None:
        """Read requests, and copy those that were read into a buffer first."""
        self._reader.read(requests)
        for values, buffer in staged:
            values.copy_(buffer)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._reader.tensors:
            raise DamagedCheckpointError([self._missing(name)])
        return self.shape(name)

    def _missing(self, name: str) -> Violation:
        return Violation("checkpoint", self.path, f"does not contain the weight {name}", REMEDY)

    def _check_shapes(self, runs: list[WantedRun]) -> None:
        """Refuse weights that the checkpoint does not have, or has with another shape."""
        violations = []
        for run in runs:
            if run.name not in self._reader.tensors:
                violations.append(self._missing(run.name))
            elif self.shape(run.name) != run.shape:
                rule = f"{run.name} has shape {list(self.shape(run.name))}, not {list(run.shape)}"
                violations.append(Violation("checkpoint", self.path, rule, "choose a checkpoint of the same model"))
        if violations:
            raise DamagedCheckpointError(violations)


def _is_staged(values: Tensor | NF4Weight, dtype: torch.dtype) -> bool:
    """Whether elements of a dtype cannot be read into the memory of a tensor."""
    return not isinstance(values, Tensor) or values.device.type != "cpu" or values.dtype != dtype or values.stride() != (1,)


def _in_parts(values: Tensor | NF4Weight, dtype: torch.dtype) -> Iterable[tuple[int, Tensor | NF4Weight]]:
    """First element and tensor of each part of a tensor; one that is read into a buffer first is divided."""
    if isinstance(values, Tensor) and _is_staged(values, dtype):
        step = _STAGED_RUN // dtype.itemsize
        return [(first, values[first : first + step]) for first in range(0, values.numel(), step)]
    return [(0, values)]


class AveragedCheckpoint(Checkpoint):
    """A checkpoint that is read with its averaged weights; a weight that has no average, such as a frozen one, is read as it is.

    Raises:
        UserError: it has no averaged weights.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path, checkpoint.contents)
        if not any(self.has(name, EMA) for name in self.names()):
            rule = f"requires averaged weights, and {self.path} has none: its run had no training.ema"
            raise UserError.of("stage.weights", EMA, rule, "set stage.weights=trained, or train with training.ema=0.999")

    def read(self, runs: Iterable[WantedRun]) -> None:
        """See Checkpoint."""
        mapped: list[WantedRun] = []
        for run in runs:
            averaged = self.has(run.name, EMA)
            if averaged and "weight" in run.tensors:
                mapped.append(replace(run, tensors={EMA: run.tensors["weight"]}))
            mapped.append(replace(run, tensors={kind: values for kind, values in run.tensors.items() if kind != "weight" or not averaged}))
        super().read(mapped)


def with_weights(checkpoint: Checkpoint, weights: str) -> Checkpoint:
    """Return a checkpoint with the weights that stage.weights names; raises as AveragedCheckpoint."""
    return AveragedCheckpoint(checkpoint) if weights == EMA else checkpoint


def settings_of_weights(weights: str) -> dict[str, str]:
    """Return what records and manifests of a stage say of stage.weights; nothing for the default, as before there was a choice."""
    return {"stage.weights": weights} if weights == EMA else {}
