"""Reads pickled files of other tools without running code of theirs: every class that is created is named here, the rest is refused."""

from __future__ import annotations

import argparse
import io
import pickle
import types
from collections import OrderedDict
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch
from torch import serialization
from torch.distributed.checkpoint import filesystem, metadata, planner

from pipeline.common.errors import UserError


class Inert:
    """Stands in for an instance of a class of another package: keeps what it was made of, and has no behavior."""

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        """Return an instance whose `arguments` are those of the original class (of an enum: its value)."""
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self.arguments: tuple[Any, ...]

    def __setstate__(self, state: Any) -> None:
        self.state = state


#: Classes whose construction does nothing but store values. Both names of NumPy's module are in files.
_VALUES: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": PosixPath,
    "io.BytesIO": io.BytesIO,
    "_io.BytesIO": io.BytesIO,
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.dtypes.UInt32DType": np.dtypes.UInt32DType,
    **{f"numpy.{core}.multiarray._reconstruct": np.empty(0).__reduce__()[0] for core in ("core", "_core")},
}
#: Enums and settings that the checkpoints of Megatron-LM and DeepSpeed contain and that an import does not need, or needs the value of.
_INERT = (
    "signal.Signals",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.enums.ModelType",
    "megatron.model.enums.ModelType",
    "megatron.model.enums.PositionEmbeddingType",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
ALLOWED: list[Any] = [(value, name) for name, value in _VALUES.items()] + [(Inert, name) for name in _INERT]


def load(path: Path) -> Any:
    """Load a file of torch.save. Tensors are views of the file, which is mapped; pages are read when they are used.

    Raises:
        UserError: the file is damaged, has a format of before PyTorch 1.6, or contains objects that would run code.
    """
    try:
        with serialization.safe_globals(ALLOWED):
            if unsafe := serialization.get_unsafe_globals_in_checkpoint(str(path)):
                rule = f"contains {', '.join(sorted(unsafe))}: unpickling it may run code, and only named classes without effect are loaded"
                raise UserError.of(
                    "stage.input", path, rule, "save the weights again without these objects, or convert them to safetensors"
                )
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise UserError.of("stage.input", path, f"is not readable: {reason}", "copy it again: it may be truncated") from error


#: Classes of the index of torch.distributed.checkpoint, all of them plain data; megatron-core adds its plans.
_INDEX = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
            "StorageMeta",
        )
    },
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    **{(planner.__name__, name): getattr(planner, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): metadata.Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): planner.SavePlan,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
}


class _Refused(Exception):  # noqa: N818 - becomes a UserError
    """A class that is not allowed."""


class _IndexUnpickler(pickle.Unpickler):
    """Creates the classes of a DCP index only."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class, or a dtype of torch.

        Raises:
            _Refused: for anything else.
        """
        if (module, name) in _INDEX:
            return _INDEX[module, name]
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format):
            return value
        raise _Refused(f"contains {module}.{name}: unpickling it may run code, and only the classes of an index are loaded")


def load_index(path: Path) -> metadata.Metadata:
    """Load the file .metadata of a folder of torch.distributed.checkpoint.

    Raises:
        UserError: it is damaged, or contains something else than an index.
    """
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, metadata.Metadata):
            raise TypeError(f"is a {type(index).__name__}, not an index")
    except _Refused as error:
        raise UserError.of("stage.input", path, str(error), "save the checkpoint again with torch.distributed.checkpoint") from error
    except (OSError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError, pickle.UnpicklingError) as error:
        raise UserError.of("stage.input", path, f"is not readable: {error}", "copy the folder again: it may be truncated") from error
    return index
