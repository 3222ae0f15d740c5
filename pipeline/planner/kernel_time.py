"""Time of kernels on a GPU: matrix products by tiles and waves, attention and memory-bound kernels by FLOPs and bytes."""

from __future__ import annotations

import math
from functools import lru_cache

from pipeline.config.hardware import Hardware
from pipeline.planner.operations import AttentionCall, Product

#: Tiles of the result that one multiprocessor computes at a time, with the share of the sustained rate of each: smaller tiles read
#: more operands for each FLOP (NVIDIA, "Matrix Multiplication Background User's Guide").
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.93),
    (256, 64, 0.85),
    (64, 256, 0.85),
    (128, 64, 0.77),
    (64, 128, 0.77),
    (64, 64, 0.58),
)
#: Steps of the summed dimension that fill and drain the pipeline of a tile.
PROLOGUE = 32
#: Kernels reach their rate where the rows of all operands are a multiple of 128 bytes (NVIDIA, "Matrix Multiplication Background User's
#: Guide", on A100); number of bytes -> factor of the time of a product whose rows are a multiple of that many only.
ALIGNED_BYTES = 128
MISALIGNED = {64: 1.32, 32: 2.36, 16: 2.59, 1: 2.0}
#: Columns of head width at which attention kernels reach their full rate.
FULL_HEAD_DIM = 128
#: Power of the head width in their rate below that width: 64 columns reach 0.85 of it (Dao 2023, https://arxiv.org/abs/2307.08691).
WIDTH_POWER = 0.23
#: Time of the backward pass of attention over the forward pass, beyond its 2.5 times as many FLOPs.
BACKWARD_ATTENTION = 1.20


def rate(hardware: Hardware, bytes_per_element: int) -> float:
    """Peak FLOP/s of matrix products of a number format."""
    tflops = {1: hardware.tflops_fp8 or hardware.tflops, 2: hardware.tflops}.get(bytes_per_element, hardware.tflops_fp32)
    return tflops * 1e12


def memory_rate(hardware: Hardware) -> float:
    """Bytes per second that a memory-bound kernel reads and writes."""
    return hardware.memory_tb_s * 1e12 * hardware.memory_share


@lru_cache(maxsize=1 << 16)
def _product(m: int, n: int, k: int, batch: int, size: int, hardware: Hardware) -> tuple[float, float]:
    """Compute time and memory time of a product, seconds."""
    sms = hardware.multiprocessors
    per_sm = rate(hardware, size) * hardware.product_share / sms
    best = math.inf
    for rows, columns, share in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
        for split in (1, 2, 4, 8) if tiles < 2 * sms else (1,):  # few tiles: several multiprocessors share a sum
            waves = math.ceil(tiles * split / sms)
            depth = math.ceil(k / split / 32) * 32 + PROLOGUE * (1 if split == 1 else 2)
            best = min(best, waves * 2.0 * rows * columns * depth / (per_sm * share))
    if misaligned := [size * width % ALIGNED_BYTES for width in (n, k) if size * width % ALIGNED_BYTES]:
        rows = min(math.gcd(rest, ALIGNED_BYTES) for rest in misaligned)
        best *= next(factor for limit, factor in MISALIGNED.items() if rows >= limit)
        if batch > 1 and rows < 16:  # as slow as without tensor cores in four runs of BLOOM with heads of 108 columns
            best = max(best, 2.0 * m * n * k * batch / (rate(hardware, 4) * hardware.product_share))
    moved = size * batch * (m * k + k * n) + 2.0 * batch * m * n
    return best, moved / memory_rate(hardware)


def product_time(product: Product, hardware: Hardware) -> tuple[float, str]:
    """Return the time of a matrix product in seconds, and what bounds it: compute, memory or latency."""
    compute, memory = _product(product.m, product.n, product.k, product.batch, product.bytes_per_element, hardware)
    latency = hardware.kernel_us * 1e-6
    bound = "latency" if latency > max(compute, memory) else "memory" if memory > compute else "compute"
    return max(compute, memory) + latency, bound


def attention_time(call: AttentionCall, hardware: Hardware) -> float:
    """Return the time of a call of a flash kernel in seconds."""
    width = min(1.0, (call.head_dim / FULL_HEAD_DIM) ** WIDTH_POWER)
    # A multiprocessor computes a block of 128 queries of one head.
    blocks = call.batch * call.heads * math.ceil(call.queries / 128)
    filled = blocks / hardware.multiprocessors
    quantized = math.ceil(filled) / filled if filled < 8 else 1.0
    # The diagonal blocks of a causal mask are computed whole.
    diagonal = 1 + 128 / max(128, call.keys) if call.pairs < 1 else 1.0
    peak = rate(hardware, max(2, call.bytes_per_element)) * hardware.attention_share * width
    slower = BACKWARD_ATTENTION if call.phase == "backward" else 1.0
    compute = call.flops * diagonal * quantized * slower / peak
    memory = call.bytes / memory_rate(hardware)
    return max(compute, memory) + hardware.kernel_us * 1e-6 * call.ring


def elementwise_time(moved: float, hardware: Hardware) -> float:
    """Return the time in seconds of a memory-bound kernel that reads and writes this many bytes."""
    return moved / memory_rate(hardware) + hardware.kernel_us * 1e-6
