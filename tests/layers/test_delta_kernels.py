"""flash-linear-attention is given what its kernels expect, and results are the delta rule's. A stand-in computes what its kernels do."""

import sys
from types import ModuleType

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.layers import delta_kernels
from pipeline.layers.delta_rule import chunked_delta_rule
from pipeline.parallel.parallelize import build_model, choose_delta_rule, fuses_delta_rule
from pipeline.planner.trace import trace
from tests.layers.test_gated_delta_net import DECAYS, inputs
from tests.world import composed


@pytest.fixture
def calls(monkeypatch):
    """Put a stand-in in the place of the package, and return the name and the dtypes of each call."""
    called = []

    def kernels(name, one_decay):
        def run(q, k, v, g, beta, *, scale, initial_state, output_final_state):
            assert scale == 1
            assert output_final_state
            called.append((name, q.dtype, g.dtype))
            g = g.unsqueeze(3) if one_decay else g
            heads_first = [x.transpose(1, 2).to(v.dtype) for x in (q, k, v, g, beta)]
            outputs, state = chunked_delta_rule(*heads_first, state=initial_state)
            return outputs.transpose(1, 2), state

        module = ModuleType(name)
        setattr(module, name.rpartition(".")[2].replace("gated", "chunk_gated").replace("kda", "chunk_kda"), run)
        return module

    for name, one_decay in (("fla.ops.gated_delta_rule", True), ("fla.ops.kda", False)):
        monkeypatch.setitem(sys.modules, name, kernels(name, one_decay))
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return called


@pytest.mark.parametrize("kind", ["alone", "documents", "state"])
@DECAYS
def test_kernels_have_the_results_of_the_plain_rule(calls, kind, decays):
    """Outputs, the last state and all gradients; a document begins with a decay that leaves nothing of the one before it."""
    given, options = inputs(150, decays=decays), {}
    if kind == "documents":
        options["segments"] = torch.tensor([0] * 40 + [1] * 30 + [2] * 5 + [3] * 75).expand(2, -1)
    if kind == "state":
        options["state"] = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(2))
    expected = chunked_delta_rule(*given, **options)
    actual = delta_kernels.fused_delta_rule(*given, dtype=torch.float32, **options)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(outputs.square().sum() + state.sum(), given) for outputs, state in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
    assert calls == [("fla.ops.gated_delta_rule" if decays == 1 else "fla.ops.kda", torch.float32, torch.float32)]


def test_kernels_compute_in_16_bits_with_decays_in_fp32(calls):
    outputs, _ = delta_kernels.fused_delta_rule(*inputs(20), dtype=torch.bfloat16)
    assert outputs.dtype == torch.bfloat16
    assert calls == [("fla.ops.gated_delta_rule", torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(
    "overrides, device, installed, fuses",
    [
        ((), "cuda", True, True),
        ((), "cuda", False, False),
        ((), "cpu", True, False),
        ((), "meta", False, True),
        (("precision=fp32",), "cuda", True, False),
        (("parallel.context=2",), "meta", True, False),
        (("training.delta_rule=plain",), "meta", True, False),
        (("training.delta_rule=fla",), "cuda", True, True),
    ],
)
def test_where_the_kernels_are_used(monkeypatch, overrides, device, installed, fuses):
    monkeypatch.setattr(delta_kernels, "installed", lambda: installed)
    config = composed("stage=plan", "model=qwen3-next-tiny", "precision=bf16", *overrides)
    assert fuses_delta_rule(config, torch.device(device)) == fuses


@pytest.mark.parametrize("device, installed", [("cpu", True), ("cuda", False)])
def test_kernels_that_are_asked_for_are_there(monkeypatch, device, installed):
    monkeypatch.setattr(delta_kernels, "installed", lambda: installed)
    config = composed("stage=evaluate", "model=qwen3-next-tiny", "precision=bf16", "training.delta_rule=fla")
    with pytest.raises(UserError, match=r"training\.delta_rule=fla: requires a GPU and the package flash-linear-attention"):
        choose_delta_rule(torch.nn.Module(), config, torch.device(device))


@pytest.mark.parametrize("installed, by", [(True, "the kernels of flash"), (False, "PyTorch's operators; flash-linear-attention has")])
def test_the_choice_is_logged(monkeypatch, caplog, installed, by):
    monkeypatch.setattr(delta_kernels, "installed", lambda: installed)
    config = composed("model=qwen3-next-tiny", "precision=bf16")
    with torch.device("meta"), caplog.at_level("INFO"):
        choose_delta_rule(build_model(config), config, torch.device("cuda"))
    assert f"linear attention (training.delta_rule=auto): {by}" in caplog.text


@pytest.mark.parametrize("model", ["qwen3-next-tiny", "kimi-linear-tiny"])
def test_plans_count_the_kernels_in_place_of_the_loop(model):
    """A block with linear attention has a small part of the operations, and the same products with its weights."""
    length = ("training.sequence_length=2048", "training.global_batch_size=8")
    traces = [
        trace(composed("stage=plan", f"model={model}", "precision=bf16", *length, f"training.delta_rule={rule}"))
        for rule in ("auto", "plain")
    ]
    fused, plain = (traced.parts["0"].operations for traced in traces)
    assert 3 * len(fused) < len(plain)
    names = [sorted({x.name for x in block if getattr(x, "name", "").endswith("weight")}) for block in (fused, plain)]
    assert names[0] == names[1] != []
