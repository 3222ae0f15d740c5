"""The token embedding with tensor and sequence parallelism: its result, and what it communicates."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from pipeline.layers.embedding import Embedding
from pipeline.models import registry
from pipeline.models.registry import family_of
from pipeline.parallel import tensor_parallel
from pipeline.parallel.pieces import Piece, slice_weight
from tests.world import Observed, configured, tiny

RANKS, SEQUENCE = 2, 8


def counting(found: Counter[str]) -> Observed:
    """Count the functional collectives by name."""

    def count(operator, *_):
        if operator.namespace == "_c10d_functional" and "wait" not in str(operator):
            found[operator._schema.name.rpartition("::")[2]] += 1

    return Observed(count)


def embedded(model: str) -> tuple[dict[str, int], dict[str, int], list[float]]:
    """Run the embedding of a model on tensor ranks; its collectives forward and backward, and gaps to that of one process."""
    config = configured(*tiny(f"model={model}"))
    full, sharded = (registry.build(config.model).embed for _ in range(2))
    assert isinstance(full, Embedding)
    assert isinstance(sharded, Embedding)
    for name, weight in full.named_parameters():
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
    sharded.load_state_dict(full.state_dict())
    rank, group = dist.get_rank(), dist.group.WORLD
    piece = slice_weight("embed.tokens.weight", tuple(full.tokens.weight.shape), "vocab", {"tensor": (RANKS, rank), "expert": (1, 0)})
    sharded.tokens.weight = torch.nn.Parameter(full.tokens.weight.detach()[piece.start(0) :][: piece.shape[0]].clone())
    stage = torch.nn.ModuleDict({"embed": sharded})
    tensor_parallel.apply(stage, {sharded.tokens.weight: piece}, family_of(config.model).tensor_parallel, group, sequence=True)

    tokens = torch.randint(config.model.vocab_size, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    whole = full(tokens)
    factor = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2))
    (whole * factor).sum().backward()
    forward, backward = Counter(), Counter()
    with counting(forward):
        local = sharded(tokens)
    mine = slice(rank * SEQUENCE // RANKS, (rank + 1) * SEQUENCE // RANKS)
    with counting(backward):
        (local * factor[:, mine]).sum().backward()
    gaps = [float((local - whole[:, mine]).abs().max())]
    gradients = dict(full.named_parameters())
    for name, weight in sharded.named_parameters():
        expected = gradients[name].grad
        if name == "tokens.weight":
            expected = expected[piece.start(0) :][: piece.shape[0]]
        elif tensor_parallel.sums_over_tensor(Piece(f"embed.{name}", tuple(weight.shape)), sequence=True):
            dist.all_reduce(weight.grad)
        gaps.append(float((weight.grad - expected).abs().max()))
    return dict(forward), dict(backward), gaps


@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny", "bert-tiny", "transformer-tiny"])
def test_with_sequence_parallelism_the_lookup_is_reduced_to_the_ranks_tokens(worlds, model):
    """A reduce-scatter sends half of what an all-reduce sends. Positions, segments and the norm are those of the local tokens."""
    for forward, backward, gaps in worlds(RANKS).run(embedded, model):
        assert forward == {"reduce_scatter_tensor": 1}
        assert backward == {"all_gather_into_tensor": 1}
        assert max(gaps) < 1e-5
