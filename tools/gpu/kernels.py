"""Section kernels: attention, linear attention, norms, rotary embeddings, the loss, grouped and 8-bit products, beside plain formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers import delta_kernels, gpu
from pipeline.layers.delta_rule import chunked_delta_rule
from pipeline.layers.expert_products import grouped_mm, loop_mm
from pipeline.layers.fp8_products import FP8_PRODUCTS
from pipeline.layers.loss import linear_cross_entropy
from pipeline.layers.norm import OffsetRMSNorm
from pipeline.layers.rotary import Rotary, rotate
from pipeline.parallel.parallelize import DTYPES
from tools.gpu import attention
from tools.gpu.against_formula import Function, compare
from tools.gpu.rows import Row, Setup, guarded

#: Rounding of the inputs of an 8-bit product: of E4M3 by 2^-4 at most, and of gradients in E5M2 by 2^-3.
FP8_BOUNDS = {"output": 2**-4, "gradient": 2**-3}
RECIPES = ("tensorwise", "rowwise")


def rows(setup: Setup) -> Iterator[Row]:
    yield from attention.rows(setup)
    hidden = 4096 if setup.cuda else 128
    for dtype in ("bf16", "fp32"):
        for compiled in (False, True) if setup.cuda else (False,):
            for name, (kernel, formula, inputs) in layers(hidden, setup.device).items():
                title = f"{name} {hidden} {dtype}{' compiled' if compiled else ''}"
                yield guarded(title, _check, kernel, formula, inputs, dtype, compiled=compiled)
    for title, decays in (("delta rule bf16", 1), ("delta rule with decays of rows bf16", 128)):
        yield guarded(title, _delta_rule, setup, decays)
    yield guarded("grouped product bf16", _grouped, setup)
    for recipe in RECIPES:
        yield guarded(f"product fp8 {recipe}", _fp8, setup, recipe)
    yield guarded("product fp8 of padded experts", _fp8_experts, setup, padded=True)
    yield guarded("product fp8 of experts", _fp8_experts, setup, padded=False)


def layers(hidden: int, device: torch.device) -> dict[str, tuple[Function, Function, dict[str, Tensor]]]:
    """Return layer -> (the layer as a function of its inputs, its formula, the inputs)."""
    chance, tokens, vocabulary = torch.Generator().manual_seed(0), 256, 1000

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance).to(device)

    x, weight, bias = random(tokens, hidden), 1 + random(hidden) / 8, random(hidden)
    targets = torch.randint(vocabulary, (1, tokens), generator=chance).to(device)
    tables = Rotary(128, tokens, 1e4).to(device)()

    def loss(x: Tensor, head: Tensor) -> Tensor:
        return linear_cross_entropy(x[None], head, targets)

    def turned(x: Tensor) -> Tensor:
        """The rotation as a product of complex numbers, whose parts are the halves of a head."""
        angles = torch.complex(tables[0][:, :64].double(), tables[1][:, 64:].double())
        halves = torch.complex(x[..., :64].double(), x[..., 64:].double()) * angles
        return torch.cat([halves.real, halves.imag], dim=3).to(x.dtype)

    return {
        "RMS norm": (lambda x, w: F.rms_norm(x, (hidden,), w, 1e-5), _rms_norm, {"x": x, "weight": weight}),
        "RMS norm with offset": (_offset_norm, lambda x, w: _rms_norm(x, 1 + w), {"x": x, "weight": weight - 1}),
        "layer norm": (lambda x, w, b: F.layer_norm(x, (hidden,), w, b), _layer_norm, {"x": x, "weight": weight, "bias": bias}),
        "rotary embedding": (lambda x: rotate(x, tables), turned, {"x": random(1, 4, tokens, 128)}),
        "loss and head": (loss, _loss(targets), {"x": x / hidden**0.5, "head": random(vocabulary, hidden)}),
    }


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight


def _offset_norm(x: Tensor, weight: Tensor) -> Tensor:
    norm = OffsetRMSNorm(x.shape[1], eps=1e-5, device="meta")
    result: Tensor = torch.func.functional_call(norm, {"weight": weight}, (x,))
    return result


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centered = x - x.mean(dim=1, keepdim=True)
    return centered / (centered.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight + bias


def _loss(targets: Tensor) -> Function:
    def formula(x: Tensor, head: Tensor) -> Tensor:
        logits = x @ head.T
        chosen = logits.gather(1, targets.view(-1, 1)).squeeze(1)
        return (logits.logsumexp(dim=1) - chosen).mean()

    return formula


def _check(title: str, kernel: Function, formula: Function, inputs: dict[str, Tensor], dtype: str, *, compiled: bool) -> Row:
    """Compare a layer with its formula."""
    if compiled:
        torch._dynamo.reset()
    device = next(iter(inputs.values())).device
    # PyTorch's kernel for CPUs adds the gradients of the bias in 16 bits.
    slack = 4.0 if device.type == "cpu" and title.startswith("layer norm") else 1.0
    found = compare(torch.compile(kernel) if compiled else kernel, formula, inputs, DTYPES[dtype], slack=slack)
    return Row.bounded(title, found.error, found.bound, f"relative error of the {found.where}")


def _delta_rule(title: str, setup: Setup, decays: int) -> Row:
    """Compare the kernels of linear attention with the rule in chunks, for documents that begin within a chunk."""
    if not (setup.cuda and delta_kernels.installed()):
        return Row.skipped(title, f"needs a GPU, and {delta_kernels.PACKAGE}")
    chance, shape = torch.Generator().manual_seed(0), (2, 4, 1000)
    inputs = {name: torch.randn(*shape, 128, generator=chance) for name in ("queries", "keys", "values")}
    inputs |= {"decays": -torch.rand(*shape, decays, generator=chance), "betas": torch.rand(*shape, generator=chance)}
    segments = (torch.arange(shape[2], device=setup.device) // 150).expand(2, -1)

    def of(rule: Callable[..., tuple[Tensor, Tensor]]) -> Function:
        return lambda q, k, *others: rule(q, F.normalize(k, dim=3), *others, segments=segments)[0]

    fused = of(partial(delta_kernels.fused_delta_rule, dtype=torch.bfloat16))
    found = compare(fused, of(chunked_delta_rule), {name: tensor.to(setup.device) for name, tensor in inputs.items()}, torch.bfloat16)
    return Row.bounded(title, found.error, found.bound, f"relative error of the {found.where}")


def _grouped(title: str, setup: Setup) -> Row:
    """Compare the product of all experts with a loop over them: uneven loads, one expert without rows, and rows of no expert."""
    rows, hidden, ffn = (4096, 1024, 512) if setup.cuda else (64, 32, 16)
    counts = torch.tensor([rows // 2, 0, rows // 8 + 3, rows // 8], device=setup.device)
    assigned = int(counts.sum())
    chance = torch.Generator().manual_seed(0)
    inputs = {"rows": torch.randn(rows, hidden, generator=chance).to(setup.device)}
    inputs["weights"] = torch.randn(len(counts), ffn, hidden, generator=chance).to(setup.device)

    def of(product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Function:
        return lambda x, weights: product(x, weights, counts)[:assigned]

    def undefined_rows_have_no_gradient(x: Tensor, weights: Tensor) -> Tensor:
        return of(grouped_mm)(x.where(torch.arange(rows, device=x.device)[:, None] < assigned, 0), weights)

    found = compare(undefined_rows_have_no_gradient, of(loop_mm), inputs, torch.bfloat16)
    return Row.bounded(title, found.error, found.bound, f"relative error of the {found.where}")


def _fp8(title: str, setup: Setup, recipe: str) -> Row:
    """Compare an 8-bit product with the exact one; on a CPU the rounding is emulated."""
    if setup.cuda and not gpu.of(setup.device).fp8:
        return Row.skipped(title, "this GPU has no 8-bit products")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError:
        return Row.skipped(title, "torchao is not installed")
    sizes = (1024, 2048, 1536) if setup.cuda else (32, 64, 48)
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(sizes[0], sizes[1], generator=chance).to(setup.device, torch.bfloat16).requires_grad_()
    weight = torch.randn(sizes[2], sizes[1], generator=chance).to(setup.device, torch.bfloat16)
    linear = nn.Linear(sizes[1], sizes[2], bias=False, device=setup.device, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(weight)
    model = nn.Sequential(linear)
    convert_to_float8_training(model, config=dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not setup.cuda))
    run = torch.compile(model) if setup.cuda else model
    output = run(x)
    grad = torch.randn(output.shape, generator=chance).to(setup.device, torch.bfloat16)
    output.backward(grad)
    assert x.grad is not None
    exact = {
        "output": (output, x.double() @ weight.double().T),
        "gradient of x": (x.grad, grad.double() @ weight.double()),
        "gradient of the weight": (model[0].weight.grad, grad.double().T @ x.double()),
    }
    return _rounded(setup, title, exact)


def _fp8_experts(title: str, setup: Setup, *, padded: bool) -> Row:
    """Compare 8-bit products of experts with exact ones: with equal numbers of rows, or with uneven loads as in `_grouped`."""
    if setup.cuda and not gpu.of(setup.device).fp8_experts:
        return Row.skipped(title, "this GPU has no 8-bit products of experts")
    rows, hidden, ffn = (1000, 1024, 512) if setup.cuda else (10, 32, 16)
    counts = torch.tensor([rows] * 4 if padded else [2 * rows, 0, rows + 3, rows - 7], device=setup.device)
    total = int(counts.sum()) + (0 if padded else 5)
    chance = torch.Generator().manual_seed(0)
    shape = (4, rows) if padded else (total,)
    x, grad = (torch.randn(*shape, size, generator=chance).to(setup.device, torch.bfloat16) for size in (hidden, ffn))
    weights = torch.randn(4, ffn, hidden, generator=chance).to(setup.device, torch.bfloat16)
    rows_of, weights_of = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def product() -> Tensor:
        return FP8_PRODUCTS.batched(rows_of, weights_of) if padded else FP8_PRODUCTS.grouped(rows_of, weights_of, counts)

    output = (torch.compile(product) if setup.cuda else product)()
    output.backward(grad)
    assert rows_of.grad is not None
    assert weights_of.grad is not None
    sizes = [*counts.tolist(), total - int(counts.sum())]
    parts = (each.detach().double().flatten(0, -2).split(sizes)[:4] for each in (output, grad, rows_of.grad, x))
    pairs = list(zip(weights.double(), *parts, strict=True))
    exact = {
        "output": (torch.cat([y for _, y, _, _, _ in pairs]), torch.cat([inner @ w.T for w, _, _, _, inner in pairs])),
        "gradient of x": (torch.cat([found for _, _, _, found, _ in pairs]), torch.cat([g @ w for w, _, g, _, _ in pairs])),
        "gradient of the weight": (weights_of.grad, torch.stack([g.T @ inner for _, _, g, _, inner in pairs])),
    }
    return _rounded(setup, title, exact)


def _rounded(setup: Setup, title: str, exact: dict[str, tuple[Tensor, Tensor]]) -> Row:
    """The row of the largest error of 8-bit products over its bound: name -> (what was found, the exact product)."""
    errors = {name: float((found.double() - right).norm() / right.norm()) for name, (found, right) in exact.items()}
    bounds = {name: FP8_BOUNDS[name.partition(" ")[0]] for name in errors}
    worst = max(errors, key=lambda name: errors[name] / bounds[name] if errors[name] == errors[name] else float("inf"))
    emulated = "" if setup.cuda else "; emulated"
    return Row.bounded(title, errors[worst], bounds[worst], f"relative error of the {worst}{emulated}")
