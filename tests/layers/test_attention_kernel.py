"""The choice of the attention kernel on every kind of device, and the contracts of the kernels that ring attention calls."""

import logging

import pytest
import torch
import torch._dynamo

from pipeline.layers import attention_kernel, flex, partial_attention
from pipeline.layers import gpu as gpus
from pipeline.layers.attention import plain
from pipeline.layers.attention_kernel import Case, automatic, case, choose, choose_partial, facts_of
from pipeline.layers.mask import Mask
from tests.world import Observed

BF16, FP32 = torch.bfloat16, torch.float32
AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER, VOLTA = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (7, 0)


def gpu(capability, head_dim=128, value_dim=None, dtype=BF16, **facts):
    """A case on a GPU."""
    return Case("cuda", dtype, head_dim, value_dim or head_dim, capability, **facts)


CHOICES = [
    # case, kernel of full attention, kernel of a step of the ring
    (gpu(HOPPER, flash_3=True), "flash_3", "flash"),
    (gpu(HOPPER), "cudnn", "flash"),
    (gpu(BLACKWELL, flash_3=True), "cudnn", "flash"),
    (gpu(AMPERE), "flash_2", "flash"),
    (gpu(AMPERE, flash_3=True), "flash_2", "flash"),
    (gpu(CONSUMER), "flash_2", "flash"),
    (gpu(HOPPER, 256), "flash_2", "flash"),
    (gpu(HOPPER, 320), "efficient", "unfused"),
    (gpu(ADA, 224), "efficient", "unfused"),
    (gpu(ADA, 224, grad=False), "flash_2", "unfused"),
    (gpu(HOPPER, 100), "flash_2", "unfused"),  # SDPA pads to a multiple of 8
    # Multi-head latent attention of DeepSeek: no kernel may need a (queries, keys) tensor.
    (gpu(HOPPER, 192, 128), "cudnn", "flash"),
    (gpu(BLACKWELL, 192, 128), "cudnn", "flash"),
    (gpu(HOPPER, 192, 128, flash_3=True), "flash_3", "flash"),
    (gpu(AMPERE, 192, 128), "flash_2", "flash"),
    (gpu(AMPERE, 192, 128, masked=True), "flex", "unfused"),
    (gpu(AMPERE, 64, 128), "efficient", "unfused"),
    # Deterministic: cuDNN has no such backward pass.
    (gpu(HOPPER, deterministic=True), "flash_2", "flash"),
    (gpu(BLACKWELL, 192, 128, deterministic=True), "flash_2", "flash"),
    (gpu(HOPPER, flash_3=True, deterministic=True), "flash_3", "flash"),
    # Documents, windows, prefixes, ALiBi; and biases of T5.
    (gpu(HOPPER, masked=True), "flex", "unfused"),
    (gpu(AMPERE, masked=True, dtype=FP32), "flex", "unfused"),
    (gpu(HOPPER, bias=True), "efficient", "unfused"),
    (gpu(HOPPER, bias=True, masked=True), "efficient", "unfused"),
    (gpu(HOPPER, 100, bias=True), "math", "unfused"),
    # Soft caps.
    (gpu(HOPPER, capped=True), "flex", "unfused"),
    (gpu(HOPPER, capped=True, masked=True, flash_3=True), "flex", "unfused"),
    (gpu(AMPERE, capped=True, dtype=FP32), "flex", "unfused"),
    (gpu(HOPPER, capped=True, dtype=torch.float64), "math", "unfused"),
    (Case("cpu", FP32, 64, 64, capped=True), "math", "unfused"),
    # Other dtypes, lengths and devices.
    (gpu(HOPPER, dtype=FP32), "efficient", "unfused"),
    (gpu(HOPPER, 30, dtype=FP32), "math", "unfused"),
    (gpu(HOPPER, dtype=torch.float64), "math", "unfused"),
    (gpu(HOPPER, dtype=torch.float64, masked=True), "math", "unfused"),
    (gpu(VOLTA, dtype=torch.float16), "efficient", "unfused"),
    (gpu(VOLTA), "math", "unfused"),
    (gpu(AMPERE, aligned=False), "efficient", "unfused"),
    (Case("cpu", FP32, 64, 64), "torch", "flash_cpu"),
    (Case("cpu", FP32, 192, 128), "torch", "flash_cpu"),
    (Case("cpu", FP32, 64, 64, masked=True), "torch", "unfused"),
    (Case("mps", BF16, 64, 64), "torch", "unfused"),
]


@pytest.mark.parametrize("given, full, partial", CHOICES, ids=str)
def test_the_rules(given, full, partial):
    assert choose(given) == full
    assert choose_partial(given) == partial


@pytest.mark.parametrize("capability", [VOLTA, AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER], ids=str)
def test_flash_attention_3_is_activated_on_hopper_alone(capability, monkeypatch):
    """It replaces PyTorch's flash operators, and the new ones raise an error on other GPUs."""
    activated = []
    monkeypatch.setattr(gpus, "of", lambda _: gpus.Gpu("a GPU", capability))
    monkeypatch.setattr(attention_kernel, "has_flash_3", lambda: activated.append(True) or True)
    assert case("cuda", 0, BF16, 128, 128, False, False, True, True).flash_3 == (capability == HOPPER)
    assert bool(activated) == (capability == HOPPER)


@pytest.mark.parametrize(
    "mask, window, masked, bias",
    [
        (Mask(), None, False, False),
        (Mask(causal=False), None, False, False),
        (Mask(), 16, False, False),  # as long as the sequence
        (Mask(), 3, True, False),
        (Mask(documents=torch.zeros(1, 16)), None, True, False),
        (Mask(prefix=torch.ones(1)), None, True, False),
        (Mask(slopes=torch.ones(2)), None, True, False),
        (Mask(bias=torch.zeros(1, 2, 16, 16)), None, False, True),
        (Mask(softcap=50.0), None, False, False),
    ],
    ids=str,
)
def test_the_facts_are_those_of_the_inputs(mask, window, masked, bias):
    q, k, v = torch.empty(1, 2, 16, 24, device="meta"), torch.empty(1, 1, 16, 24, device="meta"), torch.empty(1, 1, 16, 8, device="meta")
    assert case(*facts_of(q, k, v, mask, window)) == Case("meta", FP32, 24, 8, masked=masked, bias=bias, capped=mask.softcap is not None)
    with torch.no_grad():
        assert not case(*facts_of(q[:, :, :4], k, v, mask, None)).grad
    assert case(*facts_of(q[:, :, :4], k, v, mask, None)).aligned == (not mask.causal)


@pytest.mark.parametrize("kernel", ["flash_2", "efficient", "math"])
def test_a_chosen_kernel_computes_attention(kernel, caplog, monkeypatch):
    """With PyTorch's CPU kernels: padded values, repeated keys, fallbacks, gradients and one line of log; compiled without a break."""
    attention_kernel._LOGGED.clear()
    torch._dynamo.reset()  # compiled code has the choice as a constant
    monkeypatch.setattr(attention_kernel, "choose", lambda _: kernel)
    shapes = ((2, 4, 6, 24), (2, 2, 6, 24), (2, 2, 6, 16 if "flash" in kernel else 24))
    inputs = [torch.randn(*shape, generator=torch.Generator().manual_seed(0), requires_grad=True) for shape in shapes]
    expected = plain(*inputs, Mask())
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    with caplog.at_level(logging.INFO, "pipeline"):
        found = automatic(*inputs, Mask())
        automatic(*inputs, Mask())
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 2)
        compiled = torch.compile(lambda *x: automatic(*x, Mask()), backend="eager", fullgraph=True)(*inputs)
    torch.testing.assert_close((found, compiled), (expected, expected))
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), inputs), wanted, rtol=1e-4, atol=1e-5)
    (line,) = (record for record in caplog.records if record.name == "pipeline")
    assert kernel in line.message
    assert ("scores are allocated" in line.message) == (kernel == "math")


@pytest.mark.parametrize("kernel, device", [("flash", "meta"), ("flash_cpu", "cpu")])
@pytest.mark.parametrize("value_dim", [16, 8])
def test_contracts_of_the_flash_kernels(kernel, device, value_dim):
    """The views that the ring passes: the CUDA backward kernel ignores the strides of logsumexp and requires rows of stride 1."""
    batch, heads, kv_heads, tokens, half = 2, 4, 2, 8, 4
    dtype = BF16 if kernel == "flash" else FP32
    q = torch.randn(batch, tokens, heads, 16, device=device, dtype=dtype).transpose(1, 2)
    kv = torch.randn(batch, kv_heads, tokens, 16 + value_dim, device=device, dtype=dtype)
    k, v = kv[:, :, :half].split((16, value_dim), dim=3)
    out, grad = (torch.randn(batch, heads, tokens, value_dim, device=device, dtype=dtype) for _ in range(2))
    lse = torch.randn(batch, heads, tokens, device=device)
    rows = slice(half, tokens)
    calls = []
    with Observed(lambda operator, args, _: calls.append((operator.name(), args)) if "flash" in operator.name() else None):
        partial, partial_lse = partial_attention.flash_forward(kernel, q[:, :, rows], k, v, causal=False, scale=None)
        grads = partial_attention.flash_backward(
            kernel, grad[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows], causal=False, scale=None
        )
    assert partial.shape == (batch, heads, half, value_dim)
    assert partial_lse.shape == (batch, heads, half)
    assert [g.shape for g in grads] == [q[:, :, rows].shape, k.shape, v.shape]
    tensors = [(name, [x for x in args if isinstance(x, torch.Tensor)][:6]) for name, args in calls]
    (forward, inputs), (backward, (passed_grad, *qkv, passed_out, passed_lse)) = tensors
    assert ("for_cpu" in forward, "for_cpu" in backward) == (device == "cpu",) * 2
    for x in (*inputs[:3], *qkv):
        assert x.stride(3) == 1
    for x in (inputs[1], qkv[1], qkv[2]):
        assert x.shape[1] == kv_heads, "keys and values are not repeated for the query heads"
    assert passed_lse.is_contiguous()
    assert passed_grad.transpose(1, 2).is_contiguous(), "the layout (batch, queries, heads, value_dim)"
    assert passed_out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("capability", "bias", "first"), [(HOPPER, False, "cudnn"), (AMPERE, False, "flash"), (HOPPER, True, "efficient")])
def test_compiled_blocks_set_each_backend_once(monkeypatch, capability, bias, first):
    """PyTorch removes repeated backends in eager mode only; a list that is too long is written beyond the end of its own."""
    import torch.nn.attention

    given = []
    monkeypatch.setattr(torch.nn.attention, "_sdpa_kernel", lambda backends, set_priority=False: given.append((backends, set_priority)))
    monkeypatch.setattr(attention_kernel, "case", lambda *_: gpu(capability, bias=bias))
    q, k, v = torch.randn(3, 1, 2, 8, 128).unbind()
    mask = Mask(bias=torch.zeros(1, 2, 8, 8)) if bias else Mask()
    torch._dynamo.reset()
    torch.compile(lambda q, k, v: automatic(q, k, v, mask), backend="eager", fullgraph=True)(q, k, v)
    wanted = [[backend.name.lower() for backend in backends] for backends, priority in given if priority]
    assert wanted[0][0].startswith(first)
    assert all(len(set(backends)) == len(backends) for backends in wanted)


def test_a_ring_without_a_fused_kernel_is_announced_once(monkeypatch, caplog):
    monkeypatch.setattr(attention_kernel, "case", lambda masked: gpu(HOPPER, masked=masked))
    monkeypatch.setattr(attention_kernel, "_WARNED", set())
    with caplog.at_level(logging.WARNING, "pipeline"):
        assert attention_kernel.partial_kernel(False) == "flash"
        assert [attention_kernel.partial_kernel(True) for _ in range(2)] == ["unfused", "unfused"]
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "ring attention has no fused kernel for this mask, dtype or head width"
    ]
    assert "parallel.context_kind=ulysses" in caplog.text


@pytest.mark.parametrize("window", [None, 24], ids=["documents", "window"])
def test_flex_attention_in_compiled_blocks_takes_a_block_mask_that_was_made_outside(monkeypatch, window):
    """Other documents in each step, or a window: one graph, without a search for masked blocks, and the result of the formula."""
    graphs = []

    def record(graph, inputs):  # noqa: ARG001 - a compiler
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    block = torch.compile(lambda q, k, v, mask: flex.flex(q, k, v, mask, window=window), backend=record, fullgraph=True)
    made = []
    compute = flex._block_mask
    monkeypatch.setattr(flex, "_block_mask", lambda *arguments: made.append(1) or compute(*arguments))
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        documents = (torch.rand(2, 128, generator=generator) < 0.1).int().cumsum(1, dtype=torch.int32)
        q, k, v = torch.randn(3, 2, 2, 128, 16, generator=generator).unbind()
        mask = Mask(documents=documents if window is None else None)
        attention_kernel.prepare(flex.flex, mask, window, (2, 128, 128), documents.device)
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(block(q, k, v, mask), plain(q, k, v, mask, window=window), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1
    assert not any("sort" in operation for operation in graphs[0])
    assert len(made) == 2, "once a step"
