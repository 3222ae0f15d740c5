"""What the CUDA build of torch does on the driver without a GPU; each function is run in a process of its own: on_driver.py FUNCTION.

The process prints a line of JSON. test_contract.py starts it and checks the line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from pipeline.config import hardware
from pipeline.rehearsal.compiled_kernels import SeenKernels, launches_told
from pipeline.rehearsal.device_record import DeviceRecord, EntryKind, site
from pipeline.rehearsal.operations import recorded
from pipeline.rehearsal.record import Work

HIDDEN, FFN, HEADS, LENGTH = 1024, 2816, 8, 2048


class Block(nn.Module):
    """A block of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(HIDDEN, FFN, bias=False),
            nn.Linear(HIDDEN, FFN, bias=False),
            nn.Linear(FFN, HIDDEN, bias=False),
        )
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).view(1, LENGTH, HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + self.output(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, LENGTH, HIDDEN))
        y = self.mlp_norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def step(model: nn.Module, record: DeviceRecord) -> dict[str, object]:
    """Record a forward and a backward pass."""
    x = torch.empty(1, LENGTH, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before, waits = torch.cuda.memory_allocated(), []
    record.start()
    with record.on_host_wait(waits.append):
        loss = model(x).float().pow(2).sum()
        loss.backward()
        value = loss.item()
    record.stop()
    entries = record.take()
    blocks = (
        entries[entries["kind"] == EntryKind.TENSOR_ALLOCATE]["size"].sum()
        - entries[entries["kind"] == EntryKind.TENSOR_FREE]["size"].sum()
    )
    return {
        "kernels": Counter(record.name(entry).split("<")[0] for entry in entries[entries["kind"] == EntryKind.KERNEL]),
        "graphs": Counter(record.name(entry) for entry in entries[entries["kind"] == EntryKind.GRAPH]),
        "products": Counter(map(str, entries[entries["kind"] == EntryKind.PRODUCT]["shape"].tolist())),
        "waits": len(waits),
        "recorded_waits": int((entries["kind"] == EntryKind.HOST_WAIT).sum()),
        "value": value,
        "allocated": torch.cuda.memory_allocated() - before,
        "blocks": int(blocks),
        "unknown": record.unknown(),
    }


def device() -> dict[str, object]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": torch.cuda.get_device_capability(),
        "memory": properties.total_memory,
        "sms": properties.multi_processor_count,
    }


def block() -> dict[str, object]:
    """Three steps of two blocks, with and without cuDNN."""
    model, record = nn.Sequential(Block(), Block()).to("cuda", torch.bfloat16), DeviceRecord()
    steps = [step(model, record) for _ in range(2)]
    torch.backends.cuda.enable_cudnn_sdp(False)
    steps.append(step(model, record))
    return {"steps": steps, "reserved": torch.cuda.memory_reserved(), "used": record.used()}


def compiled() -> dict[str, object]:
    """A step of a compiled block, the registers of a kernel of Triton, and the work of a recorded step."""
    import triton
    import triton.language as tl

    @triton.jit
    def double(p, n, size: tl.constexpr):
        at = tl.program_id(0) * size + tl.arange(0, size)
        tl.store(p + at, 2 * tl.load(p + at, mask=at < n), mask=at < n)

    record, model = DeviceRecord(), Block().to("cuda", torch.bfloat16)
    kernel = double[(4,)](torch.empty(1000, device="cuda"), 1000, size=256)
    model.compile()
    steps = [step(model, record) for _ in range(2)]
    seen = SeenKernels()
    with launches_told(seen.launched):
        step(model, record)
    with recorded(hardware.load("h100"), {}) as recorder:
        step(model, record)
    work = [(entry.kind, entry.name) for entry in recorder.entries if isinstance(entry, Work)]
    generated = [dataclasses.asdict(one) for one in seen.found()]
    return {"step": steps[1], "registers": kernel.n_regs, "spills": kernel.n_spills, "work": work, "generated": generated}


def memory() -> dict[str, object]:
    """Blocks of 1 GiB until the device has no more; every second is freed, and larger ones need a retry."""
    record, result = DeviceRecord(), {}
    held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(60)]
    del held[::2]
    larger = [torch.empty(3 << 30, dtype=torch.uint8, device="cuda") for _ in range(10)]
    result["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    try:
        larger.extend(torch.empty(3 << 30, dtype=torch.uint8, device="cuda") for _ in range(20))
    except torch.OutOfMemoryError as error:
        result["error"] = str(error)
    result["used"], result["reserved"] = record.used(), torch.cuda.memory_reserved()
    held.clear()
    larger.clear()
    torch.cuda.empty_cache()
    return {**result, "left": record.used(), "unknown": record.unknown()}


def values() -> dict[str, object]:
    """What the host reads of the device, and an optimizer whose learning rate is a tensor."""
    rate, weight = torch.tensor(0.25, device="cuda"), nn.Parameter(torch.ones(1000, device="cuda"))
    checks = [bool(rate >= 0), bool(rate.isfinite()), bool(rate.isfinite().all()), bool(rate.isnan()), bool(rate.isnan().any())]
    for choice in ({"fused": True}, {"foreach": True, "capturable": True}):
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=rate, **choice).step()
    norm = nn.utils.clip_grad_norm_([weight], 1.0).item()
    return {"rate": rate.item(), "checks": checks, "norm": norm, "token": torch.arange(5).cuda()[3].item()}


def attention_order() -> dict[str, object]:
    """The first and the second call of attention in a process, with a bias, for which the memory-efficient kernel is chosen."""
    from pipeline.layers.attention_kernel import automatic
    from pipeline.layers.mask import Mask

    q = torch.empty(2, 8, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = Mask(causal=False, bias=torch.empty(1, 8, 64, 64, device="cuda", dtype=torch.bfloat16))
    names = []
    for _ in range(2):
        node = automatic(q, q, q, mask).grad_fn
        while node.name() == "AliasBackward0":
            node = node.next_functions[0][0]
        names.append(node.name())
    return {"kernels": names}


def low_precision() -> dict[str, object]:
    """Products in 8 bits, scaled by tensor and by row, and grouped products, forward and backward."""
    record, bf16 = DeviceRecord(), {"device": "cuda", "dtype": torch.bfloat16}
    a, b = (torch.empty(rows, 512, **bf16).to(torch.float8_e4m3fn) for rows in (256, 1024))
    record.start()
    for shape in ((), (256, 1)):
        scales = torch.ones(shape, device="cuda"), torch.ones(shape and (1, 1024), device="cuda")
        torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16)
    products = record.take()
    products = products[products["kind"] == EntryKind.PRODUCT]
    x, weights = torch.empty(512, 256, requires_grad=True, **bf16), torch.empty(4, 256, 128, requires_grad=True, **bf16)
    ends = torch.tensor([128, 256, 384, 512], device="cuda", dtype=torch.int32)
    torch._grouped_mm(x, weights, offs=ends).pow(2).sum().backward()
    entries = record.take()
    grouped = [
        name for entry in entries[entries["kind"] == EntryKind.KERNEL] if "cutlass" in (name := record.name(entry)) and "Gemm" in name
    ]
    return {
        "products": products["shape"].tolist(),
        "types": products["size"].tolist(),
        "grouped": len(grouped),
        "unknown": record.unknown(),
    }


def refused() -> dict[str, object]:
    """A function that the driver does not know: CUDA graphs."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
    except RuntimeError as error:
        return {"error": str(error), "unknown": DeviceRecord().unknown(), "site": site()}
    return {}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()), flush=True)
    os._exit(0)  # a thread of autograd may still end, which ends the process with an error while Python is finalized
