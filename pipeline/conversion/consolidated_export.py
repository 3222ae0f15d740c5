"""Exports a checkpoint as one safetensors file with the names and shapes of this package, and params.json, which describes the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.weights import rounded
from pipeline.conversion import safetensors_file
from pipeline.conversion.export_files import ExportWriter, OutputFile, Written, digest_of

WEIGHTS, PARAMS = "consolidated.safetensors", "params.json"


def write(folder: Path, weights: MergedWeights, *, dtype: torch.dtype, writer: ExportWriter) -> int:
    """Write the weights and params.json, and return the number of parameters. Collective.

    Raises:
        UserError: a weight is too large for the dtype.
        CheckFailed: the file does not hold the weights of the checkpoint.
    """
    shapes = {name: tuple(weights.shape(name)) for name in sorted(weights.names())}
    parameters = sum(prod(shape) for shape in shapes.values())

    def store(path: Path, written: Written) -> tuple[None, str]:
        def tensor(name: str) -> Tensor:
            value = rounded(weights.tensor(name), dtype, name)
            written(name, digest_of([value]), value.nbytes)
            return value

        return None, safetensors_file.write(path, shapes, dtype, tensor, {"format": "pt"})

    def read(path: Path) -> Iterator[tuple[str, str]]:
        return ((name, digest_of([value])) for name, value in safetensors_file.tensors(path))

    writer.write(folder, [OutputFile(WEIGHTS, parameters * dtype.itemsize, store, read)])
    if writer.is_first:
        content = {"model": weights.config["model"], "step": weights.step, "dtype": str(dtype).removeprefix("torch.")}
        (folder / PARAMS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return parameters
