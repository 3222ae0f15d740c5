"""Faults of streams and lifetimes in real code, each beside its correct twin, recorded on the driver without a GPU; prints a line of JSON.

test_operations.py starts it and checks the line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.config import hardware
from pipeline.layers.attention_kernel import automatic
from pipeline.layers.mask import Mask
from pipeline.parallel import rehearsed_group
from pipeline.rehearsal.analysis import Findings, analyze
from pipeline.rehearsal.operations import recorded
from pipeline.rehearsal.record import Entry, Work

GPU = hardware.load("h100")


def missing_wait(planted: bool) -> None:
    side, x = torch.cuda.Stream(), torch.ones(1 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.mul(2)  # FIRST
    if not planted:
        torch.cuda.current_stream().wait_stream(side)
    y.sum()  # SECOND
    torch.cuda.current_stream().wait_stream(side)


def freed_buffer(planted: bool) -> None:
    side, x = torch.cuda.Stream(), torch.ones(1 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()  # FIRST
    if not planted:
        x.record_stream(side)
    address = x.data_ptr()
    del x
    again = torch.empty(1 << 20, device="cuda")
    assert again.data_ptr() == address
    again.fill_(1)  # SECOND


def late_gather(planted: bool) -> None:
    part, whole = torch.ones(1 << 18, device="cuda"), torch.empty(1 << 20, device="cuda")
    if planted:
        whole.sum()  # FIRST
    work = dist.all_gather_into_tensor(whole, part, async_op=True)  # SECOND
    work.wait()
    whole.sum()


def host_wait(planted: bool) -> None:
    loss = torch.ones(1 << 20, device="cuda").sum()
    if planted:
        loss.item()  # FIRST


def host_wait_list(planted: bool) -> None:
    counts = torch.ones(8, device="cuda")
    if planted:
        counts.tolist()  # FIRST


def host_wait_index(planted: bool) -> None:
    x = torch.ones(1 << 10, device="cuda")
    positive = x > 0
    if planted:
        x[positive].sum()  # FIRST
    x.where(positive, 0).sum()


def host_wait_nonzero(planted: bool) -> None:
    x = torch.ones(1 << 10, device="cuda")
    if planted:
        x.nonzero()  # FIRST


def host_wait_copy(planted: bool) -> None:
    x = torch.ones(1 << 10, device="cuda")
    kept = torch.empty(1 << 10, pin_memory=True)
    kept.copy_(x, non_blocking=True)
    if planted:
        x.cpu()  # FIRST


def host_wait_device(planted: bool) -> None:
    torch.ones(1 << 10, device="cuda").sum()
    if planted:
        torch.cuda.synchronize()  # FIRST


HOST_WAITS = (host_wait, host_wait_list, host_wait_index, host_wait_nonzero, host_wait_copy, host_wait_device)


def observed(scenario: Callable[[bool], None], planted: bool) -> tuple[list[Entry], Findings]:
    with recorded(GPU, {(0, 1, 2, 3): "data"}, Path(__file__).parent) as recorder:
        rehearsed_group.listen(recorder.collective)
        scenario(planted)
        rehearsed_group.listen(None)
    return recorder.entries, analyze(recorder.entries, GPU)


def products_of_a_layer() -> list[tuple[str, str]]:
    layer, x = nn.Linear(64, 32, bias=False, device="cuda"), torch.ones(8, 64, device="cuda", requires_grad=True)

    def step(_: bool) -> None:
        layer(x).sum().backward()  # LAYER

    entries, _ = observed(step, False)
    return [(entry.name, entry.site) for entry in entries if isinstance(entry, Work) and entry.kind == "product"]


class Doubled(torch.autograd.Function):
    """A function of autograd that saves its result, and frees memory after that."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        y = x + x
        context.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return context.saved_tensors[0] * gradient


def recomputed_products() -> list[str]:
    """Products of a step that recomputes two of them and Doubled, after which nothing is needed."""
    first, second, x = (torch.ones(64, 64, device="cuda", requires_grad=True) for _ in range(3))

    def step(_: bool) -> None:
        checkpoint(lambda: Doubled.apply(x @ first) @ second, use_reentrant=False).sum().backward()

    entries, _ = observed(step, False)
    return [entry.name for entry in entries if isinstance(entry, Work) and entry.kind == "product"]


def document_attention() -> list[tuple[str, int]]:
    """(operator, whether it writes as much as the scores would be) of attention with a document mask, forward and backward."""
    q = torch.ones(1, 2, 512, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = Mask(causal=True, documents=torch.zeros(1, 512, device="cuda", dtype=torch.int32))

    def step(_: bool) -> None:
        automatic(q, q, q, mask).sum().backward()

    entries, _ = observed(step, False)
    return [
        (entry.name, sum(access.end - access.begin for access in entry.writes) >= 2 * 512 * 512)
        for entry in entries
        if isinstance(entry, Work) and entry.kind == "attention"
    ]


def summary(scenario: Callable[[bool], None], planted: bool) -> dict[str, Any]:
    _, found = observed(scenario, planted)
    return {
        "races": [[race.kind, race.first[1], race.second[1]] for race in found.races],
        "waits": [[wait.site, wait.count] for wait in found.waits],
    }


if __name__ == "__main__":
    rehearsed_group.initialize(0, 4)
    scenarios = (missing_wait, freed_buffer, late_gather, *HOST_WAITS)
    result: dict[str, Any] = {one.__name__: [summary(one, planted) for planted in (False, True)] for one in scenarios}
    print(
        json.dumps({**result, "products": products_of_a_layer(), "recomputed": recomputed_products(), "documents": document_attention()}),
        flush=True,
    )
    os._exit(0)  # a thread of autograd may still end, which ends the process with an error while Python is finalized
