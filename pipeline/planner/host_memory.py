"""Refusal of a training run whose weights, gradients and optimizer state exceed the memory of this machine, before they are allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.common import host_memory
from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.parallel import device
from pipeline.parallel.parallelize import partition_model
from pipeline.planner.flops import count_model_parameters
from pipeline.planner.state_memory import ModelState, frozen_bytes, model_state, state_format_of


@dataclass(frozen=True)
class _TrainedWeights:
    """The trained weights of a rank as one bucket, over all ranks that may shard them: see state_memory.Sharded.

    As if Muon updated all of them, so that the state is the least one.
    """

    elements: int
    ranks: int
    decays: bool = True
    muon: bool = True


def check(config: RunConfig, ranks: Ranks) -> None:
    """Refuse a model whose state is larger than the memory that is available: of the GPU, or of the node, which its ranks share.

    Activations and communication buffers are not counted, nor padding: a run that passes may still need more (stage=plan predicts it).

    Raises:
        UserError: with the bytes that are needed at least, and those that are available.
    """
    place = device.choose(ranks.local_rank)
    state, frozen = _state(config, ranks)
    host = torch.device("cpu")
    if place.type == "cuda":
        _refuse_beyond(place, state.total + frozen, 1, config)
        _refuse_beyond(host, state.host, ranks.local_size, config)
    else:
        _refuse_beyond(host, state.total + frozen + state.host, ranks.local_size, config)


def _refuse_beyond(place: torch.device, each: float, sharing: int, config: RunConfig) -> None:
    """Refuse what ranks that share a memory need of it in bytes, if it is not available."""
    needed, available = sharing * each, available_bytes(place)
    if needed <= available:
        return
    model = f"{config.model.family} with {count_model_parameters(config.model):,} parameters"
    where = "of this GPU" if place.type == "cuda" else f"of this node, for its {sharing} ranks" if sharing > 1 else "of this machine"
    rule = f"weights, gradients and optimizer state need {needed / 1e9:,.1f} GB at least; {available / 1e9:,.1f} GB {where} are available"
    fix = "choose a smaller model, or more nodes with parallel.tensor, parallel.pipeline or parallel.zero_stage=3 (stage=plan tells)"
    raise UserError.of("model", model, rule, fix)


def _state(config: RunConfig, ranks: Ranks) -> tuple[ModelState, float]:
    """Return the least state of this rank, and the bytes of its frozen weights."""
    layout = Layout.of(config, ranks.world_size)
    model = partition_model(config, layout, ranks.rank)
    elements = sum(parameter.numel() for parameter in model.pieces if parameter not in model.frozen and parameter.requires_grad)
    trained = _TrainedWeights(elements, layout.zero_sizes(experts=False)[0])
    return model_state([trained], state_format_of(config, layout)), frozen_bytes(config, model, layout)


def available_bytes(place: torch.device) -> float:
    """Return the memory that can be allocated: of a GPU, or of this machine with its swap space, within --mem of its Slurm job."""
    return torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else host_memory.available_bytes()
