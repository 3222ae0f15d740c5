"""Routers and experts compared with naive loops, with uneven loads, and their gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.layers.attention import AttentionContext
from pipeline.layers.expert_products import PRODUCTS, grouped_mm, loop_mm, rows_of
from pipeline.layers.experts import Experts
from pipeline.layers.fp8_products import FP8_PRODUCTS
from pipeline.layers.mask import Mask
from pipeline.layers.mlp import ClampedSwiGLU
from pipeline.layers.moe import MoE, _AddAuxLoss, moe_layers
from pipeline.layers.router import AuxLoss, Router
from pipeline.layers.row_counts import VALUES, counts_on_host
from pipeline.layers.token_permutation import drop_over_capacity, tokens_per_expert

HIDDEN, FFN, EXPERTS, TOP_K = 8, 12, 4, 2


def moe(*, seed=0, dtype=torch.float64, experts=EXPERTS, top_k=TOP_K, aux_loss=None, capacity_factor=None, **options):
    """A layer with random weights."""
    layer = MoE(
        Router(HIDDEN, experts, top_k, **options), Experts(experts, HIDDEN, FFN), aux_loss=aux_loss, capacity_factor=capacity_factor
    ).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.5)
    return layer


def tokens(batch=2, sequence=6, *, seed=1, dtype=torch.float64):
    return torch.randn(batch, sequence, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def naive(layer, x):
    """Every token through every expert, weighted by the router; zero for experts that are not selected."""
    routing = layer.router(x.flatten(0, 1))
    dense = torch.zeros_like(routing.probs).scatter_add(1, routing.experts, routing.weights).view(*x.shape[:2], -1)
    gate, up, down = layer.experts.gate, layer.experts.up, layer.experts.down
    inner = F.silu(torch.einsum("bth,efh->btef", x, gate)) * torch.einsum("bth,efh->btef", x, up)
    return torch.einsum("btef,ehf,bte->bth", inner, down, dense)


def value_and_gradients(function, layer, x):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = function(layer, x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 1000),
    st.integers(1, 3),
    st.integers(1, 7),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (4, 4), (8, 3)]),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
)
def test_a_moe_layer_is_the_dense_sum(seed, batch, sequence, sizes, scoring, normalize):
    layer = moe(seed=seed, experts=sizes[0], top_k=sizes[1], scoring=scoring, normalize=normalize, scaling_factor=1.5)
    x = tokens(batch, sequence, seed=seed)
    for ours, theirs in zip(value_and_gradients(MoE.__call__, layer, x), value_and_gradients(naive, layer, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def biased(*, capacity_factor=None, ranks=1, limit=0.4):
    """A layer of gpt-oss, with random weights."""
    layer = MoE(
        Router(HIDDEN, EXPERTS, TOP_K, logit_bias=True),
        Experts(EXPERTS, HIDDEN, FFN, activation=ClampedSwiGLU(limit, 1.702), bias=True),
        capacity_factor=capacity_factor,
    ).double()
    layer.experts.down_ranks = ranks
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64) * 0.5)
    return layer


def naive_biased(layer, x):
    """The formulas of transformers' GptOssMLP: a softmax over the selected logits, and every token through every expert."""
    experts, tokens = layer.experts, x.flatten(0, 1)
    logits = tokens @ layer.router.weight.T + layer.router.logit_bias
    chosen = logits.topk(TOP_K, dim=1)
    dense = torch.zeros_like(logits).scatter_add(1, chosen.indices, chosen.values.softmax(dim=1))
    gate = (torch.einsum("th,efh->tef", tokens, experts.gate) + experts.gate_bias).clamp(max=0.4)
    up = (torch.einsum("th,efh->tef", tokens, experts.up) + experts.up_bias).clamp(-0.4, 0.4)
    inner = (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    outputs = torch.einsum("tef,ehf->teh", inner, experts.down) + experts.down_bias / experts.down_ranks
    return (outputs * dense[..., None]).sum(dim=1).view(x.shape)


@pytest.mark.parametrize("parts", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_experts_with_biases_are_the_dense_sum(parts, ranks):
    """Also padded, where rows without a token have outputs that no token gets; a tensor rank adds its share of the last bias."""
    layer, x = biased(capacity_factor=EXPERTS / TOP_K if parts else None, ranks=ranks), tokens()
    layer.parts = parts
    for ours, theirs in zip(value_and_gradients(MoE.__call__, layer, x), value_and_gradients(naive_biased, layer, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("counts", [[3, 0, 4, 5], [0, 0, 0, 0], [2, 3, 0, 1]])
def test_rows_of_no_expert_do_not_reach_the_biases(counts):
    """Their gradients may be NaN."""
    biases = torch.randn(4, 6, requires_grad=True)
    rows = rows_of(biases, torch.tensor(counts), 12)
    used = sum(counts)
    expected = biases.repeat_interleave(torch.tensor(counts), dim=0)
    assert torch.equal(rows[:used], expected)
    assert (rows[used:] == 0).all()
    grad = torch.randn(12, 6)
    grad[used:] = torch.nan
    (wanted,) = torch.autograd.grad(expected, biases, grad[:used])
    torch.testing.assert_close(torch.autograd.grad(rows, biases, grad)[0], wanted)


@pytest.mark.parametrize(
    "options",
    [{}, {"capacity_factor": 0.7}, {"aux_loss": AuxLoss(0.3, 0.2, 0.1)}, {"scoring": "sigmoid", "correction_bias": True}],
)
def test_gradients_are_those_of_the_function(options):
    layer = moe(**options)
    aux_loss, layer.aux_loss = layer.aux_loss, AuxLoss()
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [0] * 6])
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def run(x, *_):
        y = layer(x, AttentionContext(Mask(documents=documents)))
        routing = layer.router(x.flatten(0, 1))
        return y, aux_loss.loss(routing, documents >= 0)

    assert torch.autograd.gradcheck(run, (tokens().requires_grad_(), *parameters), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 4, 5], [0, 0, 0, 12], [12, 0, 0, 0], [0, 0, 0, 0], [2, 3, 0, 1]])
def test_the_grouped_product_is_the_loop(counts, dtype):
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor(counts)
    used = int(counts.sum())
    x = torch.randn(12, 16, generator=generator).to(dtype)
    weights = torch.randn(4, 24, 16, generator=generator).to(dtype)
    results = []
    for product in (loop_mm, grouped_mm):
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = product(*inputs, counts)[:used]
        y.float().square().sum().backward()
        results.append([y, inputs[0].grad[:used], inputs[1].grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("counts", [[3, 0, 4, 5], [0, 0, 0, 12], [0, 0, 0, 0], [2, 3, 0, 1], None])
def test_fp8_products_are_those_of_bf16_within_the_rounding_of_8_bits(counts):
    """Output and both gradients, of experts with any number of rows (None: with equal numbers), whose scales differ."""
    generator = torch.Generator().manual_seed(0)
    shape, used = ((4, 10), 10) if counts is None else ((12,), sum(counts))
    scale = torch.logspace(-9, 3, 12)[:, None] if counts else torch.logspace(-9, 3, 4)[:, None, None]  # of rows, or of experts
    x, grad = ((torch.randn(*shape, size, generator=generator) * scale).bfloat16() for size in (32, 48))
    weights = torch.randn(4, 48, 32, generator=generator).bfloat16()
    if counts is not None:
        x[used:] = grad[used:] = torch.nan
    results = []
    for products in (PRODUCTS, FP8_PRODUCTS):
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = products.batched(*inputs) if counts is None else products.grouped(*inputs, torch.tensor(counts))
        y.backward(grad)
        rows = slice(None) if counts is None else slice(used)
        results.append([each.detach().double() for each in (y[rows], inputs[0].grad[rows], inputs[1].grad)])
    for right, found in zip(*results, strict=True):
        error, size = (each.flatten(1).norm(dim=1) for each in (found - right, right))  # of each row, or expert
        assert torch.all(error <= 2**-4 * size)
        assert not size.any() or error.any()


def test_undefined_rows_reach_nothing(monkeypatch):
    """Rows of no expert affect neither values nor gradients, whatever the matrix product leaves in them."""
    layer = moe(dtype=torch.float32, capacity_factor=0.5)
    x = tokens(dtype=torch.float32)
    right = value_and_gradients(MoE.__call__, layer, x)

    class Poisoned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, used):
            ctx.used = used
            rows = rows.clone()
            rows[used:] = torch.nan
            return rows

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            grad[ctx.used :] = torch.nan
            return grad, None

    forward = Experts.forward
    monkeypatch.setattr(
        Experts,
        "forward",
        lambda self, rows, counts: Poisoned.apply(forward(self, Poisoned.apply(rows, len(rows)), counts), int(counts.sum())),
    )
    for one, other in zip(value_and_gradients(MoE.__call__, layer, x), right, strict=True):
        torch.testing.assert_close(one, other)


def test_all_tokens_to_one_expert():
    layer = moe(top_k=1)
    with torch.no_grad():
        layer.router.weight.zero_()
    x = tokens()
    assert layer.router(x.flatten(0, 1)).experts.tolist() == [[0]] * 12, "ties go to the first expert"
    values = value_and_gradients(MoE.__call__, layer, x)
    torch.testing.assert_close(values[0], naive(layer, x))
    assert all((gradient[1:] == 0).all() for gradient in values[3:]), "experts without tokens have a gradient of zeros"


@pytest.mark.parametrize("groups", [1, 4])
def test_ties_go_to_the_lowest_index(groups):
    router = Router(HIDDEN, 64, 3, groups=groups, topk_group=min(groups, 2))
    torch.nn.init.zeros_(router.weight)
    assert (router(tokens().flatten(0, 1).float()).experts == torch.tensor([0, 1, 2])).all()


def test_padding_is_routed_to_no_expert():
    layer = moe(aux_loss=AuxLoss(1.0, 1.0, 1.0))
    x = tokens()
    documents = torch.tensor([[0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, -1]])
    y = layer(x, AttentionContext(Mask(documents=documents)))
    y.sum().backward()
    record = layer.take_record()
    assert (y[documents < 0] == 0).all()
    torch.testing.assert_close(y[documents >= 0], naive(layer, x)[documents >= 0])
    assert record[:EXPERTS].sum() == 9 * TOP_K
    assert record[EXPERTS + 1] == 0, "padding is not dropped"
    layer(x.where((documents >= 0).unsqueeze(2), 7.0), AttentionContext(Mask(documents=documents))).sum().backward()
    torch.testing.assert_close(layer.take_record(), record, msg="losses and statistics do not depend on the content of padding")
    nothing = layer(x, AttentionContext(Mask(documents=torch.full((2, 6), -1))))
    nothing.sum().backward()
    assert (nothing == 0).all()
    assert layer.take_record().isfinite().all()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 5), st.integers(0, 12))
def test_a_capacity_keeps_the_earliest(seed, rows, count, capacity):
    chosen = torch.randint(count + 1, (rows, 2), generator=torch.Generator().manual_seed(seed))
    kept, taken = drop_over_capacity(chosen, count, capacity), [0] * (count + 1)
    for before, after in zip(chosen.flatten().tolist(), kept.flatten().tolist(), strict=True):
        taken[before] += 1
        assert after == (before if taken[before] <= capacity else count)


def test_assignments_beyond_the_capacity_contribute_nothing():
    layer = moe(capacity_factor=0.5)
    with torch.no_grad():
        layer.router.weight.zero_()
    y = layer(tokens())
    y.sum().backward()
    assert (y.flatten(0, 1).abs().sum(dim=1) > 0).tolist() == [True] * 3 + [False] * 9, "ceil(0.5 * 24 / 4) = 3 tokens to experts 0 and 1"
    record = layer.take_record()
    assert record[:EXPERTS].tolist() == [3, 3, 0, 0]
    assert record[EXPERTS + 1].item() == pytest.approx(18 / 24)


def test_nothing_is_dropped_without_gradients():
    x = tokens()
    for parts in (0, 2):
        layer = moe(capacity_factor=0.25)
        layer.parts = parts
        with torch.no_grad():
            torch.testing.assert_close(layer(x), naive(layer, x))
        assert not torch.allclose(layer(x), naive(layer, x))


def test_groups_and_bias_affect_selection_but_not_weights():
    router = Router(2, 4, 2, scoring="sigmoid", correction_bias=True, groups=2, topk_group=1)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[2.0, 0], [-3.0, 0], [1.0, 0], [0.9, 0]]))
        router.bias.zero_()
    x = torch.tensor([[1.0, 0]])
    assert router(x).experts.tolist() == [[2, 3]], "the best expert is in the weaker group"
    router.bias.copy_(torch.tensor([0.0, 2.0, 0, 0]))
    routing = router(x)
    assert routing.experts.tolist() == [[1, 0]]
    scores = torch.tensor([-3.0, 2.0]).sigmoid()
    torch.testing.assert_close(routing.weights[0], scores / scores.sum())


def test_the_balance_losses_are_their_formulas():
    layer = moe(dtype=torch.float32)
    x = tokens(3, 5, dtype=torch.float32)
    routing = layer.router(x.flatten(0, 1))
    valid = torch.ones(3, 5, dtype=torch.bool)

    def balance_loss(rows):
        f = [sum((routing.experts[t] == e).sum() for t in rows) / (len(rows) * TOP_K) for e in range(EXPERTS)]
        p = [sum(routing.logits[t].softmax(0)[e] for t in rows) / len(rows) for e in range(EXPERTS)]
        return EXPERTS * sum(a * b for a, b in zip(f, p, strict=True))

    sequences = [range(5), range(5, 10), range(10, 15)]
    torch.testing.assert_close(AuxLoss(batch=2.0).loss(routing, valid), 2 * balance_loss(range(15)))
    torch.testing.assert_close(AuxLoss(sequence=3.0).loss(routing, valid), sum(map(balance_loss, sequences)))
    z = sum(row.exp().sum().log() ** 2 for row in routing.logits) / 15
    torch.testing.assert_close(AuxLoss(z=0.5).loss(routing, valid), 0.5 * z)


def test_the_batch_loss_is_that_of_transformers_mixtral_for_one_layer():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layer = moe(dtype=torch.float32)
    routing = layer.router(tokens(3, 5, dtype=torch.float32).flatten(0, 1))
    valid = torch.ones(3, 5, dtype=torch.bool)
    valid[1, 2:] = False
    theirs = load_balancing_loss_func((routing.logits,), EXPERTS, TOP_K, valid.long())
    torch.testing.assert_close(AuxLoss(batch=TOP_K).loss(routing, valid), theirs)


def test_aux_losses_affect_gradients_but_not_the_output():
    x, aux_loss = tokens(), AuxLoss(0.3, 0.2, 0.1)
    layer, bare = moe(aux_loss=aux_loss), moe()
    layer.loss_scale = 0.25
    assert torch.equal(layer(x), bare(x))
    with_loss = value_and_gradients(MoE.__call__, layer, x)
    routing_loss = lambda m, v: aux_loss.loss(m.router(v.flatten(0, 1)), torch.ones(2, 6, dtype=torch.bool))  # noqa: E731
    leaf = x.clone().requires_grad_()
    bare.zero_grad()
    (bare(leaf).square().sum() + 0.25 * routing_loss(bare, leaf)).backward()
    torch.testing.assert_close(with_loss[1], leaf.grad)
    torch.testing.assert_close(with_loss[2], bare.router.weight.grad)


def test_the_record_counts_backward_passes_once():
    from torch.utils.checkpoint import checkpoint

    layer = moe(aux_loss=AuxLoss(batch=1.0))
    x = tokens().requires_grad_()
    with torch.no_grad():
        layer(x)
    assert (layer.take_record() == 0).all()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    layer(x).sum().backward()
    record = layer.take_record()
    assert (layer.take_record() == 0).all()
    assert record[-1] == 2
    routing = layer.router(x.flatten(0, 1))
    torch.testing.assert_close(record[:EXPERTS], 2.0 * tokens_per_expert(routing.experts, EXPERTS))
    entropy = torch.distributions.Categorical(routing.probs).entropy().mean()
    torch.testing.assert_close(record[EXPERTS], 2 * entropy.float())
    assert list(moe_layers(torch.nn.ModuleList([layer]))) == [layer]


class Recorded(torch.nn.Module):
    """A product with a loss of its weights and a record, as a MoE layer has them; its record is small enough to be computed early."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, 3))
        self.register_buffer("record", torch.zeros(2))

    def forward(self, x):
        y, loss = x @ self.weight, self.weight.square().sum()
        record = torch.stack([y.detach().sum(), loss.detach()])
        return _AddAuxLoss.apply(y, loss, torch.tensor(0.5), record, self.record)


def test_the_record_of_a_compiled_layer_counts_micro_batches_in_flight():
    """Pipeline schedules run several forward passes before the backward pass of the first one. The partitioner is inductor's."""
    layer, x = Recorded(), torch.ones(2, 3)
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    for y in [compiled(x), compiled(2 * x)]:
        y.sum().backward()
    assert layer.record.tolist() == [18 + 36, 9 + 9]


@pytest.mark.parametrize("capacity_factor", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("padding", [False, True])
def test_padded_experts_are_those_of_the_same_capacity(capacity_factor, parts, padding):
    """They drop the same assignments, also where a capacity is no multiple of the parts; without a limit they are the dense sum."""
    x, documents = tokens(3, 5), torch.zeros(3, 5, dtype=torch.int32)
    if padding:
        documents[0, 3:] = documents[2] = -1
    context = AttentionContext(Mask(documents=documents)) if padding else None
    layer = moe(capacity_factor=capacity_factor, aux_loss=AuxLoss(batch=1.0))
    expected, record = value_and_gradients(lambda layer, x: layer(x, context), layer, x), layer.take_record()
    layer.parts = parts
    found = value_and_gradients(lambda layer, x: layer(x, context), layer, x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.equal(layer.take_record(), record)
    assert (record[EXPERTS + 1] > 0) == (capacity_factor < 1 or (capacity_factor == 1 and not padding)), "some are dropped"
    if not padding and capacity_factor == 4:
        torch.testing.assert_close(found[0], naive(layer, x))


def test_without_values_every_expert_gets_the_same_rows(monkeypatch):
    counts = torch.tensor([5, 0, 1])
    assert counts_on_host(counts, 6) == [5, 0, 1]
    assert counts_on_host(counts.to("meta"), 6) == [2, 2, 2]
    monkeypatch.setattr(VALUES, "missing", True)
    assert counts_on_host(counts, 6) == [2, 2, 2]
