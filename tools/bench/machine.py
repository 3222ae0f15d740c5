"""Measures a machine for tools/calibrate: matrix products, attention, copies and collectives, on CUDA or on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pipeline.config.hardware import Hardware
from pipeline.planner.communication import Group, collective_time
from pipeline.planner.kernel_time import attention_time, product_time
from pipeline.planner.operations import AttentionCall, Kind, Product

#: Sizes of products: m, n, k of the layers of transformers from 1 to 70 billion parameters, and some that do not fill the GPU.
PRODUCTS = {
    "cuda": [(m, n, k) for m in (2048, 8192) for n, k in ((2048, 2048), (4096, 4096), (12288, 4096), (8192, 8192), (28672, 8192))],
    "cpu": [(m, n, k) for m in (128, 512) for n, k in ((512, 512), (1024, 512), (1024, 1024))],
}
#: Bytes of copies and of collectives.
COPIES = {"cuda": [1 << 26, 1 << 28, 1 << 30], "cpu": [1 << 24, 1 << 26]}
MESSAGES = {"cuda": [1 << 24, 1 << 26, 1 << 28], "cpu": [1 << 20, 1 << 22]}
#: Attention: heads and positions of a causal call of head width 128.
ATTENTION = {"cuda": [(16, 4096), (32, 8192)], "cpu": [(2, 512)]}
REPEATS = 7


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median time of a call, after two that are not measured. Collective if the call is."""
    times = []
    for repeat in range(REPEATS + 2):
        _finish(device)
        started = time.perf_counter()
        call()
        _finish(device)
        if repeat >= 2:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def products(device: torch.device) -> list[tuple[Product, float]]:
    """Time the grid of products, in bf16 on CUDA and fp32 on the CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = []
    for m, n, k in PRODUCTS[device.type]:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        found.append((Product("", "forward", m, n, k), seconds(lambda a=a, b=b: F.linear(a, b), device)))  # type: ignore[misc]
    return found


def attention(device: torch.device) -> list[tuple[AttentionCall, float]]:
    """Time forward passes of causal attention."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = []
    for heads, positions in ATTENTION[device.type]:
        q, k, v = (torch.randn(1, heads, positions, 128, device=device, dtype=dtype) for _ in range(3))
        call = AttentionCall("forward", 1, heads, heads, positions, positions, 128, 128, 0.5 * (1 + 1 / positions))
        found.append((call, seconds(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)))  # type: ignore[misc]
    return found


def copy_rate(device: torch.device) -> float:
    """The best rate at which a tensor is read and written, bytes per second."""
    rates = []
    for size in COPIES[device.type]:
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        rates.append(2 * size / seconds(lambda s=source, t=target: t.copy_(s), device))  # type: ignore[misc]
    return max(rates)


def smallest_kernel(device: torch.device) -> float:
    """Seconds of a kernel with nothing to do, in a queue of many."""
    value = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(100):
            value.add_(1)

    return seconds(many, device) / 100


def collectives(device: torch.device, group: Any) -> list[tuple[Kind, int, float]]:
    """Time collectives over a group: kind, bytes of the whole buffer, seconds. Collective over the group."""
    ranks = group.size()
    found: list[tuple[Kind, int, float]] = []
    for size in MESSAGES[device.type]:
        whole = torch.zeros(size // 4 // ranks * ranks, device=device)
        part = torch.zeros(whole.numel() // ranks, device=device)
        calls: dict[Kind, Callable[[], Any]] = {
            "all_reduce": lambda w=whole: dist.all_reduce(w, group=group),  # type: ignore[misc]
            "all_gather": lambda w=whole, p=part: dist.all_gather_into_tensor(w, p, group=group),  # type: ignore[misc]
            "reduce_scatter": lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w, group=group),  # type: ignore[misc]
        }
        found += [(kind, whole.nbytes, seconds(call, device)) for kind, call in calls.items()]
    return found


def smallest_collective(device: torch.device, group: Any) -> float:
    """Seconds of an all-reduce of one number. Collective over the group."""
    value = torch.zeros(1, device=device)
    return seconds(lambda: dist.all_reduce(value, group=group), device)


def share(planned: list[float], measured: list[float]) -> float:
    """The share of a bound that is sustained: the median of the planned time at the bound over the measured time, at most 1."""
    return round(min(1.0, max(0.01, statistics.median(p / m for p, m in zip(planned, measured, strict=True)))), 4)


def product_share(found: list[tuple[Product, float]], hardware: Hardware) -> float:
    """The sustained share of the peak by the planner's model of products."""
    ideal = replace(hardware, product_share=1.0, memory_share=1.0)
    return share([product_time(product, ideal)[0] for product, _ in found], [time for _, time in found])


def attention_share(found: list[tuple[AttentionCall, float]], hardware: Hardware) -> float:
    """The same for attention."""
    ideal = replace(hardware, attention_share=1.0, memory_share=1.0)
    return share([attention_time(call, ideal) for call, _ in found], [time for _, time in found])


def collective_share(found: list[tuple[Kind, int, float]], hardware: Hardware, where: Group) -> float:
    """The sustained share of the bandwidth of links or network by the planner's model of collectives."""
    ideal = replace(hardware, link_share=1.0, network_share=1.0)
    return share([collective_time(kind, size, where, ideal) for kind, size, _ in found], [time for *_, time in found])
