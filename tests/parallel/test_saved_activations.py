"""The bytes that a block keeps for its backward pass with tensor and sequence parallelism, bounded by the shapes of what must be kept."""

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.common.errors import UserError
from pipeline.config.rules import check as rules
from pipeline.parallel.activation_checkpointing import Result, checkpoint_and_compile, fill, kind_of
from tests.world import Observed, configured, tiny, trainer

HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY, BATCH, SEQUENCE, RANKS = 32, 88, 4, 4, 67, 2, 8, 2
TOKENS, KV = BATCH * SEQUENCE, HIDDEN // HEADS * KV_HEADS
MODEL = tiny("model=llama-tiny", "model.layers=1", f"model.ffn_hidden={FFN}", f"model.kv_heads={KV_HEADS}", "parallel.tensor=2")

SELECTIVE = "training.activation_checkpointing=selective"

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
        gc.collect()  # tensors in reference cycles are not kept, but live until a collection
        sizes = allocated.live(x, y, *stage.parameters(), *stage.buffers())
    weights = [p for name, p in sorted(stage.named_parameters()) if ".0." in name]
    sums = [float(g.double().square().sum()) for g in torch.autograd.grad(y.square().sum(), (x, *weights))]
    return sum(sizes) + x.nbytes, sizes.count(4 * TOKENS * HIDDEN), sums


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.long), "selective"])
def test_a_block_keeps_what_is_sharded(worlds, recompute):
    settings = ("parallel.zero_stage=0", f"training.activation_checkpointing={recompute}")
    plain = worlds(2).run(kept, "parallel.zero_stage=0", "parallel.pipeline=1", "training.activation_checkpointing=full")
    for (found, whole, gradients), (_, _, expected) in zip(worlds(2).run(kept, *settings), plain, strict=True):
        assert whole == 0, "no input or product of full width is kept"
        assert found <= 4 * KEPT[recompute]
        assert gradients == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("share", [pytest.param(0, marks=pytest.mark.long), 0.7])
def test_a_block_keeps_at_most_its_budget(worlds, share):
    """Between full and selective recomputation; the gradients do not change."""
    smallest, largest = 4 * LOCAL, 4 * KEPT["selective"]
    budget = smallest + share * (largest - smallest)
    settings = ("parallel.zero_stage=0", SELECTIVE, f"training.activation_budget={budget / 1e6}")
    plain = worlds(2).run(kept, "parallel.zero_stage=0", "parallel.pipeline=1", "training.activation_checkpointing=full")
    for (found, _, gradients), (full, _, expected) in zip(worlds(2).run(kept, *settings), plain, strict=True):
        assert full <= found <= budget
        assert (found > full) == (share > 0), "the budget is used"
        assert gradients == pytest.approx(expected, rel=1e-5)


def grouped_products(call: Callable[[], object]) -> int:
    """How many grouped products a call computes."""
    found = []
    with Observed(lambda operator, *_: found.append(operator is torch.ops.aten._grouped_mm.default)):
        call()
    return sum(found)


def expert_products(mode: str) -> int:
    """How often a backward pass with a checkpoint has computed grouped products that its forward pass computed."""
    from pipeline.layers.expert_products import grouped_mm

    class Products(nn.Module):
        """Of gate and down, as on a GPU."""

        def forward(self, x, first, second, counts):
            return grouped_mm(grouped_mm(x, first, counts).sigmoid(), second, counts)

    block = Products()
    checkpoint_and_compile(block, mode, compiled=False)
    x, first, second = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((32, 16), (2, 24, 16), (2, 16, 24)))
    y = block(x, first, second, torch.tensor([20, 12]))
    return grouped_products(y.float().sum().backward) - 4  # the gradients of two inputs and two weights


def padded_products(mode: str) -> int:
    """As expert_products, of experts with equal numbers of rows."""
    from pipeline.layers.experts import Experts

    class Padded(Experts):
        """The whole layer as a block; on the meta device, products are those of GPUs."""

        forward = Experts.forward_padded

    block = Padded(2, 16, 24).to("meta", torch.bfloat16)
    checkpoint_and_compile(block, mode, compiled=False)
    y = block(torch.empty(2, 8, 16, dtype=torch.bfloat16, device="meta", requires_grad=True))
    return grouped_products(partial(y.backward, torch.empty_like(y))) - 6  # the gradients of three inputs and three weights


def test_selective_recomputation_keeps_grouped_products_and_flex_attention():
    import torch.nn.attention.flex_attention

    assert (padded_products("full"), padded_products("selective")) == (2, 0)
    assert (expert_products("full"), expert_products("selective")) == (1, 0), "the second one is not needed again"
    assert kind_of(torch.ops.higher_order.flex_attention) == "attention"
    assert kind_of(torch.ops.higher_order.cond) is None


def test_reductions_are_kept_before_attention_and_attention_before_products():
    results = [
        Result("product", 0, 10, 1e3),
        Result("attention", 0, 20, 4e3),
        Result("product", 1, 30, 6e3),
        Result("reduction", 0, 5, 0.0),
    ]
    assert [(r.kind, r.index) for r in fill(results, 36)] == [("reduction", 0), ("attention", 0), ("product", 0)]
    assert fill(results, 4) == []
    assert len(fill(results, 65)) == 4


def refusal(*overrides: str) -> str:
    """The message for a budget."""
    with pytest.raises(UserError) as caught:
        trainer(*MODEL, *overrides)
    return str(caught.value)


def test_a_budget_that_cannot_be_met_is_refused(worlds):
    message = worlds(2).run(refusal, "training.activation_budget=0.0001", SELECTIVE)[0]
    assert "is less than the input of a block, 0.0 MB, which is always kept" in message


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ((), "has no effect with training.activation_checkpointing=none"),
        (("model=mixtral-tiny", SELECTIVE), "is not supported by MoE models: the number of rows of an expert is not known before"),
        (("model=t5-tiny", SELECTIVE), "is not supported by encoder-decoders"),
    ],
)
def test_a_budget_that_has_no_effect_is_refused(overrides, rule):
    found = rules.violations(configured("stage=pretrain", "training.activation_budget=10", *overrides), 1)
    assert [v.rule for v in found if v.key == "training.activation_budget"] == [rule]
