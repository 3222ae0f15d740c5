"""The tensors of the files of a Hugging Face model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.common.errors import UserError, Violation
from pipeline.common.host_memory import release
from pipeline.conversion import mxfp4
from pipeline.models.huggingface_mapping import HuggingFaceMapping

#: Name of the files with the tensors that the class does not expect (HuggingFaceMapping.separate_weights).
SEPARATE = "mtp"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a stock model, a single file or numbered shards, and those of separate tensors.

    Raises:
        UserError: there are none, or some are missing.
    """
    return [*_files(folder, "model"), *_files(folder, SEPARATE, optional=True)]


def _files(folder: Path, stem: str, *, optional: bool = False) -> list[Path]:
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        if optional:
            return []
        fix = "save it again with transformers: AutoModel....from_pretrained(folder).save_pretrained(folder)"
        raise UserError.of("stage.input", folder, "contains neither model.safetensors nor model.safetensors.index.json", fix)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ValueError("weight_map must map tensors to names of files")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError.of("stage.input", index, f"is not readable: {error!r}", "download it again") from error
    missing = [folder / name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError([Violation("stage.input", path, "is missing", "download it again") for path in missing])
    return [folder / name for name in names]


class StockWeights:
    """The tensors of a stock model, by the names that current transformers uses. Those in MXFP4 have the names of what they stand for.

    Attributes:
        left_out: names of the tensors of other parts of the model (HuggingFaceMapping.wrapper).
    """

    def __init__(self, folder: Path, mapping: HuggingFaceMapping) -> None:
        """Read the headers of the files.

        Raises:
            UserError: a file is missing or not readable, or two tensors are the same weight under names of two releases.
        """
        self.path, self.left_out = folder, list[str]()
        self._stored: dict[str, tuple[Any, str]] = {}
        twice: list[Violation] = []
        for file in weight_files(folder):
            try:
                opened = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise UserError.of("stage.input", file, f"is not readable: {error}", "download it again") from error
            for name in opened.keys():  # noqa: SIM118 - the file is not a dict
                if mapping.wrapper is not None and mapping.wrapper.is_left_out(name):
                    self.left_out.append(name)
                    continue
                current = name
                for pattern, replacement in mapping.renamed:
                    current = re.sub(pattern, replacement, current)
                if current in self._stored:
                    other = self._stored[current][1]
                    rule = f"contains {current} twice: as {other} and as {name}"
                    twice.append(Violation("stage.input", folder, rule, "remove one of them from the files"))
                self._stored[current] = opened, name
        self._packed = mxfp4.packed_names(self._stored) if mapping.mxfp4 else []
        for name in self._packed:
            if name in self._stored:
                rule = f"contains {name} twice: also as {name}{mxfp4.BLOCKS} and {name}{mxfp4.SCALES}"
                twice.append(Violation("stage.input", folder, rule, "remove one of them from the files"))
        if twice:
            raise UserError(twice)

    def names(self) -> list[str]:
        """Names of all tensors."""
        parts = {f"{name}{end}" for name in self._packed for end in (mxfp4.BLOCKS, mxfp4.SCALES)}
        return [*(name for name in self._stored if name not in parts), *self._packed]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header of its file."""
        if name in self._packed:
            return mxfp4.shape_of(self.shape(f"{name}{mxfp4.BLOCKS}"), self.shape(f"{name}{mxfp4.SCALES}"))
        return tuple(self._slice(name).get_shape())

    def number_format(self, name: str) -> str:
        """Dtype of a tensor, in the notation of safetensors; of one in MXFP4, one that holds its values."""
        if name in self._packed:
            of_parts = {self.number_format(f"{name}{end}") for end in (mxfp4.BLOCKS, mxfp4.SCALES)} - {"U8"}
            return f"MXFP4 in {of_parts.pop()} instead of U8" if of_parts else "BF16"
        return str(self._slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """Value of a tensor, fp32."""
        if name in self._packed:
            blocks, scales = (self._read(f"{name}{end}", torch.uint8) for end in (mxfp4.BLOCKS, mxfp4.SCALES))
            return mxfp4.dequantized(blocks, scales)
        return self._read(name, torch.float32)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        opened, stored = self._stored[name]
        value: Tensor = opened.get_tensor(stored)
        copied = value.to(dtype, copy=True)  # a tensor without a copy shares the memory of the file with every other use of it
        release(value)
        return copied

    def _slice(self, name: str) -> Any:
        opened, stored = self._stored[name]
        return opened.get_slice(stored)
