"""stage=plan with stage.search or stage.scaling: the fastest layouts, and the time of a step over the number of nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from pipeline.config.schema import RunConfig
from pipeline.config.stages import Plan as PlanConfig
from pipeline.errors import UserError
from pipeline.files import atomic_file
from pipeline.launch import job
from pipeline.planner.plan import hardware_of
from pipeline.planner.search import Choice, Found, Traces, search, why_slower

GB = 1e9
#: Layouts that are printed.
LINES = 10


def run(config: RunConfig, world_size: int) -> None:
    """Search and print.

    Raises:
        UserError: no layout is legal, or none fits.
    """
    stage = config.stage
    assert isinstance(stage, PlanConfig)
    hardware, traces = hardware_of(config), Traces()
    if stage.scaling:
        for line in scaling_lines(config, traces):
            print(line, flush=True)
        return
    found = search(config, world_size, hardware, traces)
    if not found.legal:
        rule = f"no layout of {world_size:,} ranks is legal with training.global_batch_size={config.training.global_batch_size}"
        raise UserError.of("cluster.nodes", config.cluster.nodes, rule, "choose a batch that is a multiple of the data ranks")
    if not found.choices:
        need = f"; the smallest layout needs {found.smallest.plan.estimate.memory.total / GB:.1f} GB" if found.smallest else ""
        rule = f"no layout fits in {hardware.memory_gb:.1f} GB{need}"
        raise UserError.of("cluster.nodes", config.cluster.nodes, rule, "use more nodes")
    print("\n".join(found_lines(found)))
    print("\nsubmit\n" + override_line(config, found.choices[0], world_size))
    if stage.out:
        with atomic_file(Path(stage.out), "w") as file:
            file.write(json.dumps([content(choice) for choice in found.choices], indent=1) + "\n")


def found_lines(found: Found) -> Iterator[str]:
    """Yield the best layouts with the reason why each loses, and the Pareto front of time and memory."""
    best = found.choices[0]
    counts = f"{found.legal:,} legal layouts, {found.fitting:,} may fit, {len(found.choices):,} of the simulated ones fit"
    yield f"{counts}; searched in {found.seconds:.1f} s"
    yield f"  {'step':>10}{'memory':>12}  {'loses by':<34}layout"
    for choice in found.choices[:LINES]:
        reason = "best" if choice is best else why_slower(choice, best)
        yield f"  {choice.step_time:>8.3f} s{gigabytes(choice)}  {reason:<34}{' '.join(choice.settings)}"
    yield "no other layout is faster with less memory (Pareto front)"
    for choice in found.front[:LINES]:
        yield f"  {choice.step_time:>8.3f} s{gigabytes(choice)}  {' '.join(choice.settings)}"


def gigabytes(choice: Choice) -> str:
    """The memory of the fullest rank."""
    return f"{choice.plan.estimate.memory.total / GB:>9.1f} GB"


def scaling_lines(config: RunConfig, traces: Traces) -> Iterator[str]:
    """Yield the strong-scaling curve: the best layout of 1, 2, 4, ... nodes with the same global batch."""
    stage, hardware, training = config.stage, hardware_of(config), config.training
    assert isinstance(stage, PlanConfig)
    tokens = stage.tokens or float(training.steps * training.global_batch_size * training.sequence_length)
    steps = tokens / (training.global_batch_size * training.sequence_length)
    yield f"best layout for {tokens:.3g} tokens at a global batch of {training.global_batch_size:,} sequences"
    yield f"  {'nodes':>6}{'step':>11}{'days':>10}{'node-hours':>13}{'efficiency':>12}  layout"
    first: float | None = None
    nodes = 1
    while nodes <= config.cluster.nodes:
        found = search(config, nodes * hardware.gpus_per_node, hardware, traces)
        if found.choices:
            best = found.choices[0]
            hours = steps * best.step_time / 3600
            first = first or hours * nodes
            yield (
                f"  {nodes:>6}{best.step_time:>9.3f} s{hours / 24:>10.2f}{hours * nodes:>13,.0f}{first / (hours * nodes):>12.1%}"
                f"  {' '.join(best.settings)}"
            )
        else:
            yield f"  {nodes:>6}  {'no layout fits' if found.legal else 'no layout is legal with this batch'}"
        nodes = config.cluster.nodes if nodes < config.cluster.nodes < 2 * nodes else 2 * nodes


def override_line(config: RunConfig, choice: Choice, world_size: int) -> str:
    """Return the sbatch line of a layout."""
    chosen = ("stage", "parallel.", "training.micro_batch_size", "training.activation_checkpointing")
    words = [word for word in HydraConfig.get().overrides.task if not word.startswith(chosen)]
    return job.sbatch_line(config.cluster, "pretrain", world_size, [*words, *choice.settings])


def content(choice: Choice) -> dict[str, object]:
    """A layout as JSON."""
    estimate = choice.plan.estimate
    return {
        "settings": list(choice.settings),
        "step_time_s": estimate.step_time,
        "causes_s": estimate.causes,
        "memory_bytes": {**asdict(estimate.memory), "total": estimate.memory.total},
    }
