"""The plan of a job: the traced operations of its model, and the prediction of its step on the hardware of its cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.config import hardware as hardware_files
from pipeline.config.hardware import Hardware
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.planner import ring_formula, site_correction
from pipeline.planner.communication import collective_time
from pipeline.planner.engine_model import engine_model
from pipeline.planner.estimate import Estimate, estimate
from pipeline.planner.kernel_time import product_time
from pipeline.planner.matrix_update import matrix_rounds, products
from pipeline.planner.operations import AttentionCall, Collective, Elementwise, Product
from pipeline.planner.planned_buckets import planned_buckets
from pipeline.planner.state_memory import state_format_of
from pipeline.planner.trace import Trace, hidden_bytes, trace


@dataclass(frozen=True)
class JobPlan:
    """A configuration with its trace and prediction."""

    config: RunConfig
    layout: Layout
    hardware: Hardware
    trace: Trace
    estimate: Estimate


@dataclass(frozen=True)
class OperationRow:
    """A line of the table of matrix products: all calls of one kind on the ranks of one pipeline, for a step.

    Attributes:
        name: weight, or kind of the other operations.
        phase: forward, backward, recompute or update.
        shape: m x n x k on a rank, with the number of products of a batch; empty for other operations.
        count: calls in a step.
        flops, bytes: of one call.
        time: seconds of one call.
        bound: compute, memory, latency or network.
    """

    name: str
    phase: str
    shape: str
    count: int
    flops: float
    bytes: float
    time: float
    bound: str


def hardware_of(config: RunConfig) -> Hardware:
    """Return the hardware of the configured cluster, corrected by its measured runs (cluster.correction).

    Raises:
        UserError: cluster.hardware is not set, or names no file; or cluster.correction cannot be read or is that of another GPU.
    """
    hardware, cluster = hardware_files.of_cluster(config.cluster), config.cluster
    if cluster.correction is None or cluster.hardware is None:
        return hardware
    return site_correction.apply(hardware, cluster.hardware, cluster.correction)


def plan(config: RunConfig, world_size: int, hardware: Hardware, traced: Trace | None = None) -> JobPlan:
    """Predict a step of a valid configuration.

    Args:
        traced: the trace of the configuration; traced here when None.
    """
    traced = traced or trace(config)
    layout = Layout.of(config, world_size)
    state_format = state_format_of(config, layout)
    predicted = estimate(
        traced,
        layout,
        hardware,
        state_format,
        hidden_bytes=hidden_bytes(config) * hidden_states(config),
        engine=engine_model(state_format),
    )
    return JobPlan(config, layout, hardware, traced, predicted)


def hidden_states(config: RunConfig) -> int:
    """Return the number of hidden states between two stages: encoder-decoders pass those of source and target."""
    return 2 if hasattr(config.model, "encoder_blocks") or config.model.objective == "encoder_decoder" else 1


def table(plan: JobPlan) -> list[OperationRow]:
    """Return the operations of a step on the ranks of one pipeline (all its stages), longest first.

    Collectives of data parallelism and of ring attention are listed with their own time; other operations run beside them.
    """
    rows: dict[tuple[str, str, str], OperationRow] = {}
    for row in (*_model_rows(plan), *_exchange_rows(plan), *_update_rows(plan)):
        key = row.name, row.phase, row.shape
        if old := rows.get(key):
            count = row.count + old.count
            moved, time = ((a * row.count + b * old.count) / count for a, b in ((row.bytes, old.bytes), (row.time, old.time)))
            row = replace(row, count=count, bytes=moved, time=time)
        rows[key] = row
    return sorted(rows.values(), key=lambda row: -row.time * row.count)


def _model_rows(plan: JobPlan) -> Iterator[OperationRow]:
    """Yield what the parts of the model execute, with the collectives inside of it."""
    engine = engine_model(state_format_of(plan.config))
    groups = engine.axis_groups(plan.layout, plan.hardware)
    parts = [part for stage in range(plan.layout.stage_count) for part in plan.trace.stage_parts(plan.layout, stage)]
    for name, uses in Counter(part.name for part in parts).items():
        count = uses * plan.layout.micro_batches
        part = plan.trace.parts[name]
        for operation in (*part.operations, *part.reference):
            _, time = engine.operation_time(operation, plan.hardware, groups)
            shape, flops, moved, bound = "", 0.0, operation.bytes, "memory"
            if isinstance(operation, Elementwise):
                label = "elementwise"
            elif isinstance(operation, Collective):
                label, bound = f"{operation.kind} ({operation.axis})", "network"
            elif isinstance(operation, AttentionCall):
                label, flops, bound = "attention", operation.flops, "compute"
                if ring_formula.is_unfused(operation):
                    label, bound, moved = "attention (unfused)", "memory", ring_formula.moved(operation)
                shape = f"{operation.batch}x{operation.heads} x {operation.queries} x {operation.keys} x {operation.head_dim}"
                if operation.sent:
                    sent = collective_time("send", operation.sent, groups["context"], plan.hardware)
                    yield OperationRow("send (context)", operation.phase, "", count, 0.0, operation.sent, sent, "network")
            else:
                label = operation.name.split(".", 2)[-1] if operation.name.startswith("blocks.") else operation.name or "(activations)"
                flops, (_, bound) = operation.flops, product_time(operation, plan.hardware)
                shape = _shape(operation)
            yield OperationRow(label, operation.phase, shape, count, flops, moved, time, bound)


def _exchange_rows(plan: JobPlan) -> Iterator[OperationRow]:
    """Yield the collectives of gradients and weights, and what is sent between pipeline stages."""
    config, layout, zero_stage = plan.config, plan.layout, plan.config.parallel.zero_stage
    engine = engine_model(state_format_of(config))
    groups = engine.axis_groups(layout, plan.hardware)
    experts = "data" if layout.expert == 1 else "data of experts"
    names = {"dense": "data", "data": experts, "tied_embedding": "tied embedding"}
    for axis, words in (("dense", ""), ("data", "" if layout.expert == 1 else " of experts")):
        names |= {f"{axis}_shards": f"ZeRO group{words}", f"{axis}_replicas": f"ZeRO replicas{words}"}
    for rank in range(layout.pipeline):
        buckets, sent = planned_buckets(plan.trace, layout, layout.stages(rank), zero_stage), (hidden_bytes(config), hidden_states(config))
        for exchange in engine.step_exchanges(buckets, layout, rank, zero_stage, *sent, reference=plan.trace.has_reference):
            collective = exchange.collective
            time = collective_time(collective.kind, collective.bytes, groups[collective.axis], plan.hardware)
            label = f"{collective.kind} ({names.get(collective.axis, collective.axis)})"
            yield OperationRow(label, collective.phase, "", exchange.count, 0.0, collective.bytes, time, "network")


def _update_rows(plan: JobPlan) -> Iterator[OperationRow]:
    """Yield the products of Newton-Schulz, of the rank of each pipeline stage that takes longest for them."""
    layout, state_format = plan.layout, state_format_of(plan.config)
    for rank in range(layout.pipeline):
        buckets = planned_buckets(plan.trace, layout, layout.stages(rank), state_format.zero_stage)
        for product, count in products(matrix_rounds(buckets, layout, state_format.zero_stage), state_format, plan.hardware).items():
            time, bound = product_time(product, plan.hardware)
            yield OperationRow(product.name, product.phase, _shape(product), count, product.flops, product.bytes, time, bound)


def _shape(product: Product) -> str:
    """The shape of matrix products, with their number in a batch."""
    size = f"{product.m} x {product.n} x {product.k}"
    return f"{product.batch} x {size}" if product.batch > 1 else size
