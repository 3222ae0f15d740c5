"""Matrix products that are fused with a collective (parallel.async_tensor), in the record of a step.

A rehearsal runs them one after the other: a gathering and then the product, or the product and then a reduction. On a GPU the ranks of a
group exchange a shard at a time while the products of the others run, so that the product of one shard is left without a collective beside
it: PyTorch's _pipelined_all_gather_and_consume and _pipelined_produce_and_all2all. The record is changed to that order.
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed import distributed_c10d

from pipeline.config.hardware import Hardware
from pipeline.planner.kernel_time import elementwise_time
from pipeline.rehearsal.record import Entry, StreamWait, Work

#: Namespace of the operators.
NAMESPACE = "symm_mem"


def overlapped(entries: list[Entry], ranks: int, hardware: Hardware) -> list[Entry]:
    """Return the record of one fused operator as it runs on GPUs.

    Args:
        entries: as the parts ran one after the other.
        ranks: of the group, at least 2.
    """
    works = [entry for entry in entries if isinstance(entry, Work)]
    sent = next((work for work in works if work.kind == "collective"), None)
    if sent is None or not any(work.kind == "product" for work in works):
        return entries
    gathers = sent.name == "all_gather"
    result: list[Entry] = []
    products: list[Work] = []
    has_sent = False
    for entry in entries:
        match entry:
            case Work(kind="product"):
                products.append(entry)
                result.append(replace(entry, seconds=entry.seconds / ranks))
            case Work(kind="kernel") if not gathers:
                pass  # the copy that puts the pieces one after the other: each product writes a piece of its own
            case StreamWait() if has_sent and entry.stream != sent.stream:
                result += [*([] if gathers else _others(products, ranks)), entry]
                if not gathers:
                    result.append(_sum(products[-1], sent, ranks, hardware))
            case _:
                has_sent = has_sent or entry is sent
                result.append(entry)
    return _with_products_before(result, _others(products, ranks)) if gathers else result


def ranks_of(name: str) -> int:
    """The number of ranks of a group, by its name."""
    return distributed_c10d._get_group_size_by_name(distributed_c10d.GroupName(name))


def _others(products: list[Work], ranks: int) -> list[Work]:
    """The products of all shards but one."""
    return [replace(product, seconds=product.seconds * (ranks - 1) / ranks, reads=(), writes=()) for product in products]


def _with_products_before(entries: list[Entry], products: list[Work]) -> list[Entry]:
    """Put products before the wait for the gathering, beside which they run."""
    sent = next(index for index, entry in enumerate(entries) if isinstance(entry, Work) and entry.kind == "collective")
    wait = next((index for index, entry in enumerate(entries) if index > sent and isinstance(entry, StreamWait)), sent + 1)
    return entries[:wait] + [replace(product, time=entries[sent].time) for product in products] + entries[wait:]


def _sum(product: Work, sent: Work, ranks: int, hardware: Hardware) -> Work:
    """The sum of the pieces of all ranks, of which each receives one from every other."""
    seconds = elementwise_time(sent.size * (1 + 1 / ranks), hardware)
    return replace(product, kind="kernel", name="sum of the pieces", seconds=seconds, reads=(), writes=())
