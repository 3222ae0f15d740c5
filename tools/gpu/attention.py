"""Rows of attention: every mask, head width and dtype by the kernel that training chooses, and by every other kernel of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.layers import attention_kernel
from pipeline.layers.attention import plain
from pipeline.layers.attention_kernel import Kernel, automatic, partial_kernel
from pipeline.layers.mask import Mask
from pipeline.layers.position_bias import AlibiSlopes
from pipeline.parallel.parallelize import DTYPES
from tools.gpu.against_formula import compare
from tools.gpu.rings import DocumentRing, ring_core
from tools.gpu.rows import Row, Setup, guarded

BATCH, HEADS, KV_HEADS = 2, 4, 2
#: Width of queries and keys, and of values.
WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
QUICK_WIDTHS = ((64, 64), (192, 128))
#: Masks for which FlexAttention is compiled, which takes many seconds: documents with all widths, the others with the first one.
RULES = ("window", "padding", "prefix", "alibi")
#: Operators of PyTorch's kernels, as in `_scaled_dot_product_NAME_attention`. The kernels flash_2 and flash_3 share one.
OPERATORS = ("flash", "cudnn", "efficient")
#: Factor of the scores that --spoil plants.
SPOILED = 1.5


@dataclass(frozen=True)
class Case:
    """A call of attention; kernel is that of training when None."""

    mask: str
    width: int
    value_width: int
    dtype: str
    kernel: Kernel | None = None

    def __str__(self) -> str:
        widths = f"{self.width}" if self.width == self.value_width else f"{self.width}/{self.value_width}"
        return f"attention {self.mask} {widths} {self.dtype}" + (f" by {self.kernel}" if self.kernel else "")


def cases(setup: Setup) -> Iterator[Case]:
    """Yield all cases: those that training chooses a kernel for, then those of the other kernels."""
    widths = QUICK_WIDTHS if setup.quick else WIDTHS
    for mask in ("causal", "full"):
        yield from (Case(mask, *width, "bf16") for width in widths)
        yield from (Case(mask, 64, 64, dtype) for dtype in ("fp16", "fp32"))
    for mask in ("documents", "bias"):
        yield from (Case(mask, *width, "bf16") for width in widths)
        yield Case(mask, 64, 64, "fp32")
    yield from (Case(mask, *widths[0], "bf16") for mask in RULES)
    kernels = [kernel for kernel in get_args(Kernel) if kernel not in (("torch",) if setup.cuda else ("torch", "flash_3", "cudnn"))]
    for kernel in kernels:
        yield from (Case("causal", *width, "bf16", kernel) for width in (widths if kernel != "flex" else QUICK_WIDTHS))
    yield Case("documents", 64, 64, "bf16", "flex")


def rows(setup: Setup) -> Iterator[Row]:
    """Yield the rows of full attention and of a step of the ring."""
    for case in cases(setup):
        yield guarded(str(case), check, setup, case)
    for width, value_width in QUICK_WIDTHS if setup.quick else WIDTHS:
        for dtype in ("bf16", "fp32"):
            case = Case("ring", width, value_width, dtype)
            yield guarded(str(case), check_ring, setup, case)
        case = Case("ring documents", width, value_width, "bf16")
        yield guarded(str(case), check_document_ring, setup, case)


def check(name: str, setup: Setup, case: Case) -> Row:
    """Compare one case with the plain formula, and the kernel that ran with the chosen one."""
    if case.kernel == "flash_3" and not has_flash_3(setup.device):
        return Row.skipped(name, "FlashAttention 3 is not installed, or this GPU is not Hopper")
    positions = 512 if setup.cuda else 64
    torch._dynamo.reset()  # it compiles only eight masks of FlexAttention
    inputs, mask_of, window = drawn(case, positions, setup.device)
    spoiled = SPOILED if setup.spoil else 1.0

    def kernel(q: Tensor, k: Tensor, v: Tensor, *more: Tensor, scale: float = spoiled * case.width**-0.5) -> Tensor:
        return automatic(q, k, v, mask_of(*more), window=window, scale=scale)

    def formula(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        return plain(q, k, v, mask_of(*more), window=window)

    with forced(case.kernel):
        dtype = DTYPES[case.dtype]
        chosen = case.kernel or chosen_kernel(inputs, mask_of, window, dtype)
        with_operator = chosen not in ("flex", "math", "torch")
        try:
            ran = operator_of(partial(kernel, *(tensor.to(dtype) for tensor in inputs.values()))) if with_operator else ""
        except RuntimeError as error:
            if case.kernel is None or "No available kernel" not in str(error):
                raise
            return Row.skipped(name, "PyTorch has no kernel for it here")
        if case.kernel and ran and not chosen.startswith(ran):
            return Row.skipped(name, f"PyTorch has no such kernel for it here, and runs {ran}")
        if ran and not chosen.startswith(ran):
            return Row.failed(name, f"{chosen} is chosen, but PyTorch runs {ran}")
        backward = setup.cuda or chosen != "flex"  # which has none on a CPU
        found = compare(kernel, formula, inputs, dtype, backward=backward)
    return Row.bounded(name, found.error, found.bound, f"relative error of the {found.where}; {chosen}")


def check_ring(name: str, setup: Setup, case: Case) -> Row:
    """Compare two hops of the ring with the plain formula over all keys."""
    positions = 256 if setup.cuda else 32
    inputs, _, _ = drawn(Case("causal", case.width, case.value_width, case.dtype), 2 * positions, setup.device)
    inputs["q"] = inputs["q"][:, :, positions:]
    dtype = DTYPES[case.dtype]

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        earlier = q.new_zeros(q.shape[0], q.shape[1], k.shape[2] - q.shape[2], q.shape[3])
        return plain(torch.cat([earlier, q], dim=2), k, v, Mask())[:, :, -q.shape[2] :]

    scale = (SPOILED if setup.spoil else 1.0) * case.width**-0.5
    found = compare(partial(ring_core, scale=scale), formula, inputs, dtype)
    q, k, v = (tensor.to(dtype) for tensor in inputs.values())
    chosen = partial_kernel(*attention_kernel.facts_of(q, k[:, :, :positions], v[:, :, :positions], Mask(causal=False), None))
    return Row.bounded(name, found.error, found.bound, f"relative error of the {found.where}; {chosen}")


def check_document_ring(name: str, setup: Setup, case: Case) -> Row:
    """Compare a ring of four ranks within documents, of which some have segments and others are short, with the plain formula."""
    positions = 4096 if setup.cuda else 2048
    inputs, mask_of, _ = drawn(Case("documents", case.width, case.value_width, case.dtype), positions, setup.device)
    mask, dtype = mask_of(), DTYPES[case.dtype]
    scale = (SPOILED if setup.spoil else 1.0) * case.width**-0.5

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = DocumentRing.apply(q, k, v, mask.documents, 4, True, scale)
        return result

    found = compare(ring, lambda q, k, v: plain(q, k, v, mask), inputs, dtype)
    q, k, v = (tensor.to(dtype) for tensor in inputs.values())
    chosen = partial_kernel(*attention_kernel.facts_of(q, k, v, Mask(), None))
    return Row.bounded(name, found.error, found.bound, f"relative error of the {found.where}; {chosen}")


def has_flash_3(device: torch.device) -> bool:
    """Whether training can use FlashAttention 3 on a GPU."""
    return attention_kernel.case("cuda", device.index or 0, torch.bfloat16, 64, 64, False, False, True, True).flash_3


def drawn(case: Case, positions: int, device: torch.device) -> tuple[dict[str, Tensor], Callable[..., Mask], int | None]:
    """Return random inputs in fp32, a function from the inputs after q, k and v to the mask, and the window."""
    chance = torch.Generator().manual_seed(0)

    def random(heads: int, width: int) -> Tensor:
        return torch.randn(BATCH, heads, positions, width, generator=chance).to(device)

    inputs = {"q": random(HEADS, case.width), "k": random(KV_HEADS, case.width), "v": random(KV_HEADS, case.value_width)}
    documents = (torch.rand(BATCH, positions, generator=chance) < 8 / positions).int().cumsum(1, dtype=torch.int32)
    if case.mask == "bias":
        inputs["bias"] = torch.randn(1, HEADS, positions, positions, generator=chance).to(device)
        return inputs, lambda bias: Mask(causal=False, bias=bias), None
    lengths = torch.tensor([[positions], [positions // 2 + 3]])
    rules: dict[str, dict[str, Any]] = {
        "causal": {},
        "full": {"causal": False},
        "window": {},
        "documents": {"documents": documents.to(device)},
        "padding": {"causal": False, "documents": torch.where(torch.arange(positions) < lengths, 0, -1).int().to(device)},
        "prefix": {"prefix": torch.tensor([positions // 3, positions // 2], dtype=torch.int32, device=device)},
        "alibi": {"slopes": AlibiSlopes(HEADS).to(device)()},
    }
    mask = Mask(**rules[case.mask])
    return inputs, lambda: mask, positions // 3 if case.mask == "window" else None


def chosen_kernel(inputs: dict[str, Tensor], mask_of: Callable[..., Mask], window: int | None, dtype: torch.dtype) -> Kernel:
    q, k, v, *more = (tensor.to(dtype) for tensor in inputs.values())
    return attention_kernel.choose(attention_kernel.case(*attention_kernel.facts_of(q, k, v, mask_of(*more), window)))


@contextmanager
def forced(kernel: Kernel | None) -> Iterator[None]:
    """Let `automatic` choose a kernel; as usual when None."""
    if kernel is None:
        yield
        return
    with mock.patch.object(attention_kernel, "choose", return_value=kernel):
        yield


class _Operators(TorchDispatchMode):
    """Notes the operator of attention that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operation).removeprefix("aten._scaled_dot_product_").partition("_attention")[0]
        self.found = name if name in OPERATORS else self.found
        return operation(*args, **(kwargs or {}))


def operator_of(call: Callable[[], Tensor]) -> str:
    """Return which of OPERATORS a call runs, "" for none of them. Gradients are needed, as in training."""
    with _Operators() as seen, torch.enable_grad():
        call()
    return seen.found
