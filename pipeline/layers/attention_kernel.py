"""The choice of the attention kernel: the only file that decides it.

`choose` is a pure function of the facts in `Case`, so that the rules for every GPU can be tested without one. They follow PyTorch's own
rules (`can_use_cudnn_attention`, `can_use_flash_attention` and `can_use_mem_efficient_attention` of sdp_utils.cpp) and add to them what
PyTorch does not do: FlexAttention where SDPA would need a (queries, keys) tensor, FlashAttention 3 where it is installed, values that are
padded to the width of the queries (multi-head latent attention on GPUs whose cuDNN has no such kernel), and no silent use of the unfused
math kernel, which allocates the scores.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.layers import gpu
from pipeline.layers.attention import plain, repeat_kv, sdpa
from pipeline.layers.flex import block_mask, flex
from pipeline.layers.mask import Mask

log = logging.getLogger("pipeline")

#: torch: PyTorch's own choice on devices other than NVIDIA GPUs. math: the unfused formula. flash_3 and flash_2 share an operator.
Kernel = Literal["flash_3", "cudnn", "flash_2", "flex", "efficient", "math", "torch"]
#: Kernels of partial attention (layers/partial_attention.py): flash attention's operator for CUDA, that for CPUs, or the unfused formula.
PartialKernel = Literal["flash", "flash_cpu", "unfused"]

_HALF = (torch.bfloat16, torch.float16)
_HOPPER = (9, 0)
#: MI200, MI300 and MI350.
_AOTRITON = ("gfx90a", "gfx942", "gfx950")
_MAX_FLASH_HEAD_DIM = 256
_FLASH, _CUDNN, _EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
#: Kernel -> PyTorch's backends by priority, each once: while torch.compile traces, PyTorch writes a longer list beyond the end of its own.
_BACKENDS = {
    "flash_3": [_FLASH, _CUDNN, _EFFICIENT],
    "flash_2": [_FLASH, _CUDNN, _EFFICIENT],
    "cudnn": [_CUDNN, _FLASH, _EFFICIENT],
    "efficient": [_EFFICIENT, _FLASH, _CUDNN],
}

#: The cases whose choice was logged.
_LOGGED: set[Case] = set()
#: The cases of ring attention that were warned of.
_WARNED: set[Case] = set()


@dataclass(frozen=True)
class Case:
    """What the choice of the kernel depends on.

    Attributes:
        device: type of the device.
        dtype: dtype of queries, keys and values.
        head_dim: width of a head's queries and keys.
        value_dim: width of a head's values.
        capability, architecture: of the GPU, see Gpu.
        masked: whether a mask rule other than `causal`, a window or ALiBi slopes apply; SDPA would need a (queries, keys) tensor for them.
        bias: whether a tensor is added to the scores.
        aligned: whether the mask is not causal, or there are as many queries as keys.
        grad: whether gradients are needed.
        flash_3: whether FlashAttention 3 is installed, on Hopper.
        deterministic: whether PyTorch is told to use deterministic algorithms (training.deterministic).
        capped: whether the scores have a soft cap (Gemma 2), which no kernel but FlexAttention computes.
        sinks: whether heads have attention sinks (gpt-oss), for which the logarithm of the sum of the exponentials is differentiated, too:
            of the kernels of full attention, FlexAttention alone does that.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    capability: tuple[int, int] = (0, 0)
    masked: bool = False
    bias: bool = False
    aligned: bool = True
    grad: bool = True
    flash_3: bool = False
    deterministic: bool = False
    capped: bool = False
    sinks: bool = False
    architecture: str = ""

    @property
    def has_bf16_kernels(self) -> bool:
        """Whether the GPU has fused kernels in bf16: NVIDIA's from Ampere on, and those of AMD for which PyTorch ships AOTriton's."""
        return self.capability >= (8, 0) or self.architecture in _AOTRITON


def choose(case: Case) -> Kernel:
    """Return the kernel of full attention."""
    if case.device != "cuda":
        return "math" if case.capped or case.sinks else "torch"
    if case.capped or case.sinks or (case.masked and not case.bias):
        return "flex" if case.dtype in (*_HALF, torch.float32) else "math"
    if not case.bias:
        if _flash_applies(case):
            if case.flash_3 and case.capability == _HOPPER:
                return "flash_3"
            return "cudnn" if _cudnn_applies(case) else "flash_2"
        if _cudnn_applies(case):
            return "cudnn"
    return "efficient" if _efficient_applies(case) else "math"


def choose_partial(case: Case) -> PartialKernel:
    """Return the kernel of attention over a subset of the keys. It returns logsumexp, and its backward pass takes that of all keys.

    Forward and backward pass choose for themselves, and in both autograd is off: gradients are assumed to be needed.
    """
    case = replace(case, grad=True)
    if case.masked or case.bias or case.capped or not case.aligned or case.value_dim > case.head_dim:
        return "unfused"
    if case.device == "cpu":
        return "flash_cpu"
    # SDPA pads head widths that are not a multiple of 8; the operator itself refuses them.
    return "flash" if case.device == "cuda" and case.head_dim % 8 == 0 and _flash_applies(case) else "unfused"


def _flash_applies(case: Case) -> bool:
    """FlashAttention 2 and 3, or AOTriton's: 16 bits. Narrower values are padded to the width of the queries."""
    if case.dtype not in _HALF or not case.has_bf16_kernels or not case.aligned or case.value_dim > case.head_dim:
        return False
    # Consumer GPUs have too little shared memory for the backward pass of these widths.
    small = (8, 6) <= case.capability <= (8, 9) or case.capability >= (12, 0)
    return case.head_dim <= _MAX_FLASH_HEAD_DIM and not (small and case.grad and 192 < case.head_dim <= 224)


def _cudnn_applies(case: Case) -> bool:
    """cuDNN, where it is faster than FlashAttention 2: Hopper and Blackwell of data centers, which also have DeepSeek's head widths.

    PyTorch has no deterministic backward pass of it.
    """
    if case.deterministic or case.dtype not in _HALF or not (case.capability == _HOPPER or case.capability[0] == 10):
        return False
    widths = case.head_dim, case.value_dim
    return (max(widths) <= 128 or widths == (192, 128)) and all(width % 8 == 0 for width in widths)


def _efficient_applies(case: Case) -> bool:
    """The memory-efficient kernel: any GPU and head width, if rows are aligned to 16 bytes."""
    if case.dtype not in (*_HALF, torch.float32) or (case.dtype == torch.bfloat16 and not case.has_bf16_kernels):
        return False
    alignment = 4 if case.dtype == torch.float32 else 8
    return case.head_dim % alignment == 0 and case.value_dim % alignment == 0


def automatic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The core (layers/attention.py) of the chosen kernel."""
    kernel = _choose_and_log(*facts_of(q, k, v, mask, window, sinks))
    if kernel == "torch":
        return sdpa(q, k, v, mask, window=window, scale=scale)
    if kernel == "flex":
        return flex(q, k, v, mask, window=window, scale=scale, sinks=sinks)
    if kernel == "math":
        with sdpa_kernel(SDPBackend.MATH):
            return sdpa(q, k, v, mask, window=window, scale=scale, sinks=sinks)
    if kernel == "efficient":  # not in all versions with fewer key heads
        k, v = repeat_kv(q, k, v)
    padded_v = pad_values(q, v) if kernel in ("flash_2", "flash_3") else v
    # If the installed libraries lack the chosen kernel, PyTorch takes the next fused one, and raises an error if there is none.
    with sdpa_kernel(_BACKENDS[kernel], set_priority=True):
        return sdpa(q, k, padded_v, mask, window=window, scale=scale)[..., : v.shape[3]]


def prepare(
    core: Any, mask: Mask, window: int | None, shape: tuple[int, int, int] | None, device: torch.device, *, sinks: bool = False
) -> None:
    """Compute what a core derives from a mask, once and outside of the blocks, which would all compute it if compiled.

    Args:
        core: of an attention layer. A core that derives other masks from the given one has a `prepare` method with the other arguments;
            nothing is done for other cores (LongLoRA, key-value caches).
        mask: of the layer.
        window: of the layer.
        shape: (batch, queries, keys) on this rank; None where the caller does not know it, and each block computes its mask.
        device: of queries and keys.
        sinks: whether the layer has attention sinks.
    """
    if (prepare_core := getattr(core, "prepare", None)) is not None:
        prepare_core(mask, window, shape, device, sinks=sinks)
    if shape is None or core not in (automatic, flex, sdpa, plain):
        return
    _, queries, keys = shape
    if core is flex or (core is automatic and device.type == "cuda" and mask.bias is None):
        if core is flex or sinks or mask.slopes is not None or mask.softcap is not None or mask.has_rules(keys, window):
            block_mask(mask, shape, device, window)
    else:
        mask.visible(queries, keys, device, window)


def pad_values(q: Tensor, v: Tensor) -> Tensor:
    """Pad the width of the values with zeros to that of the queries, which adds columns of zeros to the output."""
    return F.pad(v, (0, q.shape[3] - v.shape[3])) if v.shape[3] < q.shape[3] else v


def facts_of(q: Tensor, k: Tensor, v: Tensor, mask: Mask, window: int | None, sinks: Tensor | None = None) -> tuple[Any, ...]:
    """Return the arguments of `case` for the arguments of a core: only constants, also while torch.compile traces."""
    masked, aligned = mask.slopes is not None, True
    # Branches, since torch.compile turns a branch on a symbolic length into a constant, but not the comparison itself.
    if mask.has_rules(k.shape[2], window):
        masked = True
    if mask.causal and q.shape[2] != k.shape[2]:
        aligned = False
    flags = masked, mask.bias is not None, aligned, torch.is_grad_enabled(), mask.softcap is not None, sinks is not None
    return q.device.type, q.device.index or 0, q.dtype, q.shape[3], v.shape[3], *flags


def case(
    device: str,
    index: int,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    masked: bool,
    bias: bool,
    aligned: bool,
    grad: bool,
    capped: bool = False,
    sinks: bool = False,
) -> Case:
    """Add what is known of the device."""
    cuda = device == "cuda"
    properties = gpu.of(index) if cuda else gpu.Gpu(device)
    flash_3 = properties.capability == _HOPPER and has_flash_3()  # in this order: it replaces operators, and raises an error on other GPUs
    deterministic = torch.are_deterministic_algorithms_enabled()
    facts = (masked, bias, aligned, grad, flash_3, deterministic, capped, sinks)
    return Case(device, dtype, head_dim, value_dim, properties.capability, *facts, architecture=properties.architecture)


@cache
def has_flash_3() -> bool:
    """Whether FlashAttention 3 is installed; the first call lets PyTorch use it, on Hopper alone: its operators refuse other GPUs."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return False
    from torch.nn import attention

    attention.activate_flash_attention_impl("FA3")
    return True


@cache
def _settle_order() -> None:
    """Let PyTorch set its own order of kernels, which the first choice of a process does on Hopper and Blackwell, in place of any other.

    The first call of a layer would run another kernel than its recomputation.
    """
    q = torch.empty(1, 1, 8, 8, device="cuda", dtype=torch.float16)
    torch._fused_sdp_choice(q, q, q)


def _choose_and_log(*facts: Any) -> Kernel:
    """Choose the kernel, and log the choice once for each case."""
    given = case(*facts)
    if given.device == "cuda" and torch.cuda.is_available():  # else the tensors are fake
        _settle_order()
    kernel = choose(given)
    if given not in _LOGGED:
        _LOGGED.add(given)
        rules = [name for name in ("masked", "bias", "capped", "sinks") if getattr(given, name)]
        widths = f"{given.head_dim}" if given.head_dim == given.value_dim else f"{given.head_dim}/{given.value_dim}"
        described = ", ".join([str(given.dtype).removeprefix("torch."), f"head width {widths}", *rules])
        cost = "; no fused kernel applies, so the (queries, keys) scores are allocated" if kernel == "math" else ""
        log.info("attention kernel: %s (%s)%s", kernel, described, cost)
    return kernel


def partial_kernel(*facts: Any) -> PartialKernel:
    """Choose the kernel of partial attention, and warn once for each case for which a GPU has none that is fused."""
    given = case(*facts)
    kernel = choose_partial(given)
    if kernel == "unfused" and given.device == "cuda" and given not in _WARNED:
        _WARNED.add(given)
        masked = ", masked" if given.masked else ", soft cap" if given.capped else ""
        text = "ring attention has no fused kernel for this mask, dtype or head width (%s, head width %d%s): the unfused formula takes 10"
        log.warning(f"{text} to 30 times as long; parallel.context_kind=ulysses has one", given.dtype, given.head_dim, masked)
    return kernel


# While torch.compile traces, it calls the function and treats the result as a constant. This is what torch.compiler.assume_constant_result
# does, which would import the compiler here.
_choose_and_log._dynamo_marked_constant = True  # type: ignore[attr-defined]
