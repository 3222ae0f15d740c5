"""Search for the layout with the shortest step among all that are legal and fit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from operator import attrgetter
from typing import Any

from pipeline.common.progress import Progress
from pipeline.config.hardware import Hardware
from pipeline.config.layout import Layout, may_compile
from pipeline.config.parallel import ParallelConfig
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig, StageConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.planner.engine_model import engine_model
from pipeline.planner.operations import TracedPart
from pipeline.planner.plan import JobPlan, plan
from pipeline.planner.planned_buckets import PlannedBucket
from pipeline.planner.state_memory import model_state, state_format_of
from pipeline.planner.trace import Trace, trace

#: Micro-batches, recomputation and stages per rank that are tried.
MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTATION = ("none", "selective", "full")
CHUNKS = (2, 3, 4, 6, 8)
#: Candidates whose schedule is simulated, best bounds first.
SIMULATED = 150
#: Fastest pipelines that are also simulated with stages of equal FLOPs.
BALANCED = 10
#: Share of the memory that a chosen layout may need: predictions of memory are a few percent off, and a job that runs out of it is lost.
USABLE = 0.92
#: Keys that a search chooses.
CHOSEN = (
    *("parallel." + name for name in ("tensor", "pipeline", "context", "context_kind", "expert", "zero_stage", "schedule")),
    *("parallel." + name for name in ("stages_per_rank", "balance", "layers_per_stage")),
    "training.micro_batch_size",
    "training.activation_checkpointing",
)
#: Sequences from this length on are also split over context ranks.
LONG = 16384


@dataclass(frozen=True)
class Choice:
    """A candidate layout with its prediction.

    Attributes:
        plan: configuration, layout and prediction.
        settings: the keys that differ from the configuration that was searched from, as on the command line.
    """

    plan: JobPlan
    settings: tuple[str, ...]

    @property
    def step_time(self) -> float:
        """Seconds."""
        return self.plan.estimate.step_time


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        choices: simulated layouts that need at most USABLE of the memory, or all of it if there is no other, fastest first.
        fitting: number of these that fit by the quick bound of their memory.
        smallest: the simulated layout with the least memory, if none fits.
        seconds: duration of the search.
    """

    choices: list[Choice]
    legal: int
    fitting: int
    smallest: Choice | None
    seconds: float

    @property
    def front(self) -> list[Choice]:
        """The layouts that no other one beats in both time and memory, fastest first."""
        front: list[Choice] = []
        for choice in self.choices:
            if not front or choice.plan.estimate.memory.total < front[-1].plan.estimate.memory.total:
                front.append(choice)
        return front


@dataclass
class Traces:
    """Traces and part times by what they depend on, shared by searches over one model."""

    traces: dict[str, Trace] = field(default_factory=dict)
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def get(self, config: RunConfig) -> Trace:
        """The trace of a configuration."""
        key = self.key(config)
        if key not in self.traces:
            self.traces[key] = trace(config)
        return self.traces[key]

    def key(self, config: RunConfig) -> str:
        """What a trace depends on."""
        parallel, training = config.parallel, config.training
        sizes = parallel.tensor, parallel.context, parallel.context_kind, parallel.expert, parallel.folded, parallel.sequence_parallel
        batch = training.micro_batch_size, training.sequence_length, training.activation_checkpointing
        tuned = config.lora, training.frozen, training.objective
        return f"{config.model} {config.precision} {sizes} {batch} {may_compile(config.training, config.parallel)} {tuned}"

    def block_and_ends(self, config: RunConfig, layout: Layout, hardware: Hardware) -> tuple[float, float]:
        """Seconds of a micro-batch in all blocks, and in embedding and head."""
        node = hardware.gpus_per_node
        key = f"{self.key(config)} {hardware.name} {node} {config.parallel.zero_stage == 3}"
        if key not in self.sums:
            traced, engine = self.get(config), engine_model(state_format_of(config))
            groups = engine.axis_groups(layout, hardware)
            times = {name: engine.part_time(part, hardware, groups).total for name, part in traced.parts.items()}
            for name, part in traced.parts.items():
                times[name] += sum(engine.operation_time(operation, hardware, groups)[1] for operation in part.reference)
            self.sums[key] = sum(times[kind] for kind in traced.kinds), times["embed"] + times["head"]
        return self.sums[key]


def best_layout(config: RunConfig, nodes: int, hardware: Hardware, traces: Traces | None = None) -> Choice | None:
    """Return the fastest layout that is legal and fits on a number of nodes; None if there is none.

    A pure function: model, batch, sequence length, optimizer and precision are those of the configuration, its layout, micro-batch and
    recomputation are chosen.

    Args:
        config: a configuration; its values of the keys CHOSEN are not read.
        nodes: number of nodes, each with `hardware.gpus_per_node` ranks.
        traces: of earlier calls for the same model.
    """
    result = search(config, nodes * hardware.gpus_per_node, hardware, traces)
    return result.choices[0] if result.choices else None


def nearest(config: RunConfig, world_size: int, hardware: Hardware) -> Choice | None:
    """Return the fastest of the layouts that fit with the fewest other values of the keys CHOSEN than the configuration.

    More distant ones are only looked at if none of the nearer ones fits, since a search over all layouts of a large job takes minutes. If
    none fits, the one with the least memory; None if none is legal.
    """

    def others(candidate: RunConfig) -> int:
        return sum(attrgetter(key)(candidate) != attrgetter(key)(config) for key in CHOSEN)

    traces, smallest = Traces(), []
    for _, group in groupby(sorted(_candidates(config, world_size, hardware), key=others), key=others):
        result = search(config, world_size, hardware, traces, list(group))
        if result.choices:
            return result.choices[0]
        smallest += [result.smallest] if result.smallest else []
    return min(smallest, key=lambda choice: choice.plan.estimate.memory.total, default=None)


def search(
    config: RunConfig, world_size: int, hardware: Hardware, traces: Traces | None = None, candidates: list[RunConfig] | None = None
) -> SearchResult:
    """Search over tensor, pipeline, context, expert and data sizes, schedules, ZeRO stages, micro-batches and recomputation.

    Legal is what config/rules accepts. Candidates are ordered by a bound of their time from one traced micro-batch, the bubble of an
    even pipeline, and the bytes of gradients; the best ones are simulated, and the fastest pipelines also with equal numbers of layers.
    `candidates` are all layouts unless they are given.
    """
    started, traces = time.perf_counter(), traces or Traces()
    if config.stage.name not in TRAINING_STAGES:
        config = replace(config, stage=StageConfig(name="pretrain"))  # the rules are those of the job
    limit = hardware.memory_gb * 1e9
    bounded: list[tuple[float, int, RunConfig]] = []
    tight: list[tuple[float, int, RunConfig]] = []
    candidates = list(_candidates(config, world_size, hardware)) if candidates is None else candidates
    with Progress(len(candidates), "search", "layouts", every=10) as progress:
        for index, candidate in enumerate(candidates):
            if not check.training_violations(candidate, world_size):
                layout = Layout.of(candidate, world_size)
                memory = _memory_bound(traces.get(candidate), candidate, layout)
                if memory <= USABLE * limit:
                    bounded.append((_time_bound(candidate, layout, hardware, traces), index, candidate))
                else:
                    tight.append((memory, index, candidate))
            progress.advance()
    bounded.sort(key=lambda item: item[:2])
    chosen = bounded[:SIMULATED] or sorted(tight, key=lambda item: item[:2])[:1]
    with Progress(len(chosen), "search: simulated", "layouts", every=10) as progress:
        choices = _simulated([candidate for _, _, candidate in chosen], world_size, hardware, traces, progress)
        piped = [choice.plan.config for choice in choices if choice.plan.layout.pipeline > 1][:BALANCED]
        piped = [candidate for candidate in piped if len(set(Layout.of(candidate, world_size).blocks)) > 1]
        even = [replace(candidate, parallel=replace(candidate.parallel, balance="layers")) for candidate in piped]
        progress.extend(len(even))
        choices += _simulated(even, world_size, hardware, traces, progress)
    choices.sort(key=lambda choice: choice.step_time)
    roomy = [choice for choice in choices if choice.plan.estimate.memory.total <= USABLE * limit]
    fitting = roomy or [choice for choice in choices if choice.plan.estimate.fits]
    smallest = min(choices, key=lambda choice: choice.plan.estimate.memory.total) if choices and not fitting else None
    return SearchResult(fitting, len(bounded) + len(tight), len(bounded), smallest, time.perf_counter() - started)


def _simulated(candidates: list[RunConfig], world_size: int, hardware: Hardware, traces: Traces, progress: Progress) -> list[Choice]:
    """Return the predictions of some candidates, fastest first."""
    choices = []
    for candidate in candidates:
        choices.append(Choice(plan(candidate, world_size, hardware, traces.get(candidate)), settings_of(candidate)))
        progress.advance()
    return sorted(choices, key=lambda choice: choice.step_time)


def why_slower(choice: Choice, best: Choice) -> str:
    """Return the cause for which a layout loses most time to the best one."""
    ours, theirs = choice.plan.estimate.causes, best.plan.estimate.causes
    lost = {cause: ours.get(cause, 0.0) - theirs.get(cause, 0.0) for cause in ours.keys() | theirs.keys()}
    cause = max(sorted(lost), key=lambda name: lost[name])
    return f"{cause} +{lost[cause]:.3f} s" if lost[cause] > 0 else "equal"


def _candidates(config: RunConfig, world_size: int, hardware: Hardware) -> Iterator[RunConfig]:
    """Yield configurations whose sizes divide; tensor ranks stay within a node."""
    training = config.training
    for axes in _axes(config, world_size, hardware):
        data = world_size // (axes["tensor"] * axes["context"] * axes["pipeline"])
        batches = [micro for micro in MICRO_BATCHES if training.global_batch_size % (data * micro) == 0]
        # More than ZeRO 1 would reduce every micro-batch, which only pays where the memory requires it. ZeRO 0 sends as much as ZeRO 1.
        for (schedule, chunks), micro, recompute, zero in product(_schedules(axes["pipeline"]), batches, RECOMPUTATION, (1, 2, 3)):
            parallel = replace(config.parallel, **axes, schedule=schedule, stages_per_rank=chunks, zero_stage=zero)
            parallel = replace(parallel, balance="flops", layers_per_stage=[])
            batch = replace(training, micro_batch_size=micro, activation_checkpointing=recompute)
            yield replace(config, parallel=parallel, training=batch)


def _axes(config: RunConfig, world_size: int, hardware: Hardware) -> Iterator[dict[str, Any]]:
    """Yield the sizes of the axes other than data, as keys of `parallel`."""
    experts = getattr(config.model, "experts", 0)
    contexts = [(1, config.parallel.context_kind)]
    if config.training.sequence_length >= LONG:
        contexts += product((2, 4, 8, 16), ("ring", "ulysses"))
    for tensor, (context, kind), expert in product(_divisors(hardware.gpus_per_node), contexts, _divisors(experts) if experts else (1,)):
        if world_size % (tensor * context * expert):
            continue
        for pipeline in _divisors(world_size // (tensor * context * expert)):
            if pipeline <= config.model.layers:
                yield {"tensor": tensor, "context": context, "context_kind": kind, "expert": expert, "pipeline": pipeline}


def _schedules(pipeline: int) -> list[tuple[str, int | None]]:
    """The schedules of a number of pipeline ranks, with the stages per rank."""
    return [("1f1b", None)] if pipeline == 1 else [("1f1b", None), ("zbv", None), *(("interleaved", chunks) for chunks in CHUNKS)]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _memory_bound(traced: Trace, config: RunConfig, layout: Layout) -> float:
    """Bytes that the first pipeline rank needs at least: state and activations in flight."""
    per_rank = len(traced.kinds) / layout.pipeline
    blocks = [traced.parts[kind] for kind in traced.kinds]

    def elements(axis: str) -> int:
        trained = {name: [w for w in part.weights if w.axis == axis and not w.stored] for name, part in traced.parts.items()}
        return on_rank({name: sum(w.elements for w in weights) for name, weights in trained.items()})

    def on_rank(sums: dict[str, int]) -> int:
        return round(per_rank * sum(sums[kind] for kind in traced.kinds) / len(traced.kinds)) + sums["embed"]

    axes = {"dense": layout.zero_sizes(experts=False)[0], "data": layout.zero_sizes(experts=True)[0]}
    weights = [PlannedBucket(axis, ranks, elements(axis), muon=True) for axis, ranks in axes.items()]
    in_flight = min(layout.micro_batches, layout.pipeline) if layout.pipeline > 1 else 1
    activations = in_flight * per_rank * sum(block.saved for block in blocks) / len(blocks)

    def stored(part: TracedPart) -> int:
        sharded = config.parallel.zero_stage == 3
        return round(sum(w.stored / (axes[w.axis] if sharded and w.sharded else 1) for w in part.weights))

    frozen = on_rank({name: stored(part) for name, part in traced.parts.items()})
    return model_state(weights, state_format_of(config, layout)).total + activations + frozen


def _time_bound(config: RunConfig, layout: Layout, hardware: Hardware, traces: Traces) -> float:
    """Seconds of a step with an even pipeline, with the bytes of ZeRO 2 and 3 beside the computation."""
    blocks, ends = traces.block_and_ends(config, layout, hardware)
    micro, stages = layout.micro_batches, layout.pipeline
    rank = blocks / stages + (ends if stages == 1 else max(0.0, ends - blocks / stages / layout.stages_per_rank))
    work = micro * rank + (stages - 1) / layout.stages_per_rank * blocks / stages
    traced = traces.get(config)
    parameters = sum(traced.parts[kind].trained for kind in traced.kinds) / stages
    rounds = {1: 1, 2: micro, 3: 3 * micro}[config.parallel.zero_stage]
    network = hardware.network_gb_s * 1e9 * hardware.network_share * max(1, hardware.gpus_per_node // layout.tensor)
    within = hardware.link_gb_s * 1e9 * hardware.link_share
    group = layout.zero_sizes(experts=False)[0] * layout.tensor if layout.zero_block else layout.world_size
    rate = network if group > hardware.gpus_per_node else within
    return max(work, rounds * 3 * parameters / rate)


def settings_of(config: RunConfig) -> tuple[str, ...]:
    """The layout as settings of the command line."""
    parallel, training, default = config.parallel, config.training, ParallelConfig()
    names = ["tensor", "pipeline", "context", "expert", "zero_stage", "zero_group", *(["context_kind"] if parallel.context > 1 else [])]
    names = [
        name
        for name in (*names, "schedule", "stages_per_rank", "balance")
        if name in ("zero_stage", "context_kind") or getattr(parallel, name) != getattr(default, name)
    ]
    words = [*(f"parallel.{name}={getattr(parallel, name)}" for name in names), f"training.micro_batch_size={training.micro_batch_size}"]
    recomputed = training.activation_checkpointing
    return (*words, *([] if recomputed == "none" else [f"training.activation_checkpointing={recomputed}"]))
