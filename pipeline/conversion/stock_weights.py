"""The tensors of the files of a Hugging Face model.

Matrices of experts may be in MXFP4, as in the files of gpt-oss: `NAME_blocks` and `NAME_scales` in place of `NAME`.
A row of a matrix is in groups of 32 numbers that share a scale (OCP Microscaling Formats 1.0, section 5.3). Each number has 4 bits (E2M1),
two of them a byte, the first one in the lower bits. A scale is a power of two whose exponent, plus 127, is a byte (E8M0). The files hold
the rows of our matrices, (output, input); transformers' parameters are transposed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.common.errors import UserError, Violation
from pipeline.common.host_memory import release
from pipeline.models.huggingface_mapping import HuggingFaceMapping

BLOCKS, SCALES = "_blocks", "_scales"
#: The numbers of 4 bits; the highest bit is the sign.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)])
_BIAS = 127
_BYTES = 16
#: Name of the files with the tensors that the class does not expect (HuggingFaceMapping.separate_weights).
SEPARATE = "mtp"


def packed_names(names: Collection[str]) -> list[str]:
    """Return the tensors that files hold in MXFP4, by their names without BLOCKS and SCALES."""
    stems = (name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS))
    return [stem for stem in stems if f"{stem}{SCALES}" in names]


def shape_of(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor, (experts, input, output), from those of its parts; that of the blocks if both do not match.

    Args:
        blocks: (experts, output, groups, 16).
        scales: (experts, output, groups).
    """
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != _BYTES:
        return blocks
    experts, outputs, groups, _ = blocks
    return experts, groups * _BYTES * 2, outputs


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the tensor, fp32 (experts, input, output), which holds every number of the format exactly; arguments as in shape_of, uint8."""
    numbers = torch.empty(*blocks.shape, 2)
    # An expert after the other: indices take eight bytes.
    for number, block, scale in zip(numbers, blocks, scales, strict=True):
        factor = torch.ldexp(torch.ones(scale.shape), scale.int() - _BIAS).unsqueeze(2)
        for place, bits in enumerate((block & 0x0F, block >> 4)):
            number[..., place] = _NUMBERS[bits.long()] * factor
    return numbers.flatten(2).transpose(1, 2)


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
    UserError.raise_for(Violation("stage.input", path, "is missing", "download it again") for path in missing)
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
        self._packed = packed_names(self._stored) if mapping.mxfp4 else []
        for name in self._packed:
            if name in self._stored:
                rule = f"contains {name} twice: also as {name}{BLOCKS} and {name}{SCALES}"
                twice.append(Violation("stage.input", folder, rule, "remove one of them from the files"))
        UserError.raise_for(twice)

    def names(self) -> list[str]:
        """Names of all tensors."""
        parts = {f"{name}{end}" for name in self._packed for end in (BLOCKS, SCALES)}
        return [*(name for name in self._stored if name not in parts), *self._packed]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header of its file."""
        if name in self._packed:
            return shape_of(self.shape(f"{name}{BLOCKS}"), self.shape(f"{name}{SCALES}"))
        return tuple(self._slice(name).get_shape())

    def number_format(self, name: str) -> str:
        """Dtype of a tensor, in the notation of safetensors; of one in MXFP4, one that holds its values."""
        if name in self._packed:
            of_parts = {self.number_format(f"{name}{end}") for end in (BLOCKS, SCALES)} - {"U8"}
            return f"MXFP4 in {of_parts.pop()} instead of U8" if of_parts else "BF16"
        return str(self._slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """Value of a tensor, fp32."""
        if name in self._packed:
            blocks, scales = (self._read(f"{name}{end}", torch.uint8) for end in (BLOCKS, SCALES))
            return dequantized(blocks, scales)
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
