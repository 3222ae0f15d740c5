"""FLOPs of a training step, and the peak FLOP/s of devices: MFU is their ratio over the time of the step."""

from __future__ import annotations

import torch

from pipeline.config import hardware as hardware_files
from pipeline.config.cluster import ClusterConfig
from pipeline.config.hardware import Peak
from pipeline.config.schema import PrecisionConfig
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.registry import family_of
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.training.buckets import is_primary_copy


def flops_per_token(model: ModelConfig, sequence_length: int, decoder_length: int | None = None) -> float:
    """Return forward and backward FLOPs per token of the full model, as Family.costs_per_token counts them."""
    return family_of(model).costs_per_token(model, sequence_length, decoder_length).total


def peak_flops(cluster: ClusterConfig, precision: PrecisionConfig, device: torch.device) -> Peak | None:
    """Return the dense peak of a device in the precision of the training, from conf/hardware/; None for a CPU or an unknown device.

    Args:
        cluster: its `hardware` names the file; otherwise the name of the device does.

    Raises:
        UserError: cluster.hardware names no file.
    """
    if device.type != "cuda":
        return None
    if cluster.hardware is not None:
        return hardware_files.load(cluster.hardware).peak(precision)
    hardware = hardware_files.of_device(torch.cuda.get_device_name(device))
    return None if hardware is None else hardware.peak(precision)


def count_model_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the full model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in registry.build(config).parameters())


def count_local_parameters(model: LocalModel) -> int:
    """Return the number of parameters that a rank holds before ZeRO, replicated ones included."""
    return sum(parameter.numel() for parameter in model.pieces)


def count_primary_parameters(model: LocalModel, mesh: Mesh) -> int:
    """Return the number of parameters whose primary copy a rank holds; over all ranks of a replica they sum to the full model."""
    return sum(parameter.numel() for parameter, piece in model.pieces.items() if is_primary_copy(piece, mesh))
