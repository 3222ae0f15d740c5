"""Refusal of a training run whose weights, gradients and optimizer state exceed the memory of this machine, before they are allocated."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.common import host_memory
from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config import phases
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.layers.nf4 import stored_bytes
from pipeline.parallel import device
from pipeline.parallel.parallelize import DTYPES, LocalModel, is_sharded_frozen, layers_in_4_bits, partition_model
from pipeline.parallel.pieces import Piece
from pipeline.planner.flops import count_model_parameters
from pipeline.planner.planned_buckets import PlannedBucket
from pipeline.planner.state_memory import ModelState, model_state, state_format_of


def check(config: RunConfig, ranks: Ranks) -> None:
    """Refuse a model whose state is larger than the memory that is available: of the GPU, or of the node, which its ranks share.

    Activations and communication buffers are not counted, nor padding: a run that passes may still need more (stage=plan predicts it).
    Where phases have other nodes, the layout is that of the first phase with so many ranks.

    Raises:
        UserError: with the bytes that are needed at least, and those that are available.
    """
    place = device.choose(ranks.local_rank)
    config = next((job for job, size in phases.alone(config, ranks.world_size) if size == ranks.world_size), config)
    state, frozen = _state(config, ranks)
    host = torch.device("cpu")
    if place.type == "cuda":
        _refuse_beyond(place, state.total + frozen, 1, config)
        _refuse_beyond(host, state.host, ranks.local_size, config)
    else:
        _refuse_beyond(host, state.total + frozen + state.host, ranks.local_size, config)


def _refuse_beyond(place: torch.device, per_rank: float, sharing: int, config: RunConfig) -> None:
    """Refuse what ranks that share a memory need of it in bytes, if it is not available."""
    needed, available = sharing * per_rank, available_bytes(place)
    if needed <= available:
        return
    model = f"{config.model.family} with {count_model_parameters(config.model):,} parameters"
    where = "of this GPU" if place.type == "cuda" else f"of this node, for its {sharing} ranks" if sharing > 1 else "of this machine"
    rule = f"weights, gradients and optimizer state need {needed / 1e9:,.1f} GB at least; {available / 1e9:,.1f} GB {where} are available"
    fix = "choose a smaller model, or more nodes with parallel.tensor, parallel.pipeline or parallel.zero_stage=3 (stage=plan tells)"
    raise UserError.of("model", model, rule, fix)


def _state(config: RunConfig, ranks: Ranks) -> tuple[ModelState, float]:
    """Return the least state of this rank, as if Muon updated all its trained weights, and the bytes of its frozen weights."""
    layout = Layout.of(config, ranks.world_size)
    model = partition_model(config, layout, ranks.rank)
    elements = sum(parameter.numel() for parameter in model.pieces if parameter not in model.frozen and parameter.requires_grad)
    trained = PlannedBucket("dense", layout.zero_sizes(experts=False)[0], elements, muon=True)
    return model_state([trained], state_format_of(config, layout)), _frozen_bytes(config, model, layout)


def _frozen_bytes(config: RunConfig, model: LocalModel, layout: Layout) -> float:
    """Return the bytes of the weights of a rank that are not trained, without the padding of ZeRO 3. The model is on the meta device.

    ZeRO 3 shards matrices over the data ranks, but those in 4 bits.
    """
    in_4_bits = {layer.weight for layer in layers_in_4_bits(config.lora, model)}
    itemsize = DTYPES[config.precision.dtype].itemsize

    def ranks(parameter: nn.Parameter, piece: Piece) -> int:
        sharded = config.parallel.zero_stage == 3 and is_sharded_frozen(parameter, piece, model)
        return layout.zero_sizes(experts=piece.is_sliced_along("expert"))[0] if sharded else 1

    return sum(
        stored_bytes(*p.shape) if p in in_4_bits else p.numel() * itemsize / ranks(p, piece)
        for p, piece in model.pieces.items()
        if p in model.frozen
    )


def available_bytes(place: torch.device) -> float:
    """Return the memory that can be allocated: of a GPU, or of this machine with its swap space, within --mem of its Slurm job."""
    return torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else host_memory.available_bytes()
