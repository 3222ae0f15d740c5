"""Adapters of routed experts compute what experts with merged weights compute, and have the gradients of those weights."""

import pytest
import torch

from pipeline.layers.experts import Experts
from pipeline.layers.lora import LoRAExperts, LoraSpec, merged, without_adapters

EXPERTS, HIDDEN, FFN = 3, 8, 12
SPECS = {"gate": LoraSpec(2, 4.0), "down": LoraSpec(3, 1.5)}
COUNTS = torch.tensor([4, 0, 5])


def experts() -> tuple[LoRAExperts, Experts]:
    """Experts with adapters, and such without that have the merged weights, fp64."""
    torch.manual_seed(0)
    base = Experts(EXPERTS, HIDDEN, FFN)
    for weight in base.parameters():
        torch.nn.init.normal_(weight)
    adapted, plain = LoRAExperts(base, SPECS).double(), Experts(EXPERTS, HIDDEN, FFN).double()
    with torch.no_grad():
        for name, weight in base.named_parameters():
            value = weight
            if name in SPECS:
                adapter = adapted.lora[name]
                torch.nn.init.normal_(adapter.a)
                torch.nn.init.normal_(adapter.b)
                value = weight + SPECS[name].alpha / SPECS[name].rank * torch.einsum("eor,eri->eoi", adapter.b, adapter.a)
            plain.get_parameter(name).copy_(value)
    return adapted, plain


@pytest.mark.parametrize("padded", [False, True])
def test_they_compute_what_merged_experts_compute(padded):
    adapted, plain = experts()
    x = torch.randn(EXPERTS, 4, HIDDEN, dtype=torch.float64) if padded else torch.randn(9, HIDDEN, dtype=torch.float64)
    ours, theirs = (module.forward_padded(x) if padded else module(x, COUNTS) for module in (adapted, plain))
    torch.testing.assert_close(ours, theirs)
    for y in (ours, theirs):
        y.square().sum().backward()
    for name, spec in SPECS.items():
        adapter, gradient = adapted.lora[name], plain.get_parameter(name).grad
        torch.testing.assert_close(adapter.b.grad, spec.alpha / spec.rank * gradient @ adapter.a.mT)
        torch.testing.assert_close(adapter.a.grad, spec.alpha / spec.rank * adapter.b.mT @ gradient)
    with without_adapters(adapted):
        without = adapted.forward_padded(x) if padded else adapted(x, COUNTS)
    assert not torch.allclose(without, theirs)


def test_the_merged_weights_of_an_export_are_those_of_each_expert():
    adapted, plain = experts()
    for name, spec in SPECS.items():
        adapter = adapted.lora[name]
        found = merged(adapted.get_parameter(name).float(), adapter.a, adapter.b, spec.alpha / spec.rank)
        torch.testing.assert_close(found, plain.get_parameter(name).float(), rtol=1e-5, atol=1e-5)
