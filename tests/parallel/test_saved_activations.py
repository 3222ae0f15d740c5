"""The bytes that a block keeps for its backward pass with tensor and sequence parallelism, bounded by the shapes of what must be kept."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.world import tiny, trainer

HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY, BATCH, SEQUENCE, RANKS = 32, 88, 4, 4, 67, 2, 8, 2
TOKENS, KV = BATCH * SEQUENCE, HIDDEN // HEADS * KV_HEADS
MODEL = tiny("model=llama-tiny", "model.layers=1", f"model.ffn_hidden={FFN}", f"model.kv_heads={KV_HEADS}", "parallel.tensor=2")

#: Elements that a rank keeps (Korthikanti et al. 2022): widths within a region and tokens between regions are divided by RANKS.
LOCAL, INNER, HEAD_OUTPUT = TOKENS * HIDDEN // RANKS, TOKENS * FFN // RANKS, TOKENS * HIDDEN // RANKS
QKV = TOKENS * (HIDDEN + 2 * KV) // RANKS
ROTATED = TOKENS * (HIDDEN + KV) // RANKS
LOGSUMEXP, NORM_FACTORS = TOKENS * HEADS // RANKS, 2 * TOKENS // RANKS
KEPT = {
    # The block's input, outputs of the products, attention, and the two sums over ranks.
    "selective": LOCAL + QKV + HEAD_OUTPUT + LOGSUMEXP + 2 * INNER + 2 * LOCAL,
    # Of each norm the input, the normalized input and the output, which is the region's input; queries, keys and values; queries and keys
    # after rotation; attention; gate, activated gate, up and their product.
    "none": 6 * LOCAL + NORM_FACTORS + QKV + ROTATED + HEAD_OUTPUT + LOGSUMEXP + 4 * INNER,
}


class Allocated(TorchDispatchMode):
    """Remembers every storage that an operation returns, without keeping it alive."""

    def __init__(self):
        super().__init__()
        self._found = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def live(self, *without: torch.Tensor) -> list[int]:
        """Sizes of the storages that are still in use, other than those of some tensors."""
        known = {x.untyped_storage()._cdata for x in without}
        return [size for address, (storage, size) in self._found.items() if address not in known and not storage.expired()]


def kept(*overrides: str) -> tuple[int, int, list[float]]:
    """Run a block; returns the bytes that it keeps, how many tensors of full width are among them, and sums of its gradients."""
    _, mine = trainer(*MODEL, *overrides)
    stage = next(mine.model.stage_modules())
    x = torch.randn(BATCH, SEQUENCE // RANKS, HIDDEN, generator=torch.Generator().manual_seed(0), requires_grad=True)
    context = stage.attention_context({})
    with Allocated() as allocated:
        y = stage.blocks["0"](x, context)
        sizes = allocated.live(x, y, *stage.parameters(), *stage.buffers())
    y.square().sum().backward()
    weights = [p for name, p in sorted(stage.named_parameters()) if ".0." in name]
    sums = [float(g.double().square().sum()) for g in (x.grad, *(p.grad for p in weights))]
    return sum(sizes) + x.nbytes, sizes.count(4 * TOKENS * HIDDEN), sums


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_block_keeps_what_is_sharded(worlds, recompute):
    settings = ("parallel.zero_stage=0", f"training.activation_checkpointing={recompute}")
    plain = worlds(2).run(kept, "parallel.zero_stage=0", "parallel.pipeline=1", "training.activation_checkpointing=full")
    for (found, whole, gradients), (_, _, expected) in zip(worlds(2).run(kept, *settings), plain, strict=True):
        assert whole == 0, "no input or product of full width is kept"
        assert found <= 4 * KEPT[recompute]
        assert gradients == pytest.approx(expected, rel=1e-5)
